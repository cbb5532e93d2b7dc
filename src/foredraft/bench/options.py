"""What a benchmark is asked for, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.bench.contenders import chosen, deciding
from foredraft.errors import ConfigError

__all__ = ["MAX_REPEATED", "Options"]

MAX_REPEATED = 0.3  # share of repeated 4-grams from which on a prompt does not count: drafting is easy there


@dataclass(frozen=True, slots=True)
class Options:
    """methods: names of contenders; "all", or None, stands for every lossless one that is possible. policies:
    those under which our drafters take part, beside the one that is loaded; "all" stands for every one.
    new_tokens: of every prompt. repeats: of each contender on each prompt. batch: sizes. coupled: ours draw
    by the coupled acceptance rule.

    Raises ConfigError that names a value out of range.
    """

    methods: tuple[str, ...] | None = None
    policies: tuple[str, ...] = ()
    new_tokens: int = 64
    repeats: int = 3
    batch: tuple[int, ...] = (1,)
    temperature: float = 0.0
    coupled: bool = False

    def __post_init__(self) -> None:
        chosen(self.methods)
        deciding(self.policies)
        if self.new_tokens < 2:
            raise ConfigError(f"new_tokens is {self.new_tokens}; give 2 or more")
        if self.repeats < 1:
            raise ConfigError(f"repeats is {self.repeats}; give 1 or more")
        if not self.batch or min(self.batch) < 1:
            raise ConfigError(f"batch is {','.join(map(str, self.batch))!r}; give sizes of 1 or more")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; give 0 or more")
