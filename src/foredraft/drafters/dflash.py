"""DFlash: a head over the target's states drafts a block in one pass (Chen et al. 2026, arXiv:2602.06036).

All slots are computed before any token is drawn, so the logits of slot k depend on the text before the draft
alone. That keeps ordinary rejection exact: it needs q of a token given the tokens before it, and as slots are
drawn independently, that is the marginal q of the slot. A transform that looks at drawn tokens (a penalty, a
grammar) changes both the draw and the q that is kept. Slots behind a rejection were drawn from text that does
not come; neither they nor their q are read.
"""

from __future__ import annotations

from pathlib import Path

from foredraft.drafters.asset import Missing
from foredraft.drafters.block_drafter import BlockAsset, BlockDrafter
from foredraft.drafters.heads.block_gguf import knows_dflash
from foredraft.errors import Option

__all__ = ["ASSET", "DFlash"]


class DFlash(BlockDrafter):
    """A stepper whose slots are independent."""

    name = "dflash"


class DFlashAsset(BlockAsset):
    """A DFlash head."""

    called, drafter = "DFlash head", DFlash
    missing = Missing(
        "needs a DFlash head of this model", ("give ", Option("draft"), ", its folder or GGUF file")
    )
    required = Missing("which needs a DFlash head of the model", missing.remedy)

    def knows(self, place: Path) -> bool:
        return knows_dflash(place)


ASSET = DFlashAsset()
