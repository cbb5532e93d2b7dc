"""EAGLE-1 and EAGLE-2: a head over the target's last state drafts (Li et al. 2024).

arXiv:2401.15077 and arXiv:2406.16858 differ in the tree that they draft; their heads are alike, and draft a
chain here. All but the files and the first layer is EAGLE-3's: the target's states of committed positions
come at commit, the head keeps its own keys and values, and what its last layer gives recurs.
"""

from __future__ import annotations

from pathlib import Path

from foredraft.drafters.asset import Missing
from foredraft.drafters.eagle3 import Eagle3, Eagle3Asset
from foredraft.drafters.heads.eagle_files import is_eagle, read_eagle
from foredraft.errors import Option

__all__ = ["ASSET", "Eagle"]


class Eagle(Eagle3):
    """A stepper over an EAGLE-1 or EAGLE-2 head and the target's last states."""

    name = "eagle"
    read_files = staticmethod(read_eagle)


class EagleAsset(Eagle3Asset):
    """An EAGLE-1 or EAGLE-2 head."""

    drafter = Eagle
    called = "EAGLE-1 or EAGLE-2 head"
    missing = Missing(
        "needs an EAGLE-1 or EAGLE-2 head of this model", ("give ", Option("draft"), ", its folder")
    )
    required = Missing("which needs an EAGLE-1 or EAGLE-2 head of the model", missing.remedy)

    def knows(self, place: Path) -> bool:
        return is_eagle(place)


ASSET = EagleAsset()
