"""The options of a search, checked before a model is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from foredraft.errors import ConfigError

__all__ = ["SAMPLERS", "SamplerName", "TuneSettings"]

SamplerName = Literal["hill-climbing", "gp"]
SAMPLERS: tuple[str, ...] = get_args(SamplerName)


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """The options of `tune`.

    Attributes:
        trials: Number of trials in the study, including those of earlier runs.
        timeout: Seconds of trials after which no trial starts.
        storage: Database URL of the study, as Optuna takes it. None: a file in the user's cache folder.
        sampler: Sampler used after the seed plans: "hill-climbing", or "gp", a Gaussian process, which needs
            fewer trials and longer for each.
        temperature: Temperature of the calibration texts and of the target's distribution; 0 is greedy.
        max_draft: Maximum draft length to consider, in tokens.
        tokens: New tokens of the calibration texts, on which a trial is scored.
        finalists: Number of best plans that are timed in real decoding.
        new_tokens: New tokens per held-out prompt while the finalists are timed.
        repeats: Runs of every finalist on every held-out prompt.
        seed: Random seed of the sampler.
        draft_weights: The copy in few bits whose sub-layers are searched, "int4" or "int8"; None: the model.

    Raises:
        ConfigError: A value is out of range.
    """

    trials: int = 200
    timeout: float | None = None
    storage: str | None = None
    sampler: SamplerName = "hill-climbing"
    temperature: float = 0.0
    max_draft: int = 8
    tokens: int = 4096
    finalists: int = 3
    new_tokens: int = 64
    repeats: int = 3
    seed: int = 0
    draft_weights: str | None = None

    def __post_init__(self) -> None:
        for option in ("trials", "max_draft", "tokens", "finalists", "repeats"):
            self._check(option, getattr(self, option) >= 1, "give 1 or more")
        self._check("new_tokens", self.new_tokens >= 2, "give 2 or more")
        if self.timeout is not None:
            self._check("timeout", 0 < self.timeout < math.inf, "give seconds, more than 0")
        self._check("sampler", self.sampler in SAMPLERS, f"give one of {', '.join(SAMPLERS)}")
        self._check("temperature", 0 <= self.temperature < math.inf, "give 0 or more")
        self._check("seed", 0 <= self.seed < 2**32, "give a whole number from 0 to 2**32 - 1")

    def _check(self, option: str, valid: bool, remedy: str) -> None:
        if not valid:
            raise ConfigError(option=option, value=getattr(self, option), remedy=remedy)
