"""Ends of texts, default parameters, log-probabilities and traces, through the public API."""

from __future__ import annotations

import functools
import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft import LLM, RequestError, SamplingParams, demo
from foredraft.constraints import AllowedTokens
from foredraft.decode import scores
from foredraft.decode.distribution import Distribution
from foredraft.decode.engine_target import score_chunk
from foredraft.decode.round_draft import Draft
from foredraft.decode.round_results import fetch_results
from foredraft.decode.sampling import PenaltyContext
from foredraft.decode.sequence import Finish, Sequence
from foredraft.decode.text_buffer import TextBuffer
from foredraft.model.byte_codec import ByteCodec
from tests.support import checkpoints
from tests.support.loaded import engine_of
from tests.support.mutation import Mutant, Mutation, assert_caught, replaced
from tests.support.mutations import around

Function = Callable[..., Any]
DRAFTERS = ["none", "lookup", "draft-model"]
PROMPT = "def accept(draft, p, q):"
SHORT = "The drafter guesses a few tokens ahead; the target checks all of them. " * 2
LONG = SHORT * 7


@pytest.fixture(scope="module")
def llm() -> foredraft.LLM:
    return foredraft.load(dtype="float32", device="cpu", max_batch=3, max_length=1024, policy="fixed")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_checkpoint(tmp_path_factory.mktemp("models") / "tiny", tokenizer=True)


def greedy(llm: foredraft.LLM, **options: Any) -> foredraft.Output:
    (output,) = llm.generate(PROMPT, SamplingParams(**{"temperature": 0, "max_new_tokens": 30, **options}))
    return output


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("include", [False, True])
def test_everything_ends_where_a_stop_is_complete(llm: foredraft.LLM, drafter: str, include: bool) -> None:
    """Text, ids, log-probabilities, statistics, the cache and the pieces of a stream, at every place."""
    whole = greedy(llm, drafter="none")
    assert whole.text is not None and whole.pieces is not None
    ends = list(itertools.accumulate(len(piece) for piece in whole.pieces))
    engine, lengths, tried = engine_of(llm), list[int](), 0
    leave = engine.rows.remove

    def note(sequence: Sequence) -> None:
        lengths.append(engine.cache.lengths[sequence.row])
        leave(sequence)

    for at in range(0, len(whole.text) - 3, 5):
        stop = whole.text[at : at + 3]
        if "\ufffd" in stop or whole.text.index(stop) != at:
            continue
        tried += 1
        lengths.clear()
        params = {"drafter": drafter, "stop": stop, "include_stop": include, "logprobs": 0}
        with replaced(engine.rows, "remove", note):
            pieces = list(llm.stream(PROMPT, temperature=0, max_new_tokens=30, **params))
        found = pieces[-1].output
        count = next(i for i, end in enumerate(ends, start=1) if end >= at + 3)
        assert found.finish_reason == "stop" and found.stopped_by == stop
        assert found.text == whole.text[: at + 3 if include else at]
        assert found.token_ids == whole.token_ids[:count]
        assert [score.token_id for score in found.logprobs] == found.token_ids
        assert len(found.origins) == found.stats.tokens == count
        assert lengths == [found.prompt_tokens + count - 1]
        assert "".join(piece.text or "" for piece in pieces) == "".join(found.pieces) == found.text
        assert [token for piece in pieces for token in piece.token_ids] == found.token_ids
        parts = [""] * count
        for index, part in (each for piece in pieces for each in piece.parts or []):
            parts[index] += part
        assert parts == found.pieces
    assert tried > 5
    assert greedy(llm, drafter=drafter, stop="no such text").finish_reason == "length"
    last = whole.text[ends[5] - 1]
    if whole.text.index(last) == ends[5] - 1:  # a stop string in the last token counts before the limit
        assert greedy(llm, drafter=drafter, max_new_tokens=6, stop=last).finish_reason == "stop"


