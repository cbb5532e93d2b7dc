"""Layer skip: the target drafts for itself, with some of its sub-layers left out.

Draft & Verify (Zhang et al. 2023, arXiv:2309.08168) leaves out any attention or MLP sub-layers. It needs no
second model and no second cache: a draft's passes run on the target's own and write past its committed
length, where the verifying pass overwrites them in every layer before any layer attends there.

Early exit (LayerSkip, Elhoushi et al. 2024, arXiv:2404.16710) runs the first layers whole, then norm and
head. The verifying pass computes the same states there, so it resumes from the draft's: only the last drafted
token, which no step read, still goes through these layers. For that the draft's passes keep to
batch-invariant shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foredraft.decode.drafter import DraftPass, Stepper
from foredraft.decode.sequence import Sequence
from foredraft.drafters.asset import Asset, AssetSearch, Found, Missing, Parts
from foredraft.drafters.known_states import KnownStates
from foredraft.drafters.plan_files import PlanFile
from foredraft.drafters.plan_search import ChosenPlan, fitting_plan, given_plan, kept_plan
from foredraft.drafters.skips import Skips
from foredraft.errors import Option
from foredraft.model.cache import KVCache
from foredraft.model.runner import DraftInputs, FusedDraft, Resume, Runner

__all__ = ["ASSET", "LayerSkip"]


class LayerSkip(Stepper):
    """A stepper over the target's own runner and cache.

    Args:
        target: The target's runner.
        cache: The target's KV cache.
        skips: Sub-layers to leave out.
        planned: Draft length for which the plan was found, where it is known.

    Raises:
        ConfigError: The target has no such layers.
    """

    name = "layer-skip"
    draft_pass: DraftPass

    def __init__(self, target: Runner, cache: KVCache, skips: Skips, planned: int | None = None) -> None:
        layers = target.decoder.spec.layers
        skips.check(layers)
        self.skips, self.cache, self.planned = skips, cache, planned
        self.caches = (cache,)
        self.draft_pass = DraftPass(target, skips.plan(layers), tap=skips.exit)
        self._known = None if skips.exit is None else KnownStates(skips.exit)

    def length(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - 1  # the target has read all but the pending token

    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        forward = self.draft_pass(self.cache, tokens, starts, idle=idle)
        if self._known is not None:
            self._known.add(forward.taps[self._known.depth], idle)
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


@dataclass(frozen=True, kw_only=True)
class FoundPlan(Found):
    """A plan of sub-layers that the target's own drafts skip."""

    plan: ChosenPlan

    def make(self, parts: Parts) -> LayerSkip:
        return LayerSkip(parts.target, parts.cache, self.plan.skips, self.planned)


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
        kept = "kept " if given is None else ""
        return FoundPlan(plan=plan, planned=plan.max_draft, about=f"the {kept}plan {plan.skips}")


ASSET = PlanAsset()
