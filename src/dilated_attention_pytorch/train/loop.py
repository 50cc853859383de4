"""The training loop: read top to bottom. Everything it needs to continue is in the run folder."""

from __future__ import annotations

import dataclasses
import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from dilated_attention_pytorch.core.checks import import_optional
from dilated_attention_pytorch.files import sweep_partials, write_whole
from dilated_attention_pytorch.models.longnet import LongNetLM
from dilated_attention_pytorch.train.checkpoint import Checkpointer, list_checkpoints, naming_a_full_disk
from dilated_attention_pytorch.train.config import TrainConfig
from dilated_attention_pytorch.train.data import Batch, Corpus, open_corpus
from dilated_attention_pytorch.train.memory import MemoryOptions, make_optimizer, prepare
from dilated_attention_pytorch.train.monitor import Monitors, peak_memory
from dilated_attention_pytorch.train.presets import float32_products
from dilated_attention_pytorch.train.ranks import Ranks, Stopped, join_ranks
from dilated_attention_pytorch.train.report import draw_curve, sparkline
from dilated_attention_pytorch.train.run_folder import (
    CONFIG,
    CORPUS,
    claim,
    has_sample,
    read_metrics,
    record_start,
    write_metrics,
    write_sample,
)
from dilated_attention_pytorch.train.stages import Stage, has_pattern, update_attention_config
from dilated_attention_pytorch.train.step import Outcome, Stepper, check_broken, record_of
from dilated_attention_pytorch.train.token_files import private_folder
from dilated_attention_pytorch.train.tokenizer import TOKENIZER, Tokenizer, run_tokenizer
from dilated_attention_pytorch.train.zero import ZeroModel, check_zero

Resume = bool | Literal["auto"]


def train(config: TrainConfig, run: Path, *, resume: Resume = False) -> dict[str, Any]:
    """Train until `config.steps`, in the folder `run`; returns the final figures.

    A new run needs a folder without checkpoints. `resume=True` continues from the newest one, and `"auto"` does so if
    there is one. Ranks that torchrun restarts resume by themselves. SIGTERM and Ctrl-C save, then raise `Stopped`.
    """
    shared = {"sequence": config.sequence_parallel, "tensor": config.tensor_parallel}
    with (
        float32_products(config.tf32),
        join_ranks(config.device, config.timeout_seconds, **shared) as ranks,
        ExitStack() as claims,
    ):
        job = _set_up(config, run, "auto" if ranks.restarts else resume, ranks, claims)
        _run_steps(job)
    if not ranks.first:
        return _figures(job)
    # The other ranks are gone with their shards, and sampling needs nothing of what saves memory in training.
    if ranks.mesh is not None or config.memory != MemoryOptions():
        job.plain = LongNetLM.from_pretrained(list_checkpoints(run)[-1], device=ranks.device)
    return _report(job)


@dataclass
class _Job:
    """A run that is ready to take its steps; `records` has one entry per step that it has taken."""

    config: TrainConfig
    run: Path
    ranks: Ranks
    tokenizer: Tokenizer
    corpus: Corpus
    plain: LongNetLM  # the model, and `stepper.model` is what the ranks made of it
    stepper: Stepper
    checkpointer: Checkpointer
    start: int
    records: list[dict[str, Any]]
    baselines: dict[str, float]


