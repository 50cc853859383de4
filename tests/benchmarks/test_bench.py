from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from benchmarks import cache_and_pool, comparisons, contenders
from benchmarks.cases import CASES, choose_cases
from benchmarks.command import main
from benchmarks.contenders import choose_contenders
from benchmarks.harness import Case, compare, measure
from benchmarks.ratios import rows_of
from benchmarks.suite import Options, append_line, read_records
from dilated_attention_pytorch import cli
from dilated_attention_pytorch.core import layout_for

from ..ranks import start_server

SMALL = Case(
    tokens=64, heads=2, head_dim=16, segment_lengths=(16, 32), dilation_rates=(1, 2), dtype="float32", device="cpu"
)

TURNS = dict(comparisons.TURNS)
ALL = ("attention", "short", "scaling", "blocksparse")


@pytest.fixture
def small_suites(monkeypatch):
    """Every suite has one small case, forward and backward."""
    for suite in CASES:
        monkeypatch.setitem(CASES, suite, lambda device: iter([SMALL, replace(SMALL, backward=True)]))


@pytest.fixture(autouse=True)
def one_turn(monkeypatch):
    """Contenders are measured once: what they take is of no interest."""
    monkeypatch.setattr(comparisons, "TURNS", {"cuda": 1, "cpu": 1})


def read(results):
    return [json.loads(line) for line in results.read_text().splitlines()]


def test_a_suite_prints_a_row_a_case_and_writes_a_line_a_contender(tmp_path, capsys, small_suites) -> None:
    results = tmp_path / "results.jsonl"
    assert main(["short", "--device", "cpu", "--cases", "forward+backward", "--out", str(results)]) == 0
    printed = capsys.readouterr().out
    assert replace(SMALL, backward=True).title in printed
    assert "torchscale: give --torchscale PATH" in printed
    head, *lines = read(results)
    assert head["machine"]["torch"] == torch.__version__
    assert [line["contender"] for line in lines] == list(choose_contenders())
    measured = [line for line in lines if "milliseconds" in line]
    assert [line["contender"] for line in measured] == ["ours", "dense, same FLOPs", "dense, same tokens"]
    assert all(line["milliseconds"] > 0 and line["backward"] for line in measured)


def test_on_a_cpu_the_middle_of_three_turns_stands_for_a_contender(tmp_path, monkeypatch, small_suites) -> None:
    monkeypatch.setattr(comparisons, "TURNS", TURNS)
    taken = iter([3.0, 7.0, 1.0, 9.0, 2.0, 8.0])  # by turns
    monkeypatch.setattr(comparisons, "attempt", lambda setup, case: {"milliseconds": next(taken), "tflops": 1.0})
    table = dict.fromkeys(["ours", "dense, same FLOPs"])
    monkeypatch.setattr(contenders, "choose_contenders", lambda only, torchscale, kernels: table)
    results = tmp_path / "results.jsonl"
    assert main(["short", "--device", "cpu", "--cases", "forward+backward", "--out", str(results)]) == 0
    assert [line["milliseconds"] for line in read(results)[1:]] == [2.0, 8.0]
    assert comparisons.middle([{"milliseconds": 1.0}, {"failed": "once"}, {"milliseconds": 2.0}]) == {"failed": "once"}


def test_all_runs_every_suite_and_renders_page_and_report(tmp_path, capsys, small_suites) -> None:
    results, page, html = (tmp_path / f"results.{suffix}" for suffix in ("jsonl", "md", "html"))  # beside the results
    assert main(["all", "--out", str(results), "--only", "ours", "--device", "cpu"]) == 0
    assert {line["suite"] for line in read(results)[1:]} == set(ALL)
    for text in (page.read_text(), html.read_text()):
        assert all(f"{suite}, on a CPU" in text for suite in ALL)


