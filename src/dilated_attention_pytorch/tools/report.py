"""The report of a tool: facts that it read, and findings with the way out of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from textwrap import indent, wrap
from typing import Any, Literal, get_args

from dilated_attention_pytorch.measuring import size

Level = Literal["broken", "pitfall", "option"]
LEVELS: tuple[str, ...] = get_args(Level)


@dataclass(frozen=True)
class Finding:
    """One measured fact, and what to do about it.

    `broken` fails now, `pitfall` costs time or fails later, `option` is something to gain. `saves_bytes` is the memory
    that the way out frees, if known. `under` sets the topic.
    """

    level: Level
    measured: str
    way_out: str
    saves_bytes: int | None = None
    topic: str = ""


broken = partial(Finding, "broken")
pitfall = partial(Finding, "pitfall")
option = partial(Finding, "option")


def under(topic: str, *checks: Iterable[Finding]) -> list[Finding]:
    """The findings of some checks, under a topic."""
    return [replace(finding, topic=topic) for check in checks for finding in check]


@dataclass(frozen=True)
class Report:
    """Facts by section, and findings in the order in which to act on them."""

    title: str
    facts: Mapping[str, Mapping[str, Any]]
    findings: Sequence[Finding] = ()

    @property
    def is_broken(self) -> bool:
        return any(finding.level == "broken" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The report in plain values for JSON; byte counts stay numbers."""
        return {
            "title": self.title,
            "broken": self.is_broken,
            "facts": {section: dict(facts) for section, facts in self.facts.items()},
            "findings": [asdict(finding) for finding in self.findings],
        }

    def printed(self, quiet: bool) -> Report:
        """This report, after printing it unless `quiet`."""
        if not quiet:
            print(self)
        return self

    def __str__(self) -> str:
        lines = [self.title]
        for section, facts in self.facts.items():
            if facts:
                width = max(map(len, facts))
                lines += ["", section, *(f"  {name:<{width}}  {_shown(name, value)}" for name, value in facts.items())]
        for topic in dict.fromkeys(finding.topic for finding in self.findings):
            lines += ["", topic]
            for finding in self.findings:
                if finding.topic == topic:
                    lines += _paragraph(f"{finding.level}: {finding.measured}", "  ")
                    saves = "" if finding.saves_bytes is None else f" (saves {size(finding.saves_bytes)})"
                    lines += _paragraph(f"-> {finding.way_out}{saves}", "     ")
        return "\n".join(lines if self.findings else [*lines, "", "nothing to change"])


def _shown(name: str, value: Any) -> str:
    if name.endswith("bytes") and isinstance(value, int):
        return size(value)
    if isinstance(value, (list, tuple)):
        return "\n" + indent("\n".join(map(str, value)), "    ")
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _paragraph(text: str, margin: str) -> list[str]:
    return wrap(text, 116, initial_indent=margin, subsequent_indent=margin + "  ", break_long_words=False)