def _set_up(config: TrainConfig, run: Path, resume: Resume, ranks: Ranks, claims: ExitStack) -> _Job:
    """Claim the folder, open the corpus, build the model, and restore the newest checkpoint of a run that goes on."""
    ranks.check_same(dataclasses.asdict(config))
    ranks.on_first(lambda: _claim(run, resume, claims))
    found = ranks.on_first(lambda: _is_to_resume(config, run, resume))
    batch_size = _check_batches(config, ranks)
    if config.zero is not None:
        check_zero(config.zero, ranks)

    tokenizer = ranks.on_first(lambda: run_tokenizer(config.tokenizer, run, config.model.vocab_size, resuming=found))
    cache = Path(config.token_cache or run.parent / "token-cache")
    if not config.token_cache:
        ranks.on_first(lambda: private_folder(cache))
    longest = max(stage.sequence_length for stage in config.stages or (config,))
    bar = _progress_bar()
    corpus = open_corpus(config.data, longest, cache, tokenizer=tokenizer, ranks=ranks, progress=bar, apart=[run])
    ranks.check_same({"corpus": corpus.content})

    torch.manual_seed(config.seed)
    plain = LongNetLM(config.model).to(ranks.device)
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    prepare(plain, config.memory)
    model = ranks.share(plain, config.engine)
    optimizer = make_optimizer(
        _parameter_groups(model, config.weight_decay),
        config.memory,
        lr=config.learning_rate,
        betas=(0.9, 0.95),
        # One pass over main memory.
        **({"fused": True} if config.zero is not None and config.zero.offloads else {}),
    )
    if config.zero is not None:
        model = ZeroModel(
            plain,
            optimizer,
            config.zero,
            ranks,
            batch_size=batch_size,
            clip_norm=config.clip_norm,
            accumulate=config.accumulate,
            memory=config.memory,
        )
    stepper = Stepper(model, optimizer, config, ranks)
    beside = {} if tokenizer.content is None else {TOKENIZER: tokenizer.content}
    checkpointer = Checkpointer(run, plain, model, optimizer, stepper.scaler, ranks, config.keep_checkpoints, beside)
    start = checkpointer.restore() if found else 0
    _enter_stage(model, config, max(start, 1))
    if start >= config.steps and resume != "auto" and ranks.on_first(lambda: has_sample(run, start)):
        raise ValueError(f"{run} has finished its {start} steps: raise --steps to train on")

    records = ranks.on_first(lambda: _write_settings(config, run, start, corpus, beside))
    baselines = {"unigram_bits": corpus.unigram_bits(), "bigram_bits": corpus.bigram_bits()}
    known = {"corpus": corpus.source, "parameters": parameters, "baselines": baselines}
    many = {} if ranks.mesh is None else {"ranks": ranks.mesh.size()}
    ranks.on_first(lambda: record_start(run, start, ranks.device.type, **known, **many))
    job = _Job(config, run, ranks, tokenizer, corpus, plain, stepper, checkpointer, start, records, baselines)
    if ranks.first:
        _introduce(job, parameters)
    return job


def _introduce(job: _Job, parameters: int) -> None:
    config, ranks, start = job.config, job.ranks, job.start
    print(f"corpus   {job.corpus.source}")
    print(
        f"model    {parameters / 1e6:.1f}M parameters, {config.model.segment_lengths} / {config.model.dilation_rates}"
    )
    shared = ""
    if ranks.mesh is not None:
        axes = [f", {name} {ranks.axis(name)}" for name in ("sequence", "tensor") if ranks.axis(name) > 1]
        shared = f", {ranks.mesh.size()} ranks ({config.engine}{''.join(axes)})"
    print(f"run      {job.run}{f', from step {start}' if start else ''} on {ranks.device}{shared}", flush=True)
    if "prometheus" in config.monitors:
        print(f"metrics  http://{config.prometheus_address}/metrics", flush=True)


def _run_steps(job: _Job) -> None:
    """Take the steps that are left: train, validate, record, save."""
    config, ranks, stepper, corpus, checkpointer = job.config, job.ranks, job.stepper, job.corpus, job.checkpointer
    records, start = job.records, job.start
    ahead = _read_ahead(corpus, config, start + 1, stepper.packed_rows)
    ranks.fail_together(ahead.error)
    saved, stall = start, 0.0
    skipped = sum("skipped" in record for record in records)
    with (
        Monitors() as monitors,
        _Interrupt(patient=ranks.mesh is not None) as interrupt,
        _progress_bar()(
            total=config.steps, initial=start, unit="step", dynamic_ncols=True, disable=not ranks.first
        ) as bar,
    ):
        # On the first rank alone; where that fails, all of them raise.
        ranks.on_first(lambda: monitors.open(config.monitors, job.run, start, config.prometheus_address))
        for step in range(start + 1, config.steps + 1):
            began = time.perf_counter()
            stage, step_of_stage = _enter_stage(stepper.model, config, step)
            if config.stages and ranks.first and (step_of_stage == 1 or step == start + 1):
                pattern = f"{stage.segment_lengths} / {stage.dilation_rates}"
                bar.write(f"stage    {stage.sequence_length:,} tokens, {pattern}, from step {step - step_of_stage + 1}")

            now = ahead
            outcome = _step(stepper, now.training, config, step, ranks)
            ahead = _read_ahead(corpus, config, step + 1, stepper.packed_rows)
            seconds = time.perf_counter() - began

            record = record_of(step, outcome, records, corpus.training.tokens_per_byte)
            record["learning_rate"] = config.learning_rate_at(step)
            records.append(record)
            if outcome.is_broken:
                skipped += 1
                said = check_broken(outcome, records, config.skip_broken_steps, saved)
                if ranks.first:
                    bar.write(said)
            if now.validation:
                record["validation_bits"] = validate(stepper, corpus, now.validation)

            # The ranks speak to each other once per step: who is to stop, whose save has failed, who cannot read on,
            # who was slowest, who holds most.
            branches = [f"w{w} r{r}" for w, r in zip(stage.segment_lengths, stage.dilation_rates)]
            received = ranks.bytes_received(len(branches))
            troubles = interrupt.signal, checkpointer.failed, ahead.error is not None
            looked = ranks.gather(seconds, peak_memory(ranks.device), *troubles, *received)
            seconds, memory, stop, failed, unreadable, *received = looked.amax(0).tolist()
            record["tokens_per_second"] = stage.batch_size * stage.sequence_length / seconds
            record["peak_memory_bytes"] = memory

            if failed:
                checkpointer.settle()
            if step % config.checkpoint_every == 0 or step == config.steps or stop or unreadable:
                began = time.perf_counter()
                # Before the checkpoint: resuming leaves out records after it, and could not make up for missing ones.
                ranks.on_first(lambda: write_metrics(job.run, records))
                checkpointer.save(step)
                saved, stall = step, time.perf_counter() - began
            figures = {
                **{name: value for name, value in record.items() if name not in ("step", "skipped")},
                "skipped_steps": skipped,
                "step_seconds": seconds,
                "checkpoint_stall_seconds": stall,
                "restarts": ranks.restarts,
            }
            if received:
                figures["branch_bytes"] = dict(zip(branches, received))
            monitors.log(figures, step)
            bar.set_postfix(_shown(records), refresh=False)
            bar.update()
            if stop and step < config.steps:
                checkpointer.close()
                bar.close()
                if ranks.first:
                    print(f"stopped after step {step}; continue with --resume {job.run}", flush=True)
                raise Stopped(int(stop))
            if unreadable:
                checkpointer.close()
                ranks.fail_together(ahead.error)
        checkpointer.close()  # a Ctrl-C must not cut off the last save
    if not records or "validation_bits" not in records[-1]:
        # Nothing was left to do after a stop between validations, or after the records were moved away.
        batches = list(_validation_batches(corpus, config, start, stepper.packed_rows))
        records.append({"step": start, "validation_bits": validate(stepper, corpus, batches)})


