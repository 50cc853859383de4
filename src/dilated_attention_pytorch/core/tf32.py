"""Whether PyTorch lets float32 products on GPUs round to TF32."""

from __future__ import annotations

import torch


def tf32_is_on() -> bool:
    """PyTorch's setting, in whichever way it was set.

    >>> tf32_is_on() in (True, False)
    True
    """
    matmul = torch.backends.cuda.matmul
    # PyTorch 2.9 and newer raise if `allow_tf32` is read after `fp32_precision` was set.
    stated = getattr(matmul, "fp32_precision", None)
    return matmul.allow_tf32 if stated is None else stated == "tf32"
