"""DraftPass: the forward of a draft step. What it costs is what a drafted token costs (c)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from foredraft.model.cache import KVCache
from foredraft.model.decoder import Plan
from foredraft.model.runner import Forward, FusedDraft, Runner, SamplingInputs, StopThresholds

__all__ = ["DraftPass", "ModelDrafter"]


@dataclass(frozen=True, slots=True)
class DraftPass:
    """Forwards of a runner, always through the same sub-layers.

    plan: None is all of them. exact: at exact shapes, because states of theirs are used again.
    """

    runner: Runner
    plan: Plan | None = None
    exact: bool = False

    def __call__(
        self,
        cache: KVCache,
        tokens: Tensor,
        starts: list[int],
        *,
        first_row: int = 0,
        idle: Seq[bool] | None = None,
        counts: Seq[int] | None = None,
        at: Tensor | None = None,
    ) -> Forward:
        """As `Runner.forward`."""
        return self.runner.forward(
            cache, tokens, starts, first_row=first_row, idle=idle, counts=counts, at=at, plan=self.plan,
            exact=self.exact,
        )  # fmt: skip

    def at_once(
        self,
        cache: KVCache,
        tokens: list[list[int]],
        starts: list[int],
        most: list[int],
        sampling_inputs: SamplingInputs | None = None,
        stops: StopThresholds | None = None,
    ) -> FusedDraft | None:
        """All the steps of a draft in one call, as `Runner.draft`. None where they have to be taken one by
        one, as where states of theirs are used again."""
        if self.exact:
            return None
        return self.runner.draft(cache, tokens, starts, most, sampling_inputs, stops, plan=self.plan)


@runtime_checkable
class ModelDrafter(Protocol):
    """A drafter whose drafts are forwards, one for each token."""

    draft_pass: DraftPass
