"""What one training step of a `LongNetLM` holds on a GPU, computed instead of measured.

The step is written down as a ledger: every tensor of a size that counts is entered when the model, its loss or their
backward pass makes it, and struck out when the last of autograd and Python lets go of it. The peak is the highest
balance. Layers differ in nothing but what lies before and behind them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dilated_attention_pytorch.core.pattern import grid_rows, most_scratch, rounds_little
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.train.memory import MemoryOptions
from dilated_attention_pytorch.train.offload import LAYERS_ON_DEVICE

KINDS = ("weights", "gradients", "optimizer", "kept", "temporary")
_FIXED = ("weights", "gradients", "optimizer")
# Multiprocessors of an H100 or H200, each with a scratch buffer of its own in the backward of attention.
_MULTIPROCESSORS = 132
_EIGHT_BIT = 2 * (1 + 4 / 256)  # bytes a parameter: two numbers, and a float32 scale for every 256


@dataclass(frozen=True)
class Footprint:
    """Bytes of a step at its peak, by kind; `at` says what runs then, `host` what offloading keeps in host memory."""

    parts: dict[str, int]
    at: str
    host: int

    @property
    def peak(self) -> int:
        return sum(self.parts.values())


def parameter_count(config: ModelConfig) -> int:
    """Of a `LongNetLM`.

    >>> parameter_count(ModelConfig(vocab_size=50_304))
    123781632
    """
    tables = (1 if config.tie_weights else 2) * config.vocab_size * config.d_model
    return tables + config.num_layers * _layer_parameters(config) + 2 * config.d_model


def _layer_parameters(config: ModelConfig) -> int:
    E, F, K = config.d_model, config.dim_feedforward, _kv_width(config)
    attention = 2 * E * (E + 1) + 2 * K * (E + 1) + 2 * E
    feed_forward = F * (E + 1) + 2 * F + E * (F + 1)
    return attention + feed_forward + 4 * E


def _kv_width(config: ModelConfig) -> int:
    return (config.num_kv_heads or config.num_heads) * config.head_dim


def footprint(config: ModelConfig, tokens: int, options: MemoryOptions, *, batch: int = 1) -> Footprint:
    """What a step on `batch` sequences of `tokens` tokens holds, from the second step on, when the optimizer has state.

    `peak` is what PyTorch's allocator hands out. A GPU needs more than that: see `needed`.

    >>> options = MemoryOptions(checkpointing="full", mlp_tile=4096, loss_chunk=4096, precision="bf16")
    >>> found = footprint(ModelConfig(vocab_size=50_304), 131_072, options)
    >>> found.at, round(found.peak / 2**30)
    ('backward of the feed-forward network', 10)
    """
    for name in ("float8", "structured_sparsity", "compile"):
        if getattr(options, name):
            raise ValueError(f"no model says what {name} holds: leave it out here, and measure with bench techniques")
    if config.dropout:
        raise ValueError(f"no model says what dropout={config.dropout} holds: pass a config with dropout=0.0")
    if tokens < 1 or batch < 1:
        raise ValueError(f"tokens and batch must be at least 1, got {tokens} and {batch}")
    return _Step(config, tokens * batch, tokens, options).run()


def needed(peak: int) -> int:
    """The memory of a GPU on which a peak fits: blocks between blocks, and CUDA's own context."""
    return math.ceil(1.03 * peak) + (600 << 20)


def attention_scratch(config: ModelConfig, tokens: int, batch: int, itemsize: int) -> int:
    """Where the backward of attention sums dq, at most."""
    rows = max(
        grid_rows(min(branch.segment_length, tokens), branch.dilation_rate, 0) for branch in config.spec.branches
    )
    kv_heads = config.num_kv_heads or config.num_heads
    padded = 64 if config.head_dim <= 64 else 128
    wanted = _MULTIPROCESSORS * config.num_heads // kv_heads * -(-rows // 128) * 128 * padded * 4
    return min(wanted, most_scratch(4 * (config.num_heads + kv_heads) * batch * tokens * config.head_dim * itemsize))


