"""The environment variables that the package reads, one function per question."""

from __future__ import annotations

import os
from typing import Any

from dilated_attention_pytorch.core.checks import check_choice


def under_torchrun() -> bool:
    """Whether the environment describes a rank of a group, as torchrun sets it."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def world_size() -> int:
    """The number of ranks that torchrun started; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else 1


def local_rank() -> int:
    """The number of this rank on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def torchrun_restarts() -> int:
    """How often torchrun has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def torchrun_cannot_restart_gloo() -> bool:
    """Whether torchrun may restart ranks, but lends them its own store, in which gloo then finds the dead ranks."""
    lends = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return lends and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def triton_interprets() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def kernels() -> str:
    """Which Triton kernels may run: `best`, or `plain` for those that run on any GPU, to compare them."""
    return _choice("DILATED_ATTENTION_KERNELS", "best", "plain")


def float32_products() -> str:
    """How kernels multiply float32 where TF32 is off: `tf32x3`, three TF32 products of parts, or `ieee`."""
    return _choice("DILATED_ATTENTION_FLOAT32", "tf32x3", "ieee")


def tiles_file() -> str | None:
    """The file of tile shapes that `bench tune` wrote for this GPU."""
    return os.environ.get("DILATED_ATTENTION_TILES")


def value(variable: str) -> str | None:
    """The value of a variable of another package, for reports."""
    return os.environ.get(variable)


def pattern_cache_settings(max_size: int) -> dict[str, Any]:
    """`max_size`, `max_bytes` (256 MiB by default) and `enable_profiling` of the pattern caches that modules share."""
    return {
        "max_size": _count("PATTERN_CACHE_MAX_SIZE", max_size),
        "max_bytes": _count("PATTERN_CACHE_MAX_BYTES", 256 << 20),
        "enable_profiling": _flag("PATTERN_CACHE_ENABLE_PROFILING"),
    }


def _choice(variable: str, *choices: str) -> str:
    return check_choice(variable, os.environ.get(variable) or choices[0], choices)


def _count(variable: str, default: int) -> int:
    stated = os.environ.get(variable, str(default))
    if not stated.strip().isdecimal() or int(stated) < 1:
        raise ValueError(f"{variable} must be a whole number of at least 1, got {stated!r}")
    return int(stated)


def _flag(variable: str) -> bool:
    stated = os.environ.get(variable, "0")
    if stated not in ("0", "1", ""):
        raise ValueError(f"{variable} must be 0 or 1, got {stated!r}")
    return stated == "1"
