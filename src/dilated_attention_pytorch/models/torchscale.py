"""torchscale's LongNet: replace its attention in a model such as Prov-GigaPath, or load its weights into ours.

The position table of Prov-GigaPath's slide encoder is computed from its two axes instead of stored in 3 GB.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dilated_attention_pytorch.core import plans
from dilated_attention_pytorch.core.checks import checked
from dilated_attention_pytorch.core.spans import document_spans
from dilated_attention_pytorch.models.encoder import LongNetEncoder
from dilated_attention_pytorch.models.longnet import LongNet, LongNetLM
from dilated_attention_pytorch.models.padded_attention import PaddedAttention
from dilated_attention_pytorch.models.weights import misfits
from dilated_attention_pytorch.nn.attention import DilatedAttention
from dilated_attention_pytorch.nn.positions import DocumentSpans, SlidePositions
from dilated_attention_pytorch.nn.replacement import replace_parts

Module = TypeVar("Module", bound=nn.Module)
Exact = bool | Literal["forward"]

# What identifies torchscale's DilatedAttention in any copy of its code.
_METHODS = ("dense_to_sparse", "sparse_to_dense", "gathering", "scattering")
_PARTS = ("q_proj", "k_proj", "v_proj", "out_proj", "num_heads", "embed_dim", "args")


@checked()
def patch_gigapath(model: Module, exact_torchscale: Exact = False, *, backend: str = "auto") -> Module:
    """Swap every torchscale `DilatedAttention` within `model` for this package's, in place, and return the model.

    It is for Prov-GigaPath's slide encoder and any other model with that attention. Parameters are shared and keep
    their names, so state dicts and optimizers still fit. Prov-GigaPath's stored position table is replaced by a
    computed one. Neither torchscale nor flash-attn is imported. A model that was patched before gets the semantics of
    this call.

    Args:
        exact_torchscale: False computes dilated attention as defined here. True gives torchscale's own outputs and
            gradients, with padding in the softmax (see `PaddedAttention`); "forward" gives its outputs with their true
            gradients, in one call for all branches.
        backend: `auto`, or the engine to run.
    """

    def fits(part: nn.Module) -> bool:
        return is_torchscale_attention(part) or isinstance(part, TorchscaleAttention)

    if fits(model):
        raise ValueError("an attention has no parent to be swapped in: pass the model that holds it")
    if not any(map(fits, model.modules())):
        kinds = sorted({type(module).__name__ for module in model.modules() if "ttention" in type(module).__name__})
        raise ValueError(
            f"{type(model).__name__} has no torchscale DilatedAttention to swap (a module with "
            f"{', '.join(_METHODS)}, and segment_length and dilated_ratio in its args); its attentions are "
            f"{', '.join(kinds) or 'none'}"
        )
    replace_parts(model, lambda part: _swap(part, exact_torchscale, backend) if fits(part) else part)
    compute_positions(model)
    for part in model.modules():
        layers = getattr(part, "layers", None)
        if isinstance(layers, nn.ModuleList) and not hasattr(part, "spans") and list(_attentions(layers)):
            part.spans = DocumentSpans()  # which `parallelize` replaces
            part.register_forward_pre_hook(_take_own_rows, with_kwargs=True)
            part.register_forward_hook(_return_all_rows)
    return model


def _attentions(layers: nn.Module) -> Iterator[TorchscaleAttention]:
    return (part for part in layers.modules() if isinstance(part, TorchscaleAttention))


def _take_own_rows(encoder: nn.Module, args: Any, kwargs: Any) -> Any:
    """Where ranks share the rows of a sequence, give the layers those of this rank; on one rank, do nothing."""
    attention: Any = next(_attentions(encoder)).attention
    if getattr(attention, "heads", None) is not None and attention.heads.ranks().size > 1:
        raise ValueError("torchscale's layers hold all heads: use a mesh without the axis 'tensor'")
    spans: Any = encoder.spans
    if type(spans) is DocumentSpans:
        return None
    if getattr(encoder, "embed_positions", None) is not None or any(part.xpos for part in _attentions(encoder)):
        raise ValueError("torchscale's layers count positions from the rank's own rows: use a LongNetLM or LongNet")

    def own(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() < 2:
            return x
        if x.dtype == torch.bool and bool(x.any()):
            raise ValueError("a padded batch of torchscale's cannot be shared by ranks: pass one slide at a time")
        return spans.own(x)

    return tree_map(own, (args, kwargs))


def _return_all_rows(encoder: nn.Module, args: Any, output: Any) -> Any:
    spans: Any = encoder.spans
    if type(spans) is DocumentSpans:
        return None
    return tree_map(lambda x: spans.whole(x) if isinstance(x, Tensor) and x.dim() > 1 else x, output)


def is_torchscale_attention(module: nn.Module) -> bool:
    """Whether a module is torchscale's `DilatedAttention`, from any copy of its code."""
    if not all(hasattr(module, name) for name in (*_METHODS, *_PARTS)):
        return False
    return hasattr(module.args, "segment_length") and hasattr(module.args, "dilated_ratio")


