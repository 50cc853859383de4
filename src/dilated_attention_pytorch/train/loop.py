"""The training loop: read top to bottom. Everything it needs to continue is in the run folder."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from dilated_attention_pytorch.core import environment
from dilated_attention_pytorch.core.checks import import_optional
from dilated_attention_pytorch.files import sweep_partials, write_whole
from dilated_attention_pytorch.measuring import fastest_threads, keeping_threads, thread_rates, usable_cores
from dilated_attention_pytorch.models.longnet import LongNetLM
from dilated_attention_pytorch.train import run_folder
from dilated_attention_pytorch.train.checkpoint import Checkpointer
from dilated_attention_pytorch.train.config import SAMPLE_PROMPT, TrainConfig
from dilated_attention_pytorch.train.data import Batch, open_corpus
from dilated_attention_pytorch.train.memory import MemoryOptions, compile_now, make_optimizer, prepare, uncompile
from dilated_attention_pytorch.train.monitor import Monitors, peak_memory
from dilated_attention_pytorch.train.presets import float32_products
from dilated_attention_pytorch.train.ranks import Ranks, Stopped, join_ranks
from dilated_attention_pytorch.train.report import draw_curve, sparkline
from dilated_attention_pytorch.train.stages import Stage, has_pattern, update_attention_config
from dilated_attention_pytorch.train.step import Stepper, check_broken, record_of
from dilated_attention_pytorch.train.token_files import private_folder
from dilated_attention_pytorch.train.tokenizer import TOKENIZER, run_tokenizer
from dilated_attention_pytorch.train.zero import ZeroModel, check_zero

Resume = bool | Literal["auto"]


def train(config: TrainConfig, run: Path, *, resume: Resume = False) -> dict[str, Any]:
    """Train until `config.steps`, in the folder `run`; returns the final figures.

    A new run needs a folder without checkpoints. `resume=True` continues from the newest one, and `"auto"` does so if
    there is one. Ranks that torchrun restarts resume by themselves. SIGTERM and Ctrl-C save, then raise `Stopped`.
    """
    shared = {"sequence": config.sequence_parallel, "tensor": config.tensor_parallel}
    with keeping_threads():
        with (
            float32_products(config.tf32),
            join_ranks(config.device, config.timeout_seconds, **shared) as ranks,
            ExitStack() as claims,
        ):
            trainer = _Trainer(config, run, "auto" if ranks.restarts else resume, ranks, claims)
            trainer.take_steps()
        return trainer.report() if ranks.first else trainer.figures()


class _Ahead(NamedTuple):
    """The batches of a step, read before the ranks agree to take it, or why they could not be read."""

    training: Batch
    validation: list[Batch]
    error: OSError | None = None


class _Trainer:
    """A run that is ready to take its steps; `records` has one entry per step that it has taken."""

    def __init__(self, config: TrainConfig, run: Path, resume: Resume, ranks: Ranks, claims: ExitStack) -> None:
        """Claim the folder, open the corpus, build the model, and restore the newest checkpoint of a resumed run."""
        self.config, self.run, self.ranks = config, run, ranks
        ranks.check_same(dataclasses.asdict(config))
        ranks.on_first(lambda: self._claim(resume, claims))
        found = ranks.on_first(lambda: self._is_to_resume(resume))
        self._check_batches()
        threads, why = ranks.on_first(lambda: self._choose_threads(resuming=found))
        torch.set_num_threads(threads)
        if config.zero is not None:
            check_zero(config.zero, ranks)

        vocab_size = config.model.vocab_size
        self.tokenizer = ranks.on_first(lambda: run_tokenizer(config.tokenizer, run, vocab_size, resuming=found))
        if config.sample_prompt != SAMPLE_PROMPT and not self.tokenizer.encode(config.sample_prompt):
            raise ValueError(f"the tokenizer makes no token of --sample-prompt {config.sample_prompt!r}: give another")
        cache = Path(config.token_cache or run.parent / "token-cache")
        if not config.token_cache:
            ranks.on_first(lambda: private_folder(cache))
        longest = max(stage.sequence_length for stage in config.schedule)
        self._bar = import_optional("tqdm", "train", "training").tqdm
        self.corpus = open_corpus(
            config.data, longest, cache, tokenizer=self.tokenizer, ranks=ranks, progress=self._bar, apart=[run]
        )
        ranks.check_same({"corpus": self.corpus.content})
        self.baselines = {"unigram_bits": self.corpus.unigram_bits(), "bigram_bits": self.corpus.bigram_bits()}

        torch.manual_seed(config.seed)
        self.plain = LongNetLM(config.model).to(ranks.device)
        parameters = sum(parameter.numel() for parameter in self.plain.parameters())
        prepare(self.plain, config.memory)
        self._compile()
        self._compiled_for = _shape(config.schedule[0])
        model = ranks.share(self.plain, config.engine)
        optimizer = make_optimizer(
            model,
            config.memory,
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=config.weight_decay,
            # DeepSpeed decides where the update runs: in main memory, which the fused one reads once, or elsewhere.
            **({} if config.zero is None else {"fused": config.zero.offloads or None}),
        )
        if config.zero is not None:
            model = ZeroModel(self.plain, optimizer, config, ranks)
        self.stepper = Stepper(model, optimizer, config, ranks)
        beside = {} if self.tokenizer.content is None else {TOKENIZER: self.tokenizer.content}
        self.checkpointer = Checkpointer(
            run, self.plain, model, optimizer, self.stepper.scaler, ranks, config.keep_checkpoints, beside
        )
        self.start = start = self.checkpointer.restore() if found else 0
        self._enter_stage(max(start, 1))
        if start >= config.steps and resume != "auto" and ranks.on_first(run_folder.sample_path(run, start).is_file):
            raise ValueError(f"{run} has finished its {start} steps: raise --steps to train on")

        self.records = ranks.on_first(lambda: self._write_settings(beside))
        known = {"corpus": self.corpus.source, "parameters": parameters, "baselines": self.baselines}
        many = {} if ranks.mesh is None else {"ranks": ranks.mesh.size()}
        ranks.on_first(lambda: run_folder.record_start(run, start, ranks.device.type, **known, **many))
        if ranks.first:
            self._introduce(parameters)
            if ranks.device.type == "cpu":
                print(f"threads  {threads}: {why}", flush=True)

    def _claim(self, resume: Resume, claims: ExitStack) -> None:
        """Take the folder before anything in it is read, and sweep what killed processes left there."""
        if resume is True and not self.run.is_dir():
            raise FileNotFoundError(f"nothing to resume in {self.run}: there is no such folder")
        with run_folder.naming_a_full_disk(self.run, "the settings of the run"):
            claims.enter_context(run_folder.claim(self.run))
        for folder in (self.run, self.run / "samples"):
            sweep_partials(folder)

    def _is_to_resume(self, resume: Resume) -> bool:
        run, found = self.run, bool(run_folder.list_checkpoints(self.run))
        if found and not resume:
            raise FileExistsError(
                f"{run} already holds a run: continue it with --resume {run}, or choose another --out"
            )
        if not found and resume is True:
            raise FileNotFoundError(f"nothing to resume in {run}: it has no complete checkpoint")
        if found and resume == "auto" and not self.config.is_same_run(TrainConfig.from_json(run / run_folder.CONFIG)):
            raise FileExistsError(f"{run} holds a run with other settings: choose another --out")
        return found

    def _check_batches(self) -> None:
        """Refuse batches that ranks and micro-batches do not divide."""
        ranks, accumulate = self.ranks.axis("data"), self.config.accumulate
        for stage in self.config.schedule:
            if stage.batch_size % ranks:
                raise ValueError(
                    f"--batch-size must be a multiple of the {ranks} ranks that share it, got {stage.batch_size}"
                )
            if stage.batch_size // ranks % accumulate:
                raise ValueError(
                    f"{accumulate} micro-batches must divide a rank's part of the batch, which is "
                    f"{stage.batch_size // ranks}: choose another --accumulate or --batch-size"
                )

    def _choose_threads(self, *, resuming: bool) -> tuple[int, str]:
        """The number of PyTorch's threads, and what decides it."""
        config, ranks, now = self.config, self.ranks, torch.get_num_threads()
        if config.threads is not None:
            return config.threads, "as --threads states"
        if ranks.device.type != "cpu":
            return now, "PyTorch's default"
        if environment.value("OMP_NUM_THREADS"):
            beside = "" if ranks.mesh is None else " (with --ranks, 1 if you do not set it)"
            return now, f"as OMP_NUM_THREADS states{beside}"
        # Sums of another number of threads round differently, and a resumed run must equal one that never stopped.
        before = run_folder.last_threads(self.run, None if ranks.mesh is None else ranks.mesh.size())
        if resuming and before is not None and before <= usable_cores():
            return before, "as before the run was resumed; --threads or OMP_NUM_THREADS overrides it"
        rates = thread_rates()
        timed = ", ".join(f"{count}: {rate:.0f}" for count, rate in rates.items())
        why = f"the fastest now (GFLOP/s with {timed}); --threads or OMP_NUM_THREADS overrides it"
        return fastest_threads(rates), why

    def _compile(self) -> None:
        """Compile the layers before the first step; if a rank cannot, print why, and no rank does."""
        config, ranks = self.config, self.ranks
        if not config.memory.compile:
            return
        if ranks.first:
            print("compile  the layers before the first step; --no-compile skips this", flush=True)
        began = time.perf_counter()
        rows = config.batch_size // (ranks.axis("data") * config.accumulate)
        shape = (1, rows * config.sequence_length) if config.pack else (rows, config.sequence_length)
        tokens = torch.zeros(shape[0], -(-shape[1] // ranks.axis("sequence")), dtype=torch.int64, device=ranks.device)
        whole = {"cu_seqlens": torch.tensor([0, tokens.shape[1]], device=ranks.device)} if config.pack else {}
        why = compile_now(self.plain, tokens, config.memory, **whole)
        failed = next((one for one in ranks.gather_objects(why) if one), "")
        if failed:
            uncompile(self.plain)
        if ranks.first:
            seconds = f"{time.perf_counter() - began:.0f} s"
            warning = f"warning: failed after {seconds}, so layers run uncompiled: {failed}"
            print(f"compile  {warning if failed else f'done in {seconds}'}", flush=True)

    def _write_settings(self, beside: dict[str, bytes]) -> list[dict[str, Any]]:
        """Write what the run is into its folder; returns the records up to its start."""
        with run_folder.naming_a_full_disk(self.run, "the settings of the run"):
            self.corpus.remember(self.run / run_folder.CORPUS, resuming=self.start > 0)
            write_whole(self.run / run_folder.CONFIG, self.config.to_json())
            for name, content in beside.items():
                write_whole(self.run / name, content)
        return [record for record in run_folder.read_metrics(self.run) if record["step"] <= self.start]

    def _introduce(self, parameters: int) -> None:
        config, ranks, start = self.config, self.ranks, self.start
        print(f"corpus   {self.corpus.source}")
        print(f"model    {parameters / 1e6:.1f}M parameters, {config.model.pattern_in_words}")
        shared = ""
        if ranks.mesh is not None:
            axes = [f", {name} {ranks.axis(name)}" for name in ("sequence", "tensor") if ranks.axis(name) > 1]
            shared = f", {ranks.mesh.size()} rank{'s' * (ranks.mesh.size() > 1)} ({config.engine}{''.join(axes)})"
        print(f"run      {self.run}{f', from step {start}' if start else ''} on {ranks.device}{shared}", flush=True)
        if "prometheus" in config.monitors:
            print(f"metrics  http://{config.prometheus_address}/metrics", flush=True)

    def take_steps(self) -> None:
        """Take the steps that are left: train, validate, record, save."""
        config, ranks, stepper, checkpointer = self.config, self.ranks, self.stepper, self.checkpointer
        records, start = self.records, self.start
        ahead = self._read_ahead(start + 1)
        ranks.fail_together(ahead.error)
        saved, stall = start, 0.0
        skipped = sum("skipped" in record for record in records)
        with (
            Monitors() as monitors,
            interrupts(patient=ranks.mesh is not None) as signals,
            self._bar(
                total=config.steps, initial=start, unit="step", dynamic_ncols=True, disable=not ranks.first
            ) as bar,
        ):
            # Only on the first rank; if that fails, all of them raise.
            ranks.on_first(lambda: monitors.open(config.monitors, self.run, start, config.prometheus_address))
            for step in range(start + 1, config.steps + 1):
                began = time.perf_counter()
                stage, step_of_stage = self._enter_stage(step)
                if config.stages and ranks.first and (step_of_stage == 1 or step == start + 1):
                    pattern = f"{stage.segment_lengths} / {stage.dilation_rates}"
                    first = step - step_of_stage + 1
                    bar.write(f"stage    {stage.sequence_length:,} tokens, {pattern}, from step {first}")

                now = ahead
                finish = stepper.step(now.training, step)
                ahead = self._read_ahead(step + 1)  # while a GPU computes
                outcome = finish()
                seconds = time.perf_counter() - began

                record = record_of(step, outcome, records, self.corpus.training.tokens_per_byte)
                record["learning_rate"] = config.learning_rate_at(step)
                records.append(record)
                if outcome.is_broken:
                    skipped += 1
                    advice = "lower --learning-rate, or raise --skip-broken-steps"
                    message = check_broken(outcome, records, config.skip_broken_steps, saved, advice)
                    if ranks.first:
                        bar.write(message)
                if now.validation:
                    record["validation_bits"] = self._validation_bits(now.validation)

                # The ranks talk once per step: who must stop, whose save has failed, who cannot read on, who was
                # slowest, who holds most.
                branches = [f"w{w} r{r}" for w, r in zip(stage.segment_lengths, stage.dilation_rates)]
                received = ranks.bytes_received(len(branches))
                troubles = (signals or [0])[-1], checkpointer.failed, ahead.error is not None
                looked = ranks.gather(seconds, peak_memory(ranks.device), *troubles, *received)
                seconds, memory, stop, failed, unreadable, *received = looked.amax(0).tolist()
                record["tokens_per_second"] = stage.batch_size * stage.sequence_length / seconds
                record["peak_memory_bytes"] = memory

                if failed:
                    checkpointer.settle()
                if step % config.checkpoint_every == 0 or step == config.steps or stop or unreadable:
                    began = time.perf_counter()
                    # Before the checkpoint: resuming drops later records, and could not make up for missing ones.
                    ranks.on_first(lambda: run_folder.write_metrics(self.run, records))
                    checkpointer.save(step, self._validated())
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
                        print(f"stopped after step {step}; continue with --resume {self.run}", flush=True)
                    raise Stopped(int(stop))
                if unreadable:
                    checkpointer.close()
                    ranks.fail_together(ahead.error)
            checkpointer.close()  # a Ctrl-C must not cut off the last save
        if not records or "validation_bits" not in records[-1]:
            # No step was left: the run had stopped between validations, or its records were moved away.
            bits = self._validation_bits(self._validation_batches(start))
            records.append({"step": start, "validation_bits": bits})

    def _enter_stage(self, step: int) -> tuple[Stage, int]:
        """Give the model the pattern of a step's stage; returns the stage and the step's number within it."""
        stage, step_of_stage = self.config.stage_at(step)
        if self.config.memory.compile and _shape(stage) != self._compiled_for:
            torch.compiler.reset()  # else layers would be compiled for any length, which is slower
            self._compiled_for = _shape(stage)
        if not has_pattern(self.stepper.model, stage):
            update_attention_config(self.stepper.model, stage)
        return stage, step_of_stage

    def _read_ahead(self, step: int) -> _Ahead:
        config, nothing = self.config, Batch(torch.empty(0), torch.empty(0))
        if step > config.steps:
            return _Ahead(nothing, [])
        stage, step_of_stage = config.stage_at(step)
        order = config.settled_order
        try:
            batch = self.corpus.training_batch(
                stage.batch_size,
                stage.sequence_length,
                config.seed,
                step_of_stage if order == "epochs" else step,  # a stage's sequences make epochs of their own
                order=order,
                rows=self.stepper.packed_rows,
            )
            validates = step % config.validate_every == 0 or step == config.steps
            validates |= config.keep_best and step % config.checkpoint_every == 0
            if self.ranks.device.type == "cuda":
                batch = batch.pinned()
            return _Ahead(batch, self._validation_batches(step) if validates else [])
        except OSError as error:
            return _Ahead(nothing, [], error)

    def _validated(self) -> dict[int, float]:
        """The validation bits by step that decide which checkpoint is the best, if that is kept."""
        found = {record["step"]: record["validation_bits"] for record in self.records if "validation_bits" in record}
        return found if self.config.keep_best else {}

    def _validation_batches(self, step: int) -> list[Batch]:
        """Sequences of the step's stage."""
        stage, _ = self.config.stage_at(step)
        count, rows = self.config.validation_batches, self.stepper.packed_rows
        return list(self.corpus.validation_batches(stage.batch_size, stage.sequence_length, count, rows=rows))

    def _validation_bits(self, batches: Sequence[Batch]) -> float:
        return self.stepper.validate(batches) / math.log(2.0) * self.corpus.validation.tokens_per_byte

    def figures(self) -> dict[str, Any]:
        last = self.records[-1]
        return {"validation_bits": last["validation_bits"], **self.baselines, "steps": last["step"]}

    def report(self) -> dict[str, Any]:
        """Print the result, draw the curve and write a sample; returns the final figures."""
        config, device, records = self.config, self.ranks.device, self.records
        unigram, bigram = self.baselines["unigram_bits"], self.baselines["bigram_bits"]
        print(f"training {sparkline([record['bits'] for record in records if 'bits' in record])}")
        print(f"result   {records[-1]['validation_bits']:.3f} bits per byte on the validation split")
        print(f"to beat  {bigram:.3f} by byte pairs (bigram) of the training split, {unigram:.3f} by bytes (unigram)")
        validated = self._validated()
        if best := run_folder.best_checkpoint(self.run, validated):
            step = int(best.name.removeprefix("step-"))
            print(f"best     {validated[step]:.3f} bits per byte at step {step}: {best}")
        picture = draw_curve(records, self.baselines, self.run / "loss.png")
        if picture is not None:
            print(f"curve    {picture}")
        # The other ranks have left with their shards, and sampling needs none of the memory options.
        plain = self.plain
        if self.ranks.mesh is not None or config.memory != MemoryOptions():
            plain = LongNetLM.from_pretrained(run_folder.list_checkpoints(self.run)[-1], device=device)
        prompt = torch.tensor([self.tokenizer.encode(config.sample_prompt) or [0]], device=device)
        generator = torch.Generator(device).manual_seed(config.seed)
        generated = plain.generate(prompt, config.sample_bytes, temperature=0.8, top_k=40, generator=generator)
        sample = self.tokenizer.decode(generated[0].tolist())
        # Last: a resumed run that lacks the sample makes all of this again.
        path = run_folder.sample_path(self.run, records[-1]["step"])
        path.parent.mkdir(exist_ok=True)
        write_whole(path, sample)
        print(f"sample\n{sample}")
        return {**self.figures(), "sample": sample}


def _shape(stage: Stage) -> tuple[object, ...]:
    return stage.batch_size, stage.sequence_length, stage.segment_lengths, stage.dilation_rates


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


@contextmanager
def interrupts(*, patient: bool) -> Iterator[list[int]]:
    """The signals that ask to stop after the current step: SIGTERM and Ctrl-C. A second Ctrl-C stops at once.

    A `patient` run takes any number: under torchrun both the terminal and the agent pass a Ctrl-C on.
    """
    came: list[int] = []

    def ask(number: int, _: object) -> None:
        if came[-1:] == [number] == [signal.SIGINT] and not patient:
            raise KeyboardInterrupt
        came.append(number)
        if len(came) == 1 and not patient:  # a step may take minutes
            with suppress(OSError):  # Ctrl-C also ends the `tee` that reads this
                # print() in a handler may interrupt another print().
                os.write(2, b"\nstops after this step and saves; a second Ctrl-C stops at once, without saving\n")

    handled = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, ask) for number in handled}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
