"""The command `doctor`: what this machine has, what does not work on it, and what to switch on."""

from __future__ import annotations

import operator
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import torch

from dilated_attention_pytorch.core.extras import install_extra
from dilated_attention_pytorch.core.memory_pool import get_global_memory_pool
from dilated_attention_pytorch.core.pattern_cache import get_global_pattern_cache
from dilated_attention_pytorch.core.resources import CACHE_FROM_TOKENS, POOL_FROM_TOKENS
from dilated_attention_pytorch.core.tf32 import tf32_is_on
from dilated_attention_pytorch.functional import backends, dilated_attention
from dilated_attention_pytorch.measuring import host_memory, machine, processor_flags, usable_cores
from dilated_attention_pytorch.tools.report import LEVELS, Finding, Report, size
from dilated_attention_pytorch.tools.slowness import slow_settings

PACKAGE = "dilated-attention-pytorch"
INSTALLATION, PROCESSOR, GPU, KERNELS = "Installation", "Processor", "GPU", "Kernels"

# The kernels' budget in float32 against float64, with room for TF32 where it is on.
_TOLERANCE = 2e-3
_ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "DILATED_ATTENTION_KERNELS",
    "DILATED_ATTENTION_TILES",
    "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "PATTERN_CACHE_MAX_SIZE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TRITON_INTERPRET",
)
_AMX = "amx_tile"
_ISA_WITHOUT_AMX = "AVX512_CORE_FP16"
_BF16_PRODUCT = "import torch; x = torch.ones(256, 256, dtype=torch.bfloat16); (x @ x).sum().item()"
_SMALL_SHM = 1 << 30
_COMPARISONS = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def doctor() -> Report:
    """Hardware, versions, backends and environment; what is broken, what to beware of, what to switch on."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    memory = host_memory()
    facts: dict[str, dict[str, Any]] = {
        "machine": machine(device)
        | {
            "threads": torch.get_num_threads(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "usable cores": f"{usable_cores():g}",
            "processor instructions of PyTorch": torch.backends.cpu.get_cpu_capability(),
            "host memory bytes": memory.total,
            "host memory available bytes": memory.available,
        },
        "backends": dict(backends(device)),
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    }
    if device == "cuda":
        facts["gpus"] = {str(index): _gpu_words(index) for index in range(torch.cuda.device_count())}
    findings = [*_installation(), *_processor(device), *_gpu(device), *_kernels(device), *slow_settings()]
    return Report("dilated-attention doctor", facts, sorted(findings, key=lambda one: LEVELS.index(one.level)))


def _gpu_words(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    return f"{found.name}, {size(found.total_memory)}, compute capability {found.major}.{found.minor}"


def _installation() -> Iterator[Finding]:
    for extra, missing in missing_extras().items():
        checkout = _checkout()
        command = install_extra(extra) + (f", here {checkout}" if checkout is not None else "")
        yield Finding(
            "option", INSTALLATION, f"the extra {extra} is not complete: {', '.join(missing)} is missing", command
        )
    if (release := _numbers(torch.__version__)) < (2, 6):
        yield Finding(
            "broken", INSTALLATION, f"this is PyTorch {torch.__version__}, below 2.6: {release}", "pip install -U torch"
        )
    shared = Path("/dev/shm")
    if shared.exists() and (room := shutil.disk_usage(shared).total) < _SMALL_SHM:
        yield Finding(
            "pitfall",
            INSTALLATION,
            f"/dev/shm has {size(room)}, through which loader processes and ranks of one machine pass tensors",
            "start the container with --shm-size=8g, or --ipc=host",
        )


def missing_extras() -> dict[str, list[str]]:
    """The optional parts that cannot be used here, each with the packages that are missing or too old."""
    wanted: dict[str, list[str]] = {}
    for extra, requirement in _requirements():
        name = re.match(r"[\w.-]+", requirement)
        assert name is not None, requirement
        least = re.search(r">=\s*([\d.]+)", requirement)
        try:
            found = version(name[0])
            if least is None or _numbers(found) >= _numbers(least[1]):
                continue
        except PackageNotFoundError:
            pass
        wanted.setdefault(extra, []).append(requirement)
    return wanted


def _requirements() -> Iterator[tuple[str, str]]:
    """(extra, requirement) as the project states them for this Python, the development's own left out."""
    checkout = _checkout()
    if checkout is not None and sys.version_info >= (3, 11):
        import tomllib

        project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
        stated = [(extra, one) for extra, several in project["optional-dependencies"].items() for one in several]
    else:
        try:
            lines = requires(PACKAGE) or []
        except PackageNotFoundError:
            return
        found = [re.fullmatch(r""".+;.*extra\s*==\s*["']([\w-]+)["'].*""", line) for line in lines]
        stated = [(one[1], one[0]) for one in found if one is not None]
    for extra, line in stated:
        requirement, _, marker = line.partition(";")
        if extra != "test" and not requirement.startswith(PACKAGE) and _is_for_here(marker):
            yield extra, requirement.strip()


