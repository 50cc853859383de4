"""How much drawn tests draw: little by default, ten times as much with `./run test --thorough`."""

from __future__ import annotations

import os

IS_THOROUGH = os.environ.get("THOROUGH_TESTS") == "1"


def examples(few: int) -> int:
    """The number of examples to draw, where the default of `conftest.py` does not fit."""
    return 10 * few if IS_THOROUGH else few