@pytest.mark.parametrize("options", [{}, {"ban": ["\ufffd"]}, {"stop": ["\ufffd"]}], ids=str)
def test_a_text_ends_without_bytes_of_an_incomplete_character(tiny: Path, options: dict[str, Any]) -> None:
    """Its ids stay, and no constraint or stop string could have seen U+FFFD for it."""
    llm = foredraft.load(tiny, dtype="float32", device="cpu", max_length=64, policy="fixed")
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    texts = ByteCodec(tokenizer).table(384)
    leads = [id for id, text in enumerate(texts) if len(text) == 1 and 0xC3 <= text[0] < 0xF5]
    for end in leads[:8]:
        bias = {end: 100.0}
        params = SamplingParams(temperature=0, max_new_tokens=1, logit_bias=bias, **options)
        [output] = llm.generate(PROMPT, params)
        pieces = list(llm.stream(PROMPT, params))
        assert (output.token_ids, output.text, output.pieces) == ([end], "", [""])
        assert "".join(piece.text or "" for piece in pieces) == "" == tokenizer.decode([end])
        assert output.finish_reason == "length"
    params = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True, **options)
    [output] = llm.generate(PROMPT, params)
    assert output.text is not None
    assert "\ufffd" not in output.text or not options
    if "stop" not in options:
        assert output.text == tokenizer.decode(output.token_ids, after=tokenizer.encode(PROMPT))


