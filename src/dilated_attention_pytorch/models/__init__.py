"""LongNet models and their config."""

from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.models.longnet import LongNet, LongNetLM

__all__ = ["LongNet", "LongNetLM", "ModelConfig"]
