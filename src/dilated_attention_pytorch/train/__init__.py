"""Training a byte-level LongNetLM: data, checkpoints, ranks, monitors, the loop; and recipes for loops of one's own."""

from dilated_attention_pytorch.train.config import TrainConfig
from dilated_attention_pytorch.train.engine import Stopped
from dilated_attention_pytorch.train.loop import train
from dilated_attention_pytorch.train.stages import Stage

__all__ = ["Stage", "Stopped", "TrainConfig", "train"]
