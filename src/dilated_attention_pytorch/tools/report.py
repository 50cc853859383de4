"""What an inspection found: facts, and findings that say what was measured and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from textwrap import indent, wrap
from typing import Any, Literal, get_args

from dilated_attention_pytorch.measuring import size as size

Level = Literal["broken", "pitfall", "option"]
LEVELS: tuple[str, ...] = get_args(Level)


@dataclass(frozen=True)
class Finding:
    """One thing that was measured, and the way out.

    `broken` fails, `pitfall` costs or will fail some day, `option` is there to gain by. `saves_bytes` is the memory
    that the way out frees, where that can be told beforehand.
    """

    level: Level
    topic: str
    measured: str
    way_out: str
    saves_bytes: int | None = None


@dataclass(frozen=True)
class Report:
    """Facts by section, and findings in the order in which to take them."""

    title: str
    facts: Mapping[str, Mapping[str, Any]]
    findings: Sequence[Finding] = field(default=())

    @property
    def is_broken(self) -> bool:
        return any(finding.level == "broken" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold: byte counts stay numbers."""
        return {
            "title": self.title,
            "broken": self.is_broken,
            "facts": {section: dict(facts) for section, facts in self.facts.items()},
            "findings": [asdict(finding) for finding in self.findings],
        }

    def told(self, quiet: bool) -> Report:
        """The report itself, printed unless `quiet`."""
        if not quiet:
            print(self)
        return self

    def __str__(self) -> str:
        lines = [self.title]
        for section, facts in self.facts.items():
            if facts:
                width = max(map(len, facts))
                lines += ["", section, *(f"  {name:<{width}}  {_shown(name, value)}" for name, value in facts.items())]
        topics = list(dict.fromkeys(finding.topic for finding in self.findings))
        for topic in topics:
            lines += ["", topic]
            for finding in self.findings:
                if finding.topic == topic:
                    lines += _paragraph(f"{finding.level}: {finding.measured}", "  ")
                    saves = "" if finding.saves_bytes is None else f" (saves {size(finding.saves_bytes)})"
                    lines += _paragraph(f"-> {finding.way_out}{saves}", "     ")
        if not self.findings:
            lines += ["", "nothing to change"]
        return "\n".join(lines)


def _shown(name: str, value: Any) -> str:
    if name.endswith("bytes") and isinstance(value, int):
        return size(value)
    if isinstance(value, (list, tuple)):
        return "\n" + indent("\n".join(map(str, value)), "    ")
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _paragraph(text: str, margin: str) -> list[str]:
    return wrap(text, 116, initial_indent=margin, subsequent_indent=margin + "  ", break_long_words=False)
