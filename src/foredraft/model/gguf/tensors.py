"""The parts of a GGUF file that was split, read as one, and the tensors by the names of Hugging Face.

Parts have the names that llama-gguf-split gives them
(https://github.com/ggml-org/llama.cpp/blob/master/tools/gguf-split/gguf-split.cpp); each stands for all. A
file name tells the type of the weights, a part, and files that are no language model
(https://github.com/ggml-org/llama.cpp/blob/master/common/download.cpp). A type is a whole word: F16 does not
find BF16.

A writer changes values as the families' entries say, and has all queries of a layer of GPT-NeoX first; both
is undone here. Of a quantised tensor the bytes of each row come.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import DOWNLOAD_AGAIN
from foredraft.model.families import IN_GGUF
from foredraft.model.gguf import recurrent
from foredraft.model.gguf.file import UNQUANTISED, GGUFFile
from foredraft.model.safetensors_file import DTYPES, StoredTensor, TensorInfo

NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
TOGETHER = "put the parts of one model into one folder"


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a file by the name of one of them.

    Examples:
        >>> part_names("m-00002-of-00002.gguf")
        ['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf']
        >>> part_names("m.gguf")
        ['m.gguf']
    """
    found = NAME.fullmatch(name)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        return [name]
    return [f"{found[1]}-{number:05}-of-{found[3]}{found[4]}" for number in range(1, int(found[3]) + 1)]


def identity(path: Path) -> tuple[tuple[int, ...] | None, ...]:
    """Return the size, time of change and inode number of each part of a file, None for a missing one."""
    path.stat()

    def of(part: Path) -> tuple[int, ...] | None:
        try:
            status = part.stat()
        except OSError:
            return None
        return status.st_size, status.st_mtime_ns, status.st_ino

    return tuple(of(path.with_name(name)) for name in part_names(path.name))


class GGUFModel:
    def __init__(self, path: Path, *, lists: bool = True) -> None:
        paths = [path.with_name(name) for name in part_names(path.name)]
        self.path, self._lists = paths[0], lists
        first = self._open(self.path, 1, len(paths))
        count = _whole(first, COUNT, 1) or 1
        if count == 1 and len(paths) > 1:
            if any(path.exists() for path in paths[1:]):
                problem = f"is no part of a model, but its name says part 1 of {len(paths)}"
                raise first.error(problem, TOGETHER)
            paths = paths[:1]
        if count != len(paths):
            problem = f"is one of {count} parts, but its name does not end in -00001-of-{count:05}.gguf"
            raise first.error(problem, "give each part the name that llama-gguf-split gave it")
        rest = (self._open(path, number, count) for number, path in enumerate(paths[1:], 2))
        self.parts = (first, *rest)  # the open parts
        self.metadata: dict[str, Any] = first.metadata  # the metadata, which the first part holds
        if count > 1:
            for number, part in enumerate(self.parts):
                _check_part(part, number, first)
        self._holders: dict[str, GGUFFile] = {}
        for part in self.parts:
            for name in part.tensors:
                if (other := self._holders.setdefault(name, part)) is not part:
                    problem = f"has tensor {shortened(name)}, which {other.path.name} has, too"
                    raise part.error(problem, TOGETHER)
        self.tensors = {name: part.tensors[name] for name, part in self._holders.items()}
        expected = _whole(first, TENSORS, len(self.tensors))
        if count > 1 and expected != len(self.tensors):
            problem = f"and its other parts hold {len(self.tensors)} tensors, but {TENSORS} is {expected}"
            raise first.error(problem, TOGETHER)

    def error(self, problem: str, remedy: str) -> CheckpointError:
        return self.parts[0].error(problem, remedy)

    def holder(self, info: TensorInfo) -> GGUFFile:
        return self._holders[info.name]

    def _open(self, path: Path, number: int, count: int) -> GGUFFile:
        if count > 1 and not path.exists():
            raise CheckpointError(f"{path} is missing, part {number} of {count} of a model", remedy=TOGETHER)
        return GGUFFile(path, lists=self._lists)


def _check_part(part: GGUFFile, number: int, first: GGUFFile) -> None:
    """Raise CheckpointError where a file is not the part that its name says, or is another model's."""
    count, own, parts = first.metadata[COUNT], _whole(part, NUMBER, None), _whole(part, COUNT, None)
    if own != number or parts != count:
        said = "no part of a model" if own is None or parts is None else f"part {own + 1} of {parts}"
        raise part.error(f"is {said}, but its name says part {number + 1} of {count}", TOGETHER)
    for key in part.metadata.keys() & first.metadata.keys() - {NUMBER}:
        if part.metadata[key] != first.metadata[key]:
            raise part.error(f"has another {shortened(key)} than {first.path.name}", TOGETHER)


