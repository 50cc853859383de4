"""What several tests of the benchmark need."""

from __future__ import annotations

import pytest


@pytest.fixture
def write_checkout(tmp_path):
    """Writes files of a package `torchscale`, and says where the checkout is."""

    def write(files):
        for name, text in files.items():
            path = tmp_path / "torchscale" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write
