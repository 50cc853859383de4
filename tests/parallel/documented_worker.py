"""Run on four or eight ranks: the blocks of docs/parallel.md for that many, as written, with a small model."""

from __future__ import annotations

import functools
import re
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import dilated_attention_pytorch
from dilated_attention_pytorch import LongNetLM

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"
SIZES = {"d_model": 32, "num_heads": 4, "num_layers": 1, "vocab_size": 50, "max_length": 64}


def blocks(page: Path) -> list[str]:
    """The Python of a page that is no doctest."""
    return [block for block in re.findall(r"(?ms)^```python\n(.*?)^```$", page.read_text()) if ">>>" not in block]


def main() -> None:
    ring, mesh, replicas, zigzag = blocks(PAGE)
    dilated_attention_pytorch.LongNetLM = functools.partial(LongNetLM, **SIZES)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    names: dict = {}
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 4:
        exec(ring.replace('dist.init_process_group("gloo")', ""), names)
        assert names["out"].shape == (1, 2048, 512)
    else:
        tokens = torch.randint(50, (2, 32))
        names = {"tokens": tokens, "following": tokens, "tokens_per_rank": tokens.numel()}
        exec(mesh, names)
        names["loss"].backward()
        names["model"] = LongNetLM(**SIZES)
        exec(replicas, names)
        names["model"](tokens).sum().backward()
        del names["model"]
        q, k, v = torch.randn(3, 1, 100, 4, 8).unbind(0)
        names = {"tokens": 100, "ranks": ranks, "rank": rank, "q": q, "k": k, "v": v, "torch": torch}
        exec(zigzag, names)
        assert names["out"].shape == q[:, names["mine"]].shape
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
