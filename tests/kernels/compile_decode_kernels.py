"""Compile the decoding kernels for compute capability 9.0. An argument is a case, `HEAD_DIM,NEW_TOKENS`."""

from __future__ import annotations

import torch


def main(head_dim: str, tokens: str) -> None:
    from compile_plain_kernels import compile_instead  # beside this script, which pytest collects from elsewhere

    from dilated_attention_pytorch.core.cache_rows import CacheRows, CacheState
    from dilated_attention_pytorch.core.spec import DilatedSpec
    from dilated_attention_pytorch.kernels.triton import cache_chunks, decode

    for module, names in (
        (decode, ("append_kernel", "split_kernel", "combine_kernel")),
        (cache_chunks, ("store_kernel", "after_cached_kernel")),
    ):
        for name in names:
            compile_instead(module, name)
    spec = DilatedSpec.of([2048, 4096], [1, 2])
    rows = CacheRows(spec, spec.offsets(4))
    keys, values = torch.zeros(2, 1, rows.total, int(head_dim), dtype=torch.bfloat16).unbind(0)
    q, k, v = (torch.zeros(1, int(tokens), heads, int(head_dim), dtype=torch.bfloat16) for heads in (8, 4, 4))
    state = CacheState(keys, values, torch.zeros(1, dtype=torch.int64), rows)
    if int(tokens) > 64:
        cache_chunks.store(k, v, state)
        cache_chunks.after_cached(k, v, state, 10)
    else:
        decode.decode(q, k, v, state, 0.1, False)


if __name__ == "__main__":
    from compile_plain_kernels import run_cases

    run_cases(main)
