"""Weights on disk: safetensors beside a JSON config, each file written atomically and loaded without unpickling."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dilated_attention_pytorch.core.checks import import_optional
from dilated_attention_pytorch.files import CHECKSUMS, DamagedFile, write_whole

CONFIG, WEIGHTS = "config.json", "model.safetensors"
CORPUS = "corpus.json"  # only in the folder of a training run
COMPLETE = "state/.metadata"  # in a checkpoint of a training run; PyTorch writes it when every rank's shards are there
# The dtypes of a model's weights, by safetensors' name.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Model = TypeVar("Model", bound=nn.Module)
Shapes = Mapping[str, tuple[int, ...]]


def weights_to_int8(model: nn.Module) -> None:
    """Round the matrices of a model's `layers` to 8 bits and a scale per row, in place: to generate, not to train.

    torchao converts them back within each product, which is fast where the layers are compiled.
    """
    torchao = import_optional("torchao.quantization", "torchao", "int8")
    torchao.quantize_(model.layers, torchao.Int8WeightOnlyConfig())


def stored_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers; of a weight in 8 bits, what torchao stores."""
    # One walk, not one for parameters and one for buffers: every call of `generate` takes it.
    found = (x for part in model.modules() for x in (*part._parameters.values(), *part._buffers.values()))
    for x in {id(x): x for x in found if x is not None}.values():
        if type(x).__module__.startswith("torchao."):
            yield from (getattr(x, name) for name in x.__tensor_flatten__()[0])  # type: ignore[attr-defined]
        else:
            yield x


def save_weights(model: nn.Module, config: str, folder: Path) -> None:
    """Write the weights of a model. If ranks shard its parameters, all of them call this, and the first one writes."""
    if not is_sharded(model):
        return save_tensors(_without_ties(model), config, folder)
    write_on_first_rank(
        model, lambda whole: save_tensors({name: whole[name] for name in untied_names(model)}, config, folder)
    )


def write_on_first_rank(model: nn.Module, write: Callable[[dict[str, Any]], object]) -> None:
    """Gather the weights that ranks shard, on all of them, and let the first rank write; its error is raised on all."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    whole: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            write(whole)
        except Exception as error:
            outcome = [error]
    dist.broadcast_object_list(outcome)
    if outcome[0] is not None:
        raise outcome[0]


def is_sharded(model: nn.Module) -> bool:
    return any(hasattr(one, "device_mesh") for one in model.parameters())


def save_tensors(tensors: dict[str, Tensor], config: str, folder: Path) -> None:
    """Write weights that were gathered from a model, each shared tensor under its first name only (`untied_names`)."""
    safetensors = _safetensors()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CHECKSUMS).unlink(missing_ok=True)  # those of a checkpoint whose weights are replaced
    write_whole(folder / CONFIG, lambda path: path.write_text(config))
    write_whole(folder / WEIGHTS, lambda path: safetensors.save_file(tensors, path))


def load_model(build: Callable[[], Model], layers: int, folder: Path, device: torch.device | str | None) -> Model:
    """The model of `layers` layers that `build` makes, with the weights in `folder`.

    Weights that do not fit are refused before memory is allocated for the model.
    """
    path = _weights_file(folder)
    with _opened(path) as file:
        count = len(file.keys())
    if layers > count:
        raise ValueError(f"{path} does not fit the model: it has {count:,} tensors, the model {layers:,} layers")
    with torch.device("meta"):
        model = build()
    found = load_tensors(folder, model)
    # Copies, because a tensor of safetensors is the mapped file; names that share a parameter share one object.
    loaded = {name: tensor.to(device, copy=True) for name, tensor in found.items()}
    own = {id(p): nn.Parameter(loaded[name], requires_grad=p.requires_grad) for name, p in model.named_parameters()}
    state = loaded | {name: own[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    if all(name in state for name, _ in model.named_buffers()):
        model.load_state_dict(state, assign=True)
    else:  # a subclass computes buffers that are not saved
        dtype = next(tensor.dtype for tensor in found.values() if tensor.is_floating_point())
        model = build().to(device, dtype)
        model.load_state_dict(state)
    return model


def list_checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a training run that were saved to the end, oldest first."""
    return [folder for folder in sorted((run / "checkpoints").glob("step-*")) if (folder / COMPLETE).is_file()]


def load_newest(folder: Path, load: Callable[[Path], Model]) -> tuple[Path, Model]:
    """Load a folder of weights, or the newest undamaged checkpoint of a run; returns the folder and the model.

    Prints the damaged checkpoints that it skips.
    """
    *older, newest = list_checkpoints(folder) or [folder]
    if newest == folder and (folder / CORPUS).is_file():
        raise FileNotFoundError(f"the run in {folder} has no complete checkpoint yet: wait until it has")
    while True:
        try:
            return newest, load(newest)
        except DamagedFile as damage:
            if not older:
                raise
            print(f"skipped {damage}", file=sys.stderr)
            newest = older.pop()


def load_tensors(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """The weights in `folder`. Names, shapes and dtypes are compared with `model` before anything is read."""
    path = _weights_file(folder)
    expected = _without_ties(model)
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
        found = {name: (tuple(one.get_shape()), str(one.get_dtype())) for name, one in slices.items()}
    shapes = {name: shape for name, (shape, _) in found.items()}
    problems = misfits(shapes, {name: tuple(x.shape) for name, x in expected.items()})
    dtypes = {dtype for name, (_, dtype) in found.items() if name in expected and expected[name].is_floating_point()}
    if len(dtypes) > 1 or not dtypes <= _DTYPES.keys():
        problems.append(f"its tensors are {', '.join(sorted(dtypes))}, not all of one of {', '.join(_DTYPES)}")
    if problems:
        raise ValueError(f"{path} does not fit the model: {'; '.join(sorted(problems)[:8])}")
    try:
        return _safetensors().load_file(path)
    except Exception as error:
        raise _unreadable(path, error) from error


def misfits(found: Shapes, expected: Shapes) -> list[str]:
    """What is wrong with weights of these shapes, in words."""
    missing = [f"missing {name}" for name in expected.keys() - found.keys()]
    unexpected = [f"unexpected {name}" for name in found.keys() - expected.keys()]
    both = [name for name in expected if name in found and found[name] != expected[name]]
    return [*missing, *unexpected, *(f"{name} is {found[name]}, not {expected[name]}" for name in both)]


def _weights_file(folder: Path) -> Path:
    path = folder / WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}: is this the folder of save_pretrained?")
    return path


def _opened(path: Path) -> Any:
    try:
        return _safetensors().safe_open(path, framework="pt")
    except Exception as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> Exception:
    """The error to raise if safetensors cannot read a file: its own if the disk or the memory is at fault."""
    if isinstance(error, (OSError, MemoryError)):
        return error
    return ValueError(f"{path} is broken or truncated ({error}): use another copy of the checkpoint")


def _without_ties(model: nn.Module) -> dict[str, Tensor]:
    tensors = model.state_dict()
    return {name: tensors[name].detach().contiguous() for name in untied_names(model)}


def untied_names(model: nn.Module) -> list[str]:
    """The names in the state dict; a shared parameter has its first name only, as safetensors requires."""
    all_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    again = all_names - {name for name, _ in model.named_parameters()}
    return [name for name in model.state_dict() if name not in again]


def _safetensors() -> Any:
    import safetensors.torch  # loaded when weights are

    return safetensors.torch