def test_every_end_token_ends_a_text_after_min_new_tokens(tmp_path: Path) -> None:
    folder = checkpoints.save_checkpoint(tmp_path / "model", tokenizer=True)
    plain = foredraft.load(folder, dtype="float32", device="cpu", max_length=256)
    ids = greedy(plain, ignore_eos=True).token_ids
    ends = [ids[9], ids[4]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    draft = checkpoints.save_checkpoint(tmp_path / "draft", seed=1, tokenizer=True, num_hidden_layers=1)
    llm = foredraft.load(folder, draft=draft, dtype="float32", device="cpu", max_length=256, policy="fixed")
    for drafter in DRAFTERS:
        found = greedy(llm, drafter=drafter)
        assert found.token_ids == ids[: 1 + min(map(ids.index, ends))]
        assert found.finish_reason == "eos"
        assert greedy(llm, drafter=drafter, ignore_eos=True).token_ids == ids
        late = greedy(llm, drafter=drafter, min_new_tokens=12)
        assert not set(late.token_ids[:12]) & set(ends)
        assert late.token_ids == greedy(llm, drafter="none", min_new_tokens=12).token_ids


@pytest.mark.parametrize("options", [{}, {"show_special": True}], ids=str)
@pytest.mark.parametrize("stop", ["<|endoftext|>", "|en", "text|>"])
def test_a_stop_string_matches_no_end_token(llm: foredraft.LLM, stop: str, options: dict[str, Any]) -> None:
    biases = {llm.loaded.spec.eos_token_ids[0]: 100}
    plain = SamplingParams(temperature=0, max_new_tokens=20, min_new_tokens=7, logit_bias=biases)
    [want] = llm.generate(PROMPT, plain, **options)
    assert want.finish_reason == "eos"
    for drafter in DRAFTERS:
        for include in (False, True):
            params = plain.replace(stop=stop, include_stop=include, drafter=drafter)
            [found] = llm.generate(PROMPT, params, **options)
            assert (found.text, found.token_ids, found.pieces) == (want.text, want.token_ids, want.pieces)
            assert (found.finish_reason, found.stopped_by) == ("eos", None)


def load_with(tiny: Path, tmp_path: Path, **config: Any) -> foredraft.LLM:
    folder = shutil.copytree(tiny, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(config))
    return foredraft.load(folder, dtype="float32", device="cpu", max_length=128)


def test_an_explicit_option_wins_over_a_model_s_own(tiny: Path, tmp_path: Path) -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": None, "max_new_tokens": 5}
    more = {"repetition_penalty": 1.1, "max_length": 4096, "stop_strings": ["###"]}
    llm = load_with(tiny, tmp_path, **config, **more)
    want = SamplingParams(temperature=0.6, top_p=0.9, max_new_tokens=5, repetition_penalty=1.1, stop="###")
    assert llm.default_params == want
    assert llm.params(temperature=0.2) == want.replace(temperature=0.2)
    assert len(llm.generate(PROMPT)[0].token_ids) <= 5
    assert len(llm.generate(PROMPT, SamplingParams(max_new_tokens=9, ignore_eos=True))[0].token_ids) == 9


def test_greedy_texts_keep_penalties(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in transformers: penalties and lengths count, temperature and truncation do not."""
    from transformers import AutoModelForCausalLM

    asked = {"repetition_penalty": 1.5, "min_new_tokens": 11, "max_new_tokens": 12}
    sampling = {"temperature": 0.7, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5}
    llm = load_with(tiny, tmp_path, do_sample=False, **asked, **sampling)
    assert llm.default_params == SamplingParams(temperature=0, **asked)
    assert not caplog.records
    prompt = torch.tensor([[1, 5, 9, 5, 9, 5, 9]])
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    expected = reference.float().generate(prompt)[0, prompt.shape[1] :].tolist()
    assert llm.generate(prompt.tolist())[0].token_ids == expected
    (free,) = llm.generate(prompt.tolist(), llm.params(repetition_penalty=1.0))
    assert free.token_ids != expected


def test_unsupported_settings_are_named(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    harmless = {"length_penalty": 1.0, "no_repeat_ngram_size": 0, "use_cache": True, "bad_words_ids": None}
    with caplog.at_level("INFO", "foredraft.model"):
        llm = load_with(tiny, tmp_path, num_beams=4, mine=1, eos_token_id=[2], **harmless)
    assert llm.default_params == SamplingParams()
    file = tmp_path / "model" / "generation_config.json"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"{file} asks for num_beams = 4, which is not supported; it is left out"),
        ("INFO", f"{file}: ignored, because transformers does not read it: mine = 1"),
    ]


@pytest.mark.parametrize(
    ("config", "want", "message"),
    [
        ({"top_p": 1.5, "top_k": 7}, {"top_k": 7}, "top_p is 1.5; give 0 (greedy) to 1 (off)"),
        ({"top_p": -1, "temperature": 0.5}, {"temperature": 0.5}, "top_p is -1; give"),
        ({"top_k": -1}, {}, "top_k is -1; give a whole number from 0 on"),
        ({"top_k": 20.5}, {}, "top_k is 20.5; give a whole number"),
        ({"temperature": "hot"}, {}, "temperature is 'hot'; give 0 (greedy) or more"),
        ({"min_new_tokens": 9, "max_new_tokens": 5}, {"max_new_tokens": 5}, "min_new_tokens is 9, but"),
        ({"top_k": 20.0, "max_new_tokens": 9.0}, {"top_k": 20, "max_new_tokens": 9}, None),
        ({"eos_token_id": [2, 384]}, {}, "asks for eos_token_id = 384, but the model's vocabulary ends at 383"),
        ({"bos_token_id": 2**40}, {}, "asks for bos_token_id = 1099511627776, but the model's vocabulary"),
        ({"eos_token_id": [-1, 2]}, {}, None),
        ({"do_sample": False, "temperature": 0.6, "max_new_tokens": 7}, {"temperature": 0, "max_new_tokens": 7}, None),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_values_of_a_model_s_own_are_left_out_and_named(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, config: Any, want: Any, message: str | None
) -> None:
    llm = load_with(tiny, tmp_path, **config)
    assert llm.default_params == SamplingParams(**want)
    assert all(0 <= id < 384 for id in llm.loaded.spec.eos_token_ids)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (message is not None)
    for line in lines:
        assert "generation_config.json" in line and str(message) in line and line.endswith("; it is left out")


@functools.cache
def reference_model() -> Any:
    from transformers import AutoModelForCausalLM

    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(demo.target_path(), **options)


def reference(ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference_model()(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.7, "top_k": 5, "seed": 11}])
def test_log_probabilities_are_the_targets(llm: foredraft.LLM, drafter: str, options: dict[str, Any]) -> None:
    found = greedy(llm, drafter=drafter, logprobs=3, **options)
    assert drafter != "draft-model" or min(found.stats.accepted, found.stats.rejections) > 5
    assert llm.tokenizer is not None and found.logprobs is not None
    prompt = llm.tokenizer.encode(PROMPT)
    want = reference([*prompt, *found.token_ids])[len(prompt) - 1 :].log_softmax(-1)
    for at, (token, score) in enumerate(zip(found.token_ids, found.logprobs, strict=True)):
        assert score.token_id == token
        assert score.logprob == pytest.approx(float(want[at, token]), abs=1e-3)
        best = want[at].topk(3)
        assert [value for _, value in score.top] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert score.top[0][0] == int(best.indices[0])
        if options["temperature"] == 0:
            assert (score.processed, score.processed_top) == (0.0, [(token, 0.0)])
        else:
            cut = (want[at] / 0.7).masked_fill(want[at] < want[at].topk(5).values[-1], -math.inf)
            distribution = cut.log_softmax(-1)
            assert score.processed == pytest.approx(float(distribution[token]), abs=1e-3)
            top = [value for _, value in score.processed_top]
            assert top == pytest.approx(distribution.topk(3).values.tolist(), abs=1e-3)
    plain = greedy(llm, drafter="none", logprobs=3, **options)
    assert plain.logprobs == found.logprobs, "bit for bit"


def test_a_prompt_is_scored_without_generating(llm: foredraft.LLM) -> None:
    """The prompt takes several chunks. Samples of one prompt share its scores."""
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(LONG)
    assert len(ids) > 256
    only = SamplingParams(max_new_tokens=0, prompt_logprobs=2, temperature=0.5, repetition_penalty=1.2)
    (found,) = llm.generate(LONG, only)
    assert (found.text, found.token_ids, found.finish_reason) == ("", [], "length")
    assert found.logprobs is None and found.prompt_logprobs is not None
    logits = reference(ids)
    want = logits.log_softmax(-1)
    assert found.prompt_logprobs[0] is None and len(found.prompt_logprobs) == len(ids)
    for at, (token, score) in enumerate(zip(ids[1:], found.prompt_logprobs[1:], strict=True)):
        assert score is not None and score.token_id == token
        assert score.logprob == pytest.approx(float(want[at, token]), abs=1e-3)
        seen = torch.tensor(sorted(set(ids[: at + 1])))
        x = logits[at].clone()
        x[seen] = torch.where(x[seen] < 0, x[seen] * 1.2, x[seen] / 1.2)
        distribution = (x / 0.5).log_softmax(-1)
        assert score.processed == pytest.approx(float(distribution[token]), abs=1e-3)
        for got, of in ((score.top, want[at]), (score.processed_top, distribution)):
            assert [value for _, value in got] == pytest.approx(of.topk(2).values.tolist(), abs=1e-3)
    alone = [score and score.logprob for score in found.prompt_logprobs]
    for output in llm.generate(LONG, SamplingParams(max_new_tokens=2, prompt_logprobs=2), n=5):
        assert [score and score.logprob for score in output.prompt_logprobs or []] == alone
    assert llm.generate([[5]], only)[0].prompt_logprobs == [None]
    assert engine_of(llm).scheduler.idle


def test_processed_scores_of_a_prompt_are_those_of_generated_tokens(llm: foredraft.LLM) -> None:
    """The same tokens get the same scores in a prompt, as long as no penalty counts new tokens alone."""
    options: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.4, "seed": 5}
    text = greedy(llm, logprobs=4, max_new_tokens=20, ignore_eos=True, **options)
    assert llm.tokenizer is not None and text.logprobs is not None
    prompt = llm.tokenizer.encode(PROMPT)
    (found,) = llm.generate([[*prompt, *text.token_ids]], max_new_tokens=0, prompt_logprobs=4, **options)
    assert found.prompt_logprobs is not None
    for one, other in zip(text.logprobs, found.prompt_logprobs[len(prompt) :], strict=True):
        assert other is not None and one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.processed == pytest.approx(other.processed, abs=1e-3)
        for a, b in ((one.top, other.top), (one.processed_top, other.processed_top)):
            assert [i for i, _ in a] == [i for i, _ in b]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_trace_records_every_round(llm: foredraft.LLM, drafter: str) -> None:
    params = SamplingParams(temperature=0.8, max_new_tokens=24, seed=2, drafter=drafter, ignore_eos=True)
    (output,) = llm.generate(SHORT, params, trace=True)
    assert output.trace is not None and len(output.trace) == output.stats.rounds
    assert sum(r.emitted for r in output.trace) == len(output.token_ids)
    assert sum(len(r.draft) for r in output.trace) == output.stats.drafted
    for r in output.trace:
        new = [*r.draft[: r.accepted], r.next_token]
        assert output.token_ids[r.start : r.start + r.emitted] == new[: r.emitted]
        assert len(r.p) == len(r.q) == len(r.draft) <= r.budget
        assert all(0 <= chance <= 1 for chance in [*r.p, *r.q, r.next_p])
        assert r.next_p > 0 and all(p > 0 for p in r.p[: r.accepted])
        assert (r.drafter is None) == (r.budget == 0)
        assert not r.discarded
    stopped = params.replace(temperature=0.0, stop="\n", max_new_tokens=60)
    for output in llm.generate([SHORT, PROMPT], stopped, trace=True):
        assert sum(len(r.draft) for r in output.trace or []) == output.stats.drafted
    assert llm.generate(SHORT, params, max_new_tokens=2)[0].trace is None


def test_chat_takes_the_options_of_generate(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "chatty")
    (folder / "chat_template.jinja").write_text("<s>{{ messages[0].content }}")
    llm = foredraft.load(folder, dtype="float32", device="cpu", max_length=64)
    params = SamplingParams(temperature=0, max_new_tokens=4, logit_bias={2: 100}, ignore_eos=True)
    [reply] = llm.chat([{"role": "user", "content": "Hi"}], params, show_special=True, trace=True)
    assert reply.text == "</s>" * 4 and reply.trace is not None
    assert reply.prompt_tokens == len(llm.encode([llm.tokenizer.encode("<s>Hi", False)])[0])  # type: ignore[union-attr]
    with pytest.raises(RequestError, match="show_specials"):
        llm.chat([{"role": "user", "content": "Hi"}], params, show_specials=True)


def test_what_the_model_cannot_do_is_refused(tiny: Path) -> None:
    llm = foredraft.load(tiny, dtype="float32", device="cpu", max_length=64)
    several = "is 385, but the vocabulary has 384 tokens; give fewer"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"logprobs": 385}, f"^logprobs {several}"),
        ({"prompt_logprobs": 385}, f"^prompt_logprobs {several}"),
        ({"logit_bias": {384: 1.0}}, "logit_bias names token 384; give ids from 0 to 383"),
        ({"stop_token_ids": [5, 384]}, "^stop_token_ids names token 384"),
        ({"allowed_token_ids": [5, 384]}, "^allowed_token_ids names token 384"),
        ({"max_new_tokens": 0, "n": 3}, "nothing to sample 3 times"),
    ]
    for options, message in wrong:
        with pytest.raises(RequestError, match=message):
            llm.generate([1, 5], **options)
    [output] = llm.generate([1, 5], max_new_tokens=1, logprobs=384, prompt_logprobs=384)
    assert output.error is None


def test_a_folder_without_a_tokenizer_takes_ids_and_refuses_texts(tmp_path: Path) -> None:
    folder = checkpoints.save_checkpoint(tmp_path / "bare")
    llm = foredraft.load(folder, dtype="float32", device="cpu", max_length=64)
    [output] = llm.generate([3, 4, 5], temperature=0, max_new_tokens=4)
    assert output.text is None and output.token_ids
    assert all(piece.text is None for piece in llm.stream([3, 4, 5], max_new_tokens=4))
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate("text")
    with pytest.raises(RequestError, match="stop needs text"):
        llm.generate([1, 2], stop="x")


# --- token ids that end a text, and those that may be drawn ---------------------------------------


def endless(llm: LLM, **options: Any) -> foredraft.Output:
    [output] = llm.generate(PROMPT, **{"temperature": 0, "max_new_tokens": 30, "ignore_eos": True, **options})
    return output


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_stop_token_ends_the_text(llm: LLM, drafter: str) -> None:
    """At its first place, wherever that lies in a draft; its text is left out, as a stop string's is."""
    whole = endless(llm, drafter="none")
    assert whole.pieces is not None
    for stop in [*dict.fromkeys(whole.token_ids)][::3]:
        at = whole.token_ids.index(stop)
        found = endless(llm, drafter=drafter, stop_token_ids=[stop, 4095])
        assert found.token_ids == whole.token_ids[: at + 1] and found.finish_reason == "eos"
        assert found.text == "".join(whole.pieces[:at])
        whole_text = endless(llm, drafter=drafter, stop_token_ids=[stop], include_stop=True)
        assert whole_text.text == "".join(whole.pieces[: at + 1])


def test_a_stop_token_waits_for_the_shortest_length(llm: LLM) -> None:
    whole = endless(llm, drafter="none")
    found = endless(llm, stop_token_ids=[whole.token_ids[2]], min_new_tokens=6)
    assert len(found.token_ids) >= 6 and whole.token_ids[2] not in found.token_ids[:6]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_only_allowed_tokens_are_drawn(llm: LLM, drafter: str) -> None:
    allowed = sorted({*endless(llm, drafter="none").token_ids[:8], 300, 301})
    for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 3}):
        plain = endless(llm, allowed_token_ids=allowed, **options, drafter="none")
        found = endless(llm, allowed_token_ids=allowed, **options, drafter=drafter)
        assert {*found.token_ids} <= {*allowed} and len({*found.token_ids}) > 1
        assert found.token_ids == plain.token_ids


