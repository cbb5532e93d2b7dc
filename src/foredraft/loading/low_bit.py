"""Low bit: the copy of the target's weights in few bits that drafter low-bit runs.

Contract: a copy is made where the user asks for one. Without being asked, it is made for drafter "auto" where
memory is ample (`kinds.offered_copy`); whatever else is at hand, the policy weighs it against the copy. A
notice tells of that once a model.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from foredraft import user_cache
from foredraft.drafters.low_bit import low_bit_copy
from foredraft.errors import ConfigError, Option
from foredraft.kinds.offered_copy import DEFAULT_COPY, LEAST, OFFER, SHARE
from foredraft.kinds.tables import DRAFTERS
from foredraft.loading.checkpoints import Checkpoint, Checkpoints
from foredraft.loading.memory import as_gib, free_memory
from foredraft.loading.options import LoadOptions
from foredraft.loading.planning import ChosenPlan, choose_plan
from foredraft.model.quantisation import BITS
from foredraft.model.runner import Runner, unserved_because
from foredraft.model.weights import coded_copy_bytes, weight_bytes

__all__ = ["DEFAULT_COPY", "ChosenCopy", "choose_copy", "offer_copy", "tell_of_copy", "unfit_because"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenCopy:
    """A copy of the target in few bits.

    Attributes:
        bits: Of a weight.
        bytes: Memory of its weights.
        plan: The sub-layers that it leaves out; None for none.
        offered: It is made without being asked for.
    """

    bits: int
    bytes: int
    plan: ChosenPlan | None
    offered: bool = False

    def make(self, target: Runner) -> Runner:
        """Return the runner of the copy."""
        return low_bit_copy(target, self.bits)


def choose_copy(
    options: LoadOptions, drafter: str, plan: ChosenPlan | None, target: Checkpoint, device: torch.device
) -> ChosenCopy | None:
    """Return the copy that the options ask for; None where they ask for none.

    A plan that is given beside this drafter is that of its copy. Without one, the plan counts that is kept
    for a copy in these weights.

    Raises:
        ConfigError: The copy cannot run here, or would have no fewer bits than the target, or the given
            plan is another copy's.
    """
    named = DRAFTERS[drafter].needs_copy
    weights = options.draft_weights or DEFAULT_COPY
    if plan is not None and plan.draft_weights not in (None, weights if named else None):
        raise ConfigError(
            f"is for drafter low-bit in {plan.draft_weights}", option="plan",
            remedy=(
                "give ", Option("drafter", "low-bit"), " and ", Option("draft_weights", plan.draft_weights)
            ),
        )  # fmt: skip
    if not named and options.draft_weights is None:
        return None
    option = Option("drafter", drafter) if named else Option("draft_weights", options.draft_weights)
    bits = BITS[weights]
    if (reason := unfit_because(options, target, device, bits)) is not None:
        raise ConfigError(f"but {reason}", option=option.name, value=option.value, remedy="leave it out")
    if options.plan is None:
        plan = choose_plan(None, target, device, needed=False, draft_weights=weights)
    elif not named:
        plan = None  # the given plan is for drafts of the target's own weights
    return ChosenCopy(bits, coded_copy_bytes(target.spec, bits), plan)


def offer_copy(options: LoadOptions, checkpoints: Checkpoints, device: torch.device) -> ChosenCopy | None:
    """Return a copy for a target that chooses among drafters; None where it may not pay or fit."""
    target, bits = checkpoints.target, BITS[DEFAULT_COPY]
    if target.coded_bits is not None:
        return None
    weights = weight_bytes(target.spec, device, target.dtype)
    whole = weights + sum(weight_bytes(each.spec, device, each.dtype) for each in checkpoints.all[1:])
    size = coded_copy_bytes(target.spec, bits)
    if weights < LEAST or SHARE * size > free_memory(device) - whole:
        return None
    # This is asked last, because the check of the kernels takes memory.
    if _no_kernels_because(options, target, device) is not None:
        return None
    plan = choose_plan(None, target, device, needed=False, draft_weights=DEFAULT_COPY)
    return ChosenCopy(bits, size, plan, offered=True)


def tell_of_copy(copy: ChosenCopy | None, target: Checkpoint) -> None:
    """Log a notice of a copy that is made without being asked for, at the first loading of the model.

    Without a cache folder, which remembers it, each loading is the first.
    """
    if copy is None or not copy.offered:
        return
    key = {"of": "low-bit", "model": str(target.source.resolve())}
    if user_cache.read("notices", key) is None:
        logger.warning("drafter low-bit is at hand, too, with a copy of %s: %s", as_gib(copy.bytes), OFFER)
        user_cache.write("notices", key, True)


def unfit_because(
    options: LoadOptions, target: Checkpoint, device: torch.device, bits: int = BITS[DEFAULT_COPY]
) -> str | None:
    """Return why a target can have no copy in so many bits; None where it can."""
    if target.coded_bits is not None and target.coded_bits <= bits:
        return f"the target has {target.coded_bits} bits itself"
    reason = _no_kernels_because(options, target, device)
    return None if reason is None else f"a copy needs Foredraft's kernels: {reason}"


def _no_kernels_because(options: LoadOptions, target: Checkpoint, device: torch.device) -> str | None:
    """Return why the kernels do not run a target; None where they run it."""
    if not options.allows_kernels:
        return "they are off"
    return unserved_because(target.spec, device, target.dtype)
