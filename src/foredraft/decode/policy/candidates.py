"""Candidates: what a request knows of those that may draft for it, and when it tries one again."""

from __future__ import annotations

from dataclasses import dataclass, field

from foredraft.decode.policy.budgets import Prospect
from foredraft.decode.policy.ledger import Account
from foredraft.decode.policy.protocol import PLAIN, Choice, Source
from foredraft.decode.policy.reliability import ASSUMED
from foredraft.decode.policy.survival import KNOWN, MET, Record
from foredraft.decode.stats import Round

__all__ = ["NOBODY", "Candidate", "Made", "Offered", "Request"]

PATIENCE = 8, 128  # rounds until a drafter that was not chosen is tried again: at first, and at most
CONTENT = 6  # times as many of one that is known while another one pays, and again if it has to read first,
LONGEST = 128, 256  # and at most so many


@dataclass(slots=True)
class Candidate:
    """A drafter, as one request knows it, or all (`shared`); apart for how sure it is, where it tells before.
    waited: rounds since it drafted, of `patience`, which counts for nothing if it is to be looked at `again`.
    prospects, best: what follows of all that is known, by the longest draft, and by that and the batch; found
    when any request had `learned` of it so many times."""

    record: Record
    shared: Candidate | None = None
    waited: int = 0
    patience: int = PATIENCE[0]
    again: bool = False
    prospects: dict[int, Prospect] = field(default_factory=dict)
    best: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)
    learned: int = 0

    @classmethod
    def of(cls, most: int, shared: Candidate | None = None, assumed: float = ASSUMED) -> Candidate:
        """Of drafts of `most` tokens at most; assumed: as of a `Record`, where nobody knows more."""
        if shared is None:
            return cls(Record(most, assumed=assumed))
        return cls(Record(most, shared.record), shared, shared.waited, shared.patience, shared.again)

    def renew(self) -> None:
        """Forget what followed from less than is known by now, since others' drafts tell of it too."""
        if self.shared is not None and self.learned != self.shared.learned:
            self.learned = self.shared.learned
            self.prospects.clear()
            self.best.clear()

    @property
    def known(self) -> Record:
        """Of all requests."""
        return self.record if self.shared is None else self.shared.record

    @property
    def is_known(self) -> bool:
        """Whether it is taken for what it seems."""
        return self.known.seen >= KNOWN

    @property
    def is_met(self) -> bool:
        """Whether it is not new any more."""
        return self.known.seen > MET

    def left(self, choice: Choice, reading: float) -> int:
        """Rounds until it may be tried again beside what was chosen; reading: what it has to before that."""
        patience = self.patience
        if self.again:
            patience = 0
        elif self.is_met:
            patience = min(patience * CONTENT ** (bool(choice.budget) + bool(reading)), LONGEST[reading > 0])
        return patience - self.waited

    def wait(self, rounds: int = 1) -> None:
        self.waited += rounds
        if self.shared is not None:
            self.shared.waited = self.waited

    def drafted(self, outcome: Round, *, trial: bool, paced: bool) -> None:
        self.record.learn(outcome, paced=paced)
        self.waited = 0
        self.patience = min(2 * self.patience, PATIENCE[1]) if trial else PATIENCE[0]
        if self.shared is not None:
            self.shared.record.learn(outcome, paced=paced)
            self.shared.learned += 1
            self.shared.waited, self.shared.patience = 0, self.patience


@dataclass(slots=True, eq=False)
class Made:
    """A choice, for one row. candidate: whose; trial: because it is the turn of one that was not chosen;
    silent: nobody would otherwise. rate: tokens per ms of the batch that it promises. fragile: so many drafts
    in a row of which nothing is kept end it; 0: none do. left: rounds for which it stands yet; failed: the
    last of them, in which nothing was kept."""

    choice: Choice
    candidate: Candidate | None = None
    trial: bool = False
    silent: bool = False
    rate: float = 0.0
    fragile: int = 0
    left: float = 0
    failed: int = 0

    @property
    def lost(self) -> bool:
        """Whether that many were."""
        return 0 < self.fragile <= self.failed

    @property
    def in_silence(self) -> bool:
        """Whether it is a trial beside nobody, to lose little: a short draft, which nothing else ends."""
        return self.trial and self.silent


NOBODY = Made(PLAIN)

Offered = tuple[object, ...]  # who has what to offer, and how sure of it


@dataclass(slots=True, eq=False)
class Request:
    """Of one sequence. made: by what it is offered. last: what was chosen in the last round, as far as there
    was room for it (`choice`)."""

    candidates: dict[Source, Candidate] = field(default_factory=dict)
    account: Account = field(default_factory=Account)
    made: dict[Offered, Made] = field(default_factory=dict)
    last: Made = NOBODY
    choice: Choice = PLAIN

    def rest(self, rounds: int, plain: float) -> None:
        """So many plain rounds, of so many ms each."""
        self.account.spent += rounds * plain
        for candidate in self.candidates.values():
            candidate.wait(rounds)

    def learn(self, made: Made, choice: Choice, outcome: Round, longest: int) -> None:
        """What came of a choice. longest: of all drafts."""
        for waiting in self.candidates.values():
            waiting.wait()
        if (candidate := made.candidate) is None:
            return
        paced = choice.budget == longest and not made.in_silence
        candidate.drafted(outcome, trial=made.trial, paced=paced)
        whole = outcome.accepted == outcome.drafted
        # what came back is looked at again at once; beside one that pays, what is new, or kept all
        unsure = made.silent or whole or not candidate.is_known
        candidate.again = made.trial and outcome.accepted > 0 and unsure
        if candidate.shared is not None:
            candidate.shared.again = candidate.again
