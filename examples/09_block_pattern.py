# %% [markdown]
# # A block pattern of your own
# A block-sparse pattern computes only some tiles (rows x keys) of each branch. `SparsePatternConfig` builds it from
# three parts: a window around each row, the first tokens of each segment, and an order of the other tiles. It keeps
# tiles in this order, up to the share `sparsity_ratio`.

# %%
import torch
from torch import Tensor

from dilated_attention_pytorch import BlockSparseRingMultiheadDilatedAttention, SparsePatternConfig, dilated_attention

torch.manual_seed(0)
TOKENS, BLOCK = 256, 16
patterns = {
    "window": SparsePatternConfig("local_window", 0.2, BLOCK),
    "window + first": SparsePatternConfig("global_local", 0.25, BLOCK, global_tokens=16),
    "window + first + random": SparsePatternConfig("random", 0.35, BLOCK, local_window_size=16, global_tokens=16),
    "powers of two": SparsePatternConfig("dilated_sparse", 0.35, BLOCK),
}

# %% [markdown]
# ## Who sees whom
# With equal scores, a row gives the same weight to all keys that it sees. If the value of key `j` is the `j`-th unit
# vector, the output of a row is the list of its weights. This example has one branch: a segment over the whole
# sequence with rate 1. With several branches, each keeps its own tiles.


# %%
def seen_by(config: SparsePatternConfig) -> Tensor:
    """`(TOKENS, TOKENS)` bool: whether each row sees each key."""
    equal, values = torch.zeros(1, TOKENS, 1, TOKENS), torch.eye(TOKENS)[None, :, None]
    return dilated_attention(equal, equal, values, [TOKENS], [1], sparse_config=config)[0, :, 0] > 0


seen = {name: seen_by(config) for name, config in patterns.items()}
print("".join(f"{name:26}" for name in patterns))
for row in range(0, TOKENS, BLOCK):
    print(
        "".join(f"{''.join('#' if one[row, j] else '.' for j in range(0, TOKENS, BLOCK)):26}" for one in seen.values())
    )

# %% [markdown]
# ## How far it reaches
# After one layer, a row depends on the keys that it sees. After two layers, it also depends on the keys that those
# tokens see, and so on. Give a model at least as many layers as its pattern needs to connect all tokens.

# %%
for name, once in seen.items():
    reached, layers = once, 1
    while not reached.all() and layers < 20:
        reached, layers = (once.float() @ reached.float()) > 0, layers + 1
    needs = f"{layers} layers connect all tokens" if reached.all() else "20 layers do not connect all tokens"
    print(f"{name:24} computes {once.float().mean():.0%} of all pairs; {needs}")

# %% [markdown]
# ## Use it in a module
# `Ring` in the name means that the module also works across ranks. On one device, nothing is sent. The pattern
# `content_adaptive` chooses tiles by the products of queries and keys. All other patterns are the same for every input.

# %%
attention = BlockSparseRingMultiheadDilatedAttention(
    embed_dim=64,
    num_heads=4,
    segment_lengths=[TOKENS],
    dilation_rates=[1],
    sparse_config=patterns["window + first + random"],
)
x = torch.randn(2, TOKENS, 64, requires_grad=True)
out, _ = attention(x, x, x)
out.sum().backward()
print(f"a module with the third pattern: {tuple(x.shape)} -> {tuple(out.shape)}, with gradients")