def _pinned(size: float) -> int:
    """PyTorch pins host memory in powers of two."""
    return 1 << (int(size) - 1).bit_length()


@dataclass
class _Ledger:
    entries: dict[tuple[int, str], int] = field(default_factory=dict)
    layer: int = -1  # the one at work; entries of others are kept
    balance: int = 0
    highest: int = 0
    snapshot: dict[str, int] = field(default_factory=dict)
    now: str = ""
    at: str = ""

    def hold(self, name: str, size: float, layer: int | None = None) -> None:
        key = (self.layer if layer is None else layer, name)
        assert key not in self.entries, f"{key} is held already"
        self.entries[key] = int(size)
        self.balance += int(size)
        if self.balance > self.highest:
            self.highest, self.at, self.snapshot = self.balance, self.now, self._by_kind()

    def drop(self, *names: str, layer: int | None = None) -> None:
        for name in names:
            self.balance -= self.entries.pop((self.layer if layer is None else layer, name), 0)

    def add(self, name: str, size: float) -> None:
        """Let a fixed entry grow."""
        before = self.entries.get((-1, name), 0)
        self.drop(name, layer=-1)
        self.hold(name, before + size, layer=-1)

    def _by_kind(self) -> dict[str, int]:
        kinds = dict.fromkeys(KINDS, 0)
        for (layer, name), size in self.entries.items():
            own = layer == self.layer and name != "x"
            kinds[name if name in _FIXED else "temporary" if own else "kept"] += size
        return kinds


