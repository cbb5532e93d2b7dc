"""Ends of texts, default parameters, log-probabilities and traces, through the public API."""

from __future__ import annotations

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
from foredraft import RequestError, SamplingParams, demo
from foredraft.decode import scores
from foredraft.decode.distribution import Distribution
from foredraft.decode.penalty_context import PenaltyContext
from foredraft.decode.prompt_scores import score_chunk
from foredraft.decode.round_draft import Draft
from foredraft.decode.round_results import fetch_results
from foredraft.decode.sequence import Finish, Sequence
from foredraft.model.byte_codec import ByteCodec
from tests.support import checkpoints
from tests.support.loaded import engine_of
from tests.support.planting import Mutant, Spoiler, assert_caught, defect, replaced

Function = Callable[..., Any]
DRAFTERS = ["none", "lookup", "draft-model"]
PROMPT = "def accept(draft, p, q):"
VOCABULARY = 4096
LONG = "The drafter guesses a few tokens ahead; the target checks all of them. " * 14


@pytest.fixture(scope="module")
def llm() -> foredraft.LLM:
    """The demo models: drafts are accepted often, and the text is realistic."""
    return foredraft.load(dtype="float32", device="cpu", max_batch=3, max_length=1024, policy="fixed")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_checkpoint(tmp_path_factory.mktemp("models") / "tiny", tokenizer=True)


def greedy(llm: foredraft.LLM, **options: Any) -> foredraft.Output:
    (output,) = llm.generate(PROMPT, SamplingParams(**{"temperature": 0, "max_new_tokens": 30, **options}))
    return output


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("include", [False, True])
def test_everything_ends_where_a_stop_string_is_complete(
    llm: foredraft.LLM, drafter: str, include: bool
) -> None:
    """Text, ids, log-probabilities, statistics and the cache, for stop strings at every place."""
    whole = greedy(llm, drafter="none")
    assert whole.text is not None and whole.pieces is not None
    tried = 0
    lengths: list[int] = []
    leave = engine_of(llm).rows.remove

    def note(sequence: Sequence) -> None:
        lengths.append(engine_of(llm).cache.lengths[sequence.row])
        leave(sequence)

    for at in range(0, len(whole.text) - 3, 3):
        stop = whole.text[at : at + 3]
        if "\ufffd" in stop or whole.text.index(stop) != at:
            continue
        tried += 1
        lengths.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_of(llm).rows, "remove", note)
            found = greedy(llm, drafter=drafter, stop=stop, include_stop=include, logprobs=0)
        ends = itertools.accumulate(len(piece) for piece in whole.pieces)
        count = next(i for i, end in enumerate(ends, start=1) if end >= at + 3)
        assert found.finish_reason == "stop" and found.stopped_by == stop
        assert found.text == whole.text[: at + 3 if include else at]
        assert found.token_ids == whole.token_ids[:count]
        assert found.pieces is not None and "".join(found.pieces) == found.text
        assert found.logprobs is not None
        assert [score.token_id for score in found.logprobs] == found.token_ids
        assert len(found.origins) == found.stats.tokens == count
        assert lengths == [found.prompt_tokens + count - 1]
    assert tried > 5


@pytest.mark.parametrize("options", [{}, {"ban": ["\ufffd"]}, {"stop": ["\ufffd"]}], ids=str)
def test_a_text_ends_without_the_bytes_of_an_incomplete_character(
    tiny: Path, options: dict[str, Any]
) -> None:
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


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_stream_shows_nothing_of_a_stop_string(llm: foredraft.LLM, drafter: str) -> None:
    whole = greedy(llm, drafter="none").text
    assert whole is not None
    stop = next(whole[i : i + 4] for i in range(20, len(whole)) if "\ufffd" not in whole[i : i + 4])
    params = SamplingParams(temperature=0, max_new_tokens=30, stop=stop, drafter=drafter)
    pieces = list(llm.stream(PROMPT, params))
    output = pieces[-1].output
    assert output is not None and output.text == whole[: whole.index(stop)]
    assert "".join(piece.text or "" for piece in pieces) == output.text
    parts = [""] * len(output.token_ids)
    for piece in pieces:
        for index, part in piece.parts or []:
            parts[index] += part
    assert parts == output.pieces
    assert [token for piece in pieces for token in piece.token_ids] == output.token_ids