class TorchscaleAttention(nn.Module):
    """The projections and norm of torchscale's `DilatedAttention` around an attention of this package.

    It is called like torchscale's own and returns `(out, None)`. `patch_gigapath` makes it.
    """

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module
    inner_attn_ln: nn.Module | None
    xpos: nn.Module | None

    def __init__(self, replaced: nn.Module, attention: DilatedAttention) -> None:
        super().__init__()
        self.args, self.embed_dim, self.num_heads = replaced.args, int(replaced.embed_dim), int(replaced.num_heads)  # type: ignore[arg-type]
        self.head_dim = self.embed_dim // self.num_heads
        for name, child in replaced.named_children():  # in the same order, by which optimizers know parameters
            if name != "attention":
                self.add_module(name, child)
        for name in {"inner_attn_ln", "xpos"} - self._modules.keys():  # which not every model has
            self.register_module(name, None)
        self.attention = attention
        self.train(replaced.training)

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, `(B, N, H, D)`, with xPos where the model has it."""
        projected = (self.q_proj(query), self.k_proj(key), self.v_proj(value))
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)) for x in projected)
        if self.xpos is not None:
            q, k = self._turned(q, False), self._turned(k, True)
        return q, k, v

    def _turned(self, x: Tensor, downscale: bool) -> Tensor:
        assert self.xpos is not None
        turned = self.xpos(x.transpose(1, 2).flatten(0, 1), offset=0, downscale=downscale)  # (B * H, N, D)
        return turned.unflatten(0, (-1, self.num_heads)).transpose(1, 2)

    def spans(self, key_padding_mask: Tensor | None, batch: int, tokens: int) -> Tensor | None:
        """The spans that the mask states, or None where nothing is padded. torchscale's exact semantics ignore it."""
        mask = key_padding_mask
        if mask is None or isinstance(self.attention, PaddedAttention):
            return None

        def stated() -> Tensor | None:
            spans = document_spans(batch, tokens, key_padding_mask=mask.bool())
            # torchscale's encoder passes a mask to every layer, also one that is False throughout.
            return spans if torch.compiler.is_compiling() or bool(mask.any()) else None

        return plans.remember_of("lengths", mask, (batch, tokens), stated)  # once for all layers

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        incremental_state: Any = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        rel_pos: Tensor | None = None,
        is_first_step: bool = False,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """`(out, None)` with `out` `(B, N, E)`."""
        if incremental_state is not None or is_first_step:
            raise ValueError(
                "torchscale's cached decoding differs from its forward past a segment, and is not offered: read the "
                "weights into a LongNetLM with load_torchscale_weights, and use its generate()"
            )
        if rel_pos is not None:
            raise ValueError("relative position biases take O(N^2) memory: set rel_pos_buckets=0 and max_rel_pos=0")
        if not query.shape == key.shape == value.shape:
            raise ValueError(
                f"query, key and value must be of one shape, got {tuple(query.shape)}, {tuple(key.shape)} and "
                f"{tuple(value.shape)}: dilated attention relates the rows of one sequence"
            )
        if getattr(self.args, "seq_parallel", False) and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "this attention sees the tokens of its own rank only, and seq_parallel asks for those of others: "
                "set it to False, and use parallelize(model, mesh), which takes whole sequences"
            )
        q, k, v = self.project(query, key, value)
        spans = self.spans(key_padding_mask, *query.shape[:2])
        out = self.attention(q, k, v, is_causal=is_causal, attn_mask=attn_mask, spans=spans).flatten(-2)  # (B, N, E)
        if self.inner_attn_ln is not None:
            out = self.inner_attn_ln(out)
        return self.out_proj(out), None

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"


