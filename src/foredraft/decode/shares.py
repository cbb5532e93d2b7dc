"""Shares: how many tokens each client has used lately, so that clients that wait can have equal parts.

A client is whatever sequences are counted together, such as an API key; its tokens are those that were read
of its prompts and those that its rounds gave. The count is a virtual time as in start-time fair queueing
(Goyal, Vin and Cheng, 1997, https://doi.org/10.1109/90.649569), with tokens as its unit, as in Sheng et al.
(https://arxiv.org/abs/2401.00588): the clock stands where that client stands that waits and has used least. A
client that comes, or comes back, starts at the clock or ahead of it: it does not save up what it did not use.
What it used while no client waited is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Shares"]


class Shares:
    """Counts the tokens of clients, from the clock on."""

    def __init__(self) -> None:
        self._leads: dict[str, int] = {}  # of clients that are ahead of the clock

    def lead(self, client: str) -> int:
        """Return how many tokens a client has used more than the one that waits and has used least."""
        return self._leads.get(client, 0)

    def charge(self, client: str, tokens: int) -> None:
        self._leads[client] = self.lead(client) + tokens

    def advance(self, waiting: Iterable[str]) -> None:
        """Move the clock to the client that has used least of those that wait."""
        least = min(map(self.lead, waiting), default=0)
        if least:
            self._leads = {client: lead - least for client, lead in self._leads.items() if lead > least}

    def restart(self) -> None:
        """Forget what was used: no client waits."""
        self._leads.clear()
