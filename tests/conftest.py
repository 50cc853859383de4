"""Set before PyTorch's first operator: some machines advertise AMX and trap it."""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import hypothesis
import pytest
import torch

# Every run draws fresh examples; no deadline, because no test times anything.
hypothesis.settings.register_profile(
    "project", deadline=None, print_blob=True, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile("project")


@pytest.fixture
def poisoned_memory():
    """Fill what `torch.empty` returns with NaN, so that a row nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
