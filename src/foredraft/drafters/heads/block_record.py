"""The record of a block drafter: what every spelling of a DFlash or DSpark head is read into.

A block is a pending token, the *anchor*, and masked slots after it. Slot 0 is the anchor's. The head drafts
from every slot (`from_anchor`: slot k gives the token at anchor + k + 1) or from the masked ones alone (slot
k gives the token at anchor + k).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

from foredraft.drafters.heads.record import HeadRecord
from foredraft.errors import CheckpointError
from foredraft.model.spec import ModelSpec

__all__ = ["MARKOV_FORMS", "BlockRecord", "spread_taps"]

MARKOV_FORMS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecord(HeadRecord):
    """What a block drafter is.

    Attributes:
        block: Slots of a block, the anchor's among them.
        mask_token: The target's id whose embedding stands in the masked slots.
        from_anchor: The anchor's slot drafts, too.
        causal: A slot attends to no later slot of its block in layers without a window.
        causal_windows: The same in layers with one.
        window_from_anchor: Windows reach back from the anchor and hold whole blocks; else they reach back
            from each slot.
        embedding_scale, logit_scale, logit_softcap: As its config says, whatever the target's are.
        markov: The form of the bias that the token before a slot adds to its logits; None for no bias.
        markov_rank: Rank of that bias.
        target_layers: Layers of the target that it was made for; None where its config does not say.
        last_is_normed: A tap after the last layer means the normed state, which no target hands over.
    """

    block: int
    mask_token: int
    from_anchor: bool = False
    causal: bool = False
    causal_windows: bool = True
    window_from_anchor: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    markov: str | None = None
    markov_rank: int = 0
    target_layers: int | None = None
    last_is_normed: bool = False

    @property
    def drafts(self) -> int:
        """The tokens of a whole draft."""
        return self.block if self.from_anchor else self.block - 1

    @property
    def first_slot(self) -> int:
        """The slot that gives the first token of a draft."""
        return 0 if self.from_anchor else 1

    @property
    def misread(self) -> tuple[str, ...]:
        # a block of the anchor alone drafts from it
        return ("from_anchor", "causal") if self.block > 1 else ()

    @property
    def tried_length(self) -> int | None:
        return max(1, self.block - 1)

    def windowed(self, window: int) -> Self:
        spec = replace(self.spec, windows=(window,) * self.spec.layers)
        causal = self.causal_windows if any(self.spec.windows) else self.causal
        return replace(self, spec=spec, causal_windows=causal)

    def for_target(self, target: ModelSpec, name: str) -> Self:
        checked = HeadRecord.for_target(self, target, name)
        if self.target_layers not in (None, target.layers):
            raise CheckpointError(
                f"{name} is for a target of {self.target_layers} layers, but the target has {target.layers}",
                remedy="give a head of this target",
            )
        if self.last_is_normed and target.layers in (checked.taps or ()):
            raise CheckpointError(
                f"{name} reads the target's last state after its norm, which is not supported",
                remedy="give a head that reads the target before its last layer",
            )
        return checked


def spread_taps(target_layers: int, layers: int) -> tuple[int, ...]:
    """Return the boundaries that z-lab's heads read where their config names none: one for each layer.

    Args:
        target_layers: Of the target.
        layers: Of the head.

    Examples:
        >>> spread_taps(36, 5)
        (2, 10, 18, 26, 34)
    """
    if layers == 1:
        return (target_layers // 2 + 1,)
    step = (target_layers - 4) / (layers - 1)
    return tuple(round(1 + index * step) + 1 for index in range(layers))


def in_order(taps: Sequence[int]) -> bool:
    """Return whether no boundary comes twice or before an earlier one."""
    return all(one < other for one, other in pairwise(taps))
