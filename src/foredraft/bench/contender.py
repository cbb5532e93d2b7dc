"""Contender: whoever decodes prompts in a benchmark, and how long a run of it took.

Contract: every contender has the same weights, dtype, threads, temperature and prompts (as ids), ignores the
end-of-text token, and makes as many tokens as it is asked for. A run is complete when its figures are: on a
device that works apart from the host, it was waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from foredraft.decode.policy import Policy
from foredraft.decode.stats import Stats
from foredraft.kinds import DRAFTERS
from foredraft.llm import LLM
from foredraft.loading.policies import make_policy

__all__ = ["BenchContext", "Contender", "Timing"]


@dataclass(frozen=True, slots=True)
class BenchContext:
    """What all contenders share.

    llm: ours, loaded. target, draft: folders of the checkpoints; no draft is None. positions: of the longest
    prompt with its new tokens. coupled: ours draw by the coupled acceptance rule. max_draft: as `load` was
    given it. policy_options: of the policy that was loaded. planned: the longest draft that the plan of the
    model's own was made for, if known.
    """

    llm: LLM
    target: Path
    draft: Path | None
    dtype: torch.dtype
    device: torch.device
    positions: int
    temperature: float = 0.0
    coupled: bool = False
    max_draft: int | None = None
    policy_options: Mapping[str, float | str] = field(default_factory=dict)
    planned: int | None = None
    made: dict[tuple[str, int], Policy] = field(default_factory=dict, init=False, repr=False, compare=False)

    def policy(self, drafter: str, name: str) -> Policy:
        """The policy of this name as `generate` would have it with this drafter: a plan's draft length is for
        the drafts that are made by it. Drafters that go as far share one, which measures costs once."""
        loaded: Any = self.llm.engine.policy
        target: Any = self.llm.engine.target
        self.made.setdefault((loaded.name, loaded.max_draft), loaded)
        own = self.policy_options if name == loaded.name else {}
        planned = self.planned if DRAFTERS[drafter].needs_plan else None
        policy: Any = make_policy(name, own, self.max_draft, target, planned)
        return self.made.setdefault((name, policy.max_draft), policy)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Those of ours that are loaded."""
        return tuple(self.llm.engine.drafters)


@dataclass(frozen=True, slots=True)
class Timing:
    """One run.

    tokens: the new ids of each prompt. decode_seconds: of the decoding phase, in which `decoded` of them, all
    prompts together, were made. What makes its first token in the pass that reads the prompt has one fewer a
    prompt there. prefill_seconds: of all before it. stats: ours, of all prompts together; None of peers.
    """

    tokens: tuple[tuple[int, ...], ...]
    prefill_seconds: float
    decode_seconds: float
    decoded: int
    passes: int | None = None
    stats: Stats | None = None

    @property
    def tokens_per_second(self) -> float:
        """Of the decoding phase, all prompts together."""
        return self.decoded / self.decode_seconds


class Contender(Protocol):
    """name: no other's. method: as in the table of contenders; several may be one under several policies.
    policy: its name, of ours that draft. peer: somebody else's program. lossless: its output has the model's
    own law. batches: how many prompts it takes in a run; None = as many as there are."""

    @property
    def name(self) -> str: ...

    @property
    def method(self) -> str: ...

    @property
    def policy(self) -> str | None: ...

    @property
    def peer(self) -> bool: ...

    @property
    def lossless(self) -> bool: ...

    @property
    def batches(self) -> tuple[int, ...] | None: ...

    def run(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        """Decode them side by side, `new_tokens` each, from an empty cache."""
        ...

    def close(self) -> None:
        """Give back memory and files; `run` is not called again."""
        ...
