"""Generation: the same tokens with and without a cache, for whole and padded prompts, streamed or not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch

from dilated_attention_pytorch import LongNetLM
from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.models import captured, generation
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.models.fused import can_fuse
from dilated_attention_pytorch.models.generation import Sampling, prompt_chunk
from dilated_attention_pytorch.models.weights import stored_tensors, weights_to_int8

from ..later import LATER

SIZES = {"d_model": 16, "num_heads": 4, "num_layers": 2, "segment_lengths": (4, 8), "dilation_rates": (1, 2)}


def model_of(**sizes) -> LongNetLM:
    torch.manual_seed(0)
    return LongNetLM(**(SIZES | sizes)).double().eval()


@pytest.mark.parametrize("later", [{}, LATER], ids=["magneto", "later"])
@pytest.mark.parametrize("positions", ["rotary", "xpos", "none"])
@pytest.mark.parametrize("layout", ["interleaved", "blocked", "grouped"])
def test_a_model_gives_the_same_logits_from_its_cache(positions, layout, later) -> None:
    model = model_of(positions=positions, head_layout=layout, num_kv_heads=2, **later)
    tokens = torch.randint(256, (2, 30))
    padding = torch.tensor([0, 5])
    cache = model.new_cache(2, padding=padding)
    with torch.no_grad():
        pieces = [model(piece, cache=cache) for piece in tokens.split([11, 1, 1, 7, 10], dim=1)]
    mask = torch.arange(30) < padding[:, None]
    expected = model(tokens, key_padding_mask=mask)
    torch.testing.assert_close(torch.cat(pieces, dim=1)[~mask], expected[~mask], rtol=1e-9, atol=1e-9)
    assert cache[0].lengths.tolist() == [30, 25]


SAMPLING = [{"temperature": 0}, {"temperature": 0.7, "top_k": 20, "seed": 1}, {"top_p": 0.8, "seed": 2}]


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_generation_is_the_same_with_and_without_a_cache(sampling, padded) -> None:
    model = model_of(**(LATER if padded else {}))
    prompt = torch.randint(256, (2, 7))
    mask = (torch.arange(7) < torch.tensor([0, 3])[:, None]) if padded else None
    kept = model.generate(prompt, 20, key_padding_mask=mask, **sampling)
    assert kept.shape == (2, 27)
    for other in ({"use_cache": False}, {"chunk": 3}, {"chunk": 6}, {}):
        assert torch.equal(model.generate(prompt, 20, key_padding_mask=mask, **sampling, **other), kept)
    if padded and sampling == {"temperature": 0}:
        alone = model.generate(prompt[1:, 3:], 20, **sampling)
        assert torch.equal(alone[0], kept[1, 3:])


def test_a_long_prompt_in_chunks_gives_the_tokens_of_no_cache() -> None:
    torch.manual_seed(0)
    model = LongNetLM(vocab_size=64, d_model=32, num_heads=2, num_layers=1, max_length=60_000).eval()
    prompt = torch.randint(64, (1, 60_000))
    expected = model.generate(prompt, 2, seed=1, use_cache=False)
    assert torch.equal(model.generate(prompt, 2, seed=1, chunk=50_000), expected)


def test_tokens_are_streamed_as_they_come() -> None:
    model, prompt = model_of(), torch.randint(256, (2, 7))
    seen = []
    out = model.generate(prompt, 5, seed=3, on_tokens=seen.append)
    assert torch.equal(torch.stack(seen, dim=1), out[:, 7:])
    streamed = model.stream(prompt, 5, seed=3)
    assert torch.equal(next(streamed), out[:, 7])
    assert model.train().training  # what was not asked for yet has left no mode behind
    assert torch.equal(torch.stack(list(streamed), dim=1), out[:, 8:])
    assert model.training


def test_a_row_that_ended_stays_ended_and_all_of_them_end_the_run() -> None:
    model, prompt = model_of(), torch.randint(256, (2, 7))
    free = model.generate(prompt, 12, temperature=0)
    eos = int(free[0, 9])
    out = model.generate(prompt, 12, temperature=0, eos=eos)
    first = (free[0, 7:] == eos).int().argmax() + 7
    assert torch.equal(out[0, : first + 1], free[0, : first + 1])
    assert (out[0, first:] == eos).all()
    alone = model.generate(prompt[:1], 12, temperature=0, eos=eos)
    assert alone.shape[1] == first + 1


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("ahead", [1, 3, 16])
def test_an_end_that_is_noticed_later_changes_neither_tokens_nor_draws(sampling, ahead, monkeypatch) -> None:
    """As on a GPU, which is not asked after every token."""
    model, prompt = model_of(), torch.randint(256, (2, 7))
    settings = {name: value for name, value in sampling.items() if name != "seed"}
    free = model.generate(prompt[:1], 12, **settings, generator=torch.Generator().manual_seed(1))
    found = []
    for lag in (0, ahead):
        draws = torch.Generator().manual_seed(1)
        choose = Sampling(**settings)
        steps = generation.cached_logits(model, prompt[:1], None, None, None)
        new = generation.generated_tokens(steps, choose, draws, 12, int(free[0, 9]), lag)
        found.append((torch.stack([*new]), draws.get_state()))
    assert len(found[0][0]) < 12
    assert all(map(torch.equal, *found))


def test_the_smallest_temperature_draws_the_likeliest_token() -> None:
    logits = torch.randn(4, 50)
    assert torch.equal(Sampling(temperature=1e-40).choose(logits), logits.argmax(-1))


def test_a_cache_of_another_pattern_is_refused_before_it_takes_a_token() -> None:
    model, prompt = model_of(stagger=True), torch.randint(256, (1, 7))
    cache = model_of().new_cache(1)
    with pytest.raises(
        ValueError,
        match=r"the cache is for segments .* and segments .*: make it with new_cache",
    ):
        model.generate(prompt, 2, cache=cache)
    assert [int(layer.lengths) for layer in cache] == [0] * len(cache)


def test_a_draw_is_that_of_multinomial() -> None:
    chances = torch.rand(50, 30).softmax(-1)
    drawn = Sampling().choose(chances.log(), torch.Generator().manual_seed(7))
    expected = torch.multinomial(chances.log().softmax(-1), 1, generator=torch.Generator().manual_seed(7))
    assert torch.equal(drawn, expected[:, 0])


class Recorded:
    """A graph of a CPU: what was recorded is run again."""

    made: ClassVar[list[Recorded]] = []

    def __init__(self, run: Callable[[], object], like: torch.Tensor) -> None:
        self.replay: Callable[[], object] | None = run
        Recorded.made.append(self)


@pytest.fixture
def graphs(monkeypatch) -> list[Recorded]:
    """Let a CPU do what a GPU does, but for the graph itself."""
    captured.forget_kept()
    monkeypatch.setattr(Recorded, "made", [])
    monkeypatch.setattr(captured, "_record", Recorded)
    monkeypatch.setattr(captured._Contents, "can_be_recorded", lambda self, tokens: True)
    yield Recorded.made
    captured.forget_kept()


def test_steps_that_are_not_recorded_do_not_look_through_the_model(monkeypatch) -> None:
    walked: list[torch.nn.Module] = []
    monkeypatch.setattr(captured, "stored_tensors", lambda model: walked.append(model) or [])
    model_of().generate(torch.randint(256, (1, 7)), 2)
    assert not walked


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_later_calls_replay_the_graph_of_the_first(sampling, graphs, monkeypatch) -> None:
    model, prompt = model_of(), torch.randint(256, (2, 70))
    mask = torch.arange(70) < torch.tensor([0, 3])[:, None]
    calls = [{}, {"key_padding_mask": mask}, {"chunk": 7}]
    found = [model.generate(prompt, 12, **sampling, **call) for call in calls]
    assert len(graphs) == 1
    model.generate(prompt[:1], 12)
    assert len(graphs) == 2
    streams = [model.stream(prompt, 12, **sampling, **call) for call in calls[:2]]  # by turns, with a cache each
    for pieces, expected in zip(zip(*map(zip, streams)), zip(*[x[:, 70:].T for x in found[:2]])):
        assert all(torch.equal(piece, one) for (piece,), one in zip(pieces, expected))
    assert len(graphs) == 3
    calls[2] = {}  # chunks are of a cache
    expected = [model.generate(prompt, 12, **sampling, **call, use_cache=False) for call in calls]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("change", ["weights", "dtype", "head", "scale", "hook"])
def test_a_graph_is_not_replayed_for_a_model_that_changed(change, graphs) -> None:
    model, prompt = model_of(tie_weights=False), torch.randint(256, (1, 9))
    before = model.generate(prompt, 8, temperature=0)
    if change == "weights":  # in place: the graph reads them
        torch.nn.init.normal_(model.head.weight)
    elif change == "dtype":
        model.float()
    elif change == "scale":
        for attention in model._all_attention():
            attention.softmax_scale = 0.5
    elif change == "head":
        model.head = torch.nn.Linear(16, 256, bias=False, dtype=torch.float64)
    else:
        model.head.weight.data = torch.randn_like(model.head.weight)
    after = model.generate(prompt, 8, temperature=0)
    assert len(graphs) == (1 if change == "weights" else 2)
    assert torch.equal(after, model.generate(prompt, 8, temperature=0, use_cache=False))
    assert change in ("dtype", "scale") or not torch.equal(after, before)


def test_weights_in_8_bits_generate_by_recorded_steps(graphs) -> None:
    pytest.importorskip("torchao", reason="needs the extra torchao")
    model, prompt = model_of().float(), torch.randint(256, (1, 9))
    expected, bytes_before = model(prompt), sum(x.nbytes for x in stored_tensors(model))
    weights_to_int8(model)
    torch.testing.assert_close(model(prompt), expected, rtol=0.05, atol=0.05)
    assert sum(x.nbytes for x in stored_tensors(model)) < 0.7 * bytes_before  # embeddings stay
    assert not can_fuse(model, model.new_cache(1))
    for _ in range(2):
        found = model.generate(prompt, 12, temperature=0)
        assert torch.equal(found, model.generate(prompt, 12, temperature=0, use_cache=False))
    assert len(graphs) == 1


def test_calls_of_many_kinds_keep_no_more_than_two_caches(graphs) -> None:
    """What the GPU's memory test measures, as bookkeeping."""
    model, bytes_kept = model_of(), set()
    for i in range(40):
        prompt = torch.randint(256, (1 + i % 3, 1 + 7 * i % 29))
        stream = model.stream(prompt, 5 + i % 4)
        next(stream)
        if i % 5:  # every fifth is not read to its end
            assert len(list(stream)) == 4 + i % 4
        del stream
        kept = captured._kept[model]
        assert len(kept) <= 2
        bytes_kept.add(sum(layer.nbytes for cache in kept.values() for layer in cache))
    assert len(bytes_kept) <= 4  # of the first cache, and of pairs of three


