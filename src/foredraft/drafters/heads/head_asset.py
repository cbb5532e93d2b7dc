"""The asset of a drafter with a head of the model: what the user gives as the draft model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from foredraft.drafters.asset import Asset, AssetSearch, Found, Missing
from foredraft.drafters.heads.weight_files import not_downloaded
from foredraft.model.unread import Checkpoint

__all__ = ["HeadAsset"]


class HeadAsset(Asset):
    """A head: the folder, GGUF file or hub id that the user gives as the draft model.

    Attributes:
        called: What messages call it.
    """

    called: ClassVar[str]

    def find(self, search: AssetSearch) -> Found | Missing:
        place = search.draft
        if place is None:
            return self.missing
        if not self.knows(place):
            return replace(self.missing, unfit=f"{place} is a whole model, and no {self.called}")
        if not_downloaded(place):
            return replace(self.missing, unfit=f"the weights of {place} are not downloaded")
        return self.found(place, search.target)

    def found(self, place: Path, target: Checkpoint) -> Found:
        """Return the head, which is there.

        Raises:
            CheckpointError: It is broken, or for another target.
        """
        raise NotImplementedError
