"""Read an EAGLE-3 head in a GGUF file, as llama.cpp's converter writes it.

Contract: the file becomes the same record and the same tensor names as the other spellings. Three things are
the file's own: `d2t` holds the target's ids themselves, the rows of q and k are reordered as in every GGUF
file of a Llama, and matrices may be quantised; they are expanded. The vocabulary is the target's. Every key
of the architecture is read, or refused by its name.

Source: https://github.com/ggml-org/llama.cpp/blob/master/src/models/eagle3.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.heads.eagle3_files import (
    D2T,
    EMBEDDING,
    HEAD,
    OF_THE_HEAD,
    Eagle3Files,
    HeadSource,
    checked,
    read_eagle3,
    record_of,
)
from foredraft.drafters.heads.weight_files import FLOATS
from foredraft.errors import CheckpointError
from foredraft.model.checkpoint import Shapes, joined_shape
from foredraft.model.config import ConfigReader
from foredraft.model.gguf.file import architecture_of
from foredraft.model.gguf.gguf_config import EPSILONS, Reader
from foredraft.model.gguf.names import ROPE_FACTORS, model_name, row_order
from foredraft.model.gguf.parts import GGUFModel
from foredraft.model.gguf.tensors import PLAIN, stored_values
from foredraft.model.quantisation.blocks import BLOCKS
from foredraft.model.quantisation.gguf import GGUFFormat
from foredraft.model.spec import ModelSpec

__all__ = ["TensorsInFile", "is_eagle3_gguf", "read_head", "sizes_of", "taps_of", "vocabulary_of"]

ARCHITECTURE = "eagle3"
ROWS = "llama"  # the architecture whose order of rows, and whose names, the layer has
OLDER_D2T = "d2t.weight"  # of older converters: ids or offsets, which the values tell
OWN = {  # names that no whole model has
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "input_norm.weight",
    "blk.0.attn_norm_2.weight": "layers.0.hidden_norm.weight",
    "d2t": D2T,
    OLDER_D2T: D2T,
}
TAPS = ("target_layers", "extract_layers")  # boundaries; the second is the older name


@dataclass(frozen=True, slots=True)
class GGUFHeadFiles(Eagle3Files):
    """A head in a GGUF file; `folder` is the file.

    Attributes:
        model: The open file.
    """

    model: GGUFModel

    def open(self, stack: ExitStack, device: torch.device, dtype: torch.dtype) -> HeadSource:
        return TensorsInFile(self.model, self.record.spec, device, dtype, _name, ROWS)


def is_eagle3_gguf(place: Path) -> bool:
    """Return whether a file is an EAGLE-3 head in GGUF, as its first bytes say."""
    return architecture_of(place) == ARCHITECTURE


def read_head(place: Path) -> Eagle3Files:
    """Return the head in a folder or in a GGUF file.

    Raises:
        CheckpointError: The files are broken, contradict each other, or need what is not supported.
    """
    return read_eagle3(place) if place.is_dir() else _read_gguf(place)


def _read_gguf(path: Path) -> GGUFHeadFiles:
    model = GGUFModel(path)
    read = Reader(model, ARCHITECTURE)
    config, taps = _config(read), taps_of(read)
    read.reject_unknown_keys()
    names = {_name(own): own for own in model.tensors if own != ROPE_FACTORS}
    headers = {name: (model.tensors[own].kind, model.tensors[own].shape) for name, own in names.items()}
    try:
        record = record_of(ConfigReader(config), config, OF_THE_HEAD, taps)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}", remedy="convert the head again") from error
    absolute = None if OLDER_D2T in model.tensors else True
    record = replace(
        record, layer="layers.0", spelling="GGUF", absolute_words=absolute,
        own_embedding=EMBEDDING in headers, own_head=HEAD in headers,
    )  # fmt: skip
    return GGUFHeadFiles(path, record, checked(path, record, len(taps), headers, (*FLOATS, *BLOCKS)), model)


def _name(own: str) -> str:
    """Return the name that other spellings give a tensor of the file; its own if they have none."""
    return OWN.get(own) or (model_name(ROWS, own) or own).removeprefix("model.")


def taps_of(read: Reader) -> tuple[int, ...]:
    """Return the boundaries that the file names."""
    key = next((key for key in TAPS if read.has(key)), TAPS[0])
    ids = read.take(key)
    if not isinstance(ids, list) or not ids or not all(type(tap) is int and tap >= 0 for tap in ids):
        raise read.error(key, "it must be a list of whole numbers, the layers after which the target is read")
    return tuple(ids)


def _config(read: Reader) -> dict[str, Any]:
    """Return the config of the head in SafeAILab's spelling."""
    vocabulary, words = vocabulary_of(read)
    sizes = sizes_of(read, vocabulary)
    return sizes | {
        "model_type": ROWS,
        "draft_vocab_size": words,
        "target_hidden_size": read.count("target_hidden_size", sizes["hidden_size"]),
        "norm_before_residual": read.flag("norm_before_residual"),
        "norm_before_fc": read.flag("norm_before_fc"),
    }


