# %% [markdown]
# # Attention maps
# `attention_map` returns the exact attention weights of chosen rows (query tokens), in every layer and head of a
# trained model. It needs no N x N tensor. This example draws all 160 rows of a short text. Needs
# `pip install matplotlib`.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.colors import LogNorm

from dilated_attention_pytorch import LongNetLM, attention_map, branches_for

torch.manual_seed(0)
TOKENS = 160
period = b"She sells sea shells by the sea shore. "
text = torch.tensor(list(period * 20))

# %% [markdown]
# Train a small model. The text repeats itself, so the model learns to attend to earlier tokens.

# %%
segment_lengths, dilation_rates = branches_for(TOKENS, heads=4, shortest=32, is_causal=True)
model = LongNetLM(
    vocab_size=256,
    d_model=64,
    num_heads=4,
    num_layers=2,
    segment_lengths=segment_lengths,
    dilation_rates=dilation_rates,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for _ in range(40):
    rows = torch.stack([text[start : start + TOKENS + 1] for start in torch.randint(len(text) - TOKENS, (4,))])
    loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"segments {segment_lengths}, rates {dilation_rates}, loss {loss:.3f}")

# %% [markdown]
# The map is `(layers, rows, heads, keys)`. The weights of a row in a head add up to 1. Memory grows with the number of
# rows, so choose few rows of a long text.

# %%
tokens = text[None, :TOKENS]
weights = attention_map(model.eval(), tokens, rows=range(TOKENS))
print(f"map: {tuple(weights.shape)}")
for head, row in enumerate(weights[1, -1]):
    best = row.topk(3).indices.sort().values.tolist()
    print(f"layer 2, head {head}: row {TOKENS - 1} sees {int((row > 0).sum())} keys, most of all {best}")

# %% [markdown]
# Draw the second layer. Each head reads its own grid of the long segments. A row does not see the grey keys.

# %%
figure, axes = plt.subplots(1, 4, figsize=(13, 3.9), sharey=True, layout="constrained")
for head, plot in enumerate(axes):
    seen = weights[1, :, head].masked_fill(weights[1, :, head] == 0, torch.nan)
    image = plot.imshow(seen, cmap="viridis_r", norm=LogNorm(1e-3, 1), interpolation="nearest")
    plot.set_facecolor("#e0e3e6")
    plot.set(title=f"head {head}", xlabel="key", xticks=range(0, TOKENS, 32), yticks=range(0, TOKENS, 32))
axes[0].set_ylabel("row (query)")
figure.colorbar(image, ax=axes, label="attention weight", extend="min", pad=0.01)
figure.suptitle("Attention weights of the second layer")
figure.savefig("attention_maps.png", dpi=120)
print("wrote attention_maps.png")
