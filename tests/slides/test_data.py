"""Files of features, the table of a study, its splits and its batches; one clear error for everything wrong."""

from __future__ import annotations

import numpy
import pytest
import torch

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.slides.batches import Bags, epoch_order, make_batches, read_batches
from dilated_attention_pytorch.slides.config import SlidesConfig
from dilated_attention_pytorch.slides.features import BrokenFile, look_at, read_bag
from dilated_attention_pytorch.slides.loop import run_study
from dilated_attention_pytorch.slides.table import SPLITS, check_splits, read_study, split_by_patient

from .studies import DIM, small_study, write_bag, write_table


@pytest.mark.parametrize("suffix", [".h5", ".pt", ".npy"])
def test_every_kind_of_file_gives_its_rows_and_coordinates(tmp_path, suffix) -> None:
    path = tmp_path / f"slide{suffix}"
    write_bag(path, rows=20, tile=512)
    assert look_at(path)[:3] == (20, DIM, True)
    bag = read_bag(path)
    expected = torch.randn(20, DIM, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(bag.features, expected, atol=2e-3 if suffix == ".pt" else 0, rtol=0)
    # Whatever the resolution was, a tile is 256 wide: neighbours have neighbouring numbers.
    assert (bag.coordinates[:7] / 256).tolist() == [[0, 0], [1, 0], [2, 0], [3, 0], [4, 0], [0, 1], [1, 1]]


def test_the_width_of_a_tile_is_stated_noted_or_measured(tmp_path) -> None:
    path = tmp_path / "slide.h5"
    for attributes, tile in (
        ({"patch_size_level0": 1024, "patch_size": 256}, 1024),  # as TRIDENT
        ({"patch_size": 256, "downsample": (2.0, 2.0)}, 512),  # as CLAM
        ({"patch_size": 256}, 2048),
    ):
        write_bag(path, tile=2048, **attributes)
        assert read_bag(path).coordinates[1, 0] == 2048 / tile * 256
    assert read_bag(path, tile_pixels=100).coordinates[1, 0] == 20.48 * 256
    with pytest.raises(ValueError, match="tile_pixels must be a finite number above 0, got 0"):
        read_bag(path, tile_pixels=0)
    write_bag(path, tile=2048, patch_size_level0=-1)  # unknown
    assert read_bag(path).tile_pixels == 2048
    assert read_bag(path, coordinates=False).coordinates is None


def contour(x: int, y: int, columns: int, rows: int, step: int = 512) -> numpy.ndarray:
    """The coordinates of one tissue contour, as CLAM lays them: on a grid from the contour's own corner."""
    across = numpy.meshgrid(x + step * numpy.arange(columns), y + step * numpy.arange(rows), indexing="ij")
    return numpy.stack(across, -1).reshape(-1, 2)


def write_contours(path, *contours) -> None:
    places = numpy.concatenate(contours)
    numpy.save(path, numpy.zeros((len(places), DIM), "float32"))
    numpy.save(path.with_suffix(".coords.npy"), places)


def test_contours_on_different_grids_have_the_width_of_their_tiles(tmp_path) -> None:
    path = tmp_path / "s0.npy"
    write_contours(path, contour(10_000, 8_000, 40, 30), contour(40_037, 9_100, 30, 25))
    assert read_bag(path).tile_pixels == 512
    assert look_at(path, grids=1000).measured == 512
    assert look_at(path, tile_pixels=512, grids=1000).measured == 0
    write_contours(path, contour(10_000, 8_000, 1, 1))
    assert read_bag(path).tile_pixels == 256  # of a single tile, as nothing tells


def test_a_width_that_cannot_be_measured_must_be_stated(tmp_path) -> None:
    path = tmp_path / "s0.npy"
    scattered = numpy.array([[0, y] for y in (0, 512, 1024, 2600, 3900, 6100, 9000)])
    write_contours(path, scattered)
    with pytest.raises(BrokenFile, match=r"s0.npy: the width .* only 33% are 512 pixels apart.*: state --tile-pixels"):
        read_bag(path)
    assert read_bag(path, 512).tile_pixels == 512
    write_contours(path, contour(0, 0, 1, 1), contour(700, 900, 1, 1))
    with pytest.raises(BrokenFile, match="no two tiles share a column or a row"):
        read_bag(path)


def test_a_study_tells_the_widths_it_measured_and_names_slides_outside_the_grid(tmp_path) -> None:
    (tmp_path / "features").mkdir()
    for i, step in enumerate((512, 512, 1024)):
        write_contours(tmp_path / f"features/s{i}.npy", contour(0, 0, 5, 4, step))
    said: list[str] = []
    read_study(None, tmp_path / "features", grids=1000, say=said.append)
    assert said == [
        "tiles    512 pixels in 2 files, 1024 pixels in 1 file: measured, because no width is noted there; "
        "--tile-pixels overrides it"
    ]
    read_study(None, tmp_path / "features", say=said.append)  # coordinates are not used
    read_study(None, tmp_path / "features", tile_pixels=512, grids=1000, say=said.append)
    assert len(said) == 1
    write_contours(tmp_path / "features/s3.npy", contour(600_000, 0, 5, 4))
    with pytest.raises(BrokenFile, match=r"s3.npy: coordinates must lie within 1,000 tiles .* tile 1,175 .*--skip"):
        read_study(None, tmp_path / "features", grids=1000)
    study = read_study(None, tmp_path / "features", grids=1000, skip_broken=True, say=said.append)
    assert [case.name for case in study.cases] == ["s0", "s1", "s2"]
    assert "s3.npy: coordinates must lie" in said[1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.h5", b"\x89HDF\r\n\x1a\n cut off", r"a.h5 cannot be read"),
        ("a.h5", {"feats": numpy.zeros((3, 2))}, r"has no dataset 'features': it holds feats"),
        ("a.h5", {"features": numpy.zeros((0, 2))}, "has no rows"),
        ("a.h5", {"features": numpy.zeros((3, 2)), "coords": numpy.zeros((2, 2))}, r"coords must be \(3, 2\)"),
        ("a.h5", {"features": numpy.full((3, 2), numpy.nan)}, "3 of 3 rows have features that are NaN"),
        ("a.h5", {"features": numpy.zeros((3, 2)), "coords": numpy.full((3, 2), -1)}, "at least 0"),
        ("a.npy", numpy.zeros(3), r"features must be \(rows, dim\), got \(3,\)"),
        ("a.npy", numpy.array([object()]), "cannot be read"),
        ("a.pt", [1, 2], "neither a tensor nor a dictionary"),
        ("a.pt", len, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, name, content, message) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, dict):
        import h5py

        with h5py.File(path, "w") as file:
            for key, value in content.items():
                file[key] = value
    elif path.suffix == ".npy":
        numpy.save(path, content, allow_pickle=True)
    else:
        torch.save(content, path)
    with pytest.raises(BrokenFile, match=message) as error:
        read_bag(path)
    assert str(path) in str(error.value)


def test_a_pt_file_that_needs_unpickling_says_what_to_save(tmp_path) -> None:
    path = tmp_path / "a.pt"
    for held, new in (({"features": numpy.zeros((3, 2))}, True), (torch.zeros(3, 2), False)):
        torch.save(held, path, _use_new_zipfile_serialization=new)
        with pytest.raises(BrokenFile, match=r"a.pt .*: save tensors, with torch.save of PyTorch 1.6 or newer$"):
            read_bag(path)


def test_a_study_reads_labels_patients_and_sizes(tmp_path) -> None:
    study = read_study(small_study(tmp_path), tmp_path / "features", "classification")
    assert (study.classes, study.dim, study.longest, study.has_coordinates) == (("a", "b"), DIM, 87, True)
    assert [case.target for case in study.cases[:4]] == [(0.0,), (0.0,), (1.0,), (1.0,)]
    times = read_study(tmp_path / "table.csv", tmp_path / "features", "survival")
    assert times.cases[3].target == (4.0, 1.0)
    assert read_study(tmp_path / "table.csv", tmp_path / "features").cases[0].target == ()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["slide,label", "s0,a", "s1,"], r"line 3: slide 's1' has no label, which classification needs"),
        (["slide,label", "s0,a", "s1,b", "s0,b"], r"slide 's0' is on lines 2 and 4"),
        (["name,label", "s0,a"], "has no column 'slide': its columns are name, label"),
        (
            ["slide;label", "s0;a"],
            "its columns are slide;label; put commas between columns, and name one slide, slide_id",
        ),
        (["slide,label,Label", "s0,a,b", "s1,b,a"], "has 2 columns 'label': leave one of them"),
        (["slide,label,split", "s0,a,trian"], "split must be one of train, validation, test, got 'trian'"),
        (["slide,label,split", "s0,a,train", "s1,b,"], "'s1' has no split, and others have one"),
        (
            ["slide,label,split,patient", "s0,a,train,p", "s1,b,test,p"],
            "patient 'p' is in the splits train .* and test",
        ),
        (["slide,label", "../s0,a"], "without folder"),
        (["slide,label", "gone,a"], "gone has no file in .*--skip-broken leaves such slides out"),
        (["slide,label", "small,a", "s0,b", "s1,b"], "features of size 4, the others of size 6"),
    ],
)
def test_a_table_that_is_wrong_is_one_error(tmp_path, lines, message) -> None:
    small_study(tmp_path, slides=2)
    write_bag(tmp_path / "features/small.npy", dim=4)
    table = write_table(tmp_path / "own.csv", lines)
    with pytest.raises(ValueError, match=message):
        read_study(table, tmp_path / "features", "classification")


