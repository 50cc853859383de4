"""How the programs of the Hopper kernels share out their work, and in which order they add to dq."""

from __future__ import annotations

import types
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

backward = pytest.importorskip(
    "dilated_attention_pytorch.kernels.triton.hopper.backward", reason="this Triton has no Gluon", exc_type=ImportError
)
forward = pytest.importorskip(
    "dilated_attention_pytorch.kernels.triton.hopper.forward", reason="this Triton has no Gluon", exc_type=ImportError
)
QUERY_ROWS, KEY_ROWS = 64, 128


def on_integers(module: types.ModuleType, *functions: str, program: int = 0) -> SimpleNamespace:
    """A kernel's own functions, run by Python on whole numbers."""
    language = SimpleNamespace(
        minimum=min,
        maximum=max,
        where=lambda condition, one, other: one if condition else other,
        program_id=lambda axis: program,
    )
    names = {"gl": language, "BLOCK_N": KEY_ROWS}
    for name in functions:
        names[name] = types.FunctionType(getattr(module, name).fn.__code__, names)
    return SimpleNamespace(**names)


def of_backward() -> SimpleNamespace:
    return on_integers(backward, "_key_tile", "_first_query_tile", "_begin", "_next", "_stride", "_additions", "_turn")


def additions_of(member: int, rows: int, team: int, lag: int, group: int, causal: bool) -> list[tuple[int, int, int]]:
    """`(head, query tile, turn)` of every addition by a member, in the order in which it makes them."""
    kernel = of_backward()
    query_tiles, key_tiles = -(-rows // QUERY_ROWS), -(-rows // KEY_ROWS)
    found = []
    for turn_round in range(-(-key_tiles // team)):
        key_tile = kernel._key_tile(turn_round, member, team)
        if key_tile >= key_tiles:
            continue
        first = kernel._first_query_tile(key_tile, causal, QUERY_ROWS)
        g, tile = kernel._begin(first, query_tiles, member, team, lag, group)
        for _ in range(group * (query_tiles - first)):
            turn = kernel._turn(
                g, tile, turn_round, member, key_tiles, query_tiles, team, lag, group, causal, QUERY_ROWS
            )
            found.append((g, tile, turn))
            g, tile = kernel._next(g, tile, first, query_tiles, group)
    return found


@given(st.integers(128, 3000), st.integers(1, 16), st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_every_addition_to_dq_gets_its_turn(rows: int, team: int, lag: int, group: int, causal: bool) -> None:
    team = min(team, -(-rows // KEY_ROWS))
    left = [additions_of(member, rows, team, lag, group, causal) for member in range(team)]
    seen = [(g, tile) for one in left for g, tile, _ in one]
    key_tiles = -(-rows // KEY_ROWS)
    for g, tile in set(seen):
        assert seen.count((g, tile)) == of_backward()._additions(tile, key_tiles, causal, QUERY_ROWS)
    # Every member makes its additions in order, each when as many have been made to the tile as its turn says.
    made = dict.fromkeys(seen, 0)
    while any(left):
        ready = [one for one in left if one and made[one[0][:2]] == one[0][2]]
        assert ready, "all members wait for each other"
        for one in ready:
            made[one.pop(0)[:2]] += 1


def works_of(program: int, programs: int, tiles: int, units: int, causal: bool) -> list[tuple[int, int]]:
    """`(unit, query tile)` of a program of forward, where the tile has rows."""
    kernel = on_integers(forward, "_tile_at", program=program)
    found = [kernel._tile_at(0, tiles, units, programs, causal)]
    while found[-1][0] < units:
        found.append(kernel._tile_at(len(found), tiles, units, programs, causal))
    return [(unit, tile) for unit, tile in found[:-1] if tile < tiles]


@given(st.integers(1, 40), st.integers(1, 140), st.integers(1, 30), st.booleans())
def test_every_query_tile_is_some_programs_work(programs: int, units: int, tiles: int, causal: bool) -> None:
    found = [work for program in range(programs) for work in works_of(program, programs, tiles, units, causal)]
    assert sorted(found) == [(unit, tile) for unit in range(units) for tile in range(tiles)]


@pytest.mark.parametrize(("units", "tiles"), [(768, 16), (192, 16), (1024, 16), (96, 22), (48, 22), (6144, 16)])
def test_programs_get_as_much_to_do_under_causality(units: int, tiles: int) -> None:
    loads = [sum(tile + 1 for _, tile in works_of(i, 132, tiles, units, causal=True)) for i in range(132)]
    assert max(loads) <= 1.04 * sum(loads) / 132
