"""Block-sparse attention gives the reference's out, lse, dq, dk and dv for the same layout, on every backend."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch.core.block_pattern import PATTERN_TYPES, SparsePatternConfig
from dilated_attention_pytorch.core.plans import get_global_pattern_cache
from dilated_attention_pytorch.core.spans import document_spans
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.kernels import tiles

from ..thorough import examples
from .checks import BASE, check_budget, reference_on, run
from .draws import HEADS, LENGTHS, Draw

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.filterwarnings("ignore:no branch of")]
needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves are tested")


@dataclass(frozen=True)
class SparseDraw(Draw):
    """A call with a block pattern."""

    sparse: SparsePatternConfig

    def settings(self, device: str = "cpu") -> dict[str, Any]:
        return super().settings(device) | {"sparse_config": self.sparse}


def sparse(config: SparsePatternConfig, **changes: Any) -> SparseDraw:
    return SparseDraw(**(dataclasses.asdict(BASE) | changes), sparse=config)


# Ragged at the end of both branches, in segments and in tiles; grouped queries; two batch rows.
RAGGED = {"tokens": 181, "heads": 4, "kv_heads": 2, "segment_lengths": (64, 150), "dilation_rates": (1, 3)}
CORNERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shorter than a tile": ({"tokens": 3, "segment_lengths": (64,), "dilation_rates": (1,)}, {"block_size": 16}),
    "a tile a segment": ({"tokens": 50, "segment_lengths": (16, 32), "dilation_rates": (1, 2)}, {"block_size": 16}),
    "rows that nobody covers": ({**RAGGED, "dilation_rates": (2, 3)}, {}),
    "each head in one branch": ({**RAGGED, "head_layout": "grouped", "heads": 5, "kv_heads": 5}, {}),
    "blocks of heads": ({**RAGGED, "head_layout": "blocked"}, {}),
    "a shard of the heads": ({**RAGGED, "shards": 3}, {}),
    "dropout": ({**RAGGED, "dropout_p": 0.4}, {}),
    "scores turned around": ({**RAGGED, "scale": -0.5}, {"pattern_type": "content_adaptive"}),
    "global tiles": (RAGGED, {"global_tokens": 9}),
    "a window": (RAGGED, {"local_window_size": 9}),
    "every tile": (RAGGED, {"sparsity_ratio": 1.0}),
    "right-padded": ({**RAGGED, "lengths": "right-padded"}, {}),
    "left-padded": ({**RAGGED, "lengths": "left-padded", "batch": 3}, {"pattern_type": "content_adaptive"}),
    "packed": ({**RAGGED, "lengths": "packed", "batch": 1, "dropout_p": 0.4}, {}),
    "packed, each head in one branch": (
        {**RAGGED, "lengths": "packed", "batch": 1, "head_layout": "grouped", "heads": 6, "kv_heads": 3},
        {"pattern_type": "content_adaptive"},
    ),
    "padded, in segments longer than the row": (
        {**RAGGED, "lengths": "left-padded", "segment_lengths": (64, 500)},
        {"pattern_type": "strided"},
    ),
}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, x in expected.items():
        torch.testing.assert_close(
            found[name], x, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def check_eager(draw: SparseDraw, through_lse: bool = True) -> None:
    expected = run(draw, "reference", torch.float64, through_lse=through_lse)
    assert_equal(run(draw, "eager", torch.float64, through_lse=through_lse), expected, 1e-10)


def check_in_interpreter(draw: SparseDraw, dtype: torch.dtype = torch.float32, tolerance: float = 2e-5) -> None:
    draw = dataclasses.replace(draw, batch=1)
    inputs = tuple(x.detach().double().requires_grad_() for x in draw.tensors(dtype))
    assert_equal(run(draw, "triton", dtype, through_lse=False), reference_on(draw, inputs), tolerance)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERN_TYPES)
def test_eager_equals_the_reference_for_every_pattern(pattern, is_causal) -> None:
    for ratio, block_size in ((0.4, 4), (0.1, 2), (0.5, 16)):
        check_eager(sparse(SparsePatternConfig(pattern, ratio, block_size), **RAGGED, is_causal=is_causal))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("corner", CORNERS)
def test_eager_equals_the_reference_in_the_corners(corner, is_causal) -> None:
    changes, pattern = CORNERS[corner]
    config = SparsePatternConfig(**{"pattern_type": "random", "sparsity_ratio": 0.4, "block_size": 4, **pattern})
    check_eager(sparse(config, **changes, is_causal=is_causal))


@st.composite
def sparse_draws(draw: st.DrawFn) -> SparseDraw:
    branches = draw(st.lists(st.tuples(st.integers(8, 90), st.integers(1, 9)), min_size=1, max_size=3))
    heads, kv_heads = draw(st.sampled_from(HEADS))
    config = SparsePatternConfig(
        draw(st.sampled_from(PATTERN_TYPES)),
        draw(st.sampled_from([0.05, 0.25, 0.5, 1.0])),
        draw(st.sampled_from([1, 2, 8])),
        draw(st.sampled_from([None, 10])),
        draw(st.sampled_from([None, 3])),
    )
    lengths = draw(st.sampled_from(LENGTHS))
    return sparse(
        config,
        lengths=lengths,
        batch=1 if lengths == "packed" else draw(st.integers(1, 2)),
        tokens=draw(st.integers(1, 100)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 8])),
        segment_lengths=tuple(w for w, _ in branches),
        dilation_rates=tuple(r for _, r in branches),
        head_layout=draw(st.sampled_from(["interleaved", "blocked", "grouped"])),
        is_causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3, -0.2])),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.3])),
        seed=draw(st.integers(0, 2**32)),
    )


@settings(max_examples=examples(15))
@given(sparse_draws(), st.booleans())
def test_eager_equals_the_reference_in_float64(draw: SparseDraw, through_lse: bool) -> None:
    check_eager(draw, through_lse)


@settings(max_examples=examples(5))
@given(sparse_draws())
def test_small_chunks_change_nothing(draw: SparseDraw) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_ELEMENTS_AT_ONCE", 500)
        check_eager(draw)


def gradients_of(out, *tensors):
    return torch.autograd.grad(out.sin().sum(), tensors)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERN_TYPES)
def test_a_document_gets_what_it_gets_alone(pattern, is_causal) -> None:
    """Whatever shares its batch: other documents, padding on either side, or nothing."""
    for (seed, lengths), head_layout in zip(enumerate(LENGTHS[1:] * 2), ["interleaved", "blocked", "grouped"] * 2):
        shape = RAGGED | {"batch": 1 if lengths == "packed" else 3, "kv_heads": 2 if seed < 3 else 4}
        config = SparsePatternConfig(pattern, 0.4, 4, local_window_size=9 if seed == 5 else None)
        draw = sparse(config, **shape, lengths=lengths, seed=seed, head_layout=head_layout, is_causal=is_causal)
        settings = draw.settings()
        stated = {
            name: settings.pop(name) for name in ("seqlens", "key_padding_mask", "cu_seqlens") if name in settings
        }
        spans = document_spans(draw.batch, draw.tokens, **stated).tolist()
        tensors = draw.tensors(torch.float64)
        out, lse = dilated_attention(*tensors, **settings, **stated, return_lse=True)
        found = (out, lse, *gradients_of(out, *tensors))
        expected = [torch.zeros_like(x) for x in found]
        expected[1].fill_(-torch.inf)
        for document, (start, end) in enumerate(spans):
            b = document if draw.batch > 1 else 0
            alone = [x[b : b + 1, start:end].detach().requires_grad_() for x in tensors]
            out, lse = dilated_attention(*alone, **settings, return_lse=True)
            for total, x in zip(expected, (out, lse, *gradients_of(out, *alone))):
                total[b, start:end] = x[0]
        for name, one, other in zip(("out", "lse", "dq", "dk", "dv"), found, expected):
            torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("pattern", ["random", "content_adaptive"])
def test_nothing_behind_a_document_matters(pattern) -> None:
    settings = {"sparse_config": SparsePatternConfig(pattern, 0.4, 4), "spans": torch.tensor([[3, 40], [40, 71]])}
    clean = torch.randn(3, 1, 90, 2, 8)
    broken = clean.clone()
    broken[:, :, :3] = broken[:, :, 71:] = torch.nan
    results = []
    for x in (clean, broken):
        tensors = [y.clone().requires_grad_() for y in x]
        out = dilated_attention(*tensors, [32, 64], [1, 2], **settings)
        results.append((out, *gradients_of(out, *tensors)))
    for one, other in zip(*results):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_eager_keeps_the_error_budget(dtype) -> None:
    for is_causal in (False, True):
        config = SparsePatternConfig("hierarchical", 0.5, 4)
        check_budget(sparse(config, **(RAGGED | {"kv_heads": 4}), is_causal=is_causal), "eager", dtype)


@needs_interpreter
@pytest.mark.parametrize(("pattern", "is_causal"), [*zip(PATTERN_TYPES, itertools.cycle([False, True]))])
def test_triton_equals_the_reference_for_every_pattern_in_the_interpreter(pattern, is_causal) -> None:
    shape = {"tokens": 85, "heads": 2, "kv_heads": 1, "segment_lengths": (48, 80), "dilation_rates": (1, 2)}
    config = SparsePatternConfig(pattern, 0.4, 16)
    draw = sparse(config, **shape, head_layout="blocked", head_dim=16, is_causal=is_causal)
    check_in_interpreter(draw)


@needs_interpreter
@pytest.mark.parametrize(
    ("pattern", "lengths", "is_causal"),
    [
        ("random", "packed", False),
        ("content_adaptive", "packed", True),
        ("strided", "right-padded", True),
        ("content_adaptive", "left-padded", False),
    ],
)
def test_triton_equals_the_reference_for_documents_in_the_interpreter(pattern, lengths, is_causal) -> None:
    shape = {"tokens": 85, "heads": 2, "kv_heads": 1, "segment_lengths": (40, 80), "dilation_rates": (1, 2)}
    draw = sparse(SparsePatternConfig(pattern, 0.5, 16), **shape, head_dim=16, is_causal=is_causal, lengths=lengths)
    check_in_interpreter(dataclasses.replace(draw, seed=2, dropout_p=0.3 if lengths == "packed" else 0.0))


@needs_interpreter
@pytest.mark.parametrize("lengths", ["whole", "packed"])
def test_triton_takes_heads_without_rows_in_the_interpreter(lengths) -> None:
    """Of a shard whose head would start at the second token of a sequence that has one."""
    shape = {"tokens": 1, "heads": 1, "kv_heads": 1, "segment_lengths": (16, 16), "dilation_rates": (2, 1)}
    check_in_interpreter(sparse(SparsePatternConfig(block_size=16), **shape, head_dim=16, shards=2, lengths=lengths))


@needs_interpreter
@pytest.mark.parametrize(("block_size", "is_causal"), [(32, True), (64, False)])
def test_tiles_larger_than_the_kernels_own_are_walked_in_pieces_in_the_interpreter(block_size, is_causal) -> None:
    """In float32 the gradients' kernels own and walk 32 rows, and forward owns 64 and walks 32."""
    shape = {"tokens": 200, "heads": 1, "kv_heads": 1, "segment_lengths": (256,), "dilation_rates": (1,)}
    config = SparsePatternConfig("random", 0.5, block_size)
    draw = sparse(config, **shape, head_dim=16, is_causal=is_causal, dropout_p=0.3)
    check_in_interpreter(draw)


