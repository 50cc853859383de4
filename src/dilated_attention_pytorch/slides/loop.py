"""Training on a study: a run per fold, each resumable, with the optimizer, checkpoints and run folders of `train`.

A run's folder holds what `train.run_folder` says, and

study.json        the task, the classes, and which slide is in which split
model/            the best model, as `LongNetEncoder.from_pretrained` takes it
predictions.csv   what it predicts for the validation and test splits
results.json      its figures, and those of the epochs
fold-0/, ...      with folds: these files for each fold instead, and `results.json` of all
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.core.checks import import_optional
from dilated_attention_pytorch.files import check_files, json_line, write_whole
from dilated_attention_pytorch.measuring import keeping_threads
from dilated_attention_pytorch.models.config import EncoderConfig
from dilated_attention_pytorch.models.encoder import LongNetEncoder
from dilated_attention_pytorch.models.torchscale import load_torchscale_weights
from dilated_attention_pytorch.models.weights import CONFIG as MODEL_CONFIG
from dilated_attention_pytorch.models.weights import WEIGHTS, misfits
from dilated_attention_pytorch.slides.batches import Bags, Batch, epoch_order, make_batches, read_batches
from dilated_attention_pytorch.slides.config import SlidesConfig, fields_of, flags_of
from dilated_attention_pytorch.slides.objectives import Objective
from dilated_attention_pytorch.slides.pretraining import OF_ONE_TASK, MaskedEncoder
from dilated_attention_pytorch.slides.table import Case, Split, Study, check_splits, read_study, split_by_patient
from dilated_attention_pytorch.train import run_folder
from dilated_attention_pytorch.train.checkpoint import Checkpointer
from dilated_attention_pytorch.train.config import identity
from dilated_attention_pytorch.train.loop import interrupts
from dilated_attention_pytorch.train.memory import make_optimizer, make_scaler, prepare, set_learning_rate
from dilated_attention_pytorch.train.ranks import Ranks, Stopped, find_device, take_fastest_threads
from dilated_attention_pytorch.train.step import Update, check_broken, record_of

STUDY, MODEL, PREDICTIONS, RESULTS = "study.json", "model", "predictions.csv", "results.json"
Start = Path | dict[str, Tensor]  # weights to start from: a folder, or the tensors of a checkpoint of Prov-GigaPath
_SKIPPED = 5  # steps in a row that may be broken


def run_study(
    config: SlidesConfig, run: Path, *, resume: bool = False, say: Callable[[str], object] = print
) -> list[dict[str, Any]]:
    """Train on all folds of a study, in the folder `run`; returns the results of each.

    A new run needs a folder without one. With `resume` it continues, and folds that are finished are not repeated.
    A run that failed before it saved anything is begun anew. SIGTERM and Ctrl-C save, then raise `Stopped`. A figure
    that is not defined is None in the results. `say` is told what `read_study` finds.
    """
    known, has_begun = run / run_folder.CONFIG, _has_begun(run)
    if known.exists():
        if has_begun and not resume:
            raise FileExistsError(f"{run} already holds a run: continue it with --resume, or choose another --out")
        before, now = identity(SlidesConfig.from_json(known)), identity(config)
        if has_begun and (other := [name for name in now if now[name] != before[name]]):
            raise FileExistsError(
                f"{run} holds a run with other settings ({flags_of(other)}): leave them as they were, or start a run "
                "with another --out"
            )
    elif resume:
        raise FileNotFoundError(f"nothing to resume in {run}: it has no {known.name}")
    task = config.task if config.job == "train" else None
    start = None if config.start is None else read_start(Path(config.start))
    fields = fields_of(start)
    positions = config.positions or fields.get("positions")  # None: coordinates if all files have them
    study = read_study(
        Path(config.table),
        Path(config.features),
        task,
        skip_broken=config.skip_broken,
        tile_pixels=config.tile_pixels,
        grids=fields.get("grids", EncoderConfig.grids) if positions in (None, "coordinates") else None,
        needs_coordinates=positions == "coordinates",
        ignore_splits=config.folds > 0,
        say=say,
    )
    folders = {
        run / f"fold-{i}": split_by_patient(study, folds=config.folds, fold=i, seed=config.seed)
        for i in range(config.folds)
    }
    if not folders:
        has_splits = study.cases[0].split is not None
        folders = {run: study if has_splits else split_by_patient(study, folds=5, seed=config.seed)}
    wanted: tuple[Split, ...] = ("train", "validation", "test") if task else ("train", "validation")
    for folder, one in folders.items():
        check_splits(one, wanted, folder.name if config.folds else "")
        _batches_per_step(config, [case.found.rows for case in one.of("train")])
        if has_begun and (folder / STUDY).is_file():
            _check_same_slides(folder, one)
    with keeping_threads():
        take_fastest_threads(find_device(config.device))
        return _run_folds(config, folders, run, start)


def _has_begun(run: Path) -> bool:
    """Whether a run has saved anything."""
    folders = [run, *run.glob("fold-*")]
    return any(run_folder.list_checkpoints(one) or (one / run_folder.METRICS).is_file() for one in folders)


def _check_same_slides(folder: Path, study: Study) -> None:
    """Refuse to continue with other slides than a run began with; the table and the files may have moved."""
    before, now = json.loads((folder / STUDY).read_text())["splits"], _splits_of(study)
    if list(before.items()) != list(now.items()):
        other = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        detail = f"such as {', '.join(other[:3])}" if other else "in another order"
        raise ValueError(
            f"{folder} was begun with other slides or splits ({len(before)} slides before, {len(now)} now), {detail}: "
            "a resumed run may have another --table and --features only with the same slides, or choose another --out"
        )


def _splits_of(study: Study) -> dict[str, str | None]:
    return {case.name: case.split for case in study.cases}


def _batches_per_step(config: SlidesConfig, lengths: Sequence[int]) -> int:
    """As stated, else one; for survival as many as have 32 slides on average, because Cox's loss compares them.

    Raises if survival's slides would all be alone in their step.
    """
    if config.job != "train" or config.task != "survival":
        return config.accumulate or 1
    batches = make_batches(lengths, config.max_tiles, config.batch_size)
    if config.accumulate == 1 and max(map(len, batches)) < 2:
        raise ValueError(
            f"survival compares the slides of a step, and with --accumulate 1, --max-tiles {config.max_tiles:,} and "
            f"--batch-size {config.batch_size} each slide is alone, so nothing would be learned: leave --accumulate out"
        )
    return config.accumulate or math.ceil(32 * len(batches) / len(lengths))


def _run_folds(
    config: SlidesConfig, folders: Mapping[Path, Study], run: Path, start: Start | None
) -> list[dict[str, Any]]:
    results = []
    for i, (folder, one) in enumerate(folders.items(), 1):
        with run_folder.claim(folder):
            fold = None
            if not (folder / RESULTS).is_file():
                if config.folds:
                    print(f"fold     {i} of {config.folds}", flush=True)
                fold = _Fold(config, one, folder, start)
            write_whole(run / run_folder.CONFIG, config.to_json())  # only now: the model could be built
            if fold is not None:
                fold.train()
            results.append(json.loads((folder / RESULTS).read_text()))
    if config.folds:
        _write_json(run / RESULTS, {"folds": results})
    return results


class _Fold:
    """One training run; `records` has one entry per step."""

    def __init__(self, config: SlidesConfig, study: Study, run: Path, start: Start | None) -> None:
        self.config, self.study, self.run = config, study, run
        self.device = find_device(config.device)
        self.objective = Objective.of(study, class_weights=config.class_weights) if study.task else None
        torch.manual_seed(config.seed)
        kind, outputs = (LongNetEncoder, self.objective.outputs) if self.objective else (MaskedEncoder, 0)
        self.model = kind(config.encoder(study, outputs, fields_of(start)))
        if start is not None:
            load_start(self.model, start)
        prepare(self.model.to(self.device), config.memory)
        optimizer = make_optimizer(self.model, config.memory, lr=config.learning_rate, weight_decay=config.weight_decay)
        self.optimizer, ranks = optimizer, Ranks(device=self.device)
        scaler = make_scaler(config.memory, self.device)
        self.update = Update(self.model, optimizer, ranks, config.clip_norm, scaler)
        self.checkpointer = Checkpointer(run, self.model, self.model, optimizer, scaler, ranks, keep=1)
        coordinates = self.model.config.positions == "coordinates"
        self.bags = {
            split: Bags(study.of(split), coordinates=coordinates, tile_pixels=config.tile_pixels)
            for split in ("train", "validation", "test")
        }
        self.lengths = [case.found.rows for case in self.bags["train"].cases]
        batches = make_batches(self.lengths, config.max_tiles, config.batch_size)
        self.batches_per_step = _batches_per_step(config, self.lengths)
        self.steps_per_epoch = math.ceil(len(batches) / self.batches_per_step)
        self.steps = config.epochs * self.steps_per_epoch
        self.start = self.checkpointer.restore() if run_folder.list_checkpoints(run) else 0
        self.records = [one for one in run_folder.read_metrics(run) if one["step"] <= self.start] if self.start else []
        objective = None if self.objective is None else dataclasses.asdict(self.objective)
        _write_json(run / STUDY, {"objective": objective, "splits": _splits_of(study)})
        parameters = sum(x.numel() for x in self.model.parameters())
        counts = ", ".join(f"{len(bags)} {split}" for split, bags in self.bags.items())
        pattern = f"{self.model.config.segment_lengths} / {self.model.config.dilation_rates}"
        run_folder.record_start(run, self.start, self.device.type, parameters=parameters, slides=counts)
        classes = f"; classes {', '.join(study.classes)}" if study.classes else ""  # a label such as NA is one of them
        how = f"pooling {self.model.config.pooling}, positions {self.model.config.positions}"
        print(f"study    {counts}; {study.longest:,} rows at most, {study.dim} features{classes}")
        print(f"model    {parameters / 1e6:.2f}M parameters, {pattern}, {how}")
        print(f"run      {run}{f', from step {self.start}' if self.start else ''} on {self.device}", flush=True)

    def train(self) -> None:
        """Take the steps that are left, then write the best model, its predictions and its figures."""
        config, step, saved = self.config, self.start, self.start
        self.model.train()
        with interrupts(patient=False) as signals:
            steps = self._batches(self.start)
            ahead = next(steps, None)
            while ahead is not None and not self._is_exhausted():
                micro_batches = ahead
                step += 1
                began = time.perf_counter()
                torch.manual_seed(config.seed * 1_000_003 + step)  # so that a resumed run equals one that never stopped
                rate = config.learning_rate_at(step, self.steps)
                set_learning_rate(self.optimizer, rate)
                finish = self.update.begin(self._losses(micro_batches, step))
                ahead = next(steps, None)  # while a GPU computes
                outcome = finish()
                record = record_of(step, outcome, self.records) | {"learning_rate": rate}
                rows = sum(batch.features.shape[1] for batch in micro_batches)
                record["rows_per_second"] = rows / max(time.perf_counter() - began, 1e-9)
                self.records.append(record)
                if outcome.is_broken:
                    print(check_broken(outcome, self.records, _SKIPPED, saved, "lower --learning-rate"), flush=True)
                at_end = step % self.steps_per_epoch == 0
                if at_end:
                    self._validate(record)
                if at_end or signals:
                    run_folder.write_metrics(self.run, self.records)
                    self.checkpointer.save(step, self._validated())
                    saved = step
                if signals:
                    self.checkpointer.close()
                    print(f"stopped after step {step}; continue with --resume", flush=True)
                    raise Stopped(signals[-1])
        self.checkpointer.close()
        self._finish()

    def _batches(self, done: int) -> Iterator[list[Batch]]:
        """The micro-batches of each step that is left; they depend on seed and step alone.

        The first of a step is copied to the device when it is asked for, the others when they are used.
        """
        config = self.config
        for epoch in range(done // self.steps_per_epoch, config.epochs):
            seed = config.seed * 1_000_003 + epoch
            order = epoch_order(self.lengths, config.max_tiles, config.batch_size, seed)
            first = max(0, done - epoch * self.steps_per_epoch) * self.batches_per_step
            reader = read_batches(self.bags["train"], order[first:], workers=config.readers)
            for _ in range(first, len(order), self.batches_per_step):
                first_batch, *others = (batch for _, batch in zip(range(self.batches_per_step), reader))
                yield [first_batch.to(self.device), *others]

    def _losses(self, batches: Sequence[Batch], step: int) -> Iterator[Tensor]:
        count = sum(len(batch.numbers) for batch in batches)
        if self.objective is not None and self.objective.task == "survival" and len(batches) > 1:
            yield from (loss / count for loss in self._joint_losses(batches))
            return
        draw = torch.Generator().manual_seed(self.config.seed * 1_000_003 + step)
        for batch in batches:
            yield self._loss(batch.to(self.device), draw)[0] / count

    def _joint_losses(self, batches: Sequence[Batch]) -> Iterator[Tensor]:
        """Losses of micro-batches whose sum has the value and the gradient of one loss over all their slides.

        A first pass, without gradients, finds all outputs and the gradient of the loss with respect to each. The second
        pass draws the same dropout.
        """
        assert self.objective is not None
        draw = torch.Generator()  # only pretraining draws from it
        with torch.no_grad(), torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            outputs = [self._loss(batch.to(self.device), draw)[1].float() for batch in batches]
        found = torch.cat(outputs).requires_grad_()
        total = self.objective.loss(found, torch.cat([batch.targets for batch in batches]).to(self.device))
        (slopes,) = torch.autograd.grad(total, found)
        for batch, before, slope in zip(batches, outputs, slopes.split([len(one) for one in outputs])):
            now = self._loss(batch.to(self.device), draw)[1].float()
            yield total.detach() / len(batches) + ((now - before) * slope).sum()

    def _loss(self, batch: Batch, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """The summed loss of a batch, and the model's outputs."""
        with self.config.memory.autocast(self.device):
            if self.objective is None:
                assert isinstance(self.model, MaskedEncoder)
                return self.model.loss(batch, self.config.mask_share, self.config.mask_block, draw), batch.targets
            outputs = self.model(**batch.inputs)
            return self.objective.loss(outputs, batch.targets), outputs

    def _evaluate(self, split: Split) -> tuple[float, Tensor]:
        """The mean loss of a split, and the predictions for its cases in their order.

        Cox's loss compares all cases of the split, whichever batches they are in.
        """
        config, bags = self.config, self.bags[split]
        batches = make_batches([case.found.rows for case in bags.cases], config.max_tiles, config.batch_size)
        total, found = 0.0, dict[int, Tensor]()
        draw = torch.Generator().manual_seed(config.seed)  # the same hidden rows every time
        self.model.eval()
        with torch.no_grad():
            for batch in read_batches(bags, batches, workers=config.readers):
                loss, outputs = self._loss(batch.to(self.device), draw)
                total += float(loss)
                found |= dict(zip(batch.numbers.tolist(), outputs.double().cpu()))
        self.model.train()
        outputs = torch.stack([found[i] for i in range(len(bags))])
        if self.objective is None:
            return total / len(bags), outputs
        loss = self.objective.loss(outputs, torch.tensor([case.target for case in bags.cases]))
        return float(loss) / len(bags), self.objective.predictions(outputs)

    def _validate(self, record: dict[str, Any]) -> None:
        loss, predictions = self._evaluate("validation")
        record["validation_loss"] = loss
        shown = ""
        if self.objective is not None:
            figures = self.objective.figures(predictions, self.bags["validation"].cases)
            record |= {f"validation_{name}": value for name, value in figures.items()}
            shown = "".join(f", {name.replace('_', ' ')} {value:.3f}" for name, value in figures.items())
        epoch = record["step"] // self.steps_per_epoch
        trained = self.records[-self.steps_per_epoch :]
        mean = sum(one.get("loss", math.nan) for one in trained) / len(trained)
        print(f"epoch    {epoch}: loss {mean:.4f}, validation {loss:.4f}{shown}", flush=True)

    def _validated(self) -> dict[int, float]:
        return {one["step"]: one["validation_loss"] for one in self.records if "validation_loss" in one}

    def _is_exhausted(self) -> bool:
        """Whether the validation loss has not fallen for `patience` epochs."""
        losses, patience = list(self._validated().values()), self.config.patience
        return bool(patience and losses) and len(losses) - 1 - losses.index(min(losses)) >= patience

    def _finish(self) -> None:
        best = run_folder.best_checkpoint(self.run, self._validated())
        folder = best or run_folder.list_checkpoints(self.run)[-1]
        self.model.load_state_dict(type(self.model).from_pretrained(folder).state_dict())
        self._encoder().save_pretrained(self.run / MODEL)
        if self.config.checkpointing != "none":
            self.model.gradient_checkpointing_enable(False)
        results: dict[str, Any] = {"best_step": int(folder.name.removeprefix("step-"))}
        results["validation"] = {"loss": min(self._validated().values())}
        if self.objective is not None:
            predicted: dict[Split, Tensor] = {}
            for split in ("validation", "test"):
                loss, predicted[split] = self._evaluate(split)
                results[split] = {"loss": loss, **self.objective.figures(predicted[split], self.bags[split].cases)}
            text = predictions_csv(self.objective, {s: (self.bags[s].cases, predicted[s]) for s in predicted})
            write_whole(self.run / PREDICTIONS, text)
            shown = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in results["test"].items())
            print(f"test     {shown}", flush=True)
        _write_json(self.run / RESULTS, results)

    def _encoder(self) -> LongNetEncoder:
        """The model, without what only pretraining needs."""
        if self.objective is not None:
            return self.model
        plain, state = LongNetEncoder(self.model.config), self.model.state_dict()
        plain.load_state_dict({name: state[name] for name in plain.state_dict()})
        return plain