def vocabulary_of(read: Reader) -> tuple[int, int]:
    """Return the size of the target's vocabulary, and the number of the head's words."""
    tensors, tokens = read.file.tensors, read.file.metadata.get("tokenizer.ggml.tokens")
    embedding = tensors.get("token_embd.weight")
    counted = len(tokens) if isinstance(tokens, list) and tokens else None
    vocabulary = counted or (embedding.shape[0] if embedding is not None else read.count("vocab_size"))
    if read.count("vocab_size", vocabulary) != vocabulary:
        raise read.error("vocab_size", f"the file has {vocabulary} tokens")
    map = tensors.get(D2T, tensors.get(OLDER_D2T))
    words = vocabulary if map is None else map.shape[0]
    if read.count("draft_vocab_size", words) != words:
        raise read.error("draft_vocab_size", f"d2t has {words} values")
    return vocabulary, words


def sizes_of(read: Reader, vocabulary: int) -> dict[str, Any]:
    """Return the config keys of the layers' sizes and rotary parameters."""
    hidden, heads = read.count("embedding_length"), read.count("attention.head_count")
    head_dim = read.count("attention.key_length", max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if read.count(key, head_dim) != head_dim:
            raise read.error(key, f"only the size of a key head, {head_dim}, is supported")
    return {
        "hidden_act": "silu",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": read.count("feed_forward_length"),
        "num_hidden_layers": read.count("block_count", 1),
        "num_attention_heads": heads,
        "num_key_value_heads": read.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": read.count("context_length"),
        "rms_norm_eps": read.number(EPSILONS[0]),
        "rope_parameters": read.rope({"head_dim": head_dim}),
    }


class TensorsInFile:
    """The tensors of a file under the names of the other spellings.

    Args:
        model: The file.
        spec: Of the head.
        device: Where they go.
        dtype: Of weights.
        named: Gives a tensor's name in the other spellings.
        rows: The architecture whose order of rows the layers have.
    """

    def __init__(
        self, model: GGUFModel, spec: ModelSpec, device: torch.device, dtype: torch.dtype,
        named: Callable[[str], str], rows: str,
    ) -> None:  # fmt: skip
        self.model, self.spec, self.device, self.dtype, self.rows = model, spec, device, dtype, rows
        self.infos = {named(own): info for own, info in model.tensors.items()}

    def load(self, shapes: Shapes) -> Tensor:
        parts = [self._expanded(name) for name in shapes]
        return torch.cat(parts).view(joined_shape(shapes)).to(self.device, self.dtype)

    def view(self, name: str, shape: tuple[int, ...], dtypes: Collection[str]) -> Tensor:
        return stored_values(self.model, self.infos[name])  # `checked` has seen its kind and its shape

    def _expanded(self, name: str) -> Tensor:
        """Return a weight in the order of rows of the other spellings, in float32 or as it is stored."""
        info, spec = self.infos[name], self.spec
        stored = stored_values(self.model, info)
        order = row_order(self.rows, info.name, info.shape[0], spec.heads, spec.kv_heads)
        stored = stored if order is None else stored[order]
        if info.kind in PLAIN:
            return stored
        shape = math.prod(info.shape[:-1]), info.shape[-1]
        expanded = torch.empty(shape)
        GGUFFormat(info.kind).codes(shape, {"weight": stored}).expand_into(expanded)
        return expanded
