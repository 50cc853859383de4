"""The attention function of `attn_implementation="dilated"`, and its registration with transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from dilated_attention_pytorch.core import plans
from dilated_attention_pytorch.core.spans import document_spans
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.models.hf.cache import layer_of
from dilated_attention_pytorch.models.hf.masks import (
    MaskFacts,
    dilated_mask,
    of_one_document,
    packed_by_positions,
    read_mask,
)
from dilated_attention_pytorch.models.hf.pattern import is_no_window, read_pattern
from dilated_attention_pytorch.nn.kv_cache import attend_full_cache, reordered

NAME = "dilated"

# Keywords by which a model changes the mathematics of its attention, and the way out.
_CANNOT_HONOUR = {
    "output_attentions": "the N x N weights are never made: `functional.attention_rows` gives those of chosen rows",
    "sliding_window": "a segment takes its place: switch windows off in the config, as "
    "use_dilated_attention(..., replace_sliding_window=True) does",
    "softcap": "scores are not capped: keep this model's own attention, or set the cap to None and fine-tune",
    "s_aux": "the softmax has no learned sink: keep this model's own attention",
    "sinks": "the softmax has no learned sink: keep this model's own attention",
    "position_bias": "scores take no bias: use a model with rotary positions",
    "alibi": "scores take no bias: use a model with rotary positions",
    "head_mask": "heads are not masked: prune them instead",
    "cache": "a paged cache (continuous batching) is not supported: generate with a dynamic, static or bounded one",
}


# What `models.attention_map` sets while it runs a model: it sees the tensors of every call, and may replace them.
observe: Callable[[Tensor, Tensor, Tensor, dict[str, Any]], tuple[Tensor, Tensor, Tensor]] | None = None


def register() -> None:
    """Make `attn_implementation="dilated"` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(NAME, dilated_attention_forward)
    AttentionMaskInterface.register(NAME, dilated_mask)


def attends_causally(module: nn.Module) -> bool:
    """Whether attention of transformers is causal if its caller does not say."""
    config = getattr(module, "config", None)
    return bool(getattr(module, "is_causal", True) and getattr(config, "is_causal", True) is not False)


