"""The training loop: read top to bottom. Everything it needs to continue is in the run folder."""

from __future__ import annotations

import dataclasses
import math
import signal
import threading
import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention_pytorch.models.longnet import LongNetLM
from dilated_attention_pytorch.models.weights import write_whole
from dilated_attention_pytorch.train.checkpoint import Checkpointer, list_checkpoints
from dilated_attention_pytorch.train.config import TrainConfig
from dilated_attention_pytorch.train.curve import draw_curve, sparkline
from dilated_attention_pytorch.train.data import Corpus, read_corpus
from dilated_attention_pytorch.train.engine import Ranks, Stopped, join_ranks
from dilated_attention_pytorch.train.monitor import Monitors, peak_memory
from dilated_attention_pytorch.train.run_folder import CONFIG, read_metrics, record_start, write_metrics, write_sample
from dilated_attention_pytorch.train.zero import ZeroModel, check_zero

_BITS = 1.0 / math.log(2.0)


def train(config: TrainConfig, run: Path, *, resume: bool | Literal["auto"] = False) -> dict[str, Any]:
    """Train until `config.steps`, in the folder `run`; returns the final figures.

    A new run wants a folder without checkpoints; `resume` continues from the newest one, and `"auto"` does so if there
    is one. Ranks that torchrun restarts resume by themselves. SIGTERM and Ctrl-C save, then raise `Stopped`.
    """
    shared = {"sequence": config.sequence_parallel, "tensor": config.tensor_parallel}
    with join_ranks(config.device, config.timeout_seconds, **shared) as ranks:
        model, records, unigram_bits = _train(config, run, "auto" if ranks.restarts else resume, ranks)
    if not ranks.first:
        return _figures(records, unigram_bits)
    if ranks.mesh is not None:  # the others are gone with their shards
        model = LongNetLM.from_pretrained(list_checkpoints(run)[-1], device=ranks.device)
    return _report(run, model, config, records, unigram_bits, ranks.device)


