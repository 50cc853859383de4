# %% [markdown]
# # Classify long sequences
# Each sequence has up to 1,024 rows of noise. 40 of these rows also contain a signal, whose kind is the class. Rows may
# be any vectors: tiles of a slide, windows of a genome, frames of a video. `dna.py` has a harder task, in which the
# order of two distant stretches is the class.

# %%
import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention_pytorch import LongNetEncoder, branches_for

torch.manual_seed(0)
TOKENS, FEATURES, CLASSES = 1_024, 16, 4
signals = 2 * torch.randn(CLASSES, FEATURES)


def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences `(count, TOKENS, FEATURES)`, of which the first `lengths` rows are valid, and their classes."""
    x = torch.randn(count, TOKENS, FEATURES)
    lengths = torch.randint(TOKENS // 2, TOKENS + 1, (count,))
    labels = torch.randint(CLASSES, (count,))
    for row, length, label in zip(x, lengths, labels):
        start = int(torch.randint(int(length) - 40, ()))
        row[start : start + 40] += signals[label]
    return x, lengths, labels


# %% [markdown]
# `LongNetEncoder` makes one prediction per sequence. Information does not cross the border of the longest segment, so
# `branches_for` makes that segment as long as the sequence. By default, the first segments have 2,048 tokens, which is
# longer than these sequences. `shortest=128` makes them shorter.

# %%
segment_lengths, dilation_rates = branches_for(TOKENS, heads=4, shortest=128)
print(f"segments {segment_lengths}, rates {dilation_rates}")
model = LongNetEncoder(
    input_dim=FEATURES, d_model=32, num_heads=4, num_layers=1, num_classes=CLASSES, pooling="attention",
    segment_lengths=segment_lengths, dilation_rates=dilation_rates,
)  # fmt: skip
print(f"{sum(p.numel() for p in model.parameters()):,} parameters")

# %% [markdown]
# `seqlens` are the lengths of padded rows. To avoid padding, pack all sequences into one row and pass `cu_seqlens`.

# %%
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(1, 41):
    x, lengths, labels = draw(8)
    loss = F.cross_entropy(model(x, seqlens=lengths), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss:.3f}")

# %%
model.eval()
with torch.no_grad():
    x, lengths, labels = draw(40)
    right = (model(x, seqlens=lengths).argmax(1) == labels).float().mean()
print(f"{right:.0%} of 40 new sequences are classified correctly; a guess is right in {1 / CLASSES:.0%}")
