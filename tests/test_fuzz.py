"""Every public callable answers a bad argument with an error of our own: seeded, bounded calls with bad arguments.

A case is a callable and good arguments for it. A call replaces some of the arguments, or adds optional ones, by values
that are mostly wrong: of another type, not finite, negative, huge, of another shape, dtype or device. It may succeed,
or raise a TypeError or ValueError by a `raise` statement of this package. Anything else is a foreign error.

`FUZZ_CALLS` is the number of calls (600, or 6,000 with `./run test --thorough`), and `FUZZ_SEED` chooses them.
"""

from __future__ import annotations

import inspect
import linecache
import os
import random
import traceback
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dilated_attention_pytorch as package
from dilated_attention_pytorch import core as core_room
from dilated_attention_pytorch import functional, models, parallel, train
from dilated_attention_pytorch import nn as nn_room
from dilated_attention_pytorch.core.block_layout import layout_of
from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.checks import shown
from dilated_attention_pytorch.core.pool import is_out_of_memory
from dilated_attention_pytorch.core.resources import Resources
from dilated_attention_pytorch.parallel.group import Place
from dilated_attention_pytorch.parallel.module import AcrossRanks
from dilated_attention_pytorch.parallel.wire import wires_of

from .thorough import examples

CALLS, SEED = int(os.environ.get("FUZZ_CALLS", examples(600))), int(os.environ.get("FUZZ_SEED", "0"))
PACKAGE = str(Path(package.__file__).parent)
ROOMS = {"": package, "functional": functional, "core": core_room, "nn": nn_room, "parallel": parallel,
         "models": models, "train": train}  # fmt: skip

Case = tuple[Callable[..., Any], dict[str, Any]]
PATTERN = {"segment_lengths": [4, 8], "dilation_rates": [1, 2]}
SIZES = {"embed_dim": 16, "num_heads": 4, **PATTERN}
SMALL = {"d_model": 16, "num_heads": 4, "num_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 16, **PATTERN}
BAGS = {"input_dim": 16, "d_model": 16, "num_heads": 4, "num_layers": 1, "dim_feedforward": 16, **PATTERN}
LAYER = {"d_model": 16, "nhead": 4, "dim_feedforward": 16, **PATTERN}
SETTINGS = {"head_layout": "blocked", "backend": "auto", "use_pattern_cache": True, "softmax_scale": 0.5}
FIELDS = {"vocab_size": 50, "positions": "rotary", "dropout": 0.1, "layer_norm_eps": 1e-5, "tie_weights": True}
TILES = core_room.SparsePatternConfig("local_window", sparsity_ratio=0.5, block_size=2)
SPEC = core_room.DilatedSpec.of([4, 8], [1, 2])
SHARDS = parallel.Shards((5, 5))
DOCUMENTS = [(range(1), 0, 10)]
DATA = [{"input_ids": [1, 2, 3, 4]}, {"input_ids": [5, 6, 7]}]
STAGE = {"max_seq_len": 4, "epochs": 1, "batch_size": 2, "learning_rate": 1e-3, **PATTERN}


def heads(tokens: int = 10) -> torch.Tensor:
    return torch.randn(2, tokens, 4, 4)


def qkv() -> dict[str, Any]:
    return {"query": heads(), "key": heads(), "value": heads(), "is_causal": True}


def rows() -> torch.Tensor:
    return torch.randn(2, 10, 16)


def multihead(make: type) -> Case:
    return make(**SIZES), {"query": rows(), "key": rows(), "value": rows(), "is_causal": True}


def language_model() -> models.LongNetLM:
    return models.LongNetLM(**{**SMALL, "num_decoder_layers": 0})


def tokens() -> torch.Tensor:
    return torch.randint(256, (2, 10))


def kv_cache() -> nn_room.DilatedKVCache:
    return nn_room.DilatedKVCache(**PATTERN, batch=2, num_heads=4, head_dim=4, rewindable=4)


def partials() -> dict[str, torch.Tensor]:
    return {"out_a": heads(), "lse_a": heads()[..., 0], "out_b": heads(), "lse_b": heads()[..., 0]}


def shared_wire() -> tuple[Any, Any]:
    ((_, segments, wire),) = list(
        wires_of(Call(spec=core_room.DilatedSpec.of([8], [1])), SHARDS, DOCUMENTS, 2, 2, 4, 4)
    )
    return segments, wire


def layout_arguments() -> dict[str, Any]:
    return {"spec": SPEC, "tokens": 10, "offsets": SPEC.offsets(4), "config": TILES, "is_causal": True,
            "device": torch.device("cpu")}  # fmt: skip


def training(model: nn.Module | None = None) -> dict[str, Any]:
    model = model or language_model()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def ranks_of_place(group: Any = None, mesh: Any = None, axis: Any = "sequence", size: Any = None) -> Any:
    return Place(group, mesh, axis, size).ranks()


def slide() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2))