def test_a_stop_string_in_the_last_token_counts_before_the_length_limit(llm: foredraft.LLM) -> None:
    whole = greedy(llm, max_new_tokens=6)
    assert whole.text is not None and whole.pieces is not None and whole.pieces[-1]
    stop = whole.text[-1]
    if whole.text.index(stop) == len(whole.text) - 1:
        assert greedy(llm, max_new_tokens=6, stop=stop).finish_reason == "stop"
    assert greedy(llm, max_new_tokens=6, stop="no such text").finish_reason == "length"


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
def test_a_stop_string_does_not_match_the_name_of_an_end_token(
    llm: foredraft.LLM, stop: str, options: dict[str, Any]
) -> None:
    biases = {llm.loaded.spec.eos_token_ids[0]: 100}
    plain = SamplingParams(temperature=0, max_new_tokens=20, min_new_tokens=7, logit_bias=biases)
    for drafter in DRAFTERS:
        for include in (False, True):
            params = plain.replace(stop=stop, include_stop=include, drafter=drafter)
            [found] = llm.generate(PROMPT, params, **options)
            [want] = llm.generate(PROMPT, plain, **options)
            assert want.finish_reason == "eos"
            assert (found.text, found.token_ids, found.pieces) == (want.text, want.token_ids, want.pieces)
            assert (found.finish_reason, found.stopped_by) == ("eos", None)


def test_penalties_do_not_depend_on_the_drafter(llm: foredraft.LLM) -> None:
    options = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {7: 2.0}}
    plain = greedy(llm, drafter="none", **options).token_ids
    assert plain != greedy(llm, drafter="none").token_ids
    for drafter in DRAFTERS:
        assert greedy(llm, drafter=drafter, **options).token_ids == plain
        seeded = {"temperature": 1.0, "seed": 3, **options}
        assert (
            greedy(llm, drafter=drafter, **seeded).token_ids
            == greedy(llm, drafter="none", **seeded).token_ids
        )


class TestDefaults:
    def load(self, tiny: Path, tmp_path: Path, config: dict[str, Any]) -> foredraft.LLM:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        for file in tiny.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "generation_config.json").write_text(json.dumps(config))
        return foredraft.load(folder, dtype="float32", device="cpu", max_length=128)

    def test_an_explicit_option_wins(self, tiny: Path, tmp_path: Path) -> None:
        config = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": None, "max_new_tokens": 5}
        llm = self.load(
            tiny, tmp_path, {**config, "repetition_penalty": 1.1, "max_length": 4096, "stop_strings": ["###"]}
        )
        want = SamplingParams(temperature=0.6, top_p=0.9, max_new_tokens=5, repetition_penalty=1.1)
        assert llm.default_params == want.replace(stop="###")
        assert llm.params(temperature=0.2).temperature == 0.2
        assert llm.params(temperature=0.2).top_p == 0.9
        assert len(llm.generate(PROMPT)[0].token_ids) <= 5
        assert len(llm.generate(PROMPT, SamplingParams(max_new_tokens=9, ignore_eos=True))[0].token_ids) == 9
        with pytest.raises(RequestError, match="unknown sampling option 'top_q'"):
            llm.params(top_q=1)

    def test_do_sample_false_is_greedy(self, tiny: Path, tmp_path: Path) -> None:
        llm = self.load(tiny, tmp_path, {"do_sample": False, "temperature": 0.6, "max_new_tokens": 7})
        assert llm.default_params == SamplingParams(temperature=0, max_new_tokens=7)

    def test_greedy_decoding_keeps_penalties_and_lengths(
        self, tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As in transformers: penalties and lengths count, temperature and truncation do not."""
        from transformers import AutoModelForCausalLM

        asked = {"repetition_penalty": 1.5, "min_new_tokens": 11, "max_new_tokens": 12}
        sampling = {"temperature": 0.7, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5}
        llm = self.load(tiny, tmp_path, {"do_sample": False, **asked, **sampling})
        assert llm.default_params == SamplingParams(temperature=0, **asked)
        assert not caplog.records
        prompt = torch.tensor([[1, 5, 9, 5, 9, 5, 9]])
        reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
        expected = reference.float().generate(prompt)[0, prompt.shape[1] :].tolist()
        (output,) = llm.generate(prompt.tolist())
        assert output.token_ids == expected
        (free,) = llm.generate(prompt.tolist(), llm.params(repetition_penalty=1.0))
        assert free.token_ids != expected

    def test_unsupported_settings_are_named(
        self, tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = {"num_beams": 4, "length_penalty": 1.0, "no_repeat_ngram_size": 0, "use_cache": True}
        with caplog.at_level("INFO", "foredraft.model"):
            llm = self.load(tiny, tmp_path, {**config, "bad_words_ids": None, "eos_token_id": [2], "mine": 1})
        assert llm.default_params == SamplingParams()
        found = [(record.levelname, record.getMessage()) for record in caplog.records]
        file = tmp_path / "model" / "generation_config.json"
        assert found == [
            ("WARNING", f"{file} asks for num_beams = 4, which is not supported; it is left out"),
            ("INFO", f"{file}: ignored, because transformers does not read it: mine = 1"),
        ]

    @pytest.mark.parametrize(
        ("config", "want", "message"),
        [
            ({"top_p": 1.5, "top_k": 7}, {"top_k": 7}, "top_p is 1.5; give above 0 and at most 1 (off)"),
            ({"top_p": 0, "temperature": 0.5}, {"temperature": 0.5}, "top_p is 0; give above 0"),
            ({"top_k": -1}, {}, "top_k is -1; give a whole number from 0 on"),
            ({"top_k": 20.5}, {}, "top_k is 20.5; give a whole number"),
            ({"temperature": "hot"}, {}, "temperature is 'hot'; give 0 (greedy) or more"),
            ({"min_new_tokens": 9, "max_new_tokens": 5}, {"max_new_tokens": 5}, "min_new_tokens is 9, but"),
            ({"top_k": 20.0, "max_new_tokens": 9.0}, {"top_k": 20, "max_new_tokens": 9}, None),
            ({"eos_token_id": [2, 384]}, {}, "asks for eos_token_id = 384, but the model's vocabulary ends at 383"),
            ({"bos_token_id": 2**40}, {}, "asks for bos_token_id = 1099511627776, but the model's vocabulary"),
            ({"eos_token_id": [-1, 2]}, {}, None),
        ],
        ids=str,
    )  # fmt: skip
    def test_wrong_values_are_left_out_and_named(
        self,
        tiny: Path,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        config: dict[str, Any],
        want: dict[str, Any],
        message: str | None,
    ) -> None:
        llm = self.load(tiny, tmp_path, config)
        assert llm.default_params == SamplingParams(**want)
        assert all(0 <= id < 384 for id in llm.loaded.spec.eos_token_ids)
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == (message is not None)
        if message is not None:
            assert "generation_config.json" in lines[0] and message in lines[0]
            assert lines[0].endswith("; it is left out")


def reference(ids: list[int]) -> torch.Tensor:
    """Return the logits [n, V] after every token, computed by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        demo.target_path(), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 0.7, "top_k": 5, "seed": 11}], ids=str
)
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
            assert [value for _, value in score.processed_top] == pytest.approx(
                distribution.topk(3).values.tolist(), abs=1e-3
            )
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
    several = llm.generate(LONG, SamplingParams(max_new_tokens=2, prompt_logprobs=2), n=5)
    for output in several:
        assert output.prompt_logprobs is not None
        assert [s and s.logprob for s in output.prompt_logprobs] == [
            s and s.logprob for s in found.prompt_logprobs
        ]
    assert llm.generate([[5]], only)[0].prompt_logprobs == [None]
    assert engine_of(llm).scheduler.idle


