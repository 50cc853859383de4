"""What one training step of a `LongNetLM` holds on a GPU, computed instead of measured.

The step is written down as a ledger: every tensor of a size that counts is entered when the model, its loss or their
backward pass makes it, and struck out when autograd and Python release it. The peak is the highest balance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dilated_attention_pytorch.core.pattern import grid_rows, most_scratch, rounds_little
from dilated_attention_pytorch.kernels.feed_forward import WIDEST
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.train.memory import MemoryOptions
from dilated_attention_pytorch.train.muon import TOGETHER
from dilated_attention_pytorch.train.offload import LAYERS_ON_DEVICE

KINDS = ("weights", "gradients", "optimizer", "kept", "temporary")
_FIXED = ("weights", "gradients", "optimizer")
# Multiprocessors of an H100 or H200, each with a scratch buffer of its own in the backward of attention.
_MULTIPROCESSORS = 132
_EIGHT_BIT = 2 * (1 + 4 / 256)  # bytes per parameter: two numbers, and a float32 scale for every 256


@dataclass(frozen=True)
class Footprint:
    """Bytes of a step at its peak, by kind; `at` is what runs then, `host` what offloading keeps in host memory."""

    parts: dict[str, int]
    at: str
    host: int

    @property
    def peak(self) -> int:
        return sum(self.parts.values())


def parameter_count(config: ModelConfig) -> int:
    """The number of parameters of a `LongNetLM`.

    >>> parameter_count(ModelConfig(vocab_size=50_304))
    123781632
    """
    tables = (1 if config.tie_weights else 2) * config.vocab_size * config.d_model
    return tables + config.num_layers * _layer_parameters(config) + _norm_parameters(config, config.d_model)


def _layer_parameters(config: ModelConfig) -> int:
    E, F, K = config.d_model, config.dim_feedforward, _kv_width(config)
    biases = 2 * E + 2 * K + (feed_forward_matrices(config) - 1) * F + E
    norms = 3 * _norm_parameters(config, E) + _norm_parameters(config, F) + 2 * config.head_dim * config.qk_norm
    return _layer_matrices(config) + biases + norms


def _layer_matrices(config: ModelConfig) -> int:
    """The number of weights in the matrices of a layer."""
    E = config.d_model
    return 2 * E * (E + _kv_width(config)) + feed_forward_matrices(config) * E * config.dim_feedforward


def feed_forward_matrices(config: ModelConfig) -> int:
    """The number of matrices in a feed-forward network."""
    return 3 if config.activation == "swiglu" else 2


def _norm_parameters(config: ModelConfig, features: int) -> int:
    return features if config.norm == "rms" else 2 * features


def _kv_width(config: ModelConfig) -> int:
    return (config.num_kv_heads or config.num_heads) * config.head_dim


def footprint(config: ModelConfig, tokens: int, options: MemoryOptions, *, batch: int = 1) -> Footprint:
    """What a step on `batch` sequences of `tokens` tokens holds, once the optimizer has its state.

    `peak` is what PyTorch's allocator hands out. A GPU needs more than that: see `needed`.

    >>> options = MemoryOptions(checkpointing="full", mlp_tile=4096, loss_chunk=4096, precision="bf16")
    >>> found = footprint(ModelConfig(vocab_size=50_304), 131_072, options)
    >>> found.at, round(found.peak / 2**30)
    ('backward of the feed-forward network', 10)
    """
    for name in ("float8", "structured_sparsity", "dropout", "activation_dropout"):
        if value := getattr(config if "dropout" in name else options, name):
            raise ValueError(f"the memory model does not cover {name}={value}: leave it out, or measure a step")
    if tokens < 1 or batch < 1:
        raise ValueError(f"tokens and batch must be at least 1, got {tokens} and {batch}")
    return _Step(config, tokens * batch, tokens, options).run()


def needed(peak: int) -> int:
    """The memory of a GPU on which a peak fits, with fragmentation and CUDA's own context."""
    return math.ceil(1.03 * peak) + (600 << 20)


