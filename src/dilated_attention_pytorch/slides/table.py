"""The table of a study: its sequences, what to predict for each, and its splits."""

from __future__ import annotations

import csv
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from dilated_attention_pytorch.core.checks import COUNT, POSITIVE, check_whole, checked
from dilated_attention_pytorch.slides.features import SUFFIXES, BrokenFile, Found, find_file, look_at, read_bag

Task = Literal["classification", "regression", "survival"]
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
# Names of columns, the first of them ours.
_COLUMNS = {
    "slide": ("slide", "slide_id", "id"),
    "patient": ("patient", "patient_id", "case_id"),
    "label": ("label",),
    "split": ("split",),
    "time": ("time",),
    "event": ("event",),
}
_NAMES = {"val": "validation", "valid": "validation", "training": "train", "testing": "test"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One sequence of a study. `target` is the number of the class, a number, or time and event."""

    name: str
    path: Path
    patient: str
    split: Split | None
    label: str
    target: tuple[float, ...]
    found: Found


@dataclass(frozen=True, kw_only=True)
class Study:
    """The sequences of a table, in its order; `classes` are the labels of a classification, sorted."""

    cases: tuple[Case, ...]
    task: Task | None
    classes: tuple[str, ...] = ()

    @property
    def dim(self) -> int:
        return self.cases[0].found.dim

    @property
    def longest(self) -> int:
        return max(case.found.rows for case in self.cases)

    @property
    def has_coordinates(self) -> bool:
        return all(case.found.has_coordinates for case in self.cases)

    def of(self, split: Split) -> list[Case]:
        return [case for case in self.cases if case.split == split]


@checked(tile_pixels=POSITIVE, grids=COUNT)
def read_study(
    table: Path | None,
    folder: Path,
    task: Task | None = None,
    *,
    skip_broken: bool = False,
    tile_pixels: float | None = None,
    grids: int | None = None,
    needs_coordinates: bool = False,
    ignore_splits: bool = False,
    say: Callable[[str], object] = print,
) -> Study:
    """The study of a CSV table whose first line names its columns, with one file of features per line in `folder`.

    Columns: `slide` (or else `slide_id`, or else `id`), the file's name without suffix; `patient` (or else
    `patient_id`, or else `case_id`), the slide itself by default; `split`, one of train, validation and test; `label`
    for classification and regression; `time` and `event` (0 or 1) for survival. Without a `task` nothing is to be
    predicted. Other columns are ignored. Without a table, the study is every file in the folder.

    With `grids`, the coordinates of each file are checked too: they must lie within that many tiles along each side.
    With `needs_coordinates`, a file must have them. With `ignore_splits`, the column `split` is not read.
    `tile_pixels` is the width of a tile, as in `read_bag`; widths that had to be measured are told to `say`.

    An error names the line or the file that is wrong. With `skip_broken`, files that cannot be used are left out, and
    `say` is told which; for this, every file is read.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    rows = _list_files(folder) if table is None else _read_rows(table)
    table = folder if table is None else table
    _check_names(table, rows)
    cases, dims = [], Counter[int]()
    for line, row in rows:
        target = _target(table, line, row, task)
        try:
            path = find_file(folder, row["slide"])
            found = look_at(path, tile_pixels, grids, needs_coordinates=needs_coordinates)
            if skip_broken:
                read_bag(path, coordinates=False)  # which also finds NaN
        except BrokenFile as broken:
            if not skip_broken:
                raise BrokenFile(f"{broken}; --skip-broken leaves such slides out") from broken
            say(f"skipped  {broken}")
            continue
        dims[found.dim] += 1
        split = "" if ignore_splits else row.get("split", "").lower()
        split = _NAMES.get(split, split)
        if split and split not in SPLITS:
            raise ValueError(f"{table}, line {line}: split must be one of {', '.join(SPLITS)}, got {row['split']!r}")
        cases.append(
            Case(
                name=row["slide"],
                path=path,
                patient=row.get("patient") or row["slide"],
                split=split or None,
                label=row.get("label", ""),
                target=target,
                found=found,
            )
        )
    if not cases:
        raise ValueError(f"{table} names no slide whose features can be read from {folder}")
    if len(dims) > 1:
        usual = dims.most_common(1)[0][0]
        other = next(case for case in cases if case.found.dim != usual)
        raise BrokenFile(f"{other.path} has features of size {other.found.dim}, the others of size {usual}")
    if any(case.split for case in cases) and not all(case.split for case in cases):
        without = next(case.name for case in cases if not case.split)
        raise ValueError(f"{table}: {without!r} has no split, and others have one: fill the column, or leave it out")
    _check_patients(table, cases)
    tell_measured([case.found for case in cases], say)
    if task != "classification":
        return Study(cases=tuple(cases), task=task)
    classes = tuple(sorted({case.label for case in cases}))
    numbered = (replace(case, target=(float(classes.index(case.label)),)) for case in cases)
    return Study(cases=tuple(numbered), task=task, classes=classes)


