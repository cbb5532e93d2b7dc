"""Options of a verification, checked before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from foredraft.errors import ConfigError, Option

__all__ = ["RULES", "Options", "no_drafter"]

Rule: TypeAlias = Literal["speculative", "coupled"]
RULES: tuple[Rule, ...] = ("speculative", "coupled")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a verification.

    Attributes:
        tokens: Maximum number of new tokens compared per prompt at temperature 0.
        samples: Samples per chi-square test; None takes as many as `detect` needs.
        detect: Total variation distance that each test of the drafter must detect.
        seed: Random seed of the samples; None draws one.
        acceptance: The acceptance rule to test; None tests both lossless rules.
        self_test: Plant a defect, the missing residual, which the tests must find.

    Raises:
        ConfigError: A value is out of range.
    """

    tokens: int = 32
    samples: int | None = None
    detect: float = 0.03
    seed: int | None = None
    acceptance: Rule | None = None
    self_test: bool = False

    def __post_init__(self) -> None:
        for option in ("tokens", "samples"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ConfigError(option=option, value=value, remedy="give 1 or more")
        if not 0 < self.detect < 1:
            raise ConfigError(
                option="detect",
                value=self.detect,
                remedy="give a total variation distance between 0 and 1",
            )
        if self.seed is not None and not 0 <= self.seed < 2**53:
            raise ConfigError(
                option="seed", value=self.seed, remedy="give a whole number from 0 to 2**53 - 1"
            )
        if self.acceptance is not None and self.acceptance not in RULES:
            raise ConfigError(
                "which is not lossless, so there is nothing to verify",
                option="acceptance",
                value=self.acceptance,
                remedy=f"give {' or '.join(RULES)}, or leave it out",
            )
        if self.self_test and self.acceptance == "coupled":
            raise ConfigError(
                ("removes the residual, but ", Option("acceptance", "coupled"), " has none"),
                option="self_test",
                remedy="leave one out",
            )


def no_drafter() -> ConfigError:
    """Return the error of a verification without a drafter."""
    return ConfigError(
        "there is no drafter, so there is nothing to verify",
        remedy=("give ", Option("draft"), " or ", Option("drafter", "lookup")),
    )