class _Step:
    def __init__(self, config: ModelConfig, rows: int, positions: int, options: MemoryOptions) -> None:
        self.config, self.rows, self.positions, self.options = config, rows, positions, options
        self.ledger = _Ledger()
        self.width, self.kv_width, self.hidden = config.d_model, _kv_width(config), config.dim_feedforward
        # Bytes of a number: in parameters, in what layers hand on, in what a norm returns, in products.
        self.weight = self.stream = self.norm = 2 if options.parameters == "bf16" else 4
        self.product = 4 if options.precision == "fp32" else 2
        self.casts = self.product != self.stream  # autocast: every product converts what it is given
        heads = config.num_kv_heads or config.num_heads
        self.wide_sums = self.product == 2 and not rounds_little(config.spec, config.spec.offsets(heads))
        self.host = 0

    def of(self, width: float, size: int) -> float:
        return self.rows * width * size

    def run(self) -> Footprint:
        ledger, config, E = self.ledger, self.config, self.width
        count = parameter_count(config)
        ledger.hold("weights", count * self.weight)
        state = 2 * self.weight if self.options.optimizer == "adamw" else _EIGHT_BIT
        ledger.hold("optimizer", count * state)
        ledger.hold("tokens", self.rows * 24)
        if config.positions != "none":
            tables = 3 if config.positions == "xpos" else 2
            ledger.hold("rotation", self.positions * config.head_dim // 2 * 4 * tables)
        ledger.now = "forward of the embedding"
        ledger.hold("looked up", self.of(E, self.stream))
        ledger.hold("x", self.of(E, self.stream), layer=0)
        ledger.drop("looked up")
        checkpointed = self.options.checkpointing != "none"
        for layer in range(config.num_layers):
            ledger.layer = layer
            if self.options.offload and layer >= LAYERS_ON_DEVICE:
                self._leave(layer - LAYERS_ON_DEVICE)
            self._forward(saves=not checkpointed)
        ledger.layer = config.num_layers
        self._loss()
        if checkpointed:
            for layer in range(config.num_layers):
                ledger.drop("weights, narrow", layer=layer)
        for layer in reversed(range(config.num_layers)):
            ledger.layer = layer
            if self.casts:
                ledger.hold("dy", self.of(E, self.product))
            if checkpointed:
                if self.options.offload:
                    self._fetch(layer)
                    self._fetch(layer - 1)
                self._forward(saves=True, again=True)
            self._backward()
        ledger.layer = -1
        ledger.now = "backward of the embedding"
        ledger.hold("table", config.vocab_size * E * self.weight)
        ledger.drop("table")
        ledger.drop("x", layer=0)
        self._update(count)
        return Footprint(ledger.snapshot, ledger.at, self.host)

    # The forward pass of a layer, in the order of `DilatedTransformerEncoderLayer`. Without `saves` only Python's
    # references hold what it makes, and a layer of which `again` runs hands nothing on.

    def _forward(self, *, saves: bool, again: bool = False) -> None:
        ledger, E, K = self.ledger, self.width, self.kv_width
        p, n = self.product, self.norm
        ledger.now = "forward of attention" if not again else "attention, computed again"
        if self.casts:
            # Autocast remembers converted weights until its context ends, and autograd those that it saves; not tiles'.
            tiled = 2 * E * self.hidden if self.options.mlp_tile else 0
            ledger.hold("weights, narrow", (_layer_parameters(self.config) - tiled) * p)
        ledger.hold("norm1", self.of(E, n))
        for name, width in (("q", E), ("k", K), ("v", K)):
            if self.casts:
                ledger.hold(f"input of {name}", self.of(E, p))
            ledger.hold(name, self.of(width, p))
            if not saves:
                ledger.drop(f"input of {name}")
        if self.config.positions != "none":
            for name, width in (("q", E), ("k", K)):
                ledger.hold("halves, and both", self.of(2 * width, 4))
                ledger.drop("halves, and both")
                ledger.hold(f"{name} turned", self.of(width, p))
            ledger.drop("q", "k")
        kept = again and self.options.checkpointing == "selective"
        if not kept:
            if self.wide_sums:
                ledger.hold("sums", self.of(E, 4))
            ledger.hold("out", self.of(E, p))
            ledger.hold("lse", self.of(self.config.num_heads, 4))
            ledger.drop("sums")
        if self.casts:
            ledger.hold("out, wide", self.of(E, 4))
        ledger.hold("attention's norm", self.of(E, n))
        keeps_attention = not again and self.options.checkpointing == "selective"
        if not saves and not keeps_attention:
            ledger.drop("out", "lse")
        if not saves:
            ledger.drop("out, wide")
        if self.casts:
            ledger.hold("input of out_proj", self.of(E, p))
        ledger.hold("attended", self.of(E, p))
        if not saves:
            ledger.drop("q", "k", "q turned", "k turned", "v", "input of out_proj", "attention's norm")
        if self.casts or not saves:
            ledger.drop("norm1", "attention's norm")
        ledger.hold("x1", self.of(E, self.stream))
        ledger.drop("attended")
        ledger.now = "forward of the feed-forward network"
        ledger.hold("norm2", self.of(E, n))
        if self.options.mlp_tile:
            self._tiled_forward(again)
        else:
            self._plain_forward(saves, again)
        if again:
            return
        ledger.hold("x", self.of(E, self.stream), layer=ledger.layer + 1)
        ledger.drop("y")
        if not saves:
            ledger.drop("x1", "norm2")
            if self.options.offload:
                self.host += sum(map(_pinned, self._kept_bytes()))

    def _plain_forward(self, saves: bool, again: bool) -> None:
        ledger, E, F, p = self.ledger, self.width, self.hidden, self.product
        if self.casts:
            ledger.hold("input of linear1", self.of(E, p))
        ledger.hold("hidden", self.of(F, p))
        if not saves:
            ledger.drop("input of linear1")
        ledger.hold("active", self.of(F, p))
        if not saves:
            ledger.drop("hidden")
        if self.casts:
            ledger.hold("active, wide", self.of(F, 4))
        ledger.hold("inner norm", self.of(F, self.norm))
        if not saves:
            ledger.drop("active, wide")
        if self.casts:
            ledger.hold("input of linear2", self.of(F, p))
        if not again:
            ledger.hold("y", self.of(E, p))
        if self.casts:
            ledger.drop("active", "inner norm", "norm2")
        if not saves:
            ledger.drop("active", "inner norm", "input of linear2")

    def _tiled_forward(self, again: bool) -> None:
        if again:  # a layer that runs again ends where the tiles would begin
            return
        ledger, tile = self.ledger, self._tile_rows
        ledger.hold("y", self.of(self.width, self.product))
        wide = (4 + self.norm) if self.casts else self.norm
        ledger.hold("tile", tile * (self.hidden * (self.product + wide + self.product) + self.width * self.product))
        ledger.drop("tile")

    # The backward pass of a layer: what forward saved goes as its gradients come.

    def _backward(self) -> None:
        ledger, E, K = self.ledger, self.width, self.kv_width
        p, n, top = self.product, self.norm, ledger.layer + 1
        weights = _layer_parameters(self.config)
        ledger.now = "backward of the feed-forward network"
        self._tiled_backward() if self.options.mlp_tile else self._plain_backward()
        ledger.add("gradients", 2 * self.hidden * E * self.weight)
        self._widen("d norm2", E)
        ledger.hold("d x1", self.of(E, self.stream))
        ledger.drop("d norm2", "x1", "norm2", "d x1")
        ledger.now = "backward of attention"
        if self.casts:
            ledger.hold("d attended", self.of(E, p))
        ledger.hold("d norm", self.of(E, p))
        ledger.drop("d attended", "input of out_proj", "attention's norm")
        self._widen("d norm", E)
        ledger.hold("d out", self.of(E, n))
        ledger.drop("d norm", "out, wide")
        if self.casts:
            ledger.hold("d out, narrow", self.of(E, p))
            ledger.drop("d out")
        gradients = {"dk": K, "dq": E, "dv": K}
        size = 4 if self.wide_sums else p
        for name, width in gradients.items():
            ledger.hold(name, self.of(width, size))
        ledger.hold("delta", self.of(self.config.num_heads, 4))
        ledger.hold("scratch", attention_scratch(self.config, self.positions, self.rows // self.positions, p))
        if self.wide_sums:
            for name, width in gradients.items():
                ledger.hold(f"{name}, rounded", self.of(width, p))
            for name, width in gradients.items():
                ledger.drop(name, f"{name}, rounded")
                ledger.hold(name, self.of(width, p))
        ledger.drop("delta", "scratch", "q", "k", "q turned", "k turned", "v", "out", "lse", "d out", "d out, narrow")
        if self.config.positions != "none":
            for name in ("dk", "dq"):
                ledger.hold("turned back", self.of(gradients[name] * 2.5, 4))
                ledger.drop("turned back")
        ledger.now = "backward of the projections"
        for name in ("v", "k", "q"):
            ledger.hold(f"d input of {name}", self.of(E, p))
            self._widen(f"d input of {name}", E)
            ledger.drop(f"d{name}", f"input of {name}")
            if name != "v":
                ledger.drop(f"d input of {name}")  # added to the first
        ledger.drop("norm1", "weights, narrow")
        ledger.hold("dx", self.of(E, self.stream))
        ledger.drop("d input of v", "dx")
        ledger.drop("x", layer=top)  # its gradient's place is now that of this layer's input
        ledger.add("gradients", (weights - 2 * self.hidden * E) * self.weight)

    def _plain_backward(self) -> None:
        ledger, E, F, p = self.ledger, self.width, self.hidden, self.product
        ledger.hold("d inner norm", self.of(F, p))
        ledger.drop("dy", "inner norm", "input of linear2")
        self._widen("d inner norm", F)
        ledger.hold("d active", self.of(F, self.norm))
        ledger.drop("d inner norm", "active, wide", "active")
        if self.casts:
            ledger.hold("d active, narrow", self.of(F, p))
            ledger.drop("d active")
        ledger.hold("d hidden", self.of(F, p))
        ledger.drop("hidden", "d active", "d active, narrow")
        ledger.hold("d norm2", self.of(E, p))
        ledger.drop("d hidden", "input of linear1")

    def _tiled_backward(self) -> None:
        ledger, E, F, p = self.ledger, self.width, self.hidden, self.product
        ledger.hold("d norm2", self.of(E, self.norm))
        held = (p + 4 + 4 + 4) if self.casts else 4 * p
        ledger.hold("tile", self._tile_rows * (F * held + E * p))
        ledger.hold("sums of the weights' gradients", 2 * E * F * (4 + p))
        ledger.drop("tile", "sums of the weights' gradients", "dy")

    def _widen(self, name: str, width: int) -> None:
        """Under autocast the gradient of a converted input is converted back."""
        if self.casts:
            self.ledger.hold(f"{name}, wide", self.of(width, self.stream))
            self.ledger.drop(name)
            self.ledger.entries[self.ledger.layer, name] = self.ledger.entries.pop((self.ledger.layer, f"{name}, wide"))

    # The head, the loss and the update.

    def _loss(self) -> None:
        ledger, E, V, p = self.ledger, self.width, self.config.vocab_size, self.product
        table = V * E * self.weight
        ledger.now = "forward of the loss"
        ledger.hold("last norm", self.of(E, self.norm))
        if self.options.loss_chunk:
            chunk = min(self.options.loss_chunk, self.rows)
            ledger.hold("sums and targets", self.rows * 13)
            ledger.hold("head, narrow", V * E * p if self.casts else 0)
            # The chunk before is let go of when the next one's logits are there, wide.
            narrow = p if p < 4 else 0
            ledger.hold("chunks", chunk * (V * (4 + narrow + 4) + E * narrow))
            ledger.drop("chunks")
            ledger.now = "backward of the loss"
            ledger.hold("d last norm", self.of(E, self.norm))
            ledger.hold("sum of the head's gradient", V * E * 4)
            ledger.hold("chunks", chunk * (V * (p + narrow + 4) + E * 2 * narrow))
            ledger.drop("chunks")
            ledger.hold("a chunk and its share", chunk * (V + E) * p + V * E * p)
            ledger.drop("a chunk and its share", "sum of the head's gradient", "head, narrow")
            ledger.drop("last norm", "sums and targets")
        else:
            narrow = V if p == 2 else 0
            if self.casts:
                ledger.hold("input of head", self.of(E, p))
                ledger.hold("head, narrow", V * E * p)
                ledger.drop("last norm")
            ledger.hold("logits", self.of(V, p))
            ledger.hold("logits, wide", self.of(narrow, 4))
            ledger.hold("log of the softmax", self.of(V, 4))
            ledger.drop("logits", "logits, wide")
            ledger.now = "backward of the loss"
            ledger.hold("d log", self.of(V, 4))
            ledger.hold("d logits, wide", self.of(V, 4))
            ledger.drop("d log", "log of the softmax")
            ledger.hold("d logits", self.of(narrow, p))
            ledger.drop("d logits, wide" if narrow else "")
            ledger.hold("d last norm", self.of(E, p))
            ledger.drop("d logits", "d logits, wide", "last norm", "input of head", "head, narrow")
            self._widen("d last norm", E)
        ledger.add("gradients", table + 2 * E * self.weight)
        ledger.hold("dx", self.of(E, self.stream))
        ledger.drop("d last norm", "dx")  # in the place of the last layer's result

    def _update(self, count: int) -> None:
        ledger = self.ledger
        ledger.now = "update of the parameters"
        largest = max(self.config.vocab_size, self.hidden) * self.width
        # PyTorch's AdamW takes the root of all second moments at once; an 8-bit one goes tensor by tensor.
        whole = self.options.optimizer == "adamw"
        ledger.hold("roots", count * self.weight if whole else 2 * 4 * largest)

    # What checkpointing keeps, on the device or on the host.

    @property
    def _tile_rows(self) -> int:
        return min(self.options.mlp_tile, self.rows)

    def _kept_bytes(self) -> list[float]:
        kept = [self.of(self.width, self.stream)]
        if self.options.checkpointing == "selective":
            kept += [self.of(self.width, self.product), self.of(self.config.num_heads, 4)]
        return kept

    def _leave(self, layer: int) -> None:
        self.ledger.drop("x", "out", "lse", layer=layer)

    def _fetch(self, layer: int) -> None:
        ledger = self.ledger
        if layer < 0 or (layer, "x") in ledger.entries:
            return
        ledger.hold("x", self.of(self.width, self.stream), layer=layer)
        if self.options.checkpointing == "selective":
            ledger.hold("out", self.of(self.width, self.product), layer=layer)
            ledger.hold("lse", self.of(self.config.num_heads, 4), layer=layer)
