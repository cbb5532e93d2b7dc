"""The engine asks and tells a policy about each row itself, in a batch that changes, and follows its answers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.decode.distribution import Distribution
from foredraft.decode.policy import PLAIN, Candidates, Decision, Policy, Signal
from foredraft.decode.sequence import Sequence, State
from foredraft.decode.stats import Round, RoundTrace
from tests.exactness import test_identity as identity
from tests.support.harness import make_engine, request, run
from tests.support.tabular import Tabular

V = identity.V
MOST = 4


@dataclass
class Asked:
    """The questions that one row's draft of a round asks of its policy."""

    drafter: str | None
    budget: int
    leave: int  # first place that is left to the target
    stop: int  # last place that is drafted
    before: list[Any] = field(default_factory=list)  # logits and q of each draw,
    after: list[Any] = field(default_factory=list)  # and once it was drawn
    told: tuple[Round, float | None] | None = None

    @property
    def longest(self) -> int:
        return min(self.budget, self.leave, self.stop + 1)

    @property
    def places(self) -> int:
        """Return the positions that the policy was asked about: those drafted, and the one left to the target."""
        return self.longest + (self.leave < min(self.budget, self.stop + 1))


class Witness(Policy):
    """Chooses drafter, budget and end at random, and records in a row's state all that it is asked about the row."""

    name = "witness"
    stops_by_content = True

    def __init__(self, signal: Signal) -> None:
        self.target_signal = signal
        self.waited = 0  # rounds beside rows that do not decode yet

    def start(self) -> list[Asked]:
        return []

    def decide(self, rows: Seq[Candidates]) -> list[Decision]:
        for row in rows:
            assert row.idle == (row.sequence.state is State.PREFILLING)
            assert not (row.idle and row.limits)
        self.waited += any(row.idle for row in rows)
        return [PLAIN if row.idle else self._decision(row) for row in rows]

    def _decision(self, row: Candidates) -> Decision:
        dice = random.Random(f"{row.sequence.tokens} {row.sequence.round_count}")
        drafter = dice.choice([*row.limits]) if row.limits else None
        budget = 0 if drafter is None else min(dice.randint(0, MOST), row.limits[drafter])
        row.sequence.policy_state.append(Asked(drafter, budget, dice.randint(0, 6), dice.randint(0, 5)))
        return Decision(drafter, budget)

    def may_draw(self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor) -> Tensor:
        several = self._asked(sequences)
        self._note(several, "before", position, q, logits)
        return torch.tensor([asked is None or position < asked.leave for asked in several])

    def go_on(self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor) -> Tensor:
        several = self._asked(sequences)
        self._note(several, "after", position, q, logits)
        return torch.tensor([asked is None or position < asked.stop for asked in several])

    def _asked(self, sequences: Seq[Sequence]) -> list[Asked | None]:
        """Rows that are still reading their prompts have none."""
        return [s.policy_state[-1] if s.policy_state else None for s in sequences]

    def _note(self, several: list[Any], where: str, position: int, q: Distribution, logits: Tensor) -> None:
        shown = zip(logits[:, 0].tolist(), q.dense(V)[:, 0].tolist(), strict=True)
        for asked, pair in zip(several, shown, strict=True):
            if asked is not None and position == len(getattr(asked, where)):
                getattr(asked, where).append(pair)

    def learn(self, sequence: Sequence, outcome: Round, confidence: float | None) -> None:
        asked = sequence.policy_state[-1]
        assert asked.told is None, "once a round"
        assert outcome is sequence.rounds[-1], "after its commit"
        asked.told = outcome, confidence


def batch() -> list[Sequence]:
    """Short and long prompts and texts, so that rows leave, move and are still reading beside
    others. One autoregressive drafter: a policy is asked by each, of all rows."""
    wishes: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        (("draft-model",), {"temperature": 0.5, "max_new_tokens": 7}),
        (("script",), {"temperature": 0.8, "top_k": 3, "max_new_tokens": 12}),
        (("draft-model", "script"), {"temperature": 0, "max_new_tokens": 24}),
        (("draft-model",), {"top_p": 0.8, "max_new_tokens": 16}),
        ((), {"temperature": 0.7, "max_new_tokens": 9}),
        (("script", "draft-model"), {"temperature": 0.6, "max_new_tokens": 20}),
        (("draft-model",), {"temperature": 1.3, "max_new_tokens": 30}),
        (("draft-model",), {"temperature": 0.9, "max_new_tokens": 25}),
    ]
    prompts = *identity.PROMPTS, (2,)  # the last runs at once, behind rows that still read
    sequences = [
        request(prompt, seed=number, drafters=drafters, **options)
        for number, (prompt, (drafters, options)) in enumerate(zip(prompts, wishes, strict=True))
    ]
    for sequence in sequences:
        sequence.traced = True
    return sequences


def confidence_of(logits: list[float], token: int, signal: Signal) -> float:
    most = max(logits)
    weights = [math.exp(x - most) for x in logits]
    probs = [weight / sum(weights) for weight in weights]
    if signal == "probability":
        return probs[token]
    if signal == "margin":
        first, second = sorted(probs, reverse=True)[:2]
        return first - second
    return 1 + sum(p * math.log(p) for p in probs if p) / math.log(len(probs))


def assert_heard(sequence: Sequence, asked: Asked, turn: RoundTrace, signal: Signal) -> None:
    assert (turn.drafter, turn.budget) == (asked.drafter if asked.budget else None, asked.budget)
    text = sequence.tokens[: len(sequence.prompt) + turn.start]
    assert asked.told is not None
    outcome, confidence = asked.told
    assert outcome.drafter == turn.drafter
    assert (outcome.drafted, outcome.accepted) == (len(turn.draft), turn.accepted)
    last = identity.TARGET.after([*text, *turn.draft[: turn.accepted]])
    assert confidence == pytest.approx(confidence_of(last, turn.next_token, signal), abs=1e-5)
    if turn.drafter in (None, "script"):
        return
    assert len(turn.draft) == asked.longest and outcome.steps == asked.places
    before, after = asked.before[: asked.places], asked.after[: asked.longest]
    assert len(before) == asked.places
    assert len(after) >= min(asked.longest, asked.budget - 1)
    assert after == before[: len(after)]
    for place, (logits, q) in enumerate(before):
        assert logits == pytest.approx(identity.DRAFT.after([*text, *turn.draft[:place]])), place
        if place < len(turn.draft):
            assert q[turn.draft[place]] == pytest.approx(turn.q[place])


@pytest.mark.parametrize("signal", ["probability", "margin", "entropy"])
def test_the_policy_is_asked_and_told_about_each_row_itself(signal: Signal) -> None:
    sequences = batch()
    witness = Witness(signal)
    engine = make_engine(Tabular(identity.TARGET, chunk=1), identity.DRAFT, witness, rows=3)
    run(engine, sequences)
    assert witness.waited
    for sequence in sequences:
        assert sequence.policy_state
        # the policy is not asked once no row has a drafter
        for asked, turn in zip(sequence.policy_state, sequence.trace, strict=bool(sequence.drafters)):
            assert_heard(sequence, asked, turn, signal)
    drafted = [(turn.accepted, len(turn.draft)) for s in sequences for turn in s.trace]
    assert {0 if not kept else 1 + (kept == of) for kept, of in drafted if of} == {0, 1, 2}, "none, some, all"
