"""The list of suites."""

from __future__ import annotations

from benchmarks import baselines, capacity, decode, memory, ranks, shard, shared, techniques

SUITES = {
    suite.name: suite
    for suite in (
        *baselines.SUITES,
        memory.SUITE,
        shared.CACHE,
        shared.POOL,
        decode.SUITE,
        shard.SUITE,
        ranks.SUITE,
        capacity.SUITE,
        techniques.SUITE,
    )
}
