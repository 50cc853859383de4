"""Training a byte-level LongNetLM: data, checkpoints, ranks, monitors, the loop."""

from dilated_attention_pytorch.train.config import TrainConfig
from dilated_attention_pytorch.train.engine import Stopped
from dilated_attention_pytorch.train.trainer import train

__all__ = ["Stopped", "TrainConfig", "train"]