def attention_scratch(config: ModelConfig, tokens: int, batch: int, itemsize: int) -> int:
    """The most bytes in which the backward of attention sums dq."""
    branches = [branch for spec in config.specs for branch in spec.branches]
    rows = max(grid_rows(min(branch.segment_length, tokens), branch.dilation_rate, 0) for branch in branches)
    kv_heads = config.num_kv_heads or config.num_heads
    padded = 64 if config.head_dim <= 64 else 128
    wanted = _MULTIPROCESSORS * config.num_heads // kv_heads * -(-rows // 128) * 128 * padded * 4
    return min(wanted, most_scratch(4 * (config.num_heads + kv_heads) * batch * tokens * config.head_dim * itemsize))


class _Step:
    """The ledger, and the step that writes it: entries have the number of their layer, or -1, and a name."""

    def __init__(self, config: ModelConfig, rows: int, positions: int, options: MemoryOptions) -> None:
        self.config, self.rows, self.positions, self.options = config, rows, positions, options
        self.width, self.kv_width, self.hidden = config.d_model, _kv_width(config), config.dim_feedforward
        # Bytes of a number: in parameters, in what layers hand on, in what a norm returns, in products.
        self.weight = self.stream = self.norm = 2 if options.parameters == "bf16" else 4
        self.product = 4 if options.precision == "fp32" else 2
        # Autocast: every product converts what it is given. A factor of sizes, so that nothing is held without it.
        self.casts = self.product != self.stream
        heads = config.num_kv_heads or config.num_heads
        self.wide_sums = self.product == 2 and not rounds_little(config.spec, config.spec.offsets(heads))
        self.gated = config.activation == "swiglu"
        self.mlp_weights = feed_forward_matrices(config) * self.width * self.hidden
        self.tile = min(options.mlp_tile, rows)
        # Tiles cut a compiled layer, which then holds what an eager one does; other backends fuse nothing.
        self.compiled = options.compile and options.compile_backend == "inductor" and not self.tile
        # Its feed-forward network keeps no normed rows: backward computes them again.
        self.fused = self.compiled and config.activation == "gelu" and config.norm == "layer" and self.hidden <= WIDEST
        self.checkpointed, self.every = options.checkpointing != "none", options.layers_per_checkpoint
        self.selective = options.checkpointing == "selective"
        self.turned = config.positions != "none"
        self.entries: dict[tuple[int, str], int] = {}
        self.layer = -1  # the one at work; entries of others are kept
        self.saves = False  # whether autograd saves what the layer at work makes
        self.balance = self.highest = self.host = 0
        self.parts: dict[str, int] = {}
        self.now = self.at = ""

    def hold(self, name: str, size: float, layer: int | None = None) -> None:
        key = (self.layer if layer is None else layer, name)
        assert key not in self.entries, f"{key} is held already"
        self.entries[key] = int(size)
        self.balance += int(size)
        if self.balance > self.highest:
            self.highest, self.at, self.parts = self.balance, self.now, self._by_kind()

    def drop(self, *names: str, layer: int | None = None) -> None:
        for name in names:
            self.balance -= self.entries.pop((self.layer if layer is None else layer, name), 0)

    def make(self, name: str, width: float, size: int, *done: str) -> None:
        """Hold a row of `width` numbers per token; then drop what is done with."""
        self.hold(name, self.rows * width * size)
        self.drop(*done)

    def drop_layer(self, *but: str) -> None:
        """Drop what the layer at work holds, except some of it."""
        self.drop(*(name for layer, name in [*self.entries] if layer == self.layer and name not in but))

    def unless_saved(self, *names: str) -> tuple[str, ...]:
        return () if self.saves else names

    def linear(self, name: str, width: int, features: int) -> None:
        """Make the result of a linear layer; autograd saves its input, which autocast converts."""
        self.make(f"input of {name}", features, self.product * self.casts)
        self.make(name, width, self.product, *self.unless_saved(f"input of {name}"))

    def briefly(self, name: str, size: float) -> None:
        self.hold(name, size)
        self.drop(name)

    def replace(self, name: str, width: int, size: int) -> None:
        """Make what takes the place of `name`, which is dropped."""
        self.make(f"next {name}", width, size, name)
        self.entries[self.layer, name] = self.entries.pop((self.layer, f"next {name}"))

    def cast(self, name: str, width: int, size: int) -> None:
        """Convert a gradient as autocast does, because forward has converted the tensor."""
        if self.casts:
            self.replace(name, width, size)

    def add_gradients(self, size: float) -> None:
        before = self.entries.get((-1, "gradients"), 0)
        self.drop("gradients", layer=-1)
        self.hold("gradients", before + size, layer=-1)

    def _by_kind(self) -> dict[str, int]:
        kinds = dict.fromkeys(KINDS, 0)
        for (layer, name), size in self.entries.items():
            own = layer == self.layer and name != "x"
            kinds[name if name in _FIXED else "temporary" if own else "kept"] += size
        return kinds

    def run(self) -> Footprint:
        config, E = self.config, self.width
        count = parameter_count(config)
        self.hold("weights", count * self.weight)
        matrices = config.num_layers * _layer_matrices(config)
        moments = {"adamw": 2 * self.weight * count, "muon": self.weight * (2 * count - matrices)}
        self.hold("optimizer", moments.get(self.options.optimizer, _EIGHT_BIT * count))
        self.hold("tokens", self.rows * 24)
        tables = {"none": 0, "rotary": 2, "xpos": 3}[config.positions]
        self.hold("rotation", self.positions * config.head_dim // 2 * 4 * tables)
        self.now = "forward of the embedding"
        self.make("looked up", E, self.stream)
        self.hold("x", self.rows * E * self.stream, layer=0)
        self.drop("looked up")
        for self.layer in range(config.num_layers):
            if self.options.offload and self.layer % self.every == 0:
                self.drop("x", "out", "lse", layer=self.layer - LAYERS_ON_DEVICE * self.every)
            self._forward(saves=not self.checkpointed)
            if self.layer % self.every:
                self.drop("x")
            elif self.options.offload:  # PyTorch pins host memory in powers of two
                self.host += sum(1 << (int(size) - 1).bit_length() for size in self._kept().values())
        self.layer = config.num_layers
        self._loss()
        if self.checkpointed:
            for layer in range(config.num_layers):
                self.drop("weights, narrow", layer=layer)
        for self.layer in reversed(range(config.num_layers)):
            self.make("dy", E, self.product * self.casts)
            if self.checkpointed:
                self._make_input()
                self._forward(saves=True, again=True)
            self._backward()
        self.layer = -1
        self.now = "backward of the embedding"
        if config.tie_weights:
            self.briefly("table", config.vocab_size * E * self.weight)
        else:
            self.add_gradients(config.vocab_size * E * self.weight)
        self.drop("x", layer=0)
        self.now = "update of the parameters"
        # PyTorch's fused AdamW holds nothing; an 8-bit one holds two numbers of float32 per weight of one tensor, and
        # Muon the updates of a batch of matrices, and four more of their size in bfloat16.
        if self.options.optimizer == "muon":
            together = max(min(TOGETHER, matrices), max(E, self.hidden) * E)
            self.hold("update", together * (self.weight + 4 * 2))
        elif self.options.optimizer != "adamw":
            self.hold("update", max(config.vocab_size, self.hidden) * E * 2 * 4)
        return Footprint(self.parts, self.at, self.host)

    def _make_input(self) -> None:
        """Make or fetch the input of the layer that runs again, and fetch what the checkpoint before it keeps."""
        last, first = self.layer, self.layer // self.every * self.every
        for layer in (first, first - self.every):
            if layer >= 0 and (layer, "x") not in self.entries:  # in host memory
                for name, size in self._kept().items():
                    self.hold(name, size, layer)
        for self.layer in range(first, last):
            if (self.layer + 1, "x") not in self.entries:
                self._forward(saves=False)
                self.drop("weights, narrow")
        self.layer = last

    def _kept(self) -> dict[str, float]:
        """What checkpointing keeps of a layer."""
        kept: dict[str, float] = {"x": self.rows * self.width * self.stream}
        if self.selective:
            kept |= {"out": self.rows * self.width * self.product, "lse": self.rows * self.config.num_heads * 4}
        return kept

    def _forward(self, *, saves: bool, again: bool = False) -> None:
        """The forward pass of a layer; one that runs `again` hands nothing on."""
        self.saves = saves
        self.now = "attention, computed again" if again else "forward of attention"
        # Autocast remembers converted weights until its context ends, and autograd those that it saves; not tiles'.
        converted = _layer_parameters(self.config) - (self.mlp_weights if self.tile else 0)
        self.hold("weights, narrow", converted * self.product * self.casts)
        (self._forward_compiled if self.compiled else self._forward_eager)(again)
        if not again:
            self.hold("x", self.rows * self.width * self.stream, layer=self.layer + 1)
        self.drop("y")
        if not saves:
            results = ("out", "lse") if self.selective else ()
            self.drop_layer("x", *results, *(() if self.compiled else ("weights, narrow",)))

    def _forward_eager(self, again: bool) -> None:
        """The tensors of `DilatedTransformerEncoderLayer`, in their order. Python holds what a function has named."""
        E, K, F, p, n = self.width, self.kv_width, self.hidden, self.product, self.norm
        self.make("norm1", E, n)
        for name, width in (("q", E), ("k", K), ("v", K)):
            self.linear(name, width, E)
        normed = ""
        if self.config.qk_norm:
            normed = " normed"
            for name, width in (("q", E), ("k", K)):
                self.make(f"{name}, wide", width, 4 * self.casts)
                self.make(f"{name} normed, wide", width, n * self.casts)
                self.make(f"{name} normed", width, p, f"{name} normed, wide", *self.unless_saved(f"{name}, wide"))
            if self.casts or not self.saves:  # else autograd has saved them for the norms
                self.drop("q", "k")
        if self.turned:
            for name, width in (("q", E), ("k", K)):
                self.briefly("halves, and both", self.rows * 2 * width * 4)
                self.make(f"{name} turned", width, p)
            self.drop(f"q{normed}", f"k{normed}")
        self._attend(again)
        self.make("out, wide", E, 4 * self.casts)
        self.make("attention's norm", E, n, *self.unless_saved("out, wide"))
        if again or not self.selective:
            self.drop(*self.unless_saved("out", "lse"))
        self.linear("attended", E, E)
        self.drop(*self.unless_saved("q", "k", "q normed", "k normed", "q turned", "k turned", "v"))
        if self.casts or not self.saves:
            self.drop("norm1", "attention's norm")
        self.make("x1", E, self.stream, "attended")
        self.now = "forward of the feed-forward network"
        self.make("norm2", E, n)
        if not self.tile:
            if self.gated:
                self.linear("gate", F, E)
                self.make("opened", F, p, *self.unless_saved("gate"))
            self.linear("hidden", F, E)
            self.make("active", F, p, *self.unless_saved("hidden", "opened"))
            self.make("active, wide", F, 4 * self.casts)
            self.make("inner norm", F, n, *self.unless_saved("active, wide"))
            self.linear("y", E * (not again), F)
            self.drop(*(("active", "inner norm", "norm2") if self.casts else self.unless_saved("active", "inner norm")))
        elif not again:  # a layer that runs again ends where the tiles would begin
            self.make("y", E, p)
            wide = (4 + n) if self.casts else n
            self.briefly("tile", self.tile * (F * (p + wide + p) + E * p))

    def _forward_compiled(self, again: bool) -> None:
        """A compiled layer holds the inputs of its linear layers and what attention reads until the pass ends.

        Norms, activations and conversions are computed again within the kernels around them.
        """
        E, K, F, p = self.width, self.kv_width, self.hidden, self.product
        self.make("input of q", E, p)
        for name, width in (("q", E), ("k", K), ("v", K)):
            self.make(name, width, p)
        if self.turned or self.config.qk_norm:
            for name, width in (("q", E), ("k", K)):
                self.make(f"{name} turned", width, p, *(() if self.config.qk_norm else (name,)))
        self._attend(again)
        self.make("input of attended", E, p)
        self.make("attended", E, p)
        self.now = "forward of the feed-forward network"
        self.make("input of hidden", E, p)
        self.make("hidden", F, p)
        self.make("gate", F, p * self.gated)
        self.make("input of y", F, p)
        self.make("y", E, p, *(("input of y",) if self.fused else ()))

    def _attend(self, again: bool) -> None:
        if again and self.selective:  # its results are kept
            return
        self.make("sums", self.width, 4 * self.wide_sums)
        self.make("out", self.width, self.product)
        self.make("lse", self.config.num_heads, 4, "sums")

    def _backward(self) -> None:
        """The backward pass of a layer: what forward saved goes as its gradients come."""
        (self._backward_compiled if self.compiled else self._backward_eager)()
        self.make("dx", self.width, self.stream)
        self.drop_layer("x")
        self.drop("x", layer=self.layer + 1)  # its gradient takes the place of this layer's input
        self.add_gradients((_layer_parameters(self.config) - self.mlp_weights) * self.weight)

    def _backward_eager(self) -> None:
        E, F, p, n = self.width, self.hidden, self.product, self.norm
        self.now = "backward of the feed-forward network"
        if self.tile:
            self.make("d norm2", E, n)
            held = ((p + 4 + 4 + 4) if self.casts else 4 * p) + 2 * p * self.gated
            self.hold("tile", self.tile * (F * held + E * p * (1 + self.gated * self.casts)))
            self.hold("sums of the weights' gradients", self.mlp_weights * (4 + p))
            self.drop("tile", "sums of the weights' gradients", "dy")
        else:
            self.make("d inner norm", F, p, "dy", "inner norm", "input of y")
            self.cast("d inner norm", F, self.stream)
            self.make("d active", F, n, "d inner norm", "active, wide", "active")
            self.cast("d active", F, p)
            self.make("d opened", F, p * self.gated)
            self.make("d hidden", F, p, "hidden", "opened", "d active")
            if self.gated:
                self.make("d norm2 from hidden", E, p, "d hidden", "input of hidden")
                self.cast("d norm2 from hidden", E, self.stream)
                self.make("d gate", F, p, "gate", "d opened")
            self.make("d norm2", E, p, "d hidden", "d gate", "input of hidden", "input of gate")
        self.add_gradients(self.mlp_weights * self.weight)
        self.cast("d norm2", E, self.stream)
        self.drop("d norm2 from hidden")  # added to the other
        self.make("d x1", E, self.stream, "d norm2", "x1", "norm2", "d x1")
        self.now = "backward of attention"
        self.make("d attended", E, p * self.casts)
        self.make("d norm", E, p, "d attended", "input of attended", "attention's norm")
        self.cast("d norm", E, self.stream)
        self.make("d out", E, n, "d norm", "out, wide")
        self.cast("d out", E, p)
        gradients = self._attention_backward()
        if self.turned:
            for name in ("dk", "dq"):
                self.briefly("turned back", self.rows * gradients[name] * 2.5 * 4)
        if self.config.qk_norm:
            for name in ("k", "q"):
                gradient, width = f"d{name}", gradients[f"d{name}"]
                self.cast(gradient, width, self.stream)
                self.replace(gradient, width, n)
                self.drop(f"{name}, wide")
                self.cast(gradient, width, p)
        self.drop("q", "k")
        self.now = "backward of the projections"
        for name in ("v", "k", "q"):
            self.make(f"d input of {name}", E, p)
            self.cast(f"d input of {name}", E, self.stream)
            self.drop(f"d{name}", f"input of {name}")
            if name != "v":
                self.drop(f"d input of {name}")  # added to the first
        self.drop("norm1", "weights, narrow")

    def _backward_compiled(self) -> None:
        E, F, p = self.width, self.hidden, self.product
        self.now = "backward of the feed-forward network"
        if self.fused:
            self.make("d hidden", F, p)
            self.make("input of y", F, p, "input of y", "hidden")
        else:
            self.make("d inner norm", F, p, "input of y")
            self.make("d gate", F, p * self.gated)
            self.make("d hidden", F, p, "d inner norm", "hidden", "gate")
        self.make("d norm2", E, p, "d hidden", "d gate", "input of hidden")
        self.add_gradients(self.mlp_weights * self.weight)
        self.make("d x1", E, self.stream, "d norm2", "attended", "dy", "d x1")
        self.now = "backward of attention"
        self.make("d norm", E, p, "input of attended")
        self.make("d out", E, p, "d norm")
        gradients = self._attention_backward()
        self.now = "backward of the projections"
        for name, width in gradients.items():
            self.replace(name, width, p)
        self.make("d input", E, 2 * p)
        self.drop(*gradients, "input of q", "weights, narrow")

    def _attention_backward(self) -> dict[str, int]:
        """Hold dk, dq and dv in place of what attention has saved; returns their widths."""
        p, gradients = self.product, {"dk": self.kv_width, "dq": self.width, "dv": self.kv_width}
        for name, width in gradients.items():
            self.make(name, width, 4 if self.wide_sums else p)
        self.make("delta", self.config.num_heads, 4)
        self.hold("scratch", attention_scratch(self.config, self.positions, self.rows // self.positions, p))
        if self.wide_sums:
            for name, width in gradients.items():
                self.make(f"{name}, rounded", width, p)
            for name in gradients:
                self.drop(name)
                self.entries[self.layer, name] = self.entries.pop((self.layer, f"{name}, rounded"))
        self.drop("delta", "scratch", "q normed", "k normed", "q turned", "k turned", "v", "out", "lse", "d out")
        if self.compiled:
            self.drop("q", "k")
        return gradients

    # The head and the loss.

    def _loss(self) -> None:
        E, V, p, capped = self.width, self.config.vocab_size, self.product, self.config.logit_soft_cap is not None
        self.now = "forward of the loss"
        self.make("last norm", E, self.norm)
        if self.options.loss_chunk:
            chunk = min(self.options.loss_chunk, self.rows)
            self.hold("targets", self.rows * 9)
            self.hold("head, narrow", V * E * p * self.casts)
            self.make("d last norm, of the sum", E, self.norm)
            self.hold("sum of the head's gradient", V * E * 4)
            rows = chunk * (V + E * self.casts) * p  # of logits, and of what they are the product of
            self.briefly("a chunk and its gradient", rows + chunk * E * p)
            self.briefly("a chunk and its share", rows + V * E * p)
            self.drop("targets", "head, narrow", "last norm")
            self.now = "backward of the loss"
            self.make("d last norm", E, self.norm)
            self.hold("the head's gradient", V * E * (4 if self.weight == 4 else 4 + self.weight))
            self.drop("d last norm, of the sum", "sum of the head's gradient", "the head's gradient")
        else:
            if self.casts:
                self.make("input of head", E, p)
                self.hold("head, narrow", V * E * p)
                self.drop("last norm")
            self.make("logits", V, p)
            if capped:
                self.make("logits over the cap", V, p)
                self.make("tanh", V, p, "logits over the cap")
                self.replace("logits", V, p)
            if p == 2:
                self.make("logits, wide", V, 4)
            self.make("log of the softmax", V, 4, "logits", "logits, wide")
            self.now = "backward of the loss"
            self.make("d log", V, 4)
            self.make("d logits", V, 4, "d log", "log of the softmax")
            if p == 2:
                self.replace("d logits", V, p)
            if capped:
                for done in ("", "tanh", ""):  # times the cap, through tanh, over the cap
                    self.replace("d logits", V, p)
                    self.drop(done)
            self.make("d last norm", E, p, "d logits", "last norm", "input of head", "head, narrow")
            self.cast("d last norm", E, self.stream)
        self.add_gradients(V * E * self.weight + _norm_parameters(self.config, E) * self.weight)
        self.make("dx", E, self.stream, "d last norm", "dx")  # in the place of the last layer's result
