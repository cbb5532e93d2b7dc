"""Read the files of an EAGLE-3 head: SafeAILab's, SpecForge's and speculators' spellings.

Contract: only this module knows these config keys and tensor names. Every key of a head is read, or refused
by its name; every tensor is known, and has the shape that the config implies. Weights are safetensors: a
pickle can run any program when it is read, so none is.

    SafeAILab, SpecForge    `midlayer.*`; keys of a Llama beside draft_vocab_size; taps in `eagle_config`
    speculators             `layers.0.*`; the keys of the layer in `transformer_layer_config`

The id of a tap names a boundary in all of them, but the first id 1 in an `eagle_config` tells that these ids
name the layers whose outputs are read (SGLang, TensorRT-LLM): they stand for the boundaries after them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from foredraft.drafters.heads.record import HeadRecord
from foredraft.drafters.heads.weight_files import FLOATS, refuse_pickles
from foredraft.errors import CheckpointError, shortened
from foredraft.model.checkpoint import CheckpointTensors, Shapes, weight_headers
from foredraft.model.config import ConfigReader, read_json
from foredraft.model.spec import ModelSpec
from foredraft.model.tensor_names import AS_STORED

__all__ = [
    "Eagle3Files",
    "HeadSource",
    "HeadTensors",
    "checked",
    "head_shapes",
    "is_eagle3",
    "read_eagle3",
    "record_of",
]

CONFIG, EAGLE, LAYER = "config.json", "eagle_config", "transformer_layer_config"
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
ARCHITECTURES = frozenset(
    {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"}
)
SPECULATORS, OTHERS = "speculators", "SafeAILab or SpecForge"  # spellings
FIRST_LAYERS = {OTHERS: "midlayer", SPECULATORS: "layers.0"}  # spelling -> the layer that reads pairs
BODIES = ("llama", "qwen3")  # the families whose layers a head may have
# keys of a head's config that the form of its layers does not depend on
OF_THE_HEAD = frozenset(
    {
        "architectures", "auto_map", "draft_vocab_size", "target_hidden_size", "target_model_type",
        "target_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
        AUX_LAYERS, EAGLE, "tie_word_embeddings", "bos_token_id", "eos_token_id",
        "pad_token_id", "torch_dtype", "dtype",
    }
)  # fmt: skip
OF_SPECULATORS = frozenset(
    {
        "speculators_model_type", "speculators_version", "speculators_config", LAYER, "architectures",
        "auto_map", "draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc",
        "fc_norm", "norm_output", AUX_LAYERS, "tie_word_embeddings", "torch_dtype",
        "dtype", "transformers_version", "embed_requires_grad", "has_no_defaults_at_init", "model_type",
    }
)  # fmt: skip
EMBEDDING, HEAD, D2T, T2D = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
WORDS_OF_MAPS = {D2T: ("I64", "I32"), T2D: ("BOOL", "U8")}
TRAINING = frozenset({"verifier_norm.weight", "verifier_lm_head.weight"})  # copies of the target's


class HeadTensors(Protocol):
    """Gives the tensors of a head by name, those of one call joined along their first dimension."""

    def load(self, shapes: Shapes) -> Tensor:
        """Return the joined tensors."""
        ...


class HeadSource(HeadTensors, Protocol):
    """Gives the tensors of a head's files; it checks shapes and dtypes as `CheckpointTensors` does."""

    def view(self, name: str, shape: tuple[int, ...], dtypes: Collection[str]) -> Tensor:
        """Return a tensor as it is stored; the caller must not keep it."""
        ...


