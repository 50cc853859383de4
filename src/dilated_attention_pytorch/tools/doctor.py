"""The command `doctor`: what this machine has, what is broken on it, and what to enable."""

from __future__ import annotations

import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dilated_attention_pytorch.core import environment
from dilated_attention_pytorch.core.checks import install_extra
from dilated_attention_pytorch.core.modes import tf32_is_on
from dilated_attention_pytorch.core.plans import get_global_pattern_cache
from dilated_attention_pytorch.core.pool import get_global_memory_pool
from dilated_attention_pytorch.core.resources import CACHE_FROM_TOKENS, POOL_FROM_TOKENS
from dilated_attention_pytorch.functional import backends, dilated_attention
from dilated_attention_pytorch.measuring import DISTRIBUTION, host_memory, machine, processor_flags, size, usable_cores
from dilated_attention_pytorch.tools.diagnose import SLOW, debug_settings, slow_processor, unused_kernels
from dilated_attention_pytorch.tools.report import LEVELS, Finding, Report, broken, option, pitfall, under

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# The kernels' error budget in float32 against float64, with room for TF32 where it is on.
_TOLERANCE = 2e-3
_ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "DILATED_ATTENTION_FLOAT32",
    "DILATED_ATTENTION_KERNELS",
    "DILATED_ATTENTION_TILES",
    "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "PATTERN_CACHE_MAX_SIZE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TRITON_INTERPRET",
)
_AMX = "amx_tile"
_BF16_PRODUCT = "import torch; x = torch.ones(256, 256, dtype=torch.bfloat16); (x @ x).sum().item()"
_SMALL_SHM = 1 << 30


def doctor() -> Report:
    """Report hardware, versions, backends and environment, and what is broken, risky or worth enabling."""
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
        "environment": {name: value for name in _ENVIRONMENT if (value := environment.value(name)) is not None},
    }
    if device == "cuda":
        gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        facts["gpus"] = {
            str(index): f"{gpu.name}, {size(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}"
            for index, gpu in enumerate(gpus)
        }
    findings = [
        *under("Installation", _installation()),
        *under("Processor", _processor(device)),
        *under("GPU", _gpus() if device == "cuda" else _no_gpu()),
        *under("Kernels", _kernels(device), _wrong_environment()),
        *under(SLOW, slow_processor(), debug_settings()),
    ]
    return Report("dilated-attention doctor", facts, sorted(findings, key=lambda one: LEVELS.index(one.level)))


def _installation() -> Iterator[Finding]:
    checkout = _checkout()
    for extra, missing in missing_extras().items():
        command = install_extra(extra) + (f", here {checkout}" if checkout is not None else "")
        yield option(f"the extra {extra} lacks {', '.join(missing)}", command)
    if torch.__version__ < "2.6":
        yield broken(f"this is PyTorch {torch.__version__}, below 2.6", "pip install -U torch")
    shared = Path("/dev/shm")
    if shared.exists() and (room := shutil.disk_usage(shared).total) < _SMALL_SHM:
        yield pitfall(
            f"/dev/shm has {size(room)}; loader processes and the ranks of one machine pass tensors through it",
            "start the container with --shm-size=8g, or --ipc=host",
        )


def missing_extras() -> dict[str, list[str]]:
    """The extras that cannot be used here, each with the requirements that are missing or too old."""
    if find_spec("packaging") is None:
        return {"tools": ["packaging"]}
    missing: dict[str, list[str]] = {}
    for extra, requirement in _requirements():
        try:
            if requirement.specifier.contains(version(requirement.name), prereleases=True):
                continue
        except PackageNotFoundError:
            pass
        missing.setdefault(extra, []).append(f"{requirement.name}{requirement.specifier}")
    return missing


def _requirements() -> Iterator[tuple[str, Requirement]]:
    """(extra, requirement) of the project for this Python and system, without the extra `test`."""
    from packaging.requirements import Requirement

    checkout = _checkout()
    if checkout is not None and sys.version_info >= (3, 11):
        import tomllib

        extras = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        stated = [(extra, Requirement(line)) for extra, lines in extras.items() for line in lines]
    else:
        try:
            lines = [Requirement(line) for line in requires(DISTRIBUTION) or []]
        except PackageNotFoundError:
            return
        named = [(re.search(r'extra == "([\w-]+)"', str(line.marker)), line) for line in lines]
        stated = [(extra[1], line) for extra, line in named if extra is not None]
    for extra, requirement in stated:
        is_for_here = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if extra != "test" and requirement.name != DISTRIBUTION and is_for_here:
            yield extra, requirement


def _checkout() -> Path | None:
    """The folder of the repository, if the package runs from one."""
    folder = Path(__file__).parents[3]
    return folder if (folder / "pyproject.toml").exists() and (folder / "src").exists() else None


def _processor(device: str) -> Iterator[Finding]:
    flags, limit, failure = processor_flags(), environment.value("ONEDNN_MAX_CPU_ISA"), None
    if _AMX in flags and limit and not re.search("AMX|^ALL$", limit, re.IGNORECASE):
        yield option(
            f"the processor has AMX, and ONEDNN_MAX_CPU_ISA={limit} leaves it out",
            "unset it if bfloat16 products run without: doctor tries one where it is not set",
        )
    elif _AMX in flags and (failure := bfloat16_product_fails()) is not None:
        yield broken(
            f"the processor advertises AMX, and a bfloat16 product on it {failure}",
            "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 before Python starts, as ./run does",
        )
    if device == "cpu" and failure is None and flags & {_AMX, "avx512_bf16"}:
        yield option("the processor multiplies bfloat16 matrices itself", 'torch.autocast("cpu", dtype=torch.bfloat16)')