def test_a_model_keeps_few_caches_and_none_outlives_it(graphs) -> None:
    model = model_of()
    for batch in (1, 2, 3, 2, 1):
        model.generate(torch.zeros(batch, 3, dtype=torch.int64), 6)
    kept = captured._kept[model]
    assert [key[0] for key in kept] == [2, 1]
    caches = [weakref.ref(cache[0]) for cache in kept.values()]
    del model, kept
    for graph in graphs:
        graph.replay = None  # which, unlike a GPU's, holds what it runs
    gc.collect()
    assert [cache() for cache in caches] == [None, None]


def test_a_cache_that_is_passed_is_continued() -> None:
    model, prompt = model_of(), torch.randint(256, (2, 21))
    whole = model.generate(prompt, 10, temperature=0)
    cache = model.new_cache(2)
    for _ in model.read(prompt[:, :13], cache, chunk=5):
        pass
    first = model.generate(prompt[:, 13:], 4, temperature=0, cache=cache)
    assert torch.equal(first, whole[:, 13:25])
    assert cache[0].lengths.tolist() == [24, 24]
    assert torch.equal(model.generate(first[:, -1:], 6, temperature=0, cache=cache), whole[:, 24:])
    with pytest.raises(ValueError, match="a cache knows the padding of its rows"):
        model.generate(prompt, 1, cache=cache, key_padding_mask=torch.zeros(2, 21, dtype=torch.bool))


