"""What the published optimization guide shows about modules, precision and training runs as written, at small sizes.

What it shows of stages, batches and accumulated gradients is in `train/test_recipes.py`, of ranks in
`parallel/check_snippets.py`, of caches, pools and profiling in `test_documented_snippets.py`. Where it contradicts
itself or PyTorch, `docs/migrate.md` says so, and the tests here show it.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dilated_attention_pytorch import (
    DilatedAttention,
    ImprovedDilatedAttention,
    ImprovedMultiheadDilatedAttention,
    LongNetLM,
    MultiheadDilatedAttention,
    RingDilatedAttention,
)

segment_lengths, dilation_rates = [16, 32], [1, 2]


def small_model() -> LongNetLM:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "num_heads": 4, "num_layers": 2, "dropout": 0.0}
    return LongNetLM(**sizes, segment_lengths=segment_lengths, dilation_rates=dilation_rates)


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.arange(2 * 33).reshape(2, 33) % 7
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def compute_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Which the guide calls and does not show."""
    return F.cross_entropy(output.flatten(0, 1).float(), labels.flatten())


def test_improved_attention_takes_the_place_of_the_original() -> None:
    from dilated_attention_pytorch.dilated_attention import DilatedAttention
    from dilated_attention_pytorch.improved_dilated_attention import ImprovedDilatedAttention

    attention = DilatedAttention(segment_lengths, dilation_rates)
    q, k, v = torch.randn(3, 1, 64, 12, 8)
    expected = attention(q, k, v)
    for attention in (
        ImprovedDilatedAttention(segment_lengths=[16, 32], dilation_rates=[1, 2]),
        ImprovedDilatedAttention(
            segment_lengths=segment_lengths,
            dilation_rates=dilation_rates,
            dropout=0.1,
            use_tf32=True,
        ),
    ):
        torch.testing.assert_close(attention.eval()(q, k, v), expected)


def test_improved_multihead_attention_projects_by_one_fused_layer() -> None:
    from dilated_attention_pytorch.improved_multihead_dilated_attention import ImprovedMultiheadDilatedAttention

    x = torch.randn(1, 64, 96, requires_grad=True)
    for more in ({}, {"use_tf32": True}):
        multihead_attention = ImprovedMultiheadDilatedAttention(
            embed_dim=96, num_heads=12, segment_lengths=segment_lengths, dilation_rates=dilation_rates, **more
        )
        assert (288, 96) in [tuple(p.shape) for p in multihead_attention.parameters()]
        output, _ = multihead_attention(x, x, x)
        assert output.shape == x.shape
        output.sum().backward()


def test_gradient_checkpointing_of_a_model_and_of_a_block_of_ones_own() -> None:
    from torch.utils.checkpoint import checkpoint

    class CheckpointedTransformerBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = MultiheadDilatedAttention(32, 4, segment_lengths, dilation_rates)

        def forward(self, x):
            return checkpoint(self._forward, x, use_reentrant=False)  # which PyTorch wants to be told

        def _forward(self, x):
            return x + self.attention(x, x, x)[0]

    torch.manual_seed(0)
    block, x = CheckpointedTransformerBlock(), torch.randn(1, 64, 32)
    parameters = list(block.parameters())
    got = torch.autograd.grad(block(x).square().sum(), parameters)
    torch.testing.assert_close(got, torch.autograd.grad(block._forward(x).square().sum(), parameters))
    model = small_model()
    expected = torch.autograd.grad(compute_loss(model(batch()["input_ids"]), batch()["labels"]), model.norm.weight)
    model.gradient_checkpointing_enable()
    got = torch.autograd.grad(compute_loss(model(batch()["input_ids"]), batch()["labels"]), model.norm.weight)
    torch.testing.assert_close(got, expected)


@pytest.mark.filterwarnings("ignore")  # torch.cuda.amp is torch.amp by now, and says so; without a GPU it does nothing
def test_mixed_precision_training() -> None:
    from torch.cuda.amp import GradScaler, autocast

    def train_step(model, batch, optimizer, scaler):
        with autocast():
            output = model(batch["input_ids"])
            loss = compute_loss(output, batch["labels"])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.item()

    model, scaler = small_model(), GradScaler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    losses = [train_step(model, batch(), optimizer, scaler) for _ in range(5)]
    assert losses[-1] < losses[0]
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        for dtype in (torch.bfloat16, torch.float16):
            with autocast(dtype=dtype):
                output = model(batch()["input_ids"])
            assert output.isfinite().all()
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_modules_compile_in_the_modes_of_the_guide() -> None:
    attention_layer = ImprovedDilatedAttention(segment_lengths=segment_lengths, dilation_rates=dilation_rates)
    q, k, v = torch.randn(3, 1, 64, 4, 8)
    expected = attention_layer(q, k, v)
    for settings in ({"mode": "max-autotune"}, {"mode": "reduce-overhead"}, {"fullgraph": True}):
        torch.compiler.reset()
        torch.testing.assert_close(torch.compile(attention_layer, **settings)(q, k, v), expected)


