"""Read a DFlash or DSpark head in a GGUF file, as llama.cpp's converter writes it.

Contract: as `eagle3_gguf`: the file becomes the same record and the same tensor names as the other spellings.
`target_layers` are boundaries, `d2t` holds the target's ids themselves, rows keep their order, as in every
GGUF file of a Qwen 3, and slots of a block attend to later ones in every layer, as llama.cpp runs them. A
DSpark head is a DFlash head with the tensors of the bias; without another word, it drafts from its anchor.

Source: https://github.com/ggml-org/llama.cpp/blob/master/src/models/dflash.cpp.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foredraft.drafters.heads.block_files import (
    MARKOV,
    BlockFiles,
    is_dflash,
    is_dspark,
    layers_of,
    read_block,
    record_of_block,
    shapes_of,
    without_confidence,
)
from foredraft.drafters.heads.block_record import BlockRecord
from foredraft.drafters.heads.eagle3_files import D2T, EMBEDDING, HEAD, HeadSource, checked_shapes
from foredraft.drafters.heads.eagle3_gguf import TensorsInFile, sizes_of, taps_of, vocabulary_of
from foredraft.drafters.heads.weight_files import FLOATS
from foredraft.errors import CheckpointError
from foredraft.model.config import ConfigReader
from foredraft.model.gguf.file import architecture_of
from foredraft.model.gguf.gguf_config import Reader
from foredraft.model.gguf.names import ROPE_FACTORS, model_name
from foredraft.model.gguf.parts import GGUFModel
from foredraft.model.quantisation.blocks import BLOCKS

__all__ = ["knows_dflash", "knows_dspark", "read_block_head"]

ARCHITECTURE = "dflash"
ROWS = "qwen3"  # the architecture whose order of rows, and whose names, the layers have
BIAS = "markov_w1.weight"
OWN = {  # names that no whole model has
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    BIAS: f"{MARKOV}.markov_w1.weight",
    "markov_w2.weight": f"{MARKOV}.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
    "d2t": D2T,
}
MASK = "tokenizer.ggml.mask_token_id"
OF_DFLASH_2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
TOLD_BY_TENSORS = ("markov_rank", "confidence_head", "confidence_head_with_markov")


@dataclass(frozen=True, slots=True)
class BlockGGUFFiles(BlockFiles):
    """A head in a GGUF file; `folder` is the file.

    Attributes:
        model: The open file.
    """

    model: GGUFModel

    def open(self, stack: ExitStack, device: torch.device, dtype: torch.dtype) -> HeadSource:
        return TensorsInFile(self.model, self.record.spec, device, dtype, _name, ROWS)


def knows_dflash(place: Path) -> bool:
    """Return whether a folder or a GGUF file holds a DFlash head."""
    return is_dflash(place) or (architecture_of(place) == ARCHITECTURE and not _has_bias(place))


def knows_dspark(place: Path) -> bool:
    """Return whether a folder or a GGUF file holds a DSpark head."""
    return is_dspark(place) or (architecture_of(place) == ARCHITECTURE and _has_bias(place))


def _has_bias(path: Path) -> bool:
    try:
        return BIAS in GGUFModel(path, lists=False).tensors
    except CheckpointError:
        return False


def read_block_head(place: Path) -> BlockFiles:
    """Return the head in a folder or in a GGUF file.

    Raises:
        CheckpointError: The files are broken, contradict each other, or need what is not supported.
    """
    return read_block(place) if place.is_dir() else _read_gguf(place)


def _read_gguf(path: Path) -> BlockGGUFFiles:
    model = GGUFModel(path)
    read = Reader(model, ARCHITECTURE)
    if any(read.has(key) for key in OF_DFLASH_2):
        raise CheckpointError(
            f"{path} is a DFlash 2 head, with convolutions and a selector, which is not supported",
            remedy="give a DFlash or DSpark head",
        )
    record = _record(read)
    for key in TOLD_BY_TENSORS:
        read.take(key)
    read.reject_unknown_keys()
    names = {_name(own): own for own in model.tensors if own != ROPE_FACTORS}
    headers = {name: (model.tensors[own].kind, model.tensors[own].shape) for name, own in names.items()}
    record = replace(record, own_embedding=EMBEDDING in headers, own_head=HEAD in headers)
    shapes = checked_shapes(path, *shapes_of(record, headers), headers, (*FLOATS, *BLOCKS))
    return BlockGGUFFiles(path, record, without_confidence(shapes), model)


def _name(own: str) -> str:
    """Return the name that other spellings give a tensor of the file; its own if they have none."""
    return OWN.get(own) or (model_name(ROWS, own) or own).removeprefix("model.")


def _record(read: Reader) -> BlockRecord:
    vocabulary, words = vocabulary_of(read)
    config = sizes_of(read, vocabulary) | {"model_type": ROWS} | _windows(read)
    bias = read.file.tensors.get(BIAS)
    mask = ConfigReader({"mask_token_id": read.file.metadata.get(MASK)}, f"{read.file.path}, tokenizer.ggml")
    try:
        spec = layers_of(config)
    except CheckpointError as error:
        raise CheckpointError(f"{read.file.path}: {error}", remedy="convert the head again") from error
    rank, form = (0, None) if bias is None else (bias.shape[-1], "vanilla")
    return record_of_block(
        "GGUF", spec, read, mask, rank, form, taps=taps_of(read),
        target_size=read.count("target_hidden_size", spec.hidden_size), words=words,
        from_anchor=read.flag("sample_from_anchor", bias is not None), causal_windows=False,
        absolute_words=True,
    )  # fmt: skip


def _windows(read: Reader) -> dict[str, Any]:
    """Return the config keys of the layers' windows."""
    layers, window = read.count("block_count", 1), read.optional_number("attention.sliding_window")
    pattern = read.take("attention.sliding_window_pattern")
    if window is None:
        return {}
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise read.error("attention.sliding_window_pattern", f"it must say which of {layers} layers have one")
    kinds = ["sliding_attention" if sliding else "full_attention" for sliding in pattern]
    return {"use_sliding_window": True, "sliding_window": int(window), "layer_types": kinds}
