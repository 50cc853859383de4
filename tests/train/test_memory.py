"""Each memory technique alone and together: the same loss and gradients as without, and less memory held."""

from __future__ import annotations

import copy
import itertools
import pickle
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode

from dilated_attention_pytorch import DilatedAttention, LongNet, LongNetLM
from dilated_attention_pytorch.core.pool import WorkspacePool
from dilated_attention_pytorch.kernels import op
from dilated_attention_pytorch.nn.transformer import FeedForward
from dilated_attention_pytorch.train import memory
from dilated_attention_pytorch.train.footprint import footprint
from dilated_attention_pytorch.train.memory import (
    MemoryOptions,
    compile_now,
    loss,
    make_optimizer,
    make_scaler,
    prepare,
)
from dilated_attention_pytorch.train.muon import MuonWithAdamW
from dilated_attention_pytorch.train.offload import Offload
from dilated_attention_pytorch.train.recompute import TiledFeedForward

from ..later import LATER
from ..ranks import run_ranks

LAYERS, VOCABULARY, TOKENS = 4, 50, 70
OFFLOAD = {"offload": True, "offload_least_bytes": 1}
# Every technique that leaves the mathematics as it is, and that needs no GPU.
ALONE = {
    "full": {"checkpointing": "full"},
    "selective": {"checkpointing": "selective"},
    "offload": {"checkpointing": "full", **OFFLOAD},
    "every": {"checkpointing": "full", "layers_per_checkpoint": 3},
    "tiled": {"mlp_tile": 24},
    "chunked": {"loss_chunk": 32},
    "compiled": {"compile": True, "compile_backend": "aot_eager"},
}
PAIRS = [(a, b) for a, b in itertools.combinations(ALONE, 2) if not {a, b} <= {"full", "selective", "offload", "every"}]
ALL = {**ALONE["selective"], **OFFLOAD, **ALONE["tiled"], **ALONE["chunked"]}


def small_model(**settings: object) -> LongNetLM:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "num_heads": 4, "num_layers": LAYERS, "vocab_size": VOCABULARY, "num_decoder_layers": 0}
    return LongNetLM(**(sizes | settings), segment_lengths=(16, 64), dilation_rates=(1, 4)).double()


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train_once(options: MemoryOptions, model: LongNetLM | None = None, **how: object):
    """The loss and the gradients by name of one step with these options."""
    model = prepare(small_model() if model is None else model, options)
    model.zero_grad()
    torch.manual_seed(2)
    value = loss(model, *drawn(), options, **how)
    value.backward()
    return value.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(found, expected, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def plain():
    return train_once(MemoryOptions())


@pytest.fixture
def attention_calls(monkeypatch):
    """How often attention was computed forward."""
    calls = []
    compute = op.partial
    monkeypatch.setattr(op, "partial", lambda *args: calls.append(1) or compute(*args))
    return calls


@pytest.mark.parametrize("technique", ALONE)
def test_a_technique_alone_changes_neither_loss_nor_gradients(technique, plain) -> None:
    assert_same(train_once(MemoryOptions(**ALONE[technique])), plain)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_two_techniques_together_change_neither_loss_nor_gradients(pair, plain) -> None:
    options = MemoryOptions(**{name: value for technique in pair for name, value in ALONE[technique].items()})
    assert_same(train_once(options), plain)


@pytest.mark.parametrize("compiled", [False, True])
def test_all_techniques_together_change_neither_loss_nor_gradients(compiled, plain, attention_calls) -> None:
    options = MemoryOptions(**ALL, **(ALONE["compiled"] if compiled else {}))
    assert_same(train_once(options), plain)
    expected = train_once(MemoryOptions(), small_model(**LATER))
    attention_calls.clear()
    assert_same(train_once(options, small_model(**LATER)), expected)
    assert len(attention_calls) == LAYERS


def test_inductor_keeps_the_sums_of_norms_apart_unless_a_mode_chooses_its_options(monkeypatch) -> None:
    found = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **how: found.append(how))
    for changes in ({}, {"compile_mode": "max-autotune-no-cudagraphs"}, {"compile_backend": "aot_eager"}):
        prepare(small_model(num_layers=1), MemoryOptions(compile=True, **changes))
    ours, by_mode, other = found
    known = hasattr(torch._inductor.config.triton, "mix_order_reduction")
    assert ours["options"] == ({"triton.mix_order_reduction": False} if known else None)
    assert (by_mode["mode"], by_mode["options"]) == ("max-autotune-no-cudagraphs", None)
    assert (other["backend"], other["options"]) == ("aot_eager", None)


