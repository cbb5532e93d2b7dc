"""Projected embeddings: tables narrower than the hidden states, folded into tables of their width.

OPT 350M (arXiv:2205.01068) looks tokens up in a table [V, E] and projects the rows to the hidden size, and
projects hidden states back before a head [V, E]. Two products without anything between them are one, so the
decoder has an embedding and a head [V, hidden], computed in float32 and rounded once. A folded embedding is
what the projection gives for each token; the logits are the same in exact arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.model.config import DOWNLOAD_AGAIN
from foredraft.model.tensor_layouts import EMBEDDING, HEAD, TensorLayout

__all__ = ["PROJECTIONS", "ProjectedLayout"]

INWARD, OUTWARD = "model.project_in", "model.project_out"
PROJECTIONS = {"project_in": INWARD, "project_out": OUTWARD}  # outer modules of a layout


@dataclass(frozen=True, eq=False)
class ProjectedLayout(TensorLayout):
    """A layout whose embedding and head are stored narrow, with a projection each.

    Attributes:
        tied: The head's stored table is that of the embedding.
    """

    tied: bool = True

    @property
    def written_keys(self) -> dict[str, Any]:
        return {"word_embed_proj_dim": None, "tie_word_embeddings": False}

    def combined(self, files: Mapping[str, Any]) -> dict[str, Any]:
        names = {name: f"{name}.weight" for name in (EMBEDDING, HEAD, INWARD, OUTWARD)}
        head = EMBEDDING if self.tied else HEAD
        for name in (EMBEDDING, INWARD, OUTWARD, head):
            if names[name] not in files:
                raise CheckpointError(
                    f"tensor {self.stored_name(names[name])} is missing from the checkpoint",
                    remedy=DOWNLOAD_AGAIN,
                )
        if self.tied and names[HEAD] in files and not _equal(files, names[HEAD], names[EMBEDDING]):
            raise CheckpointError(
                f"tensor {names[HEAD]} differs from {names[EMBEDDING]}, but config.json ties them",
                remedy="correct tie_word_embeddings",
            )
        found = {name: file for name, file in files.items() if name not in names.values()}
        inward = Folded(files[names[EMBEDDING]], names[EMBEDDING], files[names[INWARD]], names[INWARD])
        outward = Folded(files[names[head]], names[head], files[names[OUTWARD]], names[OUTWARD], outward=True)
        return found | {names[EMBEDDING]: inward, names[HEAD]: outward}


def _equal(files: Mapping[str, Any], one: str, other: str) -> bool:
    return torch.equal(*(files[name].get_tensor(name).float() for name in (one, other)))


@dataclass(frozen=True)
class Folded:
    """An open file that gives a table [V, E] times a projection [hidden, E], or [E, hidden] if outward."""

    tables: Any
    table: str
    projections: Any
    projection: str
    outward: bool = False

    def get_slice(self, name: str) -> Folded:
        """Return the tensor, whose values are not read yet."""
        return self

    def get_dtype(self) -> str:
        """Return how the values are given."""
        return "F32"

    def get_shape(self) -> list[int]:
        """Return the shape of the product."""
        rows = self.tables.get_slice(self.table).get_shape()[0]
        projection = self.projections.get_slice(self.projection).get_shape()
        return [rows, projection[1 if self.outward else 0]]

    def get_tensor(self, name: str) -> Tensor:
        """Return the product."""
        return self[:]

    def __getitem__(self, rows: slice) -> Tensor:
        projection: Tensor = self.projections.get_tensor(self.projection).float()
        table: Tensor = self.tables.get_tensor(self.table)
        return table[rows].float() @ (projection if self.outward else projection.T)
