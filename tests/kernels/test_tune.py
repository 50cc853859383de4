"""Tiles are tuned by time, kept in a file, and read from it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the tiles are those of Triton kernels")

from dilated_attention_pytorch.kernels.triton import tuning
from dilated_attention_pytorch.kernels.triton.tune import candidates, fastest, tune
from dilated_attention_pytorch.kernels.triton.tuning import HopperTiles, Kind, Tiles, read_tiles, write_tiles

KIND = Kind("forward", 2, 64, False)


def test_the_fastest_candidate_wins_and_those_that_fail_drop_out() -> None:
    wanted = next(shape for shape in candidates("forward")[5:] if shape.num_warps == 4)

    def time(shape):
        if shape.num_warps == 8:
            raise MemoryError
        return 1.0 if shape == wanted else 2.0

    assert fastest(KIND, time) == wanted


def test_no_working_candidate_is_an_error() -> None:
    def time(shape):
        raise MemoryError

    with pytest.raises(RuntimeError, match="no candidate"):
        fastest(KIND, time)


def test_a_tuned_file_takes_the_tables_place(tmp_path, monkeypatch) -> None:
    path = tmp_path / "tiles.jsonl"
    tuned = {KIND: Tiles(32, 16, 2, 1), Kind("hopper forward", 2, 128, True): HopperTiles(2, 3, 200, True)}
    write_tiles(path, tuned)
    assert read_tiles(path) == tuned
    monkeypatch.setenv("DILATED_ATTENTION_TILES", str(path))
    tuning._tuned.cache_clear()
    try:
        assert tuning.tiles_for("forward", 64, 2, 4096, False) == Tiles(32, 16, 2, 1)
        assert tuning.hopper_tiles_for(128, True, small=False) == HopperTiles(2, 3, 200, True)
        assert tuning.tiles_for("forward", 64, 2, 4096, True) == tuning.MEASURED[Kind("forward", 2, 64, True)]
        with tuning.trying(KIND, Tiles(64, 64, 4, 2)):  # else tuning anew would measure the file's shape every time
            assert tuning.tiles_for("forward", 64, 2, 4096, False) == Tiles(64, 64, 4, 2)
        assert tuning.tiles_for("forward", 64, 2, 4096, False) == Tiles(32, 16, 2, 1)
    finally:
        monkeypatch.undo()
        tuning._tuned.cache_clear()


def test_a_file_that_holds_no_tiles_is_refused_with_its_line(tmp_path) -> None:
    path = tmp_path / "tiles.jsonl"
    path.write_text('{"kind": {}}\n')
    with pytest.raises(ValueError, match="line 1"):
        read_tiles(path)


def test_every_kernel_has_tiles_for_every_head_dim() -> None:
    for kernel in ("forward", "dkdv", "dq"):
        for block_d in (16, 32, 64, 128, 256):
            for itemsize in (2, 4):
                tiles = tuning.tiles_for(kernel, block_d, itemsize, rows=20, is_causal=True)
                assert max(tiles.own, tiles.walk) <= 32


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tuning_without_a_gpu_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="GPU"):
        tune(tmp_path / "tiles.jsonl")