# Of every public callable: something to call, and arguments that are right.
# Not `inputs`: a model answers wrong ones itself.
def map_of_tokens(rows: Any, layers: Any = None) -> torch.Tensor:
    return models.attention_map(language_model().eval(), tokens()[:1], rows=rows, layers=layers)


def gradient_map_of_tokens(of: Callable[..., Any], layers: Any = None) -> torch.Tensor:
    return models.gradient_map(language_model().eval(), tokens()[:1], of=of, layers=layers)


CASES: dict[str, Callable[[], Case]] = {
    # functional
    "dilated_attention": lambda: (functional.dilated_attention, {**qkv(), **PATTERN}),
    "dilated_attention of tiles": lambda: (functional.dilated_attention, {**qkv(), **PATTERN, "sparse_config": TILES}),
    "attention_rows": lambda: (
        functional.attention_rows,
        {"query": heads(), "key": heads(), "rows": [0, 9], **PATTERN},
    ),
    "autocast_inputs": lambda: (lambda a, b: functional.autocast_inputs(a, b), {"a": heads(), "b": heads()}),
    "backends": lambda: (functional.backends, {"device": "cpu"}),
    "warm_up": lambda: (functional.warm_up, {"shape": (2, 10, 4, 4), **PATTERN, "device": "cpu"}),
    "check_sparse_config": lambda: (functional.check_sparse_config, {"sparse_config": TILES, "spec": SPEC}),
    "checked_call": lambda: (
        functional.checked_call,
        {
            **qkv(),
            **PATTERN,
            "head_layout": "blocked",
            "scale": None,
            "dropout_p": 0.0,
            "head_offset": 0,
            "total_heads": 4,
            "allow_tf32": None,
            "sparse_config": None,
            "backend": "auto",
        },
    ),
    "refuse_dense_mask": lambda: (functional.refuse_dense_mask, {"attn_mask": None}),
    # core
    "Branch": lambda: (core_room.Branch, {"segment_length": 4, "dilation_rate": 2}),
    "DilatedSpec": lambda: (core_room.DilatedSpec, {"branches": SPEC.branches, "head_layout": "grouped"}),
    "DilatedSpec.of": lambda: (core_room.DilatedSpec.of, dict(PATTERN)),
    "DilatedSpec.for_length": lambda: (core_room.DilatedSpec.for_length, {"tokens": 100, "heads": 4}),
    "branches_for": lambda: (package.branches_for, {"tokens": 100, "heads": 4, "shortest": 16}),
    "reach_shares": lambda: (core_room.reach_shares, {"spec": SPEC, "tokens": 32, "heads": 2}),
    "DilatedSpec.offsets": lambda: (SPEC.offsets, {"heads": 4, "first": 0, "total": 8}),
    "SparsePatternConfig": lambda: (core_room.SparsePatternConfig, {"pattern_type": "random", "block_size": 4}),
    "PatternCache": lambda: (core_room.PatternCache, {"max_size": 3}),
    "PatternCache.get": lambda: (core_room.PatternCache().get, {"key": "a"}),
    "PatternCache.put": lambda: (core_room.PatternCache().put, {"key": "a", "pattern": rows()}),
    "PatternCache.pin": lambda: (core_room.PatternCache().pin, {"key": "a"}),
    "DilatedPatternCache": lambda: (core_room.DilatedPatternCache, {"max_size": 3}),
    "DilatedPatternCache.dilated_key": lambda: (core_room.DilatedPatternCache.dilated_key, {"seq_len": 8, **PATTERN}),
    "DilatedPatternCache.sparse_key": lambda: (
        core_room.DilatedPatternCache.sparse_key,
        {"seq_len": 8, "pattern_type": "random", "sparsity_ratio": 0.1, "block_size": 4},
    ),
    "OptimizedPatternCache": lambda: (core_room.OptimizedPatternCache, {"max_gpu_patterns": 2}),
    "OptimizedPatternCache.get_batch": lambda: (core_room.OptimizedPatternCache().get_batch, {"keys": ["a", "b"]}),
    "OptimizedPatternCache.put": lambda: (core_room.OptimizedPatternCache().put, {"key": "a", "pattern": rows()}),
    "SimpleGPUCache": lambda: (core_room.SimpleGPUCache, {"patterns_to_cache": ["dilated_s8_seg[4]_dil[2]"]}),
    "get_global_pattern_cache": lambda: (core_room.get_global_pattern_cache, {}),
    "get_optimized_pattern_cache": lambda: (core_room.get_optimized_pattern_cache, {}),
    "reset_global_pattern_cache": lambda: (core_room.reset_global_pattern_cache, {}),
    "WorkspacePool": lambda: (core_room.WorkspacePool, {"threshold_bytes": 512}),
    "WorkspacePool.checkout": lambda: (
        core_room.WorkspacePool().checkout,
        {"shape": (4, 4), "dtype": torch.float32, "device": "cpu"},
    ),
    "WorkspacePool.give_back": lambda: (core_room.WorkspacePool().give_back, {"buffer": rows()}),
    "WorkspacePool.threshold": lambda: (core_room.WorkspacePool().threshold, {"device": "cpu"}),
    "WorkspacePool.release_idle": lambda: (core_room.WorkspacePool().release_idle, {"device": "cpu"}),
    "get_global_memory_pool": lambda: (core_room.get_global_memory_pool, {"lightweight": False}),
    "reset_global_memory_pool": lambda: (core_room.reset_global_memory_pool, {}),
    "document_spans": lambda: (core_room.document_spans, {"batch": 2, "tokens": 10, "seqlens": torch.tensor([3, 10])}),
    "merge": lambda: (core_room.merge, partials()),
    "covered_rows": lambda: (core_room.covered_rows, {"spec": SPEC, "offsets": SPEC.offsets(2), "n": 9}),
    "dense_mask": lambda: (core_room.dense_mask, {"spec": SPEC, "offsets": SPEC.offsets(2), "n": 9}),
    "uncovered_share": lambda: (core_room.uncovered_share, {"spec": SPEC, "heads": 2, "n": 9}),
    "visible": lambda: (
        core_room.visible,
        {"branch": SPEC.branches[1], "offset": 0, "i": torch.arange(4), "j": torch.arange(4)},
    ),
    "visible_pairs": lambda: (core_room.visible_pairs, {"branch": SPEC.branches[1], "offset": 0, "n": 9}),
    "forward_flops": lambda: (core_room.forward_flops, {"spec": SPEC, "n": 9, "heads": 4, "head_dim": 4}),
    "training_bytes": lambda: (core_room.training_bytes, {"tokens": 9, "heads": 4, "head_dim": 4}),
    "keys_seen": lambda: (
        core_room.keys_seen,
        {"layout": core_room.layout_for(**layout_arguments()), "spec": SPEC, "offsets": SPEC.offsets(4), "n": 10},
    ),
    "layout_for": lambda: (core_room.layout_for, layout_arguments()),
    "layout_of": lambda: (
        layout_of,
        {
            "call": Call(spec=SPEC, sparse=TILES),
            "query": heads(),
            "key": heads(),
            "spans": torch.tensor([[0, 4], [2, 9]]),
        },
    ),
    "reference_forward": lambda: (
        core_room.reference_forward,
        {"query": heads(), "key": heads(), "value": heads(), "call": Call(spec=SPEC)},
    ),
    # nn
    **{
        name: lambda name=name: (getattr(nn_room, name), {**PATTERN, **SETTINGS})
        for name in ("DilatedAttention", "ImprovedDilatedAttention")
    },
    "BlockSparseDilatedAttention": lambda: (nn_room.BlockSparseDilatedAttention, {**PATTERN, "sparse_config": TILES}),
    "DilatedAttention.forward": lambda: (nn_room.DilatedAttention(**PATTERN), qkv()),
    "ImprovedDilatedAttention.forward": lambda: (nn_room.ImprovedDilatedAttention(**PATTERN), qkv()),
    "BlockSparseDilatedAttention.forward": lambda: (
        nn_room.BlockSparseDilatedAttention(**PATTERN, sparse_config=TILES),
        qkv(),
    ),
    "MultiheadDilatedAttention": lambda: (nn_room.MultiheadDilatedAttention, {**SIZES, **SETTINGS}),
    "MultiheadDilatedAttention.forward": lambda: multihead(nn_room.MultiheadDilatedAttention),
    "ImprovedMultiheadDilatedAttention": lambda: (nn_room.ImprovedMultiheadDilatedAttention, dict(SIZES)),
    "ImprovedMultiheadDilatedAttention.forward": lambda: multihead(nn_room.ImprovedMultiheadDilatedAttention),
    "BlockSparseMultiheadDilatedAttention": lambda: (
        nn_room.BlockSparseMultiheadDilatedAttention,
        {**SIZES, "sparse_config": TILES},
    ),
    "DilatedKVCache": lambda: (nn_room.DilatedKVCache, {**PATTERN, "batch": 2, "num_heads": 4, "head_dim": 4}),
    "DilatedKVCache.attend": lambda: (kv_cache().attend, {"query": heads(3), "key": heads(3), "value": heads(3)}),
    "DilatedKVCache.reset": lambda: (kv_cache().reset, {"padding": torch.tensor([0, 1])}),
    "DilatedKVCache.rewind": lambda: (kv_cache().rewind, {"tokens": 0}),
    "DilatedKVCache.reorder": lambda: (kv_cache().reorder, {"rows": torch.tensor([1, 0])}),
    "DilatedKVCache.go_on_from": lambda: (kv_cache().go_on_from, {"tokens": 3}),
    "DilatedTransformerEncoderLayer": lambda: (nn_room.DilatedTransformerEncoderLayer, dict(LAYER)),
    "DilatedTransformerEncoderLayer.forward": lambda: (
        nn_room.DilatedTransformerEncoderLayer(**LAYER),
        {"src": rows()},
    ),
    "DilatedTransformerDecoderLayer": lambda: (nn_room.DilatedTransformerDecoderLayer, dict(LAYER)),
    "DilatedTransformerDecoderLayer.forward": lambda: (
        nn_room.DilatedTransformerDecoderLayer(**LAYER),
        {"tgt": rows(), "memory": rows()},
    ),
    "FeedForward": lambda: (nn_room.FeedForward, {"d_model": 16, "dim_feedforward": 8}),
    "FeedForward.forward": lambda: (nn_room.FeedForward(16, 8), {"x": rows()}),
    "RotaryPositions": lambda: (nn_room.RotaryPositions, {"head_dim": 4}),
    "RotaryPositions.forward": lambda: (nn_room.RotaryPositions(4), {"batch": 2, "tokens": 10}),
    "RotaryPositions.of": lambda: (nn_room.RotaryPositions(4).of, {"positions": torch.arange(4)[None]}),
    "XPosPositions": lambda: (nn_room.XPosPositions, {"head_dim": 4, "period": 8}),
    "XPosPositions.forward": lambda: (nn_room.XPosPositions(4, 8), {"batch": 2, "tokens": 10}),
    "rotate": lambda: (
        nn_room.rotate,
        {"query": heads(), "key": heads(), "rotation": nn_room.RotaryPositions(4)(2, 10)},
    ),
    "create_dilated_attention": lambda: (nn_room.create_dilated_attention, {**PATTERN, **SETTINGS}),
    "create_multihead_dilated_attention": lambda: (nn_room.create_multihead_dilated_attention, dict(SIZES)),
    "replace_attention": lambda: (
        nn_room.replace_attention,
        {"model": nn.ModuleList([nn.MultiheadAttention(16, 4, batch_first=True)]), **PATTERN},
    ),
    # parallel
    **{
        name: lambda name=name: (getattr(parallel, name), {**PATTERN, **SETTINGS})
        for name in (
            "RingDilatedAttention",
            "RingDilatedAttentionV2",
            "RingDilatedAttentionV3",
            "DistributedImprovedDilatedAttention",
        )
    },
    "AcrossRanks": lambda: (AcrossRanks, {**PATTERN, "sequence": None}),
    "AcrossRanks.forward": lambda: (AcrossRanks(**PATTERN, sequence=None), qkv()),
    "RingDilatedAttentionV3.forward": lambda: (parallel.RingDilatedAttentionV3(**PATTERN), qkv()),
    "RingDilatedAttentionV2.get_memory_estimate": lambda: (
        parallel.RingDilatedAttentionV2(**PATTERN).get_memory_estimate,
        {"seq_len": 16},
    ),
    "BlockSparseRingDilatedAttention": lambda: (
        parallel.BlockSparseRingDilatedAttention,
        {**PATTERN, "sparse_config": TILES},
    ),
    "BlockSparseRingMultiheadDilatedAttention": lambda: (
        parallel.BlockSparseRingMultiheadDilatedAttention,
        {**SIZES, "sparse_config": TILES},
    ),
    "RingMultiheadDilatedAttention": lambda: (parallel.RingMultiheadDilatedAttention, dict(SIZES)),
    "DistributedImprovedMultiheadDilatedAttention": lambda: (
        parallel.DistributedImprovedMultiheadDilatedAttention,
        dict(SIZES),
    ),
    "RingAdvancedDistributedDilatedAttention": lambda: (
        parallel.RingAdvancedDistributedDilatedAttention,
        {**SIZES, **SETTINGS, "use_deepspeed": True, "zero_stage": 2, "checkpoint_interval": 10},
    ),
    "RingAdvancedDistributedDilatedAttention.forward": lambda: multihead(
        parallel.RingAdvancedDistributedDilatedAttention
    ),
    "Job": lambda: (parallel.Job, {"spec": SPEC, "tokens": 32, "gpus": 2, "heads": 4, "head_dim": 4}),
    "make_plan": lambda: (parallel.make_plan, {"job": parallel.Job(spec=SPEC, tokens=32, gpus=2, heads=4, head_dim=4)}),
    "Place": lambda: (ranks_of_place, {"axis": "sequence", "size": 1}),
    "RankGroup": lambda: (parallel.RankGroup, {"group": None}),
    "ranks_of": lambda: (parallel.ranks_of, {"axis": "sequence", "size": 1}),
    "RunOptions": lambda: (parallel.RunOptions, {"use_deepspeed": True, "zero_stage": 2}),
    "Zero": lambda: (parallel.Zero, {"stage": 3, "cpu_offload": True}),
    "Shards": lambda: (parallel.Shards, {"lengths": (3, 4)}),
    "Shards.of": lambda: (parallel.Shards.of, {"lengths": (3, 4)}),
    "Shards.cut": lambda: (parallel.Shards.cut, {"tokens": 9, "ranks": 2, "layout": "zigzag"}),
    "shared_segments": lambda: (
        parallel.shared_segments,
        {"branch": SPEC.branches[1], "shards": SHARDS, "documents": DOCUMENTS},
    ),
    "branch_traffic": lambda: (
        parallel.branch_traffic,
        {"scheme": "ring", "segments": shared_wire()[0], "wire": shared_wire()[1], "rank": 0},
    ),
    "choose_scheme": lambda: (
        parallel.choose_scheme,
        {"scheme": "auto", "segments": shared_wire()[0], "wire": shared_wire()[1]},
    ),
    "even_lengths": lambda: (parallel.even_lengths, {"tokens": 10, "ranks": 2}),
    "zigzag_lengths": lambda: (parallel.zigzag_lengths, {"tokens": 10, "ranks": 2}),
    "zigzag_order": lambda: (parallel.zigzag_order, {"tokens": 10, "ranks": 2}),
    "zigzag_places": lambda: (parallel.zigzag_places, {"tokens": 10, "ranks": 2}),
    "sharded_dilated_attention": lambda: (parallel.sharded_dilated_attention, {**qkv(), **PATTERN}),
    "parallelize": lambda: (parallel.parallelize, {"model": language_model(), "mesh": None}),
    "token_mesh": lambda: (parallel.token_mesh, {"mesh": None}),
    # models
    "ModelConfig": lambda: (models.ModelConfig, dict(SMALL)),
    "LongNet": lambda: (models.LongNet, {**SMALL, **FIELDS}),
    "LongNet.forward": lambda: (models.LongNet(**SMALL), {"src": rows(), "tgt": rows()}),
    "EncoderConfig": lambda: (models.EncoderConfig, dict(BAGS)),
    "LongNetEncoder": lambda: (models.LongNetEncoder, {**BAGS, "positions": "rotary", "num_classes": 2}),
    "LongNetEncoder.forward": lambda: (
        models.LongNetEncoder(**BAGS, positions="coordinates", pooling="cls"),
        {"x": rows(), "coordinates": torch.zeros(2, 10, 2)},
    ),
    "LongNetLM": lambda: (models.LongNetLM, {**SMALL, **FIELDS}),
    "LongNetLM.forward": lambda: (language_model(), {"tokens": tokens()}),
    "LongNetLM.generate": lambda: (language_model().generate, {"tokens": tokens(), "max_new_tokens": 2}),
    "LongNetLM.new_cache": lambda: (language_model().new_cache, {"batch": 2}),
    "LongNetLM.gradient_checkpointing_enable": lambda: (
        language_model().gradient_checkpointing_enable,
        {"enable": True},
    ),
    "attention_map": lambda: (map_of_tokens, {"rows": [0, 3]}),
    "gradient_map": lambda: (gradient_map_of_tokens, {"of": torch.sum}),
    "cls_attention": lambda: (models.cls_attention, {"model": slide()}),
    "on_slide": lambda: (
        models.on_slide,
        {"weights": torch.rand(3), "coordinates": torch.tensor([[0, 0], [256, 0], [0, 512]])},
    ),
    "patch_gigapath": lambda: (models.patch_gigapath, {"model": slide()}),
    "load_torchscale_weights": lambda: (
        models.load_torchscale_weights,
        {"model": language_model(), "state_dict": {"a": rows()}},
    ),
    # train
    "Stage": lambda: (
        train.Stage,
        {"sequence_length": 8, "batch_size": 2, "learning_rate": 0.1, "steps": 3, **PATTERN},
    ),
    "Stage.of": lambda: (train.Stage.of, {"stated": STAGE, "sequences": 4}),
    "TrainConfig": lambda: (train.TrainConfig, {"steps": 3, "batch_size": 4}),
    "DynamicBatcher": lambda: (package.DynamicBatcher, {"max_tokens": 64, "max_batch_size": 2}),
    "DynamicBatcher.get_batch_size": lambda: (package.DynamicBatcher().get_batch_size, {"seq_len": 8}),
    "DynamicBatcher.round_to_segment": lambda: (package.DynamicBatcher().round_to_segment, {"length": 8}),
    "DynamicBatcher.create_batches": lambda: (package.DynamicBatcher().create_batches, {"dataset": DATA}),
    "optimize_small_model": lambda: (
        package.optimize_small_model,
        {"model": language_model(), "hardware": "cpu", "precision": "bf16", "loss_chunk": 4},
    ),
    "optimize_medium_model": lambda: (package.optimize_medium_model, {"model": language_model(), "hardware": "cpu"}),
    "optimize_large_model": lambda: (
        package.optimize_large_model,
        {"model": language_model(), "use_deepspeed": False, "hardware": "cpu"},
    ),
    "enable_fp8_training": lambda: (package.enable_fp8_training, {"model": language_model()}),
    "enable_structured_sparsity": lambda: (package.enable_structured_sparsity, {"model": language_model()}),
    "gradient_accumulation_training": lambda: (
        package.gradient_accumulation_training,
        {**training(), "dataloader": [{"input_ids": tokens()}], "target_batch_size": 2, "actual_batch_size": 1},
    ),
    "hierarchical_training_schedule": lambda: (package.hierarchical_training_schedule, {}),
    "train_stage": lambda: (package.train_stage, {**training(), "dataset": DATA, "stage_config": STAGE}),
    "train_hierarchically": lambda: (
        package.train_hierarchically,
        {**training(), "datasets": [DATA], "schedule": [STAGE]},
    ),
    "update_attention_config": lambda: (package.update_attention_config, {"model": language_model(), **PATTERN}),
    # tools
    "benchmark_implementations": lambda: (
        package.benchmark_implementations,
        {
            "implementations": {"a": nn_room.DilatedAttention(**PATTERN)},
            "test_configs": [{"seq_len": 8, "batch_size": 1, "embed_dim": 8}],
            "num_runs": 1,
        },
    ),
    "diagnose_oom_error": lambda: (package.diagnose_oom_error, {"error": MemoryError(), "quiet": True}),
    "diagnose_performance_issues": lambda: (package.diagnose_performance_issues, {"quiet": True}),
    "monitor_memory_realtime": lambda: (package.monitor_memory_realtime, {"interval": 0.5, "quiet": True}),
    "profile_memory_usage": lambda: (
        package.profile_memory_usage,
        {"model": language_model(), "sample_batch": tokens(), "picture": None},
    ),
}

