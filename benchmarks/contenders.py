"""The contenders: our backends, and the strongest baselines for the same case."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Case
from benchmarks.peers import build_torchscale, load_torchscale, without_projections
from benchmarks.suite import check_names
from dilated_attention_pytorch.core.block_layout import layout_for
from dilated_attention_pytorch.core.block_pattern import tiles_of
from dilated_attention_pytorch.functional import dilated_attention

# Dense attention with more elements is measured in several calls: its kernels may count in 32 bits.
ELEMENTS_PER_CALL = 1 << 30

OURS, FLOOR, SAME_TOKENS, TORCHSCALE = "ours", "dense, same FLOPs", "dense, same tokens", "torchscale"
FLEX, EVERY_TILE, DROPOUT = "FlexAttention", "ours, every tile", "ours, dropout 0.1"
OURS_CAPTURED, DENSE_CAPTURED = "ours, CUDA graph", "dense, same tokens, CUDA graph"
FA4, FLEX_FLASH = "FlashAttention-4, same FLOPs", "FlexAttention, FLASH backend"
PLAIN, FLASH = "ours, plain kernels", "flash kernel, same FLOPs"
NO_CHECKOUT = "give --torchscale PATH, a checkout of microsoft/torchscale, to measure it"


@dataclass(frozen=True)
class Ready:
    """A contender that is set up for a case: the call to time, its FLOPs, and PyTorch's settings for it."""

    call: Callable[[], object]
    flops: int
    settings: AbstractContextManager[None] = field(default_factory=nullcontext)


Setup = Callable[[Case], "Ready | str"]
"""Sets up a case, or says why this contender sits it out."""
Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""Dense attention of q, k and v, `(B, H, N, D)`, causal or not."""


def _sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])


def choose_contenders(
    only: Sequence[str] = (), torchscale: Path | None = None, kernels: str = "best"
) -> dict[str, Setup]:
    """The contenders by name, or those in `only`; torchscale sits out unless a checkout of it is given.

    With `kernels="plain"` they are those that any GPU since compute capability 8.0 can run.
    """
    if kernels == "plain":
        if torchscale is not None:
            raise ValueError("--kernels plain does not measure torchscale: leave --kernels or --torchscale out")
        plain: dict[str, Setup] = {
            PLAIN: ours("auto", kernels="plain"),
            FLASH: functools.partial(dense_at_the_same_flops, flash=True),
        }
        return named_contenders(plain, only, torchscale)
    contenders: dict[str, Setup] = {
        OURS: ours("auto"),
        FLOOR: dense_at_the_same_flops,
        SAME_TOKENS: dense_at_the_same_tokens,
        FA4: flash_attention_4,
        FLEX: flex_attention,
        FLEX_FLASH: flex_attention_by_flash,
        TORCHSCALE: torchscale_from(torchscale),
        "ours, eager": ours("eager"),
        EVERY_TILE: every_tile,
        DROPOUT: ours("auto", dropout_p=0.1),
        OURS_CAPTURED: captured(ours("auto")),
        DENSE_CAPTURED: captured(dense_at_the_same_tokens, functools.partial(dense_at_the_same_tokens, flash=True)),
    }
    return named_contenders(contenders, only, torchscale)


def named_contenders(contenders: dict[str, Setup], only: Sequence[str], torchscale: Path | None) -> dict[str, Setup]:
    """All contenders, or those named."""
    if not only:
        return contenders
    check_names("only", only, contenders)
    if TORCHSCALE in only and torchscale is None:
        raise ValueError("the contender 'torchscale' needs --torchscale PATH, a checkout of microsoft/torchscale")
    return {name: contenders[name] for name in only}


def ours(backend: str, dropout_p: float = 0.0, kernels: str = "best") -> Setup:
    def setup(case: Case) -> Ready | str:
        if kernels == "plain" and case.device == "cpu":
            return "measured on a GPU"
        if dropout_p and (case.tokens != 131_072 or case.device == "cpu" or case.pattern is not None):
            return "measured on a GPU at 131,072 tokens"
        if backend == "eager" and case.device == "cpu":
            return f"what `{OURS}` runs on a CPU"
        if backend == "eager" and (case.tokens > 1 << 15 or case.pattern is not None):
            return "slow: left out past 32,768 tokens on a GPU, and with a block pattern"
        q, k, v, do = case.tensors()

        def attend() -> Tensor:
            return dilated_attention(
                q,
                k,
                v,
                case.segment_lengths,
                case.dilation_rates,
                is_causal=case.is_causal,
                head_layout=case.head_layout,
                sparse_config=case.sparse_config,
                dropout_p=dropout_p,
                backend=backend,
            )

        settings = _plain_kernels() if kernels == "plain" else nullcontext()
        return Ready(_step(attend, (q, k, v), do, case.backward), case.flops, settings)

    return setup


@contextmanager
def _plain_kernels() -> Iterator[None]:
    from dilated_attention_pytorch.kernels.triton import plan

    before, plan.KERNELS = plan.KERNELS, "plain"
    try:
        yield
    finally:
        plan.KERNELS = before


def captured(*setups: Setup) -> Setup:
    """A contender whose call is captured in a CUDA graph, and replayed without the host's part of it.

    It is the first of `setups` that can be captured.
    """

    def captured_setup(case: Case) -> Ready | str:
        if case.device == "cpu" or case.tokens > 8192 or case.pattern is not None:
            return "measured on a GPU up to 8,192 tokens, where the host may take longer than the GPU"
        for setup in setups:
            ready = setup(case)
            if isinstance(ready, str):
                return ready
            try:
                return Ready(_capture(ready).replay, ready.flops)
            except RuntimeError:
                if setup is setups[-1]:
                    raise
        raise ValueError("captured takes at least one contender")

    return captured_setup


def _capture(ready: Ready) -> torch.cuda.CUDAGraph:
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    # The stream is entered here too, because a capture that fails does not leave it.
    with ready.settings, _random_state_of_its_own(), torch.cuda.stream(side):
        for _ in range(3):
            ready.call()
        # Backward runs in a thread of its own, which may ask CUDA for what other modes refuse during a capture.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="relaxed"):
            ready.call()
    return graph


@contextmanager
def _random_state_of_its_own() -> Iterator[None]:
    """A state of the random generator for a capture: one that fails leaves its state unusable."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(before)


