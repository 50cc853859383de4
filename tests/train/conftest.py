from __future__ import annotations

from collections.abc import Iterator

import pytest

from dilated_attention_pytorch.train import loop, report


@pytest.fixture(autouse=True, scope="module")
def curves() -> Iterator[None]:
    """No curve is drawn at the end of a run, which would take longer than its steps; see `drawn`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "draw_curve", lambda *_: None)
        yield


@pytest.fixture
def drawn(monkeypatch) -> None:
    """For a test that looks at the curve."""
    monkeypatch.setattr(loop, "draw_curve", report.draw_curve)
