"""The plan of sub-layers to skip that a drafter uses: given by option `plan`, or kept for the model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from foredraft.drafters.asset import AssetSearch
from foredraft.drafters.made_for_base import hash_of_base, say_made_for_base
from foredraft.drafters.plan_files import PlanFile, find_plan, model_hash, plans_kept, read_plan
from foredraft.drafters.skips import Skips, is_skips
from foredraft.errors import ConfigError, shortened
from foredraft.model.transfers import dtype_name

__all__ = ["ChosenPlan", "fitting_plan", "given_plan", "kept_plan"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenPlan:
    """A plan that fits the model.

    Attributes:
        skips: Sub-layers that a draft skips.
        max_draft: Draft length that the plan was tuned for, in tokens; None where it is not known.
    """

    skips: Skips
    max_draft: int | None = None


def given_plan(search: AssetSearch) -> PlanFile | Skips | None:
    """Return the plan that the user gives, in any form; None without one.

    Raises:
        ConfigError: The plan cannot be read, or is for another model.
    """
    plan, target = search.options["plan"], search.target
    if plan is None or isinstance(plan, Skips):
        return plan
    if isinstance(plan, str) and is_skips(plan):
        return Skips.parse(plan)
    if not isinstance(plan, PlanFile | str | Path):
        raise ConfigError(
            option="plan", value=plan, remedy="give the file of a plan, its content, or a text such as exit:8"
        )
    found = plan if isinstance(plan, PlanFile) else read_plan(Path(plan))
    if found.model_hash == hash_of_base(target.folder, model_hash):
        say_made_for_base(f"the plan of {shortened(found.model)}")
    else:
        found.check(model_hash(target.folder), target.shown)
    return found


def kept_plan(search: AssetSearch, draft_weights: str | None = None) -> ChosenPlan | None:
    """Return the plan that is kept for the target; None without one.

    The model's files are hashed only where some plan is kept. A plan that cannot be used is left out with a
    warning, unless it is the model's own and its drafter is needed.

    Args:
        search: What is looked for.
        draft_weights: The weights of the copy whose plan is wanted; None: the model's.

    Raises:
        ConfigError: The plan is needed, and cannot be read or is for another model.
    """
    needed = search.needed and draft_weights is None
    try:
        found = _kept_for(search.target.folder, draft_weights) if plans_kept() else None
    except ConfigError as error:
        if needed:
            raise
        logger.warning("%s", error)
        return None
    return None if found is None else fitting_plan(found, search, warn=needed)


def _kept_for(folder: Path, draft_weights: str | None) -> PlanFile | None:
    """Return the plan that is kept for a model, or else for the model without its LoRAs."""
    found = find_plan(model_hash(folder), draft_weights)
    if found is None and (hash := hash_of_base(folder, model_hash)) is not None:
        found = find_plan(hash, draft_weights)
        if found is not None:
            say_made_for_base("the kept plan")
    return found


def fitting_plan(plan: PlanFile | Skips, search: AssetSearch, *, warn: bool) -> ChosenPlan:
    """Check a plan against the model; `warn` where it was measured on another device or in another dtype.

    Raises:
        ConfigError: The model has no such layers.
    """
    layers, producers = search.target.spec.layers, search.target.spec.producers
    if isinstance(plan, Skips):
        plan.check(layers, producers)
        return ChosenPlan(plan)
    plan.skips.check(layers, producers)
    if plan.layers != layers:
        raise ConfigError(
            f"is for a model of {plan.layers} layers, but this one has {layers}",
            option="plan", remedy="make one with `foredraft tune`",
        )  # fmt: skip
    doubt = plan.doubt(search.device.type, dtype_name(search.target.dtype))
    if doubt is not None and warn:
        logger.warning("%s", doubt)
    return ChosenPlan(plan.skips, plan.max_draft)
