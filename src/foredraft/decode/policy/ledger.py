"""What drafting has cost and gained, in ms of the cost table: by request, and over the engine's life.

A request's loss is the time of its rounds, whoever drafted in them, less a plain step for each token that
they gave it, and less what it will save once others, who got more tokens, are done before it: steps of a
smaller batch take less. What requests gained together, drafters may spend on reading texts that they are not
known to pay for; that is bounded for each request.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from foredraft.decode.policy.costs import CostTable
from foredraft.decode.stats import Round

__all__ = ["SHARE", "Account", "Ledger"]

SHARE = 0.004  # of its time that a request may lose by drafting, one round aside
FIRST = 0.015  # of a whole request's, that a drafter which is not known to pay may read in
READING = 4.0, 0.06  # plain steps, and share of a request's time, that others' gains may pay in it at most
BACKED = 2.0  # plain steps that a request may lose beyond its own share, of what others gained
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

    def left(self, credit: float) -> float:
        """ms that drafts may lose now, beside the credit of one round; below 0 there may be none."""
        return SHARE * self.spent + credit - self.lost

    def allows(self, credit: float, more: float = 0.0) -> bool:
        """Whether there may be drafts that lose so much more."""
        return more <= self.left(credit)

    def until(self, credit: float, more: float, plain: float) -> float:
        """Plain rounds until it allows that."""
        return max(0.0, (more - self.left(credit)) / (SHARE * plain))


class Ledger:
    """spent: ms of all rounds so far. gained: ms that all requests gained in them, less what drafters read;
    bounded."""

    def __init__(self) -> None:
        self.spent = self.gained = 0.0

    def settle(
        self,
        table: CostTable,
        rows: Seq[tuple[Account, str | None, Round]],
        first: float = 0.0,
        again: float = 0.0,
    ) -> None:
        """A round: for each of its rows, who drafted, and what came of it.

        first, again: ms that drafters read before it, of texts that were new to them and of what they missed.
        """
        if not rows:
            return
        depths: dict[str, int] = {}  # of each drafter, the most steps that it took
        for _, drafter, outcome in rows:
            if drafter is not None:
                depths[drafter] = max(depths.get(drafter, 0), outcome.steps)
        batch, given = len(rows), [1 + outcome.accepted for _, _, outcome in rows]
        plain, alone = table.verifying(batch, batch), table.verifying(1, 1)
        ms = again + table.verifying(batch, batch + sum(outcome.drafted for _, _, outcome in rows))
        ms += sum(table.drafting(drafter, batch, depth) for drafter, depth in depths.items())
        others = (plain - alone) / max(1, batch - 1)  # of a plain step, each of them
        for (account, _, _), tokens in zip(rows, given, strict=True):
            ahead = sum(max(0, more - tokens) for more in given)
            account.spent += ms + first
            account.read += first
            account.lost += ms - plain * tokens - others * ahead
            account.largest = max(account.largest, ms)
        self._spend(ms + first, plain * sum(given) / batch - ms - first, plain)

    def rest(self, rounds: int, plain: float) -> None:
        """So many plain rounds, of so many ms each."""
        self._spend(rounds * plain, 0.0, plain)

    def _spend(self, ms: float, gain: float, plain: float) -> None:
        self.spent += ms
        self.gained = min(max(self.gained + gain + EARNED * ms, -KEPT * plain), KEPT * plain)

    def backing(self, plain: float) -> float:
        """ms that a request may lose of what all of them gained: where drafts pay, bad luck is no reason to
        stop."""
        return min(max(self.gained, 0.0), BACKED * plain)

    def may_read(self, account: Account, reading: float, whole: float, plain: float) -> bool:
        """Whether a drafter that is not known to pay may read a text, in a request that takes `whole` ms
        decoded plainly: for the request's own share, or for what was gained, and once on credit."""
        needed = account.lost + account.read + reading
        if needed <= FIRST * whole + plain:
            return True
        steps, share = READING
        return needed <= min(steps * plain, share * whole) and reading <= steps * plain + self.gained
