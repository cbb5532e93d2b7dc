"""Options of a verification, checked before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.errors import ConfigError, Option
from foredraft.verify.defects import DEFECTS
from foredraft.verify.sampling_settings import DEFAULTS, RULES, Rule

__all__ = ["DISTANCES", "VerifySettings", "no_drafter"]

DISTANCES = (0.03, 0.05, 0.1)


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """Options of a verification.

    Attributes:
        tokens: Maximum number of new tokens of each text that is compared token for token.
        samples: Samples per full chi-square test; None takes as many as `detect` needs.
        detect: Total variation distance that each full test of the drafter must detect; None takes the
            smallest of `DISTANCES` whose samples take a few minutes here, and the largest on slow machines.
        seed: Random seed of the samples; None draws one.
        acceptance: The acceptance rule to test; None tests those of requests that name none.
        self_test: Name of a defect to plant, which the checks must find; None plants none.

    Raises:
        ConfigError: A value is out of range.
    """

    tokens: int = 32
    samples: int | None = None
    detect: float | None = None
    seed: int | None = None
    acceptance: Rule | None = None
    self_test: str | None = None

    def __post_init__(self) -> None:
        for option in ("tokens", "samples"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ConfigError(option=option, value=value, remedy="give 1 or more")
        if self.detect is not None and not 0 < self.detect < 1:
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
        if self.self_test is not None:
            self._check_defect(self.self_test)

    def _check_defect(self, name: str) -> None:
        defect = DEFECTS.get(name)
        if defect is None:
            raise ConfigError(
                "which is no defect to plant",
                option="self_test",
                value=name,
                remedy=f"give {', '.join(DEFECTS)}",
            )
        if self.acceptance is not None and defect.rule not in (None, self.acceptance):
            raise ConfigError(
                (f"but {defect.summary} breaks nothing under ", Option("acceptance", self.acceptance)),
                option="self_test",
                value=name,
                remedy="leave one out",
            )

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The acceptance rules to test, the one that is tested in full first."""
        only = self.acceptance or (DEFECTS[self.self_test].rule if self.self_test else None)
        return DEFAULTS if only is None else (only,)


def no_drafter() -> ConfigError:
    """Return the error of a verification without a drafter."""
    return ConfigError(
        "there is no drafter, so there is nothing to verify",
        remedy=("give ", Option("draft"), " or ", Option("drafter", "lookup")),
    )
