"""The options of a search, checked before a model is loaded, and the callback that hears of its progress."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from foredraft.arguments import check_fields, option
from foredraft.arguments.values import Choice, Name, Number, Whole
from foredraft.errors import ConfigError

SamplerName = Literal["hill-climbing", "gp"]
SAMPLERS: tuple[str, ...] = get_args(SamplerName)


SEVERAL = Whole("1 or more", least=1, most=math.inf)


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """The options of `tune`.

    Args:
        trials: Number of plans to try, including those of earlier runs of the same search.
        timeout: Start no trial after this many seconds of trials. Preparation and final timing are not
            included.
        storage: Database of the trials: sqlite:///FILE, or the URL of a database on a server, which several
            machines may share. Default: a file in the cache folder.
        sampler: Proposes plans after the seed plans: hill climbing (flips one sub-layer of the best plan at a
            time), or a Gaussian process, which needs fewer trials and longer for each.
        temperature: Temperature of the calibration texts and of the target distribution; 0 is greedy.
        max_draft: Maximum draft length to consider, in tokens.
        tokens: Tokens of the calibration texts, which the model writes itself, that a trial is scored on.
        finalists: Number of best plans that are timed at the end, in real decoding of held-out prompts.
        new_tokens: New tokens per held-out prompt.
        repeats: Runs of every finalist and of plain decoding on every held-out prompt.
        seed: Random seed of the sampler.
        draft_weights: Search what drafter low-bit leaves out of its copy of the model in these weights,
            instead.
    """

    trials: int = field(default=200, metadata=option(SEVERAL))
    timeout: float | None = field(default=None, metadata=option(Number("seconds, more than 0", above=True)))
    storage: str | None = field(default=None, metadata=option(Name("the URL of a database")))
    sampler: SamplerName = field(default="hill-climbing", metadata=option(Choice(names=SAMPLERS)))
    temperature: float = field(default=0.0, metadata=option(Number("0 or more")))
    max_draft: int = field(default=8, metadata=option(SEVERAL))
    tokens: int = field(default=4096, metadata=option(SEVERAL))
    finalists: int = field(default=3, metadata=option(SEVERAL))
    new_tokens: int = field(default=64, metadata=option(Whole("2 or more", least=2, most=math.inf)))
    repeats: int = field(default=3, metadata=option(SEVERAL))
    seed: int = field(default=0, metadata=option(Whole("a whole number from 0 to 2**32 - 1", most=2**32 - 1)))
    draft_weights: str | None = field(default=None, metadata=option(Choice(names=("int4", "int8"))))

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


class Progress(Protocol):
    """A callback for progress: the stage's name, steps done, steps in total, and a note to show beside it."""

    def __call__(self, stage: str, done: int, total: int, note: str = "", /) -> None: ...


def silent(stage: str, done: int, total: int, note: str = "", /) -> None:
    """Ignore the progress."""


class Steps:
    """Count the steps of one stage and report each; the stage starts when the counter is made."""

    def __init__(self, progress: Progress, stage: str, total: int) -> None:
        self.progress, self.stage, self.total = progress, stage, total
        self.done = 0
        progress(stage, 0, total)

    def __call__(self, count: int = 1) -> None:
        self.done += count
        self.progress(self.stage, self.done, self.total)