def _whole(part: GGUFFile, key: str, default: int | None) -> int | None:
    value = part.metadata.get(key, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise part.error(f"has the {key} {shortened(value)}", DOWNLOAD_AGAIN)
    return value


PREFERRED = ("Q4_K_M", "Q8_0")
HEADS = ("eagle3-", "dflash-", "dspark-")  # parts of names: of drafters that are no whole models
NO_MODELS = ("mmproj", "imatrix", "mtp-")  # of what is neither
# the end of a name that is a type: Q4_K_M, UD-Q4_K_XL, IQ2_XXS, BF16, TQ1_0, MXFP4_MOE
TYPE = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:[IT]?Q\d\w*|B?F16|F32|MXFP4\w*|NVFP4\w*))(?:-\d{5}-of-\d{5})?\.gguf", re.I
)
MAX_SHOWN = 20  # names in a message


def models_among(names: Iterable[str], *, heads: bool = False) -> list[str]:
    files = (name for name in names if name.lower().endswith(".gguf"))
    whole = (name for name in files if not any(part in _base(name) for part in NO_MODELS))
    models = (name for name in whole if any(part in _base(name) for part in HEADS) == heads)
    return [*dict.fromkeys(part_names(name)[0] for name in models)]


def choose(models: Sequence[str], wanted: str | None) -> str | None:
    """Return the model of a type, or the one to take where no type is wanted; None where there is none."""
    for type in PREFERRED if wanted is None else (wanted,):
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(type)}[-./]", re.IGNORECASE)
        for name in models:
            if pattern.search(name) or type.lower() == _base(name):
                return name
    return next(iter(models), None) if wanted is None else None


