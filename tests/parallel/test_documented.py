"""The page about ranks shows code that runs."""

from __future__ import annotations

import pytest

from ..ranks import run_ranks


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_code_of_the_page_runs_on_ranks(ranks) -> None:
    ended_well, printed = run_ranks(ranks, "tests.parallel.documented_worker")
    assert ended_well, printed