def every_tile(case: Case) -> Ready | str:
    """The same case through the same kernels with a layout that keeps every tile: shows what sparsity saves."""
    if case.pattern is None:
        return "measured where a block pattern keeps some tiles"
    return ours("auto")(replace(case, sparsity_ratio=1.0))


def dense_at_the_same_flops(case: Case, flash: bool = False, attend: Attend = _sdpa) -> Ready | str:
    """Dense attention on sequences as long as the rows of a branch, enough of them for the same FLOPs.

    By PyTorch's fastest kernel, or by its `flash` kernel, which runs on any GPU since compute capability 8.0, or by
    another function.
    """
    w, r = case.segment_lengths[0], case.dilation_rates[0]
    rows = min(-(-w // r), case.tokens)
    sequences = max(1, round(case.flops / _dense_flops(case, rows)))
    calls = -(-sequences * rows * case.heads * case.head_dim // ELEMENTS_PER_CALL)
    return _dense(case, round(sequences / calls), rows, calls, flash, attend)


def flash_attention_4(case: Case) -> Ready | str:
    if case.device == "cpu":
        return "runs on GPUs"
    try:
        from flash_attn.cute.interface import flash_attn_func
    except ImportError as error:
        return (
            f"cannot be imported ({error}): give --with PATH, where the wheel flash-attn-4 and its needs are unpacked"
        )

    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        found = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=is_causal)
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    return dense_at_the_same_flops(case, attend=attend)


def dense_at_the_same_tokens(case: Case, flash: bool = False) -> Ready | str:
    """One call of dense attention over all tokens: shows what dilation saves. By the same kernels."""
    most = 1 << 15 if case.device == "cuda" else 1 << 13
    if case.tokens > most:
        return f"quadratic: left out past {most:,} tokens"
    return _dense(case, 1, case.tokens, flash=flash)


def flex_attention_by_flash(case: Case) -> Ready | str:
    """FlexAttention on FlashAttention-4's kernels."""
    if isinstance(reason := flash_attention_4(case), str):
        return reason
    return flex_attention(case, {"BACKEND": "FLASH"})


def flex_attention(case: Case, options: Any = None) -> Ready | str:
    """FlexAttention with the union of the branches as its mask. A key counts once, which is less work than ours.

    With a block pattern on one undilated segment, it gets exactly the tiles that ours keeps.
    """
    if case.pattern is not None:
        if case.device != "cuda" or case.dilation_rates != (1,) or case.segment_lengths[0] < case.tokens:
            return "measured on a GPU; has a block mask for one undilated segment"
        return _masked_by(tile_mask(case), case, options)
    if case.device != "cuda" or case.tokens != 1 << 15 or case.head_dim != 64 or case.is_causal or case.kv_heads:
        return "compiles for long: measured on a GPU at 32,768 tokens, D=64, not causal"
    from torch.nn.attention.flex_attention import create_block_mask

    spec = case.spec
    offsets = torch.tensor([[-1 if o is None else o for o in row] for row in spec.offsets(case.heads)], device="cuda")

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        found = torch.zeros_like(i, dtype=torch.bool)
        for index, branch in enumerate(spec.branches):
            w, r, o = branch.segment_length, branch.dilation_rate, offsets[index][h]
            found = found | ((i // w == j // w) & (i % w % r == o) & (j % w % r == o))
        return found

    mask = create_block_mask(sees, None, case.heads, case.tokens, case.tokens, device="cuda")
    return _masked_by(mask, case, options)


def _masked_by(mask: Any, case: Case, options: Any) -> Ready:
    from torch.nn.attention.flex_attention import flex_attention as flex

    q, k, v, do = (x.transpose(1, 2) for x in case.tensors())
    compiled = torch.compile(flex)

    def attend() -> Tensor:
        return compiled(q, k, v, block_mask=mask, kernel_options=options)

    return Ready(_step(attend, (q, k, v), do, case.backward), case.flops)


def tile_mask(case: Case) -> Any:
    """FlexAttention's block mask for a case with one undilated segment: full tiles, and tiles that causality cuts."""
    from torch.nn.attention.flex_attention import BlockMask

    config = case.sparse_config
    assert config is not None
    layout = layout_for(case.spec, case.tokens, case.spec.offsets(1), config, case.is_causal, torch.device(case.device))
    branch = layout.branches[0]
    assert branch is not None
    tiles = tiles_of(case.tokens, config.block_size)
    kept = branch.mask(0, 0, 0, tiles)
    ragged = torch.zeros_like(kept)
    if case.is_causal:
        ragged.fill_diagonal_(True)
    if case.tokens % config.block_size:
        ragged[:, -1] = True

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (j < case.tokens) if case.is_causal else j < case.tokens

    cut, whole = kept & ragged, kept & ~ragged
    return BlockMask.from_kv_blocks(
        *_tile_lists(cut),
        *_tile_lists(whole),
        BLOCK_SIZE=config.block_size,
        mask_mod=sees,
        seq_lengths=(case.tokens, case.tokens),
    )


def _tile_lists(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The number of tiles in each row of tiles, `(1, 1, T)`, and their indices in front, `(1, 1, T, T)`."""
    order = chosen.int().sort(dim=-1, stable=True, descending=True).indices
    return chosen.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


def torchscale_from(checkout: Path | None) -> Setup:
    if checkout is None:
        return lambda case: NO_CHECKOUT
    attention_class = load_torchscale(checkout)

    def setup(case: Case) -> Ready | str:
        if case.pattern is not None or case.kv_heads is not None:
            return "has no block patterns, and no grouped queries"
        if case.head_layout == "grouped":
            return "puts every head on every branch"
        if any(w % r for w, r in zip(case.segment_lengths, case.dilation_rates)):
            return "computes something else where a rate does not divide its segment length"
        if case.head_dim != 64 or case.tokens > 1 << 20:
            return "measured at D=64, up to 1,048,576 tokens"
        return torchscale_alone(attention_class, case)

    return setup


def torchscale_alone(attention_class: Any, case: Case) -> Ready:
    """torchscale's attention without projections."""
    shape = case.heads, case.head_dim, case.segment_lengths, case.dilation_rates
    attention = without_projections(build_torchscale(attention_class, *shape))
    q, k, v, do = (x.detach().flatten(2).requires_grad_(x.requires_grad) for x in case.tensors())

    def attend() -> Tensor:
        return attention(q, k, v, is_causal=case.is_causal)[0]

    return Ready(_step(attend, (q, k, v), do, case.backward), case.flops)


def _dense(case: Case, sequences: int, rows: int, calls: int = 1, flash: bool = False, attend: Attend = _sdpa) -> Ready:
    tensors = case.tensors(sequences, rows)
    q, k, v, do = (x.transpose(1, 2) for x in tensors)

    once = _step(lambda: attend(q, k, v, case.is_causal), (q, k, v), do, case.backward)

    def call() -> None:
        for _ in range(calls):
            once()

    return Ready(call, calls * sequences * _dense_flops(case, rows), _dense_kernel(case.device, flash))


def _dense_flops(case: Case, rows: int) -> int:
    """FLOPs of one sequence of `rows` rows, counted as in `Case.flops`."""
    whole: dict[str, Any] = {"segment_lengths": (rows,), "dilation_rates": (1,), "head_layout": "interleaved"}
    return replace(case, tokens=rows, pattern=None, **whole).flops


def _step(attend: Callable[[], Tensor], inputs: tuple[Tensor, ...], do: Tensor, backward: bool) -> Callable[[], object]:
    if not backward:
        return attend
    return lambda: torch.autograd.grad(attend(), inputs, do)


def _dense_kernel(device: str, flash: bool) -> AbstractContextManager[None]:
    if device != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fastest = [] if flash else [SDPBackend.CUDNN_ATTENTION]
    return sdpa_kernel([*fastest, SDPBackend.FLASH_ATTENTION], set_priority=True)
