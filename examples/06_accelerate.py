# %% [markdown]
# # Train with Hugging Face Accelerate
# This is a plain training loop. `accelerate launch examples/06_accelerate.py` runs it on the devices and in the
# precision that you chose with `accelerate config`. Needs `pip install accelerate`.

# %%
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from dilated_attention_pytorch import LongNetLM, branches_for

set_seed(0)
TOKENS = 256
accelerator = Accelerator(gradient_accumulation_steps=2)

# %% [markdown]
# Each row counts up modulo 32, by 1, 2 or 3.

# %%
steps = torch.randint(1, 4, (64, 1))
rows = (torch.randint(32, (64, 1)) + steps * torch.arange(TOKENS + 1)) % 32
loader = DataLoader(TensorDataset(rows), batch_size=8, shuffle=True)

# %%
segment_lengths, dilation_rates = branches_for(TOKENS, heads=4, shortest=64, is_causal=True)
model = LongNetLM(
    vocab_size=32, d_model=32, num_heads=4, num_layers=2,
    segment_lengths=segment_lengths, dilation_rates=dilation_rates,
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

# %%
for epoch in range(1, 11):
    for (tokens,) in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch:2}: loss {loss:.3f}")

# %% [markdown]
# `unwrap_model` returns the LongNet without Accelerate's wrapper.

# %%
model = accelerator.unwrap_model(model).eval()
said = model.generate(torch.tensor([[0, 3, 6, 9, 12, 15]], device=accelerator.device), 8, temperature=0)
accelerator.print("0, 3, 6, 9, 12, 15 continues with", said[0, 6:].tolist())
