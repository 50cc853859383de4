"""Tiles are tuned by time, kept in a file, and read from it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the tiles are those of Triton kernels")

from dilated_attention_pytorch.kernels.triton import plan, tuning
from dilated_attention_pytorch.kernels.triton.tune import candidates, compile_shapes, fastest, tune
from dilated_attention_pytorch.kernels.triton.tuning import HopperTiles, Kind, Tiles, read_tiles, write_tiles

KIND = Kind("forward", 2, 64, False)


def test_the_fastest_candidate_wins_and_those_that_fail_drop_out() -> None:
    wanted = next(shape for shape in candidates("forward")[5:] if shape.num_warps == 4)

    def time(shape):
        if shape.num_warps == 8:
            raise MemoryError
        return 1.0 if shape == wanted else 2.0

    assert fastest(KIND, candidates("forward"), time) == wanted


def test_no_working_candidate_is_an_error() -> None:
    def time(shape):
        raise MemoryError

    with pytest.raises(RuntimeError, match="no candidate"):
        fastest(KIND, candidates("forward"), time)


@pytest.mark.parametrize("kernel", ["dkdv", "hopper forward"])
def test_every_shape_is_compiled_once_and_one_that_fails_does_not_stop_the_others(kernel, monkeypatch) -> None:
    kind = Kind(kernel, 2, 64, True)
    shapes = candidates(kernel)
    tried = []

    def passes(self, call, inputs, *, backward) -> None:
        assert call.is_causal
        assert inputs.query.is_meta
        assert backward == (kernel == "dkdv")
        assert ("plain" if kernel == "dkdv" else "best") == plan.KERNELS
        tried.append(tuning._tried[kind])
        if len(tried) == 2:
            raise MemoryError

    monkeypatch.setattr("dilated_attention_pytorch.kernels.triton.tune.Triton.passes", passes)
    monkeypatch.setattr("dilated_attention_pytorch.kernels.triton.tune.compile_launches", lambda run, **_: run())
    before = plan.KERNELS
    compile_shapes(kind, shapes)
    assert tried == shapes
    assert before == plan.KERNELS
    assert not tuning._tried


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