@pytest.mark.parametrize("sampling", [*SAMPLING, {"top_k": 2, "seed": 3, "eos": 5}], ids=str)
def test_a_draft_changes_no_token(sampling, request) -> None:
    if "top_p" in sampling:
        request.getfixturevalue("graphs")
    model, prompt = model_of(vocab_size=12), torch.randint(12, (2, 21))
    mask = torch.arange(21) < torch.tensor([0, 3])[:, None]
    near = model_of(vocab_size=12)
    torch.nn.init.normal_(near.layers[1].feed_forward.linear2.bias, std=0.3)
    other = model_of(vocab_size=12, d_model=8, num_heads=2, num_layers=1, segment_lengths=(6, 12), positions="none")
    for rows in (slice(None), slice(1)):  # with and without padding
        settings = {"key_padding_mask": mask[rows], **sampling}
        expected = model.generate(prompt[rows], 25, use_cache=False, **settings)
        for draft, count in ((model, 3), (near, 5), (other, 1)):
            found = model.generate(prompt[rows], 25, draft=draft, draft_tokens=count, **settings)
            assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="must have the same vocabulary"):
        model.generate(prompt, 1, draft=model_of())
    with pytest.raises(ValueError, match="draft needs two caches of its own"):
        model.generate(prompt, 1, draft=near, use_cache=False)


