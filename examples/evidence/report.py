"""`evidence.md` and its three pictures, drawn from the records of the runs. What was not measured is not claimed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from dilated_attention_pytorch.files import write_whole
from dilated_attention_pytorch.pages.plots import check_picture, save, short
from examples.evidence import pictures
from examples.evidence.results import Figures, Record, Results, at_length

PAGE = "evidence.md"
PICTURES = {"context": pictures.context, "cost": pictures.cost, "positions": pictures.positions}
# Perplexity on The Stack at test lengths 2K, 8K and 32K: LongNet, Table 2 (12 layers, width 768).
_PAPER = {
    ("dense", 2048): (4.24, 5.07, 11.29),
    ("dilated", 8192): (4.23, 3.24, 3.36),
    ("dilated", 32_768): (4.37, 3.33, 3.01),
    ("sparse transformer", 8192): (4.39, 3.35, 8.79),
    ("sparse transformer", 32_768): (5.15, 4.00, 3.64),
}
_PAPER_LENGTHS = (2048, 8192, 32_768)
_OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon for the matrices of layers and AdamW for the rest"}


_RECIPE = (
    "Optimizer and learning rate were chosen before these runs, by runs of 120 steps of dilated-8K alone with one seed "
    "and their bits on held-out text that also counts here: Muon at 1.5e-3, 4e-3, 1e-2 (also with QK-norm) and 2e-2, "
    "AdamW at 1.5e-3 and 5e-3. Muon at 1e-2 was the best; 8e-3, which is a little below it for longer runs, was not "
    "tried. Nothing was chosen for the dense model, which may do better with another rate. The first two runs, seed 0 "
    "of dilated-8K and dense-8K, updated one matrix at a time with Muon, and later ones update those of one shape "
    "together: steps of the first two took longer for that, so compare their times with each other only. Seed 0 of "
    "paired-8K and of paired-staggered-8K shared the GPU with other programs, so their times are too long."
)
_STAGGERED = (
    " In paired and staggered models, all near segments of every other layer end at token 32,384, so the last tokens "
    "at 32K see few tokens before them in these layers."
)
# What was done to a dilated model, as the names of runs begin.
_TRIED = {
    "staggered": "every other layer has segments that are 23/16 as long, so that borders rarely meet",
    "doubled": "a second branch of rate 1 has segments that are 11/16 as long",
    "paired": "a second branch of rate 1 and a larger last rate take the place of the branches between",
    "paired-staggered": (
        "two branches of rate 1 and the last one, with segments 23/16 as long in every other layer. Presets have "
        "branches like these"
    ),
    "windowed": "a sliding window that costs as much takes the place of all branches but the last",
    "qk-norm": "with queries and keys scaled by an RMS norm",
}
_PRESETS = "paired-staggered"
_NOT_BRANCHES = ("windowed", "qk-norm")  # of what was tried


def write(folder: Path, records: Sequence[Record]) -> Path:
    """Draw the page and its pictures into `folder`; returns the path of the page."""
    results = Results(records)
    for name, draw in PICTURES.items():
        path = folder / "pictures" / f"evidence-{name}.svg"
        check_picture(path)
        save(path, draw(results))
    text = "\n\n".join(_page(results)) + "\n"
    write_whole(folder / PAGE, lambda partial: partial.write_text(text, encoding="utf-8"))
    return folder / PAGE


def _page(results: Results) -> Iterable[str]:
    settings = results.settings
    yield "# Evidence: does it learn as well as dense attention, and what does the reach buy?"
    if results.first["scale"] != "full":
        yield "**This is the tiny version for machines without a GPU. It shows the machinery, not the result.**"
    yield (
        f"One language model of {results.first['parameters'] / 1e6:.3g}M parameters, trained on the same text with "
        f"different attention and lengths; so far, these are {', '.join(results.runs)}. [How it was "
        "measured](#how-it-was-measured) has the details."
    )
    yield "## Answers"
    yield "\n".join(f"{number}. {answer}" for number, answer in enumerate(_answers(results), start=1))
    yield "## When to use this, when not"
    yield _advice(results)
    yield "## What context buys"
    yield "![Bits per byte over the length of the sequence](pictures/evidence-context.svg)"
    yield (
        f"The same last {settings['scored']:,} tokens of held-out text, at the end of sequences of different lengths. "
        "Lines are faint beyond the length of training. Sequences end where all segments of *dilated* models end: "
        f"there a row sees most.{_STAGGERED if results.has('paired-staggered-32K') else ''}"
    )
    yield _context_table(results)
    yield "## What it costs"
    yield "![Validation bits over tokens, FLOPs and seconds](pictures/evidence-cost.svg)"
    yield (
        f"The curves, and so the comparison at the same seconds, are of {settings['validation_windows']} of the "
        f"{settings['windows']} held-out stretches that the table is of: compare curves with each other, not with the "
        "table. The time of a step is that of the first seed, since some of the others shared the GPU."
    )
    yield _cost_table(results)
    yield "## Where in the sequence"
    yield "![Bits per byte by position](pictures/evidence-positions.svg)"
    yield (
        "All held-out tokens in sequences of the training length, against the dense model of the same length on the "
        "same tokens, or the dilated one where there is no dense one. The red line is the dilated model with its "
        "longest branch removed after training."
    )
    yield "## Recall"
    yield (
        f"A passage of {settings['scored'] // 16} tokens in random order is planted in the first eighth of a sequence "
        "and repeated at its end: the share of its second half that the model predicts. No model was trained for it. "
        "Beyond the training length, dilated models take the branches for the length that is tested."
    )
    yield _recall_table(results)
    yield "## How it was measured"
    yield from _method(results)
    if results.first["scale"] == "full":
        yield _RECIPE
    yield "## Repeat it"
    yield _REPEAT


def _method(results: Results) -> Iterable[str]:
    settings, corpus = results.settings, results.first["corpus"]
    training, held_out = corpus["training"], corpus["held-out"]
    where = results.first["machine"]
    yield (
        f"The model has {results.first['parameters'] / 1e6:.3g}M parameters ({settings['num_layers']} layers, width "
        f"{settings['d_model']}, {settings['num_heads']} heads, a BPE of {settings['vocab_size']:,} tokens), and is "
        f"trained for {settings['steps']} steps of {settings['tokens_per_step']:,} tokens. Every model reads the same "
        "tokens, cut into sequences of its length, and models of one length read them in the same order: only the "
        "attention differs. *Dense* is one segment as long as the sequence, in this library's kernel; *dilated* has "
        "the branches of `branches_for` for the number of heads, the last of which spans the sequence; the *sliding "
        "window* has tiles, and the width at which it costs as many FLOPs as the dilated model of its length. "
        f"{_OPTIMIZERS[settings['optimizer']]}, peak learning rate {settings['learning_rate']:g}, cosine. Seeds "
        "decide the weights and the order of the text; ± is half of the range over seeds."
    )
    yield (
        f"Models of different lengths differ in one more thing. {settings['places']} steps read "
        f"{settings['places']} places of the text, and the sequences of a step come from as many of them as it has "
        f"sequences: {_places(results)}. The fewer there are, the more alike the text of a step is, and the less a "
        "model learns from it. So compare models of one length with each other, and the lengths of one model in the "
        "table of contexts."
    )
    yield (
        f"The text is {corpus['source']}, files in directory order, without tables: {training['bytes']:,} bytes "
        f"({training['tokens']:,} tokens, SHA-256 {training['sha256'][:16]}) for training, and "
        f"{held_out['directories']} whole directories held out (chosen by a hash of their names), "
        f"{held_out['bytes']:,} bytes ({held_out['tokens']:,} tokens, SHA-256 {held_out['sha256'][:16]}). Measured on "
        f"{where.get('gpu') or where.get('cpu')}, PyTorch {where['torch']}. `./run evidence --report` draws this page "
        "from `evidence.jsonl`."
    )


def _places(results: Results) -> str:
    """How many places of the text a step reads at each training length."""
    settings = results.settings
    counts = {n: min(settings["places"], settings["tokens_per_step"] // n) for n in results.lengths}
    return ", ".join(f"{count} at {short(n)}" for n, count in counts.items())


def _answers(results: Results) -> Iterable[str]:
    _, middle, long, longest = results.lengths
    name = results.name
    longest_ones = [name(kind, longest) for kind in ("dilated", "lengthened")]
    ours = ("dilated", _PRESETS)
    yield f"**The same tokens.** *{_PRESETS.capitalize()}*: {_TRIED[_PRESETS]}. " + _sentences(
        _compare(results, name(kind, n), name("dense", n)) for n in (middle, long) for kind in ours
    )
    yield "**The same seconds.** " + _sentences(
        _same_seconds(results, one, name("dense", n))
        for n, one in ((middle, name("dilated", middle)), *((long, name(kind, long)) for kind in ours))
    )
    yield "**The same FLOPs.** " + _sentences(
        _compare(results, *pair) for n in (middle, long) for pair in _pairs_with_window(results, n)
    )
    yield "**More context.** " + _sentences(
        _context_gain(results, one)
        for one in (*(name(kind, n) for n in (middle, long) for kind in ("dense", "window", "dilated")), *longest_ones)
    )
    yield "**Segment borders.** " + _sentences(_borders(results, n) for n in (middle, long))
    yield "**The branch that spans the sequence.** " + _sentences(
        [
            *(_reach(results, name(kind, n)) for kind in ours for n in (middle, long, longest)),
            _trained_without(results, long),
        ]
    )
    yield "**Converting a dense model.** " + _sentences([_continued(results, "converted", long)])
    yield "**Lengthening a model.** " + _sentences([_continued(results, "lengthened", longest)])
    yield "**Head layouts.** " + _sentences(
        [_compare(results, name("blocked", long), name("dilated", long), ("The layout blocked", "interleaved"))]
    )
    tried = [(kind, n) for n in (middle, long) for kind in _TRIED if results.has(name(kind, n), name("dilated", n))]
    if tried:
        what = " ".join(f"*{kind.capitalize()}*: {_TRIED[kind]}." for kind in dict(tried) if kind != _PRESETS)
        yield f"**What could close the gap.** {what} " + _sentences(
            _compare(results, name(kind, n), name(other, n))
            for kind, n in tried
            for other in (("dilated",) if kind == _PRESETS else ("dilated", "dense"))
        )


def _pairs_with_window(results: Results, length: int) -> list[tuple[str, str]]:
    dilated, window, dense = (results.name(kind, length) for kind in ("dilated", "window", "dense"))
    return [(dilated, window), (window, dense)]


def _sentences(found: Iterable[str | None]) -> str:
    return " ".join(one for one in found if one) or "Not measured yet."


def _compare(results: Results, a: str, b: str, names: tuple[str, str] | None = None) -> str | None:
    if not results.has(a, b) or not (percent := results.difference(a, b)).values:
        return None
    first, second = names or (a, b)
    one, other = (results.shared(name, a, b) for name in (a, b))
    values = f"{one:.4f} against {other:.4f} bits per byte"
    if abs(percent.mean) <= percent.spread or f"{abs(percent.mean):.2f}" == "0.00":
        return f"{first} and {second} do not differ by more than the seeds do: {values}."
    return f"{first} needs {_more(percent)} bits per byte than {second}: {values}."


def _more(percent: Figures) -> str:
    spread = f" (± {percent.spread:.2f})" if len(percent.values) > 1 else " (one seed)"
    return f"{abs(percent.mean):.2f} %{spread} {'more' if percent.mean > 0 else 'fewer'}"


def _validation(record: Record) -> float:
    return record["validation"]


def _seconds(record: Record) -> float:
    return record["steps"] * record["step_seconds"]


def _same_seconds(results: Results, a: str, b: str) -> str | None:
    if not results.has(a, b) or not results.difference(a, b).values:
        return None
    seconds = min(results.figures(name, _seconds).mean for name in (a, b))

    def bits(record: Record) -> float:
        return _at_step(record["curve"], seconds / record["step_seconds"])

    percent = results.difference(a, b, bits)
    slower = max((a, b), key=lambda name: results.figures(name, _seconds).mean)
    return (
        f"After {seconds:,.0f} seconds {a} needs {_more(percent)} bits per byte than {b}; {slower}, which takes "
        f"{results.figures(slower, _seconds).mean / seconds:.2f} times as long, has not finished its schedule then."
    )


def _at_step(curve: Sequence[Sequence[float]], step: float) -> float:
    """The bits of a curve between two validations, or at its nearer end."""
    for (a, bits), (b, later) in pairwise(curve):
        if a <= step <= b:
            return bits + (later - bits) * (step - a) / (b - a)
    return curve[0][1] if step < curve[0][0] else curve[-1][1]


def _context_gain(results: Results, name: str) -> str | None:
    if not results.has(name):
        return None
    length = results.one(name)["length"]
    shown = [tokens for tokens in results.lengths if tokens <= length]
    values = ", ".join(f"{results.figures(name, at_length(n)):.4f} with {short(n)}" for n in shown)
    first, last = (results.figures(name, at_length(n)).mean for n in (shown[0], shown[-1]))
    return f"{name}: {values} ({100 * (last / first - 1):+.1f} %)."


def _reach(results: Results, name: str) -> str | None:
    if not results.has(name) or "without_reach" not in results.one(name):
        return None
    percent = results.figures(name, lambda r: 100 * (r["without_reach"]["validation"] / r["validation"] - 1))
    return f"{name} needs {_more(percent)} bits per byte without it, if it is removed after training."


def _borders(results: Results, length: int) -> str | None:
    """The rows of the first of the shortest segments, and those after and before the borders of the later ones."""
    dilated, dense = (results.name(kind, length) for kind in ("dilated", "dense"))
    if not results.has(dilated, dense):
        return None
    shortest = min(results.one(dilated)["branches"][0])
    parts = len(results.one(dilated)["positions"])
    quarter = shortest * parts // (4 * length)  # of a segment, in parts of the sequence
    if not quarter or not results.difference(dilated, dense).values:
        return None

    def more(chosen: Callable[[int], bool]) -> str:
        places = [place for place in range(parts) if chosen(place)]
        return _more(results.difference(dilated, dense, lambda r: sum(r["positions"][place] for place in places)))

    def later(number: int) -> str:
        return more(lambda place: place >= 4 * quarter and place // quarter % 4 == number)

    return (
        f"In its first {shortest:,} tokens, {dilated} needs {more(lambda place: place < 4 * quarter)} bits per byte "
        f"than {dense}. In the first quarter of each later segment of that length, where rows see few tokens before "
        f"them, it needs {later(0)}, and in the last quarter {later(3)}."
    )


def _trained_without(results: Results, long: int) -> str | None:
    local, whole = results.name("local", long), results.name("dilated", long)
    return _compare(results, local, whole, ("A model that never had it", whole))


def _continued(results: Results, kind: str, length: int) -> str | None:
    continued = results.name(kind, length)
    if not results.has(continued):
        return None
    best, plain = (results.name(kind, length) for kind in (_PRESETS, "dilated"))
    whole = best if results.has(best) else plain
    parent = results.one(continued)["starts_as"]
    said = (
        f"{parent}, switched to dilated attention at {short(length)} and trained for {results.one(continued)['steps']} "
        f"more steps, has {results.figures(continued, _validation):.4f} bits per byte"
    )
    if results.has(parent) and (before := results.shared(parent, parent, continued)).values:
        said += f" (before, at its own length: {before:.4f})"
    return f"{said}. {_compare(results, continued, whole) or ''}".strip()


def _advice(results: Results) -> str:
    """By the figures: who is faster and who learns more at each length that both have."""
    said = []
    for length in results.lengths:
        dense, dilated = (results.name(kind, length) for kind in ("dense", "dilated"))
        if results.has(dense, dilated):
            times = results.figures(dense, _seconds).mean / results.figures(dilated, _seconds).mean
            percent = results.difference(dilated, dense)
            speed = f"{times:.2f} times as fast" if times >= 1 else f"{1 / times:.2f} times slower"
            learns = f"needs {_more(percent)} bits per byte" if percent.values else "was trained with another seed"
            better = times < 1.05 or (percent.values and percent.mean > 1.0)
            verdict = "Dense attention is the better choice there" if better else "Dilated attention is worth it there"
            if times >= 1.05 and better:
                verdict = "Choose dense attention there unless its time decides"
            said.append(f"At {short(length)} a step of the dilated model is {speed} and it {learns}. {verdict}.")
        elif results.has(dilated):
            said.append(f"At {short(length)} only the dilated model was trained.")
        others = [results.name(kind, length) for kind in _TRIED if kind not in _NOT_BRANCHES]
        gaps = {name: results.difference(name, dense) for name in others if results.has(name, dense)}
        gaps = {name: gap for name, gap in gaps.items() if gap.values}
        if gaps:
            best = min(gaps, key=lambda name: gaps[name].mean)
            said.append(f"The best other branches at {short(length)}, {best}, need {_more(gaps[best])} than dense.")
        window = results.name("window", length)
        behind = results.difference(dilated, window) if results.has(dilated, window) else Figures(())
        if behind.values and behind.mean > 1.0:
            said.append(f"At {short(length)} a sliding window of the same FLOPs learns more than dilated attention.")
    said.append(
        f"Up to {short(results.lengths[0])} tokens, the shortest segment, all of these models are dense. "
        "`performance.md` has the time of attention alone, by length, beside PyTorch's."
    )
    return " ".join(said)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [head, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def _context_table(results: Results) -> str:
    """Perplexity per token at the training lengths, and the paper's."""
    rows = []
    own = results.trained() + [name for name in results.runs if name not in results.trained()]
    for name in own:
        record = results.one(name)
        ours = []
        for tokens in results.lengths:
            value = results.figures(name, at_length(tokens, key="perplexity"))
            fitted = [one for one in record["context"] if one["tokens"] == tokens and one["fitted"]]
            cell = f"{value:.2f}"
            if fitted:
                cell += f" (fitted {results.figures(name, at_length(tokens, fitted=True, key='perplexity')):.2f})"
            ours.append(cell)
        rows.append([name, *ours, *_paper(name.rpartition("-")[0], record["length"])])
    rows += [
        [f"sparse transformer, {short(length)}", *["-"] * len(results.lengths), *_paper(kind, length)]
        for kind, length in _PAPER
        if kind == "sparse transformer"
    ]
    heads = [f"at {short(n)}" for n in results.lengths] + [f"paper at {short(n)}" for n in _PAPER_LENGTHS]
    return (
        _table(["trained as", *heads], rows)
        + "\n\nPerplexity per token of the same last tokens. *Fitted* dilated models read longer sequences with the "
        "branches for that length, the others with those of training. The paper's figures are on another text with "
        "another tokenizer and a model three times as large: compare within a table, not across."
    )


