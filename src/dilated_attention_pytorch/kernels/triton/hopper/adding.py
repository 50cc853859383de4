"""The writers of Hopper's backward: warps that add a step's dq to the team's scratch, when its turn has come."""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from dilated_attention_pytorch.kernels.triton.hopper.common import add_tile, order_copies_after_reads, wait_for_stores
from dilated_attention_pytorch.kernels.triton.hopper.turns import (
    BLOCK_N,
    TURNS_PER_UNIT,
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
    turn_of,
)


@gluon.jit
def add_dq(
    scratch_desc, Turns, dq_smem, signals, offsets, lines, lists, sizes,
    PARITY: gl.constexpr, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr, DOCUMENTS: gl.constexpr, SPARSE: gl.constexpr,
    FOLDED: gl.constexpr,
):  # fmt: skip
    """Add dq of every other step, so that one writer's waiting for memory is hidden by the other's work."""
    group, team_size = sizes.group, sizes.team_size
    member = gl.program_id(0) % team_size
    team = gl.program_id(0) // team_size
    walked = 0
    started = 0
    epoch = 0
    last_turn = Turns
    for unit in range(team, sizes.units, sizes.teams):
        _, _, _, count = locate(unit, sizes, offsets, lines, DOCUMENTS)
        query_tiles = (count + BLOCK_M - 1) // BLOCK_M
        key_tiles = (count + BLOCK_N - 1) // BLOCK_N
        if SPARSE:
            grid = grid_of(lists, unit, 0, sizes)
        for round in range((key_tiles + team_size - 1) // team_size):
            key_tile = key_tile_of(round, member, team_size, key_tiles, SPARSE)
            hole = hole_of(key_tile, query_tiles, sizes, CAUSAL, FOLDED, BLOCK_M)
            steps = steps_around(hole, query_tiles, group)
            if has_work(key_tile, key_tiles, steps, FOLDED):
                g, tile = first_step(hole, query_tiles, member, sizes, FOLDED)
                if SPARSE:
                    g, at = gl.to_tensor(0), gl.to_tensor(0)
                    start, left = listed(lists, grid, key_tile, query_tiles, BLOCK_M)
                    steps = total_steps(lists, unit, left, key_tile, query_tiles, sizes, BLOCK_M)
                for _ in range(steps):
                    if SPARSE:
                        g, start, at, left, entry, tile = next_listed(
                            lists, unit, g, start, at, left, key_tile, query_tiles, sizes, BLOCK_M
                        )
                    if walked & 1 == PARITY:
                        if SPARSE:
                            turn = gl.load(lists.turns + entry)
                        else:
                            turn = turn_of(
                                g, tile, round, member, key_tiles, query_tiles, sizes, CAUSAL, FOLDED, BLOCK_M
                            )
                        place = (team * group + g) * sizes.rows + tile * BLOCK_M
                        pointer = Turns + place // BLOCK_M
                        seen = gl.atomic_add(pointer, 0, sem="acquire", scope="gpu")
                        # Pass the last turn on before waiting for the next one: others may wait too.
                        if started > 0:
                            wait_for_stores()
                            gl.atomic_add(last_turn, 1, sem="release", scope="gpu")
                        while seen != epoch + turn:
                            seen = gl.atomic_add(pointer, 0, sem="acquire", scope="gpu")
                        order_copies_after_reads()
                        mbarrier.wait(signals.dq_full.index(PARITY), walked >> 1 & 1)
                        if turn == 0:
                            tma.async_copy_shared_to_global(scratch_desc, [place, 0], dq_smem.index(PARITY))
                        else:
                            add_tile(scratch_desc, [place, 0], dq_smem.index(PARITY))
                        tma.store_wait(0)  # it has left shared memory
                        mbarrier.arrive(signals.dq_empty.index(PARITY), count=1)
                        started = 1
                        last_turn = pointer
                    walked += 1
                    if not SPARSE:
                        g, tile = next_query_tile(g, tile, hole, query_tiles, group, FOLDED)
        if started > 0:
            wait_for_stores()
            gl.atomic_add(last_turn, 1, sem="release", scope="gpu")
        started = 0
        epoch += TURNS_PER_UNIT
