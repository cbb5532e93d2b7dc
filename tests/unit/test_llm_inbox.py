"""Commands of threads to the engine: each is carried out once, in whatever state its request is, or harms it alone."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft import SamplingParams
from foredraft.decode.engine import Engine
from foredraft.decode.sequence import Sequence
from foredraft.llm.requests import Submission
from foredraft.llm.service import AHEAD
from tests.support import checkpoints
from tests.support.loaded import between_steps, engine_of

PARAMS = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
LONG = PARAMS.replace(max_new_tokens=400)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> foredraft.LLM:
    folder = checkpoints.save_checkpoint(tmp_path_factory.mktemp("models") / "model", tokenizer=True)
    return foredraft.load(folder, drafter="lookup", device="cpu", max_batch=3, max_length=512, policy="fixed")


def unlucky(method: Any, token: int) -> Any:
    """Return the method of the engine, which now fails for a sequence whose prompt begins with this token."""

    def call(engine: Engine, sequence: Sequence) -> None:
        if sequence.prompt[0] == token:
            raise ValueError("unlucky")
        method(engine, sequence)

    return call


def test_a_failed_submission_harms_no_other(llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    want = llm.generate([6, 7], PARAMS)[0].token_ids
    monkeypatch.setattr(Engine, "submit", unlucky(Engine.submit, 5))
    first, second, third = llm.generate([[6, 7], [5, 7], [6, 7]], PARAMS)
    assert (second.finish_reason, second.error, second.token_ids) == ("error", "ValueError: unlucky", [])
    assert first.token_ids == third.token_ids == want
    assert engine_of(llm).scheduler.idle


def test_a_request_that_cannot_be_cancelled_ends_with_an_error_and_the_others_are_cancelled(
    llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [llm.stream([token, 7], LONG) for token in (4, 5, 6)]
    for stream in streams:
        next(stream)
    monkeypatch.setattr(Engine, "cancel", unlucky(Engine.cancel, 5))
    llm.cancel_all()
    ends = [list(stream)[-1].output for stream in streams]
    assert [end.finish_reason for end in ends if end] == ["cancelled", "error", "cancelled"]
    assert engine_of(llm).scheduler.idle


def test_commands_of_threads_survive_one_fault(llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a step runs, three threads leave commands; the first command fails."""
    want = llm.generate([6, 7], PARAMS)[0].token_ids
    step, begun, go_on = engine_of(llm).step, threading.Event(), threading.Event()

    def slow() -> Any:
        begun.set()
        assert go_on.wait(60)
        return step()

    monkeypatch.setattr(engine_of(llm), "step", slow)
    monkeypatch.setattr(Engine, "submit", unlucky(Engine.submit, 5))
    with ThreadPoolExecutor(3) as pool:
        asked = {token: pool.submit(llm.generate, [token, 7], PARAMS) for token in (8, 5, 6)}
        assert begun.wait(60)
        go_on.set()
        found = {token: each.result(60)[0] for token, each in asked.items()}
    assert found[6].token_ids == want and found[8].finish_reason == "length"
    assert found[5].error == "ValueError: unlucky"


def sequence_of(llm: foredraft.LLM) -> Sequence:
    [sequence] = llm.requests.sequences(Submission([5, 6], PARAMS))
    return sequence


def test_cancelling_a_sequence_that_never_began_or_has_ended_changes_nothing(llm: foredraft.LLM) -> None:
    engine, sequence = engine_of(llm), sequence_of(llm)
    engine.cancel(sequence)
    engine.submit(sequence)  # too late: it must not start
    engine.cancel(sequence)
    assert engine.scheduler.idle and sequence.finish == "cancelled"
    running = sequence_of(llm)
    engine.submit(running)
    engine.step()
    engine.cancel(running)
    engine.cancel(running)
    assert engine.scheduler.idle


def test_a_dropped_stream_is_cancelled(llm: foredraft.LLM) -> None:
    stream = llm.stream([5, 6], LONG)
    next(stream)
    [dropped] = engine_of(llm).rows.sequences
    del stream
    gc.collect()
    between_steps(llm)
    assert dropped.finish == "cancelled" and engine_of(llm).scheduler.idle


def test_a_stream_dropped_meanwhile_is_cancelled(llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may run anywhere, also in the thread that changes the engine."""
    streams = [llm.stream([token, 7], LONG) for token in (4, 5)]
    for stream in streams:
        next(stream)
    del stream
    cancel = Engine.cancel

    def cancel_and_collect(engine: Engine, sequence: Sequence) -> None:
        cancel(engine, sequence)
        if len(streams) == 2:
            streams.pop()
            gc.collect()

    monkeypatch.setattr(Engine, "cancel", cancel_and_collect)
    streams[0].close()
    between_steps(llm)
    between_steps(llm)
    assert engine_of(llm).scheduler.idle


def test_a_closed_stream_has_no_more_pieces_and_never_starts(llm: foredraft.LLM) -> None:
    stream = llm.stream([5, 6], LONG)
    stream.close()
    assert list(stream) == [] and engine_of(llm).scheduler.idle
    stream = llm.stream([5, 6], LONG)
    next(stream)
    stream.close()
    stream.close()
    between_steps(llm)
    assert list(stream) == [] and engine_of(llm).scheduler.idle


def test_the_engine_waits_for_the_reader_of_a_stream(llm: foredraft.LLM) -> None:
    stream = llm.stream([5, 6], LONG)
    next(stream)
    [sequence] = engine_of(llm).rows.sequences
    while stream._request.wants:
        between_steps(llm)
    rounds = sequence.round_count
    between_steps(llm)
    assert sequence.round_count == rounds <= 1 + AHEAD
    assert [*stream][-1].output.finish_reason == "length"  # type: ignore[union-attr]


def test_a_failure_of_the_engine_reaches_every_caller(
    llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise OSError("the device is gone")

    with monkeypatch.context() as planted:
        planted.setattr(engine_of(llm), "step", broken)
        for call in (lambda: llm.generate([6, 7], PARAMS), lambda: next(llm.stream([6, 7], PARAMS))):
            with pytest.raises(OSError, match="the device is gone"):
                call()
        assert engine_of(llm).scheduler.idle
    assert llm.generate([6, 7], PARAMS)[0].finish_reason == "length"


def test_the_progress_of_a_prompt_is_reported_to_its_caller(tmp_path: Path) -> None:
    reports: list[tuple[Any, ...]] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "prefill":
            reports.append((threading.current_thread(), done, total))
            raise ZeroDivisionError

    folder = checkpoints.save_checkpoint(tmp_path / "model")
    with foredraft.load(folder, drafter="none", max_length=512, policy="fixed", progress=progress) as llm:
        with pytest.raises(ZeroDivisionError):
            llm.generate([5] * 300, PARAMS)
        between_steps(llm)
        assert reports == [(threading.current_thread(), 256, 299)] and engine_of(llm).scheduler.idle