def test_inductor_compiles_layers_that_are_checkpointed_and_tiled(attention_calls) -> None:
    expected = train_once(MemoryOptions(), small_model(num_layers=1))
    found = train_once(MemoryOptions(**ALL, compile=True), small_model(num_layers=1))
    assert_same(found, expected, tolerance=1e-9)  # wider: fused sums have another order
    assert len(attention_calls) == 2


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["chunked", "full", "selective", "offload"])
def test_all_layers_compile_into_one_graph_ahead_of_the_first_step(name, packed, plain) -> None:
    torch.compiler.reset()
    counters.clear()
    tokens, targets = drawn()
    lengths = {}
    if packed:
        tokens, targets = tokens.reshape(1, -1), targets.reshape(1, -1)
        lengths = {"cu_seqlens": torch.tensor([0, TOKENS, 2 * TOKENS])}
    options = MemoryOptions(**ALONE[name], **ALONE["compiled"])
    model = prepare(small_model(), options)
    assert compile_now(model, torch.zeros_like(tokens), options, **lengths) == ""
    assert len(model.layers) == LAYERS
    assert all(parameter.grad is None for parameter in model.parameters())
    value = loss(model, tokens, targets, options, **lengths)
    value.backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert_same((value.detach(), {name: one.grad for name, one in model.named_parameters()}), plain)


def test_staggered_layers_compile_into_two_graphs_ahead_of_the_first_step() -> None:
    torch.compiler.reset()
    counters.clear()
    tokens, targets = drawn()
    options = MemoryOptions(**ALONE["compiled"])
    model = prepare(small_model(stagger=True), options)
    assert compile_now(model, torch.zeros_like(tokens), options) == ""
    assert len(model.layers) == LAYERS > 2
    assert counters["stats"]["unique_graphs"] == 2
    loss(model, tokens, targets, options).backward()
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("changes", [ALONE["selective"], ALL], ids=["selective", "all"])
def test_a_prepared_model_can_be_compiled_whole_and_attends_once(changes, plain, attention_calls) -> None:
    options = MemoryOptions(**changes)
    model = prepare(small_model(), options)
    value = loss(torch.compile(model, backend="aot_eager"), *drawn(), options)
    value.backward()
    assert_same((value.detach(), {name: p.grad for name, p in model.named_parameters()}), plain)
    assert len(attention_calls) == LAYERS


