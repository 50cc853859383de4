"""One check per kind of argument. Each returns the value, or raises an error with the rule and the value.

`TypeError` is for a value of the wrong kind, `ValueError` for a value of the right kind that is out of range.

`checked` applies these checks to every argument of a function, by its annotation, and `check_fields` to every field of
a dataclass. Code that `torch.compile` traces, or that runs in every call, uses the single checks instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import math
import sys
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from operator import index
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.measuring import DISTRIBUTION

MOST_TOKENS = 2**48  # of lengths, positions and rates: a product with a number of heads stays exact in int64
MOST_LISTED = 2**31  # of tokens in a list
MOST_ENTRIES = 2**20  # of ranks and heads: tables have an entry for each

COUNT: Mapping[str, float] = {"least": 1, "most": MOST_TOKENS}
SIZE: Mapping[str, float] = {"least": 0, "most": MOST_TOKENS}
POSITIVE: Mapping[str, float] = {"above": 0}
NOT_NEGATIVE: Mapping[str, float] = {"least": 0}
PROBABILITY: Mapping[str, float] = {"least": 0, "below": 1}
"""Ranges for `checked` and `check_fields`; no proxies, which torch.compile cannot read once a dict has changed."""

# Arguments and fields of these names have the same range everywhere, unless another is stated.
_RANGES: Mapping[str, Mapping[str, float]] = {
    **dict.fromkeys(("batch", "d_model", "embed_dim", "dim_feedforward", "head_dim", "vocab_size"), COUNT),
    **dict.fromkeys(("nhead", "num_heads", "num_kv_heads", "total_heads", "num_layers"), COUNT),
    **dict.fromkeys(("rewindable", "head_offset"), SIZE),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), PROBABILITY),
    **dict.fromkeys(("layer_norm_eps", "gamma_init"), NOT_NEGATIVE),
    **dict.fromkeys(("base", "scale_base"), POSITIVE),
}

_MOST_FLOAT = sys.float_info.max

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Check = Callable[[str, Any], Any]


def check_flag(name: str, value: Any) -> bool:
    """
    >>> check_flag("is_causal", "no")
    Traceback (most recent call last):
    TypeError: is_causal must be True or False, got 'no'
    """
    if not isinstance(value, bool):
        raise _refused(TypeError, name, "True or False", value)
    return value


def check_whole(name: str, value: Any, *, least: float | None = None, most: float | None = None) -> int:
    """A whole number, including NumPy's and PyTorch's integer types but not `True`.

    >>> check_whole("num_heads", 0, least=1)
    Traceback (most recent call last):
    ValueError: num_heads must be a whole number of at least 1, got 0
    """
    whole: Any = value
    # A size that `torch.compile` leaves open stays open: `index` would fix its value.
    if type(value) is not int and not isinstance(value, torch.SymInt):
        no_integer = isinstance(value, Tensor) and (value.dim() or value.is_meta or not _holds_integers(value))
        try:
            whole = None if isinstance(value, bool) or no_integer else index(value)
        except TypeError:
            whole = None
        if whole is None:
            raise _refused(TypeError, name, f"a whole number{_range(least, most)}", value)
    if least is not None and whole < least:
        raise _refused(ValueError, name, f"a whole number{_range(least, most)}", whole)
    if most is not None and whole > most:
        raise _refused(ValueError, name, f"a whole number of at most {most}", whole)
    return whole


def check_number(
    name: str, value: Any, *, least: float | None = None, above: float | None = None, below: float | None = None,
    most: float | None = None,
) -> float:  # fmt: skip
    """A finite number, or infinity if `most` is infinite.

    >>> check_number("dropout", 1.5, least=0, below=1)
    Traceback (most recent call last):
    ValueError: dropout must be a finite number of at least 0 and below 1, got 1.5
    """
    if not isinstance(value, (int, float, str, bytes, Tensor)):
        with contextlib.suppress(TypeError, ValueError):
            value = float(value)  # of NumPy's types
    rule = f"a {'' if most == math.inf else 'finite '}number{_range(least, most, above, below)}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _refused(TypeError, name, rule, value)
    inside = (
        (-_MOST_FLOAT <= value <= _MOST_FLOAT or (most is not None and value == most))
        and (least is None or value >= least)
        and (above is None or value > above)
        and (below is None or value < below)
        and (most is None or value <= most)
    )
    if not inside:
        raise _refused(ValueError, name, rule, value)
    # PyTorch takes no whole number beyond 64 bits.
    return value if isinstance(value, float) or -(2**63) <= value < 2**63 else float(value)


def check_divides(name: str, divisor: int, of: str, number: int) -> None:
    """Refuse a divisor that leaves a remainder; both are at least 1.

    >>> check_divides("num_heads", 3, "embed_dim", 32)
    Traceback (most recent call last):
    ValueError: num_heads must divide embed_dim, got num_heads=3 and embed_dim=32
    """
    if number % divisor:
        raise ValueError(f"{name} must divide {of}, got {name}={divisor} and {of}={number}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """
    >>> check_choice("scheme", "rnig", ["gather", "ring"])
    Traceback (most recent call last):
    ValueError: scheme must be one of gather, ring; got 'rnig'
    """
    if not isinstance(value, str) or value not in choices:
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"{name} must be one of {', '.join(choices)}; got {shown(value)}")
    return value


def check_tensor(name: str, value: Any) -> Tensor:
    """A dense tensor: neither nested nor sparse.

    >>> check_tensor("query", [1.0, 2.0])
    Traceback (most recent call last):
    TypeError: query must be a tensor, got a list
    """
    if not isinstance(value, Tensor):
        raise _refused(TypeError, name, "a tensor", value)
    if value.is_nested:
        way_out = "pad its rows (nested.to_padded_tensor(0.0)), and pass their lengths as seqlens"
        if value.layout is torch.jagged:
            way_out = (
                "pack its rows into a single row of the batch (nested.values().unsqueeze(0)), and pass "
                "cu_seqlens=nested.offsets()"
            )
        raise TypeError(f"{name} must be a dense tensor, got a nested one: {way_out}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got one of layout {value.layout}: convert with .to_dense()")
    return value


def check_whole_numbers(name: str, value: Any) -> Tensor:
    """A dense tensor of integers.

    >>> check_whole_numbers("seqlens", torch.tensor([1.5]))
    Traceback (most recent call last):
    TypeError: seqlens must hold whole numbers, got torch.float32
    """
    if not _holds_integers(check_tensor(name, value)):
        raise TypeError(f"{name} must hold whole numbers, got {value.dtype}")
    return value


def check_instance(name: str, value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise _refused(TypeError, name, _with_article("torch.nn.Module" if kind is nn.Module else kind.__name__), value)
    return value


def check_sequence(name: str, value: Any, each: Check | None = None) -> Sequence[Any]:
    """A list, tuple, range or array; `each` checks its entries.

    >>> check_sequence("rows", [0, 1.5], check_whole)
    Traceback (most recent call last):
    TypeError: rows[1] must be a whole number, got 1.5
    """
    scalar = isinstance(value, Tensor) and not value.dim()
    if isinstance(value, (str, bytes, Mapping, set, frozenset)) or scalar or not isinstance(value, Collection):
        raise _refused(TypeError, name, "a sequence such as a list or a tuple", value)
    if each is None:
        return value  # type: ignore[return-value]
    checked_entries = [each(f"{name}[{i}]", one) for i, one in enumerate(value)]
    return tuple(checked_entries) if isinstance(value, tuple) else checked_entries


def _check_iterable(name: str, value: Any) -> Any:
    if not isinstance(value, Iterable) or (isinstance(value, Tensor) and not value.dim()):
        raise _refused(TypeError, name, "an iterable", value)
    return value


def _check_hashable(name: str, value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        raise _refused(TypeError, name, "hashable, such as a string or a tuple", value) from None
    return value


def check_dtype(name: str, value: Any) -> torch.dtype:
    """
    >>> check_dtype("dtype", torch.int8)
    Traceback (most recent call last):
    ValueError: dtype must be a floating-point dtype, got torch.int8
    """
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        error = ValueError if isinstance(value, torch.dtype) else TypeError
        raise _refused(error, name, "a floating-point dtype", value)
    return value


def check_device(name: str, value: Any) -> torch.device:
    """
    >>> check_device("device", "gpu")
    Traceback (most recent call last):
    ValueError: device must be a PyTorch device such as 'cpu' or 'cuda:0', got 'gpu'
    """
    rule = "a PyTorch device such as 'cpu' or 'cuda:0'"
    if not isinstance(value, (str, torch.device)):
        raise _refused(TypeError, name, rule, value)
    try:
        return torch.device(value)
    except RuntimeError:
        raise _refused(ValueError, name, rule, value) from None


def checked(
    **ranges: Mapping[str, float] | None,
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Check every argument of a function by its annotation; `ranges` are the ranges of numbers, by argument.

    Names such as `num_heads` and `dropout` have a default range (`_RANGES`). An argument is not checked if its range is
    None, or if its annotation is `Any` or a class that is imported for type checkers only.

    >>> @checked(heads={"least": 1})
    ... def attend(heads: int, is_causal: bool = False) -> int: ...
    >>> attend(4, is_causal=1)
    Traceback (most recent call last):
    TypeError: is_causal must be True or False, got 1
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        parameters = inspect.signature(function).parameters.values()
        single = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        stated = [p for p in single if p.annotation is not p.empty]
        positional = [p.name for p in single if p.kind is not p.KEYWORD_ONLY]

        @functools.cache  # on first use: an annotation may name a class that is defined further below
        def checks() -> dict[str, Check]:
            return _checks({p.name: p.annotation for p in stated}, vars(sys.modules[function.__module__]), ranges)

        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            by_name = checks()
            taken: list[Any] = list(args)
            for i, name in enumerate(positional[: len(taken)]):
                if name in by_name:
                    taken[i] = by_name[name](name, taken[i])
            named = {name: by_name[name](name, one) if name in by_name else one for name, one in kwargs.items()}
            return function(*taken, **named)  # type: ignore[arg-type]

        return call

    return decorate


def check_fields(instance: Any, **ranges: Mapping[str, float]) -> None:
    """Check every field of a dataclass by its annotation, as `checked` does, and keep the value that the check returns.

    Ranges of numbers are `ranges`, or those stated by `core.settings.setting`.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Sizes:
    ...     heads: int = 1
    ...     def __post_init__(self) -> None:
    ...         check_fields(self, heads={"least": 1})
    >>> Sizes(heads=0)
    Traceback (most recent call last):
    ValueError: heads must be a whole number of at least 1, got 0
    """
    kind = type(instance)
    if kind not in _checks_of_fields:
        fields = dataclasses.fields(instance)
        annotations = {field.name: field.type for field in fields}
        beside = {field.name: field.metadata["range"] for field in fields if field.metadata.get("range")}
        _checks_of_fields[kind] = _checks(annotations, vars(sys.modules[kind.__module__]), beside | ranges)
    for name, check in _checks_of_fields[kind].items():
        object.__setattr__(instance, name, check(name, getattr(instance, name)))


_checks_of_fields: dict[type, dict[str, Check]] = {}


def _checks(annotations: Mapping[str, Any], names: dict[str, Any], ranges: Mapping[str, Any]) -> dict[str, Check]:
    found = {}
    for name, annotation in annotations.items():
        try:
            kind = eval(annotation, names) if isinstance(annotation, str) else annotation
        except NameError:  # imported for type checkers only
            continue
        limits = ranges.get(name, _RANGES.get(name, {}))
        check = None if limits is None else _check_for(kind, limits)
        if check is not None:
            found[name] = check
    return found


def _check_for(kind: Any, limits: Mapping[str, float] = types.MappingProxyType({})) -> Check | None:
    """The check of an annotation; None if it allows anything."""
    origin, parts = get_origin(kind), get_args(kind)
    if isinstance(kind, TypeVar):
        return None if kind.__bound__ is None else _check_for(kind.__bound__)
    if kind is int:
        return functools.partial(check_whole, **{"most": 2**63 - 1, **limits})  # type: ignore[arg-type]
    if kind is float:
        return functools.partial(check_number, **limits)  # type: ignore[arg-type]
    if kind in _CHECKS:
        return _CHECKS[kind]
    if origin is Literal:
        return lambda name, value: check_choice(name, value, parts)
    if origin in (Union, types.UnionType):
        return _check_for_union(parts, limits)
    if origin in (Sequence, list, tuple):
        each = _check_for(parts[0], limits)
        as_tuple = origin is tuple and parts[-1:] == (...,)
        if origin is tuple and not as_tuple:
            return functools.partial(check_instance, kind=tuple)
        return lambda name, value: (tuple if as_tuple else lambda x: x)(check_sequence(name, value, each))
    if origin is Iterable:
        return _check_iterable
    if origin in (Mapping, dict, Callable):
        return functools.partial(check_instance, kind=origin)
    is_class = origin is None and isinstance(kind, type)  # in Python 3.10, `type[X]` is an instance of `type`
    if is_class and not getattr(kind, "_is_protocol", False) and kind not in (object, Any):
        return functools.partial(check_instance, kind=kind)
    return None


def _check_for_union(parts: tuple[Any, ...], limits: Mapping[str, float]) -> Check | None:
    kinds = [part for part in parts if part is not types.NoneType]
    checks = [check_device] if {*kinds} >= {torch.device, str} else [_check_for(kind, limits) for kind in kinds]
    if None in checks:
        return None
    check: Any = checks[0] if len(checks) == 1 else _check_for_any(dict(zip(kinds, checks)))
    return check if len(kinds) == len(parts) else lambda name, value: None if value is None else check(name, value)


def _check_for_any(checks: dict[Any, Any]) -> Check:
    """A check that passes if one of several does; the first one that accepts the value's type decides."""
    words = " or ".join(map(_words, checks))
    origins: dict[Any, Any] = {kind: get_origin(kind) for kind in checks}
    # Sequences last: a tensor is a sequence too, but where both are allowed it is checked as a tensor.
    tried = sorted(checks, key=lambda kind: origins[kind] is Sequence)

    def check(name: str, value: Any) -> Any:
        error: type[Exception] = TypeError
        for kind in tried:
            try:
                return checks[kind](name, value)
            except TypeError:
                if origins[kind] is Sequence and isinstance(value, (list, tuple)):  # an entry is wrong
                    raise
            except ValueError:
                if origins[kind] is not Literal:
                    raise
                error = ValueError
        raise _refused(error, name, words, value)

    return check


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return _WORDS.get(kind) or _with_article((get_origin(kind) or kind).__name__)


