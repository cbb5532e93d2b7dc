"""Host work: what a round of the real engine takes beside its forwards."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_low

import torch
from torch import Tensor

from foredraft.decode.drafter import Drafter, Guesser, Stepper
from foredraft.decode.engine import Engine
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Fixed
from foredraft.decode.sequence import Finish, Sequence
from foredraft.model.runner import DraftInputs, FusedDraft
from foredraft.profiling.phases import RoundClock, observed

__all__ = ["host_ms", "whole_round_ms"]

ROUNDS = 7  # timed rounds, of which the least half counts; two more come before them
SECONDS = 0.2  # after which no further round begins
PROMPT = 1  # tokens of the sequences: nothing to read first, so that all rows begin and end in one round
TEXTS = 4  # choices of the sequences' tokens that are tried: a model may be finite on most of its ids only


def host_ms(engine: Engine, batch: int, length: int, *, draws: bool, until: float = math.inf) -> float | None:
    """Return the ms of a round outside of drafts and forwards; each of `batch` rows drafts `length` tokens.

    The rounds run over the engine's target and cache, which must hold no sequence and are left empty. Where
    the model's logits are not finite on a text, a round leaves rows out, so another text is tried. After
    `until`, in seconds of `time.perf_counter`, no round begins but a first one.

    Returns:
        The ms; None where no round could be timed: the logits are not finite on any of TEXTS texts.
    """
    return _Rounds(engine, Fixed(length), _Filler(), draws, until, lambda clock: clock.host).least_ms(batch)


def whole_round_ms(
    engine: Engine, batch: int, length: int, siblings: int, *, draws: bool, until: float = math.inf
) -> float | None:
    """Return the ms of a whole round whose drafts have so many siblings and cost nothing; as `host_ms`."""
    filler = _CombFiller(engine.vocabulary)
    policy = Fixed(length, siblings)
    return _Rounds(engine, policy, filler, draws, until, lambda clock: clock.seconds["round"]).least_ms(batch)


@dataclass(frozen=True, slots=True)
class _Rounds:
    """Rounds over an engine's target and cache, whose drafts cost nothing.

    Attributes:
        engine: No sequence has a row.
        policy: Drafts as many tokens as it says.
        filler: The drafter.
        draws: The rounds draw tokens.
        until: Seconds of `time.perf_counter` after which no round begins but a first one.
        taken: Tells which seconds of the clock count.
    """

    engine: Engine
    policy: Fixed
    filler: Drafter
    draws: bool
    until: float
    taken: Callable[[RoundClock], float]

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
            vocabulary=engine.vocabulary, device=engine.device, vocab_ops=engine.vocab_ops,
        )  # fmt: skip
        params = SamplingParams(temperature=float(self.draws), max_new_tokens=tokens, ignore_eos=True)
        drafters = ("filler",) if length else ()
        sequences = [Sequence(row, [id] * PROMPT, params, 0, drafters=drafters) for row, id in enumerate(ids)]
        for sequence in sequences:
            own.submit(sequence)
        clock, rounds = RoundClock(own), list[float]()
        try:
            with observed(own, clock):
                while not own.scheduler.steady and not own.scheduler.idle:
                    own.step()
                started = time.perf_counter()
                while (
                    own.scheduler.steady and len(own.rows.sequences) == len(ids) and len(rounds) < ROUNDS + 2
                ):
                    now = time.perf_counter()
                    if (len(rounds) > 2 and now - started > SECONDS) or (rounds and now > self.until):
                        break
                    before = taken(clock)
                    own.round()
                    rounds.append(1e3 * (taken(clock) - before))
        except BaseException:
            own.fail_batch("measuring broke off")  # the rows may hold anything
            raise
        finally:
            for sequence in list(own.rows.sequences):
                own.cancel(sequence)
        if not rounds or not all(map(_stayed_finite, sequences)):
            return None
        return median_low(sorted(rounds[2:] or rounds)[: ROUNDS // 2 + 1])


def _stayed_finite(sequence: Sequence) -> bool:
    """Return whether no round of the sequence met logits that are not finite; such a round emits nothing."""
    return sequence.finish is not Finish.ERROR and all(outcome.emitted for outcome in sequence.rounds)


class _Filler(Guesser):
    """Proposes the first token of the text again and again, at no cost."""

    name = "filler"

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [sequence.prompt[:1] * budget for sequence, budget in requests]


class _CombFiller(Stepper):
    """Drafts token 0 again and again, with other tokens beside it, at no cost."""

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
