# %% [markdown]
# # A drop-in for `nn.MultiheadAttention`
# This example replaces the attention of a model built from PyTorch's layers. The model keeps its weights and can then
# read longer sequences.

# %%
from copy import deepcopy
from time import perf_counter

import torch
from torch import nn

from dilated_attention_pytorch import MultiheadDilatedAttention, branches_for, replace_attention

torch.manual_seed(0)

# %% [markdown]
# ## One layer
# `MultiheadDilatedAttention` has the call of `nn.MultiheadAttention(batch_first=True)`. `max_length` chooses segments
# and dilation rates that connect all tokens of a sequence of that length. The module does not return attention weights,
# because their memory grows with the square of the length.

# %%
x = torch.randn(1, 3_000, 64)  # (batch, tokens, features)
attention = MultiheadDilatedAttention(64, 4, max_length=3_000)
out, weights = attention(x, x, x, is_causal=True)
print(f"one layer: {tuple(x.shape)} -> {tuple(out.shape)}, weights: {weights}")
print(f"segments {attention.segment_lengths}, rates {attention.dilation_rates}")

# %% [markdown]
# ## A whole model
# `replace_attention` replaces every `nn.MultiheadAttention` in a model and keeps its weights. With one segment over all
# tokens and rate 1, dilated attention is dense attention, so the outputs are equal.

# %%
layer = nn.TransformerEncoderLayer(64, 4, dim_feedforward=128, batch_first=True, dropout=0.0)
dense = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
same = replace_attention(deepcopy(dense), [3_000], [1])
with torch.no_grad():
    print(f"largest difference with one dense segment: {(dense(x) - same(x)).abs().max():.1e}")

# %% [markdown]
# ## Longer sequences
# With these branches, the time of dilated attention grows about linearly with the length. The time of dense attention
# grows with its square. Weights trained with dense attention need fine-tuning after this switch.

# %%
branches = branches_for(4_096, heads=4, shortest=256)
dilated = replace_attention(deepcopy(dense), *branches)
print(f"segments {branches[0]}, rates {branches[1]}")
for tokens in (1_024, 2_048, 4_096):
    x = torch.randn(1, tokens, 64)
    seconds = []
    for model in (dense, dilated):
        with torch.no_grad():
            start = perf_counter()
            model(x)
            seconds.append(perf_counter() - start)
    print(f"{tokens:5,} tokens: dense {seconds[0]:5.2f} s, dilated {seconds[1]:5.2f} s")
