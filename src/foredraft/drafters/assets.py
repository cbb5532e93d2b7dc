"""The assets of heads, of texts, and of drafters over the target's own layers: a plan, a copy, an adapter.

Nothing here reads weights. A drafter's file is imported once its asset is there, and the file of plans or
adapters once one is given or kept.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft import user_cache
from foredraft.drafters.asset import DEFAULT_COPY, Asset, AssetSearch, Found, Missing, Parts, any_kept
from foredraft.drafters.head_kinds import config_of, has_weights, head_kind, may_predict_further, pickle_in
from foredraft.errors import ConfigError, Option
from foredraft.model.memory import as_gib
from foredraft.model.quantisation.codes import BITS
from foredraft.model.runner import unserved_because
from foredraft.model.source import weights_to_come
from foredraft.model.spec import is_lora
from foredraft.model.weights import coded_copy_bytes, weight_bytes

if TYPE_CHECKING:
    from foredraft.drafters.plan_files import ChosenPlan
    from foredraft.drafters.recent_texts import Suffix

logger = logging.getLogger(__name__)


class HeadAsset(Asset):
    """A head: the folder, GGUF file or hub id that the user gives as the draft model."""

    def __init__(
        self,
        kind: str,  # the drafter that reads it, as `head_kind` says
        called: str,  # what messages call it, with its article
        where: str,  # it is, such as "its folder"
        drafter: str,  # the file in `drafters` and the class, whose `found` returns the head of a place
        *,
        needed: str | None = None,  # as `called`, where a named drafter needs it
        reads_headers: bool = True,  # of the weights, which therefore have to be here
    ) -> None:
        self.kind, self.called, self.drafter, self.reads_headers = kind, called, drafter, reads_headers
        remedy = ("give ", Option("draft"), f", {where}")
        self.missing = Missing(f"needs {called} of this model", remedy)
        self.required = Missing(f"which needs {needed or f'{called} of the model'}", remedy)

    def knows(self, place: Path) -> bool:
        return head_kind(place) == self.kind

    def find(self, search: AssetSearch) -> Found | Missing:
        place = search.draft
        if place is None:
            return self.missing
        if not self.knows(place):
            called = self.called.removeprefix("an ").removeprefix("a ")
            return replace(self.missing, unfit=f"{place} is a whole model, and no {called}")
        reads = self.reads_headers and place.is_dir() and not has_weights(place) and pickle_in(place) is None
        if reads and weights_to_come(place):  # a folder of the hub's cache without its weights
            return replace(self.missing, unfit=f"the weights of {place} are not downloaded")
        file, name = self.drafter.split(":")
        found: Found = getattr(import_module(f"foredraft.drafters.{file}"), name).found(place, search.target)
        return found


EITHER = "its folder or GGUF file"
EAGLE3_ASSET = HeadAsset("eagle3", "an EAGLE-3 head", EITHER, "eagle3:Eagle3")
P_EAGLE_ASSET = HeadAsset("p-eagle", "a P-EAGLE head", "its folder", "p_eagle:PEagle")
EAGLE_ASSET = HeadAsset("eagle", "an EAGLE-1 or EAGLE-2 head", "its folder", "eagle3:Eagle")
MEDUSA_ASSET = HeadAsset("medusa", "Medusa heads", "their folder", "medusa:Medusa")
DFLASH_ASSET = HeadAsset("dflash", "a DFlash head", EITHER, "block_drafter:DFlash")
DSPARK_ASSET = HeadAsset("dspark", "a DSpark head", EITHER, "block_drafter:DSpark")
ASSISTANT_ASSET = HeadAsset(
    "gemma4-assistant", "an assistant", "its folder or hub id", "gemma4_assistant:Gemma4Assistant",
    needed="the model's assistant", reads_headers=False,
)  # fmt: skip


class MTPAsset(HeadAsset):
    """A head that predicts further tokens: among the target's tensors, or given."""

    def find(self, search: AssetSearch) -> Found | Missing:
        if search.draft is not None and self.knows(search.draft):
            return super().find(search)
        if not search.weights_here:
            return Missing(
                "has a head that predicts further tokens or none: the weights that tell are not downloaded"
            )
        target, source = search.target, search.target.source.base
        if not may_predict_further(source.path):
            return self.missing
        from foredraft.drafters.mtp import MTP, files_in

        return self.missing if files_in(source, target) is None else MTP.found(source.path, target)


