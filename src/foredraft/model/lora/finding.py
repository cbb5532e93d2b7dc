"""Find the tensors of a model that LoRAs change, and check that the changes fit.

Contract: a change finds its tensor by the module's name, so weights that families store fused or transposed
get theirs as stored. A change of a weight that is not there, of another shape, or of quantised weights is
refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foredraft.errors import CheckpointError, shortened
from foredraft.model.lora.lora_tensors import FLOATS, Change, LoraTensors, Product, Replacement

__all__ = ["ChangedTensor", "canonical", "changed_tensors", "is_embedding", "is_head"]

PIECE = 2**24  # values that are compared at a time
# What stands in front of a module's name in some classes of transformers and in some files, but not in all.
OUTER = ("model", "language_model", "transformer")
EMBEDDINGS = (
    "embed_tokens",
    "wte",
    "embed_in",
    "word_embeddings",
    "tok_embeddings",
)  # ends of modules' names
HEADS = ("lm_head", "embed_out", "output")  # canonical names


def canonical(module: str) -> str:
    """Return a module's name without what stands in front of it in some files alone.

    Examples:
        >>> canonical("model.language_model.layers.0.mlp.up_proj"), canonical("language_model.lm_head")
        ('layers.0.mlp.up_proj', 'lm_head')
    """
    first, _, rest = module.partition(".")
    return canonical(rest) if rest and first in OUTER else module


def is_embedding(module: str) -> bool:
    """Return whether a module is a model's embedding."""
    return module.rpartition(".")[2] in EMBEDDINGS


def is_head(module: str) -> bool:
    """Return whether a module is a model's head."""
    return canonical(module) in HEADS


@dataclass(slots=True)
class ChangedTensor:
    """A tensor of the model, and what LoRAs do to it.

    Attributes:
        file: The open file that has it.
        name: Its name there.
        shape: Its shape.
        changes: What is done to it, in order, and by which LoRA.
        transposed: It has a row for each input.
    """

    file: Any
    name: str
    shape: tuple[int, ...]
    changes: list[tuple[LoraTensors, Change]] = field(default_factory=list)
    transposed: bool = False


def changed_tensors(
    files: Mapping[str, Any], loras: Sequence[LoraTensors], source: str, aliases: Mapping[str, str]
) -> dict[str, ChangedTensor]:
    """Return the tensors that LoRAs change, by name.

    Args:
        files: The model's open files, by the names of their tensors.
        loras: The LoRAs, in order.
        source: What messages call the model.
        aliases: Names of tensors that hold the values of another one besides its changes -> that one, as of a
            head that is no longer tied to the embedding.

    Raises:
        CheckpointError: A change fits no tensor of the model.
    """
    known = _Known(files, aliases, source)
    found = {name: known.tensor(name) for name in aliases}
    for lora in loras:
        for change in lora.changes:
            name = known.name_of(lora, change)
            tensor = found.setdefault(name, known.tensor(name))
            known.check(lora, change, name, tensor)
            if len(loras) > 1 and _replaces_by_the_same(tensor, lora, change.what):
                continue  # PEFT saves an embedding or a head that it changes, as it was before
            known.check_order(lora, change, name, tensor)
            tensor.changes.append((lora, change))
    return found


