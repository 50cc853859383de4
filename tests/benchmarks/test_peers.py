from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from benchmarks.contenders import choose_contenders
from benchmarks.harness import Case
from benchmarks.peers import build_torchscale, load_torchscale, without_projections

# What the adapter relies on in a checkout: the modules' names, the constructor, the call of the flash kernel. Its
# projections are NaN, so that a figure which includes them is seen.
FILES = {
    "__init__.py": "",
    "component/__init__.py": "",
    "component/flash_attention.py": "import a_flash_attention_that_is_not_installed",
    "component/multihead_attention.py": """
from torch import nn
from .flash_attention import flash_attn_func

class MultiheadAttention(nn.Module):
    def __init__(self, args, embed_dim, num_heads, self_attention=False, subln=False):
        super().__init__()
        assert self_attention and not subln and not args.multiway and not args.xpos_rel_pos
        self.args, self.num_heads, self.dropout = args, num_heads, 0.0
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, nn.Linear(embed_dim, embed_dim))
            nn.init.constant_(getattr(self, name).weight, float("nan"))

    def attention_ops(self, q, k, v, is_causal):
        out, lse = flash_attn_func(q, k, v, self.dropout, None, None, is_causal)
        assert lse.shape == (q.size(0), q.size(2), q.size(1))
        return out
""",
    "component/dilated_attention.py": """
from .multihead_attention import MultiheadAttention

class DilatedAttention(MultiheadAttention):
    def forward(self, query, key, value, is_causal=False):
        assert self.args.flash_attention and self.args.seq_parallel is False
        (w,), (r,) = self.args.segment_length, self.args.dilated_ratio
        assert r == 1
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        q, k, v = (x.view(-1, w, self.num_heads, x.size(-1) // self.num_heads) for x in (q, k, v))
        out = self.attention_ops(q, k, v, is_causal)
        return self.out_proj(out.reshape(query.shape)), None
""",
}


@pytest.fixture
def checkout(write_checkout):
    return write_checkout(FILES)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_adapter_attends_without_projections_on_pytorchs_kernel(checkout, is_causal) -> None:
    attention = without_projections(build_torchscale(load_torchscale(checkout), 2, 8, (16,), (1,)))
    q, k, v = torch.randn(3, 1, 16, 16, requires_grad=True).unbind(0)
    out, _ = attention(q, k, v, is_causal=is_causal)
    expected = F.scaled_dot_product_attention(
        *(x.unflatten(-1, (2, 8)).transpose(1, 2) for x in (q, k, v)), is_causal=is_causal
    )
    torch.testing.assert_close(out, expected.transpose(1, 2).flatten(2))
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), (q, k, v)))


def test_importing_a_checkout_leaves_no_trace(checkout, monkeypatch) -> None:
    loaded = ModuleType("torchscale")
    monkeypatch.setitem(sys.modules, "torchscale", loaded)
    path = list(sys.path)
    load_torchscale(checkout)
    assert sys.path == path
    assert [name for name in sys.modules if name.startswith("torchscale")] == ["torchscale"]
    assert sys.modules["torchscale"] is loaded


def test_what_a_checkout_lacks_is_named_with_its_installation(checkout) -> None:
    (checkout / "torchscale/component/dilated_attention.py").write_text("import a_package_that_is_not_installed")
    with pytest.raises(ModuleNotFoundError, match="pip install a_package_that_is_not_installed"):
        load_torchscale(checkout)


SMALL = {"tokens": 64, "heads": 2, "head_dim": 64, "segment_lengths": (16,), "dilation_rates": (1,)}


@pytest.mark.parametrize("backward", [False, True])
def test_the_contender_runs_on_the_cases_tokens_and_heads(checkout, backward) -> None:
    case = Case(**SMALL, backward=backward, dtype="float32", device="cpu")
    ready = choose_contenders(torchscale=checkout)["torchscale"](case)
    assert ready.flops == case.flops
    found = ready.call()
    for x in found if backward else [found]:
        assert x.shape == (1, 64, 2 * 64)
        assert x.isfinite().all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_layout": "grouped"}, "every head on every branch"),
        ({"segment_lengths": (16,), "dilation_rates": (3,)}, "computes something else"),
        ({"head_dim": 128}, "measured at D=64"),
    ],
)
def test_the_contender_sits_out_what_it_cannot_do_alike(checkout, change, reason) -> None:
    assert reason in choose_contenders(torchscale=checkout)["torchscale"](Case(**(SMALL | change)))
