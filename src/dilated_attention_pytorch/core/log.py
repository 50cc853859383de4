"""The package's logger: silent by default; at DEBUG it reports what calls decide, make, share, send and save."""

from __future__ import annotations

import logging
import sys

import torch

log = logging.getLogger("dilated_attention_pytorch")


class _WhenNobodyListens(logging.NullHandler):
    """Writes to stderr if no handler is configured, so that lowering the level is enough to see the records."""

    def handle(self, record: logging.LogRecord) -> bool:
        if log.handlers == [self] and not logging.getLogger().handlers:
            print(f"{record.name}: {record.getMessage()}", file=sys.stderr)
        return True


log.addHandler(_WhenNobodyListens())


def debugging() -> bool:
    """Whether to prepare records at DEBUG. A compiler that traces a call sees no logging."""
    return not torch.compiler.is_compiling() and log.isEnabledFor(logging.DEBUG)