def _replaces_by_the_same(tensor: ChangedTensor, lora: LoraTensors, what: object) -> bool:
    """Return whether a LoRA replaces a tensor by the values that it has."""
    if not isinstance(what, Replacement):
        return False
    new, old = lora.file.get_slice(what.name), tensor.file.get_slice(tensor.name)
    rows = max(1, PIECE // max(1, math.prod(tensor.shape[1:])))
    for first in range(0, tensor.shape[0], rows):
        piece = slice(first, first + rows)
        values = old[piece]
        if not values.is_meta and not torch.equal(new[piece].float(), values.float()):
            return False
    return True


class _Known:
    """Finds the tensors of a model that changes are of."""

    def __init__(self, files: Mapping[str, Any], aliases: Mapping[str, str], source: str) -> None:
        self.files, self.aliases, self.source = files, aliases, source
        self.names: dict[str, list[str]] = {}  # canonical name -> the names of the tensors
        for name in dict.fromkeys([*files, *aliases]):
            self.names.setdefault(canonical(name), []).append(name)

    def tensor(self, name: str) -> ChangedTensor:
        """Return a tensor without changes."""
        stored = self.aliases.get(name, name)
        return ChangedTensor(self.files[stored], stored, self._shape(stored))

    def name_of(self, lora: LoraTensors, change: Change) -> str:
        """Return the name of the tensor that a change is of."""
        wanted = f"{change.module}.{change.kind}"
        names = self.names.get(canonical(wanted), [])
        if wanted in names:
            return wanted
        if len(names) > 1:
            problem = f"changes {shortened(wanted)}, but {self.source} has {' and '.join(names)}"
            raise lora.error(problem, "give a model with one of them")
        if names:
            return names[0]
        module = canonical(change.module)
        kinds = {kind for name in self.names for own, _, kind in [name.rpartition(".")] if own == module}
        if change.kind == "weight" and kinds - {"bias"}:
            raise self._quantised(lora, change)
        if change.kind == "bias" and kinds:
            problem = f"changes the bias of {shortened(change.module)}, which has none in {self.source}"
        else:
            problem = f"changes {shortened(change.module)}, which {self.source} does not have"
        raise lora.error(problem, self._give(lora))

    def check(self, lora: LoraTensors, change: Change, name: str, tensor: ChangedTensor) -> None:
        """Check that a change fits a tensor, and note how the tensor is stored."""
        if tensor.file.get_slice(tensor.name).get_dtype() not in FLOATS:
            raise self._quantised(lora, change)
        what, shape = change.what, tensor.shape
        if not shape or (isinstance(what, Product) and len(shape) != 2):
            problem = f"changes {shortened(name)} of shape {[*shape]}, which is no linear layer"
            raise lora.error(problem, self._give(lora))
        if isinstance(what, Product):
            tensor.transposed = what.embedding or self._is_transposed(name, what, lora)
            wanted: tuple[int, ...] = (what.outputs, what.inputs)
            wanted = wanted[::-1] if tensor.transposed else wanted
        else:
            wanted = what.shape
        if wanted != shape:
            problem = f"is for {shortened(name)} of shape {[*wanted]}, but {self.source} has {[*shape]} there"
            raise lora.error(problem, self._give(lora))

    def check_order(self, lora: LoraTensors, change: Change, name: str, tensor: ChangedTensor) -> None:
        """Check that a change goes with those of the LoRAs before."""
        if isinstance(change.what, Replacement) and tensor.changes:
            problem = f"replaces {shortened(name)}, which LoRA {tensor.changes[-1][0].name} changes, too"
            raise lora.error(problem, "leave one of them out")
        for other, before in tensor.changes:
            if other is not lora and isinstance(before.what, Replacement):
                problem = f"changes {shortened(name)}, which LoRA {other.name} replaces"
                raise lora.error(problem, "leave one of them out")

    def _is_transposed(self, name: str, what: Product, lora: LoraTensors) -> bool:
        """Return whether a linear layer is stored with a row for each input, as GPT-2's are.

        A bias has a value for each output. Of a square layer, the layers beside it tell. PEFT decides by the
        layer's class, and so `fan_in_fan_out` counts only where no tensor tells.
        """
        layer = name.removesuffix(".weight")
        parent = layer.rpartition(".")[0]
        for place in (layer, parent, parent.rpartition(".")[0]):
            for other in self._weights_in(place):
                rows, columns = self._shape(other)
                bias = f"{other.removesuffix('.weight')}.bias"
                if rows != columns and bias in self.files and self._shape(bias) in ((rows,), (columns,)):
                    return self._shape(bias) == (columns,)
        fits_transposed = self.tensor(name).shape == (what.inputs, what.outputs)
        return lora.config.transposed and what.inputs != what.outputs and fits_transposed

    def _weights_in(self, module: str) -> Iterable[str]:
        """Return the matrices of a module and of those in it."""
        inside = (f"{module}.weight", f"{module}.") if module else ()
        return [
            name
            for name in self.files
            if name.endswith(".weight") and name.startswith(inside) and len(self._shape(name)) == 2
        ]

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.files[name].get_slice(name).get_shape())

    def _quantised(self, lora: LoraTensors, change: Change) -> CheckpointError:
        return lora.error(
            f"changes {shortened(change.module)}, whose weights are quantised in {self.source}",
            "merge it into the model that was quantised",
        )

    def _give(self, lora: LoraTensors) -> str:
        base = lora.config.base
        named = "" if base is None else f", which it calls {shortened(base)}"
        return f"give the model that it was trained for{named}"
