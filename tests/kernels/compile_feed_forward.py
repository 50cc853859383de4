"""Compile the kernels of the feed-forward network for compute capability 9.0. An argument is a number of features."""

from __future__ import annotations

import torch


def main(features: str) -> None:
    from compile_plain_kernels import compile_instead

    from dilated_attention_pytorch.kernels.triton import feed_forward

    for name in ("forward_kernel", "backward_kernel"):
        compile_instead(feed_forward, name)
    hidden, (gain, shift) = torch.empty(4, int(features), dtype=torch.bfloat16), torch.empty(2, int(features))
    _, mean, rstd = feed_forward.forward(hidden, gain, shift, 1e-5)
    feed_forward.backward_(hidden.clone(), hidden, gain, shift, mean, rstd)


if __name__ == "__main__":
    from compile_plain_kernels import run_cases

    run_cases(main)
