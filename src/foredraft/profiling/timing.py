"""Timing: work that takes turns on the clock, the phases of an engine on it, and bare forwards.

Contract: observers of `decode.observer`; the engine runs the same code with and without them.

A draft costs what a round (draft, then verifying pass) takes beyond a verifying pass: so it pays for weights
that it drives out of the CPU's caches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from foredraft.decode.drafter import Drafter, DraftPass
from foredraft.decode.engine import Engine
from foredraft.decode.engine_target import SILENT, Observer, Phase
from foredraft.decode.sequence import Sequence
from foredraft.model.memory import synchronise
from foredraft.model.runner import DraftInputs, Resume, SamplingInputs
from foredraft.model.runner.passes import Captures

# Runs of a work for one time that counts, at most: a pass whose shape is new is captured when it runs again,
# and replayed from then on. One more for a work whose second run has new shapes.
RUNS = 4

T = TypeVar("T")

Work: TypeAlias = Callable[[], object]


def timed(work: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Return the seconds until the device has finished, and the result."""
    synchronise(device)
    start = time.perf_counter()
    result = work()
    synchronise(device)
    return time.perf_counter() - start, result


class TimedTurns:
    """Works that take turns: each once, and the next turn in the opposite order."""

    def __init__(self, works: Mapping[Any, Work], device: torch.device, settle: float | None = None) -> None:
        self.works, self.device, self.settle = works, device, settle
        self.seconds: dict[Any, list[float]] = {key: [] for key in works}  # one figure a turn
        self._backwards = False

    def keep(self, keys: Collection[Any]) -> None:
        """Leave out the other works."""
        self.works = {key: work for key, work in self.works.items() if key in keys}
        self.seconds = {key: self.seconds[key] for key in self.works}

    def take(self, *, counts: bool = True, until: float = math.inf) -> None:
        """Time every work once; no work begins after `until`. counts=False only warms up."""
        for key in list(self.works)[:: -1 if self._backwards else 1]:
            if time.perf_counter() > until:
                return
            if self.settle is not None:
                ran = timed(self.works[key], self.device)[0]
                while ran < self.settle:
                    ran += timed(self.works[key], self.device)[0]
            for _ in range(RUNS):  # again where a pass was captured, or will be when it runs again
                before = Captures.unsettled
                taken, _ = timed(self.works[key], self.device)
                if Captures.unsettled == before:
                    break
            if counts:
                self.seconds[key].append(taken)
        self._backwards = not self._backwards


@contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of one object inside the block."""
    before = vars(thing).get(name)  # None where only the class has it
    setattr(thing, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(thing, name)
        else:
            setattr(thing, name, before)


class DecodingTimer(Observer):
    """Tells decoding from the reading of prompts."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # when the first round began, in seconds of a monotonic clock
        self.began = self.ended = self.reading = self.reading_since = 0.0
        self.rounds = 0  # count
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


class RoundTimer(Observer):
    """Takes rounds apart. It waits for the device after every phase, which slows the device down."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seconds: dict[Phase, float] = {"round": 0.0, "draft": 0.0, "verify": 0.0}  # by phase

    def phase(self, phase: Phase) -> AbstractContextManager[object]:
        return self._timed(phase) if phase in self.seconds else SILENT.phase(phase)

    @contextmanager
    def _timed(self, phase: Phase) -> Iterator[None]:
        synchronise(self.engine.device)
        start = time.perf_counter()
        yield
        synchronise(self.engine.device)
        self.seconds[phase] += time.perf_counter() - start

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


# Seconds for which a forward runs before it is timed: a cache that another forward filled takes several to
# hold what this one needs. Decoding runs plain steps after plain steps.
SETTLE = 0.006


@dataclass(frozen=True, slots=True)
class TimedDraws:
    """The draws of a timed draft."""

    sampling: SamplingInputs | None = None  # of a fused draft; None draws the argmax
    draw: Callable[[int, Tensor], object] = lambda column, logits: None  # of single steps; logits [B, 1, V]


class BareForwards:
    """Forwards over `batch` sequences of `context` tokens, in a cache with room for `room` tokens more."""

    def __init__(self, target: Any, batch: int, context: int, room: int) -> None:
        self.target, self.batch, self.context = target, batch, context
        self.cache = self._pretending(target, room)

    def _pretending(self, runner: Any, room: int) -> Any:
        """Return a cache whose rows stand as if they had read the context."""
        cache = runner.new_cache(self.batch, self.context + room)
        if cache.recurrent is not None:
            cache.recurrent.pretend(self.context - 1)
        return cache

    def tokens(self, width: int) -> Tensor:
        """Return tokens [batch, width]."""
        return torch.zeros(self.batch, width, dtype=torch.int64, device=self.cache.device)

    def verify(self, width: int, resume: Resume | None = None) -> Work:
        """Return a pass of the target over `width` tokens of each sequence; width 1 is a plain step."""
        target, cache, tokens = self.target, self.cache, self.tokens(width)
        starts = [self.context - 1] * self.batch
        return lambda: target.forward(cache, tokens, starts, resume=resume)

    def draft(self, draft_pass: DraftPass, length: int, draws: Callable[[], TimedDraws] = TimedDraws) -> Work:
        """Return a draft of `length` tokens, in one call where the engine would; `draws` is asked once."""
        batch, context, runner = self.batch, self.context, draft_pass.runner
        cache = self.cache if runner is self.target else self._pretending(runner, length)
        tokens = self.tokens(1)

        def draft() -> None:
            how = draws()
            starts, lengths = [context - 1] * batch, [length] * batch
            if draft_pass.fused(cache, DraftInputs([[0]] * batch, starts, lengths, how.sampling)) is not None:
                return
            for column in range(length):
                logits = draft_pass(cache, tokens, [context - 1 + column] * batch).logits
                assert logits is not None
                how.draw(column, logits)

        return draft


def reading(draft_pass: DraftPass, tokens: int) -> Work:
    """Return a draft model's prefill of the first `tokens` tokens of one row."""
    runner = draft_pass.runner
    cache = runner.new_cache(1, tokens)
    return lambda: runner.prefill(cache, 0, [0] * tokens, 0)


def in_sequence(draft: Work, verify: Work) -> Work:
    """Return the forwards of a round: the draft, then its verifying pass."""
    return lambda: (draft(), verify())


def draft_seconds(rounds: Seq[float], verifying: Seq[float]) -> float:
    """Return what a draft takes: the median of round less verifying pass within the turns, 0 at least."""
    return max(0.0, median(whole - part for whole, part in zip(rounds, verifying, strict=True)))


def forward_turns(
    target: Any,  # the target's runner
    drafters: Mapping[str, Drafter],  # by name; those without a draft pass cost nothing and are left out
    batch: int,  # sequences
    context: int,  # tokens of each
    *,
    widths: Iterable[int],  # columns of the verifying passes, `length + 1` of every draft among them
    lengths: Iterable[int],  # of the drafts
    settle: float = SETTLE,  # as `TimedTurns` has it
) -> TimedTurns:
    """Return verifying passes by their width, and rounds by (drafter, drafted tokens), to time by turns."""
    widths, lengths = sorted(set(widths)), sorted(set(lengths))
    bare = BareForwards(target, batch, context, max(widths))
    works: dict[int | tuple[str, int], Work] = {width: bare.verify(width) for width in widths}
    for name, drafter in drafters.items():
        if drafter.draft_pass is not None:
            for length in lengths:
                draft = bare.draft(drafter.draft_pass, length)
                works[name, length] = in_sequence(draft, works[length + 1])
    return TimedTurns(works, bare.cache.device, settle)