_CHECKS: dict[Any, Check] = {
    Hashable: _check_hashable,
    Tensor: check_tensor,
    bool: check_flag,
    torch.dtype: check_dtype,
}
_WORDS: dict[Any, str] = {bool: "True or False", int: "a whole number", float: "a finite number", str: "a string"}


def _holds_integers(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def _range(least: float | None, most: float | None, above: float | None = None, below: float | None = None) -> str:
    # A limit that only absurd values exceed would distract from the rule.
    most = None if most is not None and most >= MOST_ENTRIES else most
    bounds = [("of at least", least), ("above", above), ("at most", most), ("below", below)]
    stated = [f"{words} {bound}" for words, bound in bounds if bound is not None]
    return " " + " and ".join(stated) if stated else ""


def _refused(error: type[Exception], name: str, rule: str, value: Any) -> Exception:
    return error(f"{name} must be {rule}, got {shown(value)}")


def install_extra(extra: str) -> str:
    """The command that installs an extra, for errors.

    >>> install_extra("viz")
    "pip install 'longnet-dilated-attention[viz]', or '.[viz]' in a checkout"
    """
    return f"pip install '{DISTRIBUTION}[{extra}]', or '.[{extra}]' in a checkout"


def import_optional(module: str, extra: str, user: str) -> Any:
    """A module of an optional package. If it is not installed, the error names its `user` and the install command."""
    package = module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != package:  # it is installed, and broken
            raise
        raise ModuleNotFoundError(f"{user} needs {package}: {install_extra(extra)}", name=package) from error


def shown(value: Any) -> str:
    """A value as an error shows it; a large value is shown by its type."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"  # Python refuses to print the longest
    if isinstance(value, (str, int, float, bool, type(None), torch.dtype, torch.device)):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:77]}..."
    return _with_article(type(value).__name__)


def _with_article(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
