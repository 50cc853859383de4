"""What fits into one GPU, in words and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dilated_attention_pytorch.core.reach import reach_lines
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.train.fitting import Fit
from dilated_attention_pytorch.train.footprint import KINDS, parameter_count

GIB = 1 << 30
_WORDS = {
    "weights": "weights",
    "gradients": "gradients, so far",
    "optimizer": "the optimizer's state",
    "kept": "activations kept for backward",
    "temporary": "what runs at the peak",
}


def fit_json(model: str, config: ModelConfig, fits: Sequence[Fit]) -> dict[str, Any]:
    return {
        "model": model,
        "parameters": parameter_count(config),
        "segment_lengths": config.segment_lengths,
        "dilation_rates": config.dilation_rates,
        "reach": _reach(config, fits[-1].tokens),
        "fits": [
            {
                "tokens": fit.tokens,
                "needed_bytes": fit.needed,
                "peak_bytes": fit.footprint.peak,
                "peak_at": fit.footprint.at,
                "parts": fit.footprint.parts,
                "host_bytes": fit.footprint.host,
                "work": fit.work,
                "options": asdict(fit.options),
            }
            for fit in fits
        ],
    }


def fit_text(
    model: str, config: ModelConfig, gpu_bytes: int, batch: int, fits: Sequence[Fit], asked: bool
) -> list[str]:
    """Lines to read; the last of `fits` is the answer. `asked` says that the tokens were given, not found."""
    answer = fits[-1]
    found = answer.footprint
    size = f"{model}: {parameter_count(config):,} parameters, {config.num_layers} layers of {config.d_model}, "
    size += f"{config.num_heads} heads of {config.head_dim}, vocabulary {config.vocab_size:,}, batch {batch}"
    what = "the cheapest options for" if asked else "the longest sequence:"
    lines = [
        size,
        f"One GPU of {gpu_bytes / GIB:g} GiB, {what} {answer.tokens:,} tokens"
        + ("" if asked else f", with {answer.options.stated()}"),
        *([f"  {answer.options.stated()}"] if asked else []),
    ]
    if not asked:
        lines += [
            "",
            "work is that of a step beside one that computes nothing again; every row reaches farther than those above",
            f"{'tokens':>12} {'work':>6} {'host GiB':>9}  options",
            *(
                f"{fit.tokens:>12,} {fit.work:>6.2f} {fit.footprint.host / GIB:>9.1f}  {fit.options.stated()}"
                for fit in fits
            ),
        ]
    lines += [
        "",
        f"memory at the peak, {found.at}",
        *(f"  {_WORDS[kind]:<36}{found.parts[kind] / GIB:>10.2f} GiB" for kind in KINDS),
        f"  {'peak':<36}{found.peak / GIB:>10.2f} GiB",
        f"  {'with room for the allocator and CUDA':<36}{answer.needed / GIB:>10.2f} GiB",
    ]
    if found.host:
        lines.append(f"  {'pinned host memory':<36}{found.host / GIB:>10.2f} GiB")
    lines += ["", f"reach of a row, segments {list(config.segment_lengths)}, rates {list(config.dilation_rates)}"]
    return [*lines, *(f"  {line}" for line in _reach(config, answer.tokens))]


def _reach(config: ModelConfig, tokens: int) -> list[str]:
    return reach_lines(config.spec, tokens, config.num_kv_heads or config.num_heads, config.num_layers, is_causal=True)
