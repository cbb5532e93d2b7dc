"""Read a head in a GGUF file, as llama.cpp's converter writes it.

The file becomes the same record and the same tensor names as the other formats. `d2t` holds the target's
ids themselves, quantised matrices are expanded, and rows are ordered as in a GGUF file of the layers' family.
A DSpark head is a DFlash head with the tensors of the bias; it drafts from its anchor unless the file says
otherwise.

Source: https://github.com/ggml-org/llama.cpp/blob/master/src/models/eagle3.cpp and dflash.cpp beside it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.head_kinds import BIAS
from foredraft.drafters.heads.block_configs import block_record, dflash_2, layers_of
from foredraft.drafters.heads.configs import OF_EAGLE3, eagle3_record
from foredraft.drafters.heads.keys import layer_keys
from foredraft.drafters.heads.record import BlockRecord, HeadRecord, Record
from foredraft.drafters.heads.tensors import (
    CODEBOOKS,
    CONFIDENCE,
    CONVOLVED,
    D2T,
    EMBEDDING,
    FLOATS,
    HEAD,
    SELECTOR,
    HeadFiles,
    checked_shapes,
)
from foredraft.errors import CheckpointError
from foredraft.model.checkpoint import Shapes, joined_shape
from foredraft.model.config import ConfigReader
from foredraft.model.gguf.file import architecture_of
from foredraft.model.gguf.source import EPSILONS, MetadataReader
from foredraft.model.gguf.tensors import PLAIN, ROPE_FACTORS, GGUFModel, model_name, row_order, stored_values
from foredraft.model.quantisation.blocks import BLOCKS, GGUFFormat
from foredraft.model.spec import ModelSpec

AUX_LAYERS = ("target_layers", "extract_layers")  # keys of the layers; the second is older
OLDER_D2T = "d2t.weight"  # of older converters: ids or offsets, which the values tell
MASK = "tokenizer.ggml.mask_token_id"
# of the convolutions of DFlash 2
CONVOLUTION = re.compile(r"blk\.(\d+)\.(attn|ffn)_conv_(?:base|(proj)\.weight)")
TOLD_BY_TENSORS = ("markov_rank", "confidence_head", "confidence_head_with_markov")


@dataclass(frozen=True, slots=True)
class HeadFormat:
    """How files of an architecture hold a head."""

    architecture: str
    rows: str  # the architecture whose order of rows, and whose names, the layers have
    names: Mapping[str, str]  # the names that other formats give to tensors that no whole model has

    def name(self, stored: str) -> str:
        """Return the name that other formats give a tensor; its own if they have none."""
        if (conv := CONVOLUTION.fullmatch(stored)) is not None:
            part = "base_kernel" if conv[3] is None else "kernel_projection.weight"
            return f"layers.{conv[1]}.{CONVOLVED[conv[2] == 'ffn']}.{part}"
        return self.names.get(stored) or (model_name(self.rows, stored) or stored).removeprefix("model.")

    def read(self, path: Path, record_of: Callable[[MetadataReader], Record]) -> HeadFiles[Record]:
        """Return the head in a file, as its metadata and the headers of its tensors say."""
        model = GGUFModel(path)
        read = MetadataReader(model, self.architecture)
        record = record_of(read)
        read.reject_unknown_keys()
        infos = {self.name(stored): info for stored, info in model.tensors.items() if stored != ROPE_FACTORS}
        headers = {name: (info.dtype, info.shape) for name, info in infos.items()}
        record = replace(record, own_embedding=EMBEDDING in headers, own_head=HEAD in headers)
        shapes = checked_shapes(path, record, headers, (*FLOATS, *BLOCKS))
        return HeadFiles(path, record, shapes, partial(TensorsInFile, self, model, record.spec))


EAGLE3 = HeadFormat(
    "eagle3",
    "llama",
    {
        "fc.weight": "fc.weight",
        "enc.output_norm.weight": "input_norm.weight",
        "blk.0.attn_norm_2.weight": "layers.0.hidden_norm.weight",
        "d2t": D2T,
        OLDER_D2T: D2T,
    },
)
DFLASH = HeadFormat(
    "dflash",
    "qwen3",
    {
        "fc.weight": "fc.weight",
        "enc.output_norm.weight": "hidden_norm.weight",
        BIAS: "markov_head.markov_w1.weight",
        "markov_w2.weight": "markov_head.markov_w2.weight",
        "conf_proj.weight": f"{CONFIDENCE[0]}.weight",
        "conf_proj.bias": f"{CONFIDENCE[0]}.bias",
        "selector_hidden.weight": f"{SELECTOR}.hidden_projection.weight",
        "selector_predecessor.weight": CODEBOOKS[0],
        "selector_successor.weight": CODEBOOKS[1],
        "d2t": D2T,
    },
)


def read_gguf(file: Path) -> HeadFiles[Any]:
    """Return the head in a file."""
    eagle3 = architecture_of(file) == EAGLE3.architecture
    return EAGLE3.read(file, _eagle3) if eagle3 else DFLASH.read(file, _block)


def _eagle3(read: MetadataReader) -> HeadRecord:
    """Read the metadata as a config in SafeAILab's format."""
    vocabulary, draft_vocab_size = vocabulary_of(read)
    sizes = sizes_of(read, vocabulary)
    config = sizes | {
        "model_type": EAGLE3.rows,
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": read.count("target_hidden_size", sizes["hidden_size"]),
        "norm_before_residual": read.flag("norm_before_residual"),
        "norm_before_fc": read.flag("norm_before_fc"),
    }
    aux_layers = aux_layers_of(read)
    with _named(read.file.path):
        layers = layer_keys(config, OF_EAGLE3)
        record = eagle3_record(ConfigReader(config), layers, aux_layers)
    absolute = None if OLDER_D2T in read.file.tensors else True
    return replace(record, layer="layers.0", format="GGUF", absolute_d2t=absolute)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file in errors of the config that was made from it."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}", remedy="convert the head again") from error