def _swap(replaced: nn.Module, exact: Exact, backend: str) -> TorchscaleAttention:
    their: Any = replaced
    if getattr(their, "encoder_decoder_attention", False):
        raise ValueError("dilated attention relates the rows of one sequence: keep a dense attention for two")
    if their.embed_dim % their.num_heads:
        raise ValueError(f"num_heads must divide embed_dim, got {their.num_heads} and {their.embed_dim}")
    if replaced._forward_hooks or replaced._forward_pre_hooks:
        raise ValueError("this attention has hooks, which would be lost: patch first, then shard, compile or record")
    w, r = (_whole_numbers(name, getattr(their.args, name)) for name in ("segment_length", "dilated_ratio"))
    dropout = their.attention.attention_dropout if isinstance(their, TorchscaleAttention) else float(their.dropout)
    if exact:
        attention: DilatedAttention = PaddedAttention(
            w, r, attention_dropout=dropout, backend=backend, detached_merge=exact is True
        )
    else:
        attention = DilatedAttention(w, r, attention_dropout=dropout, backend=backend, head_layout="blocked")
    return TorchscaleAttention(replaced, attention)


def _whole_numbers(name: str, stated: Any) -> list[int]:
    """A list in torchscale's settings, which may be text."""
    try:
        values = ast.literal_eval(stated) if isinstance(stated, str) else stated
        return [int(value) for value in values]
    except (TypeError, ValueError, SyntaxError):
        raise ValueError(f"{name} must list whole numbers, one per branch, got {stated!r}") from None