def predictions_csv(objective: Objective, found: dict[Split, tuple[list[Case], Tensor]]) -> str:
    """One line per slide: its split and truth, then its probabilities, its predicted label or its risk."""
    stream = io.StringIO()
    truth = ["time", "event"] if objective.task == "survival" else ["label"]
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["slide", "patient", "split", *truth, *objective.columns])
    for split, (cases, predictions) in found.items():
        for case, row in zip(cases, predictions.tolist()):
            known = [case.label] if objective.task == "classification" else [f"{x:.10g}" for x in case.target]
            writer.writerow([case.name, case.patient, split, *known, *(f"{x:.6g}" for x in row)])
    return stream.getvalue()


def model_folder(path: Path) -> Path:
    """The folder of weights that a run, its fold or a folder of weights has."""
    for folder in (path / MODEL, path):
        if (folder / WEIGHTS).is_file():
            return folder
    folds = sorted(path.glob(f"fold-*/{MODEL}"))
    hint = f"name one of its folds, such as {folds[0].parent}" if folds else "it is not a finished run"
    raise FileNotFoundError(f"no model in {path}: {hint}")


def run_config(path: Path) -> SlidesConfig | None:
    """The settings of the run that a folder, as `model_folder` takes it, belongs to; None of weights alone."""
    fold = model_folder(path).resolve().parent
    run = fold if (fold / run_folder.CONFIG).is_file() else fold.parent
    is_run = (fold / STUDY).is_file() and (run / run_folder.CONFIG).is_file()
    return SlidesConfig.from_json(run / run_folder.CONFIG) if is_run else None


