"""Planning: the plan by which a target drafts for itself, given or found."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from foredraft.drafters.plans import PlanFile, find_plan, model_hash, plans_kept, read_plan
from foredraft.drafters.skips import Skips, is_spelled
from foredraft.errors import ConfigError

__all__ = ["GivenPlan", "SelfDraft", "chosen_plan"]

logger = logging.getLogger(__name__)

GivenPlan = str | Path | PlanFile | Skips
NO_PLAN = "no plan for this model; make one with `foredraft tune`, or give plan="


@dataclass(frozen=True, slots=True)
class SelfDraft:
    """What the target's own drafts leave out. max_draft: the draft length that goes with it, if known."""

    skips: Skips
    max_draft: int | None = None


def chosen_plan(plan: GivenPlan | None, folder: Path, layers: int, *, needed: bool) -> SelfDraft | None:
    """The plan of the model in a folder, of so many layers: the one given, else the one kept for it.

    needed: somebody asked for it. Where nobody did, a plan that cannot be used is left out, with a warning.
    Raises ConfigError.
    """
    if plan is not None:
        return _given(plan, folder, layers)
    try:  # no file of the model is opened for plans where none is kept
        kept = find_plan(model_hash(folder)) if plans_kept() else None
    except ConfigError as error:
        if needed:
            raise
        logger.warning("%s", error)
        return None
    if kept is None and needed:
        raise ConfigError(NO_PLAN)
    return None if kept is None else _of(kept, layers)


def _given(plan: GivenPlan, folder: Path, layers: int) -> SelfDraft:
    if isinstance(plan, str) and is_spelled(plan):
        plan = Skips.spelled(plan)
    if isinstance(plan, Skips):
        plan.check(layers)
        return SelfDraft(plan)
    found = plan if isinstance(plan, PlanFile) else read_plan(Path(plan))
    found.check(model_hash(folder), str(folder))
    return _of(found, layers)


def _of(plan: PlanFile, layers: int) -> SelfDraft:
    plan.skips.check(layers)
    return SelfDraft(plan.skips, plan.max_draft)
