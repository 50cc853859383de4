"""Run on each rank: all checks that its number of ranks allows, one launch for all.

Arguments: the seed of the random problems, and how many there are.
"""

from __future__ import annotations

import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from .check_bad_input import check_bad_input, check_nothing
from .check_block_sparse import check_block_sparse
from .check_different_calls import check_different_calls
from .check_invariance import check_invariance
from .check_names import check_names
from .check_parallelize import check_parallelize, check_slides
from .check_plan import check_plan
from .check_resources import check_resources
from .check_snippets import check_snippets


def main() -> None:
    torch.set_num_threads(1)
    # A rank that waits for one that has failed ends soon after it.
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    size = dist.get_world_size()
    if size == 8:
        passed("snippets on 8", check_snippets)
    else:
        passed(f"invariance on {size}", lambda: check_invariance(seed, count))
    if size == 2:
        alone = [dist.new_group([rank]) for rank in range(2)]
        passed("invariance on 1", lambda: check_invariance(seed, 0, alone[dist.get_rank()]))
        passed("bad input", check_bad_input)
        passed("nothing", check_nothing)
    if size in (2, 3):
        passed(f"block-sparse on {size}", lambda: check_block_sparse(seed))
        passed(f"resources on {size}", check_resources)
        passed(f"slides on {size}", check_slides)
    if size in (2, 4):
        passed(f"names on {size}", check_names)
    if size == 4:
        passed("different calls", check_different_calls)
        passed("plan", check_plan)
        passed("parallelize", check_parallelize)
    dist.destroy_process_group()


def passed(name: str, check) -> None:
    try:
        check()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        sys.exit(1)
    if dist.get_rank() == 0:
        print(f"passed: {name}", flush=True)


if __name__ == "__main__":
    main()
