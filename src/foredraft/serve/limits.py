"""Limits of the load: how much may run and wait, in all and by key. All calls come from the event loop."""

from __future__ import annotations

from collections import Counter

from foredraft.serve.metrics import Metrics
from foredraft.serve.problems import Problem, busy
from foredraft.serve.settings import Settings

__all__ = ["Limits", "Place"]


class Place:
    """The place of one request among those that run and wait."""

    def __init__(self, limits: Limits, samples: int, key: str) -> None:
        self._limits, self.samples, self.key, self.tokens = limits, samples, key, 0
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
        self.samples, self.tokens = 0, 0
        self._by_key: Counter[str] = Counter()

    def take(self, samples: int, key: str) -> Place:
        """Take a place.

        Raises:
            Problem: The server is full, or the key has too many.
        """
        if samples <= self._most < self.samples + samples:
            self._metrics.refused("queue full")
            raise busy(f"{self.samples} samples run or wait, of {self._most} at most")
        most = self._settings.max_per_key
        if samples > self._most or (most and samples > most):
            raise Problem(
                400, f"{samples} samples in one request, of {min(self._most, most or self._most)} at most"
            )
        if most and self._by_key[key] + samples > most:
            self._metrics.refused("key limit")
            raise busy(f"this key has {self._by_key[key]} samples that run or wait, of {most} at most", 429)
        self.samples += samples
        self._by_key[key] += samples
        return Place(self, samples, key)

    def take_tokens(self, place: Place, tokens: int) -> None:
        """Add the prompt tokens of a request to its place.

        Raises:
            Problem: All prompts together are too long.
        """
        most = self._settings.max_queued_tokens
        if tokens > most:
            raise Problem(400, f"{tokens} prompt tokens in one request, of {most} at most", param="prompt")
        if self.tokens + tokens > most:
            self._metrics.refused("prompt tokens")
            raise busy(f"{self.tokens} prompt tokens run or wait, of {most} at most")
        self.tokens += tokens
        place.tokens = tokens

    def give_back(self, place: Place) -> None:
        self.samples -= place.samples
        self.tokens -= place.tokens
        self._by_key[place.key] -= place.samples
        if not self._by_key[place.key]:
            del self._by_key[place.key]
