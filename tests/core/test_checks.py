"""The checks of arguments: what passes, what each kind of annotation refuses, and that compiled code stays whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from dilated_attention_pytorch.core import environment
from dilated_attention_pytorch.core.checks import (
    COUNT,
    MOST_TOKENS,
    PROBABILITY,
    check_fields,
    check_number,
    check_whole,
    checked,
)
from dilated_attention_pytorch.functional import dilated_attention


@checked(count=COUNT, share=PROBABILITY)
def everything(
    count: int = 1,
    share: float = 0.0,
    flag: bool = False,
    kind: Literal["a", "b"] = "a",
    switch: bool | Literal["forward"] = False,
    name: str | None = None,
    x: Tensor | None = None,
    model: nn.Module | None = None,
    sizes: Sequence[int] = (),
    pair: tuple[int, ...] = (),
    either: Tensor | Sequence[Tensor] | None = None,
    table: Mapping[str, int] | None = None,
    items: Iterable[Any] = (),
    run: Callable[[], None] | None = None,
    device: torch.device | str | None = None,
    anything: Any = None,
    unknown: NotImported = None,  # noqa: F821
) -> dict[str, Any]:
    return dict(locals())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": 0}, "count must be a whole number of at least 1, got 0"),
        ({"count": 2**63}, f"count must be a whole number of at most {MOST_TOKENS}, got 9223372036854775808"),
        ({"count": 10**400}, "got a whole number of 1329 bits"),
        ({"count": 1.0}, "count must be a whole number of at least 1, got 1.0"),
        ({"count": torch.tensor([1])}, r"got a tensor of shape \(1,\) and dtype torch.int64"),
        ({"share": 1}, "share must be a finite number of at least 0 and below 1, got 1"),
        ({"share": float("nan")}, "got nan"),
        ({"share": 10**400}, "finite number"),
        ({"share": int}, "got a type"),
        ({"flag": 1}, "flag must be True or False, got 1"),
        ({"kind": "c"}, "kind must be one of a, b; got 'c'"),
        ({"kind": ["a"]}, "kind must be one of a, b; got a list"),
        ({"switch": "backward"}, "switch must be True or False or 'forward', got 'backward'"),
        ({"switch": 1}, "switch must be True or False or 'forward', got 1"),
        ({"name": 3}, "name must be a str, got 3"),
        ({"x": [1.0]}, "x must be a tensor, got a list"),
        ({"model": len}, "model must be a torch.nn.Module"),
        ({"sizes": 4}, "sizes must be a sequence such as a list or a tuple, got 4"),
        ({"sizes": "48"}, "sizes must be a sequence"),
        ({"sizes": {8, 4}}, "sizes must be a sequence"),  # which has no order
        ({"sizes": [4, 1.5]}, r"sizes\[1\] must be a whole number, got 1.5"),
        ({"either": 4}, "either must be a Tensor or a Sequence, got 4"),
        ({"table": [1]}, "table must be a Mapping, got a list"),
        ({"items": 3}, "items must be an iterable, got 3"),
        ({"items": torch.tensor(1)}, "items must be an iterable"),
        ({"run": 3}, "run must be a Callable, got 3"),
        ({"device": "gpu"}, "device must be a PyTorch device such as 'cpu' or 'cuda:0', got 'gpu'"),
        ({"device": 3}, "device must be a PyTorch device"),
    ],
)
def test_an_argument_is_checked_by_its_annotation(given, message) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        everything(**given)


def test_what_is_right_passes_and_is_given_in_its_own_type() -> None:
    np = pytest.importorskip("numpy")
    x = torch.zeros(2, 3)
    given = everything(np.int64(3), np.float32(0.5), pair=[1, np.int32(2)], either=x, device="cpu", unknown=object())
    assert type(given["count"]) is int
    assert [type(one) for one in given["pair"]] == [int, int]
    assert given["pair"] == (1, 2)
    assert given["either"] is x  # and not its rows, though a tensor is a sequence of them
    assert given["device"] == torch.device("cpu")
    assert everything(switch="forward", kind="b", sizes=np.array([4, 8]), x=None)["sizes"] == [4, 8]


def test_a_dataclass_is_checked_by_its_fields() -> None:
    with pytest.raises(ValueError, match="heads must be a whole number of at least 1, got 0"):
        Sizes(heads=0)
    with pytest.raises(TypeError, match="causal must be True or False, got 'no'"):
        Sizes(causal="no")
    assert Sizes(lengths=[4, 8]).lengths == (4, 8)


@dataclass(frozen=True)
class Sizes:
    heads: int = 1
    causal: bool = False
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, heads=COUNT)


def test_a_limit_may_be_infinite() -> None:
    assert check_number("clip_norm", float("inf"), above=0, most=float("inf")) == float("inf")
    with pytest.raises(ValueError, match="clip_norm must be a number above 0, got nan"):
        check_number("clip_norm", float("nan"), above=0, most=float("inf"))


def test_a_size_that_is_open_stays_open_when_compiled() -> None:
    compiled_for = []

    def backend(graph, _inputs):
        compiled_for.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def doubled(x: Tensor, scale: float) -> Tensor:
        return x * check_whole("tokens", x.shape[0], least=0) * check_number("scale", scale)

    for tokens in (5, 7, 9):
        assert torch.equal(doubled(torch.ones(tokens), 2.0), torch.full((tokens,), 2.0 * tokens))
    assert len(compiled_for) == 1


def test_attention_compiles_whole_for_open_sizes() -> None:
    compiled_for = []

    def backend(graph, _inputs):
        compiled_for.append(graph)
        return graph

    attend = torch.compile(dilated_attention, backend=backend, fullgraph=True, dynamic=True)
    for tokens in (9, 13, 21):
        q, k, v = torch.randn(3, 1, tokens, 2, 4).unbind(0)
        seqlens = torch.tensor([tokens - 1])
        found = attend(q, k, v, [4, 8], [1, 2], is_causal=True, seqlens=seqlens, scale=0.5)
        expected = dilated_attention(q, k, v, [4, 8], [1, 2], is_causal=True, seqlens=seqlens, scale=0.5)
        torch.testing.assert_close(found, expected)
    assert len(compiled_for) == 1


def test_a_whole_number_beyond_64_bits_becomes_one_that_pytorch_takes() -> None:
    large = check_number("temperature", 2**64)
    assert torch.equal(torch.ones(1) / large, torch.tensor([2.0**-64]))


def test_environment_variables_that_choose_kernels_refuse_other_values(monkeypatch) -> None:
    for variable, read, choices in (
        ("DILATED_ATTENTION_KERNELS", environment.kernels, ["best", "plain"]),
        ("DILATED_ATTENTION_FLOAT32", environment.float32_products, ["tf32x3", "ieee"]),
    ):
        for stated, chosen in zip(("", *choices), (choices[0], *choices)):
            monkeypatch.setenv(variable, stated)
            assert read() == chosen
        monkeypatch.setenv(variable, "Plain")
        with pytest.raises(ValueError, match=f"{variable} must be one of {', '.join(choices)}; got 'Plain'"):
            read()