MTP_ASSET = MTPAsset("mtp", "a head that predicts further tokens (MTP)", EITHER, "mtp:MTP")
MTP_ASSET.required = None  # most such models have it among their own tensors


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
        from foredraft.drafters.layer_skip import LayerSkip
        from foredraft.drafters.plan_files import PlanFile, fitting_plan, given_plan, kept_plan

        given = given_plan(search)
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


LEAST = 2**27  # bytes of the smallest target that gets a copy: a smaller one lies in the processor's caches
SHARE = 4  # it takes at most this fraction of the memory that the weights leave, 1 / SHARE
OFFER = (
    f"auto makes a copy in 4 bits by itself where a model of 16 or 32 bits takes {LEAST >> 20} MiB or more,"
    f" runs on the CPU kernels, and leaves memory for {SHARE} copies free"
)


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
        """Return a copy that may pay: of a large target of 16 or 32 bits that leaves memory for several."""
        bits, target = BITS[DEFAULT_COPY], search.target
        if not search.weights_here:
            return self.missing
        if search.choosing and target.coded_bits is None:
            models = [target, *(model for found in search.found for model in found.models)]
            sizes = [weight_bytes(model.spec, search.device, model.dtype) for model in models]
            several = SHARE * coded_copy_bytes(target.spec, bits)
            ample = sizes[0] >= LEAST and several <= search.free_memory() - sum(sizes)
            if ample and _no_kernels_because(search) is None:
                from foredraft.drafters import plan_files

                return _copy(search, bits, plan_files.kept_plan(search, DEFAULT_COPY), offered=True)

        def why() -> str | None:
            reason = _unfit_because(search, bits)
            return None if reason is None else f"low-bit has no copy of this model: {reason}"

        return replace(self.missing, why=why)


def _copy(search: AssetSearch, bits: int, plan: ChosenPlan | None, *, offered: bool = False) -> Found:
    from foredraft.drafters.layer_skip import LowBit, low_bit_copy

    def announce() -> None:
        """Log that a copy is made without being asked for, once where a cache folder remembers it."""
        key = {"of": "low-bit", "model": str(search.target.source.path.resolve())}
        if offered and user_cache.read("notices", key) is None:
            logger.warning("drafter low-bit is at hand, too, with a copy of %s: %s", as_gib(size), OFFER)
            user_cache.write("notices", key, True)

    size = coded_copy_bytes(search.target.spec, bits)
    skips, planned = (None, None) if plan is None else (plan.skips, plan.max_draft)
    return Found(
        bytes=size, planned=planned, about=f"a copy of {as_gib(size)}: {OFFER}", announce=announce,
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
    spec, dtype = search.target.spec, search.target.dtype
    return unserved_because(spec, search.device, dtype) if search.kernels else "they are off"


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

        try:
            folder = kangaroo.kept_adapter(search.target.source) or shipped if given is None else Path(given)
            if folder is None:
                return self.missing
            config = kangaroo.read_adapter(folder)
            kangaroo.check_made_for(config, search.target)
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


DEFAULT_MIB = 64  # of memory for texts where a file of them is given: some 130,000 tokens


class TextsAsset(Asset):
    """Memory for texts. The drafter is there where the user asks for it, or for such memory."""

    missing = Missing(
        "is there only where it is asked for", ("name it, or give ", Option("recent_texts", DEFAULT_MIB))
    )

    def find(self, search: AssetSearch) -> Found | Missing:
        mib, path = search.options["recent_texts"], search.options["texts_file"]
        if mib is None and path is None and not search.needed:
            return self.missing
        most_bytes = (mib if mib is not None else 0 if path is None else DEFAULT_MIB) << 20
        from foredraft.drafters.recent_texts import LONGEST_DRAFT, RecentTexts, Suffix, TextsFile

        file = TextsFile.of(search.target, None if path is None else Path(path))
        texts = file.read()

        def build(parts: Parts) -> Suffix:
            recent = RecentTexts(most_bytes)
            for text in texts:
                recent.add(*text)
            return Suffix(recent, file)

        return Found(
            bytes=most_bytes if search.device.type == "cpu" else 0, planned=LONGEST_DRAFT,
            longest_draft=LONGEST_DRAFT, about=f"its own text, and {most_bytes >> 20} MiB of recent ones",
            build=build,
        )  # fmt: skip


PLAN_ASSET, COPY_ASSET, ADAPTER_ASSET, TEXTS_ASSET = PlanAsset(), CopyAsset(), AdapterAsset(), TextsAsset()
