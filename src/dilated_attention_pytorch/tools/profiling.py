"""Profile the memory of a training step with torch.profiler, and time modules side by side."""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from dilated_attention_pytorch.core.checks import COUNT, check_instance, checked
from dilated_attention_pytorch.core.pool import is_out_of_memory
from dilated_attention_pytorch.measuring import measure, size
from dilated_attention_pytorch.models import LongNetLM
from dilated_attention_pytorch.nn import DilatedAttention

if TYPE_CHECKING:
    from dilated_attention_pytorch.pages.plots import Curves

HOST = "host tensors of this step"


@dataclass(frozen=True)
class MemoryProfile:
    """The result of `profile_memory_usage`: peaks in bytes, of each curve in the picture and of each phase."""

    table: str
    trace: Path
    picture: Path | None
    peaks: Mapping[str, int]
    phases: Mapping[str, int]


_DEFAULT_PICTURE = "memory_timeline.svg"


@checked(row_limit=COUNT)
def profile_memory_usage(
    model: nn.Module,
    sample_batch: Mapping[str, Tensor] | Sequence[Tensor] | Tensor,
    compute_loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    trace: str | Path = "memory_trace.json",
    picture: str | Path | None = _DEFAULT_PICTURE,
    row_limit: int = 20,
    with_stack: bool = False,
) -> MemoryProfile:
    """Profile one training step: print the operators that take the most memory, write a trace and a timeline.

    The step is real: with an optimizer the weights change. Existing gradients are set aside and put back. If nothing
    needs a gradient, only the forward pass runs.

    Args:
        sample_batch: a dict with `input_ids` and optionally `labels`; or the model's inputs, one tensor or several.
        compute_loss: `compute_loss(output, labels)`. By default the loss is the cross-entropy of the output and the
            labels, or without labels the mean of the output.
        optimizer: takes a step after the backward pass.
        trace: the file for chrome://tracing or Perfetto.
        picture: the timeline, `.svg` or `.png`, which needs matplotlib; the default is left out without it.
        row_limit: rows of the table.
        with_stack: record the Python lines of each operator in the trace, which makes it slow and large.
    """
    from dilated_attention_pytorch.pages.plots import check_picture, matplotlib_is_installed, write_timeline

    inputs, labels = _unpack(sample_batch)
    trace, picture = Path(trace), None if picture is None else Path(picture)
    if trace.is_dir():
        raise ValueError(f"trace must be the path of a file, got the folder {str(trace)!r}")
    if picture == Path(_DEFAULT_PICTURE) and not matplotlib_is_installed():
        picture = None
    if picture is not None:
        check_picture(picture)
    with _gradients_set_aside(model), _profiler(with_stack) as profiler:
        with record_function("forward"):
            output = _first(model(*inputs))
            loss = (compute_loss or _default_loss)(output, labels)
        del output
        if loss.requires_grad:
            with record_function("backward"):
                loss.backward()
        if optimizer is not None:
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
        del loss
    on_gpu = any(x.is_cuda for x in (*inputs, *model.parameters()))
    memory = "self_device_memory_usage" if on_gpu else "self_cpu_memory_usage"
    table = profiler.key_averages().table(sort_by=memory, row_limit=row_limit)
    trace.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace))
    curves, spans = _timeline(trace)
    watched = [curve for name, curve in curves.items() if name.endswith("allocated")] or list(curves.values())
    phases = {
        name: max((int(y) for curve in watched for x, y in curve if start <= x <= end), default=0)
        for name, start, end in spans
    }
    peaks = {name: max(int(y) for _, y in curve) for name, curve in curves.items()}
    print(table)
    print("; ".join(f"{name}: at most {size(peak)}" for name, peak in (peaks | phases).items()))
    if picture is not None:
        write_timeline(picture, curves, f"memory of a step of {type(model).__name__}", spans)
    return MemoryProfile(table, trace, picture, peaks, phases)


