"""Weighing: who drafts for each row of a batch, and how much, by costs and by what is known of the drafters.

`budgets` has the equations. Guesses cost, and a `Ledger` bounds what they may: nobody drafts unless the loss
of every request in the batch is at most `SHARE` of its time so far, and one round more: the largest that it
has had, and a little of what requests gained together; or a plain step where a drafter is only tried again.
So no request is held up much by drafts, its own or those of others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from foredraft.decode.policy.budgets import Prospect, best_budgets, best_length, round_ms
from foredraft.decode.policy.candidates import Candidate, Request
from foredraft.decode.policy.costs import CostTable
from foredraft.decode.policy.ledger import FIRST, SHARE, Ledger
from foredraft.decode.policy.protocol import PLAIN, Choice, Offers

__all__ = ["Weighing"]

SURE = 1.08  # by how much more a drafter that has to read first must promise
FRAGILE = 1, 2  # drafts of which nothing is kept that end a choice: at first, and once a request has gained
# (pairs: by a row alone, and in a batch)
# of the rest decoded plainly, that reading may take where one is tried that was not chosen: what it missed; a
# text that is new to it, which is apart
MISSED, NEW = (0.01, SHARE), (math.inf, 0.01)
LATE = 128, 64  # tokens of a text that is new to it which a drafter reads that is not known to pay,
WHOLE = 0.04  # or where reading all of it, in every row, takes more than such a share of the rest


@dataclass
class Weighing:
    """Of what these rows are offered now. max_draft: tokens at most. candidate: what a row's request knows of
    a drafter. plain: ms of a plain step of theirs; backing: that each may lose beyond its own share. silent,
    trial: of each row, once there are `choices`: nobody pays; one is tried that was not chosen."""

    table: CostTable
    ledger: Ledger
    max_draft: int
    candidate: Callable[[Offers, str], Candidate]
    rows: Seq[Offers]
    plain: float = field(init=False)
    backing: float = field(init=False)
    silent: list[bool] = field(init=False)
    trial: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self.plain = self.table.verifying(len(self.rows), len(self.rows))
        self.backing = self.ledger.backing(self.plain)

    def choices(self) -> list[Choice]:
        """Of every row."""
        rows, accounts = self.rows, [_request(row).account for row in self.rows]
        choices = [PLAIN] * len(rows)
        if all(account.allows(account.largest + self.backing) for account in accounts):
            choices = self._paying()
            again = self.readings(choices)[1]
            if not all(account.allows(account.largest + self.backing, again) for account in accounts):
                choices = [PLAIN] * len(rows)
        self.silent, self.trial = [not choice.budget for choice in choices], [False] * len(rows)
        if all(_request(row).account.allows(self._credit(row), self._unearned(row)) for row in rows):
            choices = self._turns(choices)
        return choices

    def fragile(self, row: Offers, name: str) -> int:
        """How many drafts in a row end a choice of which nothing is kept: more in a request that has gained.
        0, where none do: of one that tells before how sure it is, and was less sure than not."""
        if name in row.sure and self._prospect(row, name).survives[0] < 0.5:
            return 0
        return FRAGILE[_request(row).account.lost < 0]

    def promised(self, choices: Seq[Choice]) -> float:
        """Tokens per ms of the batch, by what its drafters are known for."""
        batch, tokens, columns = len(self.rows), 0.0, float(len(self.rows))
        depths: dict[str, float] = {}
        for row, (name, budget, _), trial in zip(self.rows, choices, self.trial, strict=True):
            if name is None or not budget:
                tokens += 1
                continue
            paced = self.candidate(row, name).record.pace.mean()
            shortened = budget < self._most(row, name)  # by position (`_length`)
            if paced is None or shortened or trial:
                paced = 1 + sum(self._prospect(row, name).survives[:budget]), budget, budget
            tokens += paced[0]
            columns += paced[1]
            depths[name] = max(depths.get(name, 0.0), paced[2])
        steps = sum(self.table.drafting(name, batch, depth) for name, depth in depths.items())
        return max(tokens / (self.table.verifying(batch, round(columns)) + steps), batch / self.plain)

    def readings(self, choices: Seq[Choice]) -> tuple[float, float]:
        """ms that drafters read before they can draft: texts that are new to them, and what they missed."""
        first = again = 0.0
        for row, (name, _, reads) in zip(self.rows, choices, strict=True):
            if name is None:
                continue
            ms = self.table.reading(name, row.behind.get(name, 0) if reads is None else reads)
            if _is_new(row, name):
                first += ms
            else:
                again += ms
        return first, again

    def bears(self, choices: Seq[Choice]) -> float:
        """Rounds of these until a request has lost what it may, if it gains nothing; one at least."""
        ms = round_ms(self.table, choices)
        accounts = [_request(row).account for row in self.rows]
        left = min(account.left(max(account.largest, ms) + self.backing) for account in accounts)
        return 1 + max(0.0, left // (ms - self.plain)) if ms > self.plain else math.inf

    def until_turn(self) -> float:
        """Plain rounds until there is something to decide again, while nobody drafts."""
        accounts = [_request(row).account for row in self.rows]
        earned = [(_request(row).account, self._credit(row), self._unearned(row)) for row in self.rows]
        patient = max(account.until(credit, unearned, self.plain) for account, credit, unearned in earned)
        first = min(self._until(row, name, PLAIN, 0.0) for row in self.rows for name in row.most)
        held = max(a.until(a.largest + self.backing, 0.0, self.plain) for a in accounts)
        turn = max(patient, first)
        return min(held, turn) if held else turn  # somebody may pay once that is earned

    def _paying(self) -> list[Choice]:
        """For each row the drafter that pays most, and the budgets at which all of them together do."""
        rows, reading = self.rows, 0.0
        names: list[str | None] = []
        for row in rows:
            name = self._best(row, reading)
            names.append(name)
            reading += 0.0 if name is None else self._row_result(row, name, pays=True)
        if len(self.rows) == 1:
            budgets = [0 if names[0] is None else self._length(self.rows[0], names[0])[1]]
        else:
            pairs = zip(self.rows, names, strict=True)
            prospects = [None if name is None else self._prospect(row, name) for row, name in pairs]
            budgets = best_budgets(self.table, prospects)
        return [
            PLAIN if name is None or not budget else Choice(name, budget, self._reads(row, name, pays=True))
            for row, name, budget in zip(rows, names, budgets, strict=True)
        ]

    def _best(self, row: Offers, reading: float) -> str | None:
        """Who might draft for a row, if only beside others that pay for its steps. reading: ms that the rows
        before this one need already."""
        batch = len(self.rows)
        plain = batch / self.plain
        best, chosen = 0.0, None
        remaining = batch * row.sequence.remaining
        for name in row.most:
            rate, length = self._length(row, name)
            own = self._row_result(row, name, pays=True)
            if own:  # worth it for the rest of the text, and by more than chance
                rate = remaining / (remaining / rate + batch * own) / SURE
                alone = batch == 1 or _is_new(row, name)
                if alone and (not length or rate <= plain):
                    continue
                if not self._may_read(row, name, reading, pays=True):
                    continue
            if rate > best:
                best, chosen = rate, name
        return chosen

    def _length(self, row: Offers, name: str) -> tuple[float, int]:
        """Tokens per ms of a batch that drafts by it as this row would, and the draft's length: of one that
        tells at every step how sure it is the longest, for that ends it, and whoever drafts less never learns
        that more would pay; else the best by position."""
        candidate, batch = self.candidate(row, name), len(self.rows)
        most = self._most(row, name)
        if (best := candidate.best.get((most, batch))) is None:
            rate, length = best_length(self.table, batch, self._prospect(row, name))
            paced = candidate.record.pace.mean()
            if paced is not None:
                tokens, drafted, steps = paced
                ms = self.table.verifying(batch, round(batch * (1 + drafted)))
                as_before = batch * tokens / (ms + self.table.drafting(name, batch, steps))
                length = most if length or as_before > rate else 0
                rate = max(rate, as_before)
            best = candidate.best[most, batch] = rate, length
        return best

    def _most(self, row: Offers, name: str) -> int:
        """Tokens that it may draft."""
        return min(row.most[name], self.max_draft)

    def _prospect(self, row: Offers, name: str) -> Prospect:
        candidate, most = self.candidate(row, name), self._most(row, name)
        if (found := candidate.prospects.get(most)) is None:
            found = candidate.prospects[most] = Prospect(name, candidate.record.track.survives(most))
        return found

    def _turns(self, choices: Seq[Choice]) -> list[Choice]:
        """The choices, or instead of a row's a drafter that has waited long enough and might pay; of one row
        alone, while nobody drafts: it tells enough, for all of them. But one that is new is tried by as many
        as the ledger bears: the round tells the more then for what it takes."""
        reading, drafts = sum(self.readings(choices)), any(choice.budget for choice in choices)
        turns: list[Choice] = []
        tried: str | None = None
        for place, (row, choice) in enumerate(zip(self.rows, choices, strict=True)):
            name = None
            if drafts or tried is None:
                others = (name for name in row.most if name != choice.drafter)
                name = next((name for name in others if self._until(row, name, choice, reading) <= 0), None)
            elif tried in row.most and not self.candidate(row, tried).is_met:
                name = tried if self._borne(row, tried, reading) <= 0 else None
            if name is not None:
                self.trial[place], tried = True, name
                # beside one that pays, as it would draft if it were chosen; else to lose little
                longest = self._length(row, name)[1] if choice.budget else 0
                longest = longest or best_length(self.table, 1, self._prospect(row, name))[1]
                choice = Choice(name, max(1, longest), self._reads(row, name))
                reading += self._row_result(row, name)
            turns.append(choice)
        return turns

    def _until(self, row: Offers, name: str, choice: Choice, reading: float) -> float:
        """Plain rounds until it is the turn of a drafter that was not chosen, as far as one can tell; without
        end if it may not read or could not pay. reading: ms that others read before it."""
        left = self.candidate(row, name).left(choice, self._row_result(row, name))
        return left if left > 0 else self._borne(row, name, reading)

    def _borne(self, row: Offers, name: str, reading: float) -> float:
        """Plain rounds until the ledger bears that a drafter is tried, however long that has waited."""
        own = self._row_result(row, name)
        perfect = Prospect(name, (1.0,) * self._most(row, name))
        if not best_length(self.table, 1, perfect)[1] or not self._may_read(row, name, reading):
            return math.inf
        account, new = _request(row).account, _is_new(row, name)
        share = (NEW if new else MISSED)[len(self.rows) > 1]
        if own > share * self.plain * row.sequence.remaining:
            return math.inf
        more = self._unearned(row) + reading + (0.0 if new else own)
        return account.until(self._credit(row, name), more, self.plain)

    def _may_read(self, row: Offers, name: str, others: float, *, pays: bool = False) -> bool:
        """Whether it may read what it has not: if its drafts promise to save that again in the rest of the
        text (`pays`), and it is known well; else if the ledger allows it, as it will be when the text has all
        the tokens that were asked for. others: ms that other rows read in this round."""
        reading = self._row_result(row, name, pays=pays)
        if not reading or (pays and self.candidate(row, name).is_known):
            return True
        return self.ledger.may_read(_request(row).account, others + reading, self._whole(row), self.plain)

    def _whole(self, row: Offers) -> float:
        """ms that a request takes, if what is left of it is decoded plainly."""
        ahead = self.plain * row.sequence.remaining
        return self.table.verifying(1, len(row.sequence.prompt)) + _request(row).account.spent + ahead

    def _unearned(self, row: Offers) -> float:
        """ms of first readings that its time has to earn before another drafter is tried: of a request that
        decodes alone, what is beyond the share that they may take in it anyway."""
        read = _request(row).account.read
        return read if len(self.rows) > 1 else max(0.0, read - FIRST * self._whole(row))

    def _credit(self, row: Offers, *names: str) -> float:
        """ms that one of these drafters, or any, may lose now where it is tried: a plain step, and what one
        that is not known yet might have read in so far and did not, if the request decodes alone."""
        credit, account = self.plain + self.backing, _request(row).account
        if len(self.rows) > 1 or all(self.candidate(row, n).is_known for n in names or row.most):
            return credit
        return credit + max(0.0, FIRST * account.spent - account.read)

    def _reads(self, row: Offers, name: str, *, pays: bool = False) -> int | None:
        """How many of the last tokens of a text that is new to it a drafter reads, where it may begin late:
        all (None) only if its drafts promise to save that again (`pays`), it is known well, and that takes a
        small part of the time that the rest would take plainly, as every row of a batch is to read."""
        late = LATE[len(self.rows) > 1]
        if name not in row.late or row.behind[name] <= late:
            return None
        if not pays or not self.candidate(row, name).is_known:
            return late
        whole = len(self.rows) * self.table.reading(name, row.behind[name])
        return None if whole <= WHOLE * self.plain * row.sequence.remaining else late

    def _row_result(self, row: Offers, name: str, *, pays: bool = False) -> float:
        """ms until it has read that."""
        reads = self._reads(row, name, pays=pays)
        return self.table.reading(name, row.behind.get(name, 0) if reads is None else reads)


def _request(row: Offers) -> Request:
    request: Request = row.sequence.policy_state
    return request


def _is_new(row: Offers, name: str) -> bool:
    """Whether the drafter has not read any of the text."""
    return row.behind.get(name) == len(row.sequence.tokens) - 1