def test_a_contender_that_fails_costs_no_other_result(tmp_path, capsys, monkeypatch, small_suites) -> None:
    def without_memory(case):
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore about it")

    def wrong_in_its_call(case):
        return contenders.Ready(lambda: 1 / 0, 1)

    ours = contenders.ours("auto")
    table = {"ours": ours, "large": without_memory, "wrong": wrong_in_its_call, "last": ours}
    monkeypatch.setattr(contenders, "choose_contenders", lambda only, torchscale, kernels: table)
    results, page = tmp_path / "results.jsonl", tmp_path / "page.md"
    assert main(["short", "--device", "cpu", "--out", str(results)]) == 0
    assert main(["page", "--out", str(results), "--page", str(page)]) == 0
    for text in (capsys.readouterr().out, page.read_text()):
        assert f"large failed at {SMALL.title}: OutOfMemoryError: CUDA out of memory.\n" in text
        assert f"wrong failed at {SMALL.title}: ZeroDivisionError: division by zero\n" in text
    _, first, large, wrong, last, *_ = read(results)
    assert first["milliseconds"] > 0
    assert last["milliseconds"] > 0
    assert large["failed"].startswith("OutOfMemoryError")
    assert wrong["failed"].startswith("ZeroDivisionError")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["short", "--only", "theirs"], "--only takes names of 'ours', 'dense, same FLOPs'"),
        (["short", "--only", "torchscale"], "needs --torchscale PATH"),
        (["short", "--torchscale", "/nowhere"], "/nowhere has no torchscale/component/dilated_attention.py: git clone"),
        (["short", "--cases", "D=63"], "no case has all the words ['D=63']"),
        (["short", "--tokens", "3"], "one of the lengths [3]: choose from\n  N=512"),
        (["page", "--out", "/nowhere.jsonl"], "no results at /nowhere.jsonl: measure first"),
    ],
)
def test_what_cannot_be_honoured_is_refused(flags, message, capsys) -> None:
    assert main(flags) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("all", "required: --out"),
        ("report", "required: --out"),
        ("cache --only ours", "unrecognized arguments: --only ours"),
        ("decode --cases D=64", "unrecognized arguments: --cases D=64"),
        ("pool --torchscale /nowhere", "unrecognized arguments: --torchscale"),
        ("capacity --tokens 64", "unrecognized arguments: --tokens 64"),
        ("short --cap 80", "unrecognized arguments: --cap 80"),
        ("short --heads 2", "unrecognized arguments: --heads 2"),
        ("short --sizes 125m", "unrecognized arguments: --sizes 125m"),
        ("short --page page.md", "unrecognized arguments: --page page.md"),
        ("memory --device cuda", "unrecognized arguments: --device cuda"),
        ("shard --heads 0", "argument --heads: must be 1 or more, got 0"),
        ("memory --tokens -3", "argument --tokens: must be 1 or more, got -3"),
        ("tune --device cpu", "unrecognized arguments: --device cpu"),
    ],
)
def test_a_flag_of_another_suite_is_refused(flags, message, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(flags.split())
    assert message in capsys.readouterr().err


def test_the_help_of_a_suite_has_its_flags_only(capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["shard", "--help"])
    printed = capsys.readouterr().out
    assert "--head-dim D" in printed
    assert "--only" not in printed


@pytest.mark.parametrize("command", ["bench", "recall"])
def test_the_installed_command_runs_what_its_checkout_has_and_else_says_where_it_is(
    command, tmp_path, monkeypatch, capsys
) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert f"usage: {command} " in capsys.readouterr().out
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "lib" / "dilated_attention_pytorch" / "cli.py"))
    assert cli.main([command, "short"]) == 1
    assert f"./run {command} --help there lists" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("run", [main, lambda flags: cli.main(["bench", *flags])])
def test_tuning_is_a_command_with_and_without_a_checkout(run, capsys) -> None:
    assert run(["tune"]) == 1
    assert "tune measures kernels on a GPU" in capsys.readouterr().err


def test_a_line_that_was_cut_off_is_named_and_spoils_no_later_one(tmp_path) -> None:
    results = tmp_path / "results.jsonl"
    append_line(results, {"machine": {"gpu": "A"}})
    with results.open("a") as stream:
        stream.write('{"suite": "sho')
    append_line(results, {"suite": "short"})
    assert results.read_text().splitlines()[1:] == ['{"suite": "sho', '{"suite": "short"}']
    with pytest.raises(ValueError, match=r"results.jsonl, line 2, is damaged .*: delete this line"):
        read_records(results)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused(capsys) -> None:
    assert main(["short", "--device", "cuda"]) == 1
    assert "leave it out, or pass --device cpu" in capsys.readouterr().err


def test_kernels_are_chosen_only_where_a_suite_measures_them(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["gigapath", "--kernels", "plain"])
    assert "unrecognized arguments: --kernels plain" in capsys.readouterr().err
    assert main(["short", "--kernels", "plain", "--torchscale", str(tmp_path)]) == 1
    assert "--kernels plain does not measure torchscale" in capsys.readouterr().err


def test_steps_on_ranks_are_not_chosen_by_size(capsys) -> None:
    assert main(["step", "--ranks", "--sizes", "125m"]) == 1
    assert "leave --sizes and --only out" in capsys.readouterr().err


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_the_dense_floor_has_our_flops(is_causal, backward) -> None:
    case = replace(SMALL, is_causal=is_causal, backward=backward)
    assert choose_contenders()["dense, same FLOPs"](case).flops == case.flops


