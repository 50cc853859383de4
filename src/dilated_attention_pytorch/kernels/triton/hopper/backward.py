"""Backward of one branch on Hopper in one pass, with the same bits every time.

A *team* of programs owns a (segment, key/value head), and shares out its key tiles. For each, a member walks the query
tiles that see it:

    s^T = k q^T;  p^T = exp(s^T - lse);  dp^T = v do^T;  ds^T = p^T * (dp^T - delta)
    dv += p^T do;  dk += ds^T q;  dq = ds k

dk and dv stay in registers. dq is added up over the key tiles in the team's float32 scratch, which is as long as a
segment, not as the sequence, and so stays in L2. Additions to one query tile take turns in a fixed order. The members
begin at different query tiles and walk them as a ring, so that a member's turn has long come when it arrives: see
`turn_of`. When a query tile has all its sums, a member adds them to dq.

Three kinds of warps: a producer copies tiles in; two warpgroups compute, each for half of the rows of a key tile and, a
step later, when the other's half of ds is there, half of the columns of dq; two writers add dq to the scratch by the
copy engine and keep the turns. All programs must be on the GPU at once: there is one per multiprocessor, and the launch
is cooperative, so that no program starts before all of them can.

With a block layout a member walks a key tile's list of query tiles, once for each query head, from its beginning.
Later key tiles are taken, and add, before earlier ones. So whoever has the last of the key tiles that are not done yet
waits for nobody; and in the usual patterns, whose lists move on by one query tile from a key tile to the next, every
member comes to a query tile one step after the member before it.
"""

# mypy: ignore-errors

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dilated_attention_pytorch.kernels.triton.hopper.adding import add_dq
from dilated_attention_pytorch.kernels.triton.hopper.common import (
    LOG2_E,
    Dropout,
    Rows,
    advance,
    barriers,
    clear_rows,
    copy_rows,
    dropout_factors,
    dropout_keys,
    dropout_rows,
    keeps,
    pair_levels,
    synchronize_threads,
)
from dilated_attention_pytorch.kernels.triton.hopper.turns import (
    BLOCK_N,
    TURNS_PER_UNIT,
    Lists,
    Sizes,
    additions_to,
    first_step,
    grid_of,
    has_work,
    hole_of,
    key_tile_of,
    listed,
    locate,
    next_listed,
    next_query_tile,
    steps_around,
    total_steps,
)


class _Inputs(NamedTuple):
    """Shared memory that the producer fills."""

    q: Any
    do: Any
    k: Any
    v: Any
    lse: Any
    delta: Any
    words: Any  # of the query rows and their factors, for dropout
    factors: Any


class _Signals(NamedTuple):
    """Barriers, two of each but for the stages of keys and values."""

    q_full: Any
    do_full: Any
    empty: Any  # q, do, lse and delta
    kv_full: Any
    kv_empty: Any
    ds_full: Any
    ds_empty: Any
    dq_full: Any
    dq_empty: Any


