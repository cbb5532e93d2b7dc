"""Planning: the plan of sub-layers that the target's own drafts skip, given or found."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from foredraft.drafters.plan_files import PlanFile, find_plan, model_hash, plans_kept, read_plan
from foredraft.drafters.skips import Skips, is_skips
from foredraft.errors import ConfigError, Option
from foredraft.loading.checkpoints import Checkpoint
from foredraft.loading.options import PlanSource
from foredraft.model.device import dtype_name

__all__ = ["ChosenPlan", "choose_plan"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenPlan:
    """A plan that fits the model.

    Attributes:
        skips: Sub-layers that a draft skips.
        max_draft: Draft length that the plan was tuned for, in tokens; None where it is not known.
        draft_weights: The weights of the copy that it is a plan of; None: of the model, or of either.
    """

    skips: Skips
    max_draft: int | None = None
    draft_weights: str | None = None


def choose_plan(
    plan: PlanSource | None,
    checkpoint: Checkpoint,
    device: torch.device,
    *,
    needed: bool,
    draft_weights: str | None = None,
) -> ChosenPlan | None:
    """Return the given plan, or else the plan that is kept for the model.

    Args:
        plan: As `load` takes it.
        checkpoint: The model.
        device: The device that will run it.
        needed: The default drafter uses the plan. Otherwise a kept plan that cannot be used is left out with
            a warning.
        draft_weights: The weights of the copy whose kept plan is wanted; None: the model's.

    Raises:
        ConfigError: The plan cannot be read or is for another model, or a plan is needed and none is found.
    """
    try:
        found = _kept(checkpoint.folder, draft_weights) if plan is None else _given(plan, checkpoint)
    except ConfigError as error:
        if needed or plan is not None:
            raise
        logger.warning("%s", error)
        return None
    if found is None:
        if needed:
            raise ConfigError(
                "no plan for this model", remedy=("make one with `foredraft tune`, or give ", Option("plan"))
            )
        return None
    if isinstance(found, Skips):
        found.check(checkpoint.spec.layers)
        return ChosenPlan(found)
    return _fitting(found, checkpoint, device, warn=needed or plan is not None)


def _kept(folder: Path, draft_weights: str | None) -> PlanFile | None:
    """Return the plan kept for the model in a folder. Its files are hashed only where some plan is kept."""
    return find_plan(model_hash(folder), draft_weights) if plans_kept() else None


def _given(plan: PlanSource, checkpoint: Checkpoint) -> PlanFile | Skips:
    """Return the plan that the user gives, in any form."""
    if isinstance(plan, str) and is_skips(plan):
        return Skips.parse(plan)
    if isinstance(plan, Skips):
        return plan
    if not isinstance(plan, PlanFile | str | Path):
        raise ConfigError(
            option="plan", value=plan, remedy="give the file of a plan, its content, or a text such as exit:8"
        )
    found = plan if isinstance(plan, PlanFile) else read_plan(Path(plan))
    found.check(model_hash(checkpoint.folder), str(checkpoint.source))
    return found


def _fitting(plan: PlanFile, checkpoint: Checkpoint, device: torch.device, *, warn: bool) -> ChosenPlan:
    """Check a plan file against the model; `warn` where it was measured on another device or dtype."""
    layers = checkpoint.spec.layers
    plan.skips.check(layers)
    if plan.layers != layers:
        raise ConfigError(
            f"is for a model of {plan.layers} layers, but this one has {layers}",
            option="plan", remedy="make one with `foredraft tune`",
        )  # fmt: skip
    doubt = plan.doubt(device.type, dtype_name(checkpoint.dtype))
    if doubt is not None and warn:
        logger.warning("%s", doubt)
    return ChosenPlan(plan.skips, plan.max_draft, plan.draft_weights)