def test_dense_attention_of_too_many_elements_for_a_kernel_is_split(monkeypatch) -> None:
    monkeypatch.setattr(contenders, "ELEMENTS_PER_CALL", 2 * 16 * SMALL.heads * SMALL.head_dim)  # two of six sequences
    shapes = []
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        contenders.F,
        "scaled_dot_product_attention",
        lambda q, *rest, **more: shapes.append(q.shape) or attend(q, *rest, **more),
    )
    ready = choose_contenders()["dense, same FLOPs"](SMALL)
    ready.call()
    assert shapes == [(2, SMALL.heads, 16, SMALL.head_dim)] * 3
    assert ready.flops == SMALL.flops


def test_a_timing_has_its_spread() -> None:
    timing = measure(lambda: torch.ones(100).sum(), "cpu", seconds=0.01)
    assert 0 < timing.p20 <= timing.median <= timing.p80


def test_every_suite_has_distinct_cases_on_every_device() -> None:
    for suite in CASES.values():
        for device in ("cpu", "cuda"):
            cases = list(suite(device))
            assert cases
            assert {case.device for case in cases} == {device}
            assert len({case.title for case in cases}) == len(cases)


def test_words_choose_cases_as_a_whole_and_lengths_across_suites() -> None:
    chosen = choose_cases(["attention", "short"], Options(device="cuda", cases=["D=64", "grouped"], tokens=[1 << 20]))
    assert [case.backward for case in chosen.pop("attention")] == [False, True]
    assert not chosen
    with_comma, without = (
        choose_cases(["short"], Options(device="cuda", cases=[length, "forward"])) for length in ("N=1,024", "N=1024")
    )
    assert with_comma == without
    assert len(without["short"]) == 1


def test_the_longest_case_fits_a_gpu_of_80_gib() -> None:
    longest = max(CASES["scaling"]("cuda"), key=lambda case: case.tokens)
    assert longest.tokens == 1 << 24
    assert 1.1 * longest.floor_bytes < 80 * 2**30


SPARSE = replace(SMALL, segment_lengths=(64,), dilation_rates=(1,), pattern="random", sparsity_ratio=0.3, block_size=8)


