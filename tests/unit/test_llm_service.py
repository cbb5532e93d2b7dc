"""The engine's thread and the service: news of all requests, commands, faults that harm their own request alone."""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import foredraft
from foredraft import LLM, RequestError, SamplingParams
from foredraft.decode.engine import Engine
from foredraft.decode.sequence import Sequence
from foredraft.llm import service
from foredraft.llm.output import AHEAD, TextStreamer
from foredraft.llm.requests import Submission
from foredraft.llm.service import Service, StreamEvent
from tests.support import checkpoints
from tests.support.loaded import between_steps, engine_of

GREEDY = SamplingParams(temperature=0, max_new_tokens=30)
PARAMS = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
LONG = PARAMS.replace(max_new_tokens=400)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return foredraft.load(drafter="lookup", policy="fixed", max_batch=3)


class Running:
    def __init__(self, llm: LLM) -> None:
        self.events: queue.Queue[StreamEvent] = queue.Queue()
        self.service = Service(llm, lambda events: [self.events.put(each) for each in events] and None)

    def outputs(self, count: int) -> dict[tuple[Any, int], Any]:
        """Wait for the outputs of so many samples; texts of their pieces are checked."""
        texts: dict[tuple[Any, int], str] = {}
        found = {}
        while len(found) < count:
            handle, sample, piece = self.events.get(timeout=30)
            key = handle.owner, sample
            texts[key] = texts.get(key, "") + (piece.text or "")
            assert key not in found, "a request ended twice"
            if piece.output is not None:
                found[key] = piece.output
                assert piece.output.finish_reason == "error" or texts[key] == piece.output.text
        return found


@pytest.fixture
def running(llm: LLM) -> Iterator[Running]:
    found = Running(llm)
    yield found
    found.service.stop()
    assert engine_of(llm).scheduler.idle


def test_a_cancelled_request_is_published_with_what_it_has(running: Running) -> None:
    long = GREEDY.replace(max_new_tokens=900, ignore_eos=True)
    handle = running.service.submit(Submission("x", long, n=4), owner="long")
    while running.events.empty():
        time.sleep(0.001)
    running.service.cancel(handle)
    assert {output.finish_reason for output in running.outputs(4).values()} == {"cancelled"}