if find_spec("transformers"):
    from dilated_attention_pytorch.models import hf

    ROOMS["hf"] = hf

    def hf_model() -> Any:
        sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 50}
        return hf.LongNetForCausalLM(hf.LongNetConfig(**sizes, **PATTERN))

    def growing(lengths: Any, segment_lengths: Any, dilation_rates: Any, head_layout: Any = "interleaved") -> Any:
        return list(hf.growing_lengths(lengths, segment_lengths, dilation_rates, head_layout))

    CASES |= {
        "hf.DilatedCache": lambda: (hf.DilatedCache, {"spec": SPEC, "num_layers": 1, "num_heads": 2, "batch": 2}),
        "hf.Stage": lambda: (hf.Stage, {"length": 8, "spec": SPEC}),
        "hf.dilated_cache": lambda: (hf.dilated_cache, {"model": hf_model(), "batch": 2}),
        "hf.growing_lengths": lambda: (growing, {"lengths": [4, 8], **PATTERN}),
        "hf.use_dilated_attention": lambda: (hf.use_dilated_attention, {"model": hf_model(), **PATTERN}),
    }

# Public callables that no case calls, and why.
EXCEPTIONS = {
    "hf.LongNetConfig": "transformers makes it, from a file too",
    "hf.LongNetEncoderConfig": "transformers makes it, from a file too",
    "hf.LongNetForCausalLM": "transformers makes it from a config",
    "hf.LongNetForSequenceClassification": "transformers makes it from a config",
    "hf.LongNetModel": "transformers makes it from a config",
    "hf.fine_tune_at_growing_lengths": "runs transformers' trainer",
    "hf.register": "takes no argument",
    "HeadLayout": "a type",
    "PatternType": "a type",
    "Plan": "what make_plan returns",
    "ReachWarning": "a warning",
    "Rotation": "a named tuple; rotate checks it",
    "RowWeights": "what attention_rows returns",
    "Scheme": "a type",
    "TokenLayout": "a type",
    "Traffic": "a named tuple of two numbers",
    "Wire": "what wires_of makes",
    "memory_cleanup": "takes no argument",
    "train": "a run of minutes; TrainConfig checks what it is given",
}
# Errors of another type that a name documents.
DOCUMENTED: dict[str, tuple[type[Exception], ...]] = {
    "PatternCache.pin": (KeyError,),
    "WorkspacePool.checkout": (RuntimeError,),
    "gradient_accumulation_training": (FloatingPointError,),
    "train_stage": (FloatingPointError,),
    "train_hierarchically": (FloatingPointError,),
}
SLOW = ("diagnose_performance_issues", "diagnose_oom_error", "profile_memory_usage", "benchmark_implementations")


