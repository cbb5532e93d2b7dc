"""The public API on tiny random checkpoints: forms of prompts, threads, streams, interrupts, errors."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import foredraft
from foredraft import ConfigError, RequestError, SamplingParams
from foredraft.decode import round_results
from foredraft.decode.policy import TargetConfidence
from foredraft.llm.driver import _Waiter
from foredraft.llm.interrupts import Interrupts
from tests.support import checkpoints
from tests.support.interrupting import handler_of_sigint
from tests.support.loaded import engine_of

PLAIN = SamplingParams(temperature=0, max_new_tokens=24, drafter="none")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("models")
    target = checkpoints.save_checkpoint(base / "target", tokenizer=True)
    draft = checkpoints.save_checkpoint(base / "draft", seed=1, tokenizer=True, num_hidden_layers=1)
    return target, draft


@pytest.fixture(scope="module")
def llm(folders: tuple[Path, Path]) -> foredraft.LLM:
    target, draft = folders
    return foredraft.load(
        target, draft=draft, dtype="float32", device="cpu", max_batch=3, max_length=512, policy="fixed"
    )


def test_every_form_of_prompt_is_accepted(llm: foredraft.LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("def accept")
    array = np.array(ids)
    forms: list[Any] = [
        "def accept",
        ["def accept"],
        ids,
        [ids],
        tuple(ids),
        array,
        [array],
        torch.tensor(ids),
    ]
    texts = [[o.token_ids for o in llm.generate(form, PLAIN)] for form in forms]
    assert all(text == texts[0] for text in texts)
    both = llm.generate(["def accept", ids], PLAIN)
    assert [o.token_ids for o in both] == texts[0] * 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([[3.0, 4.0]], "3.0 is not a whole number"),
        ([3.0, 4.0], "3.0; give text or a list"),
        ([[True, 4]], "True is not"),
        ([[3, "4"]], "'4' is not"),
        (["a", 5], "is 5; give text"),
        (5, "the prompt is 5"),
        (None, "the prompt is None"),
        ([[3, None]], "None is not"),
        ("\udc80", "not valid Unicode at character 0"),
        (["fine", "not \ud800"], "not valid Unicode at character 4"),
    ],
)
def test_other_forms_of_prompts_are_refused_before_anything_runs(
    llm: foredraft.LLM, wrong: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(wrong, PLAIN)
    assert engine_of(llm).scheduler.idle


def test_a_stream_takes_one_prompt(llm: foredraft.LLM) -> None:
    with pytest.raises(RequestError, match="one prompt, not 2"):
        llm.stream(["one", "two"], PLAIN)


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


def test_a_stream_adds_up_to_the_output(llm: foredraft.LLM) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=40)
    pieces = list(llm.stream("Zwölf Boxkämpfer", params))
    (output,) = llm.generate("Zwölf Boxkämpfer", params)
    assert [i for p in pieces for i in p.token_ids] == output.token_ids
    assert [o for p in pieces for o in p.origins] == output.origins
    assert "".join(p.text or "" for p in pieces) == output.text
    assert pieces[-1].output is not None and pieces[-1].output.token_ids == output.token_ids
    assert all(p.output is None for p in pieces[:-1])


@pytest.mark.parametrize("new", [0, 5])
def test_the_first_piece_of_a_stream_has_the_prompt_s_scores(llm: foredraft.LLM, new: int) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=new, ignore_eos=True, prompt_logprobs=2)
    first, *others = llm.stream("def add(a, b):", params)
    [want] = llm.generate("def add(a, b):", params)
    assert first.prompt_logprobs == want.prompt_logprobs and len(want.prompt_logprobs or []) > 1
    assert all(piece.prompt_logprobs is None for piece in others)


def test_a_closed_stream_is_cancelled_and_others_go_on(llm: foredraft.LLM) -> None:
    stream = llm.stream("def accept", SamplingParams(temperature=0, max_new_tokens=400, ignore_eos=True))
    next(stream)
    assert engine_of(llm).rows.sequences
    other = llm.generate("voix", PLAIN)[0]
    stream.close()
    assert engine_of(llm).scheduler.idle
    assert llm.generate("voix", PLAIN)[0].token_ids == other.token_ids


def test_threads_share_one_batch(llm: foredraft.LLM) -> None:
    prompts = [f"prompt number {i}" for i in range(6)]
    params = SamplingParams(temperature=0, max_new_tokens=20)
    alone = [llm.generate(p, params)[0].token_ids for p in prompts]
    found: dict[int, list[int]] = {}

    def work(index: int) -> None:
        if index % 2:
            pieces = llm.stream(prompts[index], params)
            found[index] = [i for piece in pieces for i in piece.token_ids]
        else:
            found[index] = llm.generate(prompts[index], params)[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert [found[i] for i in range(6)] == alone


@pytest.mark.parametrize("drafter", ["none", "draft-model"])
def test_five_thousand_samples_of_a_prompt_forward_it_once(folders: tuple[Path, Path], drafter: str) -> None:
    """Samples run in waves of `max_batch` rows; their forwards cover their own rounds and not the prompt."""
    target, draft = folders
    llm = foredraft.load(
        target, draft=draft, dtype="float32", device="cpu", max_batch=64, max_length=512, policy="fixed"
    )
    prompt = [5 + i % 90 for i in range(301)]
    draft_model: Any = engine_of(llm).drafters["draft-model"]
    runners: list[Any] = [llm.loaded.runner, draft_model.draft_pass.runner]
    before = [runner.forwarded for runner in runners]
    params = SamplingParams(max_new_tokens=2, ignore_eos=True, drafter=drafter)
    outputs = llm.generate(prompt, params, n=5000)
    forwarded = [runner.forwarded - was for runner, was in zip(runners, before, strict=True)]
    assert len(outputs) == 5000
    assert all(len(o.token_ids) == 2 for o in outputs)
    columns = sum(o.stats.rounds + o.stats.drafted for o in outputs)
    if drafter == "none":
        assert forwarded == [300 + 5000 * 2, 0]
    else:
        assert forwarded == [300 + columns, 300 + 5000], (
            "each sample drafts one token, because the next one is its last"
        )


def test_a_stream_dropped_during_a_step_does_not_block(
    llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may close an iterator anywhere, also in the thread that steps the engine."""
    stream = llm.stream("def accept", SamplingParams(temperature=0, max_new_tokens=400, ignore_eos=True))
    next(stream)
    step = engine_of(llm).step
    open_ = [stream]

    def drop() -> Any:
        if open_:
            open_.pop().close()
        return step()

    monkeypatch.setattr(engine_of(llm), "step", drop)
    worker = threading.Thread(target=llm.generate, args=("voix", PLAIN), daemon=True)
    worker.start()
    worker.join(timeout=60)
    assert not worker.is_alive()
    assert engine_of(llm).scheduler.idle