def _train(
    config: TrainConfig, run: Path, resume: bool | Literal["auto"], ranks: Ranks
) -> tuple[LongNetLM, list[dict[str, Any]], float]:
    """The steps that are left; gives the model, what each step of the run recorded, and the bits to beat."""
    tqdm = _progress_bar()
    ranks.check_same(dataclasses.asdict(config))
    found = ranks.on_first(lambda: _is_to_resume(config, run, resume))
    if config.batch_size % ranks.data_ranks:
        raise ValueError(
            f"{ranks.data_ranks} ranks must divide the batch: choose another --batch-size than {config.batch_size}"
        )
    if config.zero is not None:
        check_zero(config.zero, ranks)
    corpus = read_corpus(config.data, config.sequence_length)
    ranks.check_same({"corpus, in bytes": (len(corpus.training), len(corpus.validation))})
    torch.manual_seed(config.seed)
    plain = LongNetLM(config.model).to(ranks.device)
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    model = ranks.share(plain, config.engine)
    optimizer = torch.optim.AdamW(
        _parameter_groups(model, config.weight_decay),
        lr=config.learning_rate,
        betas=(0.9, 0.95),
        fused=True if config.zero is not None and config.zero.offloads else None,  # one pass over main memory
    )
    if config.zero is not None:
        part = config.batch_size // ranks.data_ranks
        model = ZeroModel(plain, optimizer, config.zero, ranks, batch_size=part, clip_norm=config.clip_norm)
    checkpointer = Checkpointer(run, plain, model, optimizer, ranks, config.keep_checkpoints)
    start = checkpointer.restore() if found else 0
    if start >= config.steps and resume != "auto":
        raise ValueError(f"{run} has finished its {start} steps: raise --steps to train on")
    records = ranks.on_first(lambda: _prepare_run(config, run, start))

    unigram_bits = corpus.unigram_bits()
    known = {"corpus": corpus.source, "parameters": parameters, "baselines": {"unigram_bits": unigram_bits}}
    many = {} if ranks.mesh is None else {"ranks": ranks.mesh.size()}
    ranks.on_first(lambda: record_start(run, start, ranks.device.type, **known, **many))
    if ranks.first:
        print(f"corpus   {corpus.source}")
        shape = f"{config.model.segment_lengths} / {config.model.dilation_rates}"
        print(f"model    {parameters / 1e6:.1f}M parameters, {shape}")
        shared = "" if ranks.mesh is None else f", {ranks.mesh.size()} ranks ({config.engine}{_axes(ranks)})"
        print(f"run      {run}{f', from step {start}' if start else ''} on {ranks.device}{shared}", flush=True)
        if "prometheus" in config.monitors:
            print(f"metrics  http://{config.prometheus_address}/metrics", flush=True)

    saved, stall = start, 0.0
    with (
        Monitors() as monitors,
        _Interrupt(patient=ranks.mesh is not None) as interrupt,
        tqdm(total=config.steps, initial=start, unit="step", dynamic_ncols=True, disable=not ranks.first) as bar,
    ):
        # On the first rank alone; where that fails, all of them raise.
        ranks.on_first(lambda: monitors.open(config.monitors, run, start, config.prometheus_address))
        branches = [f"w{w} r{r}" for w, r in zip(config.model.segment_lengths, config.model.dilation_rates)]
        for step in range(start + 1, config.steps + 1):
            began = time.perf_counter()
            loss, norm = _step(model, optimizer, corpus, config, step, ranks)
            if not math.isfinite(loss + norm):
                raise FloatingPointError(
                    f"the loss is {loss} and the gradient's norm {norm} at step {step}: lower --learning-rate; "
                    + (f"step {saved} is the last checkpoint" if saved else "there is no checkpoint yet")
                )
            seconds = time.perf_counter() - began
            record = {"step": step, "loss": loss, "bits": loss * _BITS, "gradient_norm": norm}
            record["learning_rate"] = _learning_rate(config, step)
            if step % config.validate_every == 0 or step == config.steps:
                record["validation_bits"] = validate(model, corpus, config, ranks)
            # One look around a step: who is to stop, whose save has failed, who was slowest, who holds most.
            received = ranks.bytes_received(len(branches))
            looked = ranks.gather(seconds, peak_memory(ranks.device), interrupt.signal, checkpointer.failed, *received)
            seconds, memory, stop, failed, *received = looked.amax(0).tolist()
            record["tokens_per_second"] = config.batch_size * config.sequence_length / seconds
            record["peak_memory_bytes"] = memory
            records.append(record)
            if failed:
                checkpointer.settle()
            if step % config.checkpoint_every == 0 or step == config.steps or stop:
                began = time.perf_counter()
                checkpointer.save(step)
                ranks.on_first(lambda: write_metrics(run, records))
                saved, stall = step, time.perf_counter() - began
            figures = {
                **{name: value for name, value in record.items() if name != "step"},
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
                    print(f"stopped after step {step}; continue with --resume {run}", flush=True)
                raise Stopped(int(stop))
    checkpointer.close()
    return plain, records, unigram_bits


def _axes(ranks: Ranks) -> str:
    return "".join(f", {name} {ranks.axis(name)}" for name in ("sequence", "tensor") if ranks.axis(name) > 1)


def _is_to_resume(config: TrainConfig, run: Path, resume: bool | Literal["auto"]) -> bool:
    found = bool(list_checkpoints(run))
    if found and not resume:
        raise FileExistsError(f"{run} already holds a run: continue it with --resume {run}, or choose another --out")
    if not found and resume is True:
        raise FileNotFoundError(f"nothing to resume in {run}: it has no complete checkpoint")
    if found and resume == "auto" and not config.is_same_run(TrainConfig.from_json(run / CONFIG)):
        raise FileExistsError(f"{run} holds a run with other settings: choose another --out")
    return found


def _prepare_run(config: TrainConfig, run: Path, start: int) -> list[dict[str, Any]]:
    run.mkdir(parents=True, exist_ok=True)
    write_whole(run / CONFIG, lambda path: path.write_text(config.to_json()))
    return [record for record in read_metrics(run) if record["step"] <= start]


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


def validate(model: nn.Module, corpus: Corpus, config: TrainConfig, ranks: Ranks) -> float:
    """Bits per byte on the validation split."""
    model.eval()
    with torch.no_grad():
        losses = [
            _loss(model, tokens, following, ranks).item()
            for tokens, following in corpus.validation_batches(
                config.batch_size, config.sequence_length, config.validation_batches
            )
        ]
    model.train()
    return ranks.gather(sum(losses) / len(losses)).mean().item() * _BITS


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, corpus: Corpus, config: TrainConfig, step: int, ranks: Ranks
) -> tuple[float, float]:
    # Batches and dropout depend on (seed, step, token rank) alone, so that a resumed run is the run that never stopped.
    torch.manual_seed(config.seed * 1_000_003 + step + (ranks.token_rank << 40))
    tokens, following = corpus.training_batch(config.batch_size, config.sequence_length, config.seed, step)
    for group in optimizer.param_groups:
        group["lr"] = _learning_rate(config, step)
    loss = _loss(model, tokens, following, ranks)
    if isinstance(model, ZeroModel):
        value = ranks.gather(loss.item()).mean().item()
        return value, model.update(loss) if math.isfinite(value) else math.nan
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = ranks.clip_gradients(model, config.clip_norm)
    value = ranks.gather(loss.item()).mean().item()
    if math.isfinite(value + norm):  # a broken step must not reach the weights
        optimizer.step()
    return value, norm