# Values that were once taken without a word, or never ended.
NAN = float("nan")
REFUSED: list[tuple[str, dict[str, Any]]] = [
    *[("dilated_attention", {"is_causal": bad}) for bad in ("no", NAN, 1, 0.0, None, torch.tensor(True))],
    ("dilated_attention", {"segment_lengths": [2**63, 8]}),
    ("dilated_attention", {"dilation_rates": [1, 2**62]}),
    ("dilated_attention", {"total_heads": 2**63, "head_layout": "grouped"}),
    ("dilated_attention", {"resources": (None, None)}),
    ("dilated_attention", {"scale": torch.tensor(0.5)}),
    ("dilated_attention", {"allow_tf32": "no"}),
    ("dilated_attention", {"return_lse": 1}),
    ("dilated_attention", {"head_offset": 1.0, "total_heads": 8}),
    ("DilatedAttention", {"use_pattern_cache": "meta"}),
    ("DilatedAttention", {"enable_memory_pool": 1}),
    ("DilatedAttention.forward", {"is_causal": "x"}),
    ("DilatedSpec.offsets", {"heads": 2**40}),
    ("MultiheadDilatedAttention", {"layer_norm_eps": -1}),
    ("MultiheadDilatedAttention", {"bias": "no"}),
    ("MultiheadDilatedAttention", {"embed_dim": 0}),
    ("DilatedTransformerEncoderLayer", {"dropout": NAN}),
    ("XPosPositions", {"base": NAN}),
    ("XPosPositions", {"gamma": -1}),
    ("RotaryPositions", {"base": 0}),
    ("RotaryPositions", {"head_dim": 0}),
    ("LongNetLM", {"num_layers": NAN}),
    ("LongNetLM", {"num_layers": True}),
    ("LongNetLM", {"layer_norm_eps": -1}),
    ("LongNetLM", {"tie_weights": "no"}),
    ("LongNetLM.forward", {"tokens": torch.full((2, 10), 256)}),
    ("LongNetLM.forward", {"tokens": torch.full((2, 10), -1)}),
    ("LongNetLM.generate", {"max_new_tokens": 2**62}),
    ("LongNetLM.generate", {"temperature": NAN}),
    ("LongNetLM.generate", {"use_cache": "no"}),
    ("TrainConfig", {"memory": "auto"}),
    ("TrainConfig", {"learning_rate": True}),
    ("TrainConfig", {"pack": "no"}),
    ("even_lengths", {"ranks": 2**31}),
    ("zigzag_order", {"tokens": 2**62}),
    ("Shards", {"lengths": (3, 4), "ranks": (0, 2)}),
    ("merge", {"out_b": torch.zeros(2, 10, 4, 5)}),
    ("merge", {"lse_b": torch.zeros(1)}),
    ("document_spans", {"batch": True}),
]


