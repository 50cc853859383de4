"""Replace PyTorch's attention in a model by dilated attention with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from dilated_attention_pytorch.core.checks import checked
from dilated_attention_pytorch.nn.factories import create_multihead_dilated_attention
from dilated_attention_pytorch.nn.multihead import MultiheadDilatedAttention
from dilated_attention_pytorch.nn.transformer import DilatedTransformerDecoderLayer


@checked()
def replace_attention(
    model: nn.Module,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    attention_type: str = "auto",
    keep: Sequence[str] = (),
    **settings: Any,
) -> nn.Module:
    """Replace every `nn.MultiheadAttention` of a model by dilated attention with its weights, and return the model.

    One segment over all tokens with rate 1 gives the outputs of the original. Weights, device, dtype, dropout,
    `batch_first`, `requires_grad` and training mode stay. The model is changed in place, or not at all.

    Cross-attention relates two sequences and must be kept. That of `nn.TransformerDecoderLayer` is recognised; name any
    other in `keep`. The replacement refuses dense masks and requests for attention weights: pass
    `is_causal=True` instead.

    Args:
        model: any module; an `nn.MultiheadAttention` itself is returned replaced.
        segment_lengths, dilation_rates: one entry per branch; or pass `max_length`.
        attention_type: as in `create_multihead_dilated_attention`; `improved` has one fused projection.
        keep: names of modules to keep, also with wildcards, such as `"*.cross_attn"`.
        settings: those of `DilatedAttention`, such as `head_layout`.

    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, batch_first=True), 2)
    >>> encoder = replace_attention(encoder, [16, 64], [1, 4])
    >>> type(encoder.layers[0].self_attn).__name__
    'MultiheadDilatedAttention'
    """
    kept = _cross_attentions(model)
    kept |= {part for name, part in model.named_modules() if any(fnmatchcase(name, pattern) for pattern in keep)}
    names = {part: name for name, part in model.named_modules()}

    def replaced(part: nn.Module) -> nn.Module:
        if not isinstance(part, nn.MultiheadAttention) or part in kept:
            return part
        _check(part, names[part] or "the model")
        made = create_multihead_dilated_attention(
            attention_type,
            part.embed_dim,
            part.num_heads,
            segment_lengths,
            dilation_rates,
            dropout=part.dropout,
            bias=part.in_proj_bias is not None,
            layer_norm=False,
            batch_first=part.batch_first,
            device="meta",  # weights are the original's
            dtype=part.out_proj.weight.dtype,
            **settings,
        )
        return _with_weights(made, part)

    if not any(isinstance(part, nn.MultiheadAttention) and part not in kept for part in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has no nn.MultiheadAttention to replace: rewrite attention of another class "
            "with MultiheadDilatedAttention; models of transformers take attn_implementation='dilated'"
        )
    model = replace_parts(model, replaced)
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoder):  # set when it was made, for the original attention
            part.use_nested_tensor = False
    return model


def replace_parts(model: nn.Module, by: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Replace each part by `by(part)`, wherever it occurs; nothing is changed if `by` raises."""
    replaced = {part: by(part) for part in list(model.modules())}
    for part in replaced:
        for name, child in part._modules.items():
            if child is not None and replaced[child] is not child:
                setattr(part, name, replaced[child])
    return replaced[model]


def _cross_attentions(model: nn.Module) -> set[nn.Module]:
    found: set[nn.Module] = set()
    for part in model.modules():
        if isinstance(part, nn.TransformerDecoderLayer):
            found.add(part.multihead_attn)
        if isinstance(part, DilatedTransformerDecoderLayer):
            found.add(part.cross_attn)
    return found


def _check(part: nn.MultiheadAttention, name: str) -> None:
    wrong = ""
    if type(part) is not nn.MultiheadAttention:
        wrong = f"is of class {type(part).__name__}, whose forward may differ from that of nn.MultiheadAttention"
    elif not part._qkv_same_embed_dim:
        wrong = (
            f"has kdim={part.kdim} and vdim={part.vdim} beside embed_dim={part.embed_dim}: it attends across sequences"
        )
    elif part.bias_k is not None:
        wrong = "has add_bias_kv=True, a learned key that belongs to no position of a sequence"
    elif part.add_zero_attn:
        wrong = "has add_zero_attn=True, a key of zeros that belongs to no position of a sequence"
    elif hasattr(part, "parametrizations") or hasattr(part.out_proj, "parametrizations"):
        wrong = "computes its weights (torch.nn.utils.parametrize): remove_parametrizations makes them plain"
    elif part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
        wrong = "has hooks, which would be lost: remove them, and register them again on what replaces it"
    if wrong:
        raise ValueError(f"{name} {wrong}; to leave it as it is, pass keep=[{name!r}]")


def _with_weights(made: MultiheadDilatedAttention, part: nn.MultiheadAttention) -> MultiheadDilatedAttention:
    made.load_state_dict(part.state_dict(), assign=True)
    for name, parameter in made.named_parameters():
        kind = name.rsplit(".", 1)[-1]
        original = getattr(part.out_proj, kind) if name.startswith("out_proj.") else getattr(part, f"in_proj_{kind}")
        parameter.requires_grad_(original.requires_grad)
    return made.train(part.training)
