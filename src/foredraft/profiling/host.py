"""What the host takes: the work of a round beside its forwards, and whether all logical CPUs are faster.

Two threads of a core share its arithmetic units and caches, so it is measured once, and kept by the machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from foredraft import user_cache
from foredraft.decode.drafter import AutoregressiveDrafter, Drafter, ModelFreeDrafter
from foredraft.decode.engine import Engine
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Fixed
from foredraft.decode.sequence import Finish, Sequence
from foredraft.model.runner import DraftInputs, FusedDraft
from foredraft.profiling.others import Watch
from foredraft.profiling.timing import SETTLE, RoundTimer, TimedTurns, observed, timed

CPU = torch.device("cpu")
KIND = "threads"  # of the user's cache
TURNS = 7  # timed steps of each number, of which the least counts
SECONDS = 0.5  # after which no step begins: a load waits for it
STEPS = 10  # that fit into SECONDS at least where any are compared: each number settles before it is timed
GAIN = 1.05  # of logical CPUs over physical cores from which on it is no noise


def known_faster(physical: int, logical: int, machine: Any) -> int | None:
    """Return the faster number if it is known: both are equal, or it was measured on this machine before."""
    if physical == logical:
        return physical
    kept = user_cache.read(KIND, _key(physical, logical, machine))
    return kept if kept in (physical, logical) else None


def faster_threads(physical: int, logical: int, machine: Any, step: Callable[[int], object]) -> int:
    """Return which number of threads runs a step faster, by what is known or else by measuring."""
    known = known_faster(physical, logical, machine)
    if known is not None:
        return known
    until = time.perf_counter() + SECONDS
    on_cores = partial(step, physical)
    if (
        timed(on_cores, CPU)[0] > SECONDS or timed(on_cores, CPU)[0] > SECONDS / STEPS
    ):  # the first one warms up
        return physical
    watch = Watch()
    turns = TimedTurns({n: partial(step, n) for n in (physical, logical)}, CPU, SETTLE)
    for _ in range(TURNS):
        turns.take(until=until)
    load = watch.load()
    if not all(turns.seconds.values()) or (load is not None and load.disturbed):
        return physical
    fewer, more = (min(turns.seconds[n]) for n in (physical, logical))
    faster = logical if fewer >= GAIN * more else physical
    user_cache.write(KIND, _key(physical, logical, machine), faster)
    return faster


def _key(physical: int, logical: int, machine: Any) -> dict[str, Any]:
    return {"machine": machine, "candidates": [physical, logical], "torch": torch.__version__}


ROUNDS = 7  # timed rounds, of which the least half counts; two more come before them
ROUNDS_SECONDS = 0.2  # after which no further round begins
PROMPT = 1  # tokens of the sequences: nothing to read first, so that all rows begin and end in one round
TEXTS = 4  # choices of the sequences' tokens that are tried: a model may be finite on most of its ids only


def host_ms(engine: Engine, batch: int, length: int, *, draws: bool, until: float = math.inf) -> float | None:
    """Return the ms of a round outside of drafts and forwards; each of `batch` rows drafts `length` tokens.

    The engine's cache must hold no sequence. After `until`, of `time.perf_counter`, no round begins but a
    first one.
    """
    return _Rounds(engine, Fixed(length), _Filler(), draws, until, lambda timer: timer.host).least_ms(batch)


def whole_round_ms(
    engine: Engine, batch: int, length: int, siblings: int, *, draws: bool, until: float = math.inf
) -> float | None:
    """Return the ms of a round whose token trees have so many siblings and cost nothing; as `host_ms`."""
    filler = _TreeFiller(engine.vocabulary)
    policy = Fixed(length, siblings)
    return _Rounds(engine, policy, filler, draws, until, lambda timer: timer.seconds["round"]).least_ms(batch)


@dataclass(frozen=True, slots=True)
class _Rounds:
    """Rounds over an engine's target and cache, whose drafts cost nothing."""

    engine: Engine  # no sequence has a row
    policy: Fixed  # drafts as many tokens as it says
    filler: Drafter  # the drafter
    draws: bool  # the rounds draw tokens
    until: float  # seconds of `time.perf_counter` after which no round begins but a first one
    taken: Callable[[RoundTimer], float]  # tells which seconds of the timer count

    def least_ms(self, batch: int) -> float | None:
        """Return the ms of a round of so many rows; None where no round could be timed."""
        assert not self.engine.rows.sequences
        vocabulary = self.engine.vocabulary
        for text in range(TEXTS):
            first = text * vocabulary // TEXTS
            if (ms := self._least_ms_of([(first + row) % vocabulary for row in range(batch)])) is not None:
                return ms
        return None

    def _least_ms_of(self, ids: list[int]) -> float | None:
        """Return the ms with a row for each id, which is its text; None where no round counts."""
        engine, length, taken = self.engine, self.policy.max_draft, self.taken
        # A first round makes the engine steady.
        tokens = (ROUNDS + 3) * (length + 1 + bool(self.policy.siblings)) + 1
        if PROMPT + tokens > engine.cache.positions:
            tokens = engine.cache.positions - PROMPT
        own = Engine(
            engine.target, engine.cache, self.policy, {"filler": self.filler},
            vocabulary=engine.vocabulary, vocab_ops=engine.vocab_ops,
        )  # fmt: skip
        params = SamplingParams(temperature=float(self.draws), max_new_tokens=tokens, ignore_eos=True)
        drafters = ("filler",) if length else ()
        sequences = [Sequence(row, [id] * PROMPT, params, 0, drafters=drafters) for row, id in enumerate(ids)]
        for sequence in sequences:
            own.submit(sequence)
        timer, rounds = RoundTimer(own), list[float]()
        try:
            with observed(own, timer):
                while not own.scheduler.steady and not own.scheduler.idle:
                    own.step()
                started = time.perf_counter()
                while (
                    own.scheduler.steady and len(own.rows.sequences) == len(ids) and len(rounds) < ROUNDS + 2
                ):
                    now = time.perf_counter()
                    if (len(rounds) > 2 and now - started > ROUNDS_SECONDS) or (rounds and now > self.until):
                        break
                    before = taken(timer)
                    own.round()
                    rounds.append(1e3 * (taken(timer) - before))
        except BaseException:
            own.fail_batch("measuring broke off")  # the rows may hold anything
            raise
        finally:
            for sequence in list(own.rows.sequences):
                own.cancel(sequence)
        # a round that meets logits that are not finite emits nothing
        finite = (
            each.finish is not Finish.ERROR and all(outcome.emitted for outcome in each.rounds)
            for each in sequences
        )
        if not rounds or not all(finite):
            return None
        return median_low(sorted(rounds[2:] or rounds)[: ROUNDS // 2 + 1])


class _Filler(ModelFreeDrafter):
    """Proposes the first token of the text again and again, at no cost."""

    name = "filler"

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [sequence.prompt[:1] * budget for sequence, budget in requests]


class _TreeFiller(AutoregressiveDrafter):
    """Drafts token trees at no cost: token 0 again and again, with other tokens beside it."""

    name = "filler"

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._probs: Tensor | None = None

    def length(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - 1

    def fused_draft(self, inputs: DraftInputs) -> FusedDraft:
        rows, steps, most = len(inputs.lengths), max(inputs.lengths), max(inputs.choices, default=0)
        if inputs.sampling is not None and (self._probs is None or self._probs.shape[:2] != (rows, steps)):
            self._probs = torch.full((rows, steps, self._vocabulary), 1 / self._vocabulary)
        return FusedDraft(
            tokens=torch.zeros(rows, steps, dtype=torch.int64),
            finite=torch.arange(steps) < torch.tensor(inputs.lengths)[:, None],
            probs=None if inputs.sampling is None else self._probs,
            further=torch.arange(1, 1 + most).expand(rows, steps, most),
        )
