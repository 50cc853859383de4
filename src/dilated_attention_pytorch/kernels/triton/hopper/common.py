"""What the Hopper kernels share: how the rows of a (segment, head) come into shared memory.

Row `t` of a segment, for a head with offset `o`, is the token `start + o + t * r`. As the tensor copy engine sees it, a
tensor `(B, N, H, D)` is `(B, r, H, N // r, D)`: token `x` is `(x % r, x // r)`, and the rows of a tile are consecutive
in the fourth dimension, whatever `start` and `o`. The `N % r` last tokens do not fit into that shape; a second
descriptor, `tail`, starts `N % r` tokens later and ends with the last one, and is used for tiles that reach the end.
So no copy leaves the tensor, and rows past the end read as 0.
"""

# mypy: ignore-errors

from typing import Any, NamedTuple

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
GOLDEN = gl.constexpr(0x9E3779B9)
synchronize_threads = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # Triton 3.6, 3.7


class Rows(NamedTuple):
    """A tensor's two descriptors."""

    desc: Any
    tail: Any


@gluon.jit
def copy_rows(source, b, token, row, head, N, rate, barrier, smem, ROWS: gl.constexpr):
    """Start copying rows `[row, row + ROWS)` of the grid that begins at `token`."""
    c = token % rate
    t = token // rate + row
    if t + ROWS <= N // rate:
        tma.async_copy_global_to_shared(source.desc, [b, c, head, t, 0], barrier, smem)
    else:
        rest = N % rate
        wraps = c < rest
        c = gl.where(wraps, c - rest + rate, c - rest)
        t = gl.where(wraps, t - 1, t)
        tma.async_copy_global_to_shared(source.tail, [b, c, head, t, 0], barrier, smem)


class Dropout(NamedTuple):
    """What decides which probabilities of a call are dropped: see `core.dropout`."""

    seed: Any
    head_offset: Any
    first_position: Any
    keep_scale: Any
    threshold: Any


@gluon.jit
def mix(word):
    word = word.to(gl.uint32)
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@gluon.jit
def dropout_rows(dropout, b, head, tokens):
    """The words of query rows."""
    word = mix(gl.load(dropout.seed).to(gl.uint32) + GOLDEN)
    word = mix(word ^ mix(gl.load(dropout.seed + 1).to(gl.uint32) + GOLDEN))
    word = mix(word ^ mix(b.to(gl.uint32) + GOLDEN))
    word = mix(word ^ mix((head + dropout.head_offset).to(gl.uint32) + GOLDEN))
    return mix(word ^ mix((dropout.first_position + tokens).to(gl.uint32) + GOLDEN))


@gluon.jit
def dropout_keys(dropout, tokens):
    return mix((dropout.first_position + tokens).to(gl.uint32) + GOLDEN)


@gluon.jit
def dropout_factors(row_words):
    return mix(row_words + GOLDEN) | 1


@gluon.jit
def keeps(row_words, factors, key_words, dropout):
    return factors * key_words + row_words >= dropout.threshold.to(gl.uint32)


@gluon.jit
def _row_levels(rows, phase, periods):
    """As `primitives.row_levels`."""
    # A thread's rows agree in the three low bits, and its columns have two values of them: the compiler computes two
    # levels per thread.
    place = (rows & 7) - phase
    count = rows * 0
    for exponent in gl.static_range(1, 4):
        is_on = ((place & ((1 << exponent) - 1)) == 0) & (periods & (1 << exponent) != 0)
        count += is_on.to(gl.int32)
    return gl.where(count < 2, count.to(gl.float32), gl.where(count == 2, 1.5849625, 2.0))


@gluon.jit
def pair_levels(phase, periods, scores: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """What to add to the scores, to base 2, of a tile whose pairs count as often as `core.folding` says.

    It is the same for all tiles of a head: they begin at multiples of all periods.
    """
    rows = _row_levels(gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores)), phase, periods)
    columns = _row_levels(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, scores)), phase, periods)
    return gl.minimum(rows[:, None], columns[None, :])


@gluon.jit
def clear_rows(smem, first):
    """Set the rows of a tile in shared memory from `first` on to 0, for products that follow."""
    ROWS: gl.constexpr = smem.shape[0]
    COLUMNS: gl.constexpr = smem.shape[1]
    PIECE: gl.constexpr = 16
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [gl.num_warps(), 1], [1, 0])
    for i in gl.static_range(ROWS // PIECE):
        if first < (i + 1) * PIECE:
            piece = smem.slice(i * PIECE, PIECE, dim=0)
            rows = i * PIECE + gl.arange(0, PIECE, layout=gl.SliceLayout(1, layout))
            piece.store(gl.where((rows < first)[:, None], piece.load(layout), 0.0))
    fence_async_shared()
    synchronize_threads()


@gluon.jit
def barriers(COUNT: gl.constexpr, arrivals: gl.constexpr):
    """COUNT barriers that complete a phase after so many arrivals. All of them must be used.

    The compiler gives the memory of an unused one to data, though it was never invalidated. With such a barrier, output
    tiles had wrong elements where processes shared a GPU, perhaps because the GPU restores barriers when it switches.
    """
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=arrivals)
    return found


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next stage of a ring of STAGES, and the phase of its barriers: it turns over when the ring begins anew."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@builtin
def add_tile(desc, coordinates, smem, _semantic=None):
    """Start adding a tile of shared memory to a tensor: the copy engine's reduction, which Gluon has not named yet."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coordinates, smem.handle)


@gluon.jit
def wait_for_stores():
    """Wait until all that this warp started to store or add has arrived in memory, not only left shared memory."""
    _by_each_lane("cp.async.bulk.wait_group 0;")
    synchronize_threads()


@gluon.jit
def order_copies_after_reads():
    """What this warp copies to memory from here on comes after what its reads and atomics have seen."""
    _by_each_lane("fence.proxy.async.global;")


@gluon.jit
def _by_each_lane(INSTRUCTION: gl.constexpr):
    gl.static_assert(gl.num_warps() == 1)
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    asm: gl.constexpr = INSTRUCTION + " mov.b32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1)
