"""Drafting: the default drafter, the drafters that can be built, and the plan and adapter of self-drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from foredraft.kinds.compatibility import ModelsGiven, available_drafters, check_fits_models, default_drafter
from foredraft.kinds.tables import DRAFTERS, DrafterKind
from foredraft.loading.adapters import ChosenAdapter, choose_adapter
from foredraft.loading.checkpoints import Checkpoints
from foredraft.loading.low_bit import ChosenCopy, choose_copy, offer_copy
from foredraft.loading.options import LoadOptions
from foredraft.loading.planning import ChosenPlan, choose_plan

__all__ = ["ChosenDrafting", "choose_drafting", "models_given"]


@dataclass(frozen=True, slots=True)
class ChosenDrafting:
    """The drafters that were chosen for an engine.

    Attributes:
        drafter: The drafter for requests that do not give one.
        available: All drafters that can be built.
        plan: The plan of the target's own drafts; None without one.
        adapter: The adapter over the target's first layers; None without one.
        copy: The target's copy in few bits; None without one.
        reserved: A kept adapter that serves only requests for it, because it is predicted to lose.
    """

    drafter: str
    available: Mapping[str, DrafterKind]
    plan: ChosenPlan | None
    adapter: ChosenAdapter | None = None
    copy: ChosenCopy | None = None
    reserved: ChosenAdapter | None = None

    @property
    def beside(self) -> int:
        """Bytes of weights beside those of the models."""
        return sum(part.bytes for part in (self.adapter, self.copy) if part is not None)

    @property
    def stretch(self) -> int:
        """Positions of the draft model's cache for each position of the target's cache."""
        return max(kind.stretch for kind in self.available.values())

    @property
    def planned_draft(self) -> int | None:
        """The draft length that the plan or the adapter of the default drafter was best at."""
        kind = DRAFTERS[self.drafter]
        if kind.needs_adapter and self.adapter is not None:
            return self.adapter.config.max_draft
        plan = self.plan if kind.needs_plan else None
        if kind.needs_copy and self.copy is not None:
            plan = self.copy.plan
        return None if plan is None else plan.max_draft


def choose_drafting(options: LoadOptions, checkpoints: Checkpoints, device: torch.device) -> ChosenDrafting:
    """Choose the default drafter and the plan, and check that drafter, policy and models fit together.

    Raises:
        ConfigError: They do not fit, or the plan cannot be used.
    """
    draft_given, other = checkpoints.draft is not None, checkpoints.other_tokenizer
    drafter = options.drafter or default_drafter(
        options.policy,
        draft_given,
        other,
        plan_given=options.plan is not None,
        adapter_given=options.adapter is not None,
    )
    kind = DRAFTERS[drafter]
    plan = choose_plan(options.plan, checkpoints.target, device, needed=kind.needs_plan)
    adapter = choose_adapter(options.adapter, checkpoints.target, needed=kind.needs_adapter)
    reserved = None
    if adapter is not None and not (options.adapter or kind.needs_adapter or adapter.pays):
        adapter, reserved = None, adapter
    copy = choose_copy(options, drafter, plan, checkpoints.target, device)
    if plan is not None and plan.draft_weights is not None:
        plan = None  # it is the copy's
    if kind.chooses and copy is None:
        copy = offer_copy(options, checkpoints, device)
    given = models_given(checkpoints, plan, adapter, copy)
    check_fits_models(drafter, options.policy, options.draft_sampling, given)
    return ChosenDrafting(drafter, available_drafters(given), plan, adapter, copy, reserved)


def models_given(
    checkpoints: Checkpoints,
    plan: ChosenPlan | None,
    adapter: ChosenAdapter | None,
    copy: ChosenCopy | None = None,
) -> ModelsGiven:
    """Return what drafters can be built from."""
    draft = checkpoints.draft
    return ModelsGiven(
        target=str(checkpoints.target.source),
        draft=None if draft is None else str(draft.source),
        other_tokenizer=checkpoints.other_tokenizer,
        plan=plan is not None,
        adapter=adapter is not None,
        copy=copy is not None,
    )
