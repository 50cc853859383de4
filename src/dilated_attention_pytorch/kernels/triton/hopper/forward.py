"""Forward of one branch on Hopper: a producer warpgroup copies tiles, CONSUMERS warpgroups own 64 query rows each.

The mathematics is that of `triton.forward`. Key tiles are walked from the last, the only one that needs a mask, to the
first. A consumer issues the product `q k^T` of the next tile before `p v` of this one, so that its softmax runs while
the tensor cores work; the consumers wait for each other only through the tiles that they share.
The grid is persistent: `works` shares out the tiles of query rows. Only the producer knows about that: with the rows of
a tile it hands the consumers an order, which says where the tile is. The copies of a program's next tile, and its first
product, do not wait until the last one is stored.

With a block layout, whose tiles are as large as those here, a query tile's list of key tiles is walked in their place:
see `triton.block_sparse`. Again only its last one may need a mask. Where branches are folded into each other (FOLDED),
a pair counts as often as `core.folding` says: the logarithm of that number is subtracted from the maximum. Key tiles
that a finer branch computes are left out.
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

from dilated_attention_pytorch.kernels.triton.hopper.common import (
    LN_2,
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
from dilated_attention_pytorch.kernels.triton.hopper.works import (
    Lists,
    Sizes,
    exists,
    key_tile_at,
    key_tiles,
    keys_of,
    line_of,
    listed,
    next_work,
    place_of,
    row_pointers,
    rows_before,
    segment_rows,
    tile_of,
    work_at,
)


class _Signals(NamedTuple):
    """Barriers between the producer and the consumers, for every stage; and the consumers' turns."""

    q_full: Any  # and the order
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    turns: Any
    landed: Any  # values whose last rows lie behind a document


class _Order(NamedTuple):
    """What a consumer must know of a tile of query rows: a `Place`, the tile in it, and its list of key tiles."""

    b: Any
    head: Any
    token: Any
    count: Any  # 0: there are no more tiles
    tile: Any
    steps: Any  # how many key tiles it meets, and the last of them
    last: Any
    phase: Any  # of the head, where branches are folded into each other


@gluon.jit
def _slot(orders, done):
    """After `done` tiles: where the rows and the order of the next one lie, and the phase of their barriers."""
    SLOTS: gl.constexpr = orders.shape[0]
    return done % SLOTS, done // SLOTS & 1


