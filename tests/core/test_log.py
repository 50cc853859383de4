"""What the package's logger tells at DEBUG, and that it is silent otherwise."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

from dilated_attention_pytorch import DilatedAttention, PatternCache, WorkspacePool
from dilated_attention_pytorch.kernels import engine

NAME = "dilated_attention_pytorch"
ATTEND = f"""
import logging, torch
from {NAME} import DilatedAttention
"""


def attend(module: DilatedAttention, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    q, k, v = torch.randn(3, 1, 32, 4, 8, dtype=dtype).unbind(0)
    return module(q, k, v, is_causal=True)


@pytest.fixture
def module():
    made = DilatedAttention([8, 16], [1, 2], use_pattern_cache=True, enable_memory_pool=True)
    made._pattern_cache, made._memory_pool = PatternCache(max_size=1), WorkspacePool(threshold_bytes=1)
    engine._log_choice.cache_clear()
    return made


def test_a_call_tells_its_engine_once_and_what_it_made_found_lent_and_evicted(module, caplog) -> None:
    with caplog.at_level(logging.DEBUG, NAME):
        attend(module)
        attend(module)
        attend(module, torch.float32)
        module._pattern_cache.put("another", torch.arange(3))
    told = caplog.messages
    engines = [line for line in told if line.startswith("engine ")]
    assert len(engines) == 2  # one per kind of call
    assert engines[0].startswith("engine eager for torch.bfloat16 on cpu, head_dim 8: no triton, ")
    assert sum(line.startswith("parts: made in ") and "remembered" in line for line in told) == 1
    assert sum(line.startswith("parts: found in the pattern cache") for line in told) == 2
    assert any(line.startswith("lent ") and line.endswith("on cpu, new") for line in told)
    assert any(line.startswith("lent ") and line.endswith("on cpu, reused") for line in told)
    assert any(line.startswith("evicted from the pattern cache: parts, ") for line in told)


def test_an_engine_that_is_named_is_told_as_named(module, caplog) -> None:
    module.backend = "reference"
    with caplog.at_level(logging.DEBUG, NAME):
        attend(module)
    assert any(line.startswith("engine reference") and "the call names it" in line for line in caplog.messages)


def test_it_is_silent_by_default(module, caplog) -> None:
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger(NAME).handlers)
    attend(module)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("setup", "lines_on_stderr"),
    [
        ("", False),
        (f'logging.getLogger("{NAME}").setLevel(logging.DEBUG)', True),
        (f'logging.basicConfig(filename="all.log"); logging.getLogger("{NAME}").setLevel(logging.DEBUG)', False),
    ],
    ids=["untouched", "lowered, as the guide says", "with a handler of one's own"],
)
def test_lowering_the_level_is_enough_to_see_it(setup, lines_on_stderr, tmp_path) -> None:
    script = f"{ATTEND}\n{setup}\nx = torch.randn(1, 32, 4, 8)\nDilatedAttention([8], [1])(x, x, x)\n"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ("engine eager" in done.stderr) is lines_on_stderr
    if "filename" in setup:
        assert "engine eager" in (tmp_path / "all.log").read_text()
