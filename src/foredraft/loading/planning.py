"""Planning: the plan by which a target drafts for itself, given or found."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from foredraft.drafters.plan_files import PlanFile, find_plan, model_hash, plans_kept, read_plan
from foredraft.drafters.skips import Skips, is_skips
from foredraft.errors import ConfigError
from foredraft.model.device import dtype_name

__all__ = ["PlanSource", "SelfDraft", "chosen_plan"]

logger = logging.getLogger(__name__)

PlanSource = str | Path | PlanFile | Skips
NO_PLAN = "no plan for this model; make one with `foredraft tune`, or give plan="


@dataclass(frozen=True, slots=True)
class SelfDraft:
    """What the target's own drafts leave out. max_draft: the draft length that goes with it, if known."""

    skips: Skips
    max_draft: int | None = None


def chosen_plan(
    plan: PlanSource | None,
    folder: Path,
    layers: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    needed: bool,
) -> SelfDraft | None:
    """The plan of the model in a folder, of so many layers: the one given, else the one kept for it.

    device, dtype: that it is to serve on. needed: somebody asked for it. Where nobody did, a plan that cannot
    be used is left out, with a warning. Raises ConfigError.
    """
    found: PlanFile | Skips | None
    if plan is not None:
        found = _given(plan, folder)
    else:
        try:  # no file of the model is opened for plans where none is kept
            found = find_plan(model_hash(folder)) if plans_kept() else None
        except ConfigError as error:
            if needed:
                raise
            logger.warning("%s", error)
            return None
    if found is None and needed:
        raise ConfigError(NO_PLAN)
    if found is None:
        return None
    if isinstance(found, Skips):
        found.check(layers)
        return SelfDraft(found)
    found.skips.check(layers)
    if found.layers != layers:
        raise ConfigError(
            f"plan is one of a model of {found.layers} layers, and this one has {layers}; make one with"
            " `foredraft tune`"
        )
    doubt = found.doubt(device.type, dtype_name(dtype))
    if doubt is not None and (needed or plan is not None):
        logger.warning("%s", doubt)
    return SelfDraft(found.skips, found.max_draft)


def _given(plan: PlanSource, folder: Path) -> PlanFile | Skips:
    if isinstance(plan, str) and is_skips(plan):
        plan = Skips.parse(plan)
    if isinstance(plan, Skips):
        return plan
    found = plan if isinstance(plan, PlanFile) else read_plan(Path(plan))
    found.check(model_hash(folder), str(folder))
    return found
