"""What drafting has cost and gained, in ms of the cost table: by request, and over the engine's life.

A request's loss is the time of its rounds, whoever drafted in them, less a plain step for each token that
they gave it, and less what it will save once others, who got more tokens, are done before it: steps of a
smaller batch take less. What requests gained together, drafters may spend on reading texts that they are not
known to pay for; that is bounded for each request.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from foredraft.decode.policy.costs import CostTable
from foredraft.decode.stats import Round

__all__ = ["SHARE", "Account", "Ledger"]

SHARE = 0.01  # of its time that a request may lose by drafting, one round aside
FIRST = 0.01  # of a whole request's, that a drafter which is not known to pay may read in
READING = 4.0, 0.06  # plain steps, and share of a request's time, that others' gains may pay in it at most
EARNED = 0.005  # of all time, that reading may take whatever was gained
KEPT = 50.0  # plain steps of what was gained that are remembered


@dataclass(slots=True)
class Account:
    """A request's, in ms. spent, lost: of its rounds so far, and beyond what plain steps would have taken; of
    that, the first reading of texts is apart (`read`), since having read is no reason not to draft.
    largest: of its rounds."""

    spent: float = 0.0
    lost: float = 0.0
    read: float = 0.0
    largest: float = 0.0

    def allows(self, credit: float, more: float = 0.0) -> bool:
        """Whether there may be drafts that lose so much more, beside the credit of one round."""
        return self.lost + more <= SHARE * self.spent + credit

    def until(self, credit: float, more: float, plain: float) -> float:
        """Plain rounds until it allows that."""
        return max(0.0, (self.lost + more - credit - SHARE * self.spent) / (SHARE * plain))


@dataclass(slots=True)
class _Open:
    """The round that is running. first, again: ms that drafters read before it, of texts that were new to
    them and of what they missed; depths: of each drafter, the most steps that it took."""

    table: CostTable
    accounts: Seq[Account]
    plain: float
    first: float
    again: float
    rows: list[tuple[Account, int]] = field(default_factory=list)  # those heard of: tokens that it gave
    depths: dict[str, int] = field(default_factory=dict)
    drafted: int = 0


class Ledger:
    """gained: ms that all requests so far gained, less what drafters read; bounded."""

    def __init__(self) -> None:
        self.gained = 0.0
        self._open: _Open | None = None
        self._plain = 0.0

    def rest(self, account: Account, rounds: int) -> None:
        """So many rounds like the last one, in which nobody drafted either."""
        account.spent += rounds * self._plain

    def begin(self, table: CostTable, accounts: Seq[Account], first: float, again: float) -> None:
        """A round of these requests."""
        self._settle()
        plain = self._plain = table.verifying(len(accounts), len(accounts))
        self._open = _Open(table, accounts, plain, first, again)

    def hear(self, account: Account, drafter: str | None, outcome: Round) -> None:
        """What the round came to in one of its rows; with the last of them it is settled."""
        running = self._open
        if running is None:
            return  # nobody may draft any more
        running.rows.append((account, 1 + outcome.accepted))
        running.drafted += outcome.drafted
        if drafter is not None:
            steps = len(outcome.sure) or outcome.drafted
            running.depths[drafter] = max(running.depths.get(drafter, 0), steps)
        if len(running.rows) == len(running.accounts):
            self._settle()

    def may_read(self, account: Account, reading: float, whole: float, plain: float) -> bool:
        """Whether a drafter that is not known to pay may read a text, in a request that takes `whole` ms
        decoded plainly: for the request's own share, or for what was gained, and once on credit."""
        needed = account.lost + account.read + reading
        if needed <= FIRST * whole + plain:
            return True
        steps, share = READING
        return needed <= min(steps * plain, share * whole) and reading <= steps * plain + self.gained

    def _settle(self) -> None:
        running, self._open = self._open, None
        if running is None or not running.rows:
            return
        batch, table = len(running.accounts), running.table
        ms = running.again + table.verifying(batch, batch + running.drafted)
        ms += sum(table.drafting(drafter, batch, depth) for drafter, depth in running.depths.items())
        others = (running.plain - table.verifying(1, 1)) / max(1, batch - 1)  # of a plain step, each of them
        for account, tokens in running.rows:
            ahead = sum(max(0, more - tokens) for _, more in running.rows)
            account.spent += ms + running.first
            account.read += running.first
            account.lost += ms - running.plain * tokens - others * ahead
            account.largest = max(account.largest, ms)
        mean = sum(tokens for _, tokens in running.rows) / len(running.rows)
        gained = self.gained + running.plain * mean - ms - running.first + EARNED * (ms + running.first)
        self.gained = min(max(gained, -KEPT * running.plain), KEPT * running.plain)