def test_chunks_of_a_prompt_end_where_segments_do() -> None:
    config = ModelConfig(segment_lengths=(2048, 4096, 8192), dilation_rates=(1, 2, 4))
    assert [prompt_chunk(config, 1, 2, most) for most in (1000, 3000, 5000, 50_000)] == [1000, 2048, 4096, 49_152]
    one, four = (prompt_chunk(config, batch, 2) for batch in (1, 4))
    assert one % 8192 == four % 8192 == 0
    assert 0 < four <= one // 4


def test_nothing_is_generated_where_nothing_is_asked_for() -> None:
    prompt = torch.randint(256, (1, 7))
    assert torch.equal(model_of().generate(prompt, 0), prompt)


def test_draws_keep_to_the_likeliest_tokens() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(500, -1)
    generator = torch.Generator().manual_seed(0)
    assert set(Sampling(top_k=2).choose(logits, generator).tolist()) == {0, 1}
    assert set(Sampling(top_p=0.81).choose(logits, generator).tolist()) == {0, 1, 2}
    assert set(Sampling(top_p=0.01).choose(logits, generator).tolist()) == {0}
    assert set(Sampling(top_k=3, top_p=0.6).choose(logits, generator).tolist()) == {0, 1}


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"top_k": 3}, {"top_p": 0.9}])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_model_whose_logits_are_not_finite_is_said_to_be_broken(value, sampling) -> None:
    model, prompt = model_of(), torch.randint(256, (2, 7))
    model.norm.bias.data[0] = value
    with pytest.raises(FloatingPointError, match="not finite at new token 1 of row 0: its weights are broken"):
        model.generate(prompt, 3, **sampling)


