"""How the programs of the Hopper kernels share out their work, and in which order they add to dq."""

from __future__ import annotations

import itertools
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch.core.block_layout import BranchLayout, layout_of
from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig
from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.pattern import grid_rows, segments
from dilated_attention_pytorch.core.spec import DilatedSpec

turns = pytest.importorskip(
    "dilated_attention_pytorch.kernels.triton.hopper.turns", reason="this Triton has no Gluon", exc_type=ImportError
)
works = pytest.importorskip(
    "dilated_attention_pytorch.kernels.triton.hopper.works", reason="this Triton has no Gluon", exc_type=ImportError
)
launch = pytest.importorskip(
    "dilated_attention_pytorch.kernels.triton.hopper.launch", reason="this Triton has no Gluon", exc_type=ImportError
)
QUERY_ROWS, KEY_ROWS = 64, 128


def on_integers(module: types.ModuleType, *functions: str) -> SimpleNamespace:
    """A kernel's own functions, run by Python on whole numbers."""
    language = SimpleNamespace(
        minimum=min,
        maximum=max,
        where=lambda condition, one, other: one if condition else other,
        load=lambda pointer, mask=True, other=None: pointer.read() if mask else other,
        constexpr=int,
    )
    tuples = {name: kind for name, kind in vars(module).items() if hasattr(kind, "_fields")}
    names = {"gl": language, "BLOCK_N": KEY_ROWS, **tuples}
    for name in functions:
        names[name] = types.FunctionType(getattr(module, name).fn.__code__, names)
    return SimpleNamespace(**names)


def of_backward() -> SimpleNamespace:
    return on_integers(
        turns, "key_tile_of", "hole_of", "steps_around", "first_step", "next_query_tile", "_outside", "stride",
        "_own_key_tiles", "additions_to", "_overlap", "turn_of", "has_work",
    )  # fmt: skip


def team_sizes(rows: int, team: int, lag: int, group: int, skipped: int = 0) -> Any:
    """The sizes of one segment of one key/value head, and one team."""
    return turns.Sizes(
        N=rows, H=group, W=rows, rate=1, heads=1, first_head=0, rows=rows, slots_per_row=1, units=1, teams=1,
        team_size=team, lag=lag, group=group, skipped=skipped, periods=0,
    )  # fmt: skip


