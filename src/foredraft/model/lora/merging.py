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
from foredraft.model.lora.adapter import FLOATS, Change, LoraTensors, open_lora
from foredraft.model.safetensors_file import DTYPES, StoredTensor
from foredraft.model.tensor_names import CONV1D, Naming

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
    changes: list[Change] = field(default_factory=list)  # in order
    transposed: bool = False  # it has a row for each input


def changed_tensors(
    files: Mapping[str, StoredTensor],
    loras: Sequence[LoraTensors],
    source: str,
    naming: Naming,
    aliases: Mapping[str, str],
) -> dict[str, ChangedTensor]:
    known = _Known(files, aliases, source, naming)
    found = {name: known.tensor(name) for name in aliases}
    for change in (change for lora in loras for change in lora.changes):
        lora, name = change.lora, known.name_of(change)
        tensor = found.setdefault(name, known.tensor(name))
        known.check(change, name, tensor)
        if len(loras) > 1 and change.replaces and _replaces_by_the_same(tensor.stored, change):
            continue  # PEFT saves an embedding or a head that it changes, as it was before
        if change.replaces and tensor.changes:
            problem = f"replaces {shortened(name)}, which LoRA {tensor.changes[-1].lora.name} changes, too"
            raise lora.error(problem, "leave one of them out")
        for other in tensor.changes:
            if other.lora is not lora and other.replaces:
                problem = f"changes {shortened(name)}, which LoRA {other.lora.name} replaces"
                raise lora.error(problem, "leave one of them out")
        tensor.changes.append(change)
    return found


def _replaces_by_the_same(old: StoredTensor, change: Change) -> bool:
    new = change.lora.stored[change.tensors[0]]
    rows = max(1, COMPARED // max(1, math.prod(old.shape[1:])))
    for first in range(0, old.shape[0], rows):
        piece = slice(first, first + rows)
        values = old[piece]
        if not values.is_meta and not torch.equal(new[piece].float(), values.float()):
            return False
    return True


class _Known:
    def __init__(
        self, files: Mapping[str, StoredTensor], aliases: Mapping[str, str], source: str, naming: Naming
    ) -> None:
        self.files, self.aliases, self.source, self.naming = files, aliases, source, naming
        self.names: dict[str, list[str]] = {}  # canonical name -> the names of the tensors
        for name in dict.fromkeys([*files, *aliases]):
            self.names.setdefault(canonical(name), []).append(name)

    def tensor(self, name: str) -> ChangedTensor:
        return ChangedTensor(self.files[self.aliases.get(name, name)])

    def name_of(self, change: Change) -> str:
        lora, wanted = change.lora, f"{change.module}.{change.kind}"
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
            raise self._quantised(change)
        if change.kind == "bias" and kinds:
            problem = f"changes the bias of {shortened(change.module)}, which has none in {self.source}"
        else:
            problem = f"changes {shortened(change.module)}, which {self.source} does not have"
        raise lora.error(problem, self._give(lora))

    def check(self, change: Change, name: str, tensor: ChangedTensor) -> None:
        lora, shape, wanted = change.lora, tensor.stored.shape, change.shape
        if tensor.stored.dtype not in FLOATS:
            raise self._quantised(change)
        if not shape or (change.is_product and len(shape) != 2):
            problem = f"changes {shortened(name)} of shape {[*shape]}, which is no linear layer"
            raise lora.error(problem, self._give(lora))
        if change.is_product:
            # PEFT decides by the layer's class, too, whatever `fan_in_fan_out` says
            layer = self.naming.plain([name]).get(name, name).removesuffix(".weight")
            tensor.transposed = change.embedding or self.naming.layer_class(layer) == CONV1D
            wanted = wanted[::-1] if tensor.transposed else wanted
        if wanted != shape:
            problem = f"is for {shortened(name)} of shape {[*wanted]}, but {self.source} has {[*shape]} there"
            raise lora.error(problem, self._give(lora))

    def _quantised(self, change: Change) -> CheckpointError:
        problem = f"changes {shortened(change.module)}, whose weights are quantised in {self.source}"
        return change.lora.error(problem, "merge it into the model that was quantised")

    def _give(self, lora: LoraTensors) -> str:
        base = lora.config.base
        named = "" if base is None else f", which it calls {shortened(base)}"
        return f"give the model that it was trained for{named}"


MERGED = 2**18  # values that are merged at a time: 1 MiB, which stays in a core's cache
NAMES = {dtype: name for name, dtype in DTYPES.items()}  # as safetensors has them


def merged_values(tensor: ChangedTensor, dtype: torch.dtype) -> Tensor:
    stored = tensor.stored
    merged = torch.empty(stored.shape, dtype=dtype)
    rows = max(1, MERGED // max(1, math.prod(stored.shape[1:])))
    # a matrix that replaces another is read piece by piece
    added = [() if each.replaces else [*map(each.lora.values, each.tensors)] for each in tensor.changes]
    for first in range(0, stored.shape[0], rows):
        piece = slice(first, min(first + rows, stored.shape[0]))
        values = stored[piece].to(torch.float32, copy=True)
        for change, parts in zip(tensor.changes, added, strict=True):
            values = changed(values, change, piece, parts, transposed=tensor.transposed)
        merged[piece].copy_(values)
    return merged


def changed(
    values: Tensor, change: Change, piece: slice, parts: Sequence[Tensor], *, transposed: bool
) -> Tensor:
    if change.replaces:
        return change.lora.values(change.tensors[0], piece)
    if not change.is_product:
        return values.add_(parts[0][piece] * change.scale)
    a, b = parts
    added = (b @ a[:, piece]).T if transposed else b[piece] @ a
    return values.add_(added * change.scale)


def merge_loras(
    loras: Sequence[tuple[str, Path]],
    source: str,
    naming: Naming,
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

    changed = changed_tensors(files, opened, source, naming, aliases)
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