@pytest.mark.parametrize(("name", "bad"), REFUSED, ids=[f"{name}-{[*bad]}" for name, bad in REFUSED])
def test_a_bad_value_is_refused(name, bad) -> None:
    function, good = CASES[name]()
    function(**good)  # which a call of the same kind must not have made acceptable
    function, good = CASES[name]()
    with pytest.raises((TypeError, ValueError)) as caught:
        function(**{**good, **bad})
    assert not foreign(name, caught.value)


def bad_values() -> list[Any]:
    """Values that are wrong in most places; none is large enough to take long where it is right."""
    return [
        None, True, False, 0, 1, -1, 3, 7, 2**62, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.5, 1.5, 1e308, float("nan"),
        float("inf"), -float("inf"), 1j, "", "x", "no", "auto", "meta", b"x", [], [1], [0, -1], [1.5], [None],
        ["x", "y"], (4, 8), [2**63, 4], [1, 2**62], [float("nan")] * 2, {}, {"a": 1}, set(), range(2), object(), int,
        len, torch.float32, torch.int8, torch.device("meta"), nn.Linear(2, 2), torch.tensor(1), torch.tensor(0.5),
        torch.tensor(True), torch.tensor([1, 0]), torch.tensor([0, 9]), torch.tensor([-1, 3]),
        torch.tensor([0.5, float("nan")]), torch.zeros(0), heads(),
        heads(3), rows(), rows().int(), heads().to(torch.complex64), heads().double(), heads().to("meta"),
        torch.zeros(2, 10, dtype=torch.bool), torch.full((2, 10), 10**6), torch.zeros(2, 10, 4, 4).to_sparse(),
        Resources(), TILES, SPEC, Path("x"), ValueError("x"),
    ]  # fmt: skip


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """The names of what can be passed by keyword."""
    target = type(function).forward if isinstance(function, nn.Module) else function
    found = inspect.signature(target).parameters.values()
    return [p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]


