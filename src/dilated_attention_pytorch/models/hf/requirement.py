"""What this room needs of transformers, said before anything of it is imported."""

from __future__ import annotations

OLDEST = (5, 4)  # earlier ones tell a mask function neither where queries begin nor how many there are


def require_transformers() -> None:
    """Raise unless a transformers that is new enough is installed."""
    try:
        from transformers import __version__
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "models.hf works with transformers: pip install 'dilated-attention-pytorch[hf]'"
        ) from error
    if tuple(map(int, __version__.split(".")[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"models.hf needs transformers >= {oldest}, this is {__version__}: pip install 'transformers>={oldest}'"
        )
