"""LoRAs merged into the tensors of a model that they change, as an open file gives them.

A change finds its tensor by the module's name, so weights that families store fused or transposed get theirs
as stored. A merged tensor is W + Σ s·B·A, in the order of the LoRAs, computed in float32 and rounded once, to
the dtype that the model is loaded in. Values of a LoRA are read when its tensor is, and must be finite.

A head that is tied to the embedding is untied where a LoRA changes one of the two, as when PEFT runs the LoRA
beside the model; with `ensure_weight_tying` both stay one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from foredraft.errors import CheckpointError, shortened
from foredraft.model.lora.adapter import (
    FLOATS,
    Change,
    LoraTensors,
    LowRankUpdate,
    Replacement,
    Shift,
    open_lora,
)
from foredraft.model.safetensors_file import DTYPES, StoredTensor

COMPARED = 2**24  # values that are compared at a time
# What stands in front of a module's name in some classes of transformers and in some files, but not in all.
OUTER = ("model", "language_model", "transformer")
# ends of modules' names
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings")
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
    return module.rpartition(".")[2] in EMBEDDINGS


def is_head(module: str) -> bool:
    return canonical(module) in HEADS


@dataclass(slots=True)
class ChangedTensor:
    stored: StoredTensor
    changes: list[tuple[LoraTensors, Change]] = field(default_factory=list)  # in order
    transposed: bool = False  # it has a row for each input


def changed_tensors(
    files: Mapping[str, StoredTensor], loras: Sequence[LoraTensors], source: str, aliases: Mapping[str, str]
) -> dict[str, ChangedTensor]:
    known = _Known(files, aliases, source)
    found = {name: known.tensor(name) for name in aliases}
    for lora in loras:
        for change in lora.changes:
            name = known.name_of(lora, change)
            tensor = found.setdefault(name, known.tensor(name))
            known.check(lora, change, name, tensor)
            if len(loras) > 1 and _replaces_by_the_same(tensor, lora, change.what):
                continue  # PEFT saves an embedding or a head that it changes, as it was before
            if isinstance(change.what, Replacement) and tensor.changes:
                problem = f"replaces {shortened(name)}, which LoRA {tensor.changes[-1][0].name} changes, too"
                raise lora.error(problem, "leave one of them out")
            for other, before in tensor.changes:
                if other is not lora and isinstance(before.what, Replacement):
                    problem = f"changes {shortened(name)}, which LoRA {other.name} replaces"
                    raise lora.error(problem, "leave one of them out")
            tensor.changes.append((lora, change))
    return found


def _replaces_by_the_same(tensor: ChangedTensor, lora: LoraTensors, what: object) -> bool:
    if not isinstance(what, Replacement):
        return False
    new, old = lora.stored[what.name], tensor.stored
    rows = max(1, COMPARED // max(1, math.prod(tensor.stored.shape[1:])))
    for first in range(0, tensor.stored.shape[0], rows):
        piece = slice(first, first + rows)
        values = old[piece]
        if not values.is_meta and not torch.equal(new[piece].float(), values.float()):
            return False
    return True


class _Known:
    def __init__(self, files: Mapping[str, StoredTensor], aliases: Mapping[str, str], source: str) -> None:
        self.files, self.aliases, self.source = files, aliases, source
        self.names: dict[str, list[str]] = {}  # canonical name -> the names of the tensors
        for name in dict.fromkeys([*files, *aliases]):
            self.names.setdefault(canonical(name), []).append(name)

    def tensor(self, name: str) -> ChangedTensor:
        return ChangedTensor(self.files[self.aliases.get(name, name)])

    def name_of(self, lora: LoraTensors, change: Change) -> str:
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
        if tensor.stored.dtype not in FLOATS:
            raise self._quantised(lora, change)
        what, shape = change.what, tensor.stored.shape
        if not shape or (isinstance(what, LowRankUpdate) and len(shape) != 2):
            problem = f"changes {shortened(name)} of shape {[*shape]}, which is no linear layer"
            raise lora.error(problem, self._give(lora))
        if isinstance(what, LowRankUpdate):
            tensor.transposed = what.embedding or self._is_transposed(name, what, lora)
            wanted: tuple[int, ...] = (what.outputs, what.inputs)
            wanted = wanted[::-1] if tensor.transposed else wanted
        else:
            wanted = what.shape
        if wanted != shape:
            problem = f"is for {shortened(name)} of shape {[*wanted]}, but {self.source} has {[*shape]} there"
            raise lora.error(problem, self._give(lora))

    def _is_transposed(self, name: str, what: LowRankUpdate, lora: LoraTensors) -> bool:
        """Return whether a linear layer is stored with a row for each input, as GPT-2's are.

        A bias tells, or that of layers beside it; else `fan_in_fan_out`, since PEFT decides by the layer's
        class.
        """
        layer = name.removesuffix(".weight")
        parent = layer.rpartition(".")[0]
        weights = [
            name for name in self.files if name.endswith(".weight") and len(self.files[name].shape) == 2
        ]
        for place in (layer, parent, parent.rpartition(".")[0]):
            inside = (f"{place}.weight", f"{place}.") if place else ()
            for other in (name for name in weights if name.startswith(inside)):
                rows, columns = self.files[other].shape
                bias = f"{other.removesuffix('.weight')}.bias"
                if rows != columns and bias in self.files and self.files[bias].shape in ((rows,), (columns,)):
                    return self.files[bias].shape == (columns,)
        fits_transposed = self.tensor(name).stored.shape == (what.inputs, what.outputs)
        return lora.config.transposed and what.inputs != what.outputs and fits_transposed

    def _quantised(self, lora: LoraTensors, change: Change) -> CheckpointError:
        problem = f"changes {shortened(change.module)}, whose weights are quantised in {self.source}"
        return lora.error(problem, "merge it into the model that was quantised")

    def _give(self, lora: LoraTensors) -> str:
        base = lora.config.base
        named = "" if base is None else f", which it calls {shortened(base)}"
        return f"give the model that it was trained for{named}"


MERGED = 2**18  # values that are merged at a time: 1 MiB, which stays in a core's cache
NAMES = {dtype: name for name, dtype in DTYPES.items()}  # as safetensors has them


def merged_values(tensor: ChangedTensor, dtype: torch.dtype) -> Tensor:
    stored, read = tensor.stored, _Values()
    merged = torch.empty(stored.shape, dtype=dtype)
    rows = max(1, MERGED // max(1, math.prod(stored.shape[1:])))
    for first in range(0, stored.shape[0], rows):
        piece = slice(first, min(first + rows, stored.shape[0]))
        values = stored[piece].to(torch.float32, copy=True)
        for lora, change in tensor.changes:
            values = changed(values, lora, change.what, piece, read, transposed=tensor.transposed)
        merged[piece].copy_(values)
    return merged


class _Values:
    """Reads tensors of LoRAs in float32, and checks them."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, str], Tensor] = {}

    def of(self, lora: LoraTensors, name: str) -> Tensor:
        key = id(lora), name
        if key not in self.known:
            self.known[key] = self._checked(lora, name, lora.stored[name].whole())
        return self.known[key]

    def rows(self, lora: LoraTensors, name: str, rows: slice) -> Tensor:
        return self._checked(lora, name, lora.stored[name][rows])

    def _checked(self, lora: LoraTensors, name: str, values: Tensor) -> Tensor:
        values = values.to(torch.float32, copy=True)
        if not torch.isfinite(values).all():
            problem = f"has {shortened(name)} with values that are not finite"
            raise lora.error(problem, "train it again, or download it again")
        return values