def _paper(kind: str, length: int) -> list[str]:
    return [f"{value:.2f}" for value in _PAPER.get((kind, length), ())] or ["-"] * len(_PAPER_LENGTHS)


def _cost_table(results: Results) -> str:
    rows = [
        [
            name,
            f"{results.one(name)['keys_per_row']:,.0f}",
            f"{results.one(name)['steps'] * results.one(name)['flops_per_step'] / 1e15:.3g}",
            f"{1000 * results.figures(name, lambda r: r['step_seconds']).mean:,.0f}",
            f"{results.figures(name, _validation):.4f}",
        ]
        for name in results.runs
    ]
    return _table(["run", "keys per row", "PFLOPs", "ms per step", "validation bits per byte"], rows)


def _recall_table(results: Results) -> str:
    lengths = sorted({one["tokens"] for name in results.runs for one in results.one(name)["recall"]})
    rows = []
    for name in results.trained():
        cells = []
        for tokens in lengths:

            def right(record: Record, tokens: int = tokens) -> float:
                found = [one for one in record["recall"] if one["tokens"] == tokens]
                return 100 * next((one for one in found if one["fitted"]), found[0])["right"]

            cells.append(f"{results.figures(name, right).mean:.0f}\N{NO-BREAK SPACE}%")
        rows.append([name, *cells])
    return _table(["trained as", *(f"at {short(n)}" for n in lengths)], rows)


_FOLDERS = (
    "block,certs,crypto,fs,include,init,io_uring,ipc,kernel,lib,mm,net,rust,samples,security,sound,virt,"
    "drivers/infiniband,drivers/media,drivers/net,drivers/scsi,drivers/usb"
)
_REPEAT = f"""\
```bash
apt-get download linux-source-6.1=6.1.192-1   # of Debian 12; most of its C code is read
dpkg-deb -x linux-source-6.1_*.deb . && tar xf usr/src/linux-source-6.1.tar.xz
./run evidence --prepare --data linux-source-6.1/{{{_FOLDERS}}}
./run evidence --plan               # the runs and their cost
./run evidence --minutes 9          # as often as it takes: it continues
```

Any folder of long text will do. Copy `runs/evidence/corpus` to the machine that has the GPU if that is another one."""
