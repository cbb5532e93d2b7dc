"""Low bit: the target drafts for itself, with a copy of its weights in few bits.

The copy runs in the same passes and on the same cache; a step reads a quarter or a half of a plain step's
bytes (QuantSpec, Tiwari et al. 2025, arXiv:2502.10424; ML-SpecQD, Georganas et al. 2025, arXiv:2503.13565). A
draft's keys and values lie past the committed length, where the verifying pass overwrites them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

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
)
from foredraft.drafters.layer_skip import SelfSpeculative
from foredraft.drafters.plan_files import ChosenPlan, PlanFile, fitting_plan, given_plan, kept_plan
from foredraft.drafters.skips import Skips
from foredraft.errors import ConfigError, Option
from foredraft.kernels.pool import Arena
from foredraft.model.cache import KVCache
from foredraft.model.checkpoint import Checkpoint
from foredraft.model.decoder import Decoder
from foredraft.model.layers import Product
from foredraft.model.memory import as_gib
from foredraft.model.quantisation import BITS
from foredraft.model.runner import Runner, unserved_because
from foredraft.model.runner.native import code_native
from foredraft.model.weights import coded_copy_bytes, weight_bytes

logger = logging.getLogger(__name__)


class LowBit(SelfSpeculative):
    """An autoregressive drafter over a coded copy of the target."""

    name = "low-bit"

    def __init__(
        self, copy: Runner, cache: KVCache, skips: Skips | None = None, planned: int | None = None
    ) -> None:
        super().__init__(copy, cache, skips, planned, resumes=False)
        copy.reserve_positions(cache.stored)


def low_bit_copy(target: Runner, bits: int) -> Runner:
    """Return a runner of a copy of the target whose linear layers have codes of so many bits."""
    whole, arena = target.decoder, Arena()

    def coded(product: Product) -> Product:
        return code_native(product, bits, arena)

    layers = tuple(layer.changed(coded) for layer in whole.layers)
    inputs = whole.inputs and replace(whole.inputs, projection=coded(whole.inputs.projection))
    head, learned = coded(whole.output), whole.learned_positions
    decoder = Decoder(whole.spec, whole.embedding, layers, whole.norm, head, learned, inputs)
    return Runner(decoder, shapes=target.shapes)


@dataclass(frozen=True, kw_only=True)
class FoundCopy(Found):
    target: Checkpoint
    offered: bool = False  # it is made without being asked for

    def announce(self) -> None:
        """Log that a copy is made without being asked for, once where a cache folder remembers it."""
        if not self.offered:
            return
        key = {"of": "low-bit", "model": str(self.target.source.path.resolve())}
        if user_cache.read("notices", key) is None:
            size = as_gib(self.bytes)
            logger.warning("drafter low-bit is at hand, too, with a copy of %s: %s", size, OFFER)
            user_cache.write("notices", key, True)


class CopyAsset(Asset):
    """A copy of the target in few bits, made where the user asks for it, or where it may pay (`_offered`)."""

    missing = Missing(f"has no copy of this model: {OFFER}", ("give ", Option("draft_weights", DEFAULT_COPY)))

    def find(self, search: AssetSearch) -> Found | Missing:
        asked = search.options["draft_weights"]
        weights, given = asked or DEFAULT_COPY, given_plan(search)
        planned_for = given.draft_weights if isinstance(given, PlanFile) else None
        if planned_for not in (None, weights if search.needed else None):
            raise ConfigError(
                f"is for drafter low-bit in {planned_for}", option="plan",
                remedy=("give ", Option("drafter", "low-bit"), " and ", Option("draft_weights", planned_for)),
            )  # fmt: skip
        if not search.needed and asked is None:
            return self._offered(search)
        if (reason := _unfit_because(search, BITS[weights])) is not None:
            option = Option("drafter", LowBit.name) if search.needed else Option("draft_weights", asked)
            raise ConfigError(f"but {reason}", option=option.name, value=option.value, remedy="leave it out")
        plan = None
        if given is None:
            plan = kept_plan(search, weights)
        elif search.needed:  # else it is the target's; a plan of either is doubted by the target's drafter
            plan = fitting_plan(given, search, warn=planned_for is not None)
        return _copy(search, BITS[weights], plan)

    def _offered(self, search: AssetSearch) -> Found | Missing:
        """Return a copy that may pay, where the policy chooses among drafters and memory is ample."""
        bits = BITS[DEFAULT_COPY]
        if not search.weights_here:
            return self.missing
        if search.choosing and _is_ample(search, bits) and _no_kernels_because(search) is None:
            return _copy(search, bits, kept_plan(search, DEFAULT_COPY), offered=True)

        def why() -> str | None:
            reason = _unfit_because(search, bits)
            return None if reason is None else f"{LowBit.name} has no copy of this model: {reason}"

        return replace(self.missing, why=why)


def _copy(search: AssetSearch, bits: int, plan: ChosenPlan | None, *, offered: bool = False) -> FoundCopy:
    size = coded_copy_bytes(search.target.spec, bits)
    skips, planned = (None, None) if plan is None else (plan.skips, plan.max_draft)
    return FoundCopy(
        bytes=size, planned=planned, about=f"a copy of {as_gib(size)}: {OFFER}",
        target=search.target, offered=offered,
        build=lambda parts: LowBit(low_bit_copy(parts.target, bits), parts.cache, skips, planned),
    )  # fmt: skip


def _is_ample(search: AssetSearch, bits: int) -> bool:
    """Return whether the target is large, of 16 or 32 bits, and leaves memory for several copies."""
    target = search.target
    if target.coded_bits is not None:
        return False
    models = [target, *(model for found in search.found for model in found.models)]
    sizes = [weight_bytes(model.spec, search.device, model.dtype) for model in models]
    if sizes[0] < LEAST:
        return False
    return SHARE * coded_copy_bytes(target.spec, bits) <= search.free_memory() - sum(sizes)


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


ASSET = CopyAsset()
