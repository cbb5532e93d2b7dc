"""Low bit: the copy of the target's weights in few bits that drafter low-bit runs.

Contract: a copy is made where the user asks for one. Without being asked, it is made for drafter "auto" where
memory is ample; whatever else is at hand, the policy weighs it against the copy.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from foredraft.drafters.low_bit import low_bit_copy
from foredraft.errors import ConfigError, Option
from foredraft.kinds.tables import DRAFTERS
from foredraft.loading.checkpoints import Checkpoint, Checkpoints
from foredraft.loading.memory import as_gib, free_memory
from foredraft.loading.options import LoadOptions
from foredraft.loading.planning import ChosenPlan, choose_plan
from foredraft.model.quantisation import BITS
from foredraft.model.runner import Runner, unserved_because
from foredraft.model.weights import coded_copy_bytes, weight_bytes

__all__ = ["DEFAULT_COPY", "ChosenCopy", "choose_copy", "offer_copy"]

logger = logging.getLogger(__name__)

DEFAULT_COPY = "int4"
LEAST = 2**27  # bytes of the smallest target that gets one: a smaller one lies in the processor's caches
SHARE = 4  # it takes at most this fraction of the memory that the weights leave, 1 / SHARE


@dataclass(frozen=True, slots=True)
class ChosenCopy:
    """A copy of the target in few bits.

    Attributes:
        bits: Of a weight.
        bytes: Memory of its weights.
        plan: The sub-layers that it leaves out; None for none.
    """

    bits: int
    bytes: int
    plan: ChosenPlan | None

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
    if target.coded_bits is not None and target.coded_bits <= bits:
        raise ConfigError(
            f"but the target has {target.coded_bits} bits itself", option=option.name, value=option.value,
            remedy="leave it out",
        )  # fmt: skip
    if (reason := _no_kernels_because(options, target, device)) is not None:
        raise ConfigError(
            f"which needs Foredraft's kernels: {reason}", option=option.name, value=option.value,
            remedy="leave it out",
        )  # fmt: skip
    if options.plan is None:
        plan = choose_plan(None, target, device, needed=False, draft_weights=weights)
    elif not named:
        plan = None  # it is the target's
    return ChosenCopy(bits, coded_copy_bytes(target.spec, bits), plan)


def offer_copy(options: LoadOptions, checkpoints: Checkpoints, device: torch.device) -> ChosenCopy | None:
    """Return a copy for a target that chooses among drafters; None where it may not pay or fit."""
    target, bits = checkpoints.target, BITS[DEFAULT_COPY]
    if target.coded_bits is not None:
        return None
    weights = weight_bytes(target.spec, device, target.dtype)
    whole = sum(weight_bytes(each.spec, device, each.dtype) for each in checkpoints.all)
    size = coded_copy_bytes(target.spec, bits)
    if weights < LEAST or SHARE * size > free_memory(device) - whole:
        return None
    if _no_kernels_because(options, target, device) is not None:  # last: the kernels' check takes memory
        return None
    logger.warning(
        "drafter low-bit is at hand, too: a copy of the model in 4 bits, %s; a named drafter does without it",
        as_gib(size),
    )
    plan = choose_plan(None, target, device, needed=False, draft_weights=DEFAULT_COPY)
    return ChosenCopy(bits, size, plan)


def _no_kernels_because(options: LoadOptions, target: Checkpoint, device: torch.device) -> str | None:
    """Return why the kernels do not run a target; None where they run it."""
    if not options.allows_kernels:
        return "they are off"
    return unserved_because(target.spec, device, target.dtype)
