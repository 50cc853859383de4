"""Training a LongNetLM: data, checkpoints, ranks, monitors, the loop; and recipes for your own loop."""

from dilated_attention_pytorch.train.config import TrainConfig
from dilated_attention_pytorch.train.loop import train
from dilated_attention_pytorch.train.stages import Stage

__all__ = ["Stage", "TrainConfig", "train"]