@gluon.jit
def _give_order(orders, signal, order):
    lane = gl.arange(0, 8, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    words = gl.where(lane == 0, order.b, gl.where(lane == 1, order.head, order.token))
    words = gl.where(lane == 3, order.count, gl.where(lane == 4, order.tile, words))
    words = gl.where(lane == 5, order.steps, gl.where(lane == 6, order.last, words))
    words = gl.where(lane == 7, order.phase, words)
    orders.store(words)
    synchronize_threads()
    mbarrier.arrive(signal, count=1)


@gluon.jit
def _word(words, i: gl.constexpr):
    return gl.sum(gl.where(gl.arange(0, 8, layout=words.type.layout) == i, words, 0), 0)


@gluon.jit
def _await_order(orders, signals, done):
    slot, phase = _slot(orders, done)
    mbarrier.wait(signals.q_full.index(slot), phase)
    words = orders.index(slot).load(gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    place = _word(words, 0), _word(words, 1), _word(words, 2), _word(words, 3)
    return _Order(*place, _word(words, 4), _word(words, 5), _word(words, 6), _word(words, 7))


@gluon.jit
def _produce(
    sources, staged, signals, offsets, lines, lists, sizes, dropout,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, DOCUMENTS: gl.constexpr,
    SPARSE: gl.constexpr, DROPOUT: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    q_rows, k_rows, v_rows = sources
    q_smem, k_smem, v_smem, word_smem, orders = staged
    N, rate = sizes.N, sizes.rate
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    done = 0
    cleared = 0
    stage = 0
    phase = 1
    rows = segment_rows(sizes)
    step_work = work_at(sizes.programs, sizes, CAUSAL)
    work = work_at(gl.program_id(0), sizes, CAUSAL)
    second = gl.to_tensor(0)
    if DOCUMENTS:
        later_line = line_of(work, offsets, lines, sizes, CAUSAL, DOCUMENTS)
    while exists(work, sizes, CAUSAL, DOCUMENTS):
        if DOCUMENTS:  # asked for early, because the answer takes long
            line = later_line
            later, later_second = next_work(work, second, step_work, sizes, CAUSAL)
            later_line = line_of(later, offsets, lines, sizes, CAUSAL, DOCUMENTS)
        else:
            line = line_of(work, offsets, lines, sizes, CAUSAL, DOCUMENTS)
        place = place_of(work, line, rows, sizes, DOCUMENTS)
        b, head, token, count = place
        tile = tile_of(line, second, sizes, BLOCK_M, CAUSAL, DOCUMENTS)
        keys = keys_of(tile, count, sizes, BLOCK_M, BLOCK_N, CAUSAL, FOLDED)
        meets_any = tile * BLOCK_M < count
        if FOLDED:
            meets_any = meets_any & (keys.steps > 0)
        if meets_any:
            kv = head // sizes.group
            slot, turn = _slot(orders, done)
            mbarrier.wait(signals.q_empty.index(slot), turn ^ 1)
            signal = signals.q_full.index(slot)
            mbarrier.expect(signal, q_rows.desc.block_type.nbytes * CONSUMERS)
            for i in gl.static_range(CONSUMERS):
                row = tile * BLOCK_M + i * 64
                q = q_smem.index(slot * CONSUMERS + i)
                copy_rows(q_rows, b, token, row, head, N, rate, signal, q, 64)
            if SPARSE:
                start, steps = listed(lists, work, tile, place, sizes, BLOCK_M)
                following = gl.load(lists.keys + start + steps - 1)
                order = _Order(b, head, token, count, tile, steps, following, tile)
            else:
                steps = keys.steps
                phase_of_head = tile
                if FOLDED:
                    phase_of_head = gl.load(offsets + sizes.H + head)
                order = _Order(b, head, token, count, tile, steps, key_tile_at(keys, steps - 1), phase_of_head)
            _give_order(orders.index(slot), signal, order)
            done += 1
            for step in range(steps):
                if SPARSE:  # read a step early
                    row = following * BLOCK_N
                    following = gl.load(lists.keys + start + gl.maximum(steps - 2 - step, 0))
                else:
                    row = key_tile_at(keys, steps - 1 - step) * BLOCK_N
                mbarrier.wait(signals.k_empty.index(stage), phase)
                if DROPOUT:
                    lane = gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
                    word_smem.index(stage).store(dropout_keys(dropout, token + (row + lane) * rate))
                    synchronize_threads()
                    mbarrier.arrive(signals.k_full.index(stage), count=1)
                mbarrier.expect(signals.k_full.index(stage), k_rows.desc.block_type.nbytes)
                copy_rows(k_rows, b, token, row, kv, N, rate, signals.k_full.index(stage), k_smem.index(stage), BLOCK_N)
                mbarrier.wait(signals.v_empty.index(stage), phase)
                full = signals.v_full.index(stage)
                if DOCUMENTS and row + BLOCK_N > count:
                    # Behind a document may lie anything, NaN too, and 0 times that is not 0.
                    mbarrier.expect(signals.landed.index(0), v_rows.desc.block_type.nbytes)
                    copy_rows(v_rows, b, token, row, kv, N, rate, signals.landed.index(0), v_smem.index(stage), BLOCK_N)
                    mbarrier.wait(signals.landed.index(0), cleared & 1)
                    clear_rows(v_smem.index(stage).reshape([BLOCK_N, v_smem.shape[-1]]), count - row)
                    mbarrier.arrive(full, count=1)
                    cleared += 1
                else:
                    mbarrier.expect(full, v_rows.desc.block_type.nbytes)
                    copy_rows(v_rows, b, token, row, kv, N, rate, full, v_smem.index(stage), BLOCK_N)
                stage, phase = advance(stage, phase, STAGES)
        if DOCUMENTS:
            work, second = later, later_second
        else:
            work, second = next_work(work, second, step_work, sizes, CAUSAL)
    slot, turn = _slot(orders, done)
    mbarrier.wait(signals.q_empty.index(slot), turn ^ 1)
    mbarrier.arrive(signals.q_full.index(slot), count=1)  # no rows come with this order
    none = gl.to_tensor(0)
    _give_order(orders.index(slot), signals.q_full.index(slot), _Order(none, none, none, none, none, none, none, none))


@gluon.jit
def _await_turn(turns, issued, WHICH: gl.constexpr, ORDERED: gl.constexpr):
    """The consumers issue products in turns, so that one's softmax runs while another's products do."""
    if ORDERED:
        phase = issued & 1
        mbarrier.wait(turns.index(WHICH), phase ^ 1 if WHICH == 0 else phase)


@gluon.jit
def _pass_turn(turns, issued, WHICH: gl.constexpr, CONSUMERS: gl.constexpr, ORDERED: gl.constexpr):
    if ORDERED:
        mbarrier.arrive(turns.index((WHICH + 1) % CONSUMERS), count=1)
    return issued + 1


@gluon.jit
def _await_keys(
    tile, count, issued, stage, phase, signals,
    WHICH: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, ORDERED: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Wait for the last key tile of a query tile; key tiles that only later rows of it see are let go unread.

    Letting go takes turns like any step, so that the turn must be waited for again.
    """
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    if CAUSAL and BLOCK_M > BLOCK_N:  # else all rows see the same key tiles
        mine = key_tiles(tile * BLOCK_M + WHICH * 64 + 64, count, CAUSAL, BLOCK_N)
        for _ in range(key_tiles(tile * BLOCK_M + BLOCK_M, count, CAUSAL, BLOCK_N) - mine):
            _await_turn(signals.turns, issued, WHICH, ORDERED)
            issued = _pass_turn(signals.turns, issued, WHICH, CONSUMERS, ORDERED)
            mbarrier.wait(signals.k_full.index(stage), phase)
            mbarrier.arrive(signals.k_empty.index(stage), count=1)
            mbarrier.wait(signals.v_full.index(stage), phase)
            mbarrier.arrive(signals.v_empty.index(stage), count=1)
            stage, phase = advance(stage, phase, STAGES)
        _await_turn(signals.turns, issued, WHICH, ORDERED)
    if count > 0:
        mbarrier.wait(signals.k_full.index(stage), phase)
    return issued, stage, phase


@gluon.jit
def _softmax(s, m, total, qk_scale, levels, FOLDED: gl.constexpr):
    m_new = gl.maximum(m, gl.max(s, 1) * qk_scale)
    if FOLDED:
        p = gl.exp2(s * qk_scale - (gl.expand_dims(m_new, 1) - levels))
    else:
        p = gl.exp2(s * qk_scale - gl.expand_dims(m_new, 1))
    alpha = gl.exp2(m - m_new)
    return p, m_new, total * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _drop(p, row_words, factors, words, dropout, scores: gl.constexpr):
    """Probabilities without those that are dropped. `keep_scale` comes at the end, once per row."""
    key_words = words.load(gl.SliceLayout(0, scores))
    kept = keeps(row_words[:, None], factors[:, None], key_words[None, :], dropout)
    return gl.where(kept, p, 0.0)


@gluon.jit
def _log2(x):
    """By one instruction, within 2**-22."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _consume(
    given, WHICH: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, ORDERED: gl.constexpr, CAUSAL: gl.constexpr, CONTINUES: gl.constexpr,
    DOCUMENTS: gl.constexpr, SPARSE: gl.constexpr, DROPOUT: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    Out, Lse, staged, signals, sizes, dropout, qk_scale = given
    q_smem, k_smem, v_smem, word_smem, orders = staged
    N, H, rate = sizes.N, sizes.H, sizes.rate
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    dtype: gl.constexpr = q_smem.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    memory: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    nothing = gl.zeros([64, BLOCK_N], gl.float32, scores)
    done = 0
    issued = 0
    stage = 0
    phase = 0
    b, head, token, count, tile, mine, last, phase_of_head = _await_order(orders, signals, done)
    issued, stage, phase = _await_keys(
        tile, count, issued, stage, phase, signals, WHICH, BLOCK_N, STAGES, CONSUMERS, ORDERED, CAUSAL
    )
    first_q = q_smem.index(WHICH).reshape([64, BLOCK_D])
    first_k = k_smem.index(stage).reshape([BLOCK_N, BLOCK_D])
    _await_turn(signals.turns, issued, WHICH, ORDERED)
    s = warpgroup_mma(first_q, first_k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    issued = _pass_turn(signals.turns, issued, WHICH, CONSUMERS, ORDERED)
    first_row = tile * BLOCK_M + WHICH * 64
    if CONTINUES:
        before_lse, before = rows_before(Out, Lse, b, head, token, first_row, count, N, H, rate, D, scores, memory)
    s = warpgroup_mma_wait(0, deps=[s])
    while count > 0:
        if DROPOUT:
            tokens = token + (first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, scores))) * rate
            row_words = dropout_rows(dropout, b, head, tokens)
            factors = dropout_factors(row_words)
        else:
            mbarrier.arrive(signals.k_empty.index(stage), count=1)
        if not SPARSE and not FOLDED:
            mine = key_tiles(first_row + 64, count, CAUSAL, BLOCK_N)
            last = mine - 1
        levels = nothing
        if FOLDED:
            levels = pair_levels(phase_of_head, sizes.periods, scores, 64, BLOCK_N)
        if CONTINUES:
            m = before_lse * LOG2_E
            denominator = gl.where(m == -float("inf"), 0.0, 1.0)
            acc = gl.convert_layout(before, output).to(gl.float32)
            if DROPOUT:
                acc = acc * (1.0 / dropout.keep_scale)
        else:
            m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, scores))
            denominator = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, scores))
            acc = gl.zeros([64, BLOCK_D], gl.float32, output)
        columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores))
        if CAUSAL:
            seen = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, scores))
            seen = gl.minimum(seen, count - 1) - last * BLOCK_N
            s = gl.where(columns[None, :] <= seen[:, None], s, -float("inf"))
        elif last * BLOCK_N + BLOCK_N > count:
            keys = last * BLOCK_N + columns
            s = gl.where((keys < count)[None, :], s, -float("inf"))
        # Finite from this tile on: every row sees a key of it.
        p, m, denominator, alpha = _softmax(s, m, denominator, qk_scale, levels, FOLDED)
        if DROPOUT:
            p = _drop(p, row_words, factors, word_smem.index(stage), dropout, scores)
            mbarrier.arrive(signals.k_empty.index(stage), count=1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]
        p = gl.convert_layout(p.to(dtype), weights)
        slot, _ = _slot(orders, done)
        q = q_smem.index(slot * CONSUMERS + WHICH).reshape([64, BLOCK_D])
        for _ in range(1, mine):
            v_stage = stage
            v_phase = phase
            stage, phase = advance(stage, phase, STAGES)
            mbarrier.wait(signals.k_full.index(stage), phase)
            k = k_smem.index(stage).reshape([BLOCK_N, BLOCK_D])
            _await_turn(signals.turns, issued, WHICH, ORDERED)
            s_later = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
            mbarrier.wait(signals.v_full.index(v_stage), v_phase)
            v = v_smem.index(v_stage).reshape([BLOCK_N, BLOCK_D])
            acc_later = warpgroup_mma(p, v, acc, is_async=True)
            issued = _pass_turn(signals.turns, issued, WHICH, CONSUMERS, ORDERED)
            s = warpgroup_mma_wait(1, deps=[s_later])
            if not DROPOUT:
                mbarrier.arrive(signals.k_empty.index(stage), count=1)
            p32, m, denominator, alpha = _softmax(s, m, denominator, qk_scale, levels, FOLDED)
            if DROPOUT:
                p32 = _drop(p32, row_words, factors, word_smem.index(stage), dropout, scores)
                mbarrier.arrive(signals.k_empty.index(stage), count=1)
            acc = warpgroup_mma_wait(0, deps=[acc_later])
            mbarrier.arrive(signals.v_empty.index(v_stage), count=1)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]
            p = gl.convert_layout(p32.to(dtype), weights)
        mbarrier.arrive(signals.q_empty.index(slot), count=1)
        done += 1
        # The last product of this tile and the first of the next go in one turn, and this tile is stored meanwhile.
        v_stage = stage
        mbarrier.wait(signals.v_full.index(v_stage), phase)
        stage, phase = advance(stage, phase, STAGES)
        _await_turn(signals.turns, issued, WHICH, ORDERED)
        acc = warpgroup_mma(p, v_smem.index(v_stage).reshape([BLOCK_N, BLOCK_D]), acc, is_async=True)
        following = _await_order(orders, signals, done)
        issued, stage, phase = _await_keys(
            following.tile, following.count, issued, stage, phase, signals,
            WHICH, BLOCK_N, STAGES, CONSUMERS, ORDERED, CAUSAL,
        )  # fmt: skip
        slot, _ = _slot(orders, done)
        next_q = q_smem.index(slot * CONSUMERS + WHICH).reshape([64, BLOCK_D])
        next_k = k_smem.index(stage).reshape([BLOCK_N, BLOCK_D])
        # Without a next tile this is the product of what lies there; nobody looks at it.
        next_s = warpgroup_mma(next_q, next_k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        issued = _pass_turn(signals.turns, issued, WHICH, CONSUMERS, ORDERED)
        next_row = following.tile * BLOCK_M + WHICH * 64
        if CONTINUES:
            before_lse, before = rows_before(
                Out, Lse, following.b, following.head, following.token, next_row, following.count,
                N, H, rate, D, scores, memory,
            )  # fmt: skip
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(signals.v_empty.index(v_stage), count=1)
        weight = 1.0 / denominator
        if DROPOUT:
            weight = weight * dropout.keep_scale
        out = acc * gl.convert_layout(weight, gl.SliceLayout(1, output))[:, None]
        lse_pointers, lse_mask, out_pointers, out_mask = row_pointers(
            Out, Lse, b, head, token, first_row, count, N, H, rate, D, scores, memory
        )
        gl.store(out_pointers, gl.convert_layout(out.to(Out.dtype.element_ty), memory), mask=out_mask)
        gl.store(lse_pointers, (m + _log2(denominator)) * LN_2, mask=lse_mask)
        b, head, token, count, _, mine, last, phase_of_head = following
        first_row = next_row
        s = warpgroup_mma_wait(0, deps=[next_s])


# Numbers that vary from call to call: specialising on them would compile anew.
@gluon.jit(do_not_specialize=(*Sizes._fields, "rows_per_batch_row", *Dropout._fields[1:3], "threshold"))
def forward_kernel(
    q_desc, q_tail, k_desc, k_tail, v_desc, v_tail, Out, Lse, Lines, offsets, seed,
    Grids, First, Kept,
    N, H, W, rate, heads, first_head, tiles, slots_per_row, batch, programs, group, skipped, periods,
    rows_per_batch_row, head_offset, first_position, threshold, keep_scale, qk_scale,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    REGISTERS: gl.constexpr, ORDERED: gl.constexpr, CAUSAL: gl.constexpr, CONTINUES: gl.constexpr,
    DOCUMENTS: gl.constexpr, SPARSE: gl.constexpr, DROPOUT: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    """`Grids`, `First`, `Kept` and `rows_per_batch_row` list the keys of a block layout, and are unread without one.

    So is `Lines`, of documents: see `works`.
    """
    dtype: gl.constexpr = q_desc.dtype
    SLOTS: gl.constexpr = 2 if BLOCK_D <= 128 else 1  # of query tiles: what fits into shared memory
    q_smem = gl.allocate_shared_memory(dtype, [SLOTS * CONSUMERS, 1, 1, 1, 64, BLOCK_D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    q_full, q_empty = barriers(SLOTS, 2), barriers(SLOTS, CONSUMERS)
    k_full, k_empty = barriers(STAGES, 2 if DROPOUT else 1), barriers(STAGES, CONSUMERS)  # words of keys come too
    v_full, v_empty = barriers(STAGES, 1), barriers(STAGES, CONSUMERS)
    turns, landed = q_empty, q_empty  # not used
    if ORDERED:
        turns = barriers(CONSUMERS, 1)
    if DOCUMENTS:
        landed = barriers(1, 1)
    signals = _Signals(q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, landed)
    fence_async_shared()
    if DOCUMENTS:
        batch = gl.load(Lines)
    sizes = Sizes(
        N, H, W, rate, heads, first_head, tiles, slots_per_row, batch, programs, group, skipped, periods
    )  # fmt: skip
    words = q_smem
    if DROPOUT:
        words = gl.allocate_shared_memory(gl.uint32, [STAGES, BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    orders = gl.allocate_shared_memory(gl.int32, [SLOTS, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    staged = (q_smem, k_smem, v_smem, words, orders)
    dropout = Dropout(seed, head_offset, first_position, keep_scale, threshold)
    sources = Rows(q_desc, q_tail), Rows(k_desc, k_tail), Rows(v_desc, v_tail)
    lists = Lists(offsets, offsets, offsets, N)
    if SPARSE:
        lists = Lists(Grids, First, Kept, rows_per_batch_row)
    given = (Out, Lse, staged, signals, sizes, dropout, qk_scale)
    # A tuple of constants would not stay constant, so the lists are written out.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (given, 0, D, BLOCK_D, BLOCK_N, STAGES, CONSUMERS, ORDERED, CAUSAL, CONTINUES,
                            DOCUMENTS, SPARSE, DROPOUT, FOLDED)),
                (_consume, (given, 1, D, BLOCK_D, BLOCK_N, STAGES, CONSUMERS, ORDERED, CAUSAL, CONTINUES,
                            DOCUMENTS, SPARSE, DROPOUT, FOLDED)),
                (_produce, (sources, staged, signals, offsets, Lines, lists, sizes, dropout,
                            BLOCK_N, STAGES, CONSUMERS, CAUSAL, DOCUMENTS, SPARSE, DROPOUT, FOLDED)),
            ],
            [4, 4],
            [REGISTERS, 504 - 2 * REGISTERS],  # the producer gets what is left
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (given, 0, D, BLOCK_D, BLOCK_N, STAGES, CONSUMERS, ORDERED, CAUSAL, CONTINUES,
                            DOCUMENTS, SPARSE, DROPOUT, FOLDED)),
                (_consume, (given, 1, D, BLOCK_D, BLOCK_N, STAGES, CONSUMERS, ORDERED, CAUSAL, CONTINUES,
                            DOCUMENTS, SPARSE, DROPOUT, FOLDED)),
                (_consume, (given, 2, D, BLOCK_D, BLOCK_N, STAGES, CONSUMERS, ORDERED, CAUSAL, CONTINUES,
                            DOCUMENTS, SPARSE, DROPOUT, FOLDED)),
                (_produce, (sources, staged, signals, offsets, Lines, lists, sizes, dropout,
                            BLOCK_N, STAGES, CONSUMERS, CAUSAL, DOCUMENTS, SPARSE, DROPOUT, FOLDED)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, 32],
        )  # fmt: skip