def _step(stepper: Stepper, batch: Batch, config: TrainConfig, step: int, ranks: Ranks) -> Outcome:
    # Batches and dropout depend on (seed, step, token rank) alone, so that a resumed run is the run that never stopped.
    torch.manual_seed(config.seed * 1_000_003 + step + (ranks.token_rank << 40))
    return stepper.step(batch, config.learning_rate_at(step))


def validate(stepper: Stepper, corpus: Corpus, batches: Sequence[Batch]) -> float:
    """Bits per byte of batches of the validation split."""
    stepper.model.eval()
    losses = [stepper.evaluate(batch) for batch in batches]
    stepper.model.train()
    return sum(losses) / len(losses) / math.log(2.0) * corpus.validation.tokens_per_byte


def _check_batches(config: TrainConfig, ranks: Ranks) -> int:
    """Refuse batches that ranks and micro-batches do not divide; returns the sequences of a rank's micro-batch."""
    size = 0
    for stage in config.stages or (config,):
        if stage.batch_size % ranks.data_ranks:
            raise ValueError(
                f"{ranks.data_ranks} ranks must divide the batch: choose another --batch-size than {stage.batch_size}"
            )
        part = stage.batch_size // ranks.data_ranks
        if part % config.accumulate:
            raise ValueError(
                f"{config.accumulate} micro-batches must divide a rank's part of the batch, which is {part}: choose "
                "another --accumulate or --batch-size"
            )
        size = part // config.accumulate
    return size


def _enter_stage(model: nn.Module, config: TrainConfig, step: int) -> tuple[Stage, int]:
    """Give the model the pattern of a step's stage; returns the stage and the step's number within it."""
    stage, step_of_stage = config.stage_at(step)
    if not has_pattern(model, stage):
        update_attention_config(model, stage)
    return stage, step_of_stage


def _claim(run: Path, resume: Resume, claims: ExitStack) -> None:
    """Take the folder before anything in it is read, and sweep what killed processes left there."""
    if resume is True and not run.is_dir():
        raise FileNotFoundError(f"nothing to resume in {run}: there is no such folder")
    with naming_a_full_disk(run, "the settings of the run"):
        claims.enter_context(claim(run))
    for folder in (run, run / "samples"):
        sweep_partials(folder)


def _is_to_resume(config: TrainConfig, run: Path, resume: Resume) -> bool:
    found = bool(list_checkpoints(run))
    if found and not resume:
        raise FileExistsError(f"{run} already holds a run: continue it with --resume {run}, or choose another --out")
    if not found and resume is True:
        raise FileNotFoundError(f"nothing to resume in {run}: it has no complete checkpoint")
    if found and resume == "auto" and not config.is_same_run(TrainConfig.from_json(run / CONFIG)):
        raise FileExistsError(f"{run} holds a run with other settings: choose another --out")
    return found


