"""LongNet models and their config; torchscale's models, such as Prov-GigaPath, on this library's attention."""

from dilated_attention_pytorch.models.attention_map import attention_map, gradient_map
from dilated_attention_pytorch.models.config import EncoderConfig, ModelConfig
from dilated_attention_pytorch.models.encoder import LongNetEncoder
from dilated_attention_pytorch.models.longnet import LongNet, LongNetLM
from dilated_attention_pytorch.models.slide_attention import cls_attention, on_slide
from dilated_attention_pytorch.models.torchscale import load_torchscale_weights, patch_gigapath

__all__ = [
    "EncoderConfig",
    "LongNet",
    "LongNetEncoder",
    "LongNetLM",
    "ModelConfig",
    "attention_map",
    "cls_attention",
    "gradient_map",
    "load_torchscale_weights",
    "on_slide",
    "patch_gigapath",
]
