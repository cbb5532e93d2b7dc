"""The cost model: drafts by whoever pays most, as far as one more token pays, down to no draft at all.

What a round takes comes from a `CostTable`, which nothing changes while a request runs, and how likely drafts
survive from what became of earlier ones (`Record`): of this request, and of others where it knows little. So
choices are a function of the table and of the outcomes. `weighing` makes them; `stopping` has the equations
by which a draft ends early where its drafter is unsure.

To weigh takes time itself, so that a choice stands for some rounds, whose outcomes are learned of when the
next one is made; and while nobody drafts and nothing can change, nobody is asked.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from foredraft.decode.policy.candidates import NOBODY, Candidate, Made, Request
from foredraft.decode.policy.costs import CostTable
from foredraft.decode.policy.ledger import Ledger
from foredraft.decode.policy.protocol import Alone, Choice, Offers, Source
from foredraft.decode.policy.reliability import ASSUMED
from foredraft.decode.policy.stopping import Ends, ends, stops_of
from foredraft.decode.policy.weighing import Weighing
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round
from foredraft.model.runner import Stops

__all__ = ["Auto"]

Heard = tuple[Request, Made, Round]

STANDS = 7  # further rounds for which a choice stands,
# one for which drafters had to read, since it may be the first that is heard of them, and at least one by
# which somebody in a batch may lose more than it should
SOON = 2


class Auto(Alone):
    """max_draft: tokens at most. table: replaced while nothing runs, by `calibrate`."""

    name = "auto"
    weighs = True

    def __init__(self, max_draft: int, table: CostTable | None = None) -> None:
        self.max_draft = max_draft
        self.table = table or CostTable.assumed()
        self.ledger = Ledger()
        self._shared: dict[tuple[Source, bool], Candidate] = {}
        self._made: dict[tuple[object, ...], Made] = {}  # by request and by who had what to offer
        self._rounds = 0.0  # for which these stand, while fewer than half of the rows
        self._failed = 0  # lost a choice that is fragile in the last one
        self._batch = 1
        self._rate = 0.0  # tokens per ms that they promise
        self._stops: dict[tuple[object, ...], Stops] = {}  # of that rate: of a batch,
        self._ends: dict[tuple[int, str], Ends] = {}  # and of a row in it
        self._heard: list[list[Heard]] = []  # of the rounds since, what is not yet learned of
        self._read = 0.0, 0.0  # in the first of these (`Weighing.readings`)
        self._silent: list[Sequence] = []  # none of whom drafts,
        self._rested = 0  # for so many rounds that nobody was asked about

    def start(self) -> Request:
        return Request()

    def rests(self, sequences: Seq[Sequence]) -> bool:
        """A choice not to draft stands for some rounds, which are to take no time, if all who may draft were
        weighed for it, and none of them tells before how sure it is: it may be surer in the next."""
        if self._rounds < 1 or self._silent != sequences:
            return False
        self._rounds -= 1
        self._rested += 1
        return True

    def choose(self, rows: Seq[Offers]) -> list[Choice]:
        offered = [(row.sequence.policy_state, *row.most, *row.sure.values()) for row in rows]
        failed, self._failed = self._failed, 0
        if self._rounds < 1 or 2 * failed >= len(rows):
            self._made.clear()
        self._batch = len(rows)
        if any(row.most and offer not in self._made for row, offer in zip(rows, offered, strict=True)):
            self._weigh(rows, offered, anew=not self._made)
        else:
            self._rounds -= 1
        self._heard.append([])
        for row, offer in zip(rows, offered, strict=True):
            row.sequence.policy_state.made = _within(row, self._made.get(offer, NOBODY))
        return [row.sequence.policy_state.made.choice for row in rows]

    def learn(self, sequence: Sequence, outcome: Round, sure: float | None) -> None:
        """Nothing yet: what a choice came to is only looked at when the next one is made."""
        state: Request = sequence.policy_state
        self._failed += state.made.fragile and not outcome.accepted
        self._heard[-1].append((state, state.made, outcome))

    def _weigh(self, rows: Seq[Offers], offered: Seq[tuple[object, ...]], *, anew: bool) -> None:
        """Choices that stand for some rounds, beside those that stand already or anew."""
        self._learn()
        weighing = Weighing(self.table, self.ledger, self.max_draft, self._candidate, rows)
        choices = weighing.choices()
        for offer, row, choice in zip(offered, rows, choices, strict=True):
            self._made[offer] = NOBODY
            if (name := choice.drafter) is not None:
                self._made[offer] = Made(choice, self._candidate(row, name), weighing.fragile(row, name))
        self._read = weighing.readings(choices)
        turn = any(row.sequence.policy_state.trial for row in rows)
        if anew or turn:
            self._rounds = 0 if turn else SOON if any(self._read) else STANDS
        drafts = any(choice.budget for choice in choices)
        if drafts:  # one that gains nothing does not end a choice that others gain by; and none stands for as
            # long as one not to draft, beside which it may be made
            bears = weighing.bears(choices) - 1 if len(rows) > 1 else STANDS
            self._rounds = min(self._rounds, STANDS, max(bears, SOON))
        self._silent = []
        if not drafts and not any(row.sure or len(row.most) < len(row.sequence.drafters) for row in rows):
            self._silent = [row.sequence for row in rows]
            self._rounds = max(self._rounds, weighing.until_turn() - 1)
        if drafts and (anew or turn or not self._rate):
            self._rate = weighing.promised(choices)
            self._stops.clear()
            self._ends.clear()

    def _learn(self) -> None:
        """Of all rounds since choices were made."""
        for heard in self._heard:
            rows = [(state.account, made.choice.drafter, outcome) for state, made, outcome in heard]
            self.ledger.settle(self.table, rows, *self._read)
            self._read = 0.0, 0.0
            for state, made, outcome in heard:
                state.learn(made, outcome, self.max_draft)
        self._heard.clear()
        if self._rested:
            plain = self.table.verifying(len(self._silent), len(self._silent))
            for sequence in self._silent:
                sequence.policy_state.rest(self._rested, plain)
            self.ledger.rest(self._rested, plain)
            self._rested = 0

    def stops(self, sequences: Seq[Sequence], budgets: Seq[int], device: torch.device) -> Stops:
        drafting = [s if budget else None for s, budget in zip(sequences, budgets, strict=True)]
        who = tuple(s and (s.id, s.policy_state.made.choice.drafter) for s in drafting)
        if (key := (who, max(budgets))) not in self._stops:
            sharing = len(drafting) - drafting.count(None)
            rows = [None if s is None else self._ends_of(s, sharing) for s in drafting]
            self._stops[key] = stops_of(rows, max(budgets), device)
        return self._stops[key]

    def _ends_of(self, sequence: Sequence, sharing: int) -> Ends:
        """Of the longest draft, found when so many rows or more shared the drafter's steps."""
        state: Request = sequence.policy_state
        (name, *_), candidate, _ = state.made
        if state.trial or name is None or candidate is None:
            return Ends.never(self.max_draft)
        if (key := (sequence.id, name)) not in self._ends:
            most, record = self.max_draft, candidate.record
            self._ends[key] = ends(self.table, name, self._batch, sharing, self._rate, record, most)
        return self._ends[key]

    def _candidate(self, row: Offers, name: str) -> Candidate:
        state: Request = row.sequence.policy_state
        source = row.source(name)
        if (found := state.candidates.get(source)) is None:
            kind = source, row.sequence.params.temperature == 0
            if kind not in self._shared:
                self._shared[kind] = Candidate.of(self.max_draft, assumed=row.sure.get(name, ASSUMED))
            found = state.candidates[source] = Candidate.of(self.max_draft, self._shared[kind])
        return found


def _within(row: Offers, made: Made) -> Made:
    """The choice, as far as what the row is offered now."""
    name, budget, _ = made.choice
    if name is None or budget <= row.most[name]:
        return made
    return made._replace(choice=made.choice._replace(budget=row.most[name]))