def _list_files(folder: Path) -> list[tuple[int, dict[str, str]]]:
    paths = (path.name for path in folder.iterdir() if path.suffix in SUFFIXES)
    names = sorted({name.rpartition(".")[0] for name in paths if not name.endswith(".coords.npy")})
    return [(number, {"slide": name}) for number, name in enumerate(names, 1)]


def _read_rows(table: Path) -> list[tuple[int, dict[str, str]]]:
    """The lines of the table, numbered as an editor does, with our names of its columns."""
    try:
        with table.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            lines = [(reader.line_num, row) for row in reader]
            names = reader.fieldnames or []
    except FileNotFoundError:
        raise FileNotFoundError(f"no table {table}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{table} is not a CSV table: {error}") from None
    columns = {ours: column for ours, theirs in _COLUMNS.items() if (column := _column(table, names, theirs))}
    if "slide" not in columns:
        raise ValueError(
            f"{table} has no column 'slide': its columns are {', '.join(map(str, names)) or 'none'}; put commas "
            f"between columns, and name one {', '.join(_COLUMNS['slide'][:-1])} or {_COLUMNS['slide'][-1]}"
        )
    return [(line, {ours: (row[column] or "").strip() for ours, column in columns.items()}) for line, row in lines]


def _column(table: Path, names: Sequence[str | None], theirs: Sequence[str]) -> str | None:
    """The column of the first of these names that the table has; None if it has none of them."""
    for wanted in theirs:
        same = [name for name in names if name and name.strip().lower() == wanted]
        if len(same) > 1:
            raise ValueError(f"{table} has {len(same)} columns {wanted!r}: leave one of them")
        if same:
            return same[0]
    return None


def tell_measured(found: Iterable[Found], say: Callable[[str], object]) -> None:
    """Tell the widths of tiles that had to be measured, because they are neither stated nor noted."""
    widths = Counter(one.measured for one in found if one.measured)
    if widths:
        told = ", ".join(
            f"{width:g} pixels in {count:,} file{'s' * (count > 1)}" for width, count in widths.most_common(4)
        )
        more = f", and {len(widths) - 4} other widths" if len(widths) > 4 else ""
        say(f"tiles    {told}{more}: measured, because no width is noted there; --tile-pixels overrides it")


def _check_names(table: Path, rows: Sequence[tuple[int, dict[str, str]]]) -> None:
    seen: dict[str, int] = {}
    for line, row in rows:
        name = row["slide"]
        if not name or Path(name).name != name:
            raise ValueError(f"{table}, line {line}: slide must be a file's name without folder, got {name!r}")
        if name in seen:
            raise ValueError(f"{table}: slide {name!r} is on lines {seen[name]} and {line}: leave one of them")
        seen[name] = line