def _loss(model: nn.Module, tokens: Tensor, following: Tensor, ranks: Ranks) -> Tensor:
    """This rank's part of a batch's loss, of which the mean over ranks is the mean over tokens."""
    logits = model(ranks.part(tokens)).flatten(0, 1).float()
    share = tokens.numel() / (ranks.data_ranks * ranks.axis("sequence"))  # shards may differ in length
    return F.cross_entropy(logits, ranks.part(following).flatten(), reduction="sum") / share


def _learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.learning_rate * (0.1 + 0.45 * (1.0 + math.cos(math.pi * min(1.0, done))))


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def _shown(records: list[dict[str, Any]]) -> dict[str, str]:
    last = records[-1]
    shown = {
        "loss": f"{last['loss']:.3f}",
        "bits/byte": f"{last['bits']:.3f}",
        "tokens/s": f"{last['tokens_per_second']:,.0f}",
    }
    validated = [record["validation_bits"] for record in records if "validation_bits" in record]
    if validated:
        shown["validation"] = f"{validated[-1]:.3f}"
    return shown


def _report(
    run: Path,
    model: LongNetLM,
    config: TrainConfig,
    records: list[dict[str, Any]],
    unigram_bits: float,
    device: torch.device,
) -> dict[str, Any]:
    final = records[-1]["validation_bits"]
    print(f"training {sparkline([record['bits'] for record in records])}")
    picture = draw_curve(records, unigram_bits, run / "loss.png")
    if picture is not None:
        print(f"curve    {picture}")
    print(f"result   {final:.3f} bits per byte on the validation split; byte frequencies alone {unigram_bits:.3f}")
    prompt = b"def "
    generator = torch.Generator(device).manual_seed(config.seed)
    tokens = torch.tensor([list(prompt)], device=device)
    generated = model.generate(tokens, config.sample_bytes, temperature=0.8, top_k=40, generator=generator)
    sample = bytes(generated[0].tolist()).decode("utf-8", errors="replace")
    write_sample(run, records[-1]["step"], sample)
    print(f"sample\n{sample}")
    return {**_figures(records, unigram_bits), "sample": sample}


def _figures(records: list[dict[str, Any]], unigram_bits: float) -> dict[str, Any]:
    last = records[-1]
    return {"validation_bits": last["validation_bits"], "unigram_bits": unigram_bits, "steps": last["step"]}


def _progress_bar() -> Any:
    try:
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "training shows its progress with tqdm: pip install 'dilated-attention-pytorch[train]'"
        ) from error
    return tqdm