@pytest.mark.parametrize("first", [True, False])
def test_a_text_that_cannot_be_shown_harms_no_other(
    llm: LLM, running: Running, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    sound = TextStreamer.next

    def broken(pieces: TextStreamer) -> Any:
        if pieces.sequence.prompt == bad and (first or pieces.sequence.new_ids):
            raise ValueError("a planted defect")
        return sound(pieces)

    bad = llm.encode("bad")[0]
    monkeypatch.setattr(TextStreamer, "next", broken)
    for owner, prompt in (("bad", "bad"), ("good", "def f(x):\n"), ("later", "class A:\n")):
        running.service.submit(Submission(prompt, GREEDY), owner=owner)
    found = running.outputs(3)
    assert found["bad", 0].finish_reason == "error" and "planted" in found["bad", 0].error
    assert found["good", 0].finish_reason == found["later", 0].finish_reason == "length"
    time.sleep(0.1)
    assert running.events.empty()


def test_a_stopped_service_takes_nothing(llm: LLM) -> None:
    found = Running(llm)
    found.service.submit(Submission("x", GREEDY.replace(max_new_tokens=900, ignore_eos=True)), owner="long")
    found.service.stop()
    assert found.outputs(1)["long", 0].finish_reason == "cancelled"
    with pytest.raises(RequestError, match="closed"):
        found.service.submit(Submission("x", GREEDY))


# --- commands of callers, each of which is carried out once, or harms its own request alone ---------------


def unlucky(method: Any, token: int) -> Any:
    """Return the method of the engine, which now fails for a sequence whose prompt begins with this token."""

    def call(engine: Engine, sequence: Sequence) -> None:
        if sequence.prompt[0] == token:
            raise ValueError("unlucky")
        method(engine, sequence)

    return call


def test_a_failed_submission_harms_no_other(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    want = llm.generate([6, 7], PARAMS)[0].token_ids
    monkeypatch.setattr(Engine, "submit", unlucky(Engine.submit, 5))
    first, second, third = llm.generate([[6, 7], [5, 7], [6, 7]], PARAMS)
    assert (second.finish_reason, second.error, second.token_ids) == ("error", "ValueError: unlucky", [])
    assert first.token_ids == third.token_ids == want
    assert engine_of(llm).scheduler.idle


def test_a_request_that_cannot_be_cancelled_ends_with_an_error_and_the_others_are_cancelled(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [llm.stream([token, 7], LONG) for token in (4, 5, 6)]
    for stream in streams:
        next(stream)
    monkeypatch.setattr(Engine, "cancel", unlucky(Engine.cancel, 5))
    llm.cancel_all()
    ends = [list(stream)[-1].output for stream in streams]
    assert [end.finish_reason for end in ends if end] == ["cancelled", "error", "cancelled"]
    assert engine_of(llm).scheduler.idle


def sequence_of(llm: LLM) -> Sequence:
    [sequence] = llm.requests.sequences(Submission([5, 6], PARAMS))
    return sequence


def test_cancelling_a_sequence_that_never_began_or_has_ended_changes_nothing(llm: LLM) -> None:
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


def test_a_dropped_stream_is_cancelled(llm: LLM) -> None:
    stream = llm.stream([5, 6], LONG)
    next(stream)
    [dropped] = engine_of(llm).rows.sequences
    del stream
    gc.collect()
    between_steps(llm)
    assert dropped.finish == "cancelled" and engine_of(llm).scheduler.idle


def test_a_stream_dropped_meanwhile_is_cancelled(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_closed_stream_has_no_more_pieces_and_never_starts(llm: LLM) -> None:
    stream = llm.stream([5, 6], LONG)
    stream.close()
    assert list(stream) == [] and engine_of(llm).scheduler.idle
    stream = llm.stream([5, 6], LONG)
    next(stream)
    stream.close()
    stream.close()
    between_steps(llm)
    assert list(stream) == [] and engine_of(llm).scheduler.idle


def test_the_engine_waits_for_the_reader_of_a_stream(llm: LLM) -> None:
    stream = llm.stream([5, 6], LONG)
    next(stream)
    [sequence] = engine_of(llm).rows.sequences
    while stream._request.wants:
        between_steps(llm)
    rounds = sequence.round_count
    between_steps(llm)
    assert sequence.round_count == rounds <= 1 + AHEAD
    assert [*stream][-1].output.finish_reason == "length"  # type: ignore[union-attr]


def test_a_failure_of_the_engine_reaches_every_caller(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
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


# --- the end of a thread, and its defects -----------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> Iterator[LLM]:
    folder = checkpoints.save_checkpoint(tmp_path / "model")
    with foredraft.load(folder, drafter="none", max_length=512, policy="fixed") as llm:
        yield llm


def test_a_thread_that_is_stopped_twice_ends(own: LLM) -> None:
    stream = own.stream([5, 6], LONG)
    next(stream)
    [thread] = [each for each in service._THREADS if each.engine is engine_of(own)]
    stops = [threading.Thread(target=thread.stop, daemon=True) for _ in range(3)]
    for stop in stops:
        stop.start()
    for stop in stops:
        stop.join(60)
        assert not stop.is_alive(), "it hangs"
    assert not thread.alive and [*stream][-1].output.finish_reason == "cancelled"  # type: ignore[union-attr]
    assert own.generate([6, 7], PARAMS)[0].finish_reason == "length"


def test_a_model_is_freed_whatever_is_closed_after_it(own: LLM) -> None:
    engine = weakref.ref(engine_of(own))
    begun, fresh = own.stream([5, 6], LONG), own.stream([5, 6], LONG)
    next(begun)
    own.close()
    fresh.close()
    with pytest.raises(RequestError, match="closed"):
        next(own.stream([5, 6], LONG))
    del begun, fresh
    gc.collect()
    assert engine() is None


def test_a_model_that_is_closed_in_its_own_thread_cancels_its_requests(own: LLM) -> None:
    events: SimpleQueue[Any] = SimpleQueue()

    def publish(found: Any) -> None:
        own.close()
        for event in found:
            events.put(event)

    Service(own, publish).submit(Submission([5, 6], GREEDY.replace(max_new_tokens=400, ignore_eos=True)))
    while (event := events.get(timeout=60)).piece.output is None:
        pass
    assert event.piece.output.finish_reason == "cancelled"


def test_a_defect_that_no_request_survives_reaches_all_their_callers(
    own: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError("the device is gone")

    monkeypatch.setattr(engine_of(own), "step", broken)
    monkeypatch.setattr(engine_of(own), "fail_batch", broken)
    monkeypatch.setattr(Engine, "fail", broken)
    [thread] = [each for each in service._THREADS if each.engine is engine_of(own)]
    gate, raised = threading.Event(), list[str]()

    def call() -> None:
        with pytest.raises(OSError, match="gone") as found:
            own.generate([[6, 7], [5, 6]], PARAMS)
        raised.append(str(found.value))

    thread._line.queue.put(gate.wait)
    callers = [threading.Thread(target=call, daemon=True) for _ in range(2)]
    for caller in callers:
        caller.start()
    while thread._line.queue.qsize() < 2 + (not thread.alive):
        time.sleep(0.001)
    gate.set()
    for caller in callers:
        caller.join(60)
    assert raised == ["the device is gone"] * 2
    assert not Service(own, print).alive
    monkeypatch.undo()