def test_muon_updates_the_matrices_of_layers_and_adamw_the_rest() -> None:
    model, twin = small_model(tie_weights=False), small_model(tie_weights=False)
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    optimizer = make_optimizer(model, MemoryOptions(optimizer="muon"), betas=(0.9, 0.95), **settings)
    matrices = [p for p in twin.layers.parameters() if p.dim() == 2]
    tables, vectors = [twin.embedding.weight, twin.head.weight], [p for p in twin.parameters() if p.dim() == 1]
    by_hand = [
        torch.optim.Muon(matrices, **settings, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(tables, betas=(0.9, 0.95), **settings),
        torch.optim.AdamW(vectors, betas=(0.9, 0.95), lr=1e-2, weight_decay=0.0),
    ]
    for _ in range(3):
        for one in (model, twin):
            loss(one, *drawn(), MemoryOptions()).backward()
        for one in (optimizer, *by_hand):
            one.step()
            one.zero_grad()
    for one, other in zip(model.parameters(), twin.parameters()):  # batched products may round otherwise in bfloat16
        torch.testing.assert_close(one, other, rtol=0, atol=2e-4)
    held = sum(x.nbytes for state in optimizer.state.values() for name, x in state.items() if name != "step")
    assert footprint(model.config, 64, MemoryOptions(optimizer="muon")).parts["optimizer"] * 2 == held  # in float64
    twin.load_state_dict(model.state_dict())
    copied = make_optimizer(twin, MemoryOptions(optimizer="muon"), **settings)
    copied.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in (model, twin):
        loss(one, *drawn(), MemoryOptions()).backward()
    optimizer.step()
    copied.step()
    for one, other in zip(model.parameters(), twin.parameters()):
        assert torch.equal(one, other)


def test_a_copy_of_muon_goes_on_alone_and_takes_further_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    first, second = model
    groups = [{"params": [first.bias]}]
    optimizer = MuonWithAdamW([first.weight], groups, lr=0.1, weight_decay=0.0)
    x = torch.randn(2, 4)
    model(x).sum().backward()
    optimizer.step()
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    for one, its in ((model, optimizer), (twin, twin_optimizer)):
        its.zero_grad()
        one(x).sum().backward()
        its.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    before = second.bias.clone()
    model(x).sum().backward()
    optimizer.add_param_group({"params": [second.bias]})
    optimizer.step()
    assert not torch.equal(second.bias, before)


def test_muon_is_refused_where_it_cannot_be() -> None:
    options = MemoryOptions(optimizer="muon")
    with pytest.raises(TypeError, match="does not identify: pass the model"):
        make_optimizer(small_model().parameters(), options, lr=1e-2)
    with pytest.raises(ValueError, match="finds no matrix in a layer of DilatedAttention: use 'adamw'"):
        make_optimizer(DilatedAttention([16], [1]), options, lr=1e-2)


@pytest.mark.parametrize("technique", ["none", "full", "selective"])
def test_only_full_checkpointing_computes_attention_again(technique, attention_calls) -> None:
    train_once(MemoryOptions(checkpointing=technique))
    assert len(attention_calls) == (2 * LAYERS if technique == "full" else LAYERS)


def test_layers_between_checkpoints_run_once_more_but_the_last_of_each_group(attention_calls) -> None:
    train_once(MemoryOptions(**ALONE["every"]))  # groups of three layers and of one
    assert len(attention_calls) == 2 * LAYERS + 2


def test_attention_is_kept_under_a_dispatch_mode_and_in_a_compiled_layer(plain, attention_calls) -> None:
    with FlopCounterMode(display=False):
        assert_same(train_once(MemoryOptions(checkpointing="selective")), plain)
    assert len(attention_calls) == LAYERS
    assert_same(train_once(MemoryOptions(checkpointing="selective", **ALONE["compiled"])), plain)
    assert len(attention_calls) == 2 * LAYERS


@pytest.mark.parametrize("technique", ["full", "selective", "offload", "every", "chunked"])
def test_dropout_is_drawn_alike_when_a_layer_runs_again(technique) -> None:
    dropouts = {"dropout": 0.2, "attention_dropout": 0.1}
    expected = train_once(MemoryOptions(), small_model(**dropouts))
    assert_same(train_once(MemoryOptions(**ALONE[technique]), small_model(**dropouts)), expected)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_a_tile_is_computed_twice_also_in_a_layer_that_runs_again(checkpointing, monkeypatch) -> None:
    calls = []
    compute = FeedForward.forward
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: calls.append(len(x)) or compute(self, x))
    train_once(MemoryOptions(checkpointing=checkpointing, mlp_tile=24))
    assert calls == [24, 24, 24, 24, 24, 20] * (2 * LAYERS)


def test_a_tile_draws_the_dropout_of_forward_again() -> None:
    torch.manual_seed(0)
    tiled = TiledFeedForward(FeedForward(4, 8, dropout=0.4).double(), rows=3)
    x = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return tiled(x)

    torch.autograd.gradcheck(run, (x,))
    out = run(x)
    state = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_graph_that_is_retained_gives_its_gradients_twice(plain) -> None:
    options = MemoryOptions(**ALL)
    model = prepare(small_model(), options)
    value = loss(model, *drawn(), options)
    value.backward(retain_graph=True)
    value.backward()
    doubled = {name: 2 * gradient for name, gradient in plain[1].items()}
    assert_same((value.detach(), {n: p.grad for n, p in model.named_parameters()}), (plain[0], doubled))


