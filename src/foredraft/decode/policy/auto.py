"""The default policy: for the batch, the drafters and drafts that maximise tokens per millisecond.

Costs come from a `CostTable`, which a `CorrectedTable` adapts to what rounds took; acceptance from
running estimates: a request's own, with the drafter's pooled estimate as its prior (`budgets` has the
equations). A decision of the batch stands for some rounds. A drafter that does not pay is tried again after
exponentially more rounds, and one cap bounds what drafting may cost a request (`RequestState.left`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import inf

from foredraft.decode.policy import PLAIN, Candidates, Decision, Policy
from foredraft.decode.policy.budgets import (
    PRIOR_ALPHA,
    AcceptanceEstimate,
    Candidate,
    Others,
    TreeShape,
    best_budgets,
    best_length,
)
from foredraft.decode.policy.cost_table import (
    LEAST,
    TEXT,
    CorrectedTable,
    CostTable,
    TimedRound,
    round_ms,
    steps_of,
)
from foredraft.decode.policy.requests import (
    DECISION_ROUNDS,
    FIRST_WAIT,
    LONGEST_WAIT,
    LOSS_STEPS,
    Estimate,
    HeldDecision,
    Key,
    Pooled,
    RequestState,
    Rest,
    Source,
)
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round

REJECTED_DRAFTS = 2  # consecutive fully rejected drafts after which a row's decision is dropped
TIMED_AFTER = 64  # rounds until a drafter is timed that cannot pay by the table, which may be wrong
LATE_CONTEXT = 64  # tokens before the pending one that an unknown draft model reads of a long text
READ_SHARE = 0.04  # share of the rest of the request that a draft model known to pay may read a new text


class Auto(Policy):
    """Drafts what maximises tokens per millisecond, by the costs of rounds and the acceptance so far."""

    name = "auto"
    uses_costs = True

    def __init__(
        self, max_draft: int, greedy: CostTable | None = None, sampled: CostTable | None = None
    ) -> None:
        self.max_draft = max_draft  # longest draft, in tokens
        self.use(greedy or CostTable.unmeasured(), sampled)
        self.measured = greedy is not None
        self._pool: dict[tuple[Source, str], Pooled] = {}  # by source and rule
        # Of the last round, until `_settle` charges it to its requests:
        self._round: list[tuple[RequestState, Round]] = []
        self._believed_ms = inf  # its cost before the correction learned from it; inf where it did not
        self._rows = 0  # rows that decoded
        self._read_loss_ms = 0.0  # ms of reading that count as loss
        self._reads: list[int] = []  # tokens of texts that drafters read, by row
        self._stands = 0.0  # rounds for which the batch's decision still stands
        self._decided = 0  # rows that it was made for

        self._gained = 0.0  # ms that requests gained together, up to what one may lose
        self._rest = Rest()

    def use(self, greedy: CostTable, sampled: CostTable | None = None) -> None:
        """Decide by these costs of greedy and of sampled rounds; not called while a sequence has a row."""
        self.greedy, self.sampled, self.measured = greedy, sampled or greedy, True
        self._tables: dict[tuple[bool, int], CorrectedTable] = {}  # by (draws, size of the batch)
        self.table = self._costs(draws=False, batch=1)

    def start(self) -> RequestState:
        return RequestState(self._gained)

    def rests(self, sequences: Seq[Sequence]) -> bool:
        rests = self._rest.goes_on(sequences)
        if not rests and self._rest.passed:
            self._wake()
        return rests

    def decide(self, rows: Seq[Candidates]) -> list[Decision]:
        self._settle()
        draws = not all(row.sequence.params.greedy for row in rows)
        self.table = self._costs(draws, len(rows))
        self._rows, self._reads = sum(not row.idle for row in rows), []
        if self.table.wants_plain:
            for row in rows:
                _state(row).last = None
            return [PLAIN] * len(rows)
        plain = self.table.plain(len(rows))
        left = min(_state(row).left(plain) for row in rows if not row.idle)
        keys = [(*row.limits, *row.confidence.values()) for row in rows]
        standing = [_standing(row, key, left) for row, key in zip(rows, keys, strict=True)]
        if not all(standing):
            choices = [held or HeldDecision(PLAIN) for held in standing]
            for_as_many = self._stands >= 1 and len(rows) == self._decided
            if not for_as_many or self._loss(choices, plain) > max(left, 0.0):
                standing = [None] * len(rows)  # the batch's decision no longer stands
            self._decide_anew(rows, keys, standing, left, plain)
        self._stands -= 1
        decisions = [self._within(row, key) for row, key in zip(rows, keys, strict=True)]
        if any(decision.budget for decision in decisions):
            self._rest = Rest()
        elif not all(standing) and not any(row.idle for row in rows):
            rounds = min(self._wait(row) for row in rows) - LEAST  # before a trial, plain rounds are timed
            self._rest.begin(rounds, [row.sequence for row in rows])
        return decisions

    def _wait(self, row: Candidates) -> int:
        """Return the rounds in which no drafter of a row has to be looked at; 0 where one may pay soon."""
        rule, waits = _rule_of(row.sequence), [LONGEST_WAIT]
        for name in row.sequence.drafters:
            known = [each for ((own, _), by), each in self._pool.items() if (own, by) == (name, rule)]
            if name not in row.limits or name in row.confidence:  # what it proposes depends on the text
                waits += [each.wait if each.wait > FIRST_WAIT else 0 for each in known] or [0]
            elif self._may_pay(row, name):
                waits += [each.wait - each.waited for each in known if each.waited < each.wait]
            elif self.table.misses(name):
                waits += [TIMED_AFTER - each.waited for each in known if each.waited < TIMED_AFTER]
        return min(waits)

    def _wake(self) -> None:
        """Count the rounds of a rest, which were plain."""
        rounds, rows = self._rest.end()
        for sequence in rows:
            state: RequestState = sequence.policy_state
            state.spent += rounds * self.table.plain(len(rows))
            state.held.clear()
        for pooled in self._pool.values():
            pooled.waited += rounds
        self.table.skip(rounds)

    def learn(self, sequence: Sequence, outcome: Round, confidence: float | None) -> None:
        state: RequestState = sequence.policy_state
        if (last := state.last) is not None and last.estimate is not None:
            last.estimate.learn(outcome, last)
            last.rejected = 0 if outcome.accepted else last.rejected + 1
        self._round.append((state, outcome))

    def took(self, seconds: float) -> None:
        drafted, base = [_draft_of(each) for _, each in self._round], self.table.base
        names = {name for name, *_ in drafted if name is not None}
        # beside a drafter whose steps take time, guesses are columns of the pass as its own tokens are
        judged = {name for name in names if base.draft(name, len(drafted), 1)} or names
        if len(drafted) < self._rows or len(judged) > 1:
            return  # forced tokens, or two drafters: neither tells what one drafter takes
        # a round that takes longer than the costs corrects them, and is no loss of its requests
        self._believed_ms = round_ms(self.table, drafted)
        drafter = next(iter(judged), None)
        read_ms = 0.0 if drafter is None else sum(base.read(drafter, tokens) for tokens in self._reads)
        if reads := max(self._reads, default=0) >= TEXT:
            ms, judged_ms = self._believed_ms + read_ms, read_ms
        else:
            ms = round_ms(base, drafted) + read_ms
            judged_ms = ms - round_ms(base, [(None, tokens, siblings) for _, tokens, siblings in drafted])
            guesses = [(name, steps) for name, steps in steps_of(drafted).items() if name != drafter]
            ms += sum(self.table.draft(name, len(drafted), steps) for name, steps in guesses)
        self.table.learn(drafter, TimedRound(1e3 * seconds / ms, judged_ms / ms), reads)

    def why_plain(self, sequence: Sequence) -> str:
        state: RequestState = sequence.policy_state
        reasons: dict[str, str] = {}  # a drafter with several confidences is reported by the best
        for (name, _), known in sorted(state.estimates.items(), key=lambda each: each[1].acceptance.alpha):
            chance, ms = known.acceptance.rates(1)[0], round_ms(self.table, [(name, 1, 0)] * state.batch)
            speed = (1 + chance) * self.table.plain(state.batch) / ms
            reasons[name] = f"{name} at {speed:.2f} x plain decoding (acceptance {chance:.0%})"
        best = ", ".join(reasons.values())
        return f"no draft is expected to pay: {best}" if best else "no drafter had a proposal"

    def _costs(self, draws: bool, batch: int) -> CorrectedTable:
        """Return the costs of a batch, as far as the correction has seen batches of about that size."""
        base = self.sampled if draws else self.greedy
        return self._tables.setdefault((draws, batch.bit_length()), CorrectedTable(base))

    def _within(self, row: Candidates, key: Key) -> Decision:
        """Return the row's decision, cut to what the row may draft now."""
        state = _state(row)
        state.last = held = state.held[key] if key else None
        if held is None:
            return PLAIN
        held.rounds -= 1
        self._read_loss_ms += held.read_loss_ms
        held.read_loss_ms = 0.0
        name, budget, context, siblings = held.decision
        if name is None:
            return PLAIN
        self._reads.append(row.unread.get(name, 0) if context is None else context)
        budget = min(budget, row.limits[name])
        return Decision(name, budget, context, min(siblings, budget))

    def _decide_anew(
        self,
        rows: Seq[Candidates],
        keys: Seq[Key],
        standing: Seq[HeldDecision | None],
        left: float,
        plain: float,
    ) -> None:
        """Decide for rows of which no decision stands: the most tokens per ms within the cap."""
        choices, trial = self._paying(rows, standing, left, plain), 0
        if not any(standing):
            trial = self._try_another(rows, choices, left, plain)
            self._stands, self._decided = DECISION_ROUNDS, len(rows)
        loss = self._loss(choices, plain)
        rounds = max(1.0, min(left // loss, DECISION_ROUNDS)) if loss > 0 else DECISION_ROUNDS
        self._stands = min(self._stands, rounds)
        if trial and any(choice.alone for choice in choices):
            self._stands = min(self._stands, trial)  # where it succeeds, it goes on with the next decision
        for row, key, choice, stood in zip(rows, keys, choices, standing, strict=True):
            if stood is None:
                choice.rounds = min(rounds, trial) if choice.trial else rounds
                _state(row).held[key], _state(row).batch = choice, len(rows)

    def _paying(
        self, rows: Seq[Candidates], standing: Seq[HeldDecision | None], left: float, plain: float
    ) -> list[HeldDecision]:
        """Return the standing choices, and those beside them with the most tokens per ms within the cap."""
        if left < 0:
            return [stood or HeldDecision(PLAIN) for stood in standing]
        places = [at for at, stood in enumerate(standing) if stood is None]
        best = [self._best(rows[at], len(rows)) for at in places]
        choices = [stood or HeldDecision(PLAIN) for stood in standing]
        others = _together([(row, stood) for row, stood in zip(rows, standing, strict=True) if stood])
        limit = self.max_draft
        while limit:
            cut = [each and each._replace(survival=each.survival[:limit]) for each in best]
            for at, each, shape in zip(places, cut, best_budgets(self.table, cut, others), strict=True):
                choices[at] = (
                    self._hold(rows[at], each, shape) if each and shape.budget else HeldDecision(PLAIN)
                )
            read_loss_ms = sum(choice.read_loss_ms for choice in choices)
            if REJECTED_DRAFTS * (self._loss(choices, plain) - read_loss_ms) + read_loss_ms <= left:
                return choices
            limit //= 2
        return [stood or HeldDecision(PLAIN) for stood in standing]

    def _best(self, row: Candidates, batch: int) -> Candidate | None:
        """Return the drafter with the most tokens per ms for the rest of the request, if any may serve."""
        plain_rate, rest = batch / self.table.plain(batch), batch * row.sequence.remaining
        best, chosen = 0.0, None
        for name in row.limits:
            candidate, (_, read_ms, _) = self._candidate(row, name), self._reading(row, name)
            rate, shape = best_length(self.table, batch, candidate)
            if read_ms:
                rate = rest / (rest / rate + batch * read_ms)
                if not shape.budget or rate <= plain_rate:
                    continue
            if rate > best:
                best, chosen = rate, candidate
        return chosen

    def _try_another(
        self, rows: Seq[Candidates], choices: list[HeldDecision], left: float, plain: float
    ) -> int:
        """Start a trial of a drafter that was not chosen, if one is due; return its rounds, 0 where none is.

        One row tries it, or where no row drafts and it is unknown, as many as the cap bears: they share its
        steps.
        """
        drafts, tried = any(choice.decision.budget for choice in choices), None
        dear = set[str]()  # drafters of which one token is beyond the cap, in any row that drafts nothing
        for at, row in enumerate(rows):
            for name in row.limits:
                pooled = self._estimate(row, name).pooled
                due = name != choices[at].decision.drafter and pooled.waited >= pooled.wait
                hopeless = name in dear and not choices[at].decision.budget
                if not due or tried not in (None, name) or hopeless or not self._may_pay(row, name):
                    continue
                candidate = self._candidate(row, name)
                shape = best_length(self.table, 1, candidate)[1]
                for tried_shape in (shape if shape.budget else TreeShape(1), TreeShape(1)):
                    trial = self._hold(row, candidate, tried_shape, trial=True)
                    trial.alone = not drafts
                    if self._loss([*choices[:at], trial, *choices[at + 1 :]], plain) <= left:
                        choices[at], tried = trial, name
                        break
                else:
                    if not trial.read_loss_ms and not choices[at].decision.budget:
                        dear.add(name)
            if tried and (drafts or self._estimate(row, tried).pooled.acceptance.known):
                break
        if tried is None:
            return 0
        return 1 + LEAST if self.table.misses(tried) else 1

    def _may_pay(self, row: Candidates, name: str) -> bool:
        """Return whether a drafter would pay if it were always right, or has long waited to be timed."""
        certain = Candidate(name, (1.0,) * min(row.limits[name], self.max_draft))
        if best_length(self.table, 1, certain)[1].budget:
            return True
        return self._estimate(row, name).pooled.waited >= TIMED_AFTER and self.table.misses(name)

    def _loss(self, choices: Seq[HeldDecision], plain: float) -> float:
        """Return what a row loses in a round of these choices, in ms, if it gains nothing."""
        drafts = [(each.drafter, each.budget, each.siblings) for each in (held.decision for held in choices)]
        ms = round_ms(self.table, drafts)
        return ms - plain + sum(choice.read_loss_ms for choice in choices)

    def _hold(
        self, row: Candidates, candidate: Candidate, shape: TreeShape, trial: bool = False
    ) -> HeldDecision:
        name = candidate.drafter
        context, _, loss_ms = self._reading(row, name, trial)
        return HeldDecision(
            Decision(name, shape.budget, context, shape.siblings), estimate=self._estimate(row, name),
            trial=trial, read_loss_ms=loss_ms, candidate=candidate,
        )  # fmt: skip

    def _reading(self, row: Candidates, name: str, trial: bool = False) -> tuple[int | None, float, float]:
        """Return (`Decision.context`, ms of reading before the first draft, ms of it that count as loss)."""
        context, tokens = None, row.unread.get(name, 0)
        is_new = tokens == len(row.sequence.tokens) - 1
        is_chosen = not trial and self._estimate(row, name).pooled.acceptance.known
        if name in row.late and tokens > LATE_CONTEXT:
            may_take = READ_SHARE * self.table.plain(1) * row.sequence.remaining if is_chosen else 0.0
            if (whole := self.table.read(name, tokens)) > may_take:
                context = tokens = max(LATE_CONTEXT, int(tokens * may_take / whole))
        ms = self.table.read(name, tokens)
        return context, ms, 0.0 if is_new and (is_chosen or tokens <= LATE_CONTEXT) else ms

    def _candidate(self, row: Candidates, name: str) -> Candidate:
        length, acceptance = min(row.limits[name], self.max_draft), self._estimate(row, name).acceptance
        # A constraint takes time for every sibling, which no table knows.
        may_have = name in row.trees and row.sequence.constraint is None
        sibling = acceptance.sibling if may_have else 0.0
        return Candidate(name, acceptance.survival(length), sibling)

    def _estimate(self, row: Candidates, name: str) -> Estimate:
        """Return the request's own estimate of a drafter, which begins with the pooled one."""
        state, confidence = _state(row), row.confidence.get(name)
        source = name, confidence
        if source not in state.estimates:
            kind, assumed = (source, _rule_of(row.sequence)), confidence or PRIOR_ALPHA
            pooled = self._pool.setdefault(kind, Pooled(AcceptanceEstimate(self.max_draft, assumed=assumed)))
            state.estimates[source] = Estimate(AcceptanceEstimate(self.max_draft, pooled.acceptance), pooled)
        return state.estimates[source]

    def _settle(self) -> None:
        if not self._round:
            return
        batch, outcomes = len(self._round), [outcome for _, outcome in self._round]
        ms = round_ms(self.table, [_draft_of(each) for each in outcomes])
        ms = min(ms, self._believed_ms) + self._read_loss_ms
        plain, emitted = self.table.plain(batch), [1 + each.accepted + each.sibling for each in outcomes]
        smaller = (plain - self.table.plain(1)) / max(1, batch - 1)  # what a row adds to a plain step
        for (state, _), tokens in zip(self._round, emitted, strict=True):
            ahead = sum(max(0, others - tokens) for others in emitted)
            state.spent += ms
            state.lost += ms - plain * tokens - smaller * ahead
        self._gained = min(max(self._gained + plain * sum(emitted) / batch - ms, 0.0), LOSS_STEPS * plain)
        for pooled in self._pool.values():
            pooled.waited += 1
        self._round, self._read_loss_ms, self._believed_ms = [], 0.0, inf


def _draft_of(outcome: Round) -> tuple[str | None, int, int]:
    """Return (drafter, tokens, siblings) of one row's draft."""
    return outcome.drafter, outcome.drafted, outcome.siblings


def _rule_of(sequence: Sequence) -> str:
    """Return the rule that judges a sequence's drafts: each accepts another share of the same drafts."""
    return "greedy" if sequence.params.greedy else sequence.params.rule


def _state(row: Candidates) -> RequestState:
    state: RequestState = row.sequence.policy_state
    return state


def _standing(row: Candidates, key: Key, left: float) -> HeldDecision | None:
    """Return the row's decision if it still stands; left: what the batch may lose."""
    if not key:
        return HeldDecision(PLAIN)
    held = _state(row).held.get(key)
    if held is None or held.rounds < 1 or held.rejected >= REJECTED_DRAFTS:
        return None
    return held if left >= 0 or not held.decision.budget else None


def _together(standing: Seq[tuple[Candidates, HeldDecision]]) -> Others:
    """Return what rows draft whose decisions stand, as far as they may now."""
    tokens, columns, depths, siblings = 0.0, 0, dict[str, int](), False
    for row, held in standing:
        if held.candidate is None:
            continue
        name = held.candidate.drafter
        budget = min(held.decision.budget, row.limits.get(name, 0))
        shape = TreeShape(budget, min(held.decision.siblings, budget))
        tokens += held.candidate.tokens(shape)
        columns += sum(shape)
        depths[name] = max(depths.get(name, 0), budget)
        siblings |= shape.siblings > 0
    return Others(len(standing), tokens, columns, depths, siblings)