def _is_for_here(marker: str) -> bool:
    """Whether a requirement with this marker holds for this Python and system.

    It is comparisons joined by `and`, as the project has them: a library for all that markers may say need not be here.
    """
    here: dict[str, Any] = {"python_version": (*sys.version_info[:2], 0), "platform_system": platform.system()}
    for name, comparison, value in re.findall(r"""(\w+)\s*(<=|>=|==|!=|<|>)\s*["']([^"']*)["']""", marker):
        wanted = (*_numbers(value), 0, 0)[:3] if name == "python_version" else value
        if name in here and not _COMPARISONS[comparison](here[name], wanted):
            return False
    return True


def _checkout() -> Path | None:
    """The project's folder, where it runs from one."""
    folder = Path(__file__).parents[3]
    return folder if (folder / "pyproject.toml").exists() and (folder / "src").exists() else None


def _numbers(text: str) -> tuple[int, ...]:
    """
    >>> _numbers("2.13.0+cpu") >= _numbers("2.6")
    True
    """
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


def _processor(device: str) -> Iterator[Finding]:
    flags, stated, died = processor_flags(), os.environ.get("ONEDNN_MAX_CPU_ISA", ""), None
    if _AMX in flags and (not stated or "AMX" in stated.upper() or stated.upper() == "ALL"):
        died = bfloat16_product_fails()
        if died is not None:
            yield Finding(
                "broken",
                PROCESSOR,
                f"the processor advertises AMX, and a bfloat16 product on it {died}",
                f"export ONEDNN_MAX_CPU_ISA={_ISA_WITHOUT_AMX} before Python starts, as ./run does",
            )
    elif _AMX in flags and stated:
        yield Finding(
            "option",
            PROCESSOR,
            f"the processor has AMX, and ONEDNN_MAX_CPU_ISA={stated} leaves it out",
            "unset it if bfloat16 products run without: doctor tries one where it is not set",
        )
    if device == "cpu" and died is None and flags & {_AMX, "avx512_bf16"}:
        yield Finding(
            "option",
            PROCESSOR,
            "the processor multiplies bfloat16 matrices itself",
            'torch.autocast("cpu", dtype=torch.bfloat16)',
        )
    cores, threads = usable_cores(), torch.get_num_threads()
    if threads > cores + 0.5:
        yield Finding(
            "pitfall",
            PROCESSOR,
            f"PyTorch uses {threads} threads on {cores:g} usable cores, and they wait for each other",
            f"export OMP_NUM_THREADS={max(1, int(cores))}",
        )


def bfloat16_product_fails() -> str | None:
    """How a process dies that multiplies bfloat16 matrices on the CPU, or None. It is tried in a process of its own."""
    done = subprocess.run([sys.executable, "-c", _BF16_PRODUCT], capture_output=True, text=True)
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"ends its process with {signal.Signals(-done.returncode).name}"
    return f"fails: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"


def _gpu(device: str) -> Iterator[Finding]:
    if device == "cpu":
        if _has_nvidia_driver():
            build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs only"
            hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
            yield Finding(
                "pitfall" if hidden is not None else "broken",
                GPU,
                f"there is an NVIDIA driver, but PyTorch {torch.__version__}, {build}, finds no GPU"
                + ("" if hidden is None else f" (CUDA_VISIBLE_DEVICES={hidden!r})"),
                "install the build of PyTorch for the driver's CUDA version, or a newer driver",
            )
        return
    for index in range(torch.cuda.device_count()):
        yield from _one_gpu(index)
    if torch.cuda.device_count() > 1:
        yield Finding(
            "option",
            GPU,
            f"there are {torch.cuda.device_count()} GPUs",
            f"dilated-attention train --ranks {torch.cuda.device_count()}, or torchrun; RingDilatedAttention for a "
            "sequence that is sharded",
        )


def _has_nvidia_driver() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()


