"""The records of the runs, by run and seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dilated_attention_pytorch.pages.plots import short

Record = dict[str, Any]
# The runs that differ in attention and length alone, as their names begin.
KINDS = {
    "dense": "dense",
    "dilated": "dilated",
    "window": "sliding window",
    "staggered": "dilated, staggered",
    "doubled": "dilated, doubled",
    "windowed": "window and dilated",
    "paired": "dilated, paired",
    "paired-staggered": "dilated, paired and staggered",
}


@dataclass(frozen=True)
class Figures:
    """One number per seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def spread(self) -> float:
        """Half of the range over seeds."""
        return (max(self.values) - min(self.values)) / 2

    def __format__(self, how: str) -> str:
        return format(self.mean, how) + (f" ± {format(self.spread, how)}" if len(self.values) > 1 else "")


class Results:
    """The records by run."""

    def __init__(self, records: Sequence[Record]) -> None:
        if not records:
            raise ValueError("there are no results to draw: the command without --report measures them")
        self.first = records[0]
        self.settings = self.first["settings"]
        self.lengths: list[int] = self.settings["lengths"]
        self.runs: dict[str, dict[int, Record]] = {}
        for record in records:
            self.runs.setdefault(record["run"], {})[record["seed"]] = record
        # The seed does not change the time of a step, but some runs shared the GPU with other programs.
        for seeds in self.runs.values():
            seconds = seeds[min(seeds)]["step_seconds"]
            seeds.update({seed: {**record, "step_seconds": seconds} for seed, record in seeds.items()})

    def name(self, kind: str, length: int) -> str:
        return f"{kind}-{short(length)}"

    def has(self, *names: str) -> bool:
        return all(name in self.runs for name in names)

    def one(self, name: str) -> Record:
        """The record of the first seed, for what all seeds share."""
        return next(iter(self.runs[name].values()))

    def figures(self, name: str, find: Callable[[Record], float]) -> Figures:
        return Figures(tuple(find(record) for record in self.runs[name].values()))

    def shared(self, name: str, a: str, b: str) -> Figures:
        """The validation bits of run `name`, by the seeds that both `a` and `b` have."""
        seeds = sorted(self.runs[a].keys() & self.runs[b].keys())
        return Figures(tuple(self.runs[name][seed]["validation"] for seed in seeds))

    def difference(self, a: str, b: str, find: Callable[[Record], float] = lambda r: r["validation"]) -> Figures:
        """How much larger a figure of run `a` is than that of `b`, in percent, by the seeds that both have."""
        seeds = self.runs[a].keys() & self.runs[b].keys()
        return Figures(tuple(100 * (find(self.runs[a][s]) / find(self.runs[b][s]) - 1) for s in sorted(seeds)))

    def trained(self) -> list[str]:
        """The runs of `KINDS`, by kind and length."""
        plain = [self.name(kind, length) for kind in KINDS for length in self.lengths]
        return [name for name in plain if name in self.runs]


def at_length(tokens: int, *, fitted: bool = False, key: str = "bits") -> Callable[[Record], float]:
    """The measurement of a record with that much context."""

    def find(record: Record) -> float:
        found = [one for one in record["context"] if one["tokens"] == tokens]
        return next((one for one in found if one["fitted"] == fitted), found[0])[key]

    return find