def test_allowed_tokens_hold_together_with_other_constraints(llm: LLM) -> None:
    digits = [id for text in "0123456789" for id in llm.encode(text)[0][-1:]]
    found = endless(llm, allowed_token_ids=digits, ban=["1", "2"], ignore_eos=False, drafter="draft-model")
    assert found.text and not {*found.text} & {"1", "2"} and found.text.isdecimal()
    with pytest.raises(RequestError, match="leaves no token to begin with"):
        endless(llm, allowed_token_ids=llm.encode("x")[0][-1:], regex="[0-9]+", ignore_eos=False)


def shown(sound: Callable[..., None]) -> Callable[..., None]:
    return lambda self, *given, **named: sound(self, *given, **{**named, "silent": ()})


# --- planted defects --------------------------------------------------------------------------------


def rejected_token_scored() -> tuple[tuple[Any, Mutation], ...]:
    drafts: list[Draft] = []

    @around
    def remember(fetch: Function, sequences: Any, draft: Draft, *rest: Any, **more: Any) -> Any:
        drafts[:] = [draft]
        return fetch(sequences, draft, *rest, **more)

    @around
    def mutate_score(score: Function, logits: torch.Tensor, p: Any, tokens: Any, top: int) -> torch.Tensor:
        drafted = torch.nn.functional.pad(drafts[0].tokens, (0, 1))
        figures: torch.Tensor = score(logits, p, drafted, top)
        return figures

    return (fetch_results, remember), (scores.score, mutate_score)


