"""DSpark: DFlash, and a bias of each slot from the token before it (arXiv:2607.05147).

The pass over the block gives the states of all slots. Their logits come in order: those of a slot include a
bias of low rank from the token that was drawn before it. So q of a slot is conditioned on the draft so far,
as that of any drafter which reads its own tokens, and ordinary rejection is exact with it.
"""

from __future__ import annotations

from pathlib import Path

from foredraft.drafters.asset import Missing
from foredraft.drafters.block_drafter import BlockAsset, BlockDrafter
from foredraft.drafters.heads.block_gguf import knows_dspark
from foredraft.errors import Option

__all__ = ["ASSET", "DSpark"]


class DSpark(BlockDrafter):
    """A stepper whose slots follow each other."""

    name = "dspark"


class DSparkAsset(BlockAsset):
    """A DSpark head."""

    called, drafter = "DSpark head", DSpark
    missing = Missing(
        "needs a DSpark head of this model", ("give ", Option("draft"), ", its folder or GGUF file")
    )
    required = Missing("which needs a DSpark head of the model", missing.remedy)

    def knows(self, place: Path) -> bool:
        return knows_dspark(place)


ASSET = DSparkAsset()
