"""`python -m examples.dna`: classify DNA from a FASTA file with a `LongNetEncoder`; it takes less than a minute.

Without a file, it makes one. Each sequence is random DNA with a stretch rich in CG, such as a promoter has, and a
stretch rich in AT, thousands of bases apart. The label says on which strand the gene lies, that is, which of the two
comes first. Both labels have the same bases and the same k-mers, so counting them tells nothing: the model must relate
two distant stretches. For your own sequences, write `label=NAME` into their headers.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention_pytorch import LongNetEncoder, attention_map

K, WINDOW = 2, 64  # a row of the sequence counts the 4 ** K k-mers of WINDOW bases
CODE = {"A": 0, "C": 1, "G": 2, "T": 3}


def read_fasta(path: Path) -> dict[str, str]:
    """The sequences of a FASTA file by their headers, in upper case."""
    found: dict[str, list[str]] = {}
    header = None
    for line in path.read_text().splitlines():
        if line.startswith(">"):
            header = line[1:].strip()
            if header in found:
                raise ValueError(f"{path} has two sequences {header!r}")
            found[header] = []
        elif line.strip():
            if header is None:
                raise ValueError(f"{path} is not a FASTA file: its first line must begin with '>'")
            found[header].append(line.strip().upper())
    if not found:
        raise ValueError(f"{path} has no sequences: each begins with a line '>NAME label=LABEL'")
    if short := [name for name, lines in found.items() if sum(map(len, lines)) < WINDOW]:
        raise ValueError(f"{path}: {short[0]!r} has fewer bases than a window of {WINDOW}")
    return {name: "".join(lines) for name, lines in found.items()}


def count_kmers(sequence: str) -> Tensor:
    """`(windows, 4 ** K)`: the share of each k-mer in each window, without those that have another letter, such as N.

    >>> count_kmers("ACGT" * 32).shape
    torch.Size([2, 16])
    >>> count_kmers("A" * 64)[0, 0]
    tensor(1.)
    """
    codes = torch.tensor([CODE.get(base, -1) for base in sequence])
    rows = codes[: len(codes) // WINDOW * WINDOW].unflatten(0, (-1, WINDOW)).unfold(1, K, 1)  # (windows, k-mers, K)
    numbers = (rows * 4 ** torch.arange(K - 1, -1, -1)).sum(-1)
    valid = (rows >= 0).all(-1, keepdim=True)
    counts = (F.one_hot(numbers.clamp_min(0), 4**K) * valid).sum(1)
    return counts / counts.sum(1, keepdim=True).clamp_min(1)


def make_fasta(path: Path, count: int, seed: int = 0, *, shortest: int = 4_000, longest: int = 8_000) -> None:
    """Write `count` sequences of the two labels."""
    draw = random.Random(seed)
    with path.open("w") as stream:
        for i in range(count):
            bases = draw.choices("ACGT", k=draw.randint(shortest, longest))
            label, third, stretch = draw.choice(("forward", "reverse")), len(bases) // 3, 4 * WINDOW
            starts = (draw.randrange(third - stretch), draw.randrange(2 * third, len(bases) - stretch))
            for start, rich in zip(starts, ("CG", "AT") if label == "forward" else ("AT", "CG")):
                bases[start : start + stretch] = draw.choices(
                    "ACGT", [9 if b in rich else 1 for b in "ACGT"], k=stretch
                )
            text = "".join(bases)
            lines = [text[j : j + 60] for j in range(0, len(text), 60)]
            stream.write("\n".join([f">gene-{i:04d} label={label}", *lines, ""]))


def pack(sequences: Sequence[Tensor]) -> dict[str, Tensor]:
    """Sequences of any lengths in one row, without padding: the keywords of a `LongNetEncoder`."""
    lengths = torch.tensor([0, *map(len, sequences)])
    return {"x": torch.cat(list(sequences))[None], "cu_seqlens": lengths.cumsum(0)}


def train(rows: Sequence[Tensor], labels: Tensor, classes: int, epochs: int, seed: int = 0) -> LongNetEncoder:
    torch.manual_seed(seed)
    model = LongNetEncoder(
        input_dim=4**K, d_model=32, num_heads=4, num_layers=2, num_classes=classes, pooling="attention",
        positions="rotary", max_length=max(map(len, rows)), dropout=0.0,
    )  # fmt: skip
    steps = epochs * -(-len(rows) // 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for epoch in range(epochs):
        losses = []
        for batch in torch.randperm(len(rows)).split(16):
            loss = F.cross_entropy(model(**pack([rows[i] for i in batch])), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean():.3f}", flush=True)
    return model.eval()


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(prog="python -m examples.dna", description="Classify the DNA in a FASTA file.")
    parser.add_argument("fasta", type=Path, nargs="?", help="default: genes.fasta, made if there is none")
    parser.add_argument("--epochs", type=int, default=6, metavar="N", help="default: 6")
    given = parser.parse_args(arguments)
    path = given.fasta or Path("genes.fasta")
    if given.fasta is None and not path.exists():
        make_fasta(path, 600)
    if not path.is_file():
        raise FileNotFoundError(f"no FASTA file {path}: without a file, this command makes one")
    found = read_fasta(path)
    names = [label[1] if (label := re.search(r"label=(\S+)", name)) else "" for name in found]
    if "" in names:
        raise ValueError(f"{path}: {list(found)[names.index('')]!r} has no label=NAME")
    classes = sorted(set(names))
    if len(classes) < 2:
        raise ValueError(f"{path} has one label only, {classes[0]!r}: there is nothing to tell apart")
    labels = torch.tensor([classes.index(name) for name in names])
    rows = [count_kmers(sequence) for sequence in found.values()]
    mean, spread = torch.cat(rows).mean(0), torch.cat(rows).std(0).clamp_min(1e-6)
    rows = [(one - mean) / spread for one in rows]
    cut = len(rows) * 4 // 5  # the last fifth is for the test
    model = train(rows[:cut], labels[:cut], len(classes), given.epochs)
    with torch.no_grad():
        right = float((model(**pack(rows[cut:])).argmax(-1) == labels[cut:]).double().mean())
    print(f"{right:.1%} of {len(rows) - cut} test sequences are right ({', '.join(classes)})")
    seen = attention_map(model, {"x": rows[-1][None]}, rows="all").mean((0, 1, 2))  # the attention that a window gets
    first = (seen.topk(min(4, len(seen))).indices * WINDOW).sort().values.tolist()
    print(f"in {list(found)[-1]!r} the model looks most at the windows from bases {', '.join(map(str, first))}")
    return right


if __name__ == "__main__":
    main()