def test_a_second_derivative_of_a_tiled_network_is_refused() -> None:
    x = torch.randn(8, 4, requires_grad=True)
    tiled = TiledFeedForward(FeedForward(4, 8), rows=3)
    (slope,) = torch.autograd.grad(tiled(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="mlp_tile\\) has first derivatives only"):
        slope.sum().backward()


def test_accumulated_gradients_are_those_of_both_batches(plain) -> None:
    options = MemoryOptions(**ALL)
    model = prepare(small_model(), options)
    for _ in range(2):
        loss(model, *drawn(), options).backward()
    doubled = {name: 2 * gradient for name, gradient in plain[1].items()}
    assert_same((plain[0], {n: p.grad for n, p in model.named_parameters()}), (plain[0], doubled))


def test_a_prepared_model_keeps_its_names_copies_and_pickles(plain) -> None:
    options = MemoryOptions(**ALL)
    model = prepare(small_model(), options)
    assert model.state_dict().keys() == small_model().state_dict().keys()
    model.load_state_dict(small_model().state_dict())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        value = loss(twin, *drawn(), options)
        value.backward()
        assert_same((value.detach(), {n: p.grad for n, p in twin.named_parameters()}), plain)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_prepared_model_evaluates_as_the_plain_one() -> None:
    tokens, _ = drawn()
    model = prepare(small_model(dropout=0.5), MemoryOptions(**ALL)).eval()
    torch.testing.assert_close(model(tokens), small_model(dropout=0.5).eval()(tokens), rtol=1e-10, atol=1e-10)
    assert not any(module.training for module in model.modules())
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), small_model().eval()(tokens), rtol=1e-10, atol=1e-10)


def test_an_encoder_decoder_is_prepared_as_well() -> None:
    found = []
    for options in (MemoryOptions(), MemoryOptions(checkpointing="selective", **OFFLOAD, mlp_tile=16)):
        torch.manual_seed(0)
        sizes = {"d_model": 16, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 2}
        model = prepare(LongNet(**sizes, segment_lengths=(8, 16), dilation_rates=(1, 2)).double(), options)
        out = model(torch.randn(2, 20, 16).double(), torch.randn(2, 12, 16).double()).square().mean()
        out.backward()
        found.append((out.detach(), {name: p.grad for name, p in model.named_parameters()}))
    assert_same(found[1], found[0])


def test_ranks_that_share_the_model_or_the_sequence_get_the_same_gradients() -> None:
    ended_well, printed = run_ranks(2, "tests.train.memory_worker")
    assert (ended_well, printed.splitlines()[-1]) == (True, "passed"), printed


# What a step holds. Sizes at which activations outweigh parameters.
def held_bytes(options: MemoryOptions) -> int:
    """Bytes of distinct memory that autograd has saved when forward is done, parameters left out."""
    model = prepare(small_model(), options)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        value = loss(model, *drawn(), options)
    held = sum(saved.values())
    del value
    return held


