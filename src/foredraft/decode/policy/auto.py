"""The cost model: drafts by whoever pays most, as far as one more token pays, down to no draft at all.

What a round takes comes from a `CostTable`, which nothing changes while a request runs, and how likely drafts
survive from what became of earlier ones (`Record`): of this request, and of others where it knows little. So
choices are a function of the table and of the outcomes. `budgets` has the equations; `stopping`, those by
which a draft ends early where its drafter is unsure.

Guesses cost, and a `Ledger` bounds what they may. Nobody drafts unless the loss of every request in
the batch is at most `SHARE` of its time so far, and one round more: the largest that it has had, or a plain
step where a drafter is only tried again. So no request is held up much by drafts, its own or those of others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch

from foredraft.decode.policy.budgets import Prospect, best_budgets, best_length
from foredraft.decode.policy.candidates import Candidate, Request
from foredraft.decode.policy.costs import CostTable
from foredraft.decode.policy.ledger import SHARE, Account, Ledger
from foredraft.decode.policy.protocol import PLAIN, Alone, Choice, Offers
from foredraft.decode.policy.stopping import Ends, ends, stops_of
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round
from foredraft.model.runner import Stops

__all__ = ["Auto"]

SURE = 1.05  # by how much more a drafter that has to read first must promise
STANDS = 7  # further rounds for which a choice stands
KNOWN = 8.0  # rounds after which a drafter is taken for what it seems


class Auto(Alone):
    """max_draft: tokens at most. table: replaced while nothing runs, by `calibrate`."""

    name = "auto"
    weighs = True

    def __init__(self, max_draft: int, table: CostTable | None = None) -> None:
        self.max_draft = max_draft
        self.table = table or CostTable.assumed()
        self.ledger = Ledger()
        self._shared: dict[tuple[str, bool], Candidate] = {}
        self._rounds = 0.0  # for which these choices of these offers stand, while fewer than half of the rows
        self._failed = 0  # were drafted for in vain in the last one
        self._offered: list[tuple[object, ...]] = []
        self._choices: list[Choice] = []
        self._rate = 0.0  # tokens per ms that they promise
        self._stops: dict[tuple[object, ...], Stops] = {}  # of that rate,
        self._age = 0  # for so many rounds
        self._heard: list[list[tuple[Request, Round]]] = []  # of the rounds since, what is not yet learned of
        self._read = 0.0, 0.0  # in the first of these (`_readings`)
        self._silent: list[Sequence] = []  # none of whom drafts,
        self._rested = 0  # for so many rounds that nobody was asked about

    def start(self) -> Request:
        return Request()

    def rests(self, sequences: Seq[Sequence]) -> bool:
        """A choice not to draft stands for some rounds, which are to take no time, if all who may draft were
        weighed for it: one that had nothing to say may have in the next."""
        if self._rounds < 1 or self._silent != sequences:
            return False
        self._rounds -= 1
        self._rested += 1
        return True

    def choose(self, rows: Seq[Offers]) -> list[Choice]:
        offered = [(row.sequence.policy_state, *row.most) for row in rows]
        self._age += 1
        failed, self._failed = self._failed, 0
        if self._rounds >= 1 and offered == self._offered and 2 * failed < len(rows):  # nothing new enough
            self._rounds -= 1
            self._heard.append([])
            return [_within(*pair) for pair in zip(rows, self._choices, strict=True)]
        self._learn()
        choices = self._weighed(rows)
        drafts = any(choice.budget for choice in choices)
        turn = any(row.sequence.policy_state.trial for row in rows)
        self._heard.append([])
        self._read = self._readings(rows, choices)
        self._rounds = 0 if turn or any(self._read) else STANDS
        changed = turn or (offered, choices) != (self._offered, self._choices)
        self._offered, self._choices = offered, choices
        weighed = all(len(row.most) == len(row.sequence.drafters) for row in rows)
        self._silent = []
        if weighed and not drafts:
            self._silent = [row.sequence for row in rows]
            plain = self.table.verifying(len(rows), len(rows))
            self._rounds = max(self._rounds, self._until_turn(rows, plain) - 1)
        if changed or self._age > STANDS:  # what is learned meanwhile moves them little
            self._rate = self._promised(rows, choices) if drafts else 0.0
            self._stops.clear()
            self._age = STANDS if turn else 0
        return choices

    def learn(self, sequence: Sequence, outcome: Round, sure: float | None) -> None:
        """Nothing yet: what a choice came to is only looked at when it does not stand any more."""
        state: Request = sequence.policy_state
        self._failed += state.choice.drafter is not None and not outcome.accepted
        self._heard[-1].append((state, outcome))

    def _learn(self) -> None:
        """Of all rounds since choices were weighed."""
        for heard in self._heard:
            rows = [(state.account, state.choice.drafter, outcome) for state, outcome in heard]
            self.ledger.settle(self.table, rows, *self._read)
            self._read = 0.0, 0.0
            for state, outcome in heard:
                state.learn(outcome, self.max_draft)
        self._heard.clear()
        if self._rested:
            plain = self.table.verifying(len(self._silent), len(self._silent))
            for sequence in self._silent:
                sequence.policy_state.rest(self._rested, plain)
            self._rested = 0

    def _weighed(self, rows: Seq[Offers]) -> list[Choice]:
        plain = self.table.verifying(len(rows), len(rows))
        states: list[Request] = [row.sequence.policy_state for row in rows]
        choices = [PLAIN] * len(rows)
        for state in states:
            state.trial = False
        if all(state.account.allows(state.account.largest) for state in states):
            choices = self._paying(rows, plain)
            again = self._readings(rows, choices)[1]
            if not all(state.account.allows(state.account.largest, again) for state in states):
                choices = [PLAIN] * len(rows)
        if all(state.account.allows(plain, state.account.read) for state in states):
            choices = self._turns(rows, choices, plain)
        for state, choice in zip(states, choices, strict=True):
            state.choice = choice
        return choices

    def stops(self, sequences: Seq[Sequence], budgets: Seq[int], device: torch.device) -> Stops:
        key = tuple(sequence.id for sequence in sequences), tuple(budgets)
        if key not in self._stops:
            drafting = [(s, budget) for s, budget in zip(sequences, budgets, strict=True) if budget]
            rows = {id(s): self._ends(s, budget, len(drafting)) for s, budget in drafting}
            self._stops[key] = stops_of([rows.get(id(s)) for s in sequences], max(budgets), device)
        return self._stops[key]

    def _ends(self, sequence: Sequence, budget: int, sharing: int) -> Ends:
        state: Request = sequence.policy_state
        name = state.choice.drafter
        if state.trial or name is None:
            return Ends.never(budget)
        record, batch = state.candidates[name].record, len(self._choices)
        return ends(self.table, name, batch, sharing, self._rate, record, budget)

    def _paying(self, rows: Seq[Offers], plain: float) -> list[Choice]:
        """For each row the drafter that pays most, and the budgets at which all of them together do."""
        names: list[str | None] = []
        reading = 0.0
        for row in rows:
            names.append(self._best(row, plain, len(rows), reading))
            reading += self._reading(row, names[-1])
        if len(rows) == 1:
            budgets = [0 if names[0] is None else self._length(rows[0], names[0], 1)[1]]
        else:
            pairs = zip(rows, names, strict=True)
            prospects = [None if name is None else self._prospect(row, name) for row, name in pairs]
            budgets = best_budgets(self.table, prospects)
        return [Choice(*pair) if pair[1] else PLAIN for pair in zip(names, budgets, strict=True)]

    def _best(self, row: Offers, plain: float, batch: int, reading: float) -> str | None:
        """reading: ms that the rows before this one need already."""
        best, chosen = batch / plain, None
        remaining = batch * row.sequence.remaining
        for name in row.most:
            rate, length = self._length(row, name, batch)
            gain = 1 - batch / (plain * rate)
            if own := self._reading(row, name):  # worth it for the rest of the text, and by more than chance
                rate = remaining / (remaining / rate + own) / SURE
            if length and rate > best and self._may_read(row, name, plain, reading, gain):
                best, chosen = rate, name
        return chosen

    def _promised(self, rows: Seq[Offers], choices: list[Choice]) -> float:
        """Tokens per ms of the batch, by what its drafters are known for."""
        batch, tokens, columns = len(rows), 0.0, float(len(rows))
        depths: dict[str, float] = {}
        for row, (name, budget) in zip(rows, choices, strict=True):
            if name is None or not budget:
                tokens += 1
                continue
            paced = self._candidate(row, name).record.pace.mean()
            chosen = budget < min(row.most[name], self.max_draft)  # by position (`_length`)
            if paced is None or chosen or row.sequence.policy_state.trial:
                paced = 1 + sum(self._prospect(row, name).survives[:budget]), budget, budget
            tokens += paced[0]
            columns += paced[1]
            depths[name] = max(depths.get(name, 0.0), paced[2])
        steps = sum(self.table.drafting(name, batch, depth) for name, depth in depths.items())
        rate = tokens / (self.table.verifying(batch, round(columns)) + steps)
        return max(rate, batch / self.table.verifying(batch, batch))

    def _turns(self, rows: Seq[Offers], choices: list[Choice], plain: float) -> list[Choice]:
        """The choices, or instead of a row's a drafter that has waited long enough and might pay."""
        reading = sum(self._reading(row, choice.drafter) for row, choice in zip(rows, choices, strict=True))
        turns = []
        for row, choice in zip(rows, choices, strict=True):
            state: Request = row.sequence.policy_state
            name = self._waiting(row, choice, plain, reading)
            state.trial, state.silent = name is not None, not choice.budget
            if name is not None:
                choice = Choice(name, max(1, best_length(self.table, 1, self._prospect(row, name))[1]))
                reading += self._reading(row, name)
            turns.append(choice)
        return turns

    def _waiting(self, row: Offers, choice: Choice, plain: float, reading: float) -> str | None:
        others = (name for name in row.most if name != choice.drafter)
        return next((name for name in others if self._until(row, name, choice, plain, reading) <= 0), None)

    def _until(self, row: Offers, name: str, choice: Choice, plain: float, reading: float) -> float:
        """Plain rounds until it is the turn of a drafter that was not chosen, as far as one can tell; without
        end if it may not read or could not pay. reading: ms that others read before it."""
        own = self._reading(row, name)
        if (left := self._candidate(row, name).left(choice, own)) > 0:
            return left
        perfect = Prospect(name, (1.0,) * min(row.most[name], self.max_draft))
        if not best_length(self.table, 1, perfect)[1] or not self._may_read(row, name, plain, reading):
            return math.inf
        account: Account = row.sequence.policy_state.account
        if row.behind.get(name) == len(row.sequence.tokens) - 1:
            own = 0.0  # its first reading: that is apart
        elif own > SHARE * plain * row.sequence.remaining:
            return math.inf
        return account.until(plain, account.read + reading + own, plain)

    def _until_turn(self, rows: Seq[Offers], plain: float) -> float:
        """Plain rounds until there is something to decide again, while nobody drafts."""
        accounts: list[Account] = [row.sequence.policy_state.account for row in rows]
        if frozen := max(account.until(account.largest, 0.0, plain) for account in accounts):
            return frozen
        return min(self._until(row, name, PLAIN, plain, 0.0) for row in rows for name in row.most)

    def _reading(self, row: Offers, name: str | None) -> float:
        """ms until it has read what it has not."""
        return 0.0 if name is None else self.table.reading(name, row.behind.get(name, 0))

    def _readings(self, rows: Seq[Offers], choices: list[Choice]) -> tuple[float, float]:
        """ms that drafters read before they can draft: texts that are new to them, and what they missed."""
        first = again = 0.0
        for row, choice in zip(rows, choices, strict=True):
            reading = self._reading(row, choice.drafter)
            if reading and row.behind[choice.drafter or ""] == len(row.sequence.tokens) - 1:
                first += reading
            else:
                again += reading
        return first, again

    def _may_read(
        self, row: Offers, name: str, plain: float, others: float, gain: float | None = None
    ) -> bool:
        """Whether it may read what it has not, for the share of a plain step that its drafts then save.

        That must be saved again in the rest of the text; and while the drafter is not known well, the ledger
        must allow it, as it will be when the text has all the tokens that were asked for. others: ms that
        other rows read in this round.
        """
        reading = self._reading(row, name)
        if not reading:
            return True
        sequence = row.sequence
        account: Account = sequence.policy_state.account
        ahead = plain * sequence.remaining
        if gain is not None:
            if reading > gain * ahead:
                return False
            if self._candidate(row, name).known.seen >= KNOWN:
                return True
        whole = self.table.verifying(1, len(sequence.prompt)) + account.spent + ahead
        return self.ledger.may_read(account, others + reading, whole, plain)

    def _candidate(self, row: Offers, name: str) -> Candidate:
        state: Request = row.sequence.policy_state
        if name not in state.candidates:
            kind = name, row.sequence.params.temperature == 0
            if kind not in self._shared:
                self._shared[kind] = Candidate.of(self.max_draft)
            state.candidates[name] = Candidate.of(self.max_draft, self._shared[kind])
        return state.candidates[name]

    def _prospect(self, row: Offers, name: str) -> Prospect:
        state: Request = row.sequence.policy_state
        key = name, min(row.most[name], self.max_draft)
        if key not in state.prospects:
            state.prospects[key] = Prospect(name, self._candidate(row, name).record.track.survives(key[1]))
        return state.prospects[key]

    def _length(self, row: Offers, name: str, batch: int) -> tuple[float, int]:
        """Tokens per ms of a batch that drafts by it as this row would, and the draft's length: the one that
        is best by position, or the longest, where drafts that stop by themselves have done better."""
        state: Request = row.sequence.policy_state
        key = name, min(row.most[name], self.max_draft), batch
        if key not in state.best:
            best = best_length(self.table, batch, self._prospect(row, name))
            paced = self._candidate(row, name).record.pace.mean()
            if paced is not None:
                tokens, drafted, steps = paced
                ms = self.table.verifying(batch, round(batch * (1 + drafted)))
                rate = batch * tokens / (ms + self.table.drafting(name, batch, steps))
                best = max(best, (rate, key[1]))
            state.best[key] = best
        return state.best[key]


def _within(row: Offers, choice: Choice) -> Choice:
    """The choice, as far as what the row is offered now."""
    most = row.most[choice.drafter] if choice.drafter is not None else 0
    return choice if choice.budget <= most else Choice(choice.drafter, most)
