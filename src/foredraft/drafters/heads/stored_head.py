"""A head as it is stored: every tensor in its own dtype, under the names of SpecForge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.heads.eagle3_files import (
    CONFIG,
    D2T,
    EMBEDDING,
    HEAD,
    LAYER,
    OF_THE_HEAD,
    T2D,
    Eagle3Files,
    read_eagle3,
)
from foredraft.drafters.heads.eagle3_writing import maps_of
from foredraft.drafters.heads.record import HeadRecord
from foredraft.drafters.heads.settings import with_settings
from foredraft.drafters.heads.words import draft_words
from foredraft.errors import CheckpointError, ConfigError
from foredraft.model.config import read_json
from foredraft.model.safetensors_file import SafetensorsFile
from foredraft.model.spec import ModelSpec
from foredraft.model.tensor_layouts import EMBEDDING as TARGETS_EMBEDDING
from foredraft.model.unread import Checkpoint
from foredraft.model.weights import read_tensors

__all__ = ["StoredHead", "read_stored_head"]


@dataclass(frozen=True, slots=True)
class StoredHead:
    """A head with its tensors.

    Attributes:
        record: What it is, with the settings that the doctor wrote beside it.
        body: The config of its layers.
        tensors: By the names of SpecForge; the logits' rows are always among them.
        words: The target's id of each of its words, [words]; None where they are the target's.
    """

    record: HeadRecord
    body: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    words: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """That of its weights."""
        return self.tensors["fc.weight"].dtype


def read_stored_head(folder: Path, target: Checkpoint, option: str = "draft") -> StoredHead:
    """Read a head and its settings.

    Args:
        folder: The head's.
        target: Its target.
        option: The one that names the folder, for messages.

    Raises:
        CheckpointError: The head is broken, or for another target.
        ConfigError: It has a setting that no file of other engines can have.
    """
    files, settings = with_settings(read_eagle3(folder), target.spec)
    record = files.record
    if settings.window is not None:
        raise ConfigError(
            f"whose settings have a window of {settings.window} positions, which no format of a head holds",
            option=option, value=str(folder), remedy="remove foredraft-head.json",
        )  # fmt: skip
    tensors = _tensors(files)
    maps = [tensors.pop(name, None) for name in (D2T, T2D)]
    words = draft_words(
        str(folder), record.words, record.spec.vocab_size,
        *(None if each is None else each.long() for each in maps),
    )  # fmt: skip
    if not record.own_embedding:
        tensors.pop(EMBEDDING, None)
    if not record.own_head:
        rows = _rows_of(target)
        tensors[HEAD] = rows if words is None else rows[words]
        record = replace(record, own_head=True)
    if words is not None:
        tensors |= maps_of(words, record)
    return StoredHead(record, _body(folder, record), tensors, words)


def _tensors(files: Eagle3Files) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(files.folder.glob("*.safetensors")):
        with SafetensorsFile(path) as file:
            found |= {name: file.get_tensor(name).clone() for name in file.tensors if name in files.shapes}
    first = f"{files.record.layer}."
    return {
        f"midlayer.{name.removeprefix(first)}" if name.startswith(first) else name: tensor
        for name, tensor in found.items()
    }


def _body(folder: Path, record: HeadRecord) -> dict[str, Any]:
    """Return the config of the layers, with what the settings changed."""
    config = read_json(folder / CONFIG)
    own = dict(
        config.get(LAYER) or {name: value for name, value in config.items() if name not in OF_THE_HEAD}
    )
    own.setdefault("model_type", "llama")
    theta = record.spec.rope.theta
    parameters = own.get("rope_parameters")
    if isinstance(parameters, dict):
        own["rope_parameters"] = {**parameters, "rope_theta": theta}
    else:
        own["rope_theta"] = theta
    own = {name: value for name, value in own.items() if name not in OF_THE_HEAD}
    assert ModelSpec.from_hf(own).rope == record.spec.rope
    return own


def _rows_of(target: Checkpoint) -> Tensor:
    """Return the weight of the target's head, as it is stored."""
    name = f"{TARGETS_EMBEDDING}.weight" if target.spec.tied else HEAD
    found = read_tensors(target.folder, name.__eq__)
    if name not in found:
        raise CheckpointError(f"{target.folder} has no {name} that a head could take over")
    return found[name]