def additions_of(member: int, rows: int, sizes: Any, causal: bool, folded: bool) -> list[tuple[int, int, int, int]]:
    """`(head, query tile, turn, key tile)` of every addition by a member, in the order in which it makes them."""
    kernel, team, group = of_backward(), sizes.team_size, sizes.group
    query_tiles, key_tiles = -(-rows // QUERY_ROWS), -(-rows // KEY_ROWS)
    found = []
    for turn_round in range(-(-key_tiles // team)):
        key_tile = kernel.key_tile_of(turn_round, member, team, key_tiles, SPARSE=False)
        hole = kernel.hole_of(key_tile, query_tiles, sizes, causal, folded, QUERY_ROWS)
        steps = kernel.steps_around(hole, query_tiles, group)
        if not kernel.has_work(key_tile, key_tiles, steps, folded):
            continue
        g, tile = kernel.first_step(hole, query_tiles, member, sizes, folded)
        for _ in range(steps):
            turn = kernel.turn_of(
                g, tile, turn_round, member, key_tiles, query_tiles, sizes, causal, folded, QUERY_ROWS
            )
            found.append((g, tile, turn, key_tile))
            g, tile = kernel.next_query_tile(g, tile, hole, query_tiles, group, folded)
    return found


@given(
    st.integers(128, 4500), st.integers(1, 36), st.integers(1, 9), st.integers(1, 4), st.booleans(),
    st.sampled_from([None, 0, 128, 256, 640]),
)  # fmt: skip
def test_every_addition_to_dq_gets_its_turn(
    rows: int, team: int, lag: int, group: int, causal: bool, skipped: int | None
) -> None:
    """Where branches are folded into each other, `skipped` says how many rows the segments of the finer one have."""
    folded = skipped is not None
    query_tiles, key_tiles = -(-rows // QUERY_ROWS), -(-rows // KEY_ROWS)
    sizes = team_sizes(rows, team, lag, group, skipped or 0)  # members without a key tile, as in short documents
    left = [additions_of(member, rows, sizes, causal, folded) for member in range(sizes.team_size)]

    def meets(tile: int, key_tile: int) -> bool:
        row, key = tile * QUERY_ROWS, key_tile * KEY_ROWS
        sees = not causal or key <= row + QUERY_ROWS - 1
        return sees and not (skipped and row // skipped == key // skipped)

    seen = sorted((g, tile, key_tile) for one in left for g, tile, _, key_tile in one)
    tiles = itertools.product(range(group), range(query_tiles), range(key_tiles))
    assert seen == [(g, tile, key_tile) for g, tile, key_tile in tiles if meets(tile, key_tile)]
    for tile in range(query_tiles):
        additions = of_backward().additions_to(tile, key_tiles, sizes, causal, folded, QUERY_ROWS)
        assert additions == sum(meets(tile, key_tile) for key_tile in range(key_tiles))
    assert_all_can_be_made(left)


@given(
    st.integers(128, 4500), st.sampled_from([(128, 128), (192, 128), (128, 64)]), st.booleans(),
    st.sampled_from([None, 0, 128, 256, 640]),
)  # fmt: skip
def test_a_query_tile_meets_the_keys_that_it_sees_and_no_finer_branch_computes(
    rows: int, tiles: tuple[int, int], causal: bool, skipped: int | None
) -> None:
    block_m, block_n = tiles
    if skipped:
        block_m = 128
    kernel = on_integers(works, "keys_of", "key_tile_at", "key_tiles")
    sizes = sizes_of(1, 1, 1)._replace(skipped=skipped or 0)
    for tile in range(-(-rows // block_m)):
        keys = kernel.keys_of(tile, rows, sizes, block_m, block_n, causal, skipped is not None)
        found = [kernel.key_tile_at(keys, step) for step in range(keys.steps)]
        first, end = tile * block_m, min(tile * block_m + block_m, rows)
        expected = [
            key_tile
            for key_tile in range(-(-rows // block_n))
            if (not causal or key_tile * block_n < end)
            and not (skipped and first // skipped == key_tile * block_n // skipped)
        ]
        assert found == expected


def assert_all_can_be_made(left: list[list[tuple[int, ...]]]) -> None:
    """Every member makes its additions in order, each when as many have been made to the tile as its turn says."""
    made = {(g, tile): 0 for one in left for g, tile, *_ in one}
    while any(left):
        ready = [one for one in left if one and made[one[0][:2]] == one[0][2]]
        assert ready, "all members wait for each other"
        for one in ready:
            made[one.pop(0)[:2]] += 1


class Pointer:
    """Into a list, as kernels have them."""

    def __init__(self, values: list[int], at: int = 0) -> None:
        self.values, self.at = values, at

    def __add__(self, steps: int) -> Pointer:
        return Pointer(self.values, self.at + steps)

    def __sub__(self, steps: int) -> Pointer:
        return self + -steps

    def read(self) -> int:
        assert 0 <= self.at < len(self.values)
        return self.values[self.at]


def listed_additions_of(
    member: int, rows: int, team: int, group: int, kept: BranchLayout
) -> list[tuple[int, int, int]]:
    """The same of a member that walks the lists of a layout."""
    kernel = on_integers(turns, "key_tile_of", "grid_of", "listed", "total_steps", "next_listed")
    tables = (kept.grids.flatten(), kept.query_first, kept.queries, kept.query_turns, kept.key_first)
    lists = turns.Lists(*(Pointer(x.tolist()) for x in tables), rows_per_batch_row=0)
    sizes = team_sizes(rows, team, 2, group)
    query_tiles, key_tiles = -(-rows // QUERY_ROWS), -(-rows // KEY_ROWS)
    grid = kernel.grid_of(lists, 0, 0, sizes)
    found = []
    for turn_round in range(-(-key_tiles // team)):
        key_tile = kernel.key_tile_of(turn_round, member, team, key_tiles, SPARSE=True)
        if key_tile >= key_tiles:
            continue
        g = at = 0
        start, left = kernel.listed(lists, grid, key_tile, query_tiles, QUERY_ROWS)
        for _ in range(kernel.total_steps(lists, 0, left, key_tile, query_tiles, sizes, QUERY_ROWS)):
            g, start, at, left, entry, tile = kernel.next_listed(
                lists, 0, g, start, at, left, key_tile, query_tiles, sizes, QUERY_ROWS
            )
            found.append((g, tile, kept.query_turns[entry].item()))
    return found


@given(st.integers(128, 4500), st.integers(1, 36), st.integers(1, 3), st.booleans(), st.floats(0.01, 1.0))
def test_every_addition_of_a_kept_tile_gets_its_turn(
    rows: int, team: int, group: int, causal: bool, ratio: float
) -> None:
    config = SparsePatternConfig("content_adaptive", ratio, KEY_ROWS)
    call = Call(spec=DilatedSpec.of([rows], [1]), sparse=config, is_causal=causal)
    (kept,) = layout_of(call, torch.randn(1, rows, group, 4), torch.randn(1, rows, 1, 4)).branches
    left = [listed_additions_of(member, rows, team, group, kept) for member in range(team)]
    query_tiles, key_tiles = -(-rows // QUERY_ROWS), -(-rows // KEY_ROWS)
    masks = [kept.mask(0, 0, head, key_tiles).sum(-1) for head in range(group)]
    seen = [(g, tile) for one in left for g, tile, _ in one]
    assert set(seen) == {(g, tile) for g in range(group) for tile in range(query_tiles)}
    assert all(seen.count((g, tile)) == masks[g][tile // 2] for g, tile in set(seen))
    assert_all_can_be_made(left)


@given(st.integers(1, 3000), st.integers(1, 300), st.booleans(), st.integers(0, 200))
def test_teams_are_as_many_as_may_be(units: int, key_tiles: int, causal: bool, most: int) -> None:
    teams, size = launch._teams(units, key_tiles, causal, 132, most)
    if (teams, size) == launch.NOBODY:
        assert most < min(units, 132)
    else:
        assert 1 <= teams <= min(units, most)
        assert 1 <= size <= key_tiles
        assert teams * size <= 132


def test_a_long_segment_is_shared_out_where_there_is_memory_for_few_teams() -> None:
    assert launch._teams(12, 256, False, 132, 7) == (6, 22)
    assert launch._teams(12, 256, False, 132, 1) == (1, 128)
    assert launch._teams(1000, 8, False, 132, 4) == launch.NOBODY  # no team has more members than key tiles


def of_forward() -> SimpleNamespace:
    names = "_places", "work_at", "_later", "next_work", "exists", "line_of", "tile_of", "segment_rows", "place_of"
    return on_integers(works, *names)


def sizes_of(
    programs: int, tiles: int, heads: int, slots: int = 1, batch: int = 1, *, tokens: int = 1, w: int = 1,
    rate: int = 1, first_head: int = 0,
) -> Any:  # fmt: skip
    return works.Sizes(
        N=tokens, H=first_head + heads, W=w, rate=rate, heads=heads, first_head=first_head, tiles=tiles,
        slots_per_row=slots, batch=batch, programs=programs, group=1, skipped=0, periods=0,
    )  # fmt: skip


def works_of(program: int, sizes: Any, causal: bool) -> list[tuple[int, int, int, int]]:
    """`(batch row, segment, head, query tile)` of a program of forward, where the tile has rows."""
    kernel = of_forward()
    step = kernel.work_at(sizes.programs, sizes, causal)
    work, second = kernel.work_at(program, sizes, causal), 0
    found = []
    while kernel.exists(work, sizes, causal, DOCUMENTS=False):
        line = kernel.line_of(work, Pointer([0] * sizes.H), None, sizes, causal, DOCUMENTS=False)
        tile = kernel.tile_of(line, second, sizes, 64, causal, DOCUMENTS=False)
        if tile < sizes.tiles:
            found.append((work.b, work.segment, work.head, tile))
        work, second = kernel.next_work(work, second, step, sizes, causal)
    return found


@given(
    st.integers(1, 40), st.integers(1, 30), st.integers(1, 9), st.integers(1, 7), st.integers(1, 3), st.booleans()
)  # fmt: skip
def test_every_query_tile_is_some_programs_work(
    programs: int, tiles: int, heads: int, slots: int, batch: int, causal: bool
) -> None:
    sizes = sizes_of(programs, tiles, heads, slots, batch)
    found = [work for program in range(programs) for work in works_of(program, sizes, causal)]
    assert sorted(found) == list(itertools.product(range(batch), range(slots), range(heads), range(tiles)))


@given(st.integers(1, 300), st.integers(1, 90), st.integers(1, 12), st.data())
def test_a_work_knows_its_rows(tokens: int, w: int, rate: int, data: st.DataObject) -> None:
    w = min(w, tokens)
    found = segments(tokens, w)
    segment = data.draw(st.integers(0, len(found) - 1))
    offset = data.draw(st.integers(-1, rate - 1))
    kernel = of_forward()
    sizes = sizes_of(1, 1, 4, len(found), 1, tokens=tokens, w=w, rate=rate, first_head=3)
    work = works.Work(0, segment, 2, 0)
    line = kernel.line_of(work, Pointer([9] * 5 + [offset]), None, sizes, CAUSAL=False, DOCUMENTS=False)
    start, length = found[segment]
    count = 0 if offset < 0 else grid_rows(length, rate, offset)
    place = kernel.place_of(work, line, kernel.segment_rows(sizes), sizes, DOCUMENTS=False)
    assert place == (0, 5, start + offset, count)
    past = works.Work(1, 0, 0, 0)
    assert kernel.place_of(past, line, kernel.segment_rows(sizes), sizes, DOCUMENTS=False).count == 0


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99), st.integers(1, 400)), max_size=30), st.integers(1, 9),
    st.integers(1, 7), st.integers(1, 5), st.integers(1, 4), st.booleans(),
)  # fmt: skip
def test_every_line_of_a_list_is_some_programs_work_for_every_head(
    segments: list[tuple[int, int, int]], programs: int, stretch: int, heads: int, rate: int, causal: bool
) -> None:
    tile, lines = 16, []
    for segment in segments:
        tiles = -(-segment[2] // (rate * tile))
        b, start, length = segment
        places = range(-(-tiles // 2) if causal else tiles)
        lines += [(b, start, *divmod(length, rate), place, 0, 0, 0) for place in places]
    kernel, offset = of_forward(), rate - 1
    sizes = sizes_of(programs, (2 if causal else 1) * stretch, heads, 1 << 30, len(lines), rate=rate)
    list_, offsets = Pointer([len(lines), *[0] * 7, *itertools.chain(*lines)]), Pointer([offset] * heads)
    found = []
    for program in range(programs):
        step = kernel.work_at(programs, sizes, causal)
        work, second = kernel.work_at(program, sizes, causal), 0
        while kernel.exists(work, sizes, causal, DOCUMENTS=True):
            line = kernel.line_of(work, offsets, list_, sizes, causal, DOCUMENTS=True)
            place = kernel.place_of(work, line, None, sizes, DOCUMENTS=True)
            here = kernel.tile_of(line, second, sizes, tile, causal, DOCUMENTS=True)
            if here * tile < place.count:
                found.append((place.b, place.token, place.count, place.head, here))
            work, second = kernel.next_work(work, second, step, sizes, causal)
    rows = [grid_rows(length, rate, offset) for *_, length in segments]
    assert sorted(found) == sorted(
        (b, start + offset, count, head, here)
        for (b, start, _), count in zip(segments, rows)
        for here in range(-(-count // tile))
        for head in range(heads)
    )


@pytest.mark.parametrize(("units", "tiles"), [(768, 16), (192, 16), (1024, 16), (96, 22), (48, 22), (6144, 16)])
def test_programs_get_as_much_to_do_under_causality(units: int, tiles: int) -> None:
    found = [works_of(program, sizes_of(132, tiles, heads=units), causal=True) for program in range(132)]
    loads = [sum(tile + 1 for *_, tile in mine) for mine in found]
    assert max(loads) <= 1.04 * sum(loads) / 132