def _one_gpu(index: int) -> Iterator[Finding]:
    capability = torch.cuda.get_device_capability(index)
    name, kind = f"GPU {index}", f"compute capability {capability[0]}.{capability[1]}"
    if torch.version.hip is not None:
        yield Finding(
            "option", GPU, f"{name} runs on ROCm {torch.version.hip}", "bfloat16 autocast, no gradient scaler"
        )
        return
    built = [int(arch.partition("_")[2].rstrip("af")) for arch in torch.cuda.get_arch_list() if "_" in arch]
    # Machine code runs on its own major version from its minor on.
    if built and not any(one // 10 == capability[0] and one % 10 <= capability[1] for one in built):
        yield Finding(
            "pitfall",
            GPU,
            f"{name} has {kind}, and PyTorch {torch.__version__} brings machine code for {sorted(set(built))}",
            "install a build of PyTorch that names this GPU's generation",
        )
    if capability < (8, 0):
        yield Finding(
            "option",
            GPU,
            f"{name} has {kind}: no bfloat16 products and no TF32",
            "float16 autocast with torch.amp.GradScaler; attention runs on the eager backend",
        )
        return
    if not tf32_is_on():
        yield Finding(
            "option",
            GPU,
            f"{name} has TF32, and it is off for matrix products (PyTorch's default)",
            "torch.backends.cuda.matmul.allow_tf32 = True, or use_tf32=True on a module, where float32 is not needed",
        )
    yield Finding(
        "option",
        GPU,
        f"{name} computes in bfloat16",
        'torch.autocast("cuda", dtype=torch.bfloat16), without a gradient scaler'
        + ("; float8 linear layers in compiled layers, through torchao" if capability >= (9, 0) else ""),
    )
    if "H200" not in torch.cuda.get_device_name(index) and "DILATED_ATTENTION_TILES" not in os.environ:
        yield Finding(
            "option",
            GPU,
            f"the kernels' tiles were measured on an H200, {name} is {torch.cuda.get_device_name(index)}",
            "dilated-attention bench tune --out tiles.jsonl, then export DILATED_ATTENTION_TILES=tiles.jsonl",
        )


def _kernels(device: str) -> Iterator[Finding]:
    """Run every backend that is there against the definition, and read what the environment says about kernels."""
    found = backends(device)
    if device == "cuda" and found["triton"] != "available":
        yield Finding("pitfall", KERNELS, f"the fused kernels are out of reach: {found['triton']}", "see the reason")
    if device == "cuda" and found["triton"] == "available" and torch.cuda.get_device_capability()[0] == 9:
        from dilated_attention_pytorch.kernels.triton.plan import why_no_hopper

        if (reason := why_no_hopper(torch.device("cuda", torch.cuda.current_device()))) is not None:
            yield Finding("pitfall", KERNELS, f"the kernels for Hopper are out of reach: {reason}", "see the reason")
    for name, state in found.items():
        # On a CPU, Triton is an interpreter for tests that no call takes by itself.
        if state == "available" and name != "reference" and (name != "triton" or device == "cuda"):
            yield from _wrong(name, device)
    yield from _wrong_environment()
    yield Finding(
        "option",
        KERNELS,
        f"tables of lengths are worth sharing from {CACHE_FROM_TOKENS:,} tokens, workspaces from {POOL_FROM_TOKENS:,}",
        "use_pattern_cache=True and enable_memory_pool=True, or create_dilated_attention, which chooses them",
    )


def _wrong(backend: str, device: str) -> Iterator[Finding]:
    """Whether a small problem comes out as it is defined, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(1, 100, 4, 16, generator=generator).to(device) for _ in range(3)]
    results: dict[str, list[torch.Tensor]] = {}
    try:
        for name in (backend, "reference"):
            inputs = [x.clone().requires_grad_() for x in draws]
            q, k, v = inputs
            out = dilated_attention(q, k, v, [16, 64], [1, 4], is_causal=True, allow_tf32=False, backend=name)
            results[name] = [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]
    except Exception as error:  # whatever it is, it is what the user has to know
        message = (str(error).strip().splitlines() or ["no message"])[-1]
        yield Finding(
            "broken",
            KERNELS,
            f"backend {backend} fails on a small problem: {type(error).__name__}: {message}",
            'backend="eager" does without it; reinstall triton to match torch',
        )
        return
    pairs = zip(results[backend], results["reference"])
    distance = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
    if not distance < _TOLERANCE:
        yield Finding(
            "broken",
            KERNELS,
            f"backend {backend} is {distance:.1e} away from the definition on a small problem",
            'backend="eager" or "reference", and please report it with this output',
        )


def _wrong_environment() -> Iterator[Finding]:
    """Variables that the library reads, and cannot use."""
    named = os.environ.get("DILATED_ATTENTION_TILES")
    if named and not Path(named).is_file():
        yield Finding(
            "broken", KERNELS, f"DILATED_ATTENTION_TILES names {named!r}, which is no file", "unset it, or bench tune"
        )
    try:
        get_global_pattern_cache()
        get_global_memory_pool()
    except ValueError as error:
        yield Finding("broken", KERNELS, str(error), "unset it")
