"""Compile the decoding kernels for compute capability 9.0.

An argument is a case, `HEAD_DIM,NEW_TOKENS`, or `HEAD_DIM,step,ROWS` for a whole layer.
"""

from __future__ import annotations

import torch


def main(head_dim: str, tokens: str, batch: str = "1") -> None:
    from compile_plain_kernels import compile_instead  # beside this script, which pytest collects from elsewhere

    from dilated_attention_pytorch.core.cache_rows import CacheRows, CacheState
    from dilated_attention_pytorch.core.spec import DilatedSpec
    from dilated_attention_pytorch.kernels.triton import cache_chunks, decode, step, token

    for module, names in (
        (decode, ("append_kernel", "split_kernel", "combine_kernel")),
        (cache_chunks, ("store_kernel", "after_cached_kernel")),
        (step, ("embed_kernel", "linear_kernel", "norm_kernel")),
        (token, ("token_kernel",)),
    ):
        for name in names:
            compile_instead(module, name)
    step.overlap = token.overlap = lambda device: {"OVERLAP": True, "launch_pdl": True}  # as on such a GPU
    spec = DilatedSpec.of([2048, 4096], [1, 2])
    rows = CacheRows(spec, spec.offsets(4))
    if tokens == "step":
        compile_step(step, token, rows, int(head_dim), int(batch), CacheState)
        return
    keys, values = torch.zeros(2, 1, rows.total, int(head_dim), dtype=torch.bfloat16).unbind(0)
    q, k, v = (torch.zeros(1, int(tokens), heads, int(head_dim), dtype=torch.bfloat16) for heads in (8, 4, 4))
    state = CacheState(keys, values, torch.zeros(1, dtype=torch.int64), rows)
    if int(tokens) > 64:
        cache_chunks.store(k, v, state)
        cache_chunks.after_cached(k, v, state, 10)
    else:
        decode.decode(q, k, v, state, 0.1, False)


def compile_step(step, token, rows, D: int, B: int, CacheState) -> None:
    from dilated_attention_pytorch.kernels import decode

    x, vector, weight = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((B, 8 * D), (8 * D,), (8 * D, 8 * D)))
    pairs, whole = torch.zeros(D // 2, dtype=torch.float64), torch.zeros(B, dtype=torch.int64)
    step.embed(whole, weight, 2.0, whole, decode.Turns(pairs, pairs, 4096, 512.0))
    norm = ("layer", vector, vector, 1e-5)
    step.linear(x, [weight, weight, weight], [vector] * 3, norm=norm, activation=None, residual=None)
    step.linear(x, [weight, weight], [None] * 2, norm=("rms", vector, None, 1e-5), activation="swiglu", residual=x)
    keys = torch.zeros(B, rows.total, D, dtype=torch.bfloat16)
    state = CacheState(keys, keys, whole, rows)
    angles, counters = torch.zeros(B, D // 2), torch.zeros(4 * B, dtype=torch.int32)
    qkv = torch.zeros(B, 16 * D, dtype=torch.bfloat16)
    gains = (vector[:D], vector[:D], 1e-5)
    token.attend_token(qkv, state, 0.1, counters, rotations=(angles,) * 4, qk_norm=gains, allow_tf32=None)


if __name__ == "__main__":
    from compile_plain_kernels import run_cases

    run_cases(main)
