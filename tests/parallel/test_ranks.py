"""What must hold on several ranks. One launch checks it all, because starting processes takes longer than computing."""

from __future__ import annotations

import functools
import random

import pytest

from ..ranks import run_ranks
from ..thorough import examples


@functools.cache
def launched(ranks: int) -> str:
    # Fresh problems every time; a failure prints its seed.
    return run_ranks(ranks, "tests.parallel.check_all", str(random.randrange(2**32)), str(examples(4)))[1]


def check_passed(name: str, ranks: int) -> None:
    printed = launched(ranks)
    assert f"passed: {name}\n" in printed, printed[-8000:]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_gradients_and_bytes_are_right_on_any_number_of_ranks(ranks) -> None:
    check_passed(f"invariance on {ranks}", max(ranks, 2))


@pytest.mark.parametrize("ranks", [2, 4])
def test_published_classes_give_their_rows_on_every_rank(ranks) -> None:
    check_passed(f"names on {ranks}", ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_pool_profile_and_log_serve_messages(ranks) -> None:
    check_passed(f"resources on {ranks}", ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_kept_tiles_are_those_of_a_single_device(ranks) -> None:
    check_passed(f"block-sparse on {ranks}", ranks)


def test_models_on_a_mesh_have_the_losses_and_gradients_of_one_device() -> None:
    check_passed("parallelize", 4)


@pytest.mark.parametrize("ranks", [2, 3])
def test_models_that_pool_rows_have_the_outputs_and_gradients_of_one_device(ranks) -> None:
    check_passed(f"slides on {ranks}", ranks)


def test_what_is_planned_is_what_travels_and_is_held() -> None:
    check_passed("plan", 4)


def test_published_snippets_run_on_the_eight_ranks_they_ask_for() -> None:
    check_passed("snippets on 8", 8)


def test_bad_input_is_an_error_on_every_rank() -> None:
    check_passed("bad input", 2)


def test_different_calls_are_an_error_on_every_rank_at_once() -> None:
    check_passed("different calls", 4)


def test_no_tokens_and_no_batch_rows_are_empty_on_every_rank() -> None:
    check_passed("nothing", 2)