def test_broken_logits_are_looked_at_without_waiting_for_every_token(monkeypatch) -> None:
    """As on a GPU, where a look waits for it: draws go on for a while, and the first broken token is named."""
    looks = []
    real = generation._check_finite
    monkeypatch.setattr(generation, "_check_finite", lambda *given: looks.append(given[1]) or real(*given))

    def steps(broken: int):
        for number in range(200):
            yield torch.full((2, 5), torch.nan if number >= broken else 1.0)

    class Elsewhere:
        type = "cuda"

    monkeypatch.setattr(torch.Tensor, "device", Elsewhere)
    assert len(list(generation.generated_tokens(steps(200), Sampling(), None, 100, None))) == 100
    assert looks == [0, 64, 99]
    with pytest.raises(FloatingPointError, match="at new token 71 of row 0"):
        list(generation.generated_tokens(steps(70), Sampling(), None, 100, None))


def test_what_cannot_be_generated_is_refused() -> None:
    model, prompt = model_of(), torch.randint(256, (2, 7))
    with pytest.raises(ValueError, match="top_p must be a finite number above 0 and at most 1"):
        model.generate(prompt, 1, top_p=0.0)
    with pytest.raises(ValueError, match="top_k must be a whole number of at least 1"):
        model.generate(prompt, 1, top_k=0)
    with pytest.raises(ValueError, match="pass one of them"):
        model.generate(prompt, 1, seed=1, generator=torch.Generator())
    with pytest.raises(ValueError, match="at least one token"):
        model.generate(prompt[:, :0], 1)
    with pytest.raises(ValueError, match="row 1 of the prompt is padded on the right"):
        model.generate(prompt, 1, key_padding_mask=torch.arange(7) >= torch.tensor([7, 4])[:, None])
    with pytest.raises(ValueError, match="draft_tokens=9 has no effect without a draft model"):
        model.generate(prompt, 1, draft_tokens=9)
    with pytest.raises(ValueError, match="has no effect with use_cache=False: leave one of them out"):
        model.generate(prompt, 1, chunk=2, use_cache=False)
    with pytest.raises(ValueError, match="chunk must be a whole number of at least 1, got 0"):
        model.generate(prompt, 1, chunk=0)
    with pytest.raises(ValueError, match="2 layers, the cache 1"):
        model(prompt, cache=model.new_cache(2)[:1])
    with pytest.raises(ValueError, match="for a batch of 3"):
        model(prompt, cache=model.new_cache(3))
    with torch.no_grad(), pytest.raises(ValueError, match="no mask or lengths"):
        model(prompt, cache=model.new_cache(2), key_padding_mask=torch.zeros(2, 7, dtype=torch.bool))


def test_layers_of_a_cache_that_are_out_of_step_are_refused() -> None:
    model = model_of()
    prompt = torch.randint(256, (1, 20))
    cache = model.new_cache(1, rewindable=4)
    with torch.no_grad():
        model(prompt, cache=cache)
        cache[0].rewind(2)
        with pytest.raises(ValueError, match=r"different numbers of tokens, \[\(18,\), \(20,\)\]"):
            model(prompt[:, 18:], cache=cache)
        cache[1].rewind(2)
        torch.testing.assert_close(model(prompt[:, 18:], cache=cache), model(prompt)[:, 18:])


@pytest.mark.parametrize(
    ("device", "message"), [("foo", "no device 'foo' here"), ("cuda:99", "no device 'cuda:99' here")]
)
def test_a_device_that_is_not_there_is_told(tmp_path, capsys, device, message) -> None:
    model_of().float().save_pretrained(tmp_path / "run")
    assert main(["generate", str(tmp_path / "run"), "--prompt", "a", "--device", device]) == 1
    assert message in capsys.readouterr().err


def test_a_run_without_a_checkpoint_has_nothing_to_generate_with(tmp_path, capsys) -> None:
    for name in ("config.json", "corpus.json"):
        (tmp_path / name).write_text("{}")
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 1
    assert "has no complete checkpoint yet" in capsys.readouterr().err


