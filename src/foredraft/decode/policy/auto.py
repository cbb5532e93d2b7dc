"""The cost model: drafts by whoever pays most, as far as one more token pays, down to no draft at all.

What a round takes comes from a `CostTable`, which nothing changes while a request runs, and how likely drafts
survive from what became of earlier ones (`Track`): of this request, and of others where it knows little. So
choices are a function of the table and of the outcomes. `budgets` has the equations.

Guesses cost, and a ledger bounds what they may. A request's loss is the time of its rounds, whoever drafted
in them, less a plain step for each token that they gave it. Nobody drafts unless the loss of every request in
the batch is at most `SHARE` of its time so far, and one round more: the largest that it has had, or a plain
step where a drafter is only tried again. So no request is held up much by drafts, its own or those of others.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from foredraft.decode.policy.budgets import Prospect, best_budgets, best_length, round_ms
from foredraft.decode.policy.costs import CostTable
from foredraft.decode.policy.protocol import PLAIN, Alone, Choice, Offers
from foredraft.decode.policy.survival import Track
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round

__all__ = ["Auto"]

SHARE = 0.015  # of its time that a request may lose by drafting, one round aside
FADES = 0.9, 0.98  # by which a request forgets a round, and all of them together
PATIENCE = 8, 128  # rounds until a drafter that was not chosen is tried again: at first, and at most
CONTENT = 6  # times as many, while another one pays
STANDS = 7, 3  # further rounds for which a choice stands, if nothing is drafted and if something is
MET, KNOWN = 2.0, 8.0  # rounds after which a drafter is not new any more, and is taken for what it seems


@dataclass(slots=True)
class _Candidate:
    """A drafter, as one request knows it. waited: rounds since it drafted, of `patience`."""

    track: Track
    waited: int = 0
    patience: int = PATIENCE[0]


@dataclass(slots=True, eq=False)
class _State:
    """A request's, in ms. spent, lost: of its rounds so far, and beyond what plain steps would have taken; of
    that, the first reading of texts is apart (`read`), since having read is no reason not to draft.
    largest: of a round. plain, round, reading: of the round that is running, without drafts, with them, and
    beside it. trial: it is a drafter's turn that was not chosen; silent: nobody would draft otherwise."""

    candidates: dict[str, _Candidate] = field(default_factory=dict)
    prospects: dict[tuple[str, int], Prospect] = field(default_factory=dict)  # until it learns more, as
    best: dict[tuple[str, int, int], tuple[float, int]] = field(default_factory=dict)  # what follows of them
    choice: Choice = PLAIN
    trial: bool = False
    silent: bool = False
    spent: float = 0.0
    lost: float = 0.0
    read: float = 0.0
    largest: float = 0.0
    plain: float = 0.0
    round: float = 0.0
    reading: float = 0.0

    def allows(self, credit: float, more: float = 0.0) -> bool:
        """Whether the ledger allows drafts that may lose so much more, beside the credit of one round."""
        return self.lost + more <= SHARE * self.spent + credit


