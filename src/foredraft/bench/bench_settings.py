"""The options of a benchmark, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.bench.contenders import resolve_methods, resolve_policies
from foredraft.decode.params import RuleName
from foredraft.errors import ConfigError

__all__ = ["MAX_REPEATED", "BenchSettings"]

# A prompt counts if less than this share of the 4-grams of plain decoding's output occurred in it before.
# Drafting a loop is easy, so prompts that lead into loops would overstate every speed-up.
MAX_REPEATED = 0.3


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The options of a benchmark.

    Attributes:
        methods: Names of contenders; "all", or None, stands for every lossless one that can run.
        policies: Policies under which the drafters run in addition to the loaded one; "all" stands for all.
        new_tokens: Tokens to generate for each prompt.
        repeats: Timed runs of each contender on each prompt.
        batch: Batch sizes.
        temperature: Sampling temperature; 0 is greedy.
        acceptance: The acceptance rule of Foredraft's contenders; a lossless one.

    Raises:
        ConfigError: A value is out of range, or a name is unknown.
    """

    methods: tuple[str, ...] | None = None
    policies: tuple[str, ...] = ()
    new_tokens: int = 64
    repeats: int = 3
    batch: tuple[int, ...] = (1,)
    temperature: float = 0.0
    acceptance: RuleName = "speculative"

    def __post_init__(self) -> None:
        resolve_methods(self.methods)
        resolve_policies(self.policies)
        if self.new_tokens < 2:
            raise ConfigError(option="new_tokens", value=self.new_tokens, remedy="give 2 or more")
        if self.repeats < 1:
            raise ConfigError(option="repeats", value=self.repeats, remedy="give 1 or more")
        if not self.batch or min(self.batch) < 1:
            sizes = ",".join(map(str, self.batch))
            raise ConfigError(option="batch", value=sizes, remedy="give sizes of 1 or more")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(option="temperature", value=self.temperature, remedy="give 0 or more")