# The modules of a layer: torchscale's name and ours.
_IN_A_LAYER = {
    **{name: name for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj")},
    "self_attn.inner_attn_ln": "self_attn.norm",
    "self_attn_layer_norm": "norm1",
    "final_layer_norm": "norm2",
    "ffn.fc1": "feed_forward.linear1",
    "ffn.fc2": "feed_forward.linear2",
    "ffn.ffn_layernorm": "feed_forward.norm",
}


@checked()
def load_torchscale_weights(
    model: LongNet | LongNetLM | LongNetEncoder,
    state_dict: Mapping[str, Tensor],
    *,
    prefix: str = "",
    scaled_embedding: bool = False,
) -> None:
    """Read weights of torchscale's `LongNetEncoder` into a `LongNet`, or of its `LongNetDecoder` into a `LongNetLM`.

    Those of Prov-GigaPath's slide encoder go into a `LongNetEncoder`, whose head and attention pool stay as they are.
    Weights must be of torchscale's default architecture (`subln`). If anything is missing, left over or of another
    shape, an error lists it and nothing is loaded.

    Args:
        model: a `LongNet` with `num_decoder_layers=0, positions="none"`; a `LongNetLM` with `tie_weights=False`, and
            `positions="xpos"` if torchscale's has `xpos_rel_pos`, else "none"; or this package's `LongNetEncoder` with
            `positions="coordinates", cls_rows=1`; all with `head_layout="blocked"`.
        state_dict: torchscale's.
        prefix: that of the model's names: for a `LongNet`, "encoder." in a checkpoint of Prov-GigaPath. Other names are
            ignored.
        scaled_embedding: for a decoder with `no_scale_embedding=False`, which multiplies embeddings by the root of
            their size, as `LongNetLM` always does.
    """
    config, is_decoder = model.config, isinstance(model, LongNetLM)
    found = {name.removeprefix(prefix): x for name, x in state_dict.items() if name.startswith(prefix)}
    xpos = any(name.endswith("self_attn.xpos.scale") for name in found)
    is_slide = isinstance(model, LongNetEncoder)
    if is_slide:
        found = {name: x for name, x in found.items() if name.startswith(_OF_SLIDE_ENCODERS)}
    if config.head_layout != "blocked":
        raise ValueError(
            f"torchscale lays heads out in blocks, the model has head_layout={config.head_layout!r}: "
            'build it with head_layout="blocked"'
        )
    wanted = "coordinates" if is_slide else "xpos" if xpos else "none"
    if config.positions != wanted:
        raise ValueError(f"these weights need positions={wanted!r}, got {config.positions!r}: build the model with it")
    if isinstance(model, LongNetEncoder) and model.config.cls_rows != 1:
        raise ValueError(f"a slide encoder has one CLS row, not {model.config.cls_rows}: build it with cls_rows=1")
    if not is_decoder and config.num_decoder_layers:
        raise ValueError("torchscale's LongNetEncoder is an encoder alone: build LongNet with num_decoder_layers=0")
    if is_decoder and config.tie_weights:
        raise ValueError("torchscale's embedding and head differ in scale: build LongNetLM with tie_weights=False")
    later = {"norm": "rms", "activation": "swiglu", "qk_norm": True, "logit_soft_cap": config.logit_soft_cap or 0.0}
    if stated := [f"{name}={value!r}" for name, value in later.items() if getattr(config, name) == value]:
        raise ValueError(f"torchscale's LongNet has no {', '.join(stated)}: build {type(model).__name__} without")
    names = _our_names(model)
    found = {name: x for name, x in found.items() if not name.endswith(("self_attn.xpos.scale", "version"))}
    if "cls_token" in names and "cls_token" in found:
        found["cls_token"] = found["cls_token"].flatten(0, -2)  # (1, 1, E)
    own = model.state_dict()
    problems = misfits(
        {f"{prefix}{name}": tuple(x.shape) for name, x in found.items()},
        {f"{prefix}{name}": tuple(own[ours].shape) for name, ours in names.items()},
    )
    if problems:
        shown = "; ".join(sorted(problems)[:8])
        raise ValueError(f"the weights do not fit {type(model).__name__} ({len(problems)} problems): {shown}")
    loaded = {names[name]: x for name, x in found.items()}
    if is_decoder and not scaled_embedding:
        loaded["embedding.weight"] = loaded["embedding.weight"] / math.sqrt(config.d_model)
    if xpos:
        for name in loaded:
            if ".q_proj." in name or ".k_proj." in name:
                loaded[name] = _pairs_apart(loaded[name], config.head_dim)
    model.load_state_dict(own | loaded if is_slide else loaded)


# How the names in a checkpoint of Prov-GigaPath's slide encoder begin that the model has.
_OF_SLIDE_ENCODERS = ("cls_token", "patch_embed.proj.", "encoder.", "norm.")


def _our_names(model: LongNet | LongNetLM | LongNetEncoder) -> dict[str, str]:
    """Our name of each weight, by torchscale's name."""
    layers, norm = ("encoder", "encoder_norm") if isinstance(model, LongNet) else ("layers", "norm")
    within = "encoder." if isinstance(model, LongNetEncoder) else ""
    modules = {f"{within}layer_norm": norm}
    for i in range(model.config.num_layers):
        modules |= {f"{within}layers.{i}.{theirs}": f"{layers}.{i}.{ours}" for theirs, ours in _IN_A_LAYER.items()}
    weights: dict[str, str] = {}
    if isinstance(model, LongNetLM):
        weights = {"embed_tokens.weight": "embedding.weight", "output_projection.weight": "head.weight"}
    if isinstance(model, LongNetEncoder):
        modules |= {"patch_embed.proj": "input", "norm": "pooled_norm"}
        weights = {"cls_token": "cls"}
    both = [(f"{theirs}.{kind}", f"{ours}.{kind}") for theirs, ours in modules.items() for kind in ("weight", "bias")]
    return weights | dict(both)


def _pairs_apart(x: Tensor, head_dim: int) -> Tensor:
    """Reorder a projection for our rotation: torchscale turns neighbouring dimensions, we turn the halves of a head."""
    return x.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def compute_positions(model: nn.Module) -> None:
    """Replace every stored table of slide positions in `model`; other tables stay.

    State dicts with and without the table still load; a table of other values is refused.
    """
    for module in list(model.modules()):
        grids, table = getattr(module, "slide_ngrids", None), getattr(module, "pos_embed", None)
        if not isinstance(grids, int) or not isinstance(table, Tensor) or table.requires_grad or table.dim() != 3:
            continue
        if table.shape[2] % 4:
            continue
        computed = SlidePositions(table.shape[2], grids, None if table.is_meta else table.device, table.dtype)
        if computed.holds(table):
            del module.pos_embed
            module.pos_embed = computed
            module.register_load_state_dict_pre_hook(_take_stored_table)


def _take_stored_table(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    error_msgs: list[str] = rest[-1]
    table = state_dict.pop(f"{prefix}pos_embed", None)
    computed = module.pos_embed
    if table is not None and isinstance(computed, SlidePositions) and not computed.holds(table):
        error_msgs.append(
            f"{prefix}pos_embed, {tuple(table.shape)}, is not the table of sines and cosines {tuple(computed.shape)} "
            "that this model computes: load the weights first, then patch_gigapath, which keeps other tables"
        )
