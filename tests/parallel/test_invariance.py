"""The result does not depend on the number of ranks; see check_invariance.py, which each rank runs."""

from __future__ import annotations

import random

import pytest

from .launching import torchrun


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_gradients_and_bytes_on_any_number_of_ranks(ranks) -> None:
    # Fresh problems every time; a failure prints its seed.
    problems = {1: 3, 2: 12, 3: 12, 4: 10}[ranks]
    assert "problems" in torchrun("check_invariance", ranks, str(random.randrange(2**32)), str(problems))
