# %% [markdown]
# # Train a language model, save it, and generate
# A byte-level model learns a small text by heart and continues it. `./run train --data FOLDER` trains on your own
# texts, with checkpoints, several GPUs and reports.

# %%
import tempfile

import torch
import torch.nn.functional as F

from dilated_attention_pytorch import LongNetLM, branches_for

torch.manual_seed(0)
text = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
data = torch.tensor(list((text * 12).encode()))
TOKENS = 512

# %% [markdown]
# `is_causal=True` makes two branches of rate 1. Every token then depends on every earlier one within three layers.

# %%
segment_lengths, dilation_rates = branches_for(TOKENS, heads=4, shortest=64, is_causal=True)
print(f"segments {segment_lengths}, rates {dilation_rates}")
model = LongNetLM(
    vocab_size=256,
    d_model=64,
    num_heads=4,
    num_layers=2,
    segment_lengths=segment_lengths,
    dilation_rates=dilation_rates,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

# %%
for step in range(1, 41):
    starts = torch.randint(len(data) - TOKENS, (4,))
    rows = torch.stack([data[start : start + TOKENS + 1] for start in starts])
    loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step:2}: loss {loss:.3f}")

# %% [markdown]
# A saved model is a folder with `config.json` and `model.safetensors`. `generate` uses a cache that does not grow with
# the text, so every token takes about the same time.

# %%
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    model = LongNetLM.from_pretrained(folder).eval()
prompt = torch.tensor([list(b"It was the best of")])
said = model.generate(prompt, 80, temperature=0)[0]
print("generated:", bytes(said.tolist()).decode(errors="replace"))
print(f"the cache takes {sum(cache.nbytes for cache in model.new_cache(batch=1)):,} bytes for a text of any length")