def test_of_several_columns_for_one_thing_the_first_name_wins(tmp_path) -> None:
    small_study(tmp_path, slides=2)
    table = write_table(tmp_path / "own.csv", ["slide_id,case_id,id", "s0,p0,17", "s1,p1,18"])
    study = read_study(table, tmp_path / "features")
    assert [(case.name, case.patient) for case in study.cases] == [("s0", "p0"), ("s1", "p1")]


def test_broken_files_are_skipped_only_if_asked(tmp_path) -> None:
    table = small_study(tmp_path, slides=6)
    (tmp_path / "features/s2.npy").write_bytes(b"no array")
    numpy.save(tmp_path / "features/s4.npy", numpy.full((3, DIM), numpy.nan))
    (tmp_path / "features/s4.coords.npy").unlink()
    with pytest.raises(BrokenFile, match=r"s2.npy cannot be read.*--skip-broken"):
        read_study(table, tmp_path / "features")
    said: list[str] = []
    study = read_study(table, tmp_path / "features", skip_broken=True, say=said.append)
    assert [case.name for case in study.cases] == ["s0", "s1", "s3", "s5"]
    assert len(said) == 2
    assert "s2.npy cannot be read" in said[0]
    assert "s4.npy: 3 of 3 rows have features that are NaN" in said[1]


