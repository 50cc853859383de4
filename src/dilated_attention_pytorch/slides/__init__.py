"""Long bags of embeddings, such as the tiles of whole-slide images: from files of features to predictions and maps.

Only `features` knows about slides; the rest serves every study of long sequences of embeddings.
"""

from dilated_attention_pytorch.slides.batches import Bags, Batch, read_batches
from dilated_attention_pytorch.slides.features import Bag, BrokenFile, read_bag
from dilated_attention_pytorch.slides.table import Case, Study, read_study, split_by_patient

__all__ = [
    "Bag",
    "Bags",
    "Batch",
    "BrokenFile",
    "Case",
    "Study",
    "read_bag",
    "read_batches",
    "read_study",
    "split_by_patient",
]
