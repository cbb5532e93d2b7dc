"""The service: events of all requests, cancellations, and a defect that harms its own request alone."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest

import foredraft
from foredraft import LLM, RequestError, SamplingParams
from foredraft.llm.output import TextStreamer
from foredraft.llm.requests import Submission
from foredraft.llm.service import Service, StreamEvent
from tests.support.loaded import engine_of

GREEDY = SamplingParams(temperature=0, max_new_tokens=30)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return foredraft.load(policy="fixed", max_batch=3)


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
