"""Commands of threads to the engine: each is carried out once, in whatever state its request is, or harms it alone."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

import foredraft
from foredraft import SamplingParams
from foredraft.decode.engine import Engine
from foredraft.decode.sequence import Sequence
from foredraft.llm.driver import Inbox
from foredraft.llm.requests import Submission
from tests.support import checkpoints
from tests.support.loaded import engine_of

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
    found: dict[int, foredraft.Output] = {}

    def work(token: int) -> None:
        [found[token]] = llm.generate([token, 7], PARAMS)

    threads = [threading.Thread(target=work, args=(token,), daemon=True) for token in (8, 5, 6)]
    for waiting, thread in enumerate(threads):
        thread.start()
        while len(llm._driver._waiters) <= waiting:  # the order of the commands is that of the threads
            thread.join(timeout=0.01)
        assert begun.wait(60)
    go_on.set()
    for thread in threads:
        thread.join(timeout=60)
    assert found[6].token_ids == want and found[8].finish_reason == "length"
    assert found[5].error == "ValueError: unlucky"


def test_a_thread_that_leaves_hands_on_its_turn(llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, found = engine_of(llm).step, list[foredraft.Output]()
    worker = threading.Thread(target=lambda: found.extend(llm.generate([5, 6], LONG)), daemon=True)

    def slow() -> Any:
        if threading.current_thread() is not worker and not worker.is_alive():
            worker.start()
            while len(llm._driver._waiters) < 2:
                worker.join(0.01)
            worker.join(0.1)  # by now it waits
        return step()

    with monkeypatch.context() as planted:
        planted.setattr(engine_of(llm), "step", slow)
        llm.generate([6, 7], PARAMS.replace(max_new_tokens=1))
    worker.join(timeout=60)
    assert [output.finish_reason for output in found] == ["length"]


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


def test_a_dropped_stream_is_cancelled_before_the_next_step(llm: foredraft.LLM) -> None:
    stream = llm.stream([5, 6], LONG)
    next(stream)
    [dropped] = engine_of(llm).rows.sequences
    rounds = dropped.round_count
    del stream
    gc.collect()
    llm.generate([6, 7], PARAMS)
    assert dropped.finish == "cancelled" and dropped.round_count == rounds
    assert engine_of(llm).scheduler.idle and not llm._driver.inbox._watched


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
    assert engine_of(llm).scheduler.idle and not llm._driver.inbox


def test_a_closed_stream_has_no_more_pieces_and_never_starts(llm: foredraft.LLM) -> None:
    stream = llm.stream([5, 6], LONG)
    stream.close()
    assert list(stream) == [] and engine_of(llm).scheduler.idle
    stream = llm.stream([5, 6], LONG)
    next(stream)
    stream.close()
    stream.close()
    assert list(stream) == [] and engine_of(llm).scheduler.idle


def test_a_command_of_the_last_moment_is_kept(llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream([5, 6], LONG)
    next(stream)
    carry_out, closed = Inbox.carry_out, []

    def close_after(inbox: Inbox) -> None:
        carry_out(inbox)
        if not closed:
            closed.append(threading.Thread(target=stream.close))
            closed[0].start()
            closed[0].join(60)  # it finds the turn taken, and does not wait

    monkeypatch.setattr(Inbox, "carry_out", close_after)
    llm.cancel_all()
    assert closed and not closed[0].is_alive()
    assert engine_of(llm).scheduler.idle and not llm._driver.inbox
