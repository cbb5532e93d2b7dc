"""An engine timed from outside: when it reads prompts, when it decodes, and where a round's time goes.

Contract: the engine's own code knows nothing of this. Its methods are wrapped on the one object, while a run
lasts, by functions that do the same and look at the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from foredraft.decode.draft import as_stepper
from foredraft.decode.engine import Engine
from foredraft.decode.sequence import State
from foredraft.model.device import synchronise

__all__ = ["Clock", "Parts", "Turns", "interleaved", "parted", "timed", "watched", "wrapped"]

T = TypeVar("T")


@dataclass(slots=True)
class Clock:
    """began, ended: of the first round and the last one, on a monotonic clock. reading: seconds in which
    prompts were read, by the target or by a drafter that reads them once it is chosen; reading_since: of
    them, after the first round began. rounds: how many."""

    began: float = 0.0
    ended: float = 0.0
    reading: float = 0.0
    reading_since: float = 0.0
    rounds: int = 0


@contextmanager
def watched(engine: Engine) -> Iterator[Clock]:
    """Times every step of the engine while entered."""
    clock = Clock()
    step, round = engine.step, engine.round
    in_round = 0.0
    reads = False

    def timed_step() -> Any:
        nonlocal in_round, reads
        reads = bool(engine.scheduler.waiting) or engine.scheduler.prefilling is not None
        if not reads:
            done = step()
            clock.ended = time.perf_counter()
            return done
        in_round, decoding, start = 0.0, clock.rounds > 0, time.perf_counter()
        done = step()
        clock.ended = time.perf_counter()
        reading = clock.ended - start - in_round
        clock.reading += reading
        clock.reading_since += reading if decoding else 0.0
        return done

    def timed_round() -> Any:
        nonlocal in_round
        if reads:
            synchronise(engine.device)  # else the prompt's passes would end within the round
        start = time.perf_counter()
        if not clock.rounds:
            clock.began = start
        clock.rounds += 1
        done = round()
        in_round = time.perf_counter() - start
        return done

    def timed_read(read: Callable[[Any, int, int], None]) -> Callable[[Any, int, int], None]:
        def run(sequence: Any, begin: int, stop: int) -> None:
            taken, _ = timed(lambda: read(sequence, begin, stop), engine.device)
            if sequence.state is State.RUNNING:  # in a round
                of_prompt = taken * max(0, min(stop, len(sequence.prompt)) - begin) / (stop - begin)
                clock.reading += of_prompt
                clock.reading_since += of_prompt

        return run

    with ExitStack() as wraps:
        wraps.enter_context(wrapped(engine, "step", timed_step))
        wraps.enter_context(wrapped(engine, "round", timed_round))
        for drafter in engine.drafters.values():
            if (stepper := as_stepper(drafter)) is not None:
                wraps.enter_context(wrapped(stepper, "read", timed_read(stepper.read)))
        yield clock


@dataclass(slots=True)
class Parts:
    """Seconds in the drafters, and in verifying passes."""

    draft: float = 0.0
    verify: float = 0.0


@contextmanager
def parted(engine: Engine) -> Iterator[Parts]:
    """Times what rounds are made of while entered. Each part is waited for, so that it slows a device down:
    no other figure may come of such a run."""
    parts = Parts()

    def timed(action: Callable[..., Any], part: str) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            synchronise(engine.device)
            start = time.perf_counter()
            done = action(*given, **named)
            synchronise(engine.device)
            setattr(parts, part, getattr(parts, part) + time.perf_counter() - start)
            return done

        return run

    with ExitStack() as wraps:
        target: Any = engine.target
        wraps.enter_context(wrapped(target, "forward", timed(target.forward, "verify")))
        for drafter in engine.drafters.values():
            for name in ("propose", "step", "draft"):
                if hasattr(drafter, name):
                    wraps.enter_context(wrapped(drafter, name, timed(getattr(drafter, name), "draft")))
        yield parts


@contextmanager
def wrapped(thing: Any, name: str, stand_in: Any) -> Iterator[None]:
    """An attribute of this one object replaced while entered."""
    before = vars(thing).get(name)  # its own, where it is wrapped already; else its class's
    setattr(thing, name, stand_in)
    try:
        yield
    finally:
        if before is None:
            delattr(thing, name)
        else:
            setattr(thing, name, before)


def timed(work: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Seconds until the device is done, and what came of it."""
    synchronise(device)
    start = time.perf_counter()
    result = work()
    synchronise(device)
    return time.perf_counter() - start, result


class Turns:
    """Works that take turns: all once, the next time in the opposite order.

    seconds: of each, by its key, one a turn. settle: seconds for which a work runs just before it is timed,
    once at least unless that is 0, so that it finds the caches as it leaves them itself and not as another
    one did.
    """

    def __init__(
        self, works: Mapping[Any, Callable[[], object]], device: torch.device, settle: float = 0.0
    ) -> None:
        self.works, self.device, self.settle = works, device, settle
        self.seconds: dict[Any, list[float]] = {name: [] for name in works}
        self._backwards = False

    def take(self, *, counts: bool = True) -> None:
        """counts: else it warms up alone."""
        for name in list(self.works)[:: -1 if self._backwards else 1]:
            ran = 0.0
            while self.settle > ran:
                ran += timed(self.works[name], self.device)[0]
            taken, _ = timed(self.works[name], self.device)
            if counts:
                self.seconds[name].append(taken)
        self._backwards = not self._backwards


def interleaved(
    works: Mapping[Any, Callable[[], object]],
    device: torch.device,
    repeats: int,
    warm: int = 4,
    settle: float = 0.0,
    after: Callable[[], object] = lambda: None,
) -> dict[Any, list[float]]:
    """Seconds of each, by its key, in `repeats` turns (`Turns`) after `warm` ones that do not count. after:
    called after each turn."""
    turns = Turns(works, device, settle)
    for turn in range(-warm, repeats):
        turns.take(counts=turn >= 0)
        after()
    return turns.seconds
