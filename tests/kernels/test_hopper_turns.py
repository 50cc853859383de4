"""The order in which the members of a team add to dq: a permutation for every query tile, and never a deadlock."""

from __future__ import annotations

import types
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

backward = pytest.importorskip(
    "dilated_attention_pytorch.kernels.triton.hopper.backward", reason="this Triton has no Gluon", exc_type=ImportError
)
QUERY_ROWS, KEY_ROWS = 64, 128


def on_integers() -> SimpleNamespace:
    """The kernel's own functions, run by Python on whole numbers."""
    language = SimpleNamespace(
        minimum=min, maximum=max, where=lambda condition, one, other: one if condition else other
    )
    names = {"gl": language, "BLOCK_N": KEY_ROWS}
    for name in ("_key_tile", "_first_query_tile", "_begin", "_next", "_stride", "_additions", "_turn"):
        names[name] = types.FunctionType(getattr(backward, name).fn.__code__, names)
    return SimpleNamespace(**names)


def additions_of(member: int, rows: int, team: int, group: int, causal: bool) -> list[tuple[int, int, int]]:
    """`(head, query tile, turn)` of every addition by a member, in the order in which it makes them."""
    kernel = on_integers()
    query_tiles, key_tiles = -(-rows // QUERY_ROWS), -(-rows // KEY_ROWS)
    found = []
    for turn_round in range(-(-key_tiles // team)):
        key_tile = kernel._key_tile(turn_round, member, team)
        if key_tile >= key_tiles:
            continue
        first = kernel._first_query_tile(key_tile, causal, QUERY_ROWS)
        g, tile = kernel._begin(first, query_tiles, member, team, group)
        for _ in range(group * (query_tiles - first)):
            turn = kernel._turn(g, tile, turn_round, member, key_tiles, query_tiles, team, group, causal, QUERY_ROWS)
            found.append((g, tile, turn))
            g, tile = kernel._next(g, tile, first, query_tiles, group)
    return found


@given(st.integers(128, 3000), st.integers(1, 16), st.integers(1, 4), st.booleans())
def test_every_addition_gets_its_turn(rows: int, team: int, group: int, causal: bool) -> None:
    team = min(team, -(-rows // KEY_ROWS))
    left = [additions_of(member, rows, team, group, causal) for member in range(team)]
    seen = [(g, tile) for one in left for g, tile, _ in one]
    key_tiles = -(-rows // KEY_ROWS)
    for g, tile in set(seen):
        assert seen.count((g, tile)) == on_integers()._additions(tile, key_tiles, causal, QUERY_ROWS)
    # Every member makes its additions in order, each when as many have been made to the tile as its turn says.
    made = dict.fromkeys(seen, 0)
    while any(left):
        ready = [one for one in left if one and made[one[0][:2]] == one[0][2]]
        assert ready, "all members wait for each other"
        for one in ready:
            made[one.pop(0)[:2]] += 1