def test_processed_scores_of_a_prompt_are_those_of_generated_tokens(llm: foredraft.LLM) -> None:
    """The same tokens get the same scores in a prompt, as long as no penalty counts new tokens alone."""
    options: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.4, "seed": 5}
    text = greedy(llm, logprobs=4, max_new_tokens=20, ignore_eos=True, **options)
    assert llm.tokenizer is not None and text.logprobs is not None
    prompt = llm.tokenizer.encode(PROMPT)
    (found,) = llm.generate(
        [[*prompt, *text.token_ids]], SamplingParams(max_new_tokens=0, prompt_logprobs=4, **options)
    )
    assert found.prompt_logprobs is not None
    for one, other in zip(text.logprobs, found.prompt_logprobs[len(prompt) :], strict=True):
        assert other is not None and one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.processed == pytest.approx(other.processed, abs=1e-3)
        for a, b in ((one.top, other.top), (one.processed_top, other.processed_top)):
            assert [i for i, _ in a] == [i for i, _ in b]


def test_rows_with_and_without_log_probabilities_share_a_batch(llm: foredraft.LLM) -> None:
    params = [
        SamplingParams(temperature=0, max_new_tokens=12, logprobs=want, drafter=drafter)
        for want, drafter in [(None, "lookup"), (0, "draft-model"), (4, "none")]
    ]
    together = llm.generate([PROMPT] * 3, params)
    for output, own in zip(together, params, strict=True):
        (alone,) = llm.generate(PROMPT, own)
        assert output.logprobs == alone.logprobs
        assert own.logprobs is None or all(len(s.top) == own.logprobs for s in output.logprobs or [])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_trace_records_every_round(llm: foredraft.LLM, drafter: str) -> None:
    params = SamplingParams(temperature=0.8, max_new_tokens=30, seed=2, drafter=drafter, ignore_eos=True)
    (output,) = llm.generate(LONG, params, trace=True)
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
    for output in llm.generate([LONG, PROMPT], stopped, trace=True):
        assert sum(len(r.draft) for r in output.trace or []) == output.stats.drafted
    assert llm.generate(LONG, params)[0].trace is None


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