def test_folds_keep_patients_whole_and_classes_even(tmp_path) -> None:
    study = read_study(small_study(tmp_path, slides=24), tmp_path / "features", "classification")
    tested = []
    for fold in range(3):
        split = split_by_patient(study, folds=3, fold=fold, seed=1)
        check_splits(split)
        by_patient: dict[str, set[str]] = {}
        for case in split.cases:
            by_patient.setdefault(case.patient, set()).add(case.split)
        assert all(len(splits) == 1 for splits in by_patient.values())
        for name in SPLITS:
            assert [case.label for case in split.of(name)].count("a") == 4
        tested += [case.name for case in split.of("test")]
    assert sorted(tested) == sorted(case.name for case in study.cases)
    with pytest.raises(ValueError, match="13 folds need as many patients, and the table has 12"):
        split_by_patient(study, folds=13)


def test_splits_are_not_read_where_they_are_not_used(tmp_path) -> None:
    table = small_study(tmp_path)
    rows = [f"{line},{'train' if i % 2 else 'fold-3'}" for i, line in enumerate(table.read_text().splitlines())]
    table.write_text("\n".join([rows[0].replace("fold-3", "split"), *rows[1:]]))
    with pytest.raises(ValueError, match="split must be one of train, validation, test, got 'fold-3'"):
        read_study(table, tmp_path / "features", "classification")
    given = {"table": str(table), "features": str(tmp_path / "features"), "device": "cpu", "epochs": 1}
    config = SlidesConfig(**given, folds=3, d_model=16, num_layers=1, num_heads=2)
    assert len(run_study(config, tmp_path / "run")) == 3
    flags = ["--features", given["features"], "--table", given["table"], "--device", "cpu"]
    assert main(["slides", "embed", str(tmp_path / "run/fold-0"), *flags, "--out", str(tmp_path / "all.npy")]) == 0