@dataclass(frozen=True, slots=True)
class Eagle3Files:
    """A head whose weights are not read yet.

    Attributes:
        folder: Holds it.
        record: What it is.
        shapes: The shape of every tensor that is read, by name.
    """

    folder: Path
    record: HeadRecord
    shapes: Mapping[str, tuple[int, ...]]

    def open(self, stack: ExitStack, device: torch.device, dtype: torch.dtype) -> HeadSource:
        """Return the source of the tensors, which the stack closes."""
        return CheckpointTensors(self.folder, stack, device, dtype)

    @property
    def parameters(self) -> int:
        """The values of all weights."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if name not in WORDS_OF_MAPS)


def is_eagle3(place: Path) -> bool:
    """Return whether a folder holds an EAGLE-3 head, as its config says."""
    if not (place / CONFIG).is_file():
        return False
    try:
        config = read_json(place / CONFIG)
    except CheckpointError:
        return False
    if "speculators_model_type" in config:
        return bool(config["speculators_model_type"] == "eagle3")
    names = config.get("architectures")
    named = isinstance(names, list) and any(name in ARCHITECTURES for name in names if isinstance(name, str))
    block = "block_size" in config or "dflash_config" in config
    return named or (config.get("num_hidden_layers") == 1 and "draft_vocab_size" in config and not block)


def read_eagle3(folder: Path) -> Eagle3Files:
    """Return the head in a folder, as its config and the headers of its weights say.

    Raises:
        CheckpointError: The files are broken, contradict each other, or need what is not supported.
    """
    config = read_json(folder / CONFIG)
    speculators = "speculators_model_type" in config
    refuse_pickles(folder)
    headers = weight_headers(folder, AS_STORED)
    record = _speculators(config) if speculators else _plain(config)
    layer, later = FIRST_LAYERS.values()
    if not any(name.startswith(f"{layer}.") for name in headers):
        layer = later
    spelling = SPECULATORS if speculators else OTHERS
    taps = 3 if record.taps is None else len(record.taps)  # 3: `default_taps`
    record = replace(
        record, layer=layer, spelling=spelling, own_embedding=EMBEDDING in headers, own_head=HEAD in headers
    )
    if record.target_size == 0:
        record = replace(record, target_size=record.spec.hidden_size)
    return Eagle3Files(folder, record, checked(folder, record, taps, headers))


def _plain(config: Mapping[str, Any]) -> HeadRecord:
    """Read the config of SafeAILab and SpecForge: a Llama's, with keys of the head among them."""
    read = ConfigReader(config)
    taps = _own_taps(read)
    section = read.section(EAGLE)
    if section is not None:
        if not section.flag("use_aux_hidden_state", default=True):
            raise section.error("use_aux_hidden_state", "a head without the target's states is not EAGLE-3")
        nested = _own_taps(section)
        if nested is not None and nested[:1] == (1,):  # ids of layers, whose outputs are read
            nested = tuple(tap + 1 for tap in nested)
        if nested is not None and taps not in (None, nested):
            raise section.error(AUX_LAYERS, f"config.json has {list(taps or ())}, too")
        taps = taps if nested is None else nested
        section.reject_unknown_keys()
    return record_of(read, config, OF_THE_HEAD, taps)


def _speculators(config: Mapping[str, Any]) -> HeadRecord:
    """Read the config of speculators."""
    read = ConfigReader(config, harmless=OF_SPECULATORS)
    read.reject_unknown_keys()
    layer = read.section(LAYER)
    if layer is None:
        raise read.error(LAYER, "a head of speculators needs the config of its layer")
    record = record_of(read, layer.config, frozenset({"architectures", "bos_token_id", "eos_token_id",
                                                   "pad_token_id", "torch_dtype", "dtype",
                                                   "tie_word_embeddings"}), _own_taps(read))  # fmt: skip
    section = read.section("speculators_config")
    return record if section is None else replace(
        record, verifier=verifier_of(section), planned=proposed_by(section)
    )  # fmt: skip


