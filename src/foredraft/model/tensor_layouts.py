"""Tensor layouts: families that name their tensors unlike Llama throughout, or store weights as [K, M].

Contract: as in `tensor_names.py`, whose `Naming` a layout is. It also gives the names back, because a
checkpoint of the family may be written (`written`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from foredraft.model.tensor_names import CONV1D, HEAD, LAYERS, LINEAR, Naming, Renamed

__all__ = [
    "EMBEDDING",
    "HEAD",
    "LAST_NORM",
    "LAYERS",
    "LLAMA_INNER",
    "LLAMA_OUTER",
    "POSITIONS",
    "TensorLayout",
    "written",
]

EMBEDDING, POSITIONS, LAST_NORM = "model.embed_tokens", "model.embed_positions", "model.norm"
LLAMA_OUTER = {"embed_tokens": EMBEDDING, "norm": LAST_NORM}
LLAMA_INNER = {
    name: name
    for name in (
        "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    )
}  # fmt: skip
NAME = re.compile(r"(.+)\.(\w+)")  # module and tensor


@dataclass(frozen=True, eq=False)
class TensorLayout(Naming):
    """The names of a family's tensors, and which of its weights are stored as [K, M].

    Attributes:
        prefixes: What the names of all modules but the head begin with; each is accepted, and the first is
            written.
        layers: The name of the list of layers.
        outer: Modules outside the layers -> their names in the decoder.
        inner: Modules of a layer -> their names in the decoder.
        heads: The names of the head; the first is written.
        transposed: Modules of a layer, by their names in the decoder, whose weights are stored as [K, M].
        ignored: Tensors of a layer that carry no information.
    """

    prefixes: tuple[str, ...] = ("model.",)
    layers: str = "layers"
    outer: dict[str, str] = field(default_factory=lambda: LLAMA_OUTER)
    inner: dict[str, str] = field(default_factory=lambda: LLAMA_INNER)
    heads: tuple[str, ...] = (HEAD,)
    transposed: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        return self is other  # not that of `Naming`, which knows no names

    def __hash__(self) -> int:
        return id(self)

    def _renamed(self, name: str) -> str:
        return self._own_name(name) or name

    def _own_name(self, stored: str) -> str | None:
        """Return the decoder's name of a stored tensor; None for one that the family lacks."""
        match = NAME.fullmatch(stored)
        if match is None:
            return None
        module, kind = match.groups()
        if module in self.heads:
            return f"{HEAD}.{kind}"
        for prefix in self.prefixes:
            if not module.startswith(prefix):
                continue
            rest = module[len(prefix) :]
            if rest in self.outer:
                return f"{self.outer[rest]}.{kind}"
            layer = re.fullmatch(rf"{self.layers}\.(\d+)\.(.+)", rest)
            if layer is not None and layer[2] in self.inner:
                return f"{LAYERS}.{layer[1]}.{self.inner[layer[2]]}.{kind}"
        return None

    def stored_name(self, own: str) -> str:
        """Return the name in a checkpoint of a tensor; its own name if the family does not change it."""
        module, kind = own.rsplit(".", 1)
        if module == HEAD:
            return f"{self.heads[0]}.{kind}"
        layer = re.fullmatch(rf"{re.escape(LAYERS)}\.(\d+)\.(.+)", module)
        names = self.outer if layer is None else self.inner
        wanted = module if layer is None else layer[2]
        # a family's own name comes after that of Llama
        stored = next((stored for stored, name in reversed(names.items()) if name == wanted), None)
        if stored is None:
            return own
        place = "" if layer is None else f"{self.layers}.{layer[1]}."
        return f"{self.prefixes[0]}{place}{stored}.{kind}"

    def is_ignored(self, stored: str) -> bool:
        """Return whether a tensor of a checkpoint is one that carries no information."""
        return any(
            re.fullmatch(rf"(?:{re.escape(prefix)})?{self.layers}\.\d+\.{re.escape(name)}", stored)
            for prefix in self.prefixes
            for name in self.ignored
        )

    @property
    def stored_layers(self) -> str:
        return f"{self.prefixes[0]}{self.layers}"

    def layer_class(self, module: str) -> str:
        return CONV1D if self._is_transposed(f"{module}.weight") else LINEAR

    def opened(self, file: Any, stored: str, name: str) -> Any:
        """Return the open file of a tensor, which gives it under the decoder's name and as [M, K]."""
        return Transposed(file, stored) if self._is_transposed(name) else super().opened(file, stored, name)

    def stored_values(self, name: str, values: Tensor) -> Tensor:
        """Return what is stored for a tensor."""
        return values.T.contiguous() if self._is_transposed(name) else values

    def _is_transposed(self, name: str) -> bool:
        part = name.removeprefix(f"{LAYERS}.").partition(".")[2]
        return part.endswith(".weight") and part.removesuffix(".weight") in self.transposed


class Transposed(Renamed):
    """An open file that gives one of its tensors, a matrix, transposed."""

    def get_slice(self, name: str) -> TransposedSlice:
        """Return the tensor, whose values are not read yet."""
        return TransposedSlice(self)

    def get_tensor(self, name: str) -> Tensor:
        """Return the tensor."""
        return super().get_tensor(name).T


class TransposedSlice:
    """A transposed tensor whose values are read when they are asked for."""

    def __init__(self, source: Transposed) -> None:
        self.source, self.found = source, source.file.get_slice(source.stored)

    def get_dtype(self) -> str:
        """Return how the tensor is stored."""
        stored: str = self.found.get_dtype()
        return stored

    def get_shape(self) -> list[int]:
        """Return the shape of the tensor."""
        return [*self.found.get_shape()][::-1]

    def __getitem__(self, rows: slice) -> Tensor:
        return self.source.get_tensor("")[rows]


def written(naming: Naming, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's tensors as a checkpoint of its family stores them, under its names."""
    return {naming.stored_name(name): naming.stored_values(name, values) for name, values in tensors.items()}
