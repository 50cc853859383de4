"""LongNet's dilated attention for sequences of millions of tokens: the function, modules and models."""

import importlib
import sys
import warnings
from importlib import metadata
from typing import TYPE_CHECKING, Any

from dilated_attention_pytorch._published_paths import publish
from dilated_attention_pytorch._version import __version__
from dilated_attention_pytorch.core import (
    Branch,
    DilatedPatternCache,
    DilatedSpec,
    OptimizedPatternCache,
    PatternCache,
    ReachWarning,
    SimpleGPUCache,
    WorkspacePool,
    branches_for,
    document_spans,
    get_global_memory_pool,
    get_global_pattern_cache,
    merge,
    reset_global_memory_pool,
    reset_global_pattern_cache,
)
from dilated_attention_pytorch.functional import attention_rows, backends, dilated_attention, warm_up
from dilated_attention_pytorch.models import (
    EncoderConfig,
    LongNet,
    LongNetEncoder,
    LongNetLM,
    ModelConfig,
    attention_map,
    cls_attention,
    gradient_map,
    load_torchscale_weights,
    on_slide,
    patch_gigapath,
)
from dilated_attention_pytorch.nn import (
    BlockSparseDilatedAttention,
    BlockSparseMultiheadDilatedAttention,
    DilatedAttention,
    DilatedKVCache,
    DilatedTransformerDecoderLayer,
    DilatedTransformerEncoderLayer,
    ImprovedDilatedAttention,
    ImprovedMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    RotaryPositions,
    SparsePatternConfig,
    XPosPositions,
    create_dilated_attention,
    create_multihead_dilated_attention,
    replace_attention,
)
from dilated_attention_pytorch.parallel import (
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    DistributedImprovedDilatedAttention,
    DistributedImprovedMultiheadDilatedAttention,
    RingAdvancedDistributedDilatedAttention,
    RingDilatedAttention,
    RingDilatedAttentionV2,
    RingDilatedAttentionV3,
    RingMultiheadDilatedAttention,
    parallelize,
)
from dilated_attention_pytorch.tools import (
    benchmark_implementations,
    diagnose_oom_error,
    diagnose_performance_issues,
    memory_cleanup,
    monitor_memory_realtime,
    profile_memory_usage,
)

if TYPE_CHECKING:
    from dilated_attention_pytorch.train.batching import DynamicBatcher
    from dilated_attention_pytorch.train.recipes import (
        enable_fp8_training,
        enable_structured_sparsity,
        gradient_accumulation_training,
        hierarchical_training_schedule,
        optimize_large_model,
        optimize_medium_model,
        optimize_small_model,
        train_hierarchically,
        train_stage,
    )
    from dilated_attention_pytorch.train.stages import update_attention_config

__all__ = [
    "BlockSparseDilatedAttention",
    "BlockSparseMultiheadDilatedAttention",
    "BlockSparseRingDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttention",
    "Branch",
    "DilatedAttention",
    "DilatedKVCache",
    "DilatedPatternCache",
    "DilatedSpec",
    "DilatedTransformerDecoderLayer",
    "DilatedTransformerEncoderLayer",
    "DistributedImprovedDilatedAttention",
    "DistributedImprovedMultiheadDilatedAttention",
    "DynamicBatcher",
    "EncoderConfig",
    "ImprovedDilatedAttention",
    "ImprovedMultiheadDilatedAttention",
    "LongNet",
    "LongNetEncoder",
    "LongNetLM",
    "ModelConfig",
    "MultiheadDilatedAttention",
    "OptimizedPatternCache",
    "PatternCache",
    "ReachWarning",
    "RingAdvancedDistributedDilatedAttention",
    "RingDilatedAttention",
    "RingDilatedAttentionV2",
    "RingDilatedAttentionV3",
    "RingMultiheadDilatedAttention",
    "RotaryPositions",
    "SimpleGPUCache",
    "SparsePatternConfig",
    "WorkspacePool",
    "XPosPositions",
    "__version__",
    "attention_map",
    "attention_rows",
    "backends",
    "benchmark_implementations",
    "branches_for",
    "cls_attention",
    "create_dilated_attention",
    "create_multihead_dilated_attention",
    "diagnose_oom_error",
    "diagnose_performance_issues",
    "dilated_attention",
    "document_spans",
    "enable_fp8_training",
    "enable_structured_sparsity",
    "get_global_memory_pool",
    "get_global_pattern_cache",
    "gradient_accumulation_training",
    "gradient_map",
    "hierarchical_training_schedule",
    "load_torchscale_weights",
    "memory_cleanup",
    "merge",
    "monitor_memory_realtime",
    "on_slide",
    "optimize_large_model",
    "optimize_medium_model",
    "optimize_small_model",
    "parallelize",
    "patch_gigapath",
    "profile_memory_usage",
    "replace_attention",
    "reset_global_memory_pool",
    "reset_global_pattern_cache",
    "train_hierarchically",
    "train_stage",
    "update_attention_config",
    "warm_up",
]

# Training loads engines of PyTorch that take seconds: its names are found when they are asked for.
_TRAINING = ("batching", "stages", "recipes")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _TRAINING:
            found = vars(importlib.import_module(f"{__name__}.train.{module}"))
            if name in found:
                return found[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _warn_of_namesake() -> None:
    """Warn if another project's distribution has written its files into the folder of this package."""
    other = "dilated-attention-pytorch"
    try:
        installed = metadata.files(other) or []
    except metadata.PackageNotFoundError:
        return
    if any(path.as_posix() == f"{__name__}/__init__.py" for path in installed):
        warnings.warn(
            f"the distribution {other}, another project whose package is also called {__name__}, is installed too, and "
            f"each overwrites files of the other: pip uninstall {other}, then reinstall longnet-dilated-attention",
            stacklevel=2,
        )


_warn_of_namesake()
publish(sys.modules[__name__])
