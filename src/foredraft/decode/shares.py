"""Shares: how many tokens each client has used lately, so that clients that wait can have equal parts.

A client is whatever sequences are counted together, such as an API key; its tokens are those that were read
of its prompts and those that its rounds gave (as in Sheng et al., https://arxiv.org/abs/2401.00588). They are
counted from a clock that moves by what the clients that wait were given, divided by their number: the virtual
time of weighted fair queueing (Demers, Keshav and Shenker, 1989, https://doi.org/10.1145/75247.75248), with
equal weights. A client that comes, or comes back, starts at the clock or ahead of it: it does not save up
what it did not ask for, and what it used while no client waited is forgotten.
"""

from __future__ import annotations

from collections import Counter

__all__ = ["Shares"]


class Shares:
    """Counts the tokens of clients, from the clock on."""

    def __init__(self) -> None:
        self._leads: dict[str, float] = {}  # of clients that wait, and of others that are ahead of the clock
        self._given: Counter[str] = Counter()  # tokens since the clock moved
        self._waiting: frozenset[str] = frozenset()  # clients that waited when the clock moved

    def lead(self, client: str) -> float:
        """Return how many tokens a client has had more than an equal part; below 0 where it has had fewer."""
        return self._leads.get(client, 0.0)

    def charge(self, client: str, tokens: int) -> None:
        self._given[client] += tokens

    def advance(self, waiting: frozenset[str]) -> None:
        """Move the clock by what was given since the last time; `waiting` are the clients that wait now."""
        before, given = self._waiting, self._given
        part = sum(given[client] for client in before) / max(1, len(before))
        leads = {
            client: self.lead(client) + given[client] - part for client in {*self._leads, *given, *before}
        }
        self._leads = {
            client: lead
            for client, lead in leads.items()
            if lead > 0 or (client in before and client in waiting)
        }
        self._waiting = waiting
        given.clear()

    def restart(self) -> None:
        """Forget what was used: no client waits."""
        self._leads.clear()
        self._given.clear()
        self._waiting = frozenset()