class Auto(Alone):
    """max_draft: tokens at most. table: replaced while nothing runs, by `calibrate`."""

    name = "auto"
    weighs = True

    def __init__(self, max_draft: int, table: CostTable | None = None) -> None:
        self.max_draft = max_draft
        self.table = table or CostTable.assumed()
        self._shared: dict[str, Track] = {}
        self._rounds = 0  # for which these choices of these offers stand
        self._offered: list[tuple[object, ...]] = []
        self._choices: list[Choice] = []

    def start(self) -> _State:
        return _State()

    def choose(self, rows: Seq[Offers]) -> list[Choice]:
        offered = [(row.sequence.policy_state, *row.most) for row in rows]
        if self._rounds and offered == self._offered:  # nothing new enough to weigh it all again
            self._rounds -= 1
            return [_within(*pair) for pair in zip(rows, self._choices, strict=True)]
        choices = self._weighed(rows)
        drafts = any(choice.budget for choice in choices)
        turn = any(row.sequence.policy_state.trial for row in rows)
        read = any(self._reading(row, choice.drafter) for row, choice in zip(rows, choices, strict=True))
        self._rounds = 0 if turn or read else STANDS[drafts]
        self._offered, self._choices = offered, choices
        return choices

    def _weighed(self, rows: Seq[Offers]) -> list[Choice]:
        plain = self.table.verifying(len(rows), len(rows))
        states: list[_State] = [row.sequence.policy_state for row in rows]
        choices = [PLAIN] * len(rows)
        for state in states:
            state.trial = False
        if all(state.allows(state.largest) for state in states):
            choices = self._paying(rows, plain)
            again = self._readings(rows, choices)[1]
            if not all(state.allows(state.largest, again) for state in states):
                choices = [PLAIN] * len(rows)
        if all(state.allows(plain, state.read) for state in states):
            choices = self._turns(rows, choices, plain)
        ms = round_ms(self.table, choices) if any(choice.budget for choice in choices) else plain
        first, again = self._readings(rows, choices)
        for state, choice in zip(states, choices, strict=True):
            state.choice, state.largest = choice, max(state.largest, ms)
            state.plain, state.round, state.reading = plain, ms + again, first
        return choices

    def learn(self, sequence: Sequence, outcome: Round, sure: float | None) -> None:
        state: _State = sequence.policy_state
        state.spent += state.round + state.reading
        state.read += state.reading
        state.lost += state.round - state.plain * (1 + outcome.accepted)
        for candidate in state.candidates.values():
            candidate.waited += 1
        name = state.choice.drafter
        if name is None:
            return
        if not outcome.accepted:
            self._rounds = 0
        drafted = max(outcome.drafted, 1)  # one that had nothing to say was asked in vain
        candidate = state.candidates[name]
        candidate.track.learn(drafted, outcome.accepted)
        self._shared[name].learn(drafted, outcome.accepted)
        candidate.waited = 0
        candidate.patience = min(2 * candidate.patience, PATIENCE[1]) if state.trial else PATIENCE[0]
        if state.trial and state.silent and outcome.accepted:
            candidate.waited = candidate.patience  # what came back is looked at again at once
        state.prospects.clear()
        state.best.clear()

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
        for name in row.most:
            rate, length = self._length(row, name, batch)
            gain = 1 - batch / (plain * rate)
            if length and rate > best and self._may_read(row, name, plain, reading, gain):
                best, chosen = rate, name
        return chosen

    def _turns(self, rows: Seq[Offers], choices: list[Choice], plain: float) -> list[Choice]:
        """The choices, or instead of a row's a drafter that has waited long enough and might pay."""
        reading = sum(self._reading(row, choice.drafter) for row, choice in zip(rows, choices, strict=True))
        turns = []
        for row, choice in zip(rows, choices, strict=True):
            state: _State = row.sequence.policy_state
            name = self._waiting(row, choice, plain, reading)
            state.trial, state.silent = name is not None, not choice.budget
            if name is not None:
                choice = Choice(name, max(1, self._length(row, name, 1)[1]))
                reading += self._reading(row, name)
            turns.append(choice)
        return turns

    def _waiting(self, row: Offers, choice: Choice, plain: float, reading: float) -> str | None:
        state: _State = row.sequence.policy_state
        for name, most in row.most.items():
            candidate = self._candidate(row, name)
            met = choice.budget and self._shared[name].seen > MET
            patience = candidate.patience * (CONTENT if met else 1)
            if name == choice.drafter or candidate.waited < patience:
                continue
            perfect = Prospect(name, (1.0,) * min(most, self.max_draft))
            new = row.behind.get(name) == len(row.sequence.tokens) - 1
            needed = 0.0 if new else self._reading(row, name)
            if not state.allows(plain, state.read + reading + needed):
                continue
            if best_length(self.table, 1, perfect)[1] and self._may_read(row, name, plain, reading):
                return name
        return None

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
        state: _State = sequence.policy_state
        ahead = plain * sequence.remaining
        if gain is not None:
            if reading > gain * ahead:
                return False
            if self._shared[name].seen >= KNOWN:
                return True
        prompt = self.table.verifying(1, len(sequence.prompt))
        return state.lost + state.read + others + reading <= SHARE * (prompt + state.spent + ahead) + plain

    def _candidate(self, row: Offers, name: str) -> _Candidate:
        state: _State = row.sequence.policy_state
        if name not in state.candidates:
            shared = self._shared.setdefault(name, Track(self.max_draft, FADES[1]))
            state.candidates[name] = _Candidate(Track(self.max_draft, FADES[0], shared))
        return state.candidates[name]

    def _prospect(self, row: Offers, name: str) -> Prospect:
        state: _State = row.sequence.policy_state
        key = name, min(row.most[name], self.max_draft)
        if key not in state.prospects:
            state.prospects[key] = Prospect(name, self._candidate(row, name).track.survives(key[1]))
        return state.prospects[key]

    def _length(self, row: Offers, name: str, batch: int) -> tuple[float, int]:
        """Tokens per ms of a batch that drafts by it as this row would, and the draft's length."""
        state: _State = row.sequence.policy_state
        key = name, min(row.most[name], self.max_draft), batch
        if key not in state.best:
            state.best[key] = best_length(self.table, batch, self._prospect(row, name))
        return state.best[key]


def _within(row: Offers, choice: Choice) -> Choice:
    """The choice, as far as what the row is offered now."""
    most = row.most[choice.drafter] if choice.drafter is not None else 0
    return choice if choice.budget <= most else Choice(choice.drafter, most)
