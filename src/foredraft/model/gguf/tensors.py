"""Read the tensors of a GGUF file by the names of Hugging Face, as an open safetensors file gives them.

Contract: reordered rows and Gemma's norms are as the writer of the file was given them. A tensor that is not
quantised comes in its stored dtype. Of a quantised one the bytes of each row come (`model.quantisation.gguf`
reads them). Where nothing has to be restored, the result is a view of the map.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.model.config import read_json
from foredraft.model.gguf.file import GGUFTensor
from foredraft.model.gguf.names import adds_one, model_name, row_order
from foredraft.model.gguf.parts import GGUFModel, identity
from foredraft.model.lora.record import base_of

__all__ = ["PLAIN", "RECORD", "GGUFTensors", "open_tensors", "source_of", "stored_values"]

RECORD = "gguf.json"  # names the file of a folder that `folder.checkpoint_folder` made
PLAIN = {  # kinds that are not quantised
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}


def source_of(folder: Path) -> Path:
    """Return the GGUF file that a folder was made from (its first part), or the folder itself.

    Of a model with LoRAs, those of the model itself.

    Raises:
        CheckpointError: The folder does not say which file.
    """
    folder = base_of(folder)
    return _file_of(folder, read_json(folder / RECORD)) if (folder / RECORD).is_file() else folder


def _file_of(folder: Path, record: dict[str, Any]) -> Path:
    """Return the GGUF file that a folder's record names.

    Raises:
        CheckpointError: It names none.
    """
    if not isinstance(record.get("file"), str) or not isinstance(record.get("identity"), list):
        raise CheckpointError(
            f"{folder / RECORD} does not say which GGUF file the folder was made from",
            remedy="give the model's file again",
        )
    return Path(record["file"])


def open_tensors(folder: Path, device: torch.device) -> GGUFTensors:
    """Open the file that a folder was made from.

    Args:
        folder: The folder.
        device: Where the tensors will be; for "meta" no values are read.

    Raises:
        CheckpointError: The file is broken, gone, or another than when the folder was made.
    """
    record = read_json(folder / RECORD)
    path = _file_of(folder, record)
    try:
        found = identity(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror})", remedy="give the model's file again"
        ) from error
    if found != record["identity"]:
        raise CheckpointError(f"{path} has changed while it was used", remedy="load the model again")
    heads, kv_heads = (read_json(folder / "config.json")[f"num_{kind}_heads"] for kind in KINDS_OF_HEADS)
    model = _opened(path, tuple(part and tuple(part) for part in found))
    return GGUFTensors(model, heads, kv_heads, meta=device.type == "meta")


@functools.lru_cache(maxsize=1)
def _opened(path: Path, identity: tuple[tuple[int, ...] | None, ...]) -> GGUFModel:
    """Return an open file. Loading reads it twice, and to walk over a large vocabulary takes a second."""
    return GGUFModel(path, lists=False)  # the vocabulary of Gemma takes 40 MB


KINDS_OF_HEADS = ("attention", "key_value")


class GGUFTensors:
    """The tensors of an open model, by the names of Hugging Face."""

    def __init__(self, model: GGUFModel, heads: int, kv_heads: int, *, meta: bool = False) -> None:
        """Find the tensors.

        Args:
            model: The file, or its parts.
            heads: Query heads of the model.
            kv_heads: Its key heads.
            meta: Give tensors without values.
        """
        self.model, self.heads, self.kv_heads, self.meta = model, heads, kv_heads, meta
        self.architecture: str = model.metadata["general.architecture"]
        named = ((model_name(self.architecture, name), info) for name, info in model.tensors.items())
        self.infos: dict[str, GGUFTensor] = {name: info for name, info in named if name is not None}

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return [*self.infos]

    def get_slice(self, name: str) -> GGUFSlice:
        """Return a tensor whose values are not read yet."""
        return GGUFSlice(self, self.infos[name])

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor; the caller must not change it."""
        return self.get_slice(name)[:]


class GGUFSlice:
    """A tensor whose rows are read when they are asked for."""

    def __init__(self, tensors: GGUFTensors, info: GGUFTensor) -> None:
        self.tensors, self.info = tensors, info

    def get_dtype(self) -> str:
        """Return how the tensor is stored: a key of `file.BLOCKS`."""
        return self.info.kind

    def get_shape(self) -> list[int]:
        """Return the shape of the tensor."""
        return [*self.info.shape]

    def __getitem__(self, rows: slice) -> Tensor:
        info, tensors = self.info, self.tensors
        stored = stored_values(tensors.model, info)
        if tensors.meta:
            return torch.empty_like(stored, device="meta")[rows]
        order = row_order(tensors.architecture, info.name, info.shape[0], tensors.heads, tensors.kv_heads)
        values = stored[rows] if order is None else stored[order[rows]]
        return values.float() - 1.0 if adds_one(tensors.architecture, info.name) else values


def stored_values(model: GGUFModel, info: GGUFTensor) -> Tensor:
    """Return a tensor as its file stores it: numbers of its shape, or the bytes of each row, [M, bytes]."""
    stored = model.holder(info).bytes_of(info)
    if info.kind in PLAIN:
        return stored.view(PLAIN[info.kind]).view(info.shape)
    return stored.view(*info.shape[:-1], -1)
