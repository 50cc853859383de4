from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.core.pattern import dense_mask, forward_flops, training_bytes, visible_pairs
from dilated_attention_pytorch.core.spec import HEAD_LAYOUTS, Branch, DilatedSpec
from dilated_attention_pytorch.parallel.plan import BACKWARD_WORK, Job, make_plan
from dilated_attention_pytorch.parallel.sharding import Shards, zigzag_lengths, zigzag_order

from ..thorough import examples

pytestmark = pytest.mark.filterwarnings("ignore:no branch of")

specs = st.builds(
    lambda pairs, layout: DilatedSpec(tuple(Branch(w, r) for w, r in pairs), layout),
    st.lists(st.tuples(st.integers(1, 45), st.integers(1, 6)), min_size=1, max_size=3),
    st.sampled_from(HEAD_LAYOUTS),
)


@given(st.integers(1, 50), st.integers(1, 6), st.integers(1, 60), st.booleans(), st.data())
def test_pairs_of_some_rows_are_those_of_the_mask(w, r, n, is_causal, data) -> None:
    start, stop = sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
    offset = data.draw(st.integers(0, r - 1))
    mask = dense_mask(DilatedSpec((Branch(w, r),)), ((offset,),), n, is_causal=is_causal)[0, 0]
    assert visible_pairs(Branch(w, r), offset, n, is_causal=is_causal, start=start, stop=stop) == mask[start:stop].sum()


@settings(max_examples=examples(15))
@given(
    specs, st.integers(1, 60), st.integers(1, 5), st.booleans(), st.sampled_from(["contiguous", "zigzag", "all_to_all"])
)
def test_the_work_of_ranks_is_that_of_the_mask(spec, tokens, gpus, is_causal, kind) -> None:
    heads = 60  # which up to five ranks divide
    scheme, layout = ("all_to_all", "contiguous") if kind == "all_to_all" else ("gather", kind)
    job = Job(
        spec=spec,
        tokens=tokens,
        gpus=gpus,
        heads=2 * heads,
        kv_heads=heads,
        head_dim=3,
        batch=2,
        is_causal=is_causal,
        scheme=scheme,
        token_layout=layout,
    )
    plan = make_plan(job)
    flops = forward_flops(spec, tokens, 2 * heads, 3, kv_heads=heads, is_causal=is_causal)
    assert sum(rank.flops for rank in plan.ranks) == 2 * flops
    assert all(rank.flops >= rank.flops_on_fetched >= 0 for rank in plan.ranks)
    if kind == "all_to_all":
        return
    mask = dense_mask(spec, spec.offsets(heads), tokens, is_causal=is_causal).sum((0, 1))  # (N, N)
    order, lengths = torch.arange(tokens), Shards.cut(tokens, gpus).lengths
    if layout == "zigzag":
        order, lengths = torch.tensor(zigzag_order(tokens, gpus)), zigzag_lengths(tokens, gpus)
    for rank, mine in zip(plan.ranks, order.split(lengths)):
        assert rank.tokens == len(mine)
        assert rank.flops == 4 * 3 * 2 * 2 * mask[mine].sum()
        if layout == "contiguous":
            assert rank.flops - rank.flops_on_fetched == 4 * 3 * 2 * 2 * mask[mine][:, mine].sum()


def test_a_shard_that_shares_nothing_holds_what_one_device_would() -> None:
    spec = DilatedSpec.of([2048, 4096, 8192], [1, 2, 4])
    plan = make_plan(Job(spec=spec, tokens=1 << 30, gpus=64, heads=4))
    assert {rank.peak for rank in plan.ranks} == {training_bytes(1 << 24, 4, 64)}
    assert all(branch.scheme is None and {*branch.forward} == {(0, 0)} for branch in plan.branches)
    flops = forward_flops(spec, 1 << 30, 4, 64)
    assert plan.step_seconds == pytest.approx((1 + BACKWARD_WORK) * flops / 64 / 400e12)
    twelve = make_plan(Job(spec=spec, tokens=1 << 30, gpus=64, heads=4, layers=12))
    assert twelve.step_seconds == pytest.approx(12 * plan.step_seconds)
    assert twelve.fullest.saved == 12 * plan.fullest.saved


def test_zigzag_evens_out_causal_work() -> None:
    job = Job(spec=DilatedSpec.of([1 << 20], [64]), tokens=1 << 20, gpus=16, is_causal=True)
    balance = make_plan(job).balance
    assert balance["contiguous"] > 1.9
    assert balance["zigzag"] < 1.01


