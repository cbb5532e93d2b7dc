"""Phases of an engine on the clock: when it reads prompts, when it decodes, and where a round's time goes.

Contract: observers of `decode.observer`; the engine runs the same code with and without them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from foredraft.decode.engine import Engine
from foredraft.decode.observer import SILENT, Observer, Phase
from foredraft.decode.sequence import Sequence
from foredraft.model.transfers import synchronise

__all__ = ["DecodingClock", "RoundClock", "observed"]


class DecodingClock(Observer):
    """Tells decoding from the reading of prompts.

    Attributes:
        began: When the first round began, in seconds of a monotonic clock.
        ended: When the last step ended.
        reading: Seconds in which prompts were read: by the target, or by a drafter that reads them once
            chosen.
        reading_since: Those of them after the first round began.
        rounds: Count.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.began = self.ended = self.reading = self.reading_since = 0.0
        self.rounds = 0
        self._in_round = 0.0

    def phase(self, phase: Phase) -> AbstractContextManager[object]:
        if phase == "step":
            return self._step()
        return self._round() if phase == "round" else SILENT.phase(phase)

    @contextmanager
    def _step(self) -> Iterator[None]:
        scheduler = self.engine.scheduler
        reads = bool(scheduler.waiting) or scheduler.prefilling is not None
        decoding, self._in_round, start = self.rounds > 0, 0.0, time.perf_counter()
        yield
        self.ended = time.perf_counter()
        if reads:
            self._count(self.ended - start - self._in_round, decoding)

    @contextmanager
    def _round(self) -> Iterator[None]:
        scheduler = self.engine.scheduler
        if scheduler.waiting or scheduler.prefilling is not None or not self.rounds:
            synchronise(self.engine.device)  # otherwise a prompt's passes end within the round
        start = time.perf_counter()
        if not self.rounds:
            self.began = start
        self.rounds += 1
        yield
        self._in_round = time.perf_counter() - start

    @contextmanager
    def drafter_reads(self, sequence: Sequence, start: int, stop: int) -> Iterator[None]:
        synchronise(self.engine.device)
        begin = time.perf_counter()
        yield
        synchronise(self.engine.device)
        of_prompt = max(0, min(stop, len(sequence.prompt)) - start) / (stop - start)
        self._count(of_prompt * (time.perf_counter() - begin), True)

    def _count(self, seconds: float, decoding: bool) -> None:
        self.reading += seconds
        self.reading_since += seconds if decoding else 0.0


class RoundClock(Observer):
    """Takes rounds apart. It waits for the device after every phase, which slows the device down.

    Attributes:
        seconds: By phase.
        rounds: Count.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seconds: dict[Phase, float] = {"round": 0.0, "draft": 0.0, "verify": 0.0}
        self.rounds = 0

    def phase(self, phase: Phase) -> AbstractContextManager[object]:
        return self._timed(phase) if phase in self.seconds else SILENT.phase(phase)

    @contextmanager
    def _timed(self, phase: Phase) -> Iterator[None]:
        synchronise(self.engine.device)
        start = time.perf_counter()
        yield
        synchronise(self.engine.device)
        self.seconds[phase] += time.perf_counter() - start
        self.rounds += phase == "round"

    @property
    def host(self) -> float:
        """Return the seconds of rounds outside of drafts and verifying passes."""
        return self.seconds["round"] - self.seconds["draft"] - self.seconds["verify"]


class _Both(Observer):
    """Tells two observers; the second one's phases lie within the first one's."""

    def __init__(self, outer: Observer, inner: Observer) -> None:
        self.outer, self.inner = outer, inner

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        with self.outer.phase(phase), self.inner.phase(phase):
            yield

    @contextmanager
    def drafter_reads(self, sequence: Sequence, start: int, stop: int) -> Iterator[None]:
        with self.outer.drafter_reads(sequence, start, stop), self.inner.drafter_reads(sequence, start, stop):
            yield


@contextmanager
def observed(engine: Engine, observer: Observer) -> Iterator[None]:
    """Have the observer watch the engine inside the block, beside one that watches it already."""
    before = engine.observer
    engine.observer = observer if before is SILENT else _Both(before, observer)
    try:
        yield
    finally:
        engine.observer = before