def dilated_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Rows `(B, m, H, D)` of query `(B, H, m, D)` over key and value `(B, Hkv, n, D)`, as transformers lays them out.

    The pattern is `module.config.dilated_attention`; `attention_mask` is one of `dilated_mask`'s.
    """
    config = getattr(module, "config", None)
    _refuse_what_cannot_be_honoured(module, config, query, keywords)
    spec = read_pattern(config)
    if is_causal is None:
        is_causal = attends_causally(module)
    facts = read_mask(attention_mask)
    layer = layer_of(key)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if (layer is not None or facts.begin is not None) and not is_causal:
        raise ValueError("new tokens after earlier ones are causal, this attention is bidirectional: use no cache")
    order = facts.order if facts.begin is None else None
    if order is not None:
        q, k, v = (reordered(x, order) for x in (q, k, v))
    if layer is not None:
        if dropout:
            raise ValueError(
                f"a bounded cache is for inference, without attention dropout (it is {dropout}): call eval()"
            )
        if torch.compiler.is_compiling():
            q = _of_one_document(q, facts, keywords)
        elif facts.begin is None:
            facts = facts._replace(documents=_stated_documents(q.shape[0], q.shape[1], facts, keywords))
        out = layer.attend(q, k, v, facts, spec, scaling)
    elif facts.begin is None:
        settings = {**spec.keywords, "is_causal": is_causal, "scale": scaling, "dropout_p": dropout}
        out = _whole(q, k, v, facts, keywords, settings)
    else:
        assert facts.spans is not None
        start = facts.spans[:, 0]
        out = attend_full_cache(q, k, v, facts.begin, start, spec, order=facts.order, scale=scaling, dropout_p=dropout)
    return (out if order is None else reordered(out, order.argsort(1))), None


def _whole(
    q: Tensor, k: Tensor, v: Tensor, facts: MaskFacts, keywords: dict[str, Any], settings: dict[str, Any]
) -> Tensor:
    """Attention of all tokens so far to themselves."""
    B, N = q.shape[:2]
    spans, documents = facts.spans, facts.documents
    has_room = k.shape[1] != N
    if has_room:
        if not (facts.is_whole or spans is not None) or k.shape[1] < N:
            raise ValueError(
                f"{N} queries and {k.shape[1]} keys came without a mask that says where the queries lie: "
                'cross-attention and models that make masks of their own cannot use attn_implementation="dilated"'
            )
        k, v = k[:, :N], v[:, :N]  # a static cache has room for later tokens
    if has_room and torch.compiler.is_compiling():
        q = _of_one_document(q, facts, keywords)
    else:
        documents = _stated_documents(B, N, facts, keywords)
    if documents is not None:
        spans = documents
        q, k, v = (x.reshape(1, B * N, *x.shape[2:]) for x in (q, k, v))
    if observe is not None:
        q, k, v = observe(
            q, k, v, {name: settings[name] for name in settings if name != "dropout_p"} | {"spans": spans}
        )
    out: Tensor = dilated_attention(q, k, v, **settings, spans=spans)
    return out.reshape(B, N, *out.shape[2:])


def _stated_documents(batch: int, tokens: int, facts: MaskFacts, keywords: dict[str, Any]) -> Tensor | None:
    """Packed documents, stated by `cu_seq_lens_q`, by the mask, or by positions in a forward that fills a cache."""
    lengths, positions = keywords.get("cu_seq_lens_q"), keywords.get("position_ids")
    if lengths is not None:
        if facts.is_by_mask:
            raise ValueError("attention_mask and cu_seq_lens_q both state the documents: pass one of them")
        return plans.remember_of(
            "lengths", lengths, (batch, tokens), lambda: document_spans(batch, tokens, cu_seqlens=lengths)
        )
    if facts.documents is not None or facts.is_by_mask:
        return facts.documents
    if positions is not None and positions.dim() == 2 and positions.shape[1] == tokens > 1:
        return plans.remember_of(
            "lengths", positions, (batch, tokens), lambda: packed_by_positions(positions.expand(batch, tokens))
        )
    return None


def _of_one_document(q: Tensor, facts: MaskFacts, keywords: dict[str, Any]) -> Tensor:
    """The queries of a traced forward that fills a cache; packed documents are refused as it runs."""
    if keywords.get("cu_seq_lens_q") is not None:
        raise ValueError("a compiled model with a cache takes no packed documents: leave cu_seq_lens_q out")
    positions, tokens = keywords.get("position_ids"), q.shape[1]
    states_documents = positions is not None and positions.dim() == 2 and positions.shape[1] == tokens > 1
    return of_one_document(q, positions) if states_documents and not facts.is_by_mask else q


def _is_cross_attention(module: nn.Module) -> bool:
    """Whether a module attends to another sequence, which may be as long as its own: models name or mark it so."""
    if "CrossAttention" in type(module).__name__ or getattr(module, "is_cross_attention", False):
        return True
    return bool(getattr(module, "is_decoder", False)) and not getattr(module, "is_causal", True)


def _refuse_what_cannot_be_honoured(module: nn.Module, config: Any, query: Tensor, keywords: dict[str, Any]) -> None:
    if _is_cross_attention(module):
        raise ValueError(
            f'attn_implementation="dilated" cannot honour cross-attention, as in {type(module).__name__}: queries and '
            "keys must be of one sequence; keep this model's own attention, or use its encoder alone"
        )
    for name, way_out in _CANNOT_HONOUR.items():
        wanted = keywords.get(name)
        if name == "sliding_window" and is_no_window(wanted):
            continue
        if wanted is not None and wanted is not False:
            shown = "" if isinstance(wanted, Tensor) else f"={wanted!r}"
            raise ValueError(f'attn_implementation="dilated" cannot honour {name}{shown}: {way_out}')
    heads = getattr(config, "num_attention_heads", None)
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    if ranks and isinstance(heads, int) and query.shape[1] < heads:
        raise ValueError(
            f"this rank has {query.shape[1]} of {heads} heads, and the pattern depends on a head's number among all: "
            "load the model without tensor parallelism (tp_plan)"
        )
