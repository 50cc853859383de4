"""A token through a whole model in few launches: the logits and the cache of the model's own modules."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import LongNetLM
from dilated_attention_pytorch.kernels.decode import embed_rows
from dilated_attention_pytorch.models import captured
from dilated_attention_pytorch.models.fused import _turns, can_fuse, fused_logits
from dilated_attention_pytorch.nn.positions import RotaryPositions, XPosPositions

from ..later import LATER

pytest.importorskip("triton", reason="the kernels need Triton")

SIZES = {"vocab_size": 50, "d_model": 32, "num_heads": 2, "num_layers": 2, "dilation_rates": (1, 3)}
MODELS = [
    {},
    LATER | {"positions": "xpos", "scale_base": 64.0, "num_heads": 2, "num_kv_heads": 1},
    {"activation": "silu", "positions": "none", "d_model": 48, "num_heads": 3, "head_layout": "grouped"},
    {"activation": "relu", "dim_feedforward": 72, "norm": "rms", "head_layout": "blocked"},
]

WIDE = {"d_model": 512, "num_heads": 4}


def model_of(device: str, dtype: torch.dtype, **sizes) -> LongNetLM:
    torch.manual_seed(0)
    model = LongNetLM(**(SIZES | {"segment_lengths": (5, 8)} | sizes)).to(device, dtype).eval()
    for name, x in model.named_parameters():
        if "bias" in name or "norm" in name:  # which begin as zeros and ones
            torch.nn.init.normal_(x, mean=float("norm" in name and "weight" in name), std=0.3)
    for attention in model._all_attention():
        attention.backend = "triton"  # on a CPU, in the interpreter
    return model


def check(model: LongNetLM, batch: int, tokens: int, device: str, tolerance: float) -> None:
    """Read a prompt, then token by token in both ways."""
    prompt = torch.randint(50, (batch, 7), device=device)
    padding = torch.arange(batch, device=device) * 4 % 11
    caches = [model.new_cache(batch, padding=padding) for _ in range(2)]
    assert can_fuse(model, caches[0])
    with torch.no_grad():
        for cache in caches:
            for attention in model._all_attention():
                attention.backend = "auto"  # quicker in the interpreter
            model(prompt, cache=cache)
        for _ in range(tokens):
            new = torch.randint(50, (batch, 1), device=device)
            found, expected = fused_logits(model, new, caches[0]), model(new, cache=caches[1])
            real = caches[0][0].lengths > 0
            torch.testing.assert_close(found[real], expected[real], rtol=tolerance, atol=tolerance)
            for one, other in zip(*caches):
                for name in ("keys", "values"):
                    held = [getattr(x, name)[:, :-1].float() for x in (one, other)]  # without the unread row
                    torch.testing.assert_close(*held, rtol=tolerance, atol=tolerance)
                assert torch.equal(one.lengths, other.lengths)


needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves are tested")


@needs_interpreter
@pytest.mark.parametrize(("sizes", "batch"), [*zip(MODELS, (1, 1, 3, 1)), (MODELS[1], 3)])
def test_a_fused_step_gives_the_logits_of_the_modules_in_the_interpreter(sizes, batch) -> None:
    check(model_of("cpu", torch.float32, **sizes), batch, 4, "cpu", 2e-4)


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=needs_interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("positions", [RotaryPositions(16), XPosPositions(16, period=4096, scale_base=600.0)], ids=repr)
def test_angles_are_exact_far_into_a_document(positions, device) -> None:
    lengths, tokens = torch.tensor([-3, 0, 999_999, 16_777_215], device=device), torch.arange(4, device=device)
    _, found = embed_rows(tokens, torch.eye(4, device=device), 1.0, lengths, _turns(positions, lengths.device))
    cos, sin, scale = positions.of(lengths[:, None].clamp_min(0))
    scale = torch.ones_like(cos) if scale is None else scale
    for turn, expected in zip(found, (cos * scale, sin * scale, cos / scale, sin / scale)):
        torch.testing.assert_close(turn, expected[:, 0], rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "batch", "dtype", "tolerance"),
    [
        *((sizes, batch, torch.bfloat16, 6e-2) for sizes in MODELS for batch in (1, 70)),
        (MODELS[0], 3, torch.float16, 1e-2),
        (MODELS[0], 1, torch.float32, 2e-3),
        (MODELS[1], 3, torch.float32, 2e-3),
        *((WIDE, batch, torch.bfloat16, 6e-2) for batch in (1, 3)),
        (WIDE, 1, torch.float32, 2e-3),
    ],
)
def test_a_fused_step_gives_the_logits_of_the_modules(sizes, batch, dtype, tolerance) -> None:
    long = {"d_model": 128, "segment_lengths": (512, 2048), "num_heads": 4} | sizes
    if sizes.get("d_model") == 48:  # too narrow for a GPU, as the default is
        long |= {"d_model": 192}
    if "scale_base" in sizes:
        long |= {"scale_base": 512.0}  # segments are longer than in the interpreter
    check(model_of("cuda", dtype, **long), batch, 20, "cuda", tolerance)


def test_a_model_with_other_modules_is_not_fused() -> None:
    model = model_of("cpu", torch.float32)
    for attention in model._all_attention():
        attention.backend = "eager"
    assert not can_fuse(model, model.new_cache(1))
    model = model_of("cpu", torch.float32)
    model.layers[0].feed_forward.linear1 = torch.nn.Sequential(model.layers[0].feed_forward.linear1)
    assert not can_fuse(model, model.new_cache(1))
    model = model_of("cpu", torch.float32)
    model.norm.forward = lambda x: x
    assert not can_fuse(model, model.new_cache(1))
    model = model_of("cpu", torch.float32)
    model.__class__ = type("Other", (LongNetLM,), {"logits": lambda self, hidden: -super().logits(hidden)})
    assert not can_fuse(model, model.new_cache(1))
    model = model_of("cpu", torch.float32)
    assert can_fuse(model, model.new_cache(1))
    with torch.autocast("cpu", torch.bfloat16):
        assert not can_fuse(model, model.new_cache(1))


@pytest.mark.gpu
class TestGraphs:
    """What `generate` does on a GPU."""

    SAMPLING = ({"temperature": 0}, {"temperature": 0.7, "top_k": 20, "seed": 1}, {"top_p": 0.8, "seed": 2})

    def model(self, dtype: torch.dtype = torch.float64, **sizes) -> LongNetLM:
        captured.forget_kept()
        torch.manual_seed(0)
        sizes = {"d_model": 64, "num_heads": 4, "segment_lengths": (64, 256), "dilation_rates": (1, 2)} | sizes
        return LongNetLM(vocab_size=200, num_layers=2, **sizes).to("cuda", dtype).eval()

    @pytest.mark.parametrize("sampling", SAMPLING, ids=str)
    def test_replays_give_the_tokens_of_the_uncached_model(self, sampling) -> None:
        """In float64, where the modules themselves are recorded."""
        model = self.model()
        for tokens in (1, 7, 100, 300):
            prompt, mask = self.prompts(tokens)
            for padding in (None, mask):
                expected = model.generate(prompt, 70, key_padding_mask=padding, use_cache=False, **sampling)
                for chunk in (None, 64, *([7, 1] if tokens == 100 and padding is None else [])):
                    found = model.generate(prompt, 70, key_padding_mask=padding, chunk=chunk, **sampling)
                    assert torch.equal(found, expected)

    @pytest.mark.parametrize("sampling", SAMPLING, ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_replays_of_fused_kernels_give_the_same_bits_twice(self, dtype, sampling) -> None:
        model = self.model(dtype)
        cache = model.new_cache(2)
        assert can_fuse(model, cache)
        for tokens in (1, 300):
            prompt, mask = self.prompts(tokens)
            found = [model.generate(prompt, 80, key_padding_mask=mask, **sampling) for _ in range(3)]
            assert torch.equal(found[0], found[1])
            assert torch.equal(found[0], found[2])
            if dtype == torch.float32 and sampling == {"temperature": 0}:
                expected = model.generate(prompt, 80, key_padding_mask=mask, use_cache=False, **sampling)
                assert torch.equal(found[0], expected)

    def prompts(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.arange(tokens, device="cuda") < torch.tensor([[0], [min(3, tokens - 1)]], device="cuda")
        return torch.randint(200, (2, tokens), device="cuda"), mask

    def test_a_draft_changes_no_token(self) -> None:
        model, prompt = self.model(), torch.randint(200, (1, 20), device="cuda")
        for draft in (self.model(), self.model(d_model=32, num_heads=2)):
            found = model.generate(prompt, 70, temperature=0, draft=draft)
            assert torch.equal(found, model.generate(prompt, 70, temperature=0, use_cache=False))

    def test_eos_gives_the_same_tokens_and_draws_as_asking_after_every_token(self) -> None:
        model, prompt = self.model(), torch.randint(200, (2, 20), device="cuda")
        for seed in range(2):
            ends = []
            for settings in ({}, {"use_cache": False}):
                draws = torch.Generator("cuda").manual_seed(seed)
                found = model.generate(prompt, 200, eos=7, top_k=30, generator=draws, **settings)
                ends.append((found, draws.get_state()))
            assert all(map(torch.equal, *ends))

    def test_graphs_add_little_memory_and_many_calls_no_more(self) -> None:
        model = self.model(torch.bfloat16, d_model=512, num_heads=8, segment_lengths=(2048, 8192))
        prompts = [torch.randint(200, (1 + i % 2, 1 + 13 * i % 290), device="cuda") for i in range(200)]

        def held(name: str = "allocated") -> int:
            torch.cuda.synchronize()
            return torch.cuda.memory_stats()[f"{name}_bytes.all.current"]

        for prompt in prompts[:2]:  # no graph yet: the first steps run as they are
            model.generate(prompt, 3)
        torch.cuda.empty_cache()
        before = held("reserved")
        for prompt in prompts[:2]:
            model.generate(prompt, 8)
        torch.cuda.empty_cache()
        assert held("reserved") <= 1.1 * before
        found = []
        for i, prompt in enumerate(prompts):
            model.generate(prompt, 6 + i % 7)
            found.append(held())
        assert max(found[100:]) <= max(found[20:100]) + 2**20  # plans of new lengths have small tables
        captured.forget_kept()
        torch._C._cuda_clearCublasWorkspaces()  # one of 32 MiB per stream, whatever generates
        weights = sum(x.nbytes for x in model.parameters())
        assert held() <= weights + 2**24  # nothing of a cache, 25 MB per row, is left

    def test_autocast_and_inference_mode_have_graphs_of_their_own(self) -> None:
        model, prompt = self.model(torch.float32), torch.randint(200, (1, 20), device="cuda")
        for _ in range(2):
            plain = model.generate(prompt, 30, temperature=0)
            with torch.inference_mode():
                assert torch.equal(model.generate(prompt, 30, temperature=0), plain)
            with torch.autocast("cuda", torch.bfloat16):
                first = model.generate(prompt, 30, temperature=0)
                assert torch.equal(model.generate(prompt, 30, temperature=0), first)