def read_start(path: Path) -> Start:
    """The folder of another run's weights, or the tensors of a checkpoint of Prov-GigaPath's slide encoder."""
    if not path.is_file():
        return model_folder(path)
    held = torch.load(path, map_location="cpu", weights_only=True)
    tensors = held.get("model", held) if isinstance(held, dict) else held
    if not isinstance(tensors, dict) or "patch_embed.proj.weight" not in tensors:
        raise ValueError(f"{path} is not a checkpoint of Prov-GigaPath's slide encoder: no patch_embed.proj.weight")
    return tensors


def load_start(model: LongNetEncoder, start: Start) -> None:
    """Give a model the weights that `read_start` found.

    The head stays as it is, and so does what only pretraining has, and an attention pool that the other model lacks.
    """
    if isinstance(start, dict):
        load_torchscale_weights(model, start)
        return
    check_files(start, (MODEL_CONFIG, WEIGHTS))
    read = import_optional("safetensors.torch", "train", "loading weights").load_file
    taken = {name: x for name, x in read(start / WEIGHTS).items() if not name.startswith(OF_ONE_TASK)}
    own = {name: x for name, x in model.state_dict().items() if not name.startswith(OF_ONE_TASK)}
    wanted = {name: tuple(x.shape) for name, x in own.items() if name in taken or not name.startswith("pool.")}
    if problems := misfits({name: tuple(x.shape) for name, x in taken.items()}, wanted):
        raise ValueError(
            f"the weights in {start} do not fit the model: {'; '.join(sorted(problems)[:6])}. Use features of the same "
            f"size, and the pooling that {MODEL_CONFIG} there names"
        )
    model.load_state_dict(model.state_dict() | taken)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    """Numbers that are not finite become `null`, which JSON has."""
    write_whole(path, json.dumps(json.loads(json_line(values)), indent=2) + "\n")