unprocessed = around(lambda score, logits, p, *rest: score(logits, Distribution(logits.softmax(-1)), *rest))


@around
def scored_one_token_late(score: Function, head: Any, hidden: Any, sequence: Sequence, *rest: Any) -> Any:
    with replaced(sequence, "prompt", [sequence.prompt[0], *sequence.prompt]):
        return score(head, hidden, sequence, *rest)


def slice_without_its_tokens(score_chunk: Function) -> Function:
    along = PenaltyContext.along

    def mutated(*args: Any) -> Any:
        with replaced(PenaltyContext, "along", lambda context, drafted, _: along(context, drafted[:, :0])):
            return score_chunk(*args)

    return mutated


@around
def stopped_late(end: Function, sequence: Sequence, token: int) -> Finish | None:
    found: Finish | None = end(sequence, token)
    return None if found is Finish.STOP and len(sequence.tokens) % 2 == 0 else found


rolled = around(lambda score, logits, *rest: score(logits.roll(1, 1), *rest))

GREEDY, SAMPLED = {"temperature": 0}, {"temperature": 0.7, "top_k": 5, "seed": 11}
scored, prompted = test_log_probabilities_are_the_targets, test_a_prompt_is_scored_without_generating
continued = test_processed_scores_of_a_prompt_are_those_of_generated_tokens
stopped = test_everything_ends_where_a_stop_is_complete
ended, drawn = test_a_stop_token_ends_the_text, test_only_allowed_tokens_are_drawn
# Name, edits, the test that fails, and its arguments behind the model.
MUTANTS: list[tuple[str, tuple[tuple[Any, Mutation], ...], Function, tuple[Any, ...]]] = [
    ("scores off by one inside an accepted run", ((scores.score, rolled),), scored, ("lookup", GREEDY)),
    ("a correction has a rejected score", rejected_token_scored(), scored, ("draft-model", SAMPLED)),
    ("scores are the model's own", ((scores.score, unprocessed),), scored, ("none", SAMPLED)),
    ("a prompt's scores are one token late", ((score_chunk, scored_one_token_late),), prompted, ()),
    ("penalties ignore earlier slices", ((score_chunk, slice_without_its_tokens),), continued, ()),
    ("a text ends one token after its stop", ((Sequence._end, stopped_late),), stopped, ("lookup", False)),
    ("a stop token is none", ((SamplingParams.ends, lambda _: lambda self, eos: eos),), ended, ("lookup",)),
    ("a stop token's text is shown", ((TextBuffer.__init__, shown),), ended, ("draft-model",)),
    ("every token is allowed", ((AllowedTokens.mask, lambda _: lambda self: None),), drawn, ("draft-model",)),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant[0])
def test_a_defect_is_caught(llm: foredraft.LLM, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, edits, check, given = mutant
    assert_caught(Mutant(name, edits, lambda: check(llm, *given)), monkeypatch)
