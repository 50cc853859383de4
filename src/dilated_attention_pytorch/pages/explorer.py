"""The page that explores a pattern: who sees whom, its reach and its cost, computed in the browser."""

from __future__ import annotations

import json
from pathlib import Path

from dilated_attention_pytorch.core.block_pattern import PATTERN_TYPES
from dilated_attention_pytorch.core.reach import ROWS_TIMES_TOKENS
from dilated_attention_pytorch.core.spec import HEAD_LAYOUTS
from dilated_attention_pytorch.pages.page import write_html
from dilated_attention_pytorch.parallel.plan import BACKWARD_WORK, TFLOPS


def write_explorer(path: Path) -> None:
    """Write the page, one file that needs no other."""
    constants = {
        "layouts": HEAD_LAYOUTS,
        "patterns": PATTERN_TYPES,
        "reachWork": ROWS_TIMES_TOKENS,
        "tflops": TFLOPS,
        "backwardWork": BACKWARD_WORK,
    }
    here = Path(__file__).parent
    body, arithmetic, drawing = (
        (here / name).read_text(encoding="utf-8")
        for name in ("explorer.html", "explorer_arithmetic.js", "explorer_drawing.js")
    )
    scripts = (f"const LIBRARY = {json.dumps(constants)};", arithmetic, drawing)
    write_html(
        path, "Explore dilated attention", "Explore a pattern", [body, *map("<script>\n{}</script>".format, scripts)]
    )