def record_of(
    read: ConfigReader, layer: Mapping[str, Any], skipped: frozenset[str], taps: tuple[int, ...] | None
) -> HeadRecord:
    """Return the record without what the tensors tell.

    Args:
        read: The config of the head.
        layer: The config of its layers.
        skipped: Keys there that say nothing of the layers.
        taps: The boundaries.
    """
    body = layer.get("model_type", "llama")
    if body not in BODIES:
        raise CheckpointError(
            f"config.json: a head whose layers are of model_type {shortened(body)} is not supported",
            remedy=f"supported are {', '.join(BODIES)}",
        )
    own = {key: value for key, value in layer.items() if key not in skipped}
    spec = ModelSpec.from_hf({**own, "model_type": body})
    if spec.quantisation is not None:
        raise CheckpointError(
            "config.json: quantized weights of a head are not supported", remedy="give the head unquantized"
        )
    flags = {
        name: read.flag(name, if_null=False)
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise read.error(
            "fc_norm", "norm_before_fc is true, too; keep the one that the head was trained with"
        )
    return HeadRecord(
        spec=spec, spelling="", layer="", taps=taps,
        target_size=0 if read.take("target_hidden_size") is None else read.count("target_hidden_size"),
        words=read.count("draft_vocab_size", spec.vocab_size, if_null=spec.vocab_size),
        norm_before_residual=flags["norm_before_residual"], norm_before_fc=flags["norm_before_fc"],
        fc_norm=flags["fc_norm"], norm_output=flags["norm_output"],
    )  # fmt: skip


def _own_taps(read: ConfigReader) -> tuple[int, ...] | None:
    """Return the ids of the taps as they stand there; None where there are none."""
    ids = read.take(AUX_LAYERS)
    if ids is None:
        return None
    sound = isinstance(ids, list) and ids and all(type(tap) is int and tap >= 0 for tap in ids)
    if not sound or len(set(ids)) != len(ids):
        raise read.error(AUX_LAYERS, "it must be a list of different whole numbers, 0 or more")
    return tuple(ids)


def verifier_of(section: ConfigReader) -> str | None:
    verifier = section.section("verifier")
    name = None if verifier is None else verifier.take("name_or_path")
    return name if isinstance(name, str) and name else None


def proposed_by(section: ConfigReader) -> int | None:
    """Return the draft length that speculators proposes; None where it proposes none."""
    methods = section.take("proposal_methods")
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
        return None
    count = methods[0].get("speculative_tokens")
    return count if type(count) is int and count > 0 else None


def checked(
    folder: Path,
    record: HeadRecord,
    taps: int,
    headers: Mapping[str, tuple[str, tuple[int, ...]]],
    floats: Collection[str] = FLOATS,
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that are read, after checking all headers.

    Args:
        folder: The head's, or its file.
        record: What its config says.
        taps: How many are joined.
        headers: The stored dtype and the shape of every tensor.
        floats: The dtypes that weights may have.

    Raises:
        CheckpointError: A tensor is missing, is not known, or has another shape or dtype than implied.
    """
    return checked_shapes(folder, *head_shapes(record, taps), headers, floats)


def checked_shapes(
    folder: Path,
    needed: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
    headers: Mapping[str, tuple[str, tuple[int, ...]]],
    floats: Collection[str] = FLOATS,
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that are read, after checking all headers.

    Args:
        folder: The head's, or its file.
        needed: The shapes of the tensors that must be there, by name.
        optional: Those of the tensors that may be.
        headers: The stored dtype and the shape of every tensor.
        floats: The dtypes that weights may have.

    Raises:
        CheckpointError: A tensor is missing, is not known, or has another shape or dtype than implied.
    """
    allowed = dict(optional)
    for name, shape in needed.items():
        if name not in headers:
            raise CheckpointError(
                f"{folder} lacks tensor {name}, which its config implies",
                remedy="take both files from one head",
            )
        allowed[name] = shape
    for name, (dtype, shape) in headers.items():
        if name in TRAINING:
            continue
        if name not in allowed:
            raise CheckpointError(
                f"{folder}: tensor {name} is not part of a head as its config describes it",
                remedy="take both files from one head",
            )
        if shape != allowed[name]:
            raise CheckpointError(
                f"{folder}: tensor {name} has shape {list(shape)}, but config.json implies"
                f" {list(allowed[name])}",
                remedy="take both files from one head",
            )
        if dtype not in WORDS_OF_MAPS.get(name, floats):
            raise CheckpointError(
                f"{folder}: tensor {name} is stored as {dtype}", remedy="give the head unquantized"
            )
    return {name: shape for name, (_, shape) in headers.items() if name not in TRAINING}


def head_shapes(
    record: HeadRecord, taps: int
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return the shapes of the tensors that must be there, and of those that may be."""
    spec, size, joined = record.spec, record.spec.hidden_size, taps * record.target_size
    needed: dict[str, tuple[int, ...]] = {"fc.weight": (size, joined), "norm.weight": (size,)}
    maps = {D2T: (record.words,), T2D: (spec.vocab_size,)}
    if record.pair_fc:
        needed, maps = {"fc.weight": (size, 2 * size)}, {"fc.bias": (size,)}
    if record.norm_before_fc:
        needed["input_norm.weight"] = (joined,)
    if record.fc_norm:
        needed |= {f"fc_norm.{tap}.weight": (record.target_size,) for tap in range(taps)}
    for index in range(spec.layers):
        needed |= layer_shapes(record, index, pairs=index == 0 and not record.pair_fc)
    if record.words != spec.vocab_size:
        needed[D2T] = maps[D2T]
    return needed, maps | {EMBEDDING: (spec.vocab_size, size), HEAD: (record.words, size)}


def layer_name(record: HeadRecord, index: int) -> str:
    """Return the name of a layer among the tensors."""
    return record.layer if index == 0 else f"layers.{index}"


def layer_shapes(record: HeadRecord, index: int, *, pairs: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a layer; `pairs`: it attends with pairs side by side."""
    spec, name = record.spec, layer_name(record, index)
    size, inner = spec.hidden_size, spec.intermediate_size
    entering = 2 * size if pairs else size
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    if index or not record.pair_fc:
        shapes[f"{name}.input_layernorm.weight"] = (size,)
    shapes |= {
        f"{name}.post_attention_layernorm.weight": (size,),
        f"{name}.self_attn.q_proj.weight": (queries, entering),
        f"{name}.self_attn.k_proj.weight": (keys, entering),
        f"{name}.self_attn.v_proj.weight": (keys, entering),
        f"{name}.self_attn.o_proj.weight": (size, queries),
        f"{name}.mlp.gate_proj.weight": (inner, size),
        f"{name}.mlp.up_proj.weight": (inner, size),
        f"{name}.mlp.down_proj.weight": (size, inner),
    }
    if pairs:
        shapes[f"{name}.hidden_norm.weight"] = (size,)
    if spec.head_norms:
        shapes |= {f"{name}.self_attn.{each}_norm.weight": (spec.head_dim,) for each in "qk"}
    if spec.qkv_bias:
        rows = (("q", queries), ("k", keys), ("v", keys))
        shapes |= {f"{name}.self_attn.{each}_proj.bias": (count,) for each, count in rows}
    if spec.output_bias:
        # speculators makes q, k and v anew with the config's bias, and keeps the layer's own o_proj
        shapes[f"{name}.self_attn.o_proj.bias"] = (size,)
    if spec.mlp_bias:
        rows = (("gate", inner), ("up", inner), ("down", size))
        shapes |= {f"{name}.mlp.{each}_proj.bias": (count,) for each, count in rows}
    return shapes