def aux_layers_of(read: MetadataReader) -> tuple[int, ...]:
    key = next((key for key in AUX_LAYERS if read.has(key)), AUX_LAYERS[0])
    ids = read.take(key)
    if not isinstance(ids, list) or not ids or not all(type(layer) is int and layer >= 0 for layer in ids):
        raise read.error(key, "it must be a list of whole numbers, the layers after which the target is read")
    return tuple(ids)


def vocabulary_of(read: MetadataReader) -> tuple[int, int]:
    """Return the size of the target's vocabulary, and that of the head's draft vocabulary."""
    tensors, tokens = read.file.tensors, read.file.metadata.get("tokenizer.ggml.tokens")
    embedding = tensors.get("token_embd.weight")
    counted = len(tokens) if isinstance(tokens, list) and tokens else None
    vocabulary = counted or (embedding.shape[0] if embedding is not None else read.count("vocab_size"))
    if read.count("vocab_size", vocabulary) != vocabulary:
        raise read.error("vocab_size", f"the file has {vocabulary} tokens")
    map = tensors.get(D2T, tensors.get(OLDER_D2T))
    draft_vocab_size = vocabulary if map is None else map.shape[0]
    if read.count("draft_vocab_size", draft_vocab_size) != draft_vocab_size:
        raise read.error("draft_vocab_size", f"d2t has {draft_vocab_size} values")
    return vocabulary, draft_vocab_size


def sizes_of(read: MetadataReader, vocabulary: int) -> dict[str, Any]:
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


def _block(read: MetadataReader) -> BlockRecord:
    vocabulary, draft_vocab_size = vocabulary_of(read)
    config = sizes_of(read, vocabulary) | {"model_type": DFLASH.rows} | _windows(read)
    bias = read.file.tensors.get(BIAS)
    mask = ConfigReader({"mask_token_id": read.file.metadata.get(MASK)}, f"{read.file.path}, tokenizer.ggml")
    with _named(read.file.path):
        spec = layers_of(config)
    for key in TOLD_BY_TENSORS:
        read.take(key)
    markov = {} if bias is None else {"markov_rank": bias.shape[-1], "markov": "vanilla"}
    return block_record(
        "GGUF", spec, lambda key: mask if key == "mask_token_id" else read, **markov,
        **dflash_2(lambda _: read, spec), aux_layers=aux_layers_of(read),
        target_size=read.count("target_hidden_size", spec.hidden_size), draft_vocab_size=draft_vocab_size,
        from_anchor=read.flag("sample_from_anchor", bias is not None), causal_windows=False,
        absolute_d2t=True,
    )  # fmt: skip


def _windows(read: MetadataReader) -> dict[str, Any]:
    layers, window = read.count("block_count", 1), read.optional_number("attention.sliding_window")
    pattern = read.take("attention.sliding_window_pattern")
    if window is None:
        return {}
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise read.error("attention.sliding_window_pattern", f"it must say which of {layers} layers have one")
    kinds = ["sliding_attention" if sliding else "full_attention" for sliding in pattern]
    return {"use_sliding_window": True, "sliding_window": int(window), "layer_types": kinds}


class TensorsInFile:
    """The tensors of a file under the names of the other formats."""

    def __init__(
        self, format: HeadFormat, model: GGUFModel, spec: ModelSpec, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.model, self.spec, self.device, self.dtype, self.rows = model, spec, device, dtype, format.rows
        self.infos = {format.name(stored): info for stored, info in model.tensors.items()}

    def load(self, shapes: Shapes) -> Tensor:
        parts = [self._expanded(name) for name in shapes]
        return torch.cat(parts).view(joined_shape(shapes)).to(self.device, self.dtype)

    def view(self, name: str, shape: tuple[int, ...], dtypes: Collection[str]) -> Tensor:
        return stored_values(self.model, self.infos[name])  # `checked_shapes` has seen its kind and its shape

    def _expanded(self, name: str) -> Tensor:
        """Return a weight in the order of rows of the other formats, in float32 or as it is stored."""
        info, spec = self.infos[name], self.spec
        stored = stored_values(self.model, info)
        order = row_order(self.rows, info.name, info.shape[0], spec.heads, spec.kv_heads)
        stored = stored if order is None else stored[order]
        if info.dtype in PLAIN:
            return stored
        shape = math.prod(info.shape[:-1]), info.shape[-1]
        expanded = torch.empty(shape)
        GGUFFormat(info.dtype).codes(shape, {"weight": stored}).expand_into(expanded)
        return expanded