def test_a_split_of_one_class_or_without_event_is_refused(tmp_path) -> None:
    small_study(tmp_path, slides=4)
    lines = ["slide,label,split,time,event", "s0,a,train,1,1", "s1,b,train,2,0", "s2,a,test,3,0", "s3,a,test,4,0"]
    table = write_table(tmp_path / "own.csv", lines)
    with pytest.raises(ValueError, match="the split 'test' has slides of one class only, 'a'"):
        check_splits(read_study(table, tmp_path / "features", "classification"), ["train", "test"])
    lines = ["slide,label,split", "s0,a,train", "s1,b,train", "s2,a,test", "s3,c,test"]
    three = read_study(write_table(tmp_path / "three.csv", lines), tmp_path / "features", "classification")
    with pytest.raises(ValueError, match=r"^fold-2: the split 'train' has no slide of class c"):
        check_splits(three, ["train", "test"], "fold-2")
    with pytest.raises(ValueError, match="the split 'test' has no event"):
        check_splits(read_study(table, tmp_path / "features", "survival"), ["train", "test"])
    with pytest.raises(ValueError, match="the split 'validation' has no slides"):
        check_splits(read_study(table, tmp_path / "features", "classification"))


def test_batches_hold_similar_lengths_and_every_sequence_once() -> None:
    lengths = [100, 220, 130, 4000, 90, 120, 240, 60]
    for seed in range(3):
        batches = epoch_order(lengths, 600, 3, seed)
        assert sorted(i for batch in batches for i in batch) == [*range(8)]
        assert all(sum(lengths[i] for i in batch) <= 600 or len(batch) == 1 for batch in batches)
        assert len(batches) == len(make_batches(lengths, 600, 3))
    assert epoch_order(lengths, 600, 3, 0) != epoch_order(lengths, 600, 3, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_is_its_sequences_one_after_another(tmp_path, workers) -> None:
    study = read_study(small_study(tmp_path, slides=4, suffix=".h5"), tmp_path / "features")
    bags = Bags(study.cases, coordinates=True)
    first, second = read_batches(bags, [[2, 0], [3]], workers=workers)
    assert first.cu_seqlens.tolist() == [0, 24, 34]
    assert first.numbers.tolist() == [2, 0]
    torch.testing.assert_close(first.features[0, 24:], read_bag(study.cases[0].path).features)
    torch.testing.assert_close(second.coordinates[0], read_bag(study.cases[3].path).coordinates)
    study.cases[1].path.write_bytes(b"damaged after the table was read")
    with pytest.raises(BrokenFile, match=r"^\S*s1.h5 cannot be read"):
        [*read_batches(bags, [[0], [1]], workers=workers)]
