"""Dilated attention in models of Hugging Face's transformers, and LongNet as one of them; needs the extra `hf`."""

from dilated_attention_pytorch.core.checks import import_optional

__version__ = import_optional("transformers", "hf", "models.hf").__version__

from packaging.version import Version

OLDEST = "5.4"  # earlier ones tell a mask function neither where queries begin nor how many there are
if Version(__version__).release < Version(OLDEST).release:
    raise ImportError(
        f"models.hf needs transformers >= {OLDEST}, this is {__version__}: pip install 'transformers>={OLDEST}'"
    )

from dilated_attention_pytorch.models.hf.attention import register  # noqa: E402
from dilated_attention_pytorch.models.hf.cache import DilatedCache, dilated_cache  # noqa: E402
from dilated_attention_pytorch.models.hf.convert import (  # noqa: E402
    Stage,
    fine_tune_at_growing_lengths,
    growing_lengths,
    use_dilated_attention,
)
from dilated_attention_pytorch.models.hf.encoder import (  # noqa: E402
    LongNetEncoderConfig,
    LongNetForSequenceClassification,
    register_encoder_classes,
)
from dilated_attention_pytorch.models.hf.longnet import (  # noqa: E402
    LongNetConfig,
    LongNetForCausalLM,
    LongNetModel,
    register_auto_classes,
)

register_auto_classes()
register_encoder_classes()

__all__ = [
    "DilatedCache",
    "LongNetConfig",
    "LongNetEncoderConfig",
    "LongNetForCausalLM",
    "LongNetForSequenceClassification",
    "LongNetModel",
    "Stage",
    "dilated_cache",
    "fine_tune_at_growing_lengths",
    "growing_lengths",
    "register",
    "use_dilated_attention",
]
