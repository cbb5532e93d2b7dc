"""`ModelSource`: a model before its weights are read: its config, its tokenizer, its tensors, its identity.

It is made of a checkpoint's folder (here) or of a GGUF file (`gguf/source.py`), may have LoRAs, which are
merged while tensors are read (`lora/merging.py`), and is handed on in place of paths.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import GENERATION, broken, is_file_name, read_json
from foredraft.model.safetensors_file import INDEX, SINGLE, SafetensorsFile, StoredTensor
from foredraft.model.spec import CONFIG, ModelSpec
from foredraft.model.tokenizer import FILE, Tokenizer

Opened = dict[str, StoredTensor]  # by their names in the files
WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")  # suffixes of files


class ModelSource:
    """The source that a checkpoint's folder is."""

    loras: tuple[tuple[str, Path], ...] = ()  # those that are merged: their names, for display; their folders
    # gives the tensors that they change
    merge: Callable[[Opened, ExitStack, torch.dtype], Opened] | None = None
    _base: ModelSource | None = None  # the source without LoRAs
    renamed = False  # tensors have the decoder's names, whatever the family's are

    def __init__(self, path: Path) -> None:
        self.path = path  # the folder or the GGUF file, which is the first of its parts

    def __str__(self) -> str:
        return str(self.path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelSource) and (self.path, self.loras) == (other.path, other.loras)

    def __hash__(self) -> int:
        return hash((self.path, self.loras))

    @property
    def base(self) -> ModelSource:
        """The source without LoRAs."""
        return self._base or self

    @property
    def shown(self) -> str:
        """What messages call it: its folder or GGUF file, and its LoRAs."""
        return " + ".join([str(self), *(name for name, _ in self.loras)])

    def named(self, file: str) -> Path:
        """Return the path to name where something is wrong with one of the small files."""
        return self.path / file

    @property
    def files(self) -> list[Path]:
        """The files that it is read from, and others beside them."""
        return self._own_files() + [file for _, lora in self.loras for file in lora.iterdir()]

    def _own_files(self) -> list[Path]:
        return [*self.path.iterdir()]

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_json(self.path / CONFIG)

    @cached_property
    def generation(self) -> dict[str, Any] | None:
        """The content of generation_config.json; None without one."""
        file = self.path / GENERATION
        return read_json(file) if file.is_file() else None

    @cached_property
    def spec(self) -> ModelSpec:
        return ModelSpec.from_folder(self.path)

    def tokenizer(self, size: int | None = None, *, like: Tokenizer | None = None) -> Tokenizer | None:
        """Return the tokenizer of a model with so many ids; None where it has none."""
        return Tokenizer.from_folder(self.path, size, like=like)

    @property
    def tokenizer_json(self) -> bytes | None:
        """The content of tokenizer.json; None without one."""
        file = self.path / FILE
        return file.read_bytes() if file.is_file() else None

    def write_others(self, folder: Path, beginnings: tuple[str, ...] = ("",)) -> None:
        """Write the files besides config and weights whose names begin so into a folder."""
        weights = WEIGHTS if self.loras else WEIGHTS[:1]  # those of the base alone
        for file in self.path.iterdir():
            others = file.suffix not in weights and file.name not in (CONFIG, INDEX)
            if others and file.name.startswith(beginnings) and file.is_file():
                shutil.copyfile(file, folder / file.name)

    def open(self, stack: ExitStack, device: torch.device, dtype: torch.dtype) -> Opened:
        """Return the tensors, unread; those on "meta" stay so, those that LoRAs change come in `dtype`."""
        opened = self._open(stack, device)
        return opened if self.merge is None else opened | self.merge(opened, stack, dtype)

    def _open(self, stack: ExitStack, device: torch.device) -> Opened:
        if (self.path / SINGLE).is_file():
            return stack.enter_context(SafetensorsFile(self.path / SINGLE)).stored
        if (self.path / INDEX).is_file():
            return self._open_shards(stack)
        problem = f"{self.path} has neither {SINGLE} nor {INDEX}"
        raise CheckpointError(problem, remedy="give a checkpoint in safetensors format")

    def _open_shards(self, stack: ExitStack) -> Opened:
        """Open the files that the index lists, and check that they hold exactly the tensors it lists."""
        folder, found = self.path, Opened()
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise broken(f"{folder / INDEX} has no weight_map from tensor names to files")
        for shard in sorted(set(weight_map.values())):
            if not is_file_name(shard):
                raise broken(f"{folder / INDEX} lists {shortened(shard)}, which is not a file in its folder")
            if not (folder / shard).is_file():
                raise broken(f"{folder / shard} is missing, though {INDEX} lists it")
            stored = stack.enter_context(SafetensorsFile(folder / shard)).stored
            for name in stored:
                if weight_map.get(name) != shard:
                    raise broken(f"{folder / shard} holds {name}, which {INDEX} does not list there")
            found |= stored
        for name, shard in weight_map.items():
            if name not in found:
                raise broken(f"{folder / shard} lacks {name}, which {INDEX} lists there")
        return found


def source_of(place: ModelSource | Path) -> ModelSource:
    """Return a source; a path is that of a checkpoint's folder."""
    return ModelSource(place) if isinstance(place, Path) else place


def weights_to_come(folder: Path) -> bool:
    """Return whether a folder of the hub's cache lacks weights, as after `resolve` with weights=False."""
    if not folder.is_dir():  # a GGUF file
        return False
    from huggingface_hub.constants import HF_HUB_CACHE

    return folder.is_relative_to(HF_HUB_CACHE) and any(file != CONFIG for file in missing_files(folder))


def missing_files(folder: Path) -> list[str]:
    """Return the config and the files of weights that a folder should have, and does not."""
    weights = [SINGLE]
    if (folder / INDEX).is_file():  # `open` reports a malformed one
        weight_map = read_json(folder / INDEX).get("weight_map")
        files = {*map(str, weight_map.values())} if isinstance(weight_map, dict) else set()
        weights = sorted(filter(is_file_name, files))
    if (folder / SINGLE).is_file():
        weights = []
    return [file for file in (CONFIG, *weights) if not (folder / file).is_file()]
