"""What must be set before PyTorch's first operator (some machines advertise AMX and trap it) and the first kernel."""

import builtins
import gc
import os
from importlib import import_module
from importlib.util import find_spec

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# Tensors are small: threads would wait for each other longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Inductor asks for it, and it refuses to be imported after Python's own distutils, which some packages still use.
if find_spec("setuptools"):
    import_module("setuptools")

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck

# What cuBLAS asks for where algorithms must be deterministic, as `poisoned_memory` needs.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Without a GPU, kernels run in Triton's interpreter; it must be asked for before a kernel is defined.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # DeepSpeed prints what it finds when a library first imports it, which may be within a doctest.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

# Where Triton does not exist, its kernels cannot be imported for their doctests.
collect_ignore_glob = [] if find_spec("triton") else ["src/*/kernels/triton/*"]

collect_ignore_glob += ["examples/[0-9]*.py"]  # scripts without doctests, which importing would run

if not find_spec("transformers"):
    collect_ignore_glob += ["src/*/models/hf/*", "docs/huggingface.md"]


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="draw ten times as many examples and fuzzed calls")


def pytest_configure(config):
    if config.option.thorough:
        os.environ["THOROUGH_TESTS"] = "1"  # read by tests/thorough.py, in this process and in those that it starts
    # Every run draws fresh examples; no deadline, because no test times anything.
    hypothesis.settings.register_profile(
        "project",
        deadline=None,
        print_blob=True,
        max_examples=300 if config.option.thorough else 30,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    hypothesis.settings.load_profile("project")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish():
    """Leave what was imported out of every later garbage collection and every walk over live objects."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown():
    """Forget the last value that a doctest has shown as `_`, which the first import of a module may trip over."""
    vars(builtins).pop("_", None)


@pytest.fixture
def poisoned_memory():
    """Fill what `torch.empty` returns with NaN, so that a row nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
