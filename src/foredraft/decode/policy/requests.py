"""What the policy `auto` knows of drafters and requests: estimates, decisions that stand, losses, rests."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TypeAlias

from foredraft.decode.policy import Decision
from foredraft.decode.policy.budgets import AcceptanceEstimate, Candidate
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round

FIRST_WAIT = 8  # rounds until a drafter that did not pay is tried again; each failed trial doubles the wait
LONGEST_WAIT = 256  # rounds at most: a drafter that became good is found within a long text
LOSS_STEPS = 2.0  # plain steps that drafting may cost a request: about one rejected draft of 5 tokens
LOSS_SHARE = 0.005  # share of the request's time so far that drafting may cost beyond LOSS_STEPS
DECISION_ROUNDS = 8  # rounds that a decision stands: deciding then costs under 1 % of a 1 ms step

# A drafter, and its confidence in what it proposes: acceptance is estimated for each pair.
Source: TypeAlias = tuple[str, float | None]
Key: TypeAlias = tuple[object, ...]  # the candidates that a decision was made for


@dataclass(slots=True)
class Pooled:
    """The pooled estimate of a drafter, over all requests."""

    acceptance: AcceptanceEstimate
    waited: int = 0  # rounds since it last drafted
    wait: int = FIRST_WAIT  # rounds after which it is tried again where it does not pay


@dataclass(slots=True)
class HeldDecision:
    """A row's decision, which stands for some rounds."""

    decision: Decision
    rounds: float = DECISION_ROUNDS  # for which it still stands
    estimate: Estimate | None = None  # of the drafter; None in a plain step
    trial: bool = False  # the drafter is tried although it was not chosen
    alone: bool = False  # it is tried in a batch that drafts nothing otherwise
    begins: bool = True  # no round of it has ended
    read_loss_ms: float = 0.0  # ms of reading before the first draft that count as loss
    candidate: Candidate | None = None  # for which it was made; None in a plain step
    rejected: int = 0  # consecutive drafts so far that were fully rejected


@dataclass(slots=True)
class Estimate:
    """One request's own estimate of a drafter."""

    acceptance: AcceptanceEstimate  # its prior is the pooled one
    pooled: Pooled

    def learn(self, outcome: Round, held: HeldDecision) -> None:
        """Count a round in which the drafter drafted."""
        self.acceptance.learn(outcome)
        pooled = self.pooled
        pooled.acceptance.learn(outcome)
        pooled.waited = 0
        if not held.trial:
            pooled.wait = FIRST_WAIT
        elif outcome.accepted and held.alone:
            pooled.wait = 1  # nothing else pays, so it goes on until its estimate is clear
        elif held.begins:
            pooled.wait = min(2 * max(pooled.wait, FIRST_WAIT), LONGEST_WAIT)
        held.begins = False


@dataclass(slots=True)
class RequestState:
    """What the policy knows of one request.

    A round loses, in ms of the cost table, its cost less a plain step for each token emitted, and less what a
    smaller batch saves earlier; below 0 it gains.
    """

    credit: float  # gain of earlier requests, LOSS_STEPS at most: bad luck at first then ends nothing
    spent: float = 0.0  # cost of the request's rounds
    lost: float = 0.0  # loss in them
    estimates: dict[Source, Estimate] = field(default_factory=dict)
    held: dict[Key, HeldDecision] = field(default_factory=dict)
    last: HeldDecision | None = None  # decision of the last round
    batch: int = 1  # rows when it was decided last

    def left(self, plain: float) -> float:
        """Return what the next rounds may lose under the cap, in ms; plain: cost of a plain step."""
        return LOSS_STEPS * plain + self.credit + LOSS_SHARE * self.spent - self.lost


@dataclass(slots=True)
class Rest:
    """Plain rounds of which the policy is not asked, since nothing pays and no drafter is due for a trial."""

    left: int = 0  # rounds to come
    passed: int = 0  # rounds so far
    longest: int = FIRST_WAIT  # rounds that the next one has at most
    rows: list[Sequence] = field(default_factory=list)

    def begin(self, rounds: int, rows: list[Sequence]) -> None:
        """Rest for some rounds of these rows; the next rest may be longer, where nothing changes."""
        self.left, self.rows = max(0, min(rounds, self.longest)), rows
        self.longest = min(2 * self.longest, LONGEST_WAIT)

    def goes_on(self, rows: Seq[Sequence]) -> bool:
        """Count a round of these rows, if the rest still stands for them."""
        if not self.left or [row.id for row in rows] != [row.id for row in self.rows]:
            return False
        self.left -= 1
        self.passed += 1
        return True

    def end(self) -> tuple[int, list[Sequence]]:
        """Return the rounds that passed, and of which rows."""
        ended = self.passed, self.rows
        self.left, self.passed, self.rows = 0, 0, []
        return ended
