"""The default policy: for the batch, the drafters and draft lengths that maximise tokens per millisecond.

Costs come from a `CostTable`, which no request changes; acceptance from running estimates: a request's own,
with the drafter's pooled estimate as its prior. So a decision is a function of the table and of what was
accepted, and can be replayed on paper (`budgets` has the equations).

Deciding takes host time, so a decision stands for some rounds. A drafter that does not pay is tried again
after exponentially more rounds. One cap bounds what drafting may cost a request (`LossBudget`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TypeAlias

from foredraft.decode.policy.acceptance import PRIOR_ALPHA, Acceptance
from foredraft.decode.policy.base import PLAIN, Candidates, Decision, Policy
from foredraft.decode.policy.budgets import Prospect, best_budgets, best_length
from foredraft.decode.policy.costs import CostTable, round_ms
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round

__all__ = ["Auto", "LossBudget"]

DECISION_ROUNDS = 8  # rounds that a decision stands: deciding then costs under 1 % of a 1 ms step
REJECTED_DRAFTS = 2  # consecutive fully rejected drafts after which a row's decision is dropped
FIRST_WAIT, LONGEST_WAIT = (
    8,
    256,
)  # rounds until a drafter that did not pay is tried again, at first and at most
LOSS_STEPS = (
    2.0  # the cap: plain steps that drafting may cost a request: about one rejected draft of 5 tokens,
)
LOSS_SHARE = 0.005  # and this share of the request's time so far
LATE_CONTEXT = 64  # tokens before the pending one that an unknown draft model reads of a long text
READ_SHARE = 0.04  # share of the rest of the request that a draft model known to pay may read a new text

# A drafter, and its confidence in what it proposes: acceptance is estimated for each pair.
Source: TypeAlias = tuple[str, float | None]


@dataclass(slots=True)
class LossBudget:
    """What drafting has cost one request, in ms of the cost table, against plain decoding.

    The loss of a round is its cost less a plain step for each token that it emitted for the request. It is
    less again by what the request saves when other rows, which got more tokens, finish before it: the plain
    steps of a smaller batch are cheaper. A negative loss is a gain.

    Attributes:
        credit: What earlier requests gained, up to LOSS_STEPS plain steps: where drafts pay, bad luck at the
            beginning is no reason to give up.
        spent: Cost of the request's rounds.
        lost: Loss in them.
    """

    credit: float = 0.0
    spent: float = 0.0
    lost: float = 0.0

    def left(self, plain: float) -> float:
        """Return what the next rounds may lose under the cap, in ms; plain: cost of a plain step."""
        return LOSS_STEPS * plain + self.credit + LOSS_SHARE * self.spent - self.lost


@dataclass(slots=True)
class Pooled:
    """What all requests together know of a drafter.

    Attributes:
        acceptance: Of its drafts.
        waited: Rounds since it last drafted.
        wait: Rounds after which it is tried again where it does not pay.
    """

    acceptance: Acceptance
    waited: int = 0
    wait: int = FIRST_WAIT


@dataclass(slots=True)
class Estimate:
    """What one request knows of a drafter: `acceptance`, whose prior is the pooled one."""

    acceptance: Acceptance
    pooled: Pooled

    def learn(self, outcome: Round, standing: Standing) -> None:
        """Count a round in which the drafter drafted."""
        self.acceptance.learn(outcome)
        pooled = self.pooled
        pooled.acceptance.learn(outcome)
        pooled.waited = 0
        if not standing.trial:
            pooled.wait = FIRST_WAIT
        elif outcome.accepted and standing.alone:
            pooled.wait = 1  # nothing else pays, so it goes on until its estimate is clear
        else:
            pooled.wait = min(2 * max(pooled.wait, FIRST_WAIT), LONGEST_WAIT)


@dataclass(slots=True)
class Standing:
    """A row's decision while it stands.

    Attributes:
        decision: What the row does.
        rounds: Rounds that the decision still stands.
        estimate: Of the drafter; None in a plain step.
        trial: The drafter is tried although it was not chosen.
        alone: It is tried in a batch that drafts nothing otherwise.
        read_ms: Cost of what the drafter reads before the first draft, where it counts as loss.
        rejected: Consecutive drafts so far that were fully rejected.
    """

    decision: Decision
    rounds: float = DECISION_ROUNDS
    estimate: Estimate | None = None
    trial: bool = False
    alone: bool = False
    read_ms: float = 0.0
    rejected: int = 0

    @property
    def stands(self) -> bool:
        return self.rounds >= 1 and self.rejected < REJECTED_DRAFTS


@dataclass(slots=True)
class RequestState:
    """The policy's state of one sequence.

    Attributes:
        loss: Its loss budget.
        estimates: What it knows of each drafter.
        standing: Its decisions, by the candidates that they were made for.
        last: The decision of the last round.
        why: Why the last plan drafts nothing for it.
    """

    loss: LossBudget = field(default_factory=LossBudget)
    estimates: dict[Source, Estimate] = field(default_factory=dict)
    standing: dict[tuple[object, ...], Standing] = field(default_factory=dict)
    last: Standing | None = None
    why: str | None = None


class Auto(Policy):
    """The cost model.

    Args:
        max_draft: Longest draft.
        greedy: Costs of greedy rounds on this machine.
        sampled: Costs of rounds in which a row draws its tokens; as `greedy` unless given.
    """

    name = "auto"
    uses_costs = True

    def __init__(
        self, max_draft: int, greedy: CostTable | None = None, sampled: CostTable | None = None
    ) -> None:
        self.max_draft = max_draft
        self.use(greedy or CostTable.unmeasured(), sampled)
        self.measured = greedy is not None
        self._pool: dict[tuple[Source, bool], Pooled] = {}
        self._round: list[tuple[RequestState, str | None, Round]] = []  # the last round, until it is settled
        self._read_ms = 0.0  # in that round, as far as it counts as loss
        self._gained = 0.0  # ms that requests gained together, up to what one may lose

    def use(self, greedy: CostTable, sampled: CostTable | None = None) -> None:
        """Decide by these costs from now on; not while a sequence has a row."""
        self.greedy, self.sampled, self.measured = greedy, sampled or greedy, True
        self.table = greedy

    def start(self) -> RequestState:
        return RequestState(LossBudget(self._gained))

    def decide(self, rows: Seq[Candidates]) -> list[Decision]:
        self._settle()
        draws = any(row.sequence.params.temperature > 0 for row in rows)
        self.table = self.sampled if draws else self.greedy
        keys = [(*row.limits, *row.confidence.values()) for row in rows]
        if any(key and not self._stands(row, key) for row, key in zip(rows, keys, strict=True)):
            self._plan(rows, keys)
        return [self._within(row, key) for row, key in zip(rows, keys, strict=True)]

    def learn(self, sequence: Sequence, outcome: Round, confidence: float | None) -> None:
        state: RequestState = sequence.policy_state
        drafter = None
        if (last := state.last) is not None and last.estimate is not None:
            drafter = last.decision.drafter
            last.estimate.learn(outcome, last)
            last.rejected = 0 if outcome.accepted else last.rejected + 1
        self._round.append((state, drafter, outcome))

    def why_plain(self, sequence: Sequence) -> str:
        state: RequestState = sequence.policy_state
        return state.why or "no drafter had anything to propose"

    def _stands(self, row: Candidates, key: tuple[object, ...]) -> bool:
        standing = _state(row).standing.get(key)
        return standing is not None and standing.stands

    def _within(self, row: Candidates, key: tuple[object, ...]) -> Decision:
        """Return the row's standing decision, cut to what the row may draft now."""
        state = _state(row)
        state.last = standing = state.standing[key] if key else None
        if standing is None:
            return PLAIN
        standing.rounds -= 1
        self._read_ms += standing.read_ms
        standing.read_ms = 0.0
        name, budget, context = standing.decision
        return Decision(name, min(budget, row.limits[name]), context) if name is not None else PLAIN

    def _plan(self, rows: Seq[Candidates], keys: Seq[tuple[object, ...]]) -> None:
        """Make the decision of every row: the most tokens per ms for the batch, within the cap."""
        batch, plain = len(rows), self.table.plain(len(rows))
        left = min(_state(row).loss.left(plain) for row in rows if not row.idle)
        plans = self._paying(rows, left, plain)
        loss = self._loss(plans, plain)
        if self._try_another(rows, plans, left, plain):
            rounds = 1.0
        else:
            rounds = min(DECISION_ROUNDS, left // loss) if loss > 0 else DECISION_ROUNDS
        for row, key, plan in zip(rows, keys, plans, strict=True):
            plan.rounds = max(rounds, 1.0)
            _state(row).standing[key] = plan
            if not row.idle:
                _state(row).why = self._why(row, batch)

    def _paying(self, rows: Seq[Candidates], left: float, plain: float) -> list[Standing]:
        """Return the plans that give the most tokens per ms, shortened to what the batch can bear to lose.

        It must bear REJECTED_DRAFTS rounds of rejected drafts, and what the drafters read before the first.
        """
        names = [self._best(row, len(rows)) for row in rows]
        limit = self.max_draft
        while limit:
            prospects = [
                None if name is None else self._prospect(row, name, limit)
                for row, name in zip(rows, names, strict=True)
            ]
            plans = [
                self._standing(row, name, budget) if name is not None and budget else Standing(PLAIN)
                for row, name, budget in zip(rows, names, best_budgets(self.table, prospects), strict=True)
            ]
            read_ms = sum(plan.read_ms for plan in plans)
            if REJECTED_DRAFTS * (self._loss(plans, plain) - read_ms) + read_ms <= left:
                return plans
            limit //= 2
        return [Standing(PLAIN) for _ in rows]

    def _best(self, row: Candidates, batch: int) -> str | None:
        """Return the drafter that gives the most tokens per ms for the rest of the request, if any may serve.

        A drafter that has nothing to read stays in the choice even where it pays only beside rows that share
        its steps.
        """
        plain_rate, rest = batch / self.table.plain(batch), batch * row.sequence.remaining
        best, chosen = 0.0, None
        for name in row.limits:
            rate, length = best_length(self.table, batch, self._prospect(row, name))
            if read_ms := self._read_cost(row, name):
                rate = rest / (rest / rate + batch * read_ms)
                if not length or rate <= plain_rate:
                    continue
            if rate > best:
                best, chosen = rate, name
        return chosen

    def _try_another(self, rows: Seq[Candidates], plans: list[Standing], left: float, plain: float) -> bool:
        """Plan a trial of a drafter that was not chosen, if one is due; return whether one is.

        One row tries it. Where no row drafts and the drafter is unknown, as many rows do as the cap bears: a
        round tells more then for what its draft steps cost.
        """
        drafts, tried = any(plan.decision.budget for plan in plans), None
        for at, row in enumerate(rows):
            for name in row.limits:
                pooled = self._estimate(row, name).pooled
                due = name != plans[at].decision.drafter and pooled.waited >= pooled.wait
                if not due or tried not in (None, name) or not self._may_pay(row, name):
                    continue
                length = best_length(self.table, 1, self._prospect(row, name))[1]
                for budget in (max(length, 1), 1):
                    trial = self._standing(row, name, budget)
                    trial.trial, trial.alone = True, not drafts
                    if self._loss([*plans[:at], trial, *plans[at + 1 :]], plain) <= left:
                        plans[at], tried = trial, name
                        break
            if tried and (drafts or self._known(row, tried)):
                break
        return tried is not None

    def _may_pay(self, row: Candidates, name: str) -> bool:
        """Return whether drafts would pay if the drafter were always right."""
        return best_length(self.table, 1, Prospect(name, (1.0,) * self._limit(row, name)))[1] > 0

    def _loss(self, plans: Seq[Standing], plain: float) -> float:
        """Return what a row loses in a round of these plans, in ms, if it gains nothing."""
        ms = round_ms(self.table, [plan.decision[:2] for plan in plans])
        return ms - plain + sum(plan.read_ms for plan in plans)

    def _standing(self, row: Candidates, name: str, budget: int) -> Standing:
        decision = Decision(name, budget, self._context(row, name))
        return Standing(decision, estimate=self._estimate(row, name), read_ms=self._charge(row, name))

    def _context(self, row: Candidates, name: str) -> int | None:
        """Return how many of the last tokens the drafter reads of a text that is new to it; None is all."""
        unread = row.unread.get(name, 0)
        if name not in row.late or unread <= LATE_CONTEXT:
            return None
        if not self._known(row, name):
            return LATE_CONTEXT
        may_take = READ_SHARE * self.table.plain(1) * row.sequence.remaining
        whole = self.table.read(name, unread)
        return None if whole <= may_take else max(LATE_CONTEXT, int(unread * may_take / whole))

    def _read_cost(self, row: Candidates, name: str) -> float:
        """Return the cost in ms of what the drafter reads before its first draft."""
        context = self._context(row, name)
        return self.table.read(name, row.unread.get(name, 0) if context is None else context)

    def _charge(self, row: Candidates, name: str) -> float:
        """Return the part of the reading that counts as loss: not that of a text which is new and bounded."""
        unread = row.unread.get(name, 0)
        is_new, context = unread == len(row.sequence.tokens) - 1, self._context(row, name)
        is_bounded = (unread if context is None else context) <= LATE_CONTEXT or self._known(row, name)
        return 0.0 if is_new and is_bounded else self._read_cost(row, name)

    def _known(self, row: Candidates, name: str) -> bool:
        return self._estimate(row, name).pooled.acceptance.known

    def _limit(self, row: Candidates, name: str) -> int:
        return min(row.limits[name], self.max_draft)

    def _prospect(self, row: Candidates, name: str, limit: int | None = None) -> Prospect:
        length = min(self._limit(row, name), limit or self.max_draft)
        return Prospect(name, self._estimate(row, name).acceptance.survival(length))

    def _estimate(self, row: Candidates, name: str) -> Estimate:
        """Return what the request knows of a drafter, beginning with what all requests know."""
        state, confidence = _state(row), row.confidence.get(name)
        source = name, confidence
        if source not in state.estimates:
            kind = source, row.sequence.params.temperature == 0
            if kind not in self._pool:
                assumed = PRIOR_ALPHA if confidence is None else confidence
                self._pool[kind] = Pooled(Acceptance(self.max_draft, assumed=assumed))
            pooled = self._pool[kind]
            state.estimates[source] = Estimate(Acceptance(self.max_draft, pooled.acceptance), pooled)
        return state.estimates[source]

    def _settle(self) -> None:
        """Charge the last round to its requests."""
        outcomes, batch = self._round, len(self._round)
        if not batch:
            return
        ms = round_ms(self.table, [(name, outcome.drafted) for _, name, outcome in outcomes]) + self._read_ms
        plain, emitted = self.table.plain(batch), [1 + outcome.accepted for _, _, outcome in outcomes]
        smaller = (plain - self.table.plain(1)) / max(1, batch - 1)  # what a row adds to a plain step
        for (state, _, _), tokens in zip(outcomes, emitted, strict=True):
            ahead = sum(max(0, others - tokens) for others in emitted)
            state.loss.spent += ms
            state.loss.lost += ms - plain * tokens - smaller * ahead
        self._gained = min(max(self._gained + plain * sum(emitted) / batch - ms, 0.0), LOSS_STEPS * plain)
        for pooled in self._pool.values():
            pooled.waited += 1
        self._round, self._read_ms = [], 0.0

    def _why(self, row: Candidates, batch: int) -> str | None:
        """Return why no candidate is expected to pay for the row, for people."""
        plain = self.table.plain(batch)
        told = []
        for name in row.limits:
            survival = self._prospect(row, name).survival
            ms = self.table.draft(name, batch, 1) + self.table.verify(batch, 2 * batch)
            speed = (1 + survival[0]) * plain / ms
            told.append(f"{name} at {speed:.2f} x plain decoding (acceptance {survival[0]:.0%})")
        return f"no draft is expected to pay: {', '.join(told)}" if told else None


def _state(row: Candidates) -> RequestState:
    state: RequestState = row.sequence.policy_state
    return state