def test_the_command_continues_a_prompt(tmp_path, capsys) -> None:
    model_of().float().save_pretrained(tmp_path / "run")
    texts = []
    for _ in range(2):
        flags = ["--prompt", "def ", "--max-new-tokens", "9", "--seed", "5", "--top-k", "3", "--device", "cpu"]
        assert main(["generate", str(tmp_path / "run"), *flags]) == 0
        text, figures = capsys.readouterr()
        texts.append(text)
        assert "9 tokens: 4 tokens of prompt" in figures
        assert "tokens/s" in figures
    assert texts[0] == texts[1]
    assert texts[0].startswith("def ")
    assert main(["generate", str(tmp_path / "run"), "--prompt", "a", "--chunk", "0"]) == 1
    assert "chunk must be a whole number of at least 1, got 0" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "run"), "--prompt", "a", "--top-k", "0"]) == 1
    said, told = capsys.readouterr()
    assert (said, "top_k must be" in told) == ("", True)
    assert main(["generate", str(tmp_path / "nothing"), "--prompt", "a"]) == 1
    assert "no model config" in capsys.readouterr().err
    model_of(vocab_size=300).float().save_pretrained(tmp_path / "words")
    assert main(["generate", str(tmp_path / "words"), "--prompt", "a", "--device", "cpu"]) == 1
    assert "has 300 tokens" in capsys.readouterr().err


def test_the_command_continues_a_file_and_then_a_conversation(tmp_path, capsys, monkeypatch) -> None:
    model = model_of().float()
    model.save_pretrained(tmp_path / "run")
    (tmp_path / "book.txt").write_text("a long book")
    lines = iter(["and", "then"])
    monkeypatch.setattr("builtins.input", lambda asked: next(lines, None) or _end())
    flags = ["--max-new-tokens", "4", "--temperature", "0", "--device", "cpu", "--chunk", "8"]
    command = ["generate", str(tmp_path / "run"), "--prompt-file", str(tmp_path / "book.txt"), "--interactive", *flags]
    assert main(command) == 0
    said, figures = capsys.readouterr()
    text, expected = [*b"a long book"], b""
    for line in (b"", b"and\n", b"then\n"):
        text += line
        text = model.generate(torch.tensor([text]), 4, temperature=0)[0].tolist()
        expected += bytes(text[-4:]).decode(errors="replace").encode() + b"\n"
    assert said.encode() == expected
    assert figures.count("tokens/s") == 3
    assert main(["generate", str(tmp_path / "run"), *flags]) == 1
    assert "give --prompt, --prompt-file or --interactive" in capsys.readouterr().err


def _end() -> str:
    raise EOFError


def test_the_command_takes_a_closed_input_as_an_empty_one_and_names_a_file_that_is_no_text(
    tmp_path, capsys, monkeypatch
) -> None:
    model_of().float().save_pretrained(tmp_path / "run")
    (tmp_path / "picture").write_bytes(b"\xff\xd8")
    monkeypatch.setattr("sys.stdin", None)
    command = ["generate", str(tmp_path / "run"), "--max-new-tokens", "1", "--device", "cpu"]
    assert main([*command, "--interactive"]) == 0
    assert main([*command, "--prompt", "-"]) == 1
    assert "a prompt needs at least one character" in capsys.readouterr().err
    assert main([*command, "--prompt-file", str(tmp_path / "picture")]) == 1
    assert "picture is not text in UTF-8" in capsys.readouterr().err


def test_generation_under_autocast_keeps_keys_in_its_dtype() -> None:
    model, prompt = model_of().float(), torch.randint(256, (1, 7))
    with torch.autocast("cpu", torch.bfloat16):
        assert model.new_cache(1)[0].keys.dtype == torch.bfloat16
        assert model.generate(prompt, 3, temperature=0).shape == (1, 10)
