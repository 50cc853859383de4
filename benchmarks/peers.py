"""What ours is compared with: torchscale's dilated attention from a checkout, and the sizes of a Llama."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.models.config import ModelConfig

_FILE = Path("torchscale/component/dilated_attention.py")


def load_torchscale(checkout: Path) -> Any:
    """The class `DilatedAttention` of a checkout of microsoft/torchscale, which does not stay importable.

    This imports only the modules that define the class, which need einops and numpy. The module that would import
    flash-attn or xformers is replaced by one that calls PyTorch.
    """
    return _load(checkout, "component.dilated_attention")[0].DilatedAttention


def load_torchscale_encoder(checkout: Path) -> tuple[Any, Any]:
    """The classes `LongNetEncoder` and `EncoderConfig` of a checkout, which do not stay importable.

    What they take from fairscale and timm is replaced: PyTorch's checkpoints, and nothing that is unused here.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    fairscale, layers = ModuleType("fairscale.nn"), ModuleType("timm.models.layers")
    fairscale.checkpoint_wrapper, fairscale.wrap = checkpoint_wrapper, None  # type: ignore[attr-defined]
    layers.drop_path = None  # type: ignore[attr-defined]
    model, config = _load(checkout, "model.LongNet", "architecture.config", instead=(fairscale, layers))
    return model.LongNetEncoder, config.EncoderConfig


def _load(checkout: Path, *names: str, instead: Sequence[ModuleType] = ()) -> list[ModuleType]:
    if not (checkout / _FILE).is_file():
        raise FileNotFoundError(
            f"--torchscale must name a checkout of microsoft/torchscale, and {checkout} has no {_FILE}: "
            "git clone https://github.com/microsoft/torchscale"
        )
    kernel = ModuleType("torchscale.component.flash_attention")
    kernel.flash_attn_func = flash_attention_of_pytorch  # type: ignore[attr-defined]
    with importing_from(checkout, "torchscale", *(one.__name__.split(".")[0] for one in instead)):
        for one in (kernel, *instead):
            sys.modules[one.__name__] = one
        try:
            return [importlib.import_module(f"torchscale.{name}") for name in names]
        except ModuleNotFoundError as error:
            name = error.name or ""
            raise ModuleNotFoundError(f"torchscale needs {name}: pip install {name}", name=name) from error


def build_torchscale(
    attention_class: Any,
    heads: int,
    head_dim: int,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    subln: bool = False,
) -> nn.Module:
    """torchscale's attention with its projections, on one rank; `subln` adds a norm before the output projection."""
    settings = SimpleNamespace(
        flash_attention=True,
        segment_length=list(segment_lengths),
        dilated_ratio=list(dilation_rates),
        multiway=False,
        xpos_rel_pos=False,
        seq_parallel=False,
        layernorm_eps=1e-5,
    )
    attention: nn.Module = attention_class(settings, heads * head_dim, heads, self_attention=True, subln=subln)
    return attention


def without_projections(attention: nn.Module) -> nn.Module:
    """The same attention without projections: it only gathers, attends, scatters and merges, `(B, N, H * D)`."""
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        setattr(attention, name, nn.Identity())
    return attention


def flash_attention_of_pytorch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    bias: None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """PyTorch's kernel behind flash-attn's interface: out `(B, N, H, D)` and lse `(B, H, N)`."""
    if bias is not None:
        raise ValueError("PyTorch's flash kernel takes no bias")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, N, D)
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    else:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse = flash(q, k, v, dropout, is_causal, scale=softmax_scale)[:2]
    return out.transpose(1, 2), lse


def llama_like(config: ModelConfig, tokens: int, **settings: Any) -> Any:
    """The `LlamaConfig` of the same vocabulary, width, depth and heads, with PyTorch's attention."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=8 * config.d_model // 3 // 16 * 16,  # SwiGLU's three matrices in place of two
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads or config.num_heads,
        max_position_embeddings=tokens,
        tie_word_embeddings=config.tie_weights,
        attn_implementation="sdpa",
        **settings,
    )


@contextmanager
def importing_from(checkout: Path, *packages: str) -> Iterator[None]:
    """Import `packages` from the checkout, even if releases of them are installed or loaded."""
    before = _take_modules(packages)
    path = list(sys.path)
    sys.path.insert(0, str(checkout))
    try:
        yield
    finally:
        sys.path[:] = path
        _take_modules(packages)
        sys.modules.update(before)


def _take_modules(packages: tuple[str, ...]) -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.split(".")[0] in packages]
    return {name: sys.modules.pop(name) for name in names}