@needs_interpreter
def test_triton_in_half_precision_is_close_in_the_interpreter() -> None:
    shape = RAGGED | {"tokens": 120, "heads": 3, "kv_heads": 3, "head_layout": "grouped"}
    draw = sparse(SparsePatternConfig("content_adaptive", 0.5, 16), **shape, head_dim=24, is_causal=True)
    check_in_interpreter(draw, torch.float16, 2e-2)


def test_keeping_every_tile_is_dense_dilated_attention() -> None:
    q, k, v = BASE.tensors(torch.float64)
    whole = dilated_attention(q, k, v, [16, 48], [1, 3], is_causal=True)
    for pattern in PATTERN_TYPES:
        config = SparsePatternConfig(pattern, 1.0, 4)
        torch.testing.assert_close(
            dilated_attention(q, k, v, [16, 48], [1, 3], is_causal=True, sparse_config=config), whole
        )


def test_one_softmax_runs_over_the_kept_tiles_of_all_branches() -> None:
    """With equal scores and all values 1 every row gives 1, and its lse counts the pairs that it sees."""
    q = torch.zeros(1, 64, 1, 4, dtype=torch.float64)
    v = torch.ones(1, 64, 1, 4, dtype=torch.float64)
    config = SparsePatternConfig("strided", 0.5, 8)
    out, lse = dilated_attention(q, q, v, [64, 64], [1, 1], sparse_config=config, return_lse=True)
    torch.testing.assert_close(out, v)
    torch.testing.assert_close(lse.exp(), torch.full_like(lse, 64.0))  # half of 64 keys, in two branches