@pytest.mark.parametrize(
    ("options", "message"),
    [({"logit_bias": {VOCABULARY: 1.0}}, f"logit_bias names token {VOCABULARY}")],
)
def test_ids_beyond_the_vocabulary_are_refused(
    llm: foredraft.LLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(PROMPT, SamplingParams(**options))


def test_more_logprobs_than_tokens_are_refused(tiny: Path) -> None:
    llm = foredraft.load(tiny, dtype="float32", device="cpu", max_length=64)
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(
            RequestError, match=f"{name} is 385, but the vocabulary has 384 tokens; give fewer"
        ):
            llm.generate([1, 5], SamplingParams(max_new_tokens=1, **{name: 385}))
        [output] = llm.generate([1, 5], SamplingParams(max_new_tokens=1, **{name: 384}))
        assert output.error is None


def test_several_samples_without_new_tokens_are_refused(llm: foredraft.LLM) -> None:
    with pytest.raises(RequestError, match="nothing to sample 3 times"):
        llm.generate(PROMPT, SamplingParams(max_new_tokens=0), n=3)


def test_stop_strings_need_a_tokenizer(tmp_path: Path) -> None:
    folder = checkpoints.save_checkpoint(tmp_path / "bare")
    llm = foredraft.load(folder, dtype="float32", device="cpu", max_length=64)
    with pytest.raises(RequestError, match="stop needs text"):
        llm.generate([1, 2], SamplingParams(stop="x"))


def rejected_token_scored() -> tuple[tuple[Any, Spoiler], ...]:
    drafts: list[Draft] = []

    def remember(fetch: Function) -> Function:
        def spoilt(sequences: Any, draft: Draft, *rest: Any, **more: Any) -> Any:
            drafts[:] = [draft]
            return fetch(sequences, draft, *rest, **more)

        return spoilt

    def spoil_score(score: Function) -> Function:
        def spoilt(logits: torch.Tensor, p: Any, tokens: Any, top: int) -> torch.Tensor:
            drafted = torch.nn.functional.pad(drafts[0].tokens, (0, 1))
            figures: torch.Tensor = score(logits, p, drafted, top)
            return figures

        return spoilt

    return (fetch_results, remember), (scores.score, spoil_score)


def scored_by_the_model(score: Function) -> Function:
    return lambda logits, p, *rest: score(logits, Distribution(logits.softmax(-1)), *rest)


def scored_one_token_late(score_chunk: Function) -> Function:
    def spoilt(head: Any, hidden: Any, sequence: Sequence, *rest: Any) -> Any:
        with replaced(sequence, "prompt", [sequence.prompt[0], *sequence.prompt]):
            return score_chunk(head, hidden, sequence, *rest)

    return spoilt


def slice_without_its_tokens(score_chunk: Function) -> Function:
    along = PenaltyContext.along

    def spoilt(*args: Any) -> Any:
        with replaced(
            PenaltyContext, "along", lambda context, drafted, ahead: along(context, drafted[:, :0])
        ):
            return score_chunk(*args)

    return spoilt


def stopped_late(end: Function) -> Function:
    def spoilt(sequence: Sequence, token: int) -> Finish | None:
        found: Finish | None = end(sequence, token)
        return None if found is Finish.STOP and len(sequence.tokens) % 2 == 0 else found

    return spoilt


def mutants(llm: foredraft.LLM) -> list[Mutant]:
    sampled = {"temperature": 0.7, "top_k": 5, "seed": 11}
    return [
        defect(
            "log-probabilities off by one inside an accepted run",
            scores.score,
            lambda sound: lambda logits, *rest: sound(logits.roll(1, 1), *rest),
            lambda: test_log_probabilities_are_the_targets(llm, "lookup", {"temperature": 0}),
        ),
        Mutant(
            "the correction's score is the rejected token's",
            rejected_token_scored(),
            lambda: test_log_probabilities_are_the_targets(llm, "draft-model", sampled),
        ),
        defect(
            "the processed log-probabilities are the model's own",
            scores.score,
            scored_by_the_model,
            lambda: test_log_probabilities_are_the_targets(llm, "none", sampled),
        ),
        defect(
            "a prompt's scores are one token late",
            score_chunk,
            scored_one_token_late,
            lambda: test_a_prompt_is_scored_without_generating(llm),
        ),
        defect(
            "penalties ignore earlier prompt tokens in a slice",
            score_chunk,
            slice_without_its_tokens,
            lambda: test_processed_scores_of_a_prompt_are_those_of_generated_tokens(llm),
        ),
        defect(
            "the text ends one token after its stop string",
            Sequence._end,
            stopped_late,
            lambda: test_everything_ends_where_a_stop_string_is_complete(llm, "lookup", False),
        ),
    ]


@pytest.mark.parametrize("index", range(6))
def test_a_defect_is_caught(llm: foredraft.LLM, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutants(llm)[index], monkeypatch)
