"""The public API on tiny random checkpoints: forms of prompts, threads, streams, errors."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import foredraft
from foredraft import RequestError, SamplingParams
from foredraft.decode import round_results
from foredraft.decode.policy import TargetConfidence
from tests.support import checkpoints
from tests.support.loaded import engine_of

PLAIN = SamplingParams(temperature=0, max_new_tokens=24, drafter="none")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("models")
    target = checkpoints.save_checkpoint(base / "target", tokenizer=True)
    draft = checkpoints.save_checkpoint(base / "draft", seed=1, tokenizer=True, num_hidden_layers=1)
    return target, draft


def load(folders: tuple[Path, Path], **options: Any) -> foredraft.LLM:
    common = {"dtype": "float32", "device": "cpu", "max_batch": 3, "max_length": 512, "policy": "fixed"}
    return foredraft.load(folders[0], draft=folders[1], **common | options)


@pytest.fixture(scope="module")
def llm(folders: tuple[Path, Path]) -> foredraft.LLM:
    return load(folders)


def test_every_form_of_prompt_is_accepted(llm: foredraft.LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("def accept")
    array = np.array(ids)
    text = "def accept"
    forms: list[Any] = [text, [text], ids, [ids], tuple(ids), array, [array], torch.tensor(ids)]
    for form in forms:
        assert llm.encode(form) == [ids], form
    one, other = llm.generate([text, ids], PLAIN)
    assert one.token_ids == other.token_ids == llm.generate(array, PLAIN)[0].token_ids


def test_outputs_are_prompt_major_and_complete(llm: foredraft.LLM) -> None:
    params = SamplingParams(temperature=0.9, max_new_tokens=9, ignore_eos=True, seed=3)
    outputs = llm.generate(["one", "two two"], params, n=3)
    assert [o.sample for o in outputs] == [0, 1, 2, 0, 1, 2]
    assert [o.prompt_tokens for o in outputs[:3]] == [outputs[0].prompt_tokens] * 3
    for output in outputs:
        assert len(output.token_ids) == len(output.origins) == 9
        assert output.finish_reason == "length" and output.seed == 3 and output.lossless
        assert output.stats.tokens == 9
    assert len({tuple(o.token_ids) for o in outputs}) == 6  # samples share no noise


def test_a_fresh_seed_is_reported_and_repeats_the_text(llm: foredraft.LLM) -> None:
    first = llm.generate("def", SamplingParams(max_new_tokens=12, acceptance="coupled"))[0]
    again = llm.generate("def", SamplingParams(max_new_tokens=12, seed=first.seed))[0]
    plain = llm.generate("def", SamplingParams(max_new_tokens=12, seed=first.seed, drafter="none"))[0]
    assert first.token_ids == again.token_ids == plain.token_ids


@pytest.mark.parametrize("new", [0, 5])
def test_the_first_piece_of_a_stream_has_the_prompt_s_scores(llm: foredraft.LLM, new: int) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=new, ignore_eos=True, prompt_logprobs=2)
    first, *others = llm.stream("def add(a, b):", params)
    [want] = llm.generate("def add(a, b):", params)
    assert first.prompt_logprobs == want.prompt_logprobs and len(want.prompt_logprobs or []) > 1
    assert all(piece.prompt_logprobs is None for piece in others)


def test_threads_share_one_batch(llm: foredraft.LLM) -> None:
    prompts = [f"prompt number {i}" for i in range(6)]
    params = SamplingParams(temperature=0, max_new_tokens=20)
    alone = [llm.generate(p, params)[0].token_ids for p in prompts]

    def work(index: int) -> list[int]:
        if index % 2:
            return [i for piece in llm.stream(prompts[index], params) for i in piece.token_ids]
        return llm.generate(prompts[index], params)[0].token_ids

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(6))) == alone


@pytest.mark.parametrize("drafter", ["none", "draft-model"])
def test_many_samples_of_a_prompt_forward_it_once(folders: tuple[Path, Path], drafter: str) -> None:
    """Samples run in waves of `max_batch` rows; their forwards cover their own rounds and not the prompt."""
    llm = load(folders, max_batch=64)
    prompt = [5 + i % 90 for i in range(301)]
    draft_model: Any = engine_of(llm).drafters["draft-model"]
    runners: list[Any] = [llm.loaded.runner, draft_model.draft_pass.runner]
    before = [runner.forwarded for runner in runners]
    params = SamplingParams(max_new_tokens=2, ignore_eos=True, drafter=drafter)
    outputs = llm.generate(prompt, params, n=500)
    forwarded = [runner.forwarded - was for runner, was in zip(runners, before, strict=True)]
    assert len(outputs) == 500
    assert all(len(o.token_ids) == 2 for o in outputs)
    columns = sum(o.stats.rounds + o.stats.drafted for o in outputs)
    # each sample drafts one token, because the next one is its last
    assert forwarded == ([300 + 500 * 2, 0] if drafter == "none" else [300 + columns, 300 + 500])


def test_a_failed_forward_ends_only_its_batch(llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    want = [o.token_ids for o in llm.generate([[10 + i, 9] for i in range(7)], params)]
    forward, calls = llm.loaded.runner.forward, iter(range(1000))

    def break_once(*args: Any, **more: Any) -> Any:
        if next(calls) == 2:
            raise RuntimeError("out of memory")
        return forward(*args, **more)

    monkeypatch.setattr(llm.loaded.runner, "forward", break_once)
    outputs = llm.generate([[10 + i, 9] for i in range(7)], params)
    assert [o.finish_reason for o in outputs] == ["error"] * 3 + ["length"] * 4  # max_batch is 3
    for output, ids in zip(outputs, want, strict=True):
        assert output.token_ids == ids[: len(output.token_ids)]
        assert output.error == ("RuntimeError: out of memory" if output.finish_reason == "error" else None)
    assert [len(o.token_ids) > 0 for o in outputs] == [True] * 7, "earlier tokens are kept"


def test_cancel_all_keeps_generated_tokens(llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, some, go_on = engine_of(llm).step, threading.Event(), threading.Event()

    def until_there_are_tokens() -> Any:
        if not some.is_set() and sum(len(s.new_ids) for s in engine_of(llm).rows.sequences) >= 6:
            some.set()
            assert go_on.wait(60)
        return step()

    monkeypatch.setattr(engine_of(llm), "step", until_there_are_tokens)
    params = SamplingParams(temperature=0, max_new_tokens=400, ignore_eos=True)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(llm.generate, [5, 6], params, n=9)
        assert some.wait(60)
        llm.cancel_all()
        go_on.set()
        found = asked.result(60)
    assert [o.finish_reason for o in found] == ["cancelled"] * 9
    assert sum(len(o.token_ids) for o in found) >= 6
    assert engine_of(llm).scheduler.idle


def test_a_request_chooses_its_drafter(llm: foredraft.LLM) -> None:
    texts = {}
    for name in (None, "none", "lookup", "draft-model"):
        params = SamplingParams(temperature=0, max_new_tokens=24, drafter=name)
        texts[name] = llm.generate("def accept(draft, p, q):", params)[0]
    assert len({tuple(o.token_ids) for o in texts.values()}) == 1
    assert texts["none"].stats.drafted == 0 < texts["lookup"].stats.drafted
    assert texts[None].stats.drafted == texts["draft-model"].stats.drafted > 0
    with pytest.raises(RequestError, match="'kangaroo'.*none, lookup, prediction, draft-model"):
        llm.generate("x", SamplingParams(drafter="kangaroo"))


def test_plain_requests_skip_signals_of_policies(llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    confidence = round_results.target_confidence
    monkeypatch.setattr(round_results, "target_confidence", lambda *at: asked.append(0) or confidence(*at))
    monkeypatch.setattr(engine_of(llm), "policy", TargetConfidence(4))
    for drafter in ("none", "draft-model"):
        assert not asked
        params = SamplingParams(temperature=0, max_new_tokens=8, drafter=drafter)
        (output,) = llm.generate([5, 6], params)
        assert output.error is None
    assert asked


def test_errors_name_the_sizes(llm: foredraft.LLM) -> None:
    with pytest.raises(RequestError, match="600 tokens and max_new_tokens=10 exceed the 512"):
        llm.generate([7] * 600, SamplingParams(max_new_tokens=10))
    cut = llm.generate([7] * 600, SamplingParams(max_new_tokens=10, temperature=0), truncate="left")[0]
    assert cut.prompt_tokens == 502
    long = [llm.loaded.spec.bos_token_id or 0, *[7, 8] * 300]
    cut = llm.generate(long, SamplingParams(max_new_tokens=10, temperature=0), truncate="left")[0]
    want = llm.generate([long[0], *long[-501:]], SamplingParams(max_new_tokens=10, temperature=0))[0]
    assert cut.prompt_tokens == 502
    assert cut.token_ids == want.token_ids, "BOS is kept"
    with pytest.raises(RequestError, match="positions there is room for; lower max_new_tokens, or raise"):
        llm.generate([7], SamplingParams(max_new_tokens=512), truncate="left")
    assert not engine_of(llm).rows.sequences and not engine_of(llm).scheduler.waiting  # nothing was submitted


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_logits_that_are_not_finite_fail_only_that_request(folders: tuple[Path, Path], dtype: str) -> None:
    """A token with a NaN embedding harms neither other rows nor the next request in its row."""
    llm = load(folders, dtype=dtype, max_batch=2)
    params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    expected = [llm.generate([i, 9, 9], params)[0].token_ids for i in (10, 11, 12)]
    llm.loaded.runner.decoder.embedding[77] = torch.nan  # type: ignore[attr-defined]
    outputs = llm.generate([[10, 9, 9], [11, 77, 9], [11, 9, 9], [12, 9, 9]], params)
    assert outputs[1].finish_reason == "error" and "not finite" in (outputs[1].error or "")
    assert ("load it in bfloat16" in (outputs[1].error or "")) == (dtype == "float16")
    assert [o.token_ids for i, o in enumerate(outputs) if i != 1] == expected


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("own", [False, None])
def test_requests_decode_where_the_model_is_not_finite_on_the_measured_texts(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, dtype: str, own: bool | None
) -> None:
    """NaN, or what overflows, at all tokens outside the text: passes pad with no token of their own choice."""
    monkeypatch.setenv("FOREDRAFT_CACHE", "")
    llm = load(folders, drafter="none", policy="auto", dtype=dtype, max_batch=2, max_length=64, kernels=own)
    prompt = [9, 10, 11]
    expected = llm.generate(prompt, PLAIN)[0].token_ids
    embedding = llm.loaded.runner.decoder.embedding  # type: ignore[attr-defined]
    others = [id for id in range(len(embedding)) if id not in (*prompt, *expected)]
    embedding[others] = torch.nan if dtype == "float32" else torch.finfo(torch.float16).max
    for drafter in ("auto", "none"):
        [output] = llm.generate(prompt, PLAIN.replace(drafter=drafter))
        assert (output.error, output.token_ids) == (None, expected), drafter
