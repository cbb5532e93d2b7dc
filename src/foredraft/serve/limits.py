"""Limits of the load: how much may run and wait, in all and by client. All calls come from the event loop.

What may wait is shared, as the rows are: where the server is full, a client that has less than an equal part
of the bound may still come in, up to twice the bound in all. So a client that fills the queue keeps no other
client out.
"""

from __future__ import annotations

from collections import Counter

from foredraft.serve.metrics import Metrics
from foredraft.serve.problems import Problem, busy
from foredraft.serve.settings import Settings

__all__ = ["Limits", "Place", "Shared"]

OVERFLOW = 2  # times a bound: what runs and waits in all, where clients with less than their share come last


class Shared:
    """An amount that is bounded in all and shared among clients."""

    def __init__(self) -> None:
        self._amounts: Counter[str] = Counter()  # by client; none is 0

    @property
    def total(self) -> int:
        """Return the amount of all clients."""
        return self._amounts.total()

    def of(self, client: str) -> int:
        """Return the amount of a client."""
        return self._amounts[client]

    def add(self, client: str, more: int) -> None:
        """Add to the amount of a client; a negative number takes away."""
        self._amounts[client] += more
        if not self._amounts[client]:
            del self._amounts[client]

    def fits(self, client: str, more: int, most: int) -> bool:
        """Return whether a client may have so many more of what is bounded by `most`."""
        total = self.total + more
        if total <= most:
            return True
        share = most // len({*self._amounts, client})
        return self.of(client) + more <= share and total <= OVERFLOW * most


class Place:
    """The place of one request among those that run and wait."""

    def __init__(self, limits: Limits, samples: int, client: str) -> None:
        self._limits, self.samples, self.client, self.tokens = limits, samples, client, 0
        self._taken = True

    def free(self) -> None:
        """Give the place back; repeating it does nothing."""
        if self._taken:
            self._taken = False
            self._limits.give_back(self)


class Limits:
    """Counts what runs and waits. A place is taken before a prompt is read, so that a burst cannot pass.

    Args:
        settings: Of the server.
        rows: Samples that the engine decodes at a time.
        metrics: Counts refusals.
    """

    def __init__(self, settings: Settings, rows: int, metrics: Metrics) -> None:
        self._settings, self._most, self._metrics = settings, rows + settings.max_queued, metrics
        self._samples, self._tokens = Shared(), Shared()

    @property
    def samples(self) -> int:
        """Return how many samples run and wait."""
        return self._samples.total

    @property
    def tokens(self) -> int:
        """Return how many prompt tokens run and wait."""
        return self._tokens.total

    def take(self, samples: int, client: str) -> Place:
        """Take a place.

        Args:
            samples: Of the request.
            client: The API key's name, or the address where the server has no keys.

        Raises:
            Problem: The server is full, or the client has too many.
        """
        if samples <= self._most and not self._samples.fits(client, samples, self._most):
            self._metrics.refused("queue full")
            raise busy(f"{self.samples} samples run or wait, of {self._most} at most (max_queued)")
        most = self._settings.max_per_key
        if samples > self._most or (most and samples > most):
            raise Problem(
                400, f"{samples} samples in one request, of {min(self._most, most or self._most)} at most"
            )
        own = self._samples.of(client)
        if most and own + samples > most:
            self._metrics.refused("key limit")
            raise busy(
                f"this client has {own} samples that run or wait, of {most} at most (max_per_key)", 429
            )
        self._samples.add(client, samples)
        return Place(self, samples, client)

    def take_tokens(self, place: Place, tokens: int) -> None:
        """Add the prompt tokens of a request to its place.

        Raises:
            Problem: All prompts together are too long.
        """
        most = self._settings.max_queued_tokens
        if tokens > most:
            message = f"{tokens} prompt tokens in one request, of {most} at most (max_queued_tokens)"
            raise Problem(400, message, param="prompt")
        if not self._tokens.fits(place.client, tokens, most):
            self._metrics.refused("prompt tokens")
            raise busy(f"{self.tokens} prompt tokens run or wait, of {most} at most (max_queued_tokens)")
        self._tokens.add(place.client, tokens)
        place.tokens = tokens

    def give_back(self, place: Place) -> None:
        self._samples.add(place.client, -place.samples)
        self._tokens.add(place.client, -place.tokens)
