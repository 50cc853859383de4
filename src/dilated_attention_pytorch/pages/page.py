"""One self-contained HTML page for light and dark screens: its frame, its colours, tables and figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from dilated_attention_pytorch.files import write_whole
from dilated_attention_pytorch.pages.plots import COLOURS, inline_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_html(path: Path, title: str, heading: str, body: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _FRAME.format(title=escape(title), style=_STYLE, heading=escape(heading), body="\n".join(body))
    # A lone surrogate, which JSON can spell, is no text.
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8", errors="replace"))


def marked(text: str) -> str:
    """Escaped, with Markdown's `code` and **strong**.

    >>> marked("`a < b` is **so**")
    '<code>a &lt; b</code> is <strong>so</strong>'
    """
    text = re.sub(r"`(.+?)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Cells may hold what `marked` takes."""
    names = "".join(f"<th>{marked(name)}</th>" for name in head)
    cells = ("".join(f"<td{_KIND[len(value) > _LONG]}>{marked(value)}</td>" for value in row) for row in body)
    rows = "\n".join(f"<tr>{row}</tr>" for row in cells)
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def figures(charts: Iterable[tuple[str, Figure]]) -> str:
    """Charts, each below its name."""
    drawn = (f"<figure><figcaption>{marked(name)}</figcaption>{inline_svg(one, name)}</figure>" for name, one in charts)
    return f'<div class="charts">{"".join(drawn)}</div>'


def bullets(notes: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{marked(note)}</li>" for note in notes) + "</ul>"


_LONG, _KIND = 32, ("", ' class="text"')  # a cell with more characters may take several lines
_LIGHT = " ".join(f"--{name}: {colour};" for name, colour in COLOURS.items())
_STYLE = (
    f":root {{ color-scheme: light dark; --back: #fff; {_LIGHT} }}"
    + """
@media (prefers-color-scheme: dark) { :root { --back: #16181b; --ink: #e9ecef; --faint: #373b40; --limit: #ff8787;
  --s0: #4dabf7; --s1: #adb5bd; --s2: #ffa94d; --s3: #da77f2; --s4: #69db7c; --s5: #f783ac;
  --s6: #3bc9db; --s7: #ffe066; --s8: #c9a27e; } }
body { background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 72rem;
  margin: 2rem auto; padding: 0 1rem; overflow-wrap: break-word; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--faint); padding: .25rem .6rem; text-align: right; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
td.text { white-space: normal; min-width: min(14rem, 40vw); overflow-wrap: anywhere; }
td:nth-child(2):last-child { white-space: normal; min-width: 0; overflow-wrap: anywhere; }
.wide, pre { overflow-x: auto; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0; }
figcaption { font-size: 13px; font-weight: 600; }
svg { max-width: 100%; height: auto; }
"""
)

_FRAME = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<h1>{heading}</h1>
{body}
</body>
</html>
"""
