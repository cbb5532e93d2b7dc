"""Layer skip: the target drafts for itself, with some of its sub-layers left out.

Draft & Verify (Zhang et al. 2023, arXiv:2309.08168) leaves out any attention or MLP sub-layers. It needs no
second model and no cache: a draft's passes run on the target's own, and write past its committed length,
where the verifying pass overwrites them in every layer before anybody reads there.

Early exit (LayerSkip, Elhoushi et al. 2024, arXiv:2404.16710) runs the first layers whole, then norm and
head. What they compute is what the verifying pass would, so it resumes from their states: only the last
drafted token, which no step read, goes through these layers then. For that their passes keep to exact shapes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from foredraft.decode.draft_pass import DraftPass
from foredraft.decode.sequence import Sequence
from foredraft.drafters.skips import Skips
from foredraft.model.cache import KVCache
from foredraft.model.runner import FusedDraft, Resume, Runner, SamplingInputs, StopThresholds

__all__ = ["LayerSkip"]


class LayerSkip:
    """A Looper over the target's own runner and cache. planned: tokens that a draft of this plan is best at,
    where somebody measured it."""

    name = "layer-skip"
    taps: tuple[int, ...] = ()
    max_length: int | None = None

    def __init__(self, target: Runner, cache: KVCache, skips: Skips, planned: int | None = None) -> None:
        """Raises ConfigError where the target has no such layers."""
        layers = target.decoder.spec.layers
        skips.check(layers)
        self.skips, self.cache, self.planned = skips, cache, planned
        self.caches: tuple[KVCache, ...] = (cache,)
        self.draft_pass = DraftPass(target, skips.plan(layers), exact=skips.exit is not None)
        self._states: list[Tensor] = []  # entering layer `exit`, of this round's steps: [B, 1, D] each
        self._known: list[int] = []  # [B]: how many of them are a row's own

    def length(self, sequence: Sequence) -> int:
        """The target has read all but the pending token."""
        return len(sequence.tokens) - 1

    def read(self, sequence: Sequence, start: int, stop: int) -> None:
        return None

    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        forward = self.draft_pass(self.cache, tokens, starts, idle=idle)
        if self.skips.exit is not None:
            self._known = [
                known + (not dummy) for known, dummy in zip(self._known or [0] * len(idle), idle, strict=True)
            ]
            self._states.append(forward.hidden)
        assert forward.logits is not None
        return forward.logits[:, 0]

    def draft(
        self,
        tokens: list[list[int]],
        starts: list[int],
        most: list[int],
        sampling_inputs: SamplingInputs | None,
        stops: StopThresholds | None = None,
    ) -> FusedDraft | None:
        return self.draft_pass.at_once(self.cache, tokens, starts, most, sampling_inputs, stops)

    def resume(self) -> Resume | None:
        if self.skips.exit is None:
            return None
        unread = torch.zeros_like(self._states[0])  # the last drafted token
        resume = Resume(self.skips.exit, torch.cat([*self._states, unread], 1), self._known)
        self._forget()
        return resume

    def join(self, sequence: Sequence) -> None:
        return None

    def observe(self, sequence: Sequence, start: int, states: Mapping[int, Tensor]) -> None:
        return None

    def rewind(self, sequence: Sequence) -> None:
        return None  # the target's cache is rolled back

    def leave(self, sequence: Sequence) -> None:
        self._forget()  # a draft may have broken off

    def _forget(self) -> None:
        self._states, self._known = [], []
