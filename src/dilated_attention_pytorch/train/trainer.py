"""The training loop: read top to bottom. Everything it needs to continue is in the run folder."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention_pytorch.models.longnet import LongNetLM
from dilated_attention_pytorch.models.weights import write_whole
from dilated_attention_pytorch.train.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from dilated_attention_pytorch.train.config import TrainConfig
from dilated_attention_pytorch.train.curve import draw_curve, sparkline
from dilated_attention_pytorch.train.data import Corpus, read_corpus

_BITS = 1.0 / math.log(2.0)


def train(config: TrainConfig, run: Path, *, resume: bool = False) -> dict[str, Any]:
    """Train until `config.steps`, in the folder `run`; returns the final figures.

    A new run wants a folder without checkpoints; `resume` continues from the newest one.
    """
    tqdm = _progress_bar()
    found = list_checkpoints(run)
    if found and not resume:
        raise FileExistsError(f"{run} already holds a run: continue it with --resume {run}, or choose another --out")
    if resume and not found:
        raise FileNotFoundError(f"nothing to resume in {run}: it has no complete checkpoint")
    device = _device(config.device)
    corpus = read_corpus(config.data, config.sequence_length)
    torch.manual_seed(config.seed)
    model = LongNetLM(config.model).to(device)
    optimizer = torch.optim.AdamW(
        _parameter_groups(model, config.weight_decay), lr=config.learning_rate, betas=(0.9, 0.95)
    )
    start = load_checkpoint(found[-1], model, optimizer) if resume else 0
    if start >= config.steps:
        raise ValueError(f"{run} has finished its {start} steps: raise --steps to train on")
    run.mkdir(parents=True, exist_ok=True)
    write_whole(run / "config.json", lambda path: path.write_text(config.to_json()))
    records = [record for record in _read_metrics(run) if record["step"] <= start]

    parameters = sum(parameter.numel() for parameter in model.parameters())
    unigram_bits = corpus.unigram_bits()
    print(f"corpus   {corpus.source}")
    shape = f"{config.model.segment_lengths} / {config.model.dilation_rates}"
    print(f"model    {parameters / 1e6:.1f}M parameters, {shape}")
    print(f"run      {run}{f', from step {start}' if start else ''} on {device}")

    saved = start
    with _Interrupt() as interrupt, tqdm(total=config.steps, initial=start, unit="step", dynamic_ncols=True) as bar:
        for step in range(start + 1, config.steps + 1):
            began = time.perf_counter()
            loss, norm = _step(model, optimizer, corpus, config, step, device)
            if not math.isfinite(loss + norm):
                raise FloatingPointError(
                    f"the loss is {loss} and the gradient's norm {norm} at step {step}: lower --learning-rate; "
                    + (f"step {saved} is the last checkpoint" if saved else "there is no checkpoint yet")
                )
            seconds = time.perf_counter() - began
            record = {
                "step": step,
                "loss": loss,
                "bits": loss * _BITS,
                "gradient_norm": norm,
                "tokens_per_second": config.batch_size * config.sequence_length / seconds,
            }
            if step % config.validate_every == 0 or step == config.steps:
                record["validation_bits"] = validate(model, corpus, config, device)
            records.append(record)
            if step % config.checkpoint_every == 0 or step == config.steps or interrupt.asked:
                _save(run, step, model, optimizer, config, records)
                saved = step
            bar.set_postfix(_shown(records), refresh=False)
            bar.update()
            if interrupt.asked and step < config.steps:
                bar.close()
                print(f"stopped after step {step}; continue with --resume {run}")
                raise KeyboardInterrupt
    return _report(run, model, config, records, unigram_bits, device)


class _Interrupt:
    """Turns the first Ctrl-C into a wish to stop after the step under way; the second one stops at once."""

    asked = False

    def __enter__(self) -> _Interrupt:
        self._before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before)

    def _ask(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def validate(model: LongNetLM, corpus: Corpus, config: TrainConfig, device: torch.device) -> float:
    """Bits per byte on the validation split."""
    model.eval()
    with torch.no_grad():
        losses = [
            _loss(model, tokens.to(device), following.to(device)).item()
            for tokens, following in corpus.validation_batches(
                config.batch_size, config.sequence_length, config.validation_batches
            )
        ]
    model.train()
    return sum(losses) / len(losses) * _BITS


def _step(
    model: LongNetLM,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    config: TrainConfig,
    step: int,
    device: torch.device,
) -> tuple[float, float]:
    # Batches and dropout depend on (seed, step) alone, so that a resumed run is the run that never stopped.
    torch.manual_seed(config.seed * 1_000_003 + step)
    tokens, following = corpus.training_batch(config.batch_size, config.sequence_length, config.seed, step)
    for group in optimizer.param_groups:
        group["lr"] = _learning_rate(config, step)
    loss = _loss(model, tokens.to(device), following.to(device))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm).item()
    value = loss.item()
    if math.isfinite(value + norm):  # a broken step must not reach the weights
        optimizer.step()
    return value, norm


def _loss(model: LongNetLM, tokens: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), following.flatten())


def _learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.learning_rate * (0.1 + 0.45 * (1.0 + math.cos(math.pi * min(1.0, done))))


def _parameter_groups(model: LongNetLM, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def _save(
    run: Path,
    step: int,
    model: LongNetLM,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    records: list[dict[str, Any]],
) -> None:
    save_checkpoint(run, step, model, optimizer, config.keep_checkpoints)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    write_whole(run / "metrics.jsonl", lambda path: path.write_text(lines))


def _read_metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    if not path.is_file():
        return []
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        _ = [record["step"] for record in records]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is broken ({error!r}): move it away to resume without the earlier curve") from None
    return records


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
    write_whole(run / "sample.txt", lambda path: path.write_text(sample))
    print(f"sample\n{sample}")
    return {"validation_bits": final, "unigram_bits": unigram_bits, "steps": records[-1]["step"], "sample": sample}


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"no device {name!r} here ({str(error).splitlines()[0]}): leave --device out") from None


def _progress_bar() -> Any:
    try:
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "training shows its progress with tqdm: pip install 'dilated-attention-pytorch[train]'"
        ) from error
    return tqdm
