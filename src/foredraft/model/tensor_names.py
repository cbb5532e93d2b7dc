"""Tensor names: how the names that a checkpoint stores become those that the decoder asks for.

Contract: the decoder knows one set of names, those of `LlamaForCausalLM`. A family that spells them otherwise
has a layout (`tensor_layouts.py`). A multimodal checkpoint spells those of its text model in one of two ways:
the older `language_model.model.*` with `language_model.lm_head.*`, or `model.language_model.*` with
`lm_head.*`. Each is accepted, a mix of both is refused. The tensors of its other parts stay unread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from foredraft.errors import CheckpointError

__all__ = ["AS_STORED", "CONV1D", "HEAD", "LAYERS", "LINEAR", "Naming", "Renamed", "unnested"]

LAYERS, HEAD = "model.layers", "lm_head"
LINEAR, CONV1D = "Linear", "Conv1D"  # classes of linear layers; a Conv1D stores its weight as [K, M]
# the parts of a multimodal checkpoint that no text passes through
OTHER_PARTS = (
    "vision_tower",
    "multi_modal_projector",
    "visual",
    "audio_tower",
    "embed_vision",
    "embed_audio",
    "vision_embedder",
)
UNREAD = re.compile(rf"(?:model\.)?(?:{'|'.join(OTHER_PARTS)})\..+")
OLDER = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
NEWER = {"model.language_model.": "model.", "lm_head.": "lm_head."}
SPELLINGS = (OLDER, NEWER)


@dataclass(frozen=True)
class Naming:
    """How a checkpoint names its tensors.

    Attributes:
        nested: They are those of a multimodal checkpoint.
    """

    nested: bool = False

    @property
    def stored_layers(self) -> str:
        """How a checkpoint names the list of layers."""
        return LAYERS

    def plain(self, stored: Iterable[str]) -> dict[str, str]:
        """Return the decoder's names of stored tensors by their stored ones; those of other parts are left.

        Raises:
            CheckpointError: The text tensors are spelled in two ways.
        """
        found = {name: self._renamed(name) for name in stored if not (self.nested and UNREAD.fullmatch(name))}
        if self.nested:
            _check_spelling(found)
        first: dict[str, str] = {}
        for name, plain in found.items():
            if (other := first.setdefault(plain, name)) != name:
                raise _two_ways(other, name)
        return found

    def opened(self, file: Any, stored: str, name: str) -> Any:
        """Return the open file of a tensor, which gives it under the decoder's name."""
        return file if name == stored else Renamed(file, stored)

    def stored_name(self, name: str) -> str:
        """Return the name that a checkpoint of the family gives a tensor of the decoder."""
        return name

    def stored_values(self, name: str, values: Tensor) -> Tensor:
        """Return what is stored for a tensor."""
        return values

    @property
    def written_keys(self) -> dict[str, Any]:
        """The keys of a config that differ in a checkpoint which is written of the decoder's tensors."""
        return {}

    def combined(self, files: Mapping[str, Any]) -> dict[str, Any]:
        """Return open files, by the decoder's names, in which tensors that are made of several are one."""
        return dict(files)

    def stored_module(self, module: str) -> str:
        """Return the name that a checkpoint of the family gives a linear layer of the decoder."""
        return self.stored_name(f"{module}.weight").removesuffix(".weight")

    def layer_class(self, module: str) -> str:
        """Return the class that a linear layer has in `transformers`, by its name in the decoder."""
        return LINEAR

    def is_ignored(self, stored: str) -> bool:
        """Return whether a stored tensor is one that carries no information."""
        return False

    def _renamed(self, name: str) -> str:
        return unnested(name) if self.nested else name


@dataclass(frozen=True)
class Renamed:
    """An open file that gives one of its tensors under another name."""

    file: Any
    stored: str

    def get_slice(self, name: str) -> Any:
        """Return the header of the tensor."""
        return self.file.get_slice(self.stored)

    def get_tensor(self, name: str) -> Tensor:
        """Return the tensor."""
        found: Tensor = self.file.get_tensor(self.stored)
        return found


def _check_spelling(stored: Iterable[str]) -> None:
    """Check that the names of text tensors are all of one spelling."""
    older, newer = (
        next((name for name in stored if name.startswith(tuple(spelling))), None) for spelling in SPELLINGS
    )
    if older is not None and newer is not None:
        raise _two_ways(older, newer)


def _two_ways(one: str, other: str) -> CheckpointError:
    return CheckpointError(
        f"the tensors {one} and {other} are spelled in two ways",
        remedy="use a checkpoint that names all its text tensors alike",
    )


def unnested(name: str) -> str:
    """Return the name that a tensor or module of the text model has in a checkpoint of that model alone."""
    for spelling in SPELLINGS:
        for prefix, plain in spelling.items():
            if name.startswith(prefix):
                return plain + name.removeprefix(prefix)
    return name


AS_STORED = Naming()
