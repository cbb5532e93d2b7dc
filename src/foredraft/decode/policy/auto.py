"""The cost model: drafts by whoever pays most, as far as one more token pays, down to no draft at all.

What a round takes comes from a `CostTable`, which nothing changes while a request runs, and how likely drafts
survive from what became of earlier ones (`Record`): of this request, and of others where it knows little. So
choices are a function of the table and of the outcomes. `weighing` makes them; `stopping` has the equations
by which a draft ends early where its drafter is unsure.

To weigh takes time itself, and to learn, so that a choice stands for some rounds, whose outcomes are learned
of when it ends; and while nobody drafts and nothing can change, nobody is asked.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from foredraft.decode.policy.candidates import NOBODY, Candidate, Made, Offered, Request
from foredraft.decode.policy.costs import CostTable
from foredraft.decode.policy.ledger import Ledger
from foredraft.decode.policy.protocol import PLAIN, Alone, Choice, Offers, Source
from foredraft.decode.policy.reliability import ASSUMED
from foredraft.decode.policy.stopping import Ends, ends, stops_of
from foredraft.decode.policy.weighing import Weighing
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round
from foredraft.model.runner import StopThresholds

__all__ = ["Auto"]

Heard = tuple[Request, Made, Choice, Round]

STANDS = 7  # further rounds for which a choice stands,
# one for which drafters had to read, since it may be the first that is heard of them, and at least one by
# which somebody in a batch may lose more than it should
SOON = 2
HOPED = 0.8  # as `ASSUMED`, of a drafter that is met in a batch, where one round tells of several rows
FRESH = 4  # rounds that need not be learned of yet where something is on offer that was not weighed before


class Auto(Alone):
    """max_draft: tokens at most. table: replaced while nothing runs, by `calibrate`."""

    name = "auto"
    weighs = True

    def __init__(self, max_draft: int, table: CostTable | None = None) -> None:
        self.max_draft = max_draft
        self.table = table or CostTable.assumed()
        self.ledger = Ledger()
        self._shared: dict[tuple[Source, bool], Candidate] = {}
        self._batch = 1
        self._stops: dict[tuple[object, ...], StopThresholds] = {}  # until more is learned: of a batch,
        self._ends: dict[tuple[int, str], Ends] = {}  # and of a row in it
        # of each round that is not yet learned of: ms read before it (`Weighing.readings`), and its rows
        self._heard: list[tuple[tuple[float, float], list[Heard]]] = []
        self._silent: list[Sequence] = []  # none of whom is to draft,
        self._rested = 0  # for so many rounds that nobody was asked about

    def start(self) -> Request:
        return Request()

    def rests(self, sequences: Seq[Sequence]) -> bool:
        """A choice not to draft stands for some rounds, which are to take no time, if all who may draft were
        weighed for it, and none of them tells before how sure it is: it may be surer in the next."""
        if not self._silent or self._silent != sequences:
            return False
        made = [sequence.policy_state.last for sequence in sequences]
        if any(each.left < 1 for each in made):
            return False
        for each in made:
            each.left -= 1
        self._rested += 1
        return True

    def choose(self, rows: Seq[Offers]) -> list[Choice]:
        """A row has a choice for everything that it is offered at times, each of which stands for some rounds
        of its own, or until drafts of half the rows fail: what came of one says little of another."""
        self._batch = len(rows)
        states: list[Request] = [row.sequence.policy_state for row in rows]
        if 2 * sum(state.last.lost for state in states) >= len(rows):
            for state in states:
                state.last.left = 0
        offered = [(*row.most, *row.sure.values()) for row in rows]
        pairs = zip(states, offered, strict=True)
        asking = [(s, o) for s, o in pairs if o and s.made.get(o, NOBODY).left < 1]
        read = 0.0, 0.0
        if asking:  # a request begins, a choice has ended, or what is on offer is new
            read = self._weigh(rows, offered, any(not s.made or o in s.made for s, o in asking))
        self._heard.append((read, []))
        for row, state, offer in zip(rows, states, offered, strict=True):
            state.last, state.choice = NOBODY, PLAIN
            if offer:
                made = state.last = state.made[offer]
                made.left -= 1
                state.choice = _within(row, made.choice)
        return [state.choice for state in states]

    def learn(self, sequence: Sequence, outcome: Round, sure: float | None) -> None:
        """Nothing yet: what a choice came to is only looked at when it ends (`_weigh`)."""
        state: Request = sequence.policy_state
        if state.choice.budget:
            state.last.failed = 0 if outcome.accepted else state.last.failed + 1
        self._heard[-1][1].append((state, state.last, state.choice, outcome))

    def _weigh(self, rows: Seq[Offers], offered: Seq[Offered], due: bool) -> tuple[float, float]:
        """Choices that stand for some rounds; ms that drafters read for them. due: whether what was heard is
        learned of before, as it is if much was."""
        if learned := due or self._rested > 0 or len(self._heard) >= FRESH:
            self._learn()
        weighing = Weighing(self.table, self.ledger, self.max_draft, self._candidate, rows)
        choices = weighing.choices()
        read = weighing.readings(choices)
        drafts, further = any(choice.budget for choice in choices), float(STANDS)
        if any(weighing.trial):
            further = 0
        elif any(read):
            further = SOON
        if drafts and len(rows) > 1:  # one that gains nothing does not end a choice that others gain by
            further = min(further, max(weighing.bears(choices) - 1, SOON))
        self._silent = []
        decoding = [row for row in rows if not row.idle]
        if not drafts and not any(row.sure or len(row.most) < len(row.sequence.drafters) for row in decoding):
            self._silent = [row.sequence for row in decoding]
            further = max(further, weighing.until_turn() - 1)
        rate = weighing.promised(choices) if drafts else 0.0
        for place, (row, offer, choice) in enumerate(zip(rows, offered, choices, strict=True)):
            trial, silent = weighing.trial[place], weighing.silent[place]
            made = Made(choice, trial=trial, silent=silent, rate=rate, left=1 + further)
            if (name := choice.drafter) is not None:
                made.candidate, made.fragile = self._candidate(row, name), weighing.fragile(row, name)
            if offer:
                row.sequence.policy_state.made[offer] = made
        if learned:
            self._stops.clear()
            self._ends.clear()
        return read

    def _learn(self) -> None:
        """Of all rounds since it last did."""
        for read, heard in self._heard:
            rows = [(state.account, choice.drafter, outcome) for state, _, choice, outcome in heard]
            self.ledger.settle(self.table, rows, *read)
            for state, made, choice, outcome in heard:
                state.learn(made, choice, outcome, self.max_draft)
        self._heard.clear()
        if self._rested:
            plain = self.table.verifying(len(self._silent), len(self._silent))
            for sequence in self._silent:
                sequence.policy_state.rest(self._rested, plain)
            self.ledger.rest(self._rested, plain)
            self._rested = 0

    def stops(self, sequences: Seq[Sequence], budgets: Seq[int], device: torch.device) -> StopThresholds:
        drafting = [s if budget else None for s, budget in zip(sequences, budgets, strict=True)]
        who = tuple(None if s is None else _told_apart(s) for s in drafting)
        if (key := (who, max(budgets))) not in self._stops:
            sharing = len(drafting) - drafting.count(None)
            rows = [None if s is None else self._ends_of(s, sharing) for s in drafting]
            self._stops[key] = stops_of(rows, max(budgets), device)
        return self._stops[key]

    def _ends_of(self, sequence: Sequence, sharing: int) -> Ends:
        """Of the longest draft, found when so many rows or more shared the drafter's steps."""
        state: Request = sequence.policy_state
        name, made = state.choice.drafter, state.last
        if made.in_silence or name is None or made.candidate is None:
            return Ends.never(self.max_draft)
        if (key := (sequence.id, name)) not in self._ends:
            most, record = self.max_draft, made.candidate.record
            self._ends[key] = ends(self.table, name, self._batch, sharing, made.rate, record, most)
        return self._ends[key]

    def _candidate(self, row: Offers, name: str) -> Candidate:
        state: Request = row.sequence.policy_state
        source = row.source(name)
        if (found := state.candidates.get(source)) is None:
            kind = source, row.sequence.params.temperature == 0
            if kind not in self._shared:
                assumed = row.sure.get(name, HOPED if self._batch > 1 else ASSUMED)
                self._shared[kind] = Candidate.of(self.max_draft, assumed=assumed)
            found = state.candidates[source] = Candidate.of(self.max_draft, self._shared[kind])
        found.renew()
        return found


def _told_apart(sequence: Sequence) -> tuple[int, str | None, bool]:
    """By what differs in where drafts end, as long as no more is learned."""
    state: Request = sequence.policy_state
    return sequence.id, state.choice.drafter, state.last.in_silence


def _within(row: Offers, choice: Choice) -> Choice:
    """As far as what the row is offered now."""
    if choice.drafter is None or choice.budget <= row.most[choice.drafter]:
        return choice
    return choice._replace(budget=row.most[choice.drafter])