def _target(table: Path, line: int, row: dict[str, str], task: Task | None) -> tuple[float, ...]:
    if task is None:
        return ()
    wanted = ("time", "event") if task == "survival" else ("label",)
    for name in wanted:
        if not row.get(name):
            raise ValueError(f"{table}, line {line}: slide {row['slide']!r} has no {name}, which {task} needs")
    if task == "classification":
        return (0.0,)  # numbered when all classes are known
    try:
        numbers = tuple(float(row[name]) for name in wanted)
    except ValueError:
        numbers = (math.nan,)
    if not all(map(math.isfinite, numbers)) or (task == "survival" and (numbers[0] < 0 or numbers[1] not in (0, 1))):
        rule = "a time of at least 0, and 0 or 1 as event" if task == "survival" else "a number as label"
        given = ", ".join(repr(row[name]) for name in wanted)
        raise ValueError(f"{table}, line {line}: {task} needs {rule}, got {given}")
    return numbers


def _check_patients(table: Path, cases: Iterable[Case]) -> None:
    """Refuse a patient in two splits: a model would be tested on somebody it has seen."""
    splits: dict[str, Case] = {}
    for case in cases:
        first = splits.setdefault(case.patient, case)
        if first.split != case.split:
            raise ValueError(
                f"{table}: patient {case.patient!r} is in the splits {first.split} ({first.name}) and {case.split} "
                f"({case.name}): all slides of a patient belong in one"
            )


@checked(folds={"least": 3, "most": 1000})
def split_by_patient(study: Study, *, folds: int, fold: int = 0, seed: int = 0) -> Study:
    """The study with `folds` parts of its patients: part `fold` is the test split, the next one the validation split.

    Each class, or in survival each kind of event, is dealt evenly to the parts. Every part is the test split of exactly
    one fold, whatever was in the column `split`.
    """
    check_whole("fold", fold, least=0, most=folds - 1)
    kinds: dict[str, list[str]] = {}
    kind_of: dict[str, str] = {}
    for case in study.cases:  # a patient counts as what its first slide is
        own = {"classification": case.label, "survival": str(case.target[-1:])}.get(study.task or "", "")
        if case.patient not in kind_of:
            kind_of[case.patient] = own
            kinds.setdefault(own, []).append(case.patient)
    if len(kind_of) < folds:
        raise ValueError(f"{folds} folds need as many patients, and the table has {len(kind_of)}")
    dealt: list[str] = []
    for own in sorted(kinds):
        patients = sorted(kinds[own])
        random.Random(f"{seed} {own}").shuffle(patients)
        dealt += patients
    part_of = {patient: number % folds for number, patient in enumerate(dealt)}
    splits: dict[int, Split] = {fold: "test", (fold + 1) % folds: "validation"}
    cases = (replace(case, split=splits.get(part_of[case.patient], "train")) for case in study.cases)
    return replace(study, cases=tuple(cases))


def check_splits(study: Study, wanted: Sequence[Split] = SPLITS, fold: str = "") -> None:
    """Refuse a split that cannot be learned from or measured on; errors begin with the name of the `fold`."""
    for split in wanted:
        cases, where = study.of(split), f"{fold and f'{fold}: '}the split {split!r}"
        if not cases:
            raise ValueError(f"{where} has no slides: name some in the column split, or use --folds")
        classes = {case.label for case in cases}
        if study.task == "classification" and len(classes) < 2:
            raise ValueError(
                f"{where} has slides of one class only, {cases[0].label!r}: nothing can be told apart there"
            )
        if study.task == "classification" and split == "train" and (missing := {*study.classes} - classes):
            raise ValueError(
                f"{where} has no slide of class {', '.join(sorted(missing))}, which others have: add patients of that "
                "class, or leave its slides out"
            )
        if study.task == "survival" and not any(case.target[1] for case in cases):
            raise ValueError(f"{where} has no event: nothing can be ranked there")