def test_deepspeed_wants_the_batch_size_that_the_guides_configurations_leave_out() -> None:
    pytest.importorskip("deepspeed", reason="needs deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    from dilated_attention_pytorch.parallel import Zero

    offload = {"device": "cpu", "pin_memory": True}
    zero_3 = {"stage": 3, "offload_optimizer": offload, "offload_param": offload}
    zero_2 = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "allgather_partitions": True, "reduce_scatter": True}
    for stage in (zero_3, zero_2):
        ds_config = {"zero_optimization": stage, "fp16": {"enabled": True}}
        with pytest.raises(AssertionError, match="train_batch_size or train_micro_batch_size_per_gpu"):
            DeepSpeedConfig(ds_config)
        made = Zero(stage=stage["stage"], cpu_offload=True).config(batch_size=2)
        assert DeepSpeedConfig(made).zero_config.stage == stage["stage"]


def test_attention_of_shards_on_their_own_is_right_only_where_no_segment_crosses_them() -> None:
    """The guide's conceptual `sequence_parallel_attention`, with its `attention` and `all_gather` filled in."""

    def sequence_parallel_attention(q, k, v, world_size, attention):
        local_seq_len = q.shape[1] // world_size
        starts = range(0, q.shape[1], local_seq_len)
        local = [attention(*(x[:, start : start + local_seq_len] for x in (q, k, v))) for start in starts]
        return torch.cat(local, dim=1)

    q, k, v = torch.randn(3, 1, 128, 4, 8)
    for longest, is_right in ((16, True), (64, False)):
        attention = DilatedAttention([16, longest], dilation_rates)
        by_shard = sequence_parallel_attention(q, k, v, world_size=4, attention=attention)
        assert torch.allclose(by_shard, attention(q, k, v), atol=1e-5) == is_right
        torch.testing.assert_close(RingDilatedAttention([16, longest], dilation_rates)(q, k, v), attention(q, k, v))


def test_blocks_attention_is_replaced_by_what_it_says_of_itself() -> None:
    """The guide's own `optimize_small_model`: ours also keeps the weights, which this one draws anew."""
    blocks = nn.ModuleList(
        nn.ModuleDict({"attention": MultiheadDilatedAttention(96, 12, [16, 32], [1, 2])}) for _ in "ab"
    )
    for block in blocks:
        old_attention = block.attention
        block.attention = ImprovedMultiheadDilatedAttention(
            embed_dim=old_attention.embed_dim,
            num_heads=old_attention.num_heads,
            segment_lengths=old_attention.segment_lengths,
            dilation_rates=old_attention.dilation_rates,
            use_tf32=True,
        )
        x = torch.randn(1, 64, 96)
        assert block.attention(x, x, x)[0].shape == x.shape


def test_pruning_rows_of_linear_layers_as_shown() -> None:
    """The guide's own `enable_structured_sparsity`: whole rows of 0, which save neither memory nor work."""
    from torch.nn.utils import prune

    model = small_model()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            prune.ln_structured(module, name="weight", amount=0.5, n=2, dim=0)
    compute_loss(model(batch()["input_ids"]), batch()["labels"]).backward()
    weight = model.layers[0].feed_forward.linear1.weight
    assert (weight == 0).all(1).float().mean() == 0.5


def test_what_pytorch_does_not_let_the_guide_do() -> None:
    """Parameters in float8 have no arithmetic; TorchScript reads neither our signatures nor our annotations."""
    with pytest.raises(NotImplementedError, match="Float8"):
        small_model().to(dtype=torch.float8_e4m3fn)(batch()["input_ids"])
    with pytest.raises((torch.jit.frontend.NotSupportedError, ValueError), match=r"keyword-only|type annotation"):
        torch.jit.script(ImprovedDilatedAttention(segment_lengths, dilation_rates))
