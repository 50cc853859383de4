"""Patched models against the code they were, from checkouts of microsoft/torchscale and prov-gigapath.

    git clone https://github.com/microsoft/torchscale
    git clone https://github.com/prov-gigapath/prov-gigapath
    pip install einops numpy
    PYTHONPATH=src:. python tests/models/check_torchscale.py --torchscale torchscale --gigapath prov-gigapath

Their calls of flash-attn become calls of PyTorch's flash kernel, on the CPU in float32. Status 1 if a figure is beyond
its limit. timm, fairscale and huggingface_hub are stood in for where they are not installed: what GigaPath's slide
encoder needs of them at inference is a decorator.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import time
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch
from torch import nn

from benchmarks.peers import (
    build_torchscale,
    flash_attention_of_pytorch,
    importing_from,
    load_torchscale,
)
from dilated_attention_pytorch import patch_gigapath

GIGAPATH = ([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])
# Rates that do not divide their segments: torchscale moves rows, as it does for GigaPath past 185,363 tiles.
UNEVEN = ([256, 363, 501], [1, 2, 8])
LIMIT = 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchscale", type=Path, help="a checkout of microsoft/torchscale")
    parser.add_argument("--gigapath", type=Path, help="a checkout of prov-gigapath/prov-gigapath")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1501, 10_000])
    parser.add_argument("--layers", type=int, default=12, help="of GigaPath's slide encoder")
    parser.add_argument("--grids", type=int, default=128, help="of its position table; 1000 is its own, and 3 GB")
    arguments = parser.parse_args()
    if arguments.torchscale is None and arguments.gigapath is None:
        parser.error("name a checkout: --torchscale PATH, --gigapath PATH or both")
    print(f"{'':<66}{'relative':>12}{'largest':>12}  limit {LIMIT:g}")
    worst = 0.0
    if arguments.torchscale is not None:
        attention_class = load_torchscale(arguments.torchscale)
        for tokens in arguments.tokens:
            worst = max(worst, check_attention(attention_class, tokens, GIGAPATH, "GigaPath's branches"))
        worst = max(worst, check_attention(attention_class, 1501, UNEVEN, "uneven branches"))
        worst = max(worst, check_attention(attention_class, 1501, UNEVEN, "uneven branches", is_causal=True))
    if arguments.gigapath is not None:
        for tokens in arguments.tokens:
            worst = max(worst, check_slide_encoder(arguments.gigapath, tokens, arguments.layers, arguments.grids))
    print("met" if worst <= LIMIT else "NOT MET", f"{worst:.2e}")
    return 0 if worst <= LIMIT else 1


def check_attention(attention_class, tokens, pattern, title, is_causal=False) -> float:
    """One attention, its norm and its projections: outputs, and gradients of the input and of every parameter."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"attention": build_torchscale(attention_class, 16, 48, *pattern, subln=True)})
    x = torch.randn(1, tokens, 768, requires_grad=True)
    do = torch.randn(1, tokens, 768)
    inputs = [x, *model.parameters()]

    def run():
        out, _ = model.attention(x, x, x, is_causal=is_causal)
        return [out.detach(), *torch.autograd.grad(out, inputs, do)]

    expected = run()
    title = f"{title}, {tokens:,} tokens" + (", causal" if is_causal else "")
    worst = 0.0
    for exact in (True, "forward", False):
        patch_gigapath(model, exact_torchscale=exact)
        found = run()
        # All gradients as one vector: that of the keys' bias is nothing but rounding where no zeros are seen.
        out, gradients = relative(found[0], expected[0]), relative(*map(as_vector, (found[1:], expected[1:])))
        of = {True: "exact", "forward": "exact forward", False: "by definition"}[exact]
        show(f"{title}, {of}: out", out, largest(found[0], expected[0]))
        show(f"{title}, {of}: gradients", gradients, max(map(largest, found[1:], expected[1:])))
        worst = max(worst, out if exact else 0.0, gradients if exact is True else 0.0)
    return worst


def check_slide_encoder(checkout, tokens, layers, grids) -> float:
    """The whole slide encoder on random tiles: what it gives for a slide, before and after patching."""
    with slide_encoder_class(checkout) as LongNetViT, redirect_stdout(StringIO()), torch.no_grad():
        torch.manual_seed(0)
        model = LongNetViT(embed_dim=768, depth=layers, slide_ngrids=grids).eval()
        places = torch.randperm(grids**2)[: tokens - 1]
        x, coords = torch.randn(1, tokens - 1, 1536), torch.stack((places // grids, places % grids), dim=-1)[None] * 256
        began = time.perf_counter()
        expected = model(x, coords)[0]
        theirs, began = time.perf_counter() - began, time.perf_counter()
        found = patch_gigapath(model, exact_torchscale=True)(x, coords)[0]
        ours = time.perf_counter() - began
        right = patch_gigapath(model)(x, coords)[0]
    assert not isinstance(model.pos_embed, torch.Tensor)
    title = f"LongNetViT, {layers} layers, {tokens:,} tokens"
    show(f"{title}, exact ({theirs:.0f} s, {ours:.0f} s)", relative(found, expected), largest(found, expected))
    show(f"{title}, by definition", relative(right, expected), largest(right, expected))
    return relative(found, expected)


@contextmanager
def slide_encoder_class(checkout: Path):
    """`LongNetViT`, importable while within; its torchscale is the checkout's own copy."""
    stands_in = {
        "timm": {"create_model": None},
        "timm.models": {},
        "timm.models.registry": {"register_model": lambda function: function},
        "timm.models.layers": {"drop_path": lambda x, probability, training: x},  # at inference
        "fairscale": {},
        "fairscale.nn": {"checkpoint_wrapper": None, "wrap": None},
        "huggingface_hub": {},
    }
    absent = {name for name in ("timm", "fairscale", "huggingface_hub") if importlib.util.find_spec(name) is None}
    stands_in = {name: values for name, values in stands_in.items() if name.split(".")[0] in absent}
    stands_in["torchscale.component.flash_attention"] = {"flash_attn_func": flash_attention_of_pytorch}
    with importing_from(checkout, "gigapath", "torchscale", *absent):
        sys.path.insert(0, str(checkout / "gigapath"))
        for name, values in stands_in.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(values)
        # Its segment lengths travel as text, which since NumPy 2 reads "np.int64(1024)" and is evaluated there.
        importlib.import_module("torchscale.architecture.config").np = importlib.import_module("numpy")
        yield importlib.import_module("gigapath.slide_encoder").LongNetViT


def as_vector(tensors):
    return torch.cat([x.flatten() for x in tensors])


def relative(found, expected) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def largest(found, expected) -> float:
    return float((found - expected).abs().max())


def show(title, error, most) -> None:
    print(f"{title:<66}{error:>12.2e}{most:>12.2e}", file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    sys.exit(main())
