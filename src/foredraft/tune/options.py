"""What a search is asked for, checked before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from foredraft.errors import ConfigError

__all__ = ["SAMPLERS", "Options", "SamplerName"]

SamplerName = Literal["tpe", "gp", "flips", "random"]
SAMPLERS: tuple[str, ...] = get_args(SamplerName)


@dataclass(frozen=True, slots=True)
class Options:
    """trials: of the study, those that it holds already included. timeout: seconds of trials until none
    begins. storage: URL of a database; None: a file in the user's cache folder. sampler: who proposes, after
    plans that it begins with; "flips" finds the best ones (docs/log.md). max_draft: the longest draft
    that is considered. tokens: that a trial is held against. finalists: plans that are timed in real
    decoding. new_tokens: of each held-out prompt then. repeats: of every such run. seed: of the sampler.

    Raises ConfigError that names a value out of range.
    """

    trials: int = 200
    timeout: float | None = None
    storage: str | None = None
    sampler: SamplerName = "flips"
    temperature: float = 0.0
    max_draft: int = 8
    tokens: int = 4096
    finalists: int = 3
    new_tokens: int = 64
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for option in ("trials", "max_draft", "tokens", "finalists", "repeats"):
            if (value := getattr(self, option)) < 1:
                raise ConfigError(f"{option} is {value}; give 1 or more")
        if self.new_tokens < 2:
            raise ConfigError(f"new_tokens is {self.new_tokens}; give 2 or more")
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise ConfigError(f"timeout is {self.timeout}; give seconds, more than 0")
        if self.sampler not in SAMPLERS:
            raise ConfigError(f"sampler is {self.sampler!r}; give one of {', '.join(SAMPLERS)}")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature}; give 0 or more")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed is {self.seed}; give a whole number from 0 to 2**32 - 1")