def test_a_slower_link_costs_time_and_nothing_else() -> None:
    job = {"spec": DilatedSpec.of([1 << 20], [64]), "tokens": 1 << 20, "gpus": 16}
    fast, slow = (make_plan(Job(**job, link_gbps=rate)) for rate in (400.0, 0.4))
    assert slow.step_seconds > 10 * fast.step_seconds
    assert slow.fullest.peak == fast.fullest.peak


def test_the_command_prints_a_table_or_json(capsys) -> None:
    flags = ["plan", "--tokens", "1e9", "--gpus", "64", "--causal", "--segments", "2048", "1e9", "--rates", "1", "4096"]
    assert main(flags) == 0
    printed = capsys.readouterr().out
    assert "1,000,000,000 tokens on 64 GPUs, 15,625,000 per rank" in printed
    assert (
        "Verdict: does not fit in 80 GiB; 451 GiB are needed; shards of a multiple of 2,048 tokens would save"
        in printed
    )
    assert printed.index("COMPUTED") < printed.index("704.08 MiB") < printed.index("MODELLED") < printed.index(" ms")
    assert main([*flags, "--json", "--token-layout", "zigzag", "--layers", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["job"]["segment_lengths"] == [2048, 10**9]
    assert len(found["ranks"]) == 64
    assert {*found["ranks"][0]} == {"computed", "modelled"}
    assert found["computed"]["branches"][1]["scheme"] == "gather"
    assert found["modelled"]["step_seconds"] > 0
    assert main([*flags, "--gpu", "500"]) == 0
    assert "Verdict: fits in 500 GiB, with 49 GiB to spare." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gpus 0", "gpus must be a whole number of at least 1, got 0"),
        ("--gpus 2 --rates 1 2", "must pair up, got 0 lengths"),
        ("--gpus 2 --kv-heads 5", "kv_heads must divide heads, got kv_heads=5 and heads=12"),
        ("--gpus 2 --dtype int8", "dtype must be one of bfloat16"),
        ("--gpus 2 --tflops 0", "tflops must be a finite number above 0, got 0.0"),
        ("--gpus 2 --link-gbps nan", "link_gbps must be a finite number above 0, got nan"),
        ("--gpus 2 --scheme rign", "scheme must be one of auto"),
        ("--gpus 2 --token-layout zigzag --scheme ring", "'ring' needs contiguous shards"),
        ("--gpus 2 --layout interleafed", "head_layout must be one of"),
        ("--gpus 8 --scheme all_to_all --segments 1e6 --rates 1", "do not divide the 12 key/value heads"),
    ],
)
def test_what_cannot_be_planned_says_why(flags, message, capsys) -> None:
    assert main(["plan", "--tokens", "1e6", *flags.split()]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("tokens", ["1e400", "1.5", "1e-3", "many", "nan"])
def test_tokens_that_are_no_whole_number_are_refused(tokens, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--tokens", tokens, "--gpus", "2"])
    assert f"must be a whole number, such as 65536 or 1e9, got '{tokens}'" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["nan", "inf", "-1", "many"])
def test_a_memory_of_no_size_is_refused(size, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--model", "125m", f"--gpu={size}"])
    assert f"must be a size in GiB, such as 80, got '{size}'" in capsys.readouterr().err


def test_a_plan_of_causal_attention_has_the_branches_for_it(capsys) -> None:
    assert main(["plan", "--tokens", "100000", "--gpus", "8", "--causal", "--json"]) == 0
    spec = DilatedSpec.for_length(100_000, Job.heads, is_causal=True)
    assert tuple(json.loads(capsys.readouterr().out)["job"]["segment_lengths"]) == spec.segment_lengths


def test_plans_print_the_reach_and_connect_everything_by_default(capsys) -> None:
    flags = ["--tokens", "98304", "--gpus", "2", "--heads", "4", "--layers", "6"]
    main(["plan", *flags, "--segments", "2048", "8192", "--rates", "1", "4"])
    short = capsys.readouterr().out
    assert "after 1 layer 3.64%" in short
    assert all(f"after {layers} layers 8.33% of 98,304 tokens on average" in short for layers in (2, 6))
    main(["plan", *flags])
    reaching = capsys.readouterr().out
    assert all(f"after {layers} layers 100.00% of 98,304 tokens on average" in reaching for layers in (2, 6))
    main(["plan", *flags, "--json"])
    planned = json.loads(capsys.readouterr().out)
    assert planned["job"]["dilation_rates"] == [1, 2, 4]
    assert len(planned["computed"]["reach"]) == 3
    main(["plan", "--model", "125m", "--tokens", "200000", "--json"])
    fitted = json.loads(capsys.readouterr().out)
    assert fitted["segment_lengths"][-1] >= 200_000
    assert "100.00% at least" in fitted["reach"][-1]
