"""The options of a benchmark; apart, so that a command's help makes no records."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from foredraft.arguments import check_fields, option
from foredraft.arguments.values import Number, Whole
from foredraft.bench.contenders import resolve_methods, resolve_policies
from foredraft.decode.params import RuleName
from foredraft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The options of a benchmark.

    Args:
        new_tokens: New tokens per prompt; end-of-text tokens are ignored.
        repeats: Runs of every method on every prompt.
        temperature: Sampling temperature; 0 is greedy. Above 0, outputs are compared with plain decoding's
            only under `acceptance` coupled.
    """

    # names of contenders; "all", or None, stands for every lossless one that can run
    methods: tuple[str, ...] | None = None
    # policies under which the drafters run in addition to the loaded one; "all" stands for all
    policies: tuple[str, ...] = ()
    new_tokens: int = field(default=64, metadata=option(Whole("2 or more", least=2, most=math.inf)))
    repeats: int = field(default=3, metadata=option(Whole("1 or more", least=1, most=math.inf)))
    batch: tuple[int, ...] = (1,)  # batch sizes
    temperature: float = field(default=0.0, metadata=option(Number("0 or more")))
    acceptance: RuleName = "speculative"  # the acceptance rule of Foredraft's contenders; a lossless one

    def __post_init__(self) -> None:
        resolve_methods(self.methods)
        resolve_policies(self.policies)
        check_fields(self, ConfigError)
        if not self.batch or min(self.batch) < 1:
            sizes = ",".join(map(str, self.batch))
            raise ConfigError(option="batch", value=sizes, remedy="give sizes of 1 or more")
