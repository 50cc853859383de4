"""Fields of a config dataclass that the command line offers: the help text is beside the field."""

from __future__ import annotations

import dataclasses
from typing import Any


def setting(default: Any, help: str = "", *, flag: str = "", may_change: bool = False) -> Any:
    """A dataclass field. A field with a help text has a flag of its name, or of the name `flag`.

    `may_change` says that a resumed run may have another value: it decides how the run is carried out, not its result.

    >>> @dataclasses.dataclass
    ... class Sizes:
    ...     d_model: int = setting(768, "width of the model")
    >>> Sizes(), [field.metadata["help"] for field in dataclasses.fields(Sizes)]
    (Sizes(d_model=768), ['width of the model'])
    """
    return dataclasses.field(default=default, metadata={"help": help, "flag": flag, "may_change": may_change})
