"""Layer skip: the target drafts for itself, with some of its sub-layers left out.

Draft & Verify (Zhang et al. 2023, arXiv:2309.08168) leaves out any attention or MLP. A draft's passes write
past the committed length of the target's cache, where the verifying pass overwrites them. After an early exit
(LayerSkip, Elhoushi et al. 2024, arXiv:2404.16710) the verifying pass resumes from the draft's states, so the
draft's passes keep to batch-invariant shapes.
"""

from __future__ import annotations

from torch import Tensor

from foredraft.decode.drafter import AutoregressiveDrafter, DraftPass
from foredraft.decode.sequence import Sequence
from foredraft.drafters.asset import Asset, AssetSearch, Found, Missing
from foredraft.drafters.plan_files import PlanFile, fitting_plan, given_plan, kept_plan
from foredraft.drafters.skips import Skips
from foredraft.drafters.states import KnownStates
from foredraft.errors import Option
from foredraft.model.cache import KVCache
from foredraft.model.runner import DraftInputs, FusedDraft, Resume, Runner


class SelfSpeculative(AutoregressiveDrafter):
    """An autoregressive drafter over the target's layers, whole or in part, on the target's own cache."""

    draft_pass: DraftPass

    def __init__(
        self,
        runner: Runner,
        cache: KVCache,
        skips: Skips | None,
        planned: int | None,
        *,
        resumes: bool,  # the verifying pass resumes from the states below an exit
    ) -> None:
        layers = runner.decoder.spec.layers
        if skips is not None:
            skips.check(layers)
        self.skips, self.cache, self.planned = skips, cache, planned
        self.caches = (cache,)
        exit = skips.exit if resumes and skips is not None else None
        self.draft_pass = DraftPass(runner, None if skips is None else skips.plan(layers), exit)
        self._known = None if exit is None else KnownStates(exit)

    def length(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - 1  # the target has read all but the pending token

    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        forward = self.draft_pass(self.cache, tokens, starts, idle=idle)
        if self._known is not None:
            self._known.add(forward.aux_states[self._known.depth], idle)
        assert forward.logits is not None
        return forward.logits[:, 0]

    def fused_draft(self, inputs: DraftInputs) -> FusedDraft | None:
        draft = self.draft_pass.fused(self.cache, inputs)
        if draft is not None and self._known is not None:
            self._known.add_fused(draft, inputs.lengths)
        return draft

    def resume(self) -> Resume | None:
        return None if self._known is None else self._known.take()

    def leave(self, sequence: Sequence) -> None:
        if self._known is not None:
            self._known.forget()


class LayerSkip(SelfSpeculative):
    """An autoregressive drafter over the target's own runner."""

    name = "layer-skip"

    def __init__(self, target: Runner, cache: KVCache, skips: Skips, planned: int | None = None) -> None:
        super().__init__(target, cache, skips, planned, resumes=True)


class PlanAsset(Asset):
    """A plan: given, or kept for the model by `foredraft tune`."""

    missing = Missing(
        "has no plan for this model", ("make one with `foredraft tune`, or give ", Option("plan"))
    )

    def find(self, search: AssetSearch) -> Found | Missing:
        given = given_plan(search)
        if given is None and not search.weights_here:
            return Missing("has a kept plan or none: the weights that tell are not downloaded")
        if isinstance(given, PlanFile) and given.draft_weights is not None:
            return self.missing  # it is a plan of a copy in few bits, whose drafter uses or refuses it
        plan = kept_plan(search) if given is None else fitting_plan(given, search, warn=True)
        if plan is None:
            return self.missing
        kept, skips, planned = "kept " if given is None else "", plan.skips, plan.max_draft
        return Found(
            planned=planned, about=f"the {kept}plan {skips}",
            build=lambda parts: LayerSkip(parts.target, parts.cache, skips, planned),
        )  # fmt: skip


ASSET = PlanAsset()