def peak_bytes(options: MemoryOptions, **sizes: int) -> int:
    """The most that a step's tensors take on the CPU beyond what there is before it."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "num_heads": 4, "num_layers": 6, "vocab_size": 64} | sizes
    model = prepare(LongNetLM(**sizes, segment_lengths=(64, 256), dilation_rates=(1, 4)), options)
    tokens = torch.randint(sizes["vocab_size"], (1, 2049))

    def step() -> None:
        loss(model, tokens[:, :-1], tokens[:, 1:], options).backward()

    step()  # gradients exist, buffers are in the pool
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(held)


def test_autograd_saves_less_with_each_technique() -> None:
    nothing = held_bytes(MemoryOptions())
    rows = 2 * TOKENS
    layer_inputs = rows * 32 * 8
    assert held_bytes(MemoryOptions(checkpointing="full")) < nothing / 5
    # Without the hidden activations of the MLP: two of them, the norm's result, each four times as wide as the model.
    assert nothing - held_bytes(MemoryOptions(mlp_tile=24)) >= LAYERS * 3 * 4 * layer_inputs
    # Of the logits only the gradients of their sources are left.
    gradients = (rows + VOCABULARY) * 32 * 4
    assert nothing - held_bytes(MemoryOptions(loss_chunk=32)) >= rows * VOCABULARY * 8 - gradients
    best = held_bytes(MemoryOptions(checkpointing="full", mlp_tile=24, loss_chunk=32))
    assert best < LAYERS * layer_inputs + 8 * layer_inputs


def test_peak_memory_falls_in_the_order_of_what_is_kept() -> None:
    none, full, selective = (peak_bytes(MemoryOptions(checkpointing=c)) for c in ("none", "full", "selective"))
    assert full < selective < none
    tiled = peak_bytes(MemoryOptions(mlp_tile=128))
    both = peak_bytes(MemoryOptions(checkpointing="full", mlp_tile=128))
    assert tiled < none
    assert both < full


def test_peak_memory_of_the_loss_does_not_grow_with_rows_times_vocabulary() -> None:
    sizes = {"num_layers": 1, "vocab_size": 4096}
    logits = 2048 * 4096 * 4
    assert peak_bytes(MemoryOptions(), **sizes) > 2 * logits
    assert peak_bytes(MemoryOptions(loss_chunk=128), **sizes) < logits / 2


def test_a_step_gives_all_buffers_back_also_if_there_is_no_backward() -> None:
    offload = Offload(least_bytes=1, pool=WorkspacePool(threshold_bytes=1))
    model = small_model()
    options = MemoryOptions(checkpointing="selective", **OFFLOAD)
    run = options.recomputation
    run.offload = offload
    model.gradient_checkpointing_enable(run=run)
    value = loss(model, *drawn(), MemoryOptions())
    assert offload.pool.get_stats()["live_buffers"] == 3 * LAYERS  # a layer's input, attention's out and lse
    del value
    assert offload.pool.get_stats()["live_buffers"] == 0
    for _ in range(2):
        loss(model, *drawn(), MemoryOptions()).backward()
    stats = offload.pool.get_stats()
    assert (stats["live_buffers"], stats["allocation_count"]) == (0, 3 * LAYERS)


# Precision, optimizers, and what needs other hardware.
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_is_close_and_composes(precision) -> None:
    exact = train_once(MemoryOptions(), small_model().float())
    plain = train_once(MemoryOptions(precision=precision), small_model().float())
    both = train_once(MemoryOptions(precision=precision, **ALL), small_model().float())
    assert plain[0].dtype == both[0].dtype == torch.float32

    def error(found) -> float:
        pairs = [(found[1][name], gradient) for name, gradient in exact[1].items()]
        return (sum((x - y).square().sum() for x, y in pairs) / sum(y.square().sum() for _, y in pairs)).sqrt().item()

    assert 1e-5 < error(plain) < 0.05
    assert error(both) < 1.2 * error(plain)


def test_only_float16_scales_the_loss() -> None:
    scaled = {
        precision: make_scaler(MemoryOptions(precision=precision), "cpu").is_enabled()
        for precision in ("fp32", "bf16", "fp16")
    }
    assert scaled == {"fp32": False, "bf16": False, "fp16": True}


def test_a_float16_step_with_its_scaler_lowers_the_loss() -> None:
    options = MemoryOptions(precision="fp16", **ALL)
    model = prepare(small_model().float(), options)
    optimizer, scaler = make_optimizer(model.parameters(), options, lr=1e-2), make_scaler(options, "cpu")
    losses = []
    for _ in range(5):
        value = loss(model, *drawn(), options)
        optimizer.zero_grad()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(value.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
def test_an_8_bit_optimizer_steps_like_adamw_with_a_quarter_of_its_state(library) -> None:
    pytest.importorskip(library, reason=f"needs the extra {library}")
    updates = {}
    for name in ("adamw", f"adamw8bit-{library}"):
        torch.manual_seed(0)
        layer = nn.Linear(64, 256, bias=False)
        before = layer.weight.detach().clone()
        optimizer = make_optimizer(layer.parameters(), MemoryOptions(optimizer=name), lr=1e-3, betas=(0.9, 0.95))
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
        updates[name] = layer.weight.detach() - before
    exact, found = updates.values()
    assert (found - exact).norm() < 0.2 * exact.norm()
    assert sum(state_bytes(x) for x in optimizer.state[layer.weight].values()) < 2.5 * before.numel()


def state_bytes(x: object) -> int:
    if not isinstance(x, torch.Tensor):
        return 0
    if hasattr(x, "__tensor_flatten__"):
        return sum(state_bytes(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return x.nbytes


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
def test_a_missing_library_is_an_error_that_names_its_extra(library, monkeypatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=rf"or '\.\[{library}\]' in a checkout"):
        make_optimizer([nn.Parameter(torch.zeros(3))], MemoryOptions(optimizer=f"adamw8bit-{library}"))


def test_what_needs_a_gpu_is_refused_on_a_cpu_with_the_reason() -> None:
    with pytest.raises(
        ValueError, match=r"float8 products need a GPU of compute capability 9.0.*on cpu: use precision"
    ):
        prepare(small_model(), MemoryOptions(float8=True))
    with pytest.raises(ValueError, match=r"2:4 sparse products need a GPU of compute capability 8.0.*on cpu"):
        prepare(small_model(), MemoryOptions(structured_sparsity=True, precision="bf16"))
    model = small_model()
    with pytest.raises(ValueError, match="float8 products need a GPU"):
        prepare(model, MemoryOptions(float8=True, precision="bf16", parameters="bf16"))
    assert next(model.parameters()).dtype == torch.float64  # as it was


def test_float8_takes_the_layers_and_leaves_the_head_and_the_names(monkeypatch) -> None:
    pytest.importorskip("torchao", reason="needs the extra torchao")
    monkeypatch.setattr(memory, "_need_capability", lambda *_: None)  # torchao computes it on a CPU too, without gain
    exact = train_once(MemoryOptions(precision="bf16"), small_model().float())
    model = small_model().float()
    names = model.state_dict().keys()
    found = train_once(MemoryOptions(precision="bf16", float8=True, **ALL), model)
    assert model.state_dict().keys() == names
    converted = [name for name, part in model.named_modules() if type(part).__name__ == "Float8Linear"]
    assert len(converted) == 6 * LAYERS
    torch.testing.assert_close(found[0], exact[0], rtol=0.05, atol=0.0)
    assert not torch.equal(found[0], exact[0])
    with pytest.raises(ValueError, match="sizes are multiples of 16: leave float8 out"):
        prepare(small_model(d_model=24, dim_feedforward=40, num_heads=3), MemoryOptions(float8=True))


def imitate_cusparselt(monkeypatch) -> None:
    """PyTorch's own sparse tensors on a CPU: only the two kernels under them are others, as strict about what they get.

    A packed weight is the whole pruned one, flat, as the real pruning hands it out.
    """

    def tile(weight, algorithm="", use_cutlass=True):
        assert not use_cutlass
        fours = weight.unflatten(1, (-1, 4))
        pruned = torch.zeros_like(fours).scatter_(-1, fours.abs().topk(2).indices, 1.0).flatten(1) * weight
        return pruned.flatten(), None, pruned.t().flatten(), None, torch.zeros(2, 2)

    def product(packed, dense, bias=None, alpha=None, out_dtype=None, transpose_result=False, alg_id=0, **_):
        assert packed.dim() == 2, "compressed_A.dim() == 2 INTERNAL ASSERT FAILED"
        assert packed.dtype == dense.dtype in (torch.bfloat16, torch.float16)
        assert dense.is_contiguous() or dense.t().is_contiguous(), "read as rows or as columns, whatever it is"
        out = packed @ dense + (0.0 if bias is None else bias[:, None])
        return out.t().contiguous() if transpose_result else out

    monkeypatch.setattr(torch, "_sparse_semi_structured_tile", tile)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", product)
    monkeypatch.setattr(memory, "_need_capability", lambda *_: None)
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", [(16, 128), (2, 8, 128), (2, 5, 128)])
def test_a_sparse_layer_is_a_dense_one_of_its_pruned_weight(monkeypatch, shape, precision) -> None:
    imitate_cusparselt(monkeypatch)
    torch.manual_seed(0)
    dense = nn.Linear(128, 256)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    fours = dense.weight.detach().to(dtype).unflatten(1, (-1, 4))
    counts = torch.zeros_like(fours).scatter_(-1, fours.abs().topk(2).indices, 1.0).flatten(1)
    sparse, x = memory._SemiSparseLinear(copy.deepcopy(dense)), torch.randn(shape)
    results = []
    for layer in (sparse, dense):
        if layer is dense:
            dense.weight.data *= counts
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype):
            out = layer(given)
        out.sum().backward()  # whose gradient has no strides of its own
        assert out.dtype == dtype
        results.append([out, given.grad, layer.weight.grad, layer.bias.grad])
    for found, expected in zip(*results):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("changes", [{}, ALL, ALONE["compiled"], {**ALL, **ALONE["compiled"]}], ids=str)
def test_structured_sparsity_prunes_two_of_four_weights_of_the_feed_forward_networks(monkeypatch, changes) -> None:
    imitate_cusparselt(monkeypatch)
    options = MemoryOptions(structured_sparsity=True, precision="bf16", **changes)
    model = small_model(d_model=128).float()
    names = model.state_dict().keys()
    value, gradients = train_once(options, model)
    assert value.isfinite()
    assert model.state_dict().keys() == gradients.keys() | {"head.weight"} == names
    linear = model.layers[0].feed_forward.linear1
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        counts = linear(torch.eye(128)) - linear.bias != 0
    assert counts.float().mean() == pytest.approx(0.5, abs=0.01)
    assert (gradients["layers.0.feed_forward.linear1.weight"] != 0).float().mean() > 0.99
    with pytest.raises(ValueError, match="sizes are multiples of 128, and the model has none"):
        prepare(small_model(), options)
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: False)
    with pytest.raises(ValueError, match="which this PyTorch was built without"):
        prepare(small_model(), options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpointing": "some"}, "one of none, full, selective; got 'some'"),
        ({"precision": "int8"}, "one of fp32, bf16, fp16"),
        ({"optimizer": "sgd"}, "one of adamw, muon, adamw8bit-torchao"),
        ({"mlp_tile": -1}, "at least 0, got -1"),
        ({"offload_least_bytes": 0}, "at least 1, got 0"),
        (
            {"checkpointing": "selective", "layers_per_checkpoint": 2},
            "choose checkpointing='full' with it, not 'selective'",
        ),
        ({"offload": True}, "moves what checkpointing keeps"),
        ({"float8": True, "structured_sparsity": True, "precision": "bf16"}, "either float8 or 2:4 sparse"),
        ({"structured_sparsity": True}, "in 16 bits only"),
        ({"compile_mode": "reduce-overhead"}, "pass compile=True"),
        ({"compile_mode": "max-autotune", "compile": True, "mlp_tile": 8}, "captures CUDA graphs"),
        ({"compile_mode": "reduce-overhead", "compile": True, "checkpointing": "full"}, "captures CUDA graphs"),
    ],
)
def test_options_that_cannot_be_are_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        MemoryOptions(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_tile": True}, "whole number of at least 0, got True"),
        ({"loss_chunk": 1.5}, "whole number"),
        ({"compile": "yes"}, "True or False, got 'yes'"),
    ],
)
def test_options_of_the_wrong_kind_are_refused(change, message) -> None:
    with pytest.raises(TypeError, match=message):
        MemoryOptions(**change)


def test_a_compiler_that_is_not_here_is_an_error_before_the_first_step() -> None:
    with pytest.raises(ValueError, match=r"one that torch.compile knows, got 'foo': choose one of .*inductor"):
        prepare(small_model(), MemoryOptions(compile=True, compile_backend="foo"))


def test_a_model_is_prepared_once_and_before_it_is_wrapped() -> None:
    model = prepare(small_model(), MemoryOptions(mlp_tile=8))
    with pytest.raises(ValueError, match="prepare a model only once"):
        prepare(model, MemoryOptions(mlp_tile=8))
    with pytest.raises(TypeError, match="before anything is wrapped around it, got DataParallel"):
        prepare(nn.DataParallel(model), MemoryOptions())


def test_tiles_of_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="rows must be a whole number of at least 1, got 0"):
        TiledFeedForward(FeedForward(4, 8), rows=0)
