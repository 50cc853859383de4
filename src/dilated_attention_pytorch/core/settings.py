"""Fields of a config dataclass that state their range, and the help text of their command-line flag."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def setting(
    default: Any,
    help: str = "",
    *,
    range: Mapping[str, float] | None = None,
    flag: str = "",
    short: str = "",
    group: str = "",
    may_change: bool = False,
) -> Any:
    """A dataclass field. A field with a help text has a flag of its name, or of the name `flag`.

    `range` is what `check_fields` checks. `short` is a second, shorter name of the flag, and `group` the heading under
    which `--help` lists it. `may_change` says that a resumed run may have another value: it decides how the run is
    carried out, not its result.

    >>> @dataclasses.dataclass
    ... class Sizes:
    ...     d_model: int = setting(768, "width of the model", range={"least": 1})
    >>> Sizes(), [field.metadata["help"] for field in dataclasses.fields(Sizes)]
    (Sizes(d_model=768), ['width of the model'])
    """
    names = {"flag": flag, "short": short, "group": group}
    metadata = {"help": help, "range": range or {}, "may_change": may_change, **names}
    return dataclasses.field(default=default, metadata=metadata)