def shown_types(models: Sequence[str]) -> str:
    """Return the types of models as a message lists them; of a model whose name tells none, the name."""
    types = (TYPE.search(name) for name in models)
    shown = [name if type is None else type[1] for name, type in zip(models, types, strict=True)]
    different = [*dict.fromkeys(shown)]
    more = len(different) - MAX_SHOWN
    return ", ".join(different[:MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _base(name: str) -> str:
    return PurePosixPath(name).name.lower()


ROPE_FACTORS = "rope_freqs.weight"  # what RoPE's frequencies are divided by, [D/2]
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"  # LongRoPE's
OUTER = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
IN_FILE = re.compile(r"(?:blk\.(0|[1-9][0-9]*)\.)?([\w.]+)")  # "01" would be layer 1 again
IN_MODEL = re.compile(r"(?:model\.layers\.(\d+)\.)?([\w.]+)")


def model_name(architecture: str, name: str, layers: int | None = None) -> str | None:
    """Return the name that Hugging Face gives a tensor of a file; None for one that it does not have.

    Layers behind the model's own, which are so many, predict further tokens.

    Examples:
        >>> model_name("llama", "blk.3.attn_q.weight")
        'model.layers.3.self_attn.q_proj.weight'
        >>> [model_name("qwen35", f"blk.4.{part}.weight", 4) for part in ("attn_q", "nextn.enorm")]
        ['mtp.layers.0.self_attn.q_proj.weight', 'mtp.pre_fc_norm_embedding.weight']
    """
    match = IN_FILE.fullmatch(name)
    if match is None:
        return None
    layer, part = match.groups()
    of = IN_GGUF[architecture][1]
    if layer is None:
        return _renamed({**of.outer, **OUTER}, part)
    found, place = _renamed(of.parts, part), f"model.layers.{int(layer)}"
    if of.further and layers is not None and (behind := int(layer) - layers) >= 0:
        place = f"mtp.layers.{behind}"
        if behind == 0 and (outer := _renamed(of.further, part)) is not None:
            found, place = outer, "mtp"
    return None if found is None else f"{place}.{found}"


def _renamed(names: Mapping[str, str], part: str) -> str | None:
    """Return the other name of a tensor, or of a module with the kind of the tensor."""
    if part in names:
        return names[part]
    module, _, kind = part.rpartition(".")
    return f"{names[module]}.{kind}" if module in names and kind in ("weight", "bias") else None


def file_name(architecture: str, name: str) -> str:
    """Return the name in a file of a tensor that Hugging Face names; the name itself if there is none.

    Examples:
        >>> file_name("llama", "model.layers.3.self_attn.q_proj.weight")
        'blk.3.attn_q.weight'
    """
    match = IN_MODEL.fullmatch(name)
    if match is None:
        return name
    layer, part = match.groups()
    of = IN_GGUF[architecture][1]
    names = {**of.outer, **OUTER} if layer is None else of.parts
    found = _renamed({theirs: own for own, theirs in reversed([*names.items()])}, part)
    return name if found is None else found if layer is None else f"blk.{layer}.{found}"


def part_of(name: str) -> str:
    """Return the part of a layer that a tensor of a file belongs to: "ssm_dt" of "blk.0.ssm_dt.bias"."""
    return [*name.split("."), "", ""][2] if name.startswith("blk.") else ""


def is_further_alone(model: GGUFModel) -> bool:
    """Return whether a file holds the layers of a model that predict further tokens, and no others."""
    names = model.tensors
    return any(".nextn." in name for name in names) and not any(name.startswith("blk.0.") for name in names)


def row_order(architecture: str, name: str, rows: int, heads: int, kv_heads: int) -> Tensor | None:
    """Return the row of the file for each row of the model's tensor, [rows]; None where they are the same."""
    part = part_of(name)
    if architecture == "gptneox" and part == "attn_qkv":
        return torch.arange(rows).view(3, heads, -1).transpose(0, 1).flatten()
    heads_of = {"attn_q": heads, "attn_k": kv_heads}
    if not IN_GGUF[architecture][1].reordered or part not in heads_of:
        return None
    return torch.arange(rows).view(heads_of[part], -1, 2).transpose(1, 2).flatten()


def adds_one(architecture: str, name: str) -> bool:
    return IN_GGUF[architecture][1].adds_one and name.endswith("norm.weight") and "ssm_" not in name


def holds_factors(architecture: str, name: str) -> bool:
    """Return whether a tensor of a file holds numbers of RoPE, which no layer has."""
    return name == ROPE_FACTORS or (architecture == "phi3" and name in (LONG_FACTORS, SHORT_FACTORS))


PLAIN = {kind: DTYPES[kind] for kind in UNQUANTISED}


def model_shape(info: TensorInfo) -> tuple[int, ...]:
    """Return the shape that Hugging Face gives a tensor of a file."""
    return (info.shape[0], 1, *info.shape[1:]) if recurrent.are_taps(info.name) else info.shape


def stored_tensors(
    model: GGUFModel, config: Mapping[str, Any], *, meta: bool = False
) -> dict[str, StoredTensor]:
    """Return the tensors of a model by the names of Hugging Face."""
    architecture: str = model.metadata["general.architecture"]
    heads, kv_heads = (config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))

    def read(info: TensorInfo, columns: Tensor | None, rows: slice | None) -> Tensor:
        stored, rows, part = stored_values(model, info), rows or slice(None), part_of(info.name)
        if meta:
            return torch.empty_like(stored, device="meta")[rows]
        order = row_order(architecture, info.name, info.shape[0], heads, kv_heads)
        order = recurrent.value_rows(part, info.shape[0], config) if order is None else order
        values = stored[rows] if order is None else stored[order[rows]]
        if columns is not None and info.dtype in PLAIN:
            return values[:, columns]
        if recurrent.are_taps(info.name):
            return values[:, None]
        if part == recurrent.DECAYS:
            return torch.log(-values.double())  # of which `exp` makes the same float32 again
        return values.float() - 1.0 if adds_one(architecture, info.name) else values

    def tensor(name: str, info: TensorInfo) -> StoredTensor:
        part, file = part_of(info.name), model.holder(info).path.name
        dtype = "F64" if part == recurrent.DECAYS else info.dtype
        columns = recurrent.value_columns(part, info.shape[-1], config)
        order = None if columns is None or dtype in PLAIN else columns.argsort().int()
        return StoredTensor(dtype, model_shape(info), partial(read, info, columns), name, file, order)

    layers = config["num_hidden_layers"]
    named = ((model_name(architecture, own, layers), info) for own, info in model.tensors.items())
    return {name: tensor(name, info) for name, info in named if name is not None}


def stored_values(model: GGUFModel, info: TensorInfo) -> Tensor:
    """Return a tensor as its file stores it: numbers of its shape, or the bytes of each row, [M, bytes]."""
    stored = model.holder(info).bytes_of(info)
    if info.dtype in PLAIN:
        return stored.view(PLAIN[info.dtype]).view(info.shape)
    return stored.view(*info.shape[:-1], -1)
