"""The contender protocol: a way of decoding that takes part in a benchmark, and the timing of one run.

Contract: all contenders share the weights, the dtype, the threads, the temperature and the prompts (as token
ids). A contender ignores the end-of-text token and makes exactly as many tokens as it is asked for. On an
asynchronous device a run ends when the device has finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from foredraft.decode.params import RuleName
from foredraft.decode.policy import Policy
from foredraft.decode.stats import Stats
from foredraft.llm import LLM
from foredraft.loading.policy_choice import make_policy
from foredraft.profiling.others import Load

__all__ = ["BenchContext", "Contender", "Timing"]


@dataclass(frozen=True, slots=True)
class BenchContext:
    """The settings that all contenders share.

    Attributes:
        llm: The loaded Foredraft engine.
        target: Folder of the target's checkpoint.
        draft: Folder of the draft model's checkpoint, if there is one.
        dtype: Of the weights and of the KV cache.
        device: Where the models run.
        positions: Tokens of the longest prompt plus its new tokens.
        temperature: Sampling temperature; 0 is greedy.
        acceptance: The acceptance rule of Foredraft's contenders; a lossless one.
        max_draft: The longest draft as passed to `load`, in tokens.
        policy_options: Options of the loaded policy.
    """

    llm: LLM
    target: Path
    draft: Path | None
    dtype: torch.dtype
    device: torch.device
    positions: int
    temperature: float = 0.0
    acceptance: RuleName = "speculative"
    max_draft: int | None = None
    policy_options: Mapping[str, float | str] = field(default_factory=dict)
    _policies: dict[tuple[str, int], Policy] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def policy_for(self, drafter: str, name: str) -> Policy:
        """Return the policy that `generate` would use with this drafter.

        Drafters with the same longest draft share one policy object, so a policy that measures costs measures
        them once.

        Args:
            drafter: Name of the drafter; it may have been made for a draft length.
            name: Name of the policy.
        """
        engine, runner = self.llm.loaded.engine, self.llm.loaded.runner
        loaded = engine.policy
        self._policies.setdefault((loaded.name, loaded.max_draft), loaded)
        options = self.policy_options if name == loaded.name else {}
        known = engine.drafters.get(drafter)
        planned = None if known is None else known.planned
        longest = max((each.longest_draft for each in engine.drafters.values()), default=0)
        policy = make_policy(name, options, self.max_draft, runner, planned, longest)
        return self._policies.setdefault((name, policy.max_draft), policy)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters that are loaded."""
        return tuple(self.llm.loaded.engine.drafters)


@dataclass(frozen=True, slots=True)
class Timing:
    """The outputs and the durations of one run.

    A program that makes its first token in the prefill pass counts it there: its `decoded_tokens` are one
    fewer per prompt.

    Attributes:
        tokens: New token ids of each prompt.
        prefill_seconds: Duration of everything before the decoding phase.
        decode_seconds: Duration of the decoding phase.
        decoded_tokens: Tokens made in the decoding phase, all prompts together.
        passes: Forward passes of the target in the decoding phase; None where unknown.
        stats: Statistics of all prompts merged; None for other programs.
        load: What other programs took meanwhile, set by the measurement; None where it is not known.
    """

    tokens: tuple[tuple[int, ...], ...]
    prefill_seconds: float
    decode_seconds: float
    decoded_tokens: int
    passes: int | None = None
    stats: Stats | None = None
    load: Load | None = None

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the decoding phase, all prompts together."""
        return self.decoded_tokens / self.decode_seconds


class Contender(Protocol):
    """A way of decoding that a benchmark times."""

    @property
    def name(self) -> str:
        """A unique name: the method, and the policy where the method runs under several."""
        ...

    @property
    def method(self) -> str:
        """The name in the table of contenders (`contenders.CONTENDERS`)."""
        ...

    @property
    def policy_name(self) -> str | None:
        """The policy's name; None for plain decoding and for other programs."""
        ...

    @property
    def peer(self) -> bool:
        """Whether this is another program."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether the output has exactly the target's distribution."""
        ...

    @property
    def batch_sizes(self) -> tuple[int, ...] | None:
        """Numbers of prompts that one run can take; None for any."""
        ...

    def run(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        """Decode `new_tokens` for each prompt as one batch, starting from an empty KV cache."""
        ...

    def close(self) -> None:
        """Free memory and files; `run` must not be called afterwards."""
        ...
