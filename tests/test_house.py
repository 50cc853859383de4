"""The rooms and the arrows between them; what importing costs; the names that users type."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dilated_attention_pytorch

PACKAGE = Path(dilated_attention_pytorch.__file__).parent
NAME = "dilated_attention_pytorch"
ARROWS = "files, measuring <- core <- "  # how the line of CONTRIBUTING.md begins that says who may import whom
# The modules of `kernels` that other rooms may import.
SEAM = {"blocks", "decode", "engine", "feed_forward", "loss", "op"}
# Imports of other modules of `kernels`, and files of more than 500 lines. What stands here goes; nothing is added.
INTO_KERNELS = {
    ("cli.py", "triton.tune"),
    ("tools/diagnose.py", "triton.plan"),
}
LONG_FILES: set[str] = set()
MOST_LINES = 500


def floors() -> dict[str, int]:
    """The floor of each room, as CONTRIBUTING.md draws the house."""
    lines = (PACKAGE.parents[1] / "CONTRIBUTING.md").read_text().splitlines()
    (drawn,) = [line for line in lines if line.startswith(ARROWS)]
    rooms = drawn.rstrip(".").split(" <- ")
    return {room: floor for floor, several in enumerate(rooms) for room in several.split(", ")}


def test_files_that_the_guide_names_exist() -> None:
    root = PACKAGE.parents[1]
    named = re.findall(r"`([a-z_]+/[a-z_./*]*|[a-z_]+\.py)`", (root / "CONTRIBUTING.md").read_text())
    assert len(named) > 40
    missing = [path for path in named if not any(any(folder.glob(path)) for folder in (root, PACKAGE))]
    assert not missing


def imports() -> list[tuple[str, str]]:
    """(file, module) for every import of a module of this package by a file in a room."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE).as_posix()
        if file.startswith("_"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{file} imports relatively"
                # A name may be a module of the package that it is imported from.
                names = [
                    f"{node.module}.{alias.name}" if is_module(f"{node.module}.{alias.name}") else str(node.module)
                    for alias in node.names
                ]
            else:
                continue
            assert NAME not in names, f"{file} imports the root, which imports everything"
            found += [(file, name.removeprefix(f"{NAME}.")) for name in names if name.startswith(f"{NAME}.")]
    return found


def is_module(name: str) -> bool:
    path = PACKAGE.parent / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def room_of(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def test_imports_go_one_way() -> None:
    floor, found = floors(), imports()
    assert len(found) > 200
    for file, module in found:
        room, imported = room_of(file), module.split(".")[0]
        assert room == imported or floor[imported] < floor[room], f"{file}: {room} may not import {imported}"


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(path.name) for path in PACKAGE.iterdir() if path.suffix in ("", ".py")}
    assert {room for room in rooms if not room.startswith("_")} == set(floors())


def test_kernels_are_imported_through_their_seam() -> None:
    inner = {
        (file, module.removeprefix("kernels."))
        for file, module in imports()
        if module.startswith("kernels.") and room_of(file) != "kernels"
    }
    assert {one for one in inner if one[1] not in SEAM} == INTO_KERNELS


def test_files_are_short() -> None:
    lines = {path.relative_to(PACKAGE).as_posix(): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert len(lines) > 50
    assert {file for file, count in lines.items() if count > MOST_LINES} == LONG_FILES


def test_one_file_reads_environment_variables() -> None:
    # Others may set a variable for a process that they start or a package that they load.
    reads = re.compile(r"os\.environ(\.get|\[|\b(?!\.))|(?<!un)getenv")
    readers = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if reads.search(path.read_text())}
    assert readers == {"core/environment.py"}


def test_no_line_installs_a_distribution_that_is_another_projects() -> None:
    # What PyPI has under this name is not this package, which is called longnet-dilated-attention there.
    repository = PACKAGE.parents[1]
    texts = [*PACKAGE.rglob("*.py"), *repository.glob("docs/**/*.md"), *repository.glob("*.md"), repository / "run"]
    assert len(texts) > 100
    name = "dilated-attention-pytorch"
    for path in texts:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            installs = f"{name}[" in line or ("pip install" in line and name in line)
            assert not installs, f"{path}:{number} installs {name} by name: use core.checks.install_extra"


def test_importing_loads_no_optional_package_and_changes_no_setting() -> None:
    script = f"""
import sys, torch
state = lambda: (torch.get_default_dtype(), torch.backends.cuda.matmul.allow_tf32, torch.get_num_threads())
before, modules = state(), set(sys.modules)
import {NAME}
assert state() == before
optional = ("triton", "transformers", "matplotlib", "safetensors", "deepspeed", "torch._dynamo")
print(*[name for name in optional if name in sys.modules and name not in modules])
print(*[name for name in ("triton", "transformers", "matplotlib") if name in sys.modules])
"""
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


TILED = "block_sparse_ring_dilated_attention"
TILES = dilated_attention_pytorch.SparsePatternConfig("global_local", sparsity_ratio=0.5, block_size=2)
ATTENTION = {
    "dilated_attention.DilatedAttention": {"softmax_scale": 0.2, "attention_dropout": 0.1, "enable_profiling": True},
    "improved_dilated_attention.ImprovedDilatedAttention": {"dropout": 0.1, "use_tf32": True},
    f"{TILED}.BlockSparseRingDilatedAttention": {"sparse_config": TILES, "dropout": 0.1, "ring_size": 1},
    "ring_dilated_attention.RingDilatedAttention": {"ring_size": 1, "dropout": 0.1, "use_checkpointing": True},
    "ring_dilated_attention_v2.RingDilatedAttentionV2": {"ring_size": 1, "enable_profiling": True},
    "ring_dilated_attention_v3.RingDilatedAttentionV3": {"cache_on_gpu": False},
    "improved_distributed_dilated_attention.DistributedImprovedDilatedAttention": {
        "sequence_parallel": True,
        "model_parallel": True,
    },
}
MULTIHEAD = {
    "multihead_dilated_attention.MultiheadDilatedAttention": {"gamma_init": 2.0, "layer_norm": True},
    "dilated_attention.MultiheadDilatedAttention": {"dropout": 0.1, "layer_norm": False, "bias": False},
    "ring_multihead_dilated_attention.RingMultiheadDilatedAttention": {"ring_size": 1},
    "ring_improved_distributed_dilated_attention.RingAdvancedDistributedDilatedAttention": {
        "model_parallel": True,
        "sequence_parallel": True,
        "data_parallel": True,
        "use_deepspeed": True,
        "zero_stage": 3,
        "cpu_offload": True,
        "nvme_offload": True,
        "enable_fault_tolerance": True,
        "enable_monitoring": True,
        "auto_resume": True,
        "checkpoint_interval": 100,
    },
    "improved_multihead_dilated_attention.ImprovedMultiheadDilatedAttention": {"use_tf32": False},
    f"{TILED}.BlockSparseRingMultiheadDilatedAttention": {"sparse_config": TILES},
    "block_sparse_ring_multihead_dilated_attention.BlockSparseRingMultiheadDilatedAttention": {},
}
MODELS = {"long_net.LongNetLM": {}, "long_net.LongNet": {"num_decoder_layers": 1}}
SHARED = {
    "off": {"enable_memory_pool": False, "lightweight_pool": False, "use_pattern_cache": False},
    "on": {"enable_memory_pool": True, "lightweight_pool": True, "use_pattern_cache": True},
}


def published(path: str):
    module, name = path.split(".")
    found = getattr(importlib.import_module(f"{NAME}.{module}"), name)
    assert found is getattr(dilated_attention_pytorch, name)
    if module != "dilated_attention":  # as an attribute, it is the function
        assert getattr(dilated_attention_pytorch, module) is sys.modules[f"{NAME}.{module}"]
    return found


def build(path: str, shared: str):
    """The module of a documented path with its documented keywords, and a call of it."""
    if path in ATTENTION:
        module = published(path)([4, 8], [1, 2], **ATTENTION[path], **SHARED[shared])
        x = torch.randn(2, 10, 4, 4)
        return module, lambda m: m(x, x, x, is_causal=True)
    if path in MULTIHEAD:
        module = published(path)(
            16, 4, segment_lengths=[4, 8], dilation_rates=[1, 2], **MULTIHEAD[path], **SHARED[shared]
        )
        x = torch.randn(2, 10, 16)
        if "Advanced" in path:  # it returns a Tensor
            return module, lambda m: m(x, x, x, is_causal=True)
        return module, lambda m: m(x, x, x, is_causal=True)[0]
    sizes = {"d_model": 16, "num_heads": 4, "num_layers": 1, "segment_lengths": [4, 8], "dilation_rates": [1, 2]}
    module = published(path)(**sizes, **MODELS[path], **SHARED[shared])
    tokens, x = torch.randint(256, (2, 10)), torch.randn(2, 10, 16)
    return module, (lambda m: m(tokens)) if path.endswith("LM") else (lambda m: m(x, x))


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("path", [*ATTENTION, *MULTIHEAD, *MODELS])
def test_a_published_name_constructs_runs_copies_and_pickles(path, shared) -> None:
    module, call = build(path, shared)
    module.eval()
    expected = call(module)
    for _ in range(2):  # before and after a backward
        assert type(module).__name__ in repr(module)
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            torch.testing.assert_close(call(twin), expected)
            assert twin._pattern_cache is module._pattern_cache  # the global one, or none
            assert twin._memory_pool is module._memory_pool
        if any(p.requires_grad for p in module.parameters()):
            call(module).sum().backward()


@pytest.mark.parametrize("path", [*ATTENTION, *MULTIHEAD, *MODELS])
def test_modules_show_whether_pool_and_cache_are_on(path) -> None:
    module, _ = build(path, "off")
    shown = (module.use_pattern_cache, module.enable_memory_pool, module._pattern_cache, module._memory_pool)
    assert shown == (False, False, None, None)
    module, _ = build(path, "on")
    assert (module.use_pattern_cache, module.enable_memory_pool) == (True, True)
    assert module._pattern_cache is dilated_attention_pytorch.get_global_pattern_cache()
    assert module._memory_pool is dilated_attention_pytorch.get_global_memory_pool(lightweight=True)


def test_one_name_is_the_function_and_a_module_path() -> None:
    import dilated_attention_pytorch.dilated_attention as same
    from dilated_attention_pytorch.dilated_attention import DilatedAttention

    from dilated_attention_pytorch import dilated_attention

    root = dilated_attention_pytorch
    module = importlib.import_module(f"{NAME}.dilated_attention")
    assert dilated_attention is root.dilated_attention is root.functional.dilated_attention
    assert DilatedAttention is root.dilated_attention.DilatedAttention is same.DilatedAttention
    assert DilatedAttention is module.DilatedAttention is root.DilatedAttention
    assert pickle.loads(pickle.dumps(dilated_attention)) is dilated_attention


def test_the_kind_of_a_pool_that_is_off_is_refused() -> None:
    with pytest.raises(ValueError, match="pass enable_memory_pool=True with it"):
        dilated_attention_pytorch.DilatedAttention([4], [1], lightweight_pool=True)


def test_factories_are_found_in_the_core_too() -> None:
    from dilated_attention_pytorch.core import create_dilated_attention, create_multihead_dilated_attention

    assert create_dilated_attention is dilated_attention_pytorch.create_dilated_attention
    assert create_multihead_dilated_attention is dilated_attention_pytorch.create_multihead_dilated_attention


def test_moved_modules_are_found_under_their_earlier_path_too() -> None:
    moved = {"inspect": "tools", "inspect.pictures": "pages.plots", "inspect.show": "tools.show"}
    moved["parallel.costs"] = "parallel.schemes"
    for paths in moved.items():
        earlier, now = (importlib.import_module(f"{NAME}.{path}") for path in paths)
        assert earlier is now


def test_every_root_name_exists() -> None:
    for name in dilated_attention_pytorch.__all__:
        assert getattr(dilated_attention_pytorch, name) is not None


# The only arguments that a module takes by position: what it is made of. A switch or a rate in the wrong place would
# be taken for another one, so all of them are named.
BY_POSITION = {"segment_lengths", "dilation_rates", "embed_dim", "num_heads", "d_model", "nhead", "dim_feedforward"}
BY_POSITION |= {"head_dim", "period", "config"}


def published_modules() -> list[type[torch.nn.Module]]:
    rooms = [dilated_attention_pytorch, dilated_attention_pytorch.nn, dilated_attention_pytorch.parallel]
    found = {getattr(room, name) for room in rooms for name in room.__all__}
    kinds = {kind for kind in found if inspect.isclass(kind) and issubclass(kind, torch.nn.Module)}
    return sorted(kinds, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", published_modules())
def test_a_module_takes_only_its_pattern_and_sizes_by_position(kind) -> None:
    parameters = inspect.signature(kind).parameters.values()
    by_position = {p.name for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)}
    assert by_position <= BY_POSITION


@pytest.mark.parametrize("path", [*ATTENTION, *MULTIHEAD])
def test_a_dropout_in_place_of_a_switch_is_refused(path) -> None:
    sizes = ([4, 8], [1, 2]) if path in ATTENTION else (16, 4, [4, 8], [1, 2])
    with pytest.raises(TypeError, match="positional arguments but"):
        published(path)(*sizes, 0.1)


@pytest.mark.parametrize("switch", ["sequence_parallel", "model_parallel"])
def test_a_switch_across_ranks_is_true_or_false(switch) -> None:
    with pytest.raises(TypeError, match=f"{switch} must be True or False, got 0.1"):
        dilated_attention_pytorch.DistributedImprovedDilatedAttention([8], [1], **{switch: 0.1})
