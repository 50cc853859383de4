"""The explorer in a real browser: its numbers are the library's, and its controls work by mouse and keyboard."""

from __future__ import annotations

import html
import json
import random
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention_pytorch.cli import _parser, main
from dilated_attention_pytorch.core import DilatedSpec, SparsePatternConfig, branches_for, dense_mask
from dilated_attention_pytorch.core import spec as spec_module
from dilated_attention_pytorch.core.block_layout import allowed_pairs, keys_seen
from dilated_attention_pytorch.core.block_pattern import PATTERN_TYPES
from dilated_attention_pytorch.core.pattern import forward_flops, visible_pairs
from dilated_attention_pytorch.core.reach import mean_and_least_reach, reach_shares, warn_of_reach
from dilated_attention_pytorch.core.spec import HEAD_LAYOUTS
from dilated_attention_pytorch.pages.explorer import write_explorer
from dilated_attention_pytorch.parallel.plan import Job, make_plan
from dilated_attention_pytorch.tools.show import View, density

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt install chromium")
TFLOPS = 123.0


def evaluated(script: str, folder: Path, address: str = "") -> Any:
    """The value of an expression in the explorer, opened by Chromium; a promise is waited for."""
    page = folder / "page.html"
    write_explorer(page)
    # The result is part of the page that Chromium prints; the last script runs after those of the page.
    tail = f"""<pre id="result"></pre><script>
      (async () => {script})().then((value) => ({{ value }}), (error) => ({{ error: String(error.stack) }})).then(
        (found) => {{ document.getElementById("result").textContent = JSON.stringify(found); }});
    </script></body>"""
    page.write_text(page.read_text().replace("</body>", tail))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,900", "--virtual-time-budget=60000"]
    command = [str(BROWSER), *flags, f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri() + address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    result = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert result is not None, done.stderr
    found = json.loads(html.unescape(result[1]))
    assert "error" not in found, found["error"]
    return found["value"]


def drawn_pattern(draw: random.Random, number: int) -> dict[str, Any]:
    """A random pattern in the explorer's words; every other one has a block pattern."""
    kinds = [name for name in PATTERN_TYPES if name != "content_adaptive"]
    block = draw.choice([1, 2, 4, 8]) if number % 2 else 1
    sparse = {
        "pattern": kinds[number // 2 % len(kinds)],
        "ratio": draw.choice([0.1, 0.25, 1 / 3, 0.7, 1.0]),
        "block": block,
        "window": draw.choice([None, None, 1, 9, 40]),
        "globals": draw.choice([None, None, 0, 5]),
        "seed": draw.randrange(1 << 40),
    }
    branches = [{"w": draw.randint(block, 120), "r": draw.randint(1, 7)} for _ in range(draw.randint(1, 4))]
    return {
        "tokens": draw.randint(1, 160),
        "branches": branches,
        "layout": draw.choice(HEAD_LAYOUTS),
        "heads": draw.randint(1, 9),
        "headDim": draw.choice([1, 64, 80]),
        "layers": draw.randint(1, 5),
        "causal": draw.random() < 0.5,
        "sparse": sparse if number % 2 else None,
    }


def long_pattern(draw: random.Random) -> dict[str, Any]:
    """A random pattern over up to a million tokens, without tiles."""
    tokens = draw.randint(100_000, 1 << 20)
    branches = [{"w": draw.randint(1, 2 * tokens), "r": draw.randint(1, 700)} for _ in range(draw.randint(1, 3))]
    pattern = drawn_pattern(draw, 0)
    return pattern | {"tokens": tokens, "branches": branches, "heads": draw.randint(1, 4), "layers": 2}


# Row 4,096 never depends on the 3 tokens before it, and no evenly spread row is like it.
GAP = {
    "tokens": 8192, "branches": [{"w": 2048, "r": 1}, {"w": 4096, "r": 2}, {"w": 8192, "r": 4}],
    "layout": "interleaved", "heads": 4, "headDim": 64, "layers": 4, "causal": True, "sparse": None,
}  # fmt: skip


def spec_of(pattern: dict[str, Any]) -> DilatedSpec:
    return DilatedSpec.of(*([one[key] for one in pattern["branches"]] for key in "wr"), pattern["layout"])


def view_of(pattern: dict[str, Any], head: int) -> View:
    sparse = pattern["sparse"]
    config = None
    if sparse is not None:
        names = {"pattern": "pattern_type", "ratio": "sparsity_ratio", "block": "block_size"}
        names |= {"window": "local_window_size", "globals": "global_tokens", "seed": "seed"}
        config = SparsePatternConfig(**{names[key]: value for key, value in sparse.items()})
    sizes = {name: pattern[key] for name, key in (("heads", "heads"), ("head_dim", "headDim"), ("layers", "layers"))}
    return View(spec_of(pattern), pattern["tokens"], head=head, is_causal=pattern["causal"], sparse=config, **sizes)


def reach_of(mask: torch.Tensor, layers: int, is_causal: bool) -> torch.Tensor:
    """`(layers, N)`: the share of the tokens that each row depends on, by products of the pattern's whole mask."""
    n = len(mask)
    step = (mask | torch.eye(n, dtype=torch.bool)).double()
    reached, shares = torch.eye(n, dtype=torch.float64), []
    possible = torch.arange(1, n + 1) if is_causal else torch.full((n,), n)
    for _ in range(layers):
        reached = (reached @ step > 0).double()
        shares.append(reached.sum(1) / possible)
    return torch.stack(shares)


def expected(case: dict[str, Any], monkeypatch) -> dict[str, Any]:
    pattern, row, head = case["pattern"], case["row"], case["head"]
    view = view_of(pattern, head)
    spec, n, heads, causal = view.spec, view.tokens, view.heads, view.is_causal
    offsets = spec.offsets(heads)
    small = n < 1000
    if small:
        mask = dense_mask(spec, offsets, n, is_causal=causal)
        if view.sparse is not None:
            mask &= allowed_pairs(view.layout(), spec, offsets, 0, n)
        seen = keys_seen(view.layout(), spec, offsets, n, is_causal=causal)
        assert torch.equal(seen, mask.sum((0, 3)).T)
        keys = mask[:, head, row].sum(-1).tolist()
        counts = {"pairs": int(seen.sum()), "least": int(seen.min()), "most": int(seen.max())}
        counts["covered"] = (seen > 0).double().mean().item()
        branch_pairs = forward_flops(spec, n, heads, 1, is_causal=causal) // 4
        shares = reach_of(mask.any(0).any(0), view.layers, causal)
    else:
        pairs = [
            [visible_pairs(branch, offset, n, is_causal=causal) for offset in several]
            for branch, several in zip(spec.branches, offsets)
        ]
        keys = [
            visible_pairs(branch, several[head], n, is_causal=causal, start=row, stop=row + 1)
            for branch, several in zip(spec.branches, offsets)
        ]
        branch_pairs = sum(map(sum, pairs))
        counts = {"pairs": branch_pairs}
    if view.sparse is None:
        layers = range(1, view.layers + 1)
        counted = reach_shares(spec, n, heads, layers=[*layers], is_causal=causal)
        if small:
            torch.testing.assert_close(counted.flip(1), shares)
        means, leasts, _ = mean_and_least_reach(spec, n, heads, layers=[*layers], is_causal=causal)
    else:
        means, leasts = shares.mean(1), shares.amin(1)
    counts["branchPairs"] = branch_pairs
    found = {"counts": counts, "keys": keys, "reach": [*zip(means.tolist(), leasts.tolist())]}
    if small:
        found["density"] = density(view, case["cells"], case["cells"]).tolist()
    job = Job(
        spec=spec, tokens=n, gpus=1, heads=heads, head_dim=view.head_dim, layers=view.layers, is_causal=causal,
        tflops=TFLOPS,
    )  # fmt: skip
    plan = make_plan(job)
    found["cost"] = {"flops": 4 * counts["pairs"] * view.head_dim, "bytes": plan.fullest.peak}
    if view.sparse is None:
        assert found["cost"]["flops"] == plan.ranks[0].flops
        found["cost"] |= {"forward": plan.ranks[0].seconds_forward, "step": plan.step_seconds}
    lengths, rates = branches_for(n, heads, is_causal=causal)
    found["connecting"] = [{"w": w, "r": r} for w, r in zip(lengths, rates)]
    monkeypatch.setattr(spec_module, "_warned", set())
    warn_of_reach(DilatedSpec(spec.branches, spec.head_layout), n, heads, is_causal=causal)
    found["warnings"] = sorted(reason for _, reason in spec_module._warned)
    return found


@needs_browser
@pytest.mark.filterwarnings("ignore:no branch of")
def test_the_numbers_are_those_of_the_library_on_200_random_patterns(tmp_path, monkeypatch) -> None:
    draw = random.Random(0)
    cases = []
    for number in range(200):
        pattern = drawn_pattern(draw, number) if number < 180 else long_pattern(draw)
        n, heads = pattern["tokens"], pattern["heads"]
        cells = draw.choice([n, n, draw.randint(1, n)]) if number < 180 else 0
        cases.append({"pattern": pattern, "row": draw.randrange(n), "head": draw.randrange(heads), "cells": cells})
    cases.append({"pattern": GAP, "row": 4096, "head": 0, "cells": 0})
    found = evaluated(
        f"""{json.dumps(cases)}.map(({{ pattern, row, head, cells }}) => {{
          const counts = finish(countPairs(pattern));
          const reach = finish(reachShares(pattern, LIBRARY.reachWork)).map(({{ mean, least }}) => [mean, least]);
          return {{
            counts, reach, keys: rowView(pattern, head, row).map(({{ keys }}) => keys),
            density: density(pattern, head, cells), cost: cost(pattern, counts.pairs, {TFLOPS}, LIBRARY.backwardWork),
            connecting: branchesFor(pattern.tokens, pattern.heads, pattern.causal),
            warnings: reachWarnings(pattern).map(({{ reason }}) => reason), refused: problem(pattern),
            python: pythonFor(pattern), commands: commandsFor(pattern, head, 80, {TFLOPS}),
          }};
        }})""",
        tmp_path,
    )
    assert found[-1]["reach"][-1] == [1.0, pytest.approx(4094 / 4097)]
    assert len(found) == 201
    commands = _parser()
    for case, shown in zip(cases, found):
        wanted = expected(case, monkeypatch)
        assert shown["refused"] is None
        for name, value in wanted["counts"].items():
            assert shown["counts"][name] == pytest.approx(value, rel=1e-15), (name, case)
        assert shown["keys"] == wanted["keys"], case
        shares = (torch.tensor(found["reach"], dtype=torch.float64) for found in (shown, wanted))
        torch.testing.assert_close(*shares, rtol=1e-12, atol=0.0)
        if "density" in wanted:
            assert shown["density"] == wanted["density"], case
        for name, value in wanted["cost"].items():
            assert shown["cost"][name] == pytest.approx(value, rel=1e-12), (name, case)
        assert shown["connecting"] == wanted["connecting"]
        assert sorted(shown["warnings"]) == wanted["warnings"], case
        view = view_of(case["pattern"], case["head"])
        show, *plan = ([*shlex.split(line)][1:] for line in shown["commands"])
        assert vars(commands.parse_args(show))["segments"] == [*view.spec.segment_lengths]
        assert len(plan) == (view.sparse is None)
        for flags in plan:
            assert commands.parse_args(flags).rates == [*view.spec.dilation_rates]
    for shown, case in [*zip(found, cases)][:12]:
        names: dict[str, Any] = {}
        exec(shown["python"], names)
        view = view_of(case["pattern"], 0)
        assert names["attention"].spec == view.spec
        config = None if view.sparse is None else replace(view.sparse, seed=0)
        assert names["attention"].sparse_config in (config, view.sparse)  # only `random` has a seed
        assert names["out"].shape == (1, view.tokens, view.heads, view.head_dim)


def test_explore_writes_the_page_or_opens_it(tmp_path, monkeypatch, capsys) -> None:
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda page: not opened.append(page))
    assert main(["explore", "--out", str(tmp_path / "new" / "page.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'new' / 'page.html'}\n"
    assert not opened
    text = (tmp_path / "new" / "page.html").read_text()
    assert not re.findall(r"""(?:src|href)=|@import|url\(""", text)  # it needs no other file
    assert main(["explore"]) == 0
    printed = capsys.readouterr()
    path = Path(printed.out.strip())
    assert opened == [path.as_uri()]
    assert path.read_text() == text
    assert printed.err == ""


def test_explore_says_so_if_there_is_no_browser(monkeypatch, capsys) -> None:
    monkeypatch.setattr("webbrowser.open", lambda page: False)
    assert main(["explore"]) == 0
    assert "open this file in one" in capsys.readouterr().err


@needs_browser
def test_the_page_works_by_mouse_keyboard_and_address(tmp_path) -> None:
    found = evaluated(
        """{
          const wait = (ms) => new Promise((done) => setTimeout(done, ms)), log = {};
          const text = (id) => $(id).textContent;
          const shown = () => ({ row, span: view.span, notes: text("notes"), readout: text("readout") });
          const press = (key) => $("matrix").dispatchEvent(new KeyboardEvent("keydown", { key, cancelable: true }));
          const type = async (id, text) => {
            $(id).value = text;
            $(id).dispatchEvent(new Event("input", { bubbles: true }));
            $(id).dispatchEvent(new Event("change", { bubbles: true }));
            await wait(2000);
          };
          await wait(2000);
          log.opened = { ...shown(), tokens: pattern.tokens, causal: pattern.causal, head };
          press("+"); press("End"); press("ArrowUp");
          log.keys = shown();
          press("0"); press("Home");
          const box = $("matrix").getBoundingClientRect();
          const at = { pointerId: 1, clientX: box.left + 5, clientY: box.top + box.height / 2 };
          $("matrix").setPointerCapture = () => {};
          for (const kind of ["pointerdown", "pointerup"]) $("matrix").dispatchEvent(new PointerEvent(kind, at));
          log.clicked = shown();
          $("connect").click();
          await wait(2000);
          log.connected = { ...shown(), branches: pattern.branches, reach: text("figures"), address: location.hash };
          await type("tokens", "1M");
          log.long = { ...shown(), tokens: pattern.tokens };
          for (let i = 0; i < 20; i++) $("in").click();
          log.near = shown();
          await type("pattern", "random");
          log.tiles = { hidden: $("tiles").hidden, python: text("python") };
          await type("heads", "0");
          log.refused = shown();
          const frame = document.createElement("iframe");
          frame.style.width = "420px";
          frame.srcdoc = document.documentElement.outerHTML.replace(/<script>\\s*\\(async[\\s\\S]*?<\\/script>/, "");
          document.body.append(frame);
          await wait(3000);
          log.wide = frame.contentDocument.documentElement.scrollWidth;
          return log;
        }""",
        tmp_path,
        "#n=1000&w=64,250&r=1,2&h=4&l=3&causal=1&row=700&head=3",
    )
    opened, clicked = found["opened"], found["clicked"]
    assert (opened["tokens"], opened["row"], opened["head"], opened["causal"]) == (1000, 700, 3, True)
    assert "Nothing crosses" not in opened["notes"]  # 64 does not divide 250
    assert "The longest segment has 250 of 1,000 tokens. No row sees farther." in opened["notes"]
    assert (found["keys"]["span"], found["keys"]["row"]) == (500, 998)
    assert (clicked["span"], clicked["row"]) == (1000, 500)
    assert "Row 500, head 3" in clicked["readout"]
    lengths, rates = branches_for(1000, 4, shortest=128, is_causal=True)
    assert [(one["w"], one["r"]) for one in found["connected"]["branches"]] == [*zip(lengths, rates)]
    assert found["connected"]["notes"] == ""
    assert "Reach100%" in found["connected"]["reach"]
    assert f"w={','.join(map(str, lengths))}&" in found["connected"]["address"]
    assert found["long"]["tokens"] == 1 << 20
    assert "of 1,048,576 tokens" in found["long"]["notes"]
    assert found["near"]["span"] == 64
    assert not found["tiles"]["hidden"]
    assert "BlockSparseDilatedAttention" in found["tiles"]["python"]
    assert found["refused"]["notes"] == "Heads must be a whole number from 1 to 256."
    assert found["wide"] <= 420


@needs_browser
def test_what_is_wrong_with_a_control_stays_on_the_page_until_it_is_corrected(tmp_path) -> None:
    found = evaluated(
        """{
          const wait = (ms) => new Promise((done) => setTimeout(done, ms)), log = {};
          const notes = () => $("notes").textContent;
          const enter = (id, text) => {
            $(id).value = text;
            for (const kind of ["input", "change"]) $(id).dispatchEvent(new Event(kind, { bubbles: true }));
          };
          startFrom("One million tokens");
          $("heads").value = "0";
          update();
          await wait(5000); // until the pairs and the reach of what was shown before are counted
          log.counted = reach !== null;
          log.heads = notes();
          startFrom("Small: 64 tokens, two branches");
          enter("tflops", "0");
          log.tflops = notes();
          enter("tflops", "100");
          log.corrected = notes();
          enter("row", "some");
          log.row = [$("row").value, String(row)];
          const segment = $("branches").querySelector("input");
          for (const length of ["2", "16"]) { // as someone types it
            segment.value = length;
            update();
          }
          log.block = $("block").value;
          segment.value = "1e300";
          update();
          log.huge = notes();
          return log;
        }""",
        tmp_path,
    )
    assert found["counted"]
    assert found["heads"] == "Heads must be a whole number from 1 to 256."
    assert found["tflops"] == "TFLOP/s must be a number above 0."
    assert found["corrected"] == ""
    assert found["row"][0] == found["row"][1]
    assert found["block"] == "16"
    assert found["huge"] == "Segments and rates must be whole numbers of at least 1."


@needs_browser
def test_every_branch_tick_and_control_is_in_sight_and_the_page_scrolls_over_the_picture(tmp_path) -> None:
    found = evaluated(
        """{
          const wait = (ms) => new Promise((done) => setTimeout(done, ms)), log = {};
          const tokens = 2 ** 20 - 1, branches = Array.from({ length: 9 }, (_, i) => ({ w: 4096 << i, r: 1 << i }));
          const many = { ...base, tokens, branches, heads: 48, causal: true };
          const sparse = { pattern: "strided", ratio: 0.1, block: 512, window: null, globals: null, seed: 0 };
          show(many);
          const used = [...document.querySelectorAll("#legend .swatch")];
          log.colours = [used.length, new Set(used.map((one) => getComputedStyle(one).backgroundColor)).size];
          log.panel = [document.querySelector(".controls").offsetHeight, innerHeight];
          const spin = (deltaY) => !$("matrix").dispatchEvent(new WheelEvent("wheel", { deltaY, cancelable: true }));
          log.wheel = [spin(100), spin(-100), spin(100)];
          const before = tasks.matrix;
          dispatchEvent(new Event("resize")); // of the height alone
          log.kept = tasks.matrix === before;
          Object.defineProperty(window, "devicePixelRatio", { value: 2 * devicePixelRatio }); // as when zoomed in
          dispatchEvent(new Event("resize"));
          log.sharp = tasks.matrix !== before;
          const frame = document.createElement("iframe");
          frame.style.width = "420px";
          frame.srcdoc = document.documentElement.outerHTML.replace(/<script>\\s*\\(async[\\s\\S]*?<\\/script>/, "");
          document.body.append(frame);
          await wait(3000);
          frame.contentWindow.show(many);
          const ticks = [...frame.contentDocument.querySelectorAll("#ticks-below span")];
          const boxes = ticks.map((tick) => tick.getBoundingClientRect());
          log.ticks = [ticks.length, boxes.slice(1).every(({ left }, i) => boxes[i].right < left)];
          show({ ...many, branches: [{ w: tokens, r: 1 }], causal: false, sparse });
          log.block = [$("block").value, problem(patternInControls())];
          return log;
        }""",
        tmp_path,
    )
    assert found["colours"] == [9, 9]
    assert found["panel"][0] <= found["panel"][1]
    assert found["wheel"] == [False, True, True]
    assert found["kept"]
    assert found["sharp"]
    assert found["ticks"] == [3, True]
    assert found["block"] == ["512", None]
