"""The assets of drafters that run the target's own layers: a plan, a copy in few bits, an adapter.

A drafter's file is imported once its asset is there, and the file of plans or adapters once one is given or
kept.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft import user_cache
from foredraft.drafters.asset import (
    DEFAULT_COPY,
    LEAST,
    OFFER,
    SHARE,
    Asset,
    AssetSearch,
    Found,
    Missing,
    any_kept,
)
from foredraft.drafters.heads.head_asset import config_of
from foredraft.errors import ConfigError, Option
from foredraft.model.checkpoint import Checkpoint
from foredraft.model.memory import as_gib
from foredraft.model.quantisation.codes import BITS
from foredraft.model.runner import unserved_because
from foredraft.model.spec import is_lora
from foredraft.model.weights import coded_copy_bytes, weight_bytes

if TYPE_CHECKING:
    from foredraft.drafters.plan_files import ChosenPlan

logger = logging.getLogger(__name__)


class PlanAsset(Asset):
    """A plan: given, or kept for the model by `foredraft tune`."""

    missing = Missing(
        "has no plan for this model", ("make one with `foredraft tune`, or give ", Option("plan"))
    )

    def find(self, search: AssetSearch) -> Found | Missing:
        if search.options["plan"] is None:
            if not search.weights_here:
                return Missing("has a kept plan or none: the weights that tell are not downloaded")
            if not any_kept("plans"):
                return self.missing
        from foredraft.drafters import plan_files
        from foredraft.drafters.layer_skip import LayerSkip

        given = plan_files.given_plan(search)
        if isinstance(given, plan_files.PlanFile) and given.draft_weights is not None:
            return self.missing  # it is a plan of a copy in few bits, whose drafter uses or refuses it
        fitting = plan_files.fitting_plan
        plan = plan_files.kept_plan(search) if given is None else fitting(given, search, warn=True)
        if plan is None:
            return self.missing
        kept, skips, planned = "kept " if given is None else "", plan.skips, plan.max_draft
        return Found(
            planned=planned, about=f"the {kept}plan {skips}",
            build=lambda parts: LayerSkip(parts.target, parts.cache, skips, planned),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FoundCopy(Found):
    target: Checkpoint
    offered: bool = False  # it is made without being asked for

    def announce(self) -> None:
        """Log that a copy is made without being asked for, once where a cache folder remembers it."""
        key = {"of": "low-bit", "model": str(self.target.source.path.resolve())}
        if self.offered and user_cache.read("notices", key) is None:
            size = as_gib(self.bytes)
            logger.warning("drafter low-bit is at hand, too, with a copy of %s: %s", size, OFFER)
            user_cache.write("notices", key, True)


class CopyAsset(Asset):
    """A copy of the target in few bits, made where the user asks for it, or where it may pay (`_offered`)."""

    missing = Missing(f"has no copy of this model: {OFFER}", ("give ", Option("draft_weights", DEFAULT_COPY)))

    def find(self, search: AssetSearch) -> Found | Missing:
        asked = search.options["draft_weights"]
        if search.options["plan"] is None and not search.needed and asked is None:
            return self._offered(search)
        from foredraft.drafters import plan_files

        weights, given = asked or DEFAULT_COPY, plan_files.given_plan(search)
        planned_for = given.draft_weights if isinstance(given, plan_files.PlanFile) else None
        if planned_for not in (None, weights if search.needed else None):
            raise ConfigError(
                f"is for drafter low-bit in {planned_for}", option="plan",
                remedy=("give ", Option("drafter", "low-bit"), " and ", Option("draft_weights", planned_for)),
            )  # fmt: skip
        if not search.needed and asked is None:
            return self._offered(search)
        if (reason := _unfit_because(search, BITS[weights])) is not None:
            option = Option("drafter", "low-bit") if search.needed else Option("draft_weights", asked)
            raise ConfigError(f"but {reason}", option=option.name, value=option.value, remedy="leave it out")
        plan = None
        if given is None:
            plan = plan_files.kept_plan(search, weights)
        elif search.needed:  # else it is the target's; a plan of either is doubted by the target's drafter
            plan = plan_files.fitting_plan(given, search, warn=planned_for is not None)
        return _copy(search, BITS[weights], plan)

    def _offered(self, search: AssetSearch) -> Found | Missing:
        """Return a copy that may pay, where the policy chooses among drafters and memory is ample.

        The target is large then, of 16 or 32 bits, and leaves memory for several copies.
        """
        bits, target = BITS[DEFAULT_COPY], search.target
        if not search.weights_here:
            return self.missing
        if search.choosing and target.coded_bits is None:
            models = [target, *(model for found in search.found for model in found.models)]
            sizes = [weight_bytes(model.spec, search.device, model.dtype) for model in models]
            ample = sizes[0] >= LEAST and (
                SHARE * coded_copy_bytes(target.spec, bits) <= search.free_memory() - sum(sizes)
            )
            if ample and _no_kernels_because(search) is None:
                from foredraft.drafters import plan_files

                return _copy(search, bits, plan_files.kept_plan(search, DEFAULT_COPY), offered=True)

        def why() -> str | None:
            reason = _unfit_because(search, bits)
            return None if reason is None else f"low-bit has no copy of this model: {reason}"

        return replace(self.missing, why=why)


def _copy(search: AssetSearch, bits: int, plan: ChosenPlan | None, *, offered: bool = False) -> FoundCopy:
    from foredraft.drafters.layer_skip import LowBit, low_bit_copy

    size = coded_copy_bytes(search.target.spec, bits)
    skips, planned = (None, None) if plan is None else (plan.skips, plan.max_draft)
    return FoundCopy(
        bytes=size, planned=planned, about=f"a copy of {as_gib(size)}: {OFFER}",
        target=search.target, offered=offered,
        build=lambda parts: LowBit(low_bit_copy(parts.target, bits), parts.cache, skips, planned),
    )  # fmt: skip


def _unfit_because(search: AssetSearch, bits: int) -> str | None:
    """Return why the target can have no copy in so many bits; None where it can."""
    stored = search.target.coded_bits
    if stored is not None and stored <= bits:
        return f"the target has {stored} bits itself"
    reason = _no_kernels_because(search)
    return None if reason is None else f"a copy needs Foredraft's kernels: {reason}"


def _no_kernels_because(search: AssetSearch) -> str | None:
    """Return why the kernels do not run the target; None where they run it. Their check takes memory."""
    if not search.kernels:
        return "they are off"
    return unserved_because(search.target.spec, search.device, search.target.dtype)


class AdapterAsset(Asset):
    """An adapter: given, kept by `foredraft train adapter`, or, where its drafter is the default, shipped."""

    missing = Missing(
        "has no adapter for this model",
        ("train one with `foredraft train adapter`, or give ", Option("adapter")),
    )

    def knows(self, place: Path) -> bool:
        return "target_hash" in config_of(place)

    def find(self, search: AssetSearch) -> Found | Missing:
        given = search.options["adapter"]
        if given is None and not search.weights_here:
            return Missing("has a kept adapter or none: the weights that tell are not downloaded")
        if given is not None and is_lora(Path(given)):
            raise ConfigError(
                "which is a LoRA", option="adapter", value=str(given),
                remedy=("give ", Option("lora", str(given)), " in its place"),
            )  # fmt: skip
        shipped = next(filter(self.knows, search.shipped), None) if search.needed else None
        if given is None and shipped is None and not any_kept("adapters"):
            return self.missing
        from foredraft.drafters import kangaroo
        from foredraft.drafters.kangaroo import check_made_for, kept_adapter, read_adapter

        try:
            folder = kept_adapter(search.target.source) or shipped if given is None else Path(given)
            if folder is None:
                return self.missing
            config = read_adapter(folder)
            check_made_for(config, search.target)
        except ConfigError as error:
            if search.needed or given is not None:
                raise
            logger.warning("%s", error)
            return self.missing
        kept = "kept " if given is None else ""
        about = f"the {kept}adapter: {config}, predicted {config.predicted:.2f} x"
        if given is None and not search.needed and config.predicted <= 1:
            use = Option("drafter", "kangaroo")
            return replace(self.missing, why=lambda: (f"{about}, so only ", use, " uses it"))
        return kangaroo.found(folder, config, search.target, about)


PLAN_ASSET, COPY_ASSET, ADAPTER_ASSET = PlanAsset(), CopyAsset(), AdapterAsset()
