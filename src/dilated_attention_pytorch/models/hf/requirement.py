"""What this room needs of transformers, said before anything of it is imported, and of a model's class."""

from __future__ import annotations

import functools
from typing import Any

import torch

from dilated_attention_pytorch.core.extras import install_extra

OLDEST = (5, 4)  # earlier ones tell a mask function neither where queries begin nor how many there are


def require_transformers() -> None:
    """Raise unless a transformers that is new enough is installed."""
    try:
        from transformers import __version__
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"models.hf works with transformers: {install_extra('hf')}") from error
    if tuple(map(int, __version__.split(".")[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"models.hf needs transformers >= {oldest}, this is {__version__}: pip install 'transformers>={oldest}'"
        )


def require_interface(model: Any) -> None:
    """Raise unless this model lets `attn_implementation` say what attends."""
    if not getattr(model, "_can_set_attn_implementation", lambda: False)():
        raise ValueError(_without_interface(type(model).__name__))


def require_interface_by_config(config: Any) -> None:
    """The same for the models of a config, where transformers knows them; a class of one's own is not asked."""
    name = _class_without_interface(type(config))
    if name is not None:
        raise ValueError(_without_interface(name))


def _without_interface(name: str) -> str:
    return (
        f"{name} computes attention by itself and not through transformers' AttentionInterface, so "
        "that nothing would be switched: use a model that does, such as Llama, Qwen, Mistral or ModernBERT"
    )


# A constant where a model is traced: tracing would follow it into the sources that it reads.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _class_without_interface(config_class: type) -> str | None:
    return _read_class_without_interface(config_class)


@functools.cache
def _read_class_without_interface(config_class: type) -> str | None:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    try:
        known = MODEL_MAPPING[config_class]
    except (KeyError, ValueError):  # not in the mapping, or there by a name that transformers does not have
        return None
    for model_class in known if isinstance(known, (list, tuple)) else (known,):
        # What stands in for a class whose packages are missing cannot say.
        if not getattr(model_class, "_can_set_attn_implementation", lambda: True)():
            return str(model_class.__name__)
    return None