def changed(
    values: Tensor,
    lora: LoraTensors,
    what: LowRankUpdate | Shift | Replacement,
    piece: slice,
    read: _Values,
    *,
    transposed: bool,
) -> Tensor:
    if isinstance(what, Replacement):
        return read.rows(lora, what.name, piece)
    if isinstance(what, Shift):
        return values.add_(read.of(lora, what.name)[piece] * what.scale)
    a, b = read.of(lora, what.a), read.of(lora, what.b)
    added = (b @ a[:, piece]).T if transposed else b[piece] @ a
    return values.add_(added * what.scale)


def merge_loras(
    loras: Sequence[tuple[str, Path]],
    source: str,
    untied: bool,
    files: Mapping[str, StoredTensor],
    stack: ExitStack,
    dtype: torch.dtype,
) -> dict[str, StoredTensor]:
    """Return the tensors that LoRAs, by names and folders, change, merged when they are read.

    untied: they make the head another matrix than the embedding.
    """
    opened = [open_lora(*lora, stack) for lora in loras]
    aliases = _untied(files, source) if untied else {}

    def merged(name: str, tensor: ChangedTensor) -> StoredTensor:
        def read(rows: slice | None) -> Tensor:
            values = merged_values(tensor, dtype)
            return values if rows is None else values[rows]

        file = files[name].file if name in files else "LoRAs"
        return StoredTensor(NAMES[dtype], tensor.stored.shape, read, name, file)

    changed = changed_tensors(files, opened, source, aliases)
    return {name: merged(name, tensor) for name, tensor in changed.items()}


def _untied(files: Collection[str], source: str) -> dict[str, str]:
    """Return the head of a model, which is no longer tied, and the embedding, which has its values."""
    modules = {name: name.removesuffix(".weight") for name in files if name.endswith(".weight")}
    embeddings = [name for name, module in modules.items() if is_embedding(module)]
    if len(embeddings) != 1:
        problem = f"{source} has {len(embeddings)} embeddings, and a LoRA unties its head from one"
        remedy = "merge it with PEFT (merge_and_unload), and give the merged model"
        raise CheckpointError(problem, remedy=remedy)
    outer = "language_model." if embeddings[0].startswith("language_model.") else ""
    heads = [name for name, module in modules.items() if is_head(module)]
    return dict.fromkeys(heads or [f"{outer}lm_head.weight"], embeddings[0])


def unties(lora: LoraTensors) -> bool:
    modules = [change.module for change in lora.changes]
    return any(map(is_head, modules)) or (not lora.config.ties and any(map(is_embedding, modules)))