@gluon.jit
def _produce(
    sources, inputs, signals, Lse, Delta, offsets, lines, lists, sizes, dropout,
    BLOCK_M: gl.constexpr, KV_STAGES: gl.constexpr, CAUSAL: gl.constexpr, DOCUMENTS: gl.constexpr, SPARSE: gl.constexpr,
    DROPOUT: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    q_rows, do_rows, k_rows, v_rows = sources
    N, H, rate, group, team_size = sizes.N, sizes.H, sizes.rate, sizes.group, sizes.team_size
    lane = gl.arange(0, BLOCK_M, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    member = gl.program_id(0) % team_size
    walked = 0
    held = 0
    held_phase = 1
    for unit in range(gl.program_id(0) // team_size, sizes.units, sizes.teams):
        b, kv, token, count = locate(unit, sizes, offsets, lines, DOCUMENTS)
        query_tiles = (count + BLOCK_M - 1) // BLOCK_M
        key_tiles = (count + BLOCK_N - 1) // BLOCK_N
        if SPARSE:
            grid = grid_of(lists, unit, 0, sizes)
        for round in range((key_tiles + team_size - 1) // team_size):
            key_tile = key_tile_of(round, member, team_size, key_tiles, SPARSE)
            hole = hole_of(key_tile, query_tiles, sizes, CAUSAL, FOLDED, BLOCK_M)
            steps = steps_around(hole, query_tiles, group)
            if has_work(key_tile, key_tiles, steps, FOLDED):
                mbarrier.wait(signals.kv_empty.index(held), held_phase)
                mbarrier.expect(signals.kv_full.index(held), k_rows.desc.block_type.nbytes * 2)
                row = key_tile * BLOCK_N
                signal = signals.kv_full.index(held)
                copy_rows(k_rows, b, token, row, kv, N, rate, signal, inputs.k.index(held), BLOCK_N)
                copy_rows(v_rows, b, token, row, kv, N, rate, signal, inputs.v.index(held), BLOCK_N)
                held, held_phase = advance(held, held_phase, KV_STAGES)
                g, tile = first_step(hole, query_tiles, member, sizes, FOLDED)
                if SPARSE:
                    g, at = gl.to_tensor(0), gl.to_tensor(0)
                    start, left = listed(lists, grid, key_tile, query_tiles, BLOCK_M)
                    steps = total_steps(lists, unit, left, key_tile, query_tiles, sizes, BLOCK_M)
                for _ in range(steps):
                    if SPARSE:
                        g, start, at, left, _, tile = next_listed(
                            lists, unit, g, start, at, left, key_tile, query_tiles, sizes, BLOCK_M
                        )
                    head = kv * group + g
                    row = tile * BLOCK_M
                    places = (b.to(gl.int64) * H + head) * N + token + (row + lane).to(gl.int64) * rate
                    lse = gl.load(Lse + places, mask=row + lane < count, other=0.0)
                    delta = gl.load(Delta + places, mask=row + lane < count, other=0.0)
                    stage = walked & 1
                    mbarrier.wait(signals.empty.index(stage), (walked >> 1 & 1) ^ 1)
                    signal = signals.q_full.index(stage)
                    mbarrier.expect(signal, q_rows.desc.block_type.nbytes)
                    copy_rows(q_rows, b, token, row, head, N, rate, signal, inputs.q.index(stage), BLOCK_M)
                    signal = signals.do_full.index(stage)
                    mbarrier.expect(signal, do_rows.desc.block_type.nbytes)
                    copy_rows(do_rows, b, token, row, head, N, rate, signal, inputs.do.index(stage), BLOCK_M)
                    inputs.lse.index(stage).store(lse * LOG2_E)
                    if DROPOUT:
                        delta = delta / dropout.keep_scale  # ds is multiplied by it at the end, in dq and dk
                        words = dropout_rows(dropout, b, head, token + (row + lane) * rate)
                        inputs.words.index(stage).store(words)
                        inputs.factors.index(stage).store(dropout_factors(words))
                    inputs.delta.index(stage).store(delta)
                    mbarrier.arrive(signals.q_full.index(stage), count=1)
                    walked += 1
                    if not SPARSE:
                        g, tile = next_query_tile(g, tile, hole, query_tiles, group, FOLDED)


@gluon.jit
def _give_dq(ds_smem, dq_smem, signals, k, step, WHICH: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr):
    """This warpgroup's half of the columns of a step's dq, into the writer's hands."""
    HALF: gl.constexpr = BLOCK_D // 2
    partial: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])  # (queries, D / 2)
    stage = step & 1
    phase = step >> 1 & 1
    mbarrier.wait(signals.ds_full.index(stage), phase)
    ds = ds_smem.index(stage).permute((1, 0))
    nothing = gl.zeros([BLOCK_M, HALF], gl.float32, partial)
    dq = warpgroup_mma(ds, k.slice(WHICH * HALF, HALF, dim=1), nothing, use_acc=False, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq])
    mbarrier.arrive(signals.ds_empty.index(stage), count=1)
    mbarrier.wait(signals.dq_empty.index(stage), phase ^ 1)
    dq_smem.index(stage).slice(WHICH * HALF, HALF, dim=1).store(dq)
    fence_async_shared()
    mbarrier.arrive(signals.dq_full.index(stage), count=1)


@gluon.jit
def _meet_queries(
    dk, dv, inputs, ds_smem, dq_smem, signals, no_scores, key_words, dropout, scale, levels, tile, first_key, count,
    held, walked, step, WHICH: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr,
    DOCUMENTS: gl.constexpr, DROPOUT: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    """A step of a warpgroup: its keys meet a query tile, and dk and dv grow."""
    dtype: gl.constexpr = inputs.q.dtype
    scores: gl.constexpr = no_scores.type.layout
    weights: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    row = tile * BLOCK_M
    stage = walked & 1
    phase = walked >> 1 & 1
    # The last term is 0, which the compiler does not know: else it would compute the addresses of all parts of k and v
    # before the loop, and keep them in registers that are needed.
    here = held + (walked >> 30)
    all_keys = inputs.k.index(here).reshape([BLOCK_N, BLOCK_D])
    k = all_keys.slice(WHICH * 64, 64, dim=0)
    v = inputs.v.index(here).reshape([BLOCK_N, BLOCK_D]).slice(WHICH * 64, 64, dim=0)
    q = inputs.q.index(stage).reshape([BLOCK_M, BLOCK_D])
    do = inputs.do.index(stage).reshape([BLOCK_M, BLOCK_D])
    mbarrier.wait(signals.q_full.index(stage), phase)
    if DOCUMENTS and row + BLOCK_M > count:
        mbarrier.wait(signals.do_full.index(stage), phase)
        clear_rows(q, count - row)
        clear_rows(do, count - row)
    s_later = warpgroup_mma(k, q.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    mbarrier.wait(signals.do_full.index(stage), phase)
    dp_later = warpgroup_mma(v, do.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    lse = inputs.lse.index(stage).load(gl.SliceLayout(0, scores))
    s = warpgroup_mma_wait(1, deps=[s_later])
    if FOLDED:
        p = gl.exp2(s * (scale * LOG2_E) - (lse[None, :] - levels))
    else:
        p = gl.exp2(s * (scale * LOG2_E) - lse[None, :])
    cut = (row + BLOCK_M > count) | (first_key + 64 > count)
    if CAUSAL:
        cut = cut | (row < first_key + 63)
    if cut:
        keys = first_key + gl.arange(0, 64, layout=gl.SliceLayout(1, scores))
        queries = row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, scores))
        sees = (keys < count)[:, None] & (queries < count)[None, :]
        if CAUSAL:
            sees = sees & (keys[:, None] <= queries[None, :])
        p = gl.where(sees, p, 0.0)
    delta = inputs.delta.index(stage).load(gl.SliceLayout(0, scores))
    dp = warpgroup_mma_wait(0, deps=[dp_later])
    if DROPOUT:
        words = inputs.words.index(stage).load(gl.SliceLayout(0, scores))
        factors = inputs.factors.index(stage).load(gl.SliceLayout(0, scores))
        kept = keeps(words[None, :], factors[None, :], key_words[:, None], dropout)
        kept_p = gl.where(kept, p, 0.0)
        dv_later = warpgroup_mma(gl.convert_layout(kept_p.to(dtype), weights), do, dv, is_async=True)
        ds = (kept_p * dp - p * delta[None, :]).to(dtype)
    else:
        dv_later = warpgroup_mma(gl.convert_layout(p.to(dtype), weights), do, dv, is_async=True)
        ds = (p * (dp - delta[None, :])).to(dtype)
    mbarrier.wait(signals.ds_empty.index(stage), phase ^ 1)
    ds_smem.index(stage).slice(WHICH * 64, 64, dim=0).store(ds)
    fence_async_shared()
    mbarrier.arrive(signals.ds_full.index(stage), count=1)
    dk_later = warpgroup_mma(gl.convert_layout(ds, weights), q, dk, is_async=True)
    if step > 0:  # of the step before: the other warpgroup's share of ds is there by now
        _give_dq(ds_smem, dq_smem, signals, all_keys, walked - 1, WHICH, BLOCK_D, BLOCK_M)
    dk, dv = warpgroup_mma_wait(0, deps=[dk_later, dv_later])
    mbarrier.arrive(signals.empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _consume(
    given, WHICH: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, KV_STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, DOCUMENTS: gl.constexpr, SPARSE: gl.constexpr, DROPOUT: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    """A warpgroup that owns 64 rows of every key tile, and half of the columns of dq."""
    gradients, Scratch, Turns, inputs, ds_smem, dq_smem, signals, offsets, lines, lists, sizes, dropout, scale = given
    Dq, Dk, Dv, continues = gradients
    H, rate, rows, group, team_size = sizes.H, sizes.rate, sizes.rows, sizes.group, sizes.team_size
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])  # (keys, queries)
    grads: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])  # (keys, D)
    memory: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BLOCK_D, BLOCK_D // 4], [4, 1], [1, 0])
    no_scores = gl.zeros([64, BLOCK_M], gl.float32, scores)
    columns = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, grads))
    wide = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, memory))
    member = gl.program_id(0) % team_size
    team = gl.program_id(0) // team_size
    ds_scale = scale * dropout.keep_scale if DROPOUT else scale
    walked = 0  # steps of all units: two stages each of queries, ds and dq, in step
    held = 0
    held_phase = 0
    epoch = 0
    for unit in range(team, sizes.units, sizes.teams):
        b, kv, token, count = locate(unit, sizes, offsets, lines, DOCUMENTS)
        origin = b.to(gl.int64) * sizes.N + token
        levels = no_scores
        if FOLDED:
            levels = pair_levels(gl.load(offsets + H // group + kv), sizes.periods, scores, 64, BLOCK_M)
        query_tiles = (count + BLOCK_M - 1) // BLOCK_M
        key_tiles = (count + BLOCK_N - 1) // BLOCK_N
        if SPARSE:
            grid = grid_of(lists, unit, 0, sizes)
        for round in range((key_tiles + team_size - 1) // team_size):
            key_tile = key_tile_of(round, member, team_size, key_tiles, SPARSE)
            hole = hole_of(key_tile, query_tiles, sizes, CAUSAL, FOLDED, BLOCK_M)
            steps = steps_around(hole, query_tiles, group)
            if has_work(key_tile, key_tiles, steps, FOLDED):
                first_key = key_tile * BLOCK_N + WHICH * 64
                dk = gl.zeros([64, BLOCK_D], gl.float32, grads)
                dv = gl.zeros([64, BLOCK_D], gl.float32, grads)
                _, tile = first_step(hole, query_tiles, member, sizes, FOLDED)
                if SPARSE:
                    g, at = gl.to_tensor(0), gl.to_tensor(0)
                    start, left = listed(lists, grid, key_tile, query_tiles, BLOCK_M)
                    steps = total_steps(lists, unit, left, key_tile, query_tiles, sizes, BLOCK_M)
                own_keys = first_key + gl.arange(0, 64, layout=gl.SliceLayout(1, scores))
                key_words = dropout_keys(dropout, token + own_keys * rate) if DROPOUT else own_keys  # then not read
                mbarrier.wait(signals.kv_full.index(held), held_phase)
                if DOCUMENTS:
                    # Behind a document may lie anything, NaN too, and 0 times that is not 0.
                    left = count - key_tile * BLOCK_N
                    if left < BLOCK_N:
                        clear_rows(inputs.k.index(held).reshape([BLOCK_N, BLOCK_D]), left)
                        clear_rows(inputs.v.index(held).reshape([BLOCK_N, BLOCK_D]), left)
                for step in range(steps):
                    if SPARSE:
                        g, start, at, left, _, tile = next_listed(
                            lists, unit, g, start, at, left, key_tile, query_tiles, sizes, BLOCK_M
                        )
                    dk, dv = _meet_queries(
                        dk, dv, inputs, ds_smem, dq_smem, signals, no_scores, key_words, dropout, scale, levels, tile,
                        first_key, count, held, walked, step, WHICH, BLOCK_D, BLOCK_M, CAUSAL, DOCUMENTS, DROPOUT,
                        FOLDED,
                    )  # fmt: skip
                    walked += 1
                    if not SPARSE:
                        _, tile = next_query_tile(0, tile, hole, query_tiles, group, FOLDED)
                met_any = steps > 0 if SPARSE else True
                if met_any:
                    all_keys = inputs.k.index(held).reshape([BLOCK_N, BLOCK_D])
                    _give_dq(ds_smem, dq_smem, signals, all_keys, walked - 1, WHICH, BLOCK_D, BLOCK_M)
                mbarrier.arrive(signals.kv_empty.index(held), count=1)
                held, held_phase = advance(held, held_phase, KV_STAGES)
                keys = first_key + gl.arange(0, 64, layout=gl.SliceLayout(1, grads))
                into = ((origin + keys.to(gl.int64) * rate) * (H // group) + kv)[:, None] * D + columns[None, :]
                inside = (keys < count)[:, None] & (columns < D)[None, :]
                dk = dk * ds_scale
                if DROPOUT:
                    dv = dv * dropout.keep_scale
                dk += gl.load(Dk + into, mask=inside & continues, other=0.0).to(gl.float32)
                dv += gl.load(Dv + into, mask=inside & continues, other=0.0).to(gl.float32)
                gl.store(Dk + into, dk.to(Dk.dtype.element_ty), mask=inside)
                gl.store(Dv + into, dv.to(Dv.dtype.element_ty), mask=inside)
        tiles = rows // BLOCK_M
        for share in range(member * 2 + WHICH, group * tiles, team_size * 2):
            g = share // tiles
            tile = share % tiles
            place = (team * group + g) * rows + tile * BLOCK_M
            pointer = Turns + place // BLOCK_M
            additions = additions_to(tile, key_tiles, sizes, CAUSAL, FOLDED, BLOCK_M)
            if has_work(tile, query_tiles, additions, FOLDED):
                if SPARSE:
                    row = grid_of(lists, unit, g, sizes) + tile // (BLOCK_N // BLOCK_M)
                    additions = gl.load(lists.key_first + row + 1) - gl.load(lists.key_first + row)
                while gl.atomic_add(pointer, 0, sem="acquire", scope="gpu") != epoch + additions:
                    pass
                synchronize_threads()
                queries = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, memory))
                sums = Scratch + place.to(gl.int64) * BLOCK_D + queries[:, None] * BLOCK_D + wide[None, :]
                dq = gl.load(sums, cache_modifier=".cg") * ds_scale
                queries = tile * BLOCK_M + queries
                into = ((origin + queries.to(gl.int64) * rate) * H + kv * group + g)[:, None] * D + wide[None, :]
                inside = (queries < count)[:, None] & (wide < D)[None, :]
                dq += gl.load(Dq + into, mask=inside & continues, other=0.0).to(gl.float32)
                gl.store(Dq + into, dq.to(Dq.dtype.element_ty), mask=inside)
                synchronize_threads()
            # The scratch may be used for the next unit: its turns count from here. The last unit leaves zeros, as it
            # found them, for the next branch.
            following = gl.where(unit + sizes.teams < sizes.units, epoch + TURNS_PER_UNIT, 0)
            gl.atomic_xchg(pointer, following, sem="release", scope="gpu")
        epoch += TURNS_PER_UNIT


# Numbers that vary from call to call: specialising on them would compile anew.
_VARYING = (*Sizes._fields, "turns_at", "rows_per_batch_row", "continues", *Dropout._fields[1:3], "threshold")


@gluon.jit(do_not_specialize=_VARYING)
def backward_kernel(
    q_desc, q_tail, do_desc, do_tail, k_desc, k_tail, v_desc, v_tail, scratch_desc,
    Lse, Delta, Dq, Dk, Dv, Scratch, Lines, offsets, seed,
    Grids, First, Queries, QueryTurns, KeyFirst,
    N, H, W, rate, heads, first_head, rows, slots_per_row, units, teams, team_size, lag, group, skipped, periods,
    turns_at, rows_per_batch_row, continues, head_offset, first_position, threshold, keep_scale, scale,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, KV_STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, DOCUMENTS: gl.constexpr, SPARSE: gl.constexpr, DROPOUT: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    """`Grids` to `KeyFirst` and `rows_per_batch_row` are a block layout's lists, and not read without one."""
    Turns = (Scratch + turns_at).to(gl.pointer_type(gl.int32), bitcast=True)
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, 1, BLOCK_M, BLOCK_D], do_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [KV_STAGES, 1, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [KV_STAGES, 1, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ds_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_M], ds_layout)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M, BLOCK_D], scratch_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    delta_smem = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    signals = _Signals(
        barriers(2, 2),  # q is there: its copy, and lse and delta
        barriers(2, 1),
        barriers(2, 2),
        barriers(KV_STAGES, 1),
        barriers(KV_STAGES, 2),
        barriers(2, 2),
        barriers(2, 2),
        barriers(2, 2),
        barriers(2, 1),
    )
    fence_async_shared()
    sources = Rows(q_desc, q_tail), Rows(do_desc, do_tail), Rows(k_desc, k_tail), Rows(v_desc, v_tail)
    words, factors = lse_smem, lse_smem
    if DROPOUT:
        words = gl.allocate_shared_memory(gl.uint32, [2, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        factors = gl.allocate_shared_memory(gl.uint32, [2, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    inputs = _Inputs(q_smem, do_smem, k_smem, v_smem, lse_smem, delta_smem, words, factors)
    dropout = Dropout(seed, head_offset, first_position, keep_scale, threshold)
    if DOCUMENTS:
        units = gl.load(Lines) * heads
    sizes = Sizes(
        N, H, W, rate, heads, first_head, rows, slots_per_row, units, teams, team_size, lag, group, skipped, periods
    )
    lists = Lists(offsets, offsets, offsets, offsets, offsets, N)
    if SPARSE:
        lists = Lists(Grids, First, Queries, QueryTurns, KeyFirst, rows_per_batch_row)
    gradients = (Dq, Dk, Dv, continues != 0)  # of earlier branches, if there are any
    given = (
        gradients, Scratch, Turns, inputs, ds_smem, dq_smem, signals, offsets, Lines, lists, sizes, dropout, scale
    )  # fmt: skip
    # A tuple of constants would not stay constant, so the lists are written out.
    gl.warp_specialize(
        [
            (_consume, (given, 0, D, BLOCK_D, BLOCK_M, KV_STAGES, CAUSAL, DOCUMENTS, SPARSE, DROPOUT,
                        FOLDED)),
            (_consume, (given, 1, D, BLOCK_D, BLOCK_M, KV_STAGES, CAUSAL, DOCUMENTS, SPARSE, DROPOUT,
                        FOLDED)),
            (_produce, (sources, inputs, signals, Lse, Delta, offsets, Lines, lists, sizes, dropout,
                        BLOCK_M, KV_STAGES, CAUSAL, DOCUMENTS, SPARSE, DROPOUT, FOLDED)),
            (add_dq, (scratch_desc, Turns, dq_smem, signals, offsets, Lines, lists, sizes, 0,
                      BLOCK_M, CAUSAL, DOCUMENTS, SPARSE, FOLDED)),
            (add_dq, (scratch_desc, Turns, dq_smem, signals, offsets, Lines, lists, sizes, 1,
                      BLOCK_M, CAUSAL, DOCUMENTS, SPARSE, FOLDED)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )  # fmt: skip
