"""One check per kind of argument. Each returns the value, or raises an error with the rule and the value.

`TypeError` is for a value of the wrong kind, `ValueError` for a value of the right kind that is out of range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

MOST_TOKENS = 2**48  # of lengths, positions and rates: a product with a number of heads stays exact in int64


def check_flag(name: str, value: Any) -> bool:
    """
    >>> check_flag("is_causal", "no")
    Traceback (most recent call last):
    TypeError: is_causal must be True or False, got 'no'
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {_shown(value)}")
    return value


def check_whole(name: str, value: Any, *, least: int | None = None, most: int | None = None) -> int:
    """A whole number, also of NumPy's or PyTorch's integer types; `True` is none.

    >>> check_whole("num_heads", 0, least=1)
    Traceback (most recent call last):
    ValueError: num_heads must be a whole number of at least 1, got 0
    """
    rule = f"{name} must be a whole number{_range(least, most)}"
    if isinstance(value, bool) or (isinstance(value, Tensor) and (value.dim() or value.is_floating_point())):
        raise TypeError(f"{rule}, got {_shown(value)}")
    try:
        whole = index(value)
    except TypeError:
        raise TypeError(f"{rule}, got {_shown(value)}") from None
    if (least is not None and whole < least) or (most is not None and whole > most):
        raise ValueError(f"{rule}, got {whole}")
    return whole


def check_number(
    name: str, value: Any, *, least: float | None = None, above: float | None = None, below: float | None = None,
    most: float | None = None,
) -> float:  # fmt: skip
    """A finite number.

    >>> check_number("dropout", 1.5, least=0, below=1)
    Traceback (most recent call last):
    ValueError: dropout must be a finite number of at least 0 and below 1, got 1.5
    """
    rule = f"{name} must be a finite number{_range(least, most, above, below)}"
    if isinstance(value, (bool, str, Tensor)) or not hasattr(value, "__float__"):
        raise TypeError(f"{rule}, got {_shown(value)}")
    inside = (
        math.isfinite(value)
        and (least is None or value >= least)
        and (above is None or value > above)
        and (below is None or value < below)
        and (most is None or value <= most)
    )
    if not inside:
        raise ValueError(f"{rule}, got {value!r}")
    return value


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """
    >>> check_choice("scheme", "rnig", ["gather", "ring"])
    Traceback (most recent call last):
    ValueError: scheme must be one of gather, ring; got 'rnig'
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {', '.join(choices)}; got {_shown(value)}")
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
    return value


def check_tensor(name: str, value: Any) -> Tensor:
    """A dense tensor that is not nested.

    >>> check_tensor("query", [1.0, 2.0])
    Traceback (most recent call last):
    TypeError: query must be a tensor, got a list
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {_shown(value)}")
    if value.is_nested:
        raise TypeError(
            f"{name} must be a dense tensor, got a nested one: pack its rows into a single row of the batch "
            "(nested.values().unsqueeze(0)), and pass cu_seqlens=nested.offsets()"
        )
    return value


def check_module(name: str, value: Any) -> nn.Module:
    if not isinstance(value, nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module, got {_shown(value)}")
    return value


def check_instance(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {_shown(value)}")
    return value


def _range(least: float | None, most: float | None, above: float | None = None, below: float | None = None) -> str:
    bounds = [("of at least", least), ("above", above), ("of at most", most), ("below", below)]
    stated = [f"{words} {bound}" for words, bound in bounds if bound is not None]
    return " " + " and ".join(stated) if stated else ""


def _shown(value: Any) -> str:
    """A value as an error shows it: large ones by their type."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    if isinstance(value, (str, int, float, bool, type(None), torch.dtype, torch.device)):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:77]}..."
    article = "an" if type(value).__name__[0].lower() in "aeiou" else "a"
    return f"{article} {type(value).__name__}"
