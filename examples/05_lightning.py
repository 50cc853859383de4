# %% [markdown]
# # Train with Lightning
# All models are plain `nn.Module`s, so you only need a `LightningModule` around one.
# Needs `pip install lightning`.

# %%
import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from dilated_attention_pytorch import LongNetLM, branches_for

L.seed_everything(0, verbose=False)
TOKENS = 256

# %% [markdown]
# The data are 32 windows on a text, as bytes, each with the byte that follows it.

# %%
text = torch.tensor(list(b"Call me Ishmael. Some years ago, never mind how long precisely, I went to sea. " * 20))
rows = torch.stack([text[start : start + TOKENS + 1] for start in torch.randint(len(text) - TOKENS, (32,))])
loader = DataLoader(TensorDataset(rows), batch_size=4, shuffle=True)


# %%
class LitLongNet(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        segment_lengths, dilation_rates = branches_for(TOKENS, heads=4, shortest=64, is_causal=True)
        self.model = LongNetLM(
            vocab_size=256, d_model=64, num_heads=4, num_layers=2,
            segment_lengths=segment_lengths, dilation_rates=dilation_rates,
        )  # fmt: skip

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (tokens,) = batch
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        print(f"epoch {self.current_epoch + 1}: loss {self.trainer.callback_metrics['loss']:.3f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


# %% [markdown]
# On GPUs, use `accelerator="gpu", devices=8, precision="bf16-mixed"`. If a sequence is too long for one GPU, use
# `parallelize` instead: see `07_two_ranks.py`.

# %%
trainer = L.Trainer(
    accelerator="cpu", max_epochs=5, log_every_n_steps=1,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(LitLongNet(), loader)