def _unpack(batch: Mapping[str, Tensor] | Sequence[Tensor] | Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
    if isinstance(batch, Tensor):
        return (batch,), None
    if isinstance(batch, Mapping):
        if "input_ids" not in batch or batch.keys() - {"input_ids", "labels"}:
            raise ValueError(
                f"a sample batch has the keys input_ids and optionally labels, got {sorted(batch)}: pass other inputs "
                "of the model as a tuple"
            )
        return (batch["input_ids"],), batch.get("labels")
    if not batch:
        raise ValueError("a sample batch must be a dict, a tensor or a tuple of tensors, got an empty one")
    return tuple(batch), None


def _first(output: Any) -> Any:
    """The output itself, for modules that return more, as `nn.MultiheadAttention` does."""
    return output[0] if isinstance(output, tuple) else output


def _default_loss(output: Tensor, labels: Tensor | None) -> Tensor:
    if labels is None:
        return output.mean()
    if output.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not fit an output of shape {tuple(output.shape)}, which has a "
            "score for each class in its last dimension: pass compute_loss"
        )
    return F.cross_entropy(output.flatten(0, -2), labels.flatten())


@contextmanager
def _gradients_set_aside(model: nn.Module) -> Iterator[None]:
    held = [(p, p.grad) for p in model.parameters()]
    for p, _ in held:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in held:
            p.grad = gradient


def _profiler(with_stack: bool = False) -> Any:
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    return profile(activities=kinds, record_shapes=True, profile_memory=True, with_stack=with_stack)


def _timeline(trace: Path) -> tuple[Curves, list[tuple[str, float, float]]]:
    """Curves of bytes over seconds, as the profiler recorded them, and the spans of the phases."""
    events = json.loads(trace.read_text())["traceEvents"]
    marks = [event for event in events if event["name"] == "[memory]"]
    phases = [event for event in events if event.get("cat") == "user_annotation"]
    began = min((float(event["ts"]) for event in (*marks, *phases)), default=0.0)
    curves: dict[str, list[tuple[float, float]]] = {}
    for event in sorted(marks, key=lambda event: float(event["ts"])):
        seconds, told = (float(event["ts"]) - began) / 1e6, event["args"]
        if told["Device Type"] == 0:
            curves.setdefault(HOST, []).append((seconds, told["Total Allocated"]))
        else:
            for kind in ("allocated", "reserved"):
                name = f"GPU {told['Device Id']} {kind}"
                curves.setdefault(name, []).append((seconds, told[f"Total {kind.title()}"]))
    spans = []
    for event in phases:
        if event["name"] in ("forward", "backward", "optimizer"):
            start = (float(event["ts"]) - began) / 1e6
            spans.append((event["name"], start, start + float(event["dur"]) / 1e6))
    return curves, sorted(spans, key=lambda span: span[1])


SHAPE_KEYS = ("seq_len", "batch_size", "embed_dim", "num_heads")
HEAD_DIM = 64