def test_content_passes_gradients_through_kept_tiles_only() -> None:
    q, k, v = (torch.randn(1, 64, 1, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    config = SparsePatternConfig("content_adaptive", 0.25, 8)
    out = dilated_attention(q, k, v, [64], [1], sparse_config=config)
    (dv,) = torch.autograd.grad(out[0, :8].sum(), v)
    touched = dv[0, :, 0].abs().sum(-1).view(8, 8).gt(0)
    assert touched.sum(-1).tolist().count(8) == 2  # two whole tiles of keys, the row's own among them
    assert touched[0].all()


def test_a_result_repeats_bit_by_bit() -> None:
    draw = sparse(SparsePatternConfig("content_adaptive", 0.3, 4), **RAGGED, is_causal=True)
    one, other = (run(draw, "eager", torch.float32, through_lse=True) for _ in range(2))
    for name, x in one.items():
        assert torch.equal(x, other[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERN_TYPES)
def test_a_gpu_keeps_the_error_budget_for_every_pattern(pattern, is_causal, dtype) -> None:
    shape = {"tokens": 3001, "heads": 4, "kv_heads": 2, "segment_lengths": (1024, 1777), "dilation_rates": (1, 3)}
    draw = sparse(SparsePatternConfig(pattern, 0.3, 64), **shape, head_dim=64, batch=1, is_causal=is_causal)
    check_budget(draw, "triton", dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", LENGTHS[1:])
@pytest.mark.parametrize(
    ("pattern", "block_size"), [("random", 64), ("content_adaptive", 64), ("strided", 128), ("dilated_sparse", 16)]
)
def test_a_gpu_keeps_the_error_budget_for_documents(pattern, block_size, lengths) -> None:
    shape = {"tokens": 3001, "heads": 4, "kv_heads": 2, "segment_lengths": (1024, 1777), "dilation_rates": (1, 3)}
    shape |= {"batch": 1 if lengths == "packed" else 3, "is_causal": pattern != "random"}
    draw = sparse(SparsePatternConfig(pattern, 0.3, block_size), **shape, head_dim=64, lengths=lengths)
    check_budget(draw, "triton", torch.bfloat16, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["random", "content_adaptive"])
def test_a_captured_graph_chooses_the_tiles_of_new_lengths(pattern) -> None:
    config = SparsePatternConfig(pattern, 0.3, 64)
    tensors = [torch.randn(1, 3001, 4, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3)]

    def attend(spans):
        out = dilated_attention(*tensors, [1024, 1777], [1, 3], spans=spans, sparse_config=config, backend="triton")
        return out, *gradients_of(out, *tensors)

    spans = torch.tensor([[0, 700], [700, 700], [700, 2900]], device="cuda")
    other_spans = torch.tensor([[5, 90], [1500, 2201], [2201, 3001]], device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and makes what is remembered
        attend(spans)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend(spans)
    spans.copy_(other_spans)
    graph.replay()
    for one, other in zip(results, attend(other_spans)):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", PATTERN_TYPES)
def test_a_gpu_is_not_waited_for(pattern) -> None:
    spans = torch.tensor([[0, 700], [700, 2900]], device="cuda")
    x = torch.randn(1, 3001, 4, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def attend():
        config = SparsePatternConfig(pattern, 0.3, 64)
        out = dilated_attention(x, x, x, [1024, 1777], [1, 3], spans=spans, sparse_config=config, backend="triton")
        out.backward(out.detach())

    attend()  # compiles, and makes what is remembered
    get_global_pattern_cache().forget("block layout")
    if pattern == "random":  # draws on the CPU, once for all lengths
        attend()
        spans = spans.clone()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")  # a wait raises an error
    try:
        attend()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 32, 128, 256])
def test_a_gpu_takes_tiles_of_any_size(block_size) -> None:
    shape = {"tokens": 2100, "heads": 2, "kv_heads": 2, "segment_lengths": (2048,), "dilation_rates": (1,)}
    draw = sparse(SparsePatternConfig("random", 0.4, block_size), **shape, head_dim=64, batch=1, is_causal=True)
    check_budget(draw, "triton", torch.bfloat16, device="cuda")


# Tiles of the Hopper kernels' size; ragged ends, a dilated branch, grouped queries, two batch rows.
TILES_OF_128 = {"tokens": 3001, "heads": 4, "kv_heads": 2, "segment_lengths": (1024, 2777), "dilation_rates": (1, 3)}


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERN_TYPES)
def test_kernels_for_long_segments_walk_every_pattern(pattern, is_causal, plans) -> None:
    draw = sparse(SparsePatternConfig(pattern, 0.3, 128), **TILES_OF_128, head_dim=64, is_causal=is_causal)
    check_budget(draw, "triton", torch.bfloat16, device="cuda")
    plans.assert_hopper_ran()


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [5, None])
@pytest.mark.parametrize(
    ("head_dim", "is_causal", "changes"),
    [
        (128, False, {}),
        (128, True, {}),
        (48, True, {"head_layout": "grouped", "segment_lengths": (640, 2777), "dilation_rates": (1, 2)}),
    ],
)
def test_kernels_for_long_segments_walk_lists(head_dim, is_causal, changes, programs, plans, monkeypatch) -> None:
    """Few programs share out many tiles; some key tiles are in nobody's list."""
    if programs is not None:
        launch = pytest.importorskip("dilated_attention_pytorch.kernels.triton.hopper.launch", reason="needs Gluon")
        monkeypatch.setattr(launch, "_multiprocessors", lambda device: programs)
    draw = sparse(
        SparsePatternConfig("content_adaptive", 0.1, 128),
        **(TILES_OF_128 | changes),
        head_dim=head_dim,
        is_causal=is_causal,
    )
    check_budget(draw, "triton", torch.bfloat16, device="cuda")
    plans.assert_hopper_ran()
    one, other = (run(draw, "triton", torch.bfloat16, through_lse=True, device="cuda") for _ in range(2))
    for name, x in one.items():
        assert torch.equal(x, other[name]), name


@pytest.mark.gpu
def test_a_gpu_repeats_its_bits_with_dropout() -> None:
    shape = {"tokens": 1500, "heads": 4, "kv_heads": 2, "segment_lengths": (1024,), "dilation_rates": (1,)}
    draw = sparse(SparsePatternConfig("content_adaptive", 0.3, 64), **shape, head_dim=64, dropout_p=0.2)
    one, other = (run(draw, "triton", torch.bfloat16, through_lse=True, device="cuda") for _ in range(2))
    for name, x in one.items():
        assert torch.equal(x, other[name]), name