def takes_function(function: Callable[..., Any], name: str) -> bool:
    target = type(function).forward if isinstance(function, nn.Module) else function
    parameters = inspect.signature(target).parameters
    annotation = str(parameters[name].annotation) if name in parameters else ""
    return any(kind in annotation for kind in ("Callable", "ComputeLoss", "Module"))


def foreign(name: str, error: Exception) -> bool:
    """Whether an error is neither raised by a statement of this package nor documented."""
    if is_out_of_memory(error):
        return False
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = frame.filename.startswith(PACKAGE)
    raised = linecache.getline(frame.filename, frame.lineno or 0).strip().startswith("raise")
    return not (ours and raised and isinstance(error, (TypeError, ValueError, *DOCUMENTED.get(name, ()))))


def make_call(chooser: random.Random, name: str) -> tuple[dict[str, Any], Exception | None]:
    """One call of a case, with bad arguments in some places; what was bad, and the error."""
    function, good = CASES[name]()
    names = [*dict.fromkeys([*parameters_of(function), *good])]  # also those that **settings take
    changed = chooser.sample(names, min(len(names), chooser.choice((0, 1, 1, 1, 1, 2, 3))))
    bad = {one: chooser.choice(bad_values()) for one in changed}
    # A function or a model where one belongs is right, whatever it does.
    bad = {one: None if callable(value) and takes_function(function, one) else value for one, value in bad.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(**{**good, **bad})
    except Exception as error:
        return bad, error
    return bad, None


def test_every_public_callable_has_a_case_or_a_reason() -> None:
    public = {
        f"hf.{name}" if room_name == "hf" else name
        for room_name, room in ROOMS.items()
        for name in room.__all__
        if callable(getattr(room, name))
    }
    assert public - CASES.keys() - EXCEPTIONS.keys() == set()
    assert {name for name in EXCEPTIONS if not name.startswith("hf.")} - public == set()


def test_bad_arguments_raise_errors_of_our_own(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(SEED)
    chooser = random.Random(SEED)
    usual = [name for name in CASES if name not in SLOW]
    chooser.shuffle(usual)  # and then in turn, so that none is left out
    found: dict[str, str] = {}
    answered = 0
    for turn in range(CALLS):
        name = usual[turn % len(usual)] if turn % 50 else chooser.choice(SLOW)
        bad, error = make_call(chooser, name)
        answered += error is not None
        if error is not None and foreign(name, error):
            trace = traceback.extract_tb(error.__traceback__)
            where = " ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in trace[-4:])
            given = ", ".join(f"{one}={shown(value)}" for one, value in bad.items())
            said = str(error).split("\n")[0][:100]
            found.setdefault(f"{name} {where}", f"{name}({given}): {type(error).__name__}: {said} [{where}]")
    assert not found, "\n".join([f"{len(found)} kinds of foreign errors", *found.values()])
    assert answered > CALLS // 4  # else the values are not bad enough