def test_a_forward_that_fails_ends_only_its_own_batch(
    llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_failed_forward_does_not_harm_the_stepping_thread(
    llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the requests in the failed batch end with an error, whichever thread steps the engine."""
    forward, calls = llm.loaded.runner.forward, iter(range(100_000))

    def break_often(*args: Any, **more: Any) -> Any:
        if next(calls) % 31 == 5:
            raise RuntimeError("unlucky")
        return forward(*args, **more)

    monkeypatch.setattr(llm.loaded.runner, "forward", break_often)
    found: list[foredraft.Output] = []

    def work(index: int) -> None:
        for turn in range(4):
            params = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
            if turn % 2:
                pieces = list(llm.stream([10 + index, turn + 3], params))
                assert pieces[-1].output is not None
                assert [i for p in pieces for i in p.token_ids] == pieces[-1].output.token_ids
                assert [o for p in pieces for o in p.origins] == pieces[-1].output.origins
                found.append(pieces[-1].output)
            else:
                found.extend(llm.generate([10 + index, turn + 3], params, n=2))

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(found) == 5 * 6
    assert {o.finish_reason for o in found} == {"error", "length"}
    assert engine_of(llm).scheduler.idle


def test_cancel_all_keeps_generated_tokens(llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, some, go_on = engine_of(llm).step, threading.Event(), threading.Event()

    def until_there_are_tokens() -> Any:
        if not some.is_set() and sum(len(s.new_ids) for s in engine_of(llm).rows.sequences) >= 6:
            some.set()
            assert go_on.wait(60)
        return step()

    monkeypatch.setattr(engine_of(llm), "step", until_there_are_tokens)
    params = SamplingParams(temperature=0, max_new_tokens=400, ignore_eos=True)
    found: list[foredraft.Output] = []
    worker = threading.Thread(target=lambda: found.extend(llm.generate([5, 6], params, n=9)), daemon=True)
    worker.start()
    assert some.wait(60)
    llm.cancel_all()
    go_on.set()
    worker.join(timeout=60)
    assert [o.finish_reason for o in found] == ["cancelled"] * 9
    assert sum(len(o.token_ids) for o in found) >= 6
    assert engine_of(llm).scheduler.idle


def test_an_interrupted_call_leaves_nothing_running(
    llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = engine_of(llm).step, iter(range(1000))

    def interrupted() -> Any:
        if next(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(engine_of(llm), "step", interrupted)
    with handler_of_sigint(), pytest.raises(KeyboardInterrupt):
        llm.generate([5, 6], SamplingParams(temperature=0, max_new_tokens=400, ignore_eos=True), n=20)
    assert engine_of(llm).scheduler.idle
    assert llm.generate([5, 6], PLAIN)[0].finish_reason == "length"


class Pressed:
    """Sends SIGINT at some instructions of `Interrupts`, and counts the signals that its handler receives."""

    def __init__(self, at: set[int], raises: bool) -> None:
        self.at, self.raises = at, raises
        self.instructions = self.handled = self.woken = 0

    def __call__(self, number: int, frame: Any) -> None:
        self.handled += 1
        if self.raises:
            raise KeyboardInterrupt

    def trace(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_qualname.startswith("Interrupts"):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.instructions += 1
            if self.instructions in self.at:
                signal.raise_signal(signal.SIGINT)
        return self.trace

    def run(self) -> None:
        """Do what a call of `generate` does that takes no step."""
        before, tracing = signal.signal(signal.SIGINT, self), sys.gettrace()
        try:
            sys.settrace(self.trace)
            with Interrupts(self.wake) as interrupts:
                interrupts.deliver()
        except KeyboardInterrupt:
            assert self.raises
        finally:
            sys.settrace(tracing)
            restored = signal.signal(signal.SIGINT, before)
        assert restored is self, "the previous handler must be restored"

    def wake(self) -> None:
        self.woken += 1


@pytest.mark.parametrize("raises", [False, True])
def test_an_interrupt_is_handled_once_wherever_it_comes(raises: bool) -> None:
    undisturbed = Pressed(set(), raises)
    undisturbed.run()
    assert undisturbed.handled == 0
    for instruction in range(1, undisturbed.instructions + 1):
        pressed = Pressed({instruction}, raises)
        pressed.run()
        assert pressed.handled == 1, instruction


def test_a_deferred_interrupt_ends_a_wait() -> None:
    pressed = Pressed(set(), raises=False)
    with handler_of_sigint(pressed):
        with Interrupts(pressed.wake):
            signal.raise_signal(signal.SIGINT)
            assert (pressed.woken, pressed.handled) == (1, 0)
        assert (pressed.woken, pressed.handled) == (1, 1)


def test_two_interrupts_are_handled_once_or_twice() -> None:
    """Signals within a few instructions of each other may count as one, as the operating system has it."""
    count = Pressed(set(), raises=False)
    count.run()
    for first in range(1, count.instructions, 3):
        for second in range(first + 1, count.instructions + 1, 2):
            pressed = Pressed({first, second}, raises=False)
            pressed.run()
            assert pressed.handled in (1, 2), (first, second)


def test_an_interrupt_does_not_wait_for_another_threads_step(
    llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, begun, go_on, waited = engine_of(llm).step, threading.Event(), threading.Event(), []

    def slow() -> Any:
        if not begun.is_set():
            begun.set()
            waited.append(go_on.wait(60))
        return step()

    monkeypatch.setattr(engine_of(llm), "step", slow)
    worker = threading.Thread(target=llm.generate, args=([5, 6], PLAIN), daemon=True)
    worker.start()
    assert begun.wait(60)
    wait = _Waiter.wait

    def interrupted(waiter: Any) -> None:
        threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT)).start()
        wait(waiter)

    monkeypatch.setattr(_Waiter, "wait", interrupted)
    try:
        with handler_of_sigint(), pytest.raises(KeyboardInterrupt):
            llm.generate([7, 8], PLAIN)
        assert not waited, "the interrupted thread takes no step"
    finally:
        go_on.set()
        worker.join(timeout=60)
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


def test_plain_requests_skip_signals_that_only_the_policy_reads(
    llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    confidence = round_results.target_confidence
    monkeypatch.setattr(
        round_results, "target_confidence", lambda *about: asked.append(0) or confidence(*about)
    )
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
    with pytest.raises(RequestError, match="empty"):
        llm.generate("", PLAIN)
    with pytest.raises(RequestError, match="empty"):
        llm.generate([[3], []], PLAIN)
    with pytest.raises(RequestError, match="token id 99999"):
        llm.generate([3, 99999], PLAIN)
    for wrong in (0, "2", 1.5, True):
        with pytest.raises(RequestError, match=f"^n is {wrong!r}; give a whole number from 1 to 100,000$"):
            llm.generate("x", PLAIN, n=wrong)  # type: ignore[arg-type]
    assert not engine_of(llm).rows.sequences and not engine_of(llm).scheduler.waiting  # nothing was submitted


def test_a_folder_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    folder = checkpoints.save_checkpoint(tmp_path / "bare")
    llm = foredraft.load(folder, dtype="float32", device="cpu", max_batch=1)
    output = llm.generate([3, 4, 5], PLAIN)[0]
    assert output.text is None and output.token_ids
    assert all(piece.text is None for piece in llm.stream([3, 4, 5], PLAIN))
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate("text", PLAIN)


def test_load_refuses_options_that_it_cannot_honour(folders: tuple[Path, Path], tmp_path: Path) -> None:
    target, _ = folders
    other = checkpoints.save_checkpoint(tmp_path / "other", vocab_size=400, tokenizer=True)
    with pytest.raises(ConfigError, match=r"other .*has another tokenizer than the target .*target"):
        foredraft.load(target, draft=other, drafter="draft-model", device="cpu")
    for option, value in (
        ("drafter", "falcon"),
        ("policy", "psychic"),
        ("max_draft", 0),
        ("max_draft", 1000),
        ("draft_sampling", "beam"),
        ("dtype", "int3"),
        ("device", "abacus"),
        ("max_length", 10**9),
        ("max_batch", 10**9),
        ("max_batch", 0),
    ):
        with pytest.raises(ConfigError, match=option if option != "max_batch" else "max_batch|MiB"):
            foredraft.load(target, **{"device": "cpu", option: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="draft"):
        foredraft.load(target, drafter="draft-model", device="cpu")


def test_logits_that_are_not_finite_fail_only_that_request(folders: tuple[Path, Path]) -> None:
    """A token with a NaN embedding harms neither other rows nor the next request in its row."""
    target, draft = folders
    llm = foredraft.load(
        target, draft=draft, dtype="float32", device="cpu", max_batch=2, max_length=256, policy="fixed"
    )
    params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    expected = [llm.generate([i, 9, 9], params)[0].token_ids for i in (10, 11, 12)]
    llm.loaded.runner.decoder.embedding[77] = torch.nan  # type: ignore[attr-defined]
    outputs = llm.generate([[10, 9, 9], [11, 77, 9], [11, 9, 9], [12, 9, 9]], params)
    assert outputs[1].finish_reason == "error" and "not finite" in (outputs[1].error or "")
    assert [o.token_ids for i, o in enumerate(outputs) if i != 1] == expected


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kernels", [False, None])
def test_requests_decode_where_the_model_is_not_finite_on_the_measured_texts(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, dtype: str, kernels: bool | None
) -> None:
    """The embeddings of all tokens outside the request's text are NaN, or overflow within the layers."""
    monkeypatch.setenv("FOREDRAFT_CACHE", "")
    target, draft = folders
    llm = foredraft.load(
        target,
        draft=draft,
        drafter="none",
        dtype=dtype,
        device="cpu",
        max_batch=2,
        max_length=64,
        kernels=kernels,
    )
    prompt = [9, 10, 11]
    expected = llm.generate(prompt, PLAIN)[0].token_ids
    embedding = llm.loaded.runner.decoder.embedding  # type: ignore[attr-defined]
    others = [id for id in range(len(embedding)) if id not in (*prompt, *expected)]
    embedding[others] = torch.nan if dtype == "float32" else torch.finfo(torch.float16).max
    [output] = llm.generate(prompt, PLAIN.replace(drafter="auto"))
    assert (output.error, output.token_ids) == (None, expected)


@pytest.mark.parametrize("kernels", [False, None])
def test_a_token_that_is_not_finite_harms_only_texts_that_contain_it(
    folders: tuple[Path, Path], kernels: bool | None
) -> None:
    """Passes pad their columns, and never with a token of their own choice."""
    llm = foredraft.load(
        folders[0], dtype="float32", device="cpu", max_batch=2, max_length=64, kernels=kernels, drafter="none"
    )
    prompt = [9, 10, 11]
    expected = llm.generate(prompt, PLAIN)[0].token_ids
    embedding = llm.loaded.runner.decoder.embedding  # type: ignore[attr-defined]
    embedding[[id for id in range(len(embedding)) if id not in (*prompt, *expected)]] = torch.nan
    [output] = llm.generate(prompt, PLAIN)
    assert (output.error, output.token_ids) == (None, expected)
