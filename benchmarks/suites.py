"""The list of suites."""

from __future__ import annotations

from benchmarks import (
    cache_and_pool,
    capacity,
    comparisons,
    curves,
    decode,
    first,
    generate,
    lengths,
    memory,
    ranks,
    shard,
    slides,
    step,
    techniques,
)

SUITES = {
    suite.name: suite
    for suite in (
        *comparisons.SUITES,
        lengths.SUITE,
        first.SUITE,
        memory.SUITE,
        cache_and_pool.CACHE,
        cache_and_pool.POOL,
        decode.SUITE,
        generate.SUITE,
        shard.SUITE,
        ranks.SUITE,
        capacity.SUITE,
        techniques.SUITE,
        step.SUITE,
        slides.SUITE,
        curves.SUITE,
    )
}
