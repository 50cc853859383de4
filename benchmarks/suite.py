"""The one shape of a suite (setup, measure, tables, verdict), its records as JSON lines, and the runner."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilated_attention_pytorch.measuring import machine
from dilated_attention_pytorch.models.config import ModelConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = dict[str, Any]
"""One measurement: a line of the results."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says; None or an empty tuple leaves the choice to the suite."""

    device: str = "cpu"
    out: Path | None = None
    tokens: Sequence[int] = ()
    only: Sequence[str] = ()
    cases: Sequence[str] = ()
    torchscale: Path | None = None
    kernels: str = "best"
    wheels: Path | None = None
    heads: int | None = None
    head_dim: int | None = None
    sizes: Sequence[str] = ()
    batches: Sequence[int] = ()
    cap: float = 80.0
    host: float = 110.0
    data: Sequence[str] = ()
    ranks: bool = False


@dataclass
class Table:
    """What a reader sees of records, in the terminal and on the page; charts are for HTML only."""

    heading: str
    words: list[str] = field(default_factory=list)
    head: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    charts: list[tuple[str, Callable[[], Figure]]] = field(default_factory=list)
    picture: str = ""
    """The file of a picture beside the page, which `./run docs` draws."""

    def markdown(self) -> list[str]:
        lines = [markdown_row(self.head), markdown_row(["---"] * len(self.head)), *map(markdown_row, self.rows), ""]
        if self.picture:
            lines = [f"![{self.heading}]({self.picture})", "", *lines]
        return [*lines, *(f"- {note}" for note in self.notes), ""] if self.notes else lines


@dataclass(frozen=True)
class Verdict:
    """Whether a target was reached."""

    met: bool
    text: str

    def __str__(self) -> str:
        return f"{'met' if self.met else 'NOT MET'}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A benchmark: what to measure, how, what readers see of it, and the targets that it is held against."""

    name: str
    about: str
    flags: Sequence[str] = ()
    """The flags that it takes besides --out."""
    setup: Callable[[Options], Sequence[Any]]
    """The cases to measure; raises where the options cannot be honoured."""
    measure: Callable[[Any, Options], Iterable[Record]]
    """Measures one case."""
    tables: Callable[[Sequence[Record]], Iterable[Table]]
    verdict: Callable[[Sequence[Record]], Iterable[Verdict]] = lambda records: ()
    key: Sequence[str] = ()
    """The fields that tell its records apart: of records that agree in them and in the machine, the last one counts."""
    earlier: Mapping[str, Any] = field(default_factory=dict)
    """What a field means that records of earlier releases lack."""

    def latest(self, records: Iterable[Record]) -> list[Record]:
        """The records of this suite that count."""
        found: dict[tuple[Any, ...], Record] = {}
        for record in records:
            if record["suite"] == self.name:
                record = {**self.earlier, **record}
                found[(record["on_machine"], *(record.get(name) for name in self.key))] = record
        return list(found.values())


def run(suites: Sequence[Suite], options: Options) -> list[Record]:
    """Measure suites, print a line per record, then tables and verdicts; append records to `options.out`."""
    todo = [(suite, suite.setup(options)) for suite in suites]
    found = machine(options.device)
    print(describe(found))
    append_line(options.out, {"machine": found})
    every: list[Record] = []
    for suite, cases in todo:
        records: list[Record] = []
        for case in cases:
            for measured in suite.measure(case, options):
                record = {"suite": suite.name, **measured}
                append_line(options.out, record)
                print(f"{suite.name}: {_progress(record)}", flush=True)
                records.append(record | _place(found, run=0))
        for table in suite.tables(records):
            if table.rows:
                print(f"\n{table.heading}\n", *table.words, *table.markdown(), sep="\n")
        print(*suite.verdict(records), sep="\n")
        every += records
    return every


def _progress(record: Record) -> str:
    """What a record says, in one line: its words and numbers, without lists and settings."""
    shown = {name: value for name, value in record.items() if type(value) in (str, int, float) and name != "suite"}
    rounded = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in shown.items()}
    return ", ".join(f"{name} {value}" for name, value in rounded.items())


def append_line(path: Path | None, line: Record) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as stream:
        stream.seek(max(0, stream.tell() - 1))
        is_cut_off = stream.read() not in (b"", b"\n")  # a run was killed while it wrote
        stream.write(b"\n" * is_cut_off + json.dumps(line).encode() + b"\n")


def read_records(results: Path) -> list[Record]:
    """All records of a file of JSON lines, each with its machine and the number of its run."""
    if not results.is_file():
        raise FileNotFoundError(f"no results at {results}: measure first, as in `bench all --out {results}`")
    records: list[Record] = []
    found: Record = {}
    run = 0
    for number, text in enumerate(results.read_text().splitlines(), start=1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{results}, line {number}, is damaged ({error}): delete this line") from None
        if "machine" in line:
            found, run = line["machine"], run + 1
        else:
            records.append(line | _place(found, run))
    if not records:
        raise ValueError(f"{results} has no measurements: a run was stopped before its first case, or all were skipped")
    return records


def _place(found: Record, run: int) -> Record:
    short = found.get("gpu") or f"CPU, {found.get('threads')} threads"
    return {"run": run, "on_machine": short, "machine": describe(found)}


def describe(machine: Record) -> str:
    """A machine in one line.

    >>> describe({"gpu": "NVIDIA H200", "torch": "2.11"})
    'gpu NVIDIA H200, torch 2.11'
    """
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def by_machine(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """The records of each machine, with its name."""
    for name in dict.fromkeys(record["on_machine"] for record in records):
        yield name, [record for record in records if record["on_machine"] == name]


_EARLIER_BRANCHES = "`branches_for(tokens, heads)`"  # of presets whose records do not name them


def branches_in_words(config: ModelConfig) -> str:
    """The branches of a model for its record; those of presets, which are staggered, by how they were chosen."""
    if not config.stagger:
        return config.pattern_in_words
    return "`branches_for(tokens, heads, is_causal=True)`, 23/16 as long in every other layer"


def which_branches(records: Sequence[Record]) -> str:
    """A sentence on the branches of some records of dilated models, each of which has a `size`; empty without any."""
    sizes: dict[str, dict[str, None]] = {}
    for record in records:
        sizes.setdefault(record.get("branches", _EARLIER_BRANCHES), {})[record["size"]] = None
    if not sizes:
        return ""
    if len(sizes) == 1:
        return f"Branches: {next(iter(sizes))}."
    return f"Branches: {'; '.join(words + ' (' + ', '.join(names) + ')' for words, names in sizes.items())}."


def check_names(flag: str, wanted: Iterable[str], known: Iterable[str]) -> None:
    """Raise if a flag names something that the suite does not have."""
    if unknown := set(wanted) - {*known}:
        every, wrong = (", ".join(map(repr, names)) for names in (known, sorted(unknown)))
        raise ValueError(f"--{flag} takes names of {every}; got {wrong}")


def reason(error: Exception) -> str:
    """An error in one line, for the record of what failed with it.

    >>> reason(ValueError("too long\\nmore")), reason(KeyError())
    ('ValueError: too long', 'KeyError: no message')
    """
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def number(value: float | None, digits: int, scale: float = 1.0) -> str:
    """A cell: the value over `scale`, or nothing where there is none.

    >>> number(3 << 29, 2, 1 << 30), number(None, 1)
    ('1.50', '')
    """
    return "" if value is None else f"{value / scale:.{digits}f}"
