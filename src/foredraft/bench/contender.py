"""Contender: whoever decodes prompts in a benchmark, and how long a run of it took.

Contract: every contender has the same weights, dtype, threads, temperature and prompts (as ids), ignores the
end-of-text token, and makes as many tokens as it is asked for. A run is complete when its figures are: on a
device that works apart from the host, it was waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from foredraft.decode.stats import Stats
from foredraft.llm import LLM

__all__ = ["Contender", "Setting", "Timing"]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all contenders share.

    llm: ours, loaded. target, draft: folders of the checkpoints; no draft is None. positions: of the longest
    prompt with its new tokens. coupled: ours draw by the coupled acceptance rule.
    """

    llm: LLM
    target: Path
    draft: Path | None
    dtype: torch.dtype
    device: torch.device
    positions: int
    temperature: float = 0.0
    coupled: bool = False

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