def _write_settings(
    config: TrainConfig, run: Path, start: int, corpus: Corpus, beside: Mapping[str, bytes]
) -> list[dict[str, Any]]:
    """Write what the run is into its folder; returns the records up to `start`."""
    with naming_a_full_disk(run, "the settings of the run"):
        corpus.remember(run / CORPUS, resuming=start > 0)
        write_whole(run / CONFIG, lambda path: path.write_text(config.to_json()))
        for name, content in beside.items():
            write_whole(run / name, methodcaller("write_bytes", content))
    return [record for record in read_metrics(run) if record["step"] <= start]


class _Ahead(NamedTuple):
    """What a step takes, read before the ranks agree to take it, or why it could not be read."""

    training: Batch
    validation: list[Batch]
    error: OSError | None = None


def _read_ahead(corpus: Corpus, config: TrainConfig, step: int, rows: int) -> _Ahead:
    nothing = Batch(torch.empty(0), torch.empty(0))
    if step > config.steps:
        return _Ahead(nothing, [])
    stage, step_of_stage = config.stage_at(step)
    try:
        batch = corpus.training_batch(
            stage.batch_size,
            stage.sequence_length,
            config.seed,
            step_of_stage if config.settled_order == "epochs" else step,  # a stage's sequences make epochs of their own
            order=config.settled_order,
            rows=rows,
        )
        validates = step % config.validate_every == 0 or step == config.steps
        return _Ahead(batch, list(_validation_batches(corpus, config, step, rows)) if validates else [])
    except OSError as error:
        return _Ahead(nothing, [], error)


def _validation_batches(corpus: Corpus, config: TrainConfig, step: int, rows: int) -> Iterator[Batch]:
    """Sequences of the step's stage."""
    stage, _ = config.stage_at(step)
    return corpus.validation_batches(stage.batch_size, stage.sequence_length, config.validation_batches, rows=rows)


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def _shown(records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The newest figures, as the progress bar shows them."""
    formats = {
        "loss": ("loss", ".3f"),
        "loss_ema": ("smoothed", ".3f"),
        "bits": ("bits/byte", ".3f"),
        "tokens_per_second": ("tokens/s", ",.0f"),
        "validation_bits": ("validation", ".3f"),
    }
    newest = {key: next((record[key] for record in reversed(records) if key in record), None) for key in formats}
    return {name: f"{newest[key]:{how}}" for key, (name, how) in formats.items() if newest[key] is not None}


class _Interrupt:
    """Turns SIGTERM and the first Ctrl-C into a wish to stop after the step under way; a second Ctrl-C stops at once.

    A `patient` one takes any number: under torchrun both the terminal and the agent pass a Ctrl-C on.
    """

    signal = 0  # the one that came, if any

    def __init__(self, *, patient: bool) -> None:
        self._patient = patient

    def __enter__(self) -> _Interrupt:
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        if threading.current_thread() is threading.main_thread():
            for number in self._before:
                signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, _: object) -> None:
        if self.signal == number == signal.SIGINT and not self._patient:
            raise KeyboardInterrupt
        self.signal = number


def _report(job: _Job) -> dict[str, Any]:
    """Print the result, draw the curve and write a sample; returns the final figures."""
    records, unigram, bigram = job.records, job.baselines["unigram_bits"], job.baselines["bigram_bits"]
    print(f"training {sparkline([record['bits'] for record in records if 'bits' in record])}")
    print(f"result   {records[-1]['validation_bits']:.3f} bits per byte on the validation split")
    print(f"to beat  {bigram:.3f} by byte pairs (bigram) of the training split, {unigram:.3f} by bytes (unigram)")
    picture = draw_curve(records, job.baselines, job.run / "loss.png")
    if picture is not None:
        print(f"curve    {picture}")
    device = job.ranks.device
    prompt = torch.tensor([job.tokenizer.encode("def ") or [0]], device=device)
    generator = torch.Generator(device).manual_seed(job.config.seed)
    generated = job.plain.generate(prompt, job.config.sample_bytes, temperature=0.8, top_k=40, generator=generator)
    sample = job.tokenizer.decode(generated[0].tolist())
    write_sample(job.run, records[-1]["step"], sample)  # last: a resumed run that lacks it makes all of this again
    print(f"sample\n{sample}")
    return {**_figures(job), "sample": sample}


def _figures(job: _Job) -> dict[str, Any]:
    last = job.records[-1]
    return {"validation_bits": last["validation_bits"], **job.baselines, "steps": last["step"]}


def _progress_bar() -> Any:
    return import_optional("tqdm", "train", "training").tqdm
