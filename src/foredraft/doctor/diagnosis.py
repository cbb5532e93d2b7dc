"""The diagnosis: what the doctor measured, what it advises, and what it found besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Diagnosis", "Trial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The acceptance under one setting.

    Attributes:
        settings: What differs from the drafter's own files, by name; nothing for the files themselves.
        sampled: At temperature 1, the probability by position of the draft that a token is accepted if all
            before it were.
        greedy: The same at temperature 0.
        tau: Tokens of a round at temperature 1, the target's own included.
        gain: Of `tau` over the drafter as its files say, in tokens.
        doubt: Standard error of `gain`.
    """

    settings: Mapping[str, Any]
    sampled: tuple[float, ...]
    greedy: tuple[float, ...]
    tau: float
    gain: float = 0.0
    doubt: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What the doctor found.

    Attributes:
        drafter: Its kind.
        name: The drafter's folder or hub id.
        drafts: Drafts that were measured.
        own: The acceptance with the settings of the drafter's own files.
        trials: The acceptance under each other setting.
        best: The best setting; `own` where no other is better by more than chance.
        written: The file that holds the best setting from now on; None where nothing was written.
        notes: What else lowers the acceptance, or will.
    """

    drafter: str
    name: str
    drafts: int
    own: Trial
    trials: tuple[Trial, ...] = ()
    best: Trial
    written: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def improved(self) -> bool:
        """Whether another setting is better than that of the drafter's files."""
        return self.best is not self.own

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain JSON values."""
        return asdict(self) | {"improved": self.improved}
