"""Training a byte-level LongNetLM: data, checkpoints, the loop."""

from dilated_attention_pytorch.train.config import TrainConfig
from dilated_attention_pytorch.train.trainer import train

__all__ = ["TrainConfig", "train"]