def bfloat16_product_fails() -> str | None:
    """How a bfloat16 product on the CPU fails, or None; tried in its own process, which the processor may kill."""
    done = subprocess.run([sys.executable, "-c", _BF16_PRODUCT], capture_output=True, text=True)
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"ends its process with {signal.Signals(-done.returncode).name}"
    return f"fails: {_last_line(done.stderr)}"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def _no_gpu() -> Iterator[Finding]:
    if not _has_nvidia_driver():
        return
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs only"
    hidden = environment.value("CUDA_VISIBLE_DEVICES")
    yield (broken if hidden is None else pitfall)(
        f"there is an NVIDIA driver, but PyTorch {torch.__version__}, {build}, finds no GPU"
        + ("" if hidden is None else f" (CUDA_VISIBLE_DEVICES={hidden!r})"),
        "install the build of PyTorch for the driver's CUDA version, or a newer driver",
    )


def _has_nvidia_driver() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()


def _gpus() -> Iterator[Finding]:
    count = torch.cuda.device_count()
    for index in range(count):
        yield from _one_gpu(index)
    if count > 1:
        yield option(
            f"there are {count} GPUs",
            f"dilated-attention train --ranks {count}, or torchrun; RingDilatedAttention for a sharded sequence",
        )


def _one_gpu(index: int) -> Iterator[Finding]:
    name, (major, minor) = f"GPU {index}", torch.cuda.get_device_capability(index)
    if torch.version.hip is not None:
        yield option(f"{name} runs on ROCm {torch.version.hip}", "bfloat16 autocast, no gradient scaler")
        return
    built = [int(arch.partition("_")[2].rstrip("af")) for arch in torch.cuda.get_arch_list() if "_" in arch]
    # Machine code runs on GPUs of its own major version whose minor version is not lower.
    if built and not any(one // 10 == major and one % 10 <= minor for one in built):
        yield pitfall(
            f"{name} has compute capability {major}.{minor}, and PyTorch {torch.__version__} brings machine code for "
            f"{sorted(set(built))}",
            "install a build of PyTorch that names this GPU's generation",
        )
    if major < 8:
        yield option(
            f"{name} has compute capability {major}.{minor}: no bfloat16 products and no TF32",
            "float16 autocast with torch.amp.GradScaler; attention runs on the eager backend",
        )
        return
    if not tf32_is_on():
        yield option(
            f"{name} has TF32, and it is off for matrix products (PyTorch's default)",
            "torch.backends.cuda.matmul.allow_tf32 = True, or use_tf32=True on a module, where float32 is not needed",
        )
    yield option(
        f"{name} computes in bfloat16",
        'torch.autocast("cuda", dtype=torch.bfloat16), without a gradient scaler'
        + ("; float8 linear layers in compiled layers, through torchao" if major >= 9 else ""),
    )
    if "H200" not in torch.cuda.get_device_name(index) and environment.tiles_file() is None:
        yield option(
            f"the kernels' tiles were measured on an H200, {name} is {torch.cuda.get_device_name(index)}",
            "dilated-attention bench tune --out tiles.jsonl, then export DILATED_ATTENTION_TILES=tiles.jsonl",
        )


def _kernels(device: str) -> Iterator[Finding]:
    """Compare every available backend with the definition."""
    found = backends(device)
    if device == "cuda":
        yield from unused_kernels()
    for name, state in found.items():
        # On a CPU, Triton is an interpreter for tests, which no call chooses by itself.
        if state == "available" and name != "reference" and (name != "triton" or device == "cuda"):
            yield from _wrong(name, device)
    yield option(
        f"tables of lengths are worth sharing from {CACHE_FROM_TOKENS:,} tokens, workspaces from {POOL_FROM_TOKENS:,}",
        "use_pattern_cache=True and enable_memory_pool=True, or create_dilated_attention, which chooses them",
    )


def _wrong(backend: str, device: str) -> Iterator[Finding]:
    """Whether a small call differs from the definition, forward or backward."""
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(1, 100, 4, 16, generator=generator).to(device) for _ in range(3)]
    results: dict[str, list[torch.Tensor]] = {}
    try:
        for name in (backend, "reference"):
            q, k, v = inputs = [x.clone().requires_grad_() for x in draws]
            out = dilated_attention(q, k, v, [16, 128], [1, 4], is_causal=True, allow_tf32=False, backend=name)
            results[name] = [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]
    except Exception as error:  # any error is what the user has to know
        yield broken(
            f"backend {backend} fails on a small call: {type(error).__name__}: {_last_line(str(error))}",
            'backend="eager" does without it; reinstall triton to match torch',
        )
        return
    distance = max(((a - b).norm() / b.norm()).item() for a, b in zip(results[backend], results["reference"]))
    if not distance < _TOLERANCE:
        yield broken(
            f"backend {backend} is {distance:.1e} away from the definition on a small call",
            'backend="eager" or "reference", and please report it with this output',
        )


def _wrong_environment() -> Iterator[Finding]:
    """Values of environment variables that the library cannot use."""
    tiles = environment.tiles_file()
    if tiles and not Path(tiles).is_file():
        yield broken(f"DILATED_ATTENTION_TILES names {tiles!r}, which is not a file", "unset it, or bench tune")
    try:
        get_global_pattern_cache()
        get_global_memory_pool()
    except ValueError as error:
        yield broken(str(error), "unset it")