def test_a_sparse_case_is_measured_against_every_tile_through_the_same_kernels(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(CASES, "blocksparse", lambda device: iter([SPARSE, replace(SPARSE, backward=True)]))
    results, page = tmp_path / "results.jsonl", tmp_path / "page.md"
    assert main(["blocksparse", "--device", "cpu", "--out", str(results)]) == 0
    assert main(["page", "--out", str(results), "--page", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "FlexAttention: measured on a GPU" in printed
    lines = {line["contender"]: line for line in read(results)[1:] if not line["backward"]}
    assert all(lines[name]["milliseconds"] > 0 for name in ("ours", "ours, every tile"))
    assert "every tile/ours" in page.read_text()
    assert SPARSE.title in page.read_text()


def test_a_sparse_case_counts_the_flops_of_its_tiles() -> None:
    named = choose_contenders()
    assert named["ours"](SPARSE).flops == SPARSE.flops == 4 * 64 * (2 * 8) * SPARSE.heads * SPARSE.head_dim  # 2 of 8
    assert named["ours, every tile"](SPARSE).flops == 4 * SPARSE.flops == replace(SPARSE, pattern=None).flops


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tokens", [64, 61])
def test_flex_attention_gets_the_very_tiles(is_causal, tokens) -> None:
    case = replace(SPARSE, tokens=tokens, is_causal=is_causal)
    mask = contenders.tile_mask(case)
    layout = layout_for(case.spec, tokens, case.spec.offsets(1), case.sparse_config, is_causal, torch.device("cpu"))
    kept = layout.branches[0].mask(0, 0, 0, 8)
    assert torch.equal(mask.to_dense()[0, 0].bool(), kept)
    cut = {(t, t) for t in range(8)} if is_causal else set()
    cut |= {(t, 7) for t in range(8) if kept[t, 7]} if tokens == 61 else set()
    whole = {
        (t, int(j)) for t in range(8) for j in mask.full_kv_indices[0, 0, t, : int(mask.full_kv_num_blocks[0, 0, t])]
    }
    assert whole == {(int(t), int(j)) for t, j in kept.nonzero()} - cut


def test_results_of_a_release_without_block_patterns_are_still_read(tmp_path) -> None:
    line = {"suite": "short", "contender": "ours", "milliseconds": 1.0, "tflops": 1.0, "peak_bytes": None}
    known = {k: v for k, v in asdict(SMALL).items() if k not in ("pattern", "sparsity_ratio", "block_size")}
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps({"machine": {}}) + "\n" + json.dumps(line | known) + "\n")
    assert [row.case for row in rows_of(read_records(results))] == [SMALL]


@pytest.fixture
def tiny(monkeypatch):
    """The suites of what calls share, at sizes and times that a test can afford."""
    monkeypatch.setattr(cache_and_pool, "HEADS", 2)
    monkeypatch.setattr(cache_and_pool, "HEAD_DIM", 16)
    monkeypatch.setattr(
        cache_and_pool, "compare", lambda off, on, device: compare(off, on, device, seconds=0.01, least=2)
    )
    monkeypatch.setattr(cache_and_pool, "_in_threads", lambda run: (run(), 1.0)[1])
    monkeypatch.setattr(cache_and_pool, "peak_in_new_process", lambda *arguments: 100 + arguments[-1])
    monkeypatch.setattr(cache_and_pool, "_steps_on_ranks", lambda tokens: [])


def test_the_cache_suite_measures_every_kind_and_the_whole_step(tmp_path, capsys, tiny) -> None:
    results = tmp_path / "results.jsonl"
    assert main(["cache", "--device", "cpu", "--tokens", "512", "--out", str(results)]) == 0
    _, *lines = read(results)
    kinds = {line["kind"]: line["cached"] for line in lines if "kind" in line}
    assert kinds["lengths, 32 documents"] is True
    assert kinds["offset table"] is False
    steps = [line for line in lines if "case" in line]
    assert {"N=512 whole DilatedAttention forward", "N=512 packed DilatedAttention forward"} <= {
        line["case"] for line in steps
    }
    assert all(line["off"] > 0 and line["on"] > 0 and line["ratio"] > 0 for line in steps)
    printed = capsys.readouterr().out
    assert f"time with it on at most 1.02 of off; worst {max(line['ratio'] for line in steps):.3f}" in printed


def test_the_pool_suite_measures_every_module(tmp_path, capsys, tiny) -> None:
    results = tmp_path / "results.jsonl"
    assert main(["pool", "--device", "cpu", "--tokens", "256", "--out", str(results)]) == 0
    _, *lines = read(results)
    cases = {line["case"] for line in lines}
    for name in cache_and_pool.MODULES:
        assert f"N=256 {name} float32 forward+backward" in cases
    assert "N=256 DilatedAttention bfloat16 forward+backward" in cases
    assert all(line["memory_ratio"] == 1.01 for line in lines if line["peak_on"] is not None)
    assert "peak memory with it on at most 1.05 of off; worst 1.010" in capsys.readouterr().out


def kind(cached, hit, hit_8=1.0):
    return {"kind": "parts", "cached": cached, "rebuild": 10.0, "hit": hit, "rebuild_8": 10.0, "hit_8": hit_8}


@pytest.mark.parametrize(
    ("record", "met"),
    [
        (kind(True, 9.0), True),
        (kind(True, 10.0), False),
        (kind(True, 1.0, hit_8=11.0), False),
        (kind(False, 5.0), True),
        (kind(False, 4.9), False),
        ({"case": "a step", "ratio": 1.02, "memory_ratio": None}, True),
        ({"case": "a step", "ratio": 1.03, "memory_ratio": None}, False),
    ],
)
def test_what_is_cached_must_be_cheaper_to_find_and_to_use(record, met) -> None:
    assert [verdict.met for verdict in cache_and_pool.CACHE.verdict([record])] == [met]


def test_the_pool_suite_measures_the_classes_across_ranks_on_two_of_them(monkeypatch) -> None:
    server = start_server()  # a process that it forks has imported what ranks need
    monkeypatch.setattr(cache_and_pool.multiprocessing, "get_context", lambda method: server)
    cases = {step["case"]: step for step in cache_and_pool._steps_on_ranks(64)}
    for name in cache_and_pool.RINGS:
        step = cases[f"N=64 {name} bfloat16 forward+backward, 2 gloo ranks"]
        assert min(step["off"], step["on"]) > 0


def test_a_peak_is_what_a_step_needs_at_least() -> None:
    floor = 3 * 2048 * 4 * 64 * 4
    assert cache_and_pool.peak_in_new_process("DilatedAttention", "cpu", 2048, "float32", True) > floor


def test_several_threads_share_the_time() -> None:
    assert cache_and_pool._in_threads(lambda: sum(range(1000)), seconds=0.01) > 0
