"""What a verification is asked for, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from foredraft.errors import ConfigError

__all__ = ["RULES", "Options"]

Rule: TypeAlias = Literal["speculative", "coupled"]
RULES: tuple[Rule, ...] = ("speculative", "coupled")


@dataclass(frozen=True, slots=True)
class Options:
    """tokens: of each prompt at temperature 0, at most. samples: of each sampled test; None = as many as
    `detect`, a total variation, needs. seed: of the samples; None draws one. rule: None = both.
    self_test: plant the missing residual, which must then be found.

    Raises ConfigError that names a value out of range.
    """

    tokens: int = 32
    samples: int | None = None
    detect: float = 0.03
    seed: int | None = None
    rule: Rule | None = None
    self_test: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"tokens is {self.tokens}; give 1 or more")
        if self.samples is not None and self.samples < 1:
            raise ConfigError(f"samples is {self.samples}; give 1 or more")
        if not 0 < self.detect < 1:
            raise ConfigError(f"detect is {self.detect}; give a total variation between 0 and 1")
        if self.seed is not None and not 0 <= self.seed < 2**53:
            raise ConfigError(f"seed is {self.seed}; give a whole number from 0 to 2**53 - 1")
        if self.rule is not None and self.rule not in RULES:
            raise ConfigError(
                f"acceptance is {self.rule!r}, which is not lossless: there is nothing to prove;"
                f" give {' or '.join(RULES)}, or leave it out"
            )
        if self.self_test and self.rule == "coupled":
            raise ConfigError(
                "self_test removes the residual, and acceptance='coupled' has none; leave one out"
            )