@checked(num_runs=COUNT)
def benchmark_implementations(
    implementations: Mapping[str, nn.Module],
    test_configs: Sequence[Mapping[str, int]],
    num_runs: int = 5,
    *,
    backward: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Time modules on shapes: `results[name][f"{seq_len}_{batch_size}"]`.

    Each entry has `avg_time, median, p20, p80` in seconds, `throughput` in tokens per second, and `memory_gb`: on a GPU
    the allocator's peak during a call, elsewhere the peak of the call's own tensors. A shape that does not fit into
    memory has `error` instead.

    Args:
        implementations: modules by name. Attention on `(B, N, H, D)` gets query, key and value; a module whose forward
            needs three inputs gets the same `(B, N, E)` three times; a `LongNetLM` gets tokens; any other module gets
            one `(B, N, E)`.
        test_configs: dicts with `seq_len`, `batch_size`, `embed_dim`, and optionally `num_heads` for `(B, N, H, D)`; by
            default heads have 64 dims.
        num_runs: timed calls, after a warm-up.
        backward: time forward and backward, instead of forward without gradients.
        device, dtype: those of the inputs; by default those of the module's parameters. Without parameters, float16 on
            a GPU if there is one, else float32 on the CPU.

    >>> results = benchmark_implementations(
    ...     {"dilated": DilatedAttention([16, 64], [1, 4])}, [{"seq_len": 64, "batch_size": 2, "embed_dim": 32}]
    ... )
    >>> results["dilated"]["64_2"]["throughput"] > 0
    True
    """
    if not implementations or not test_configs:
        raise ValueError("there is nothing to time: pass at least one module and one config")
    shapes = [_shape(config) for config in test_configs]
    keys = [f"{shape['seq_len']}_{shape['batch_size']}" for shape in shapes]
    if len(set(keys)) < len(keys):
        raise ValueError(
            f"results are named by seq_len and batch_size, and two configs share them: {keys}; time them in two calls"
        )
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for name, model in implementations.items():
        check_instance(f"implementations[{name!r}]", model, nn.Module)
        target = _device_and_dtype(model, device, dtype)
        results[name] = {}
        for key, shape in zip(keys, shapes):
            try:
                results[name][key] = _time(model, shape, *target, num_runs, backward)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                said = str(error) or type(error).__name__
                results[name][key] = {"error": f"out of memory: {said.splitlines()[0]}"}
    return results


def _shape(config: Mapping[str, int]) -> dict[str, int]:
    missing, unknown = set(SHAPE_KEYS[:3]) - config.keys(), config.keys() - set(SHAPE_KEYS)
    if missing or unknown:
        raise ValueError(
            f"a config has the keys {', '.join(SHAPE_KEYS[:3])} and optionally {SHAPE_KEYS[3]}, got {sorted(config)}"
        )
    shape = dict(config)
    if any(type(value) is not int or value < 1 for value in shape.values()):
        raise ValueError(f"sizes must be whole numbers of at least 1, got {shape}")
    heads = shape.setdefault("num_heads", max(1, shape["embed_dim"] // HEAD_DIM))
    if shape["embed_dim"] % heads:
        raise ValueError(f"embed_dim {shape['embed_dim']} does not divide into {heads} heads: state num_heads")
    return shape


def _device_and_dtype(
    model: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None
) -> tuple[torch.device, torch.dtype]:
    parameter = next(model.parameters(), None)
    if parameter is not None:
        device = parameter.device if device is None else torch.device(device)
        if (device.type, device.index or 0) != (parameter.device.type, parameter.device.index or 0):
            raise ValueError(f"{type(model).__name__} is on {parameter.device}, not on {device}: move it there first")
        return device, parameter.dtype if dtype is None else dtype
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return device, dtype or (torch.float16 if device.type == "cuda" else torch.float32)


def _time(
    model: nn.Module, shape: Mapping[str, int], device: torch.device, dtype: torch.dtype, runs: int, backward: bool
) -> dict[str, Any]:
    inputs = _inputs(model, shape, device, dtype, backward)

    def run() -> None:
        with torch.set_grad_enabled(backward):
            output = _first(model(*inputs))
            if backward:
                output.sum().backward()

    with _gradients_set_aside(model), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        timing = measure(run, device.type, calls=runs)
        peak = timing.peak_bytes if timing.peak_bytes is not None else _peak_of_tensors(run)
    return {
        "avg_time": timing.mean / 1e3,
        "median": timing.median / 1e3,
        "p20": timing.p20 / 1e3,
        "p80": timing.p80 / 1e3,
        "throughput": shape["batch_size"] * shape["seq_len"] / (timing.mean / 1e3),
        "memory_gb": peak / 1024**3,
    }


def _inputs(
    model: nn.Module, shape: Mapping[str, int], device: torch.device, dtype: torch.dtype, backward: bool
) -> tuple[Tensor, ...]:
    B, N, E, H = (shape[key] for key in ("batch_size", "seq_len", "embed_dim", "num_heads"))
    if isinstance(model, LongNetLM):
        return (torch.randint(model.config.vocab_size, (B, N), device=device),)
    if isinstance(model, DilatedAttention):
        return tuple(torch.randn(B, N, H, E // H, device=device, dtype=dtype, requires_grad=backward) for _ in range(3))
    x = torch.randn(B, N, E, device=device, dtype=dtype, requires_grad=backward)
    needed = _needed(model)
    if len(needed) not in (0, 1, 3):
        raise ValueError(
            f"{type(model).__name__} needs {needed}: wrap it in a module that takes one tensor (B, N, E), or query, "
            "key and value"
        )
    return (x, x, x) if len(needed) == 3 else (x,)


def _needed(model: nn.Module) -> list[str]:
    """The arguments that `model` needs; none if its forward, and the ones it overrides, take anything."""
    parameter = inspect.Parameter
    own: Iterator[Any] = takewhile(lambda kind: kind is not nn.Module, type(model).__mro__)
    # A forward with *args alone passes them to the one that it overrides.
    for forward in (model.forward, *(super(kind, model).forward for kind in own)):
        found = inspect.signature(forward).parameters.values()
        positional = [one for one in found if one.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)]
        if positional:
            return [one.name for one in positional if one.default is parameter.empty]
    return []


def _peak_of_tensors(run: Callable[[], object]) -> int:
    with _profiler() as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        curves, _ = _timeline(Path(folder) / "trace.json")
    return max((int(y) for _, y in curves.get(HOST, ())), default=0)
