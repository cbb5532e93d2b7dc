"""Drafting: the default drafter, the drafters that can be built, and the plan of self-drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from foredraft.kinds.compatibility import ModelsGiven, available_drafters, check_fits_models, default_drafter
from foredraft.kinds.tables import DRAFTERS, DrafterKind
from foredraft.loading.checkpoints import Checkpoints
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
    """

    drafter: str
    available: Mapping[str, DrafterKind]
    plan: ChosenPlan | None

    @property
    def stretch(self) -> int:
        """Positions of the draft model's cache for each position of the target's cache."""
        return max(kind.stretch for kind in self.available.values())

    @property
    def planned_draft(self) -> int | None:
        """The draft length that the plan was tuned for, where the default drafter uses the plan."""
        return self.plan.max_draft if self.plan is not None and DRAFTERS[self.drafter].needs_plan else None


def choose_drafting(options: LoadOptions, checkpoints: Checkpoints, device: torch.device) -> ChosenDrafting:
    """Choose the default drafter and the plan, and check that drafter, policy and models fit together.

    Raises:
        ConfigError: They do not fit, or the plan cannot be used.
    """
    draft_given, other = checkpoints.draft is not None, checkpoints.other_tokenizer
    drafter = options.drafter or default_drafter(
        options.policy, draft_given, other, plan_given=options.plan is not None
    )
    plan = choose_plan(options.plan, checkpoints.target, device, needed=DRAFTERS[drafter].needs_plan)
    given = models_given(checkpoints, plan)
    check_fits_models(drafter, options.policy, options.draft_sampling, given)
    return ChosenDrafting(drafter, available_drafters(given), plan)


def models_given(checkpoints: Checkpoints, plan: ChosenPlan | None) -> ModelsGiven:
    """Return what drafters can be built from."""
    draft = checkpoints.draft
    return ModelsGiven(
        target=str(checkpoints.target.folder),
        draft=None if draft is None else str(draft.folder),
        other_tokenizer=checkpoints.other_tokenizer,
        plan=plan is not None,
    )
