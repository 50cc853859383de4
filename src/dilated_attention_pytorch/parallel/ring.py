"""Ring: the grid rows of K and V go from rank to rank of a segment, and are merged as they come.

In round t a rank holds the rows of the rank t places before it. Bytes are those of gather; memory is one block in use
and one on its way, whatever the number of ranks. Backward, the blocks go round again, and each visitor sends the
gradients of a block to its owner. Under causality a block goes forward only, to the segment's last rank.
"""

from __future__ import annotations

from dilated_attention_pytorch.parallel.gather import Gather, Round
from dilated_attention_pytorch.parallel.sharding import SharedSegment


def ring_rounds(segment: SharedSegment, rank: int, is_causal: bool) -> list[Round]:
    """One block per round, from the rank before, which then goes on to the rank after; shards are contiguous."""
    ranks, size = segment.ranks, len(segment.ranks)
    at = ranks.index(rank)
    before, after = ranks[at - 1], ranks[(at + 1) % size]
    rounds = []
    for hop in range(1, size):
        # Under causality nothing passes from the last rank to the first.
        sends = [(ranks[at - hop + 1], after)] if not is_causal or hop - 1 <= at < size - 1 else []
        receives = [(ranks[at - hop], before)] if not is_causal or hop <= at else []
        returns = [(rank, ranks[(at + hop) % size])] if not is_causal or at + hop < size else []
        rounds.append(Round(sends, receives, returns))
    return rounds


class Ring(Gather):
    plan_rounds = staticmethod(ring_rounds)
