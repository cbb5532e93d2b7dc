"""Read the files of an EAGLE head: SafeAILab's, SpecForge's and speculators' formats.

Every key is read, or refused by its name; every tensor is known, and has the shape that the config implies.
Weights are safetensors: a pickle can run any program when it is read, so none is.

    SafeAILab, SpecForge    `midlayer.*`; keys of a Llama beside draft_vocab_size; layers in `eagle_config`
    speculators             `layers.0.*`; the keys of the layer in `transformer_layer_config`

Id k of an auxiliary layer names the states after k layers, but a first id of 1 in an `eagle_config` tells
that these ids name the layers whose outputs are read (SGLang, TensorRT-LLM).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from foredraft.drafters.heads.record import (
    FLOATS,
    HeadRecord,
    architectures_of,
    config_of,
    has_weights,
    refuse_pickles,
)
from foredraft.errors import CheckpointError, shortened
from foredraft.model.checkpoint import CheckpointTensors, Shapes, weight_headers
from foredraft.model.config import ConfigReader, read_json
from foredraft.model.safetensors_file import SINGLE, SafetensorsFile
from foredraft.model.spec import ModelSpec
from foredraft.model.tensor_names import AS_STORED

CONFIG, EAGLE, LAYER = "config.json", "eagle_config", "transformer_layer_config"
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
ARCHITECTURES = frozenset(
    {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"}
)
SPECULATORS, OTHERS = "speculators", "SafeAILab or SpecForge"  # formats
FIRST_LAYERS = {OTHERS: "midlayer", SPECULATORS: "layers.0"}  # format -> the layer that reads pairs
BODIES = ("llama", "qwen3")  # the families whose layers a head may have
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# keys of a config that the form of a head's layers does not depend on, by whose they are
GENERAL = frozenset({"architectures", "tie_word_embeddings", "torch_dtype", "dtype"})
ENDS = frozenset({"bos_token_id", "eos_token_id", "pad_token_id"})
OF_EAGLE3 = frozenset({*FLAGS, "draft_vocab_size", "target_hidden_size", AUX_LAYERS})
OF_THE_HEAD = GENERAL | ENDS | OF_EAGLE3 | {"auto_map", "target_model_type", "target_vocab_size", EAGLE}
OF_SPECULATORS = GENERAL | {
    "speculators_model_type", "speculators_version", "speculators_config", LAYER, "auto_map",
    "transformers_version", "has_no_defaults_at_init", "model_type",
}  # fmt: skip
EMBEDDING, HEAD, D2T, T2D = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
MAP_DTYPES = {D2T: ("I64", "I32"), T2D: ("BOOL", "U8")}
TRAINING = frozenset({"verifier_norm.weight", "verifier_lm_head.weight"})  # copies of the target's
ONE_HEAD = "take both files from one head"


class HeadTensors(Protocol):
    """Gives the tensors of a head by name, those of one call joined along their first dimension."""

    def load(self, shapes: Shapes) -> Tensor: ...


class HeadSource(HeadTensors, Protocol):
    """Gives the tensors of a head's files; it checks shapes and dtypes as `CheckpointTensors` does."""

    def view(self, name: str, shape: tuple[int, ...], dtypes: Collection[str]) -> Tensor:
        """Return a tensor as it is stored; the caller must not keep it."""


@dataclass(frozen=True, slots=True)
class Eagle3Files:
    """A head whose weights are not read yet."""

    folder: Path  # holds it, or is its GGUF file
    record: HeadRecord  # what it is
    shapes: Mapping[str, tuple[int, ...]]  # the shape of every tensor that is read, by name
    # gives the tensors of a GGUF file; None: those of the folder
    source: Callable[[torch.device, torch.dtype], HeadSource] | None = None

    def open(self, stack: ExitStack, device: torch.device, dtype: torch.dtype) -> HeadSource:
        """Return the source of the tensors, which the stack closes."""
        if self.source is not None:
            return self.source(device, dtype)
        return CheckpointTensors(self.folder, stack, device, dtype)

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for name, shape in self.shapes.items() if name not in MAP_DTYPES)


def is_eagle3(place: Path) -> bool:
    config = config_of(place)
    if "speculators_model_type" in config:
        return bool(config["speculators_model_type"] == "eagle3")
    named = not ARCHITECTURES.isdisjoint(architectures_of(config))
    block = "block_size" in config or "dflash_config" in config
    return named or (config.get("num_hidden_layers") == 1 and "draft_vocab_size" in config and not block)


def read_eagle3(folder: Path) -> Eagle3Files:
    """Return the head in a folder, as its config and the headers of its weights say."""
    config = read_json(folder / CONFIG)
    speculators = "speculators_model_type" in config
    refuse_pickles(folder)
    headers = weight_headers(folder, AS_STORED)
    record = _speculators(config) if speculators else _plain(config)
    layer, later = FIRST_LAYERS.values()
    if not any(name.startswith(f"{layer}.") for name in headers):
        layer = later
    count = 3 if record.aux_layers is None else len(record.aux_layers)  # 3: `default_aux_layers`
    record = replace(
        record, layer=layer, format=SPECULATORS if speculators else OTHERS,
        target_size=record.target_size or record.spec.hidden_size,
        own_embedding=EMBEDDING in headers, own_head=HEAD in headers,
    )  # fmt: skip
    return Eagle3Files(folder, record, checked_shapes(folder, *head_shapes(record, count), headers))


def _plain(config: Mapping[str, Any]) -> HeadRecord:
    """Read the config of SafeAILab and SpecForge: a Llama's, with keys of the head among them."""
    read = ConfigReader(config)
    aux_layers = aux_ids(read, AUX_LAYERS)
    section = read.section(EAGLE)
    if section is not None:
        if not section.flag("use_aux_hidden_state", default=True):
            raise section.error("use_aux_hidden_state", "a head without the target's states is not EAGLE-3")
        nested = aux_ids(section, AUX_LAYERS)
        if nested is not None and nested[:1] == (1,):  # ids of layers, whose outputs are read
            nested = tuple(layer + 1 for layer in nested)
        if nested is not None and aux_layers not in (None, nested):
            raise section.error(AUX_LAYERS, f"config.json has {list(aux_layers or ())}, too")
        aux_layers = aux_layers if nested is None else nested
        section.reject_unknown_keys()
    return record_of(read, config, OF_THE_HEAD, aux_layers)


def _speculators(config: Mapping[str, Any]) -> HeadRecord:
    read = ConfigReader(config, harmless=OF_SPECULATORS | OF_EAGLE3 | {"embed_requires_grad"})
    read.reject_unknown_keys()
    layer = read.section(LAYER)
    if layer is None:
        raise read.error(LAYER, "a head of speculators needs the config of its layer")
    record = record_of(read, layer.config, GENERAL | ENDS, aux_ids(read, AUX_LAYERS))
    section = read.section("speculators_config")
    if section is None:
        return record
    return replace(record, verifier=verifier_of(section), planned=proposed_by(section))


def record_of(
    read: ConfigReader, layer: Mapping[str, Any], skipped: frozenset[str], aux_layers: tuple[int, ...] | None
) -> HeadRecord:
    """Return the record without what the tensors tell."""
    spec = spec_of({key: value for key, value in layer.items() if key not in skipped}, "llama")
    flags: dict[str, Any] = {name: read.flag(name, if_null=False) for name in FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise read.error(
            "fc_norm", "norm_before_fc is true, too; keep the one that the head was trained with"
        )
    return HeadRecord(
        spec=spec, format="", layer="", aux_layers=aux_layers,
        target_size=0 if read.take("target_hidden_size") is None else read.count("target_hidden_size"),
        draft_vocab_size=read.count("draft_vocab_size", spec.vocab_size, if_null=spec.vocab_size), **flags,
    )  # fmt: skip


def spec_of(layers: Mapping[str, Any], usual: str) -> ModelSpec:
    """Return the form of a head's layers, of the family `usual` where their config names none."""
    body = layers.get("model_type", usual)
    if body not in BODIES:
        raise CheckpointError(
            f"config.json: a head whose layers are of model_type {shortened(body)} is not supported",
            remedy=f"supported are {', '.join(sorted(BODIES, key=usual.__ne__))}",
        )
    spec = ModelSpec.from_hf({**layers, "model_type": body})
    if spec.quantisation is not None:
        raise CheckpointError(
            "config.json: quantized weights of a head are not supported", remedy="give the head unquantized"
        )
    return spec


def aux_ids(read: ConfigReader, key: str, *, shift: int = 0, rising: bool = False) -> tuple[int, ...] | None:
    """Return the auxiliary layers under a key, `shift` from its ids; None where there are none."""
    ids = read.take(key)
    if ids is None:
        return None
    sound = isinstance(ids, list) and ids and all(type(layer) is int and layer + shift >= 0 for layer in ids)
    if not sound or (sorted(set(ids)) != ids if rising else len(set(ids)) != len(ids)):
        kind = "rising list of whole" if rising else "list of different whole"
        raise read.error(key, f"it must be a {kind} numbers, {-shift} or more")
    return tuple(layer + shift for layer in ids)


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


def checked_shapes(
    folder: Path,
    needed: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
    headers: Mapping[str, tuple[str, tuple[int, ...]]],
    floats: Collection[str] = FLOATS,
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that are read, after checking all headers."""
    allowed = {**optional, **needed}
    for name in needed:
        if name not in headers:
            raise CheckpointError(f"{folder} lacks tensor {name}, which its config implies", remedy=ONE_HEAD)
    for name, (dtype, shape) in headers.items():
        if name in TRAINING:
            continue
        if name not in allowed:
            raise CheckpointError(
                f"{folder}: tensor {name} is not part of a head as its config describes it", remedy=ONE_HEAD
            )
        if shape != allowed[name]:
            raise CheckpointError(
                f"{folder}: tensor {name} has shape {list(shape)}, but config.json implies"
                f" {list(allowed[name])}",
                remedy=ONE_HEAD,
            )
        if dtype not in MAP_DTYPES.get(name, floats):
            raise CheckpointError(
                f"{folder}: tensor {name} is stored as {dtype}", remedy="give the head unquantized"
            )
    return {name: shape for name, (_, shape) in headers.items() if name not in TRAINING}


def head_shapes(
    record: HeadRecord, count: int
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return the shapes of the tensors that must be there, and of those that may be."""
    spec, size, joined = record.spec, record.spec.hidden_size, count * record.target_size
    needed: dict[str, tuple[int, ...]] = {"fc.weight": (size, joined), "norm.weight": (size,)}
    maps = {D2T: (record.draft_vocab_size,), T2D: (spec.vocab_size,)}
    if record.pair_fc:
        needed, maps = {"fc.weight": (size, 2 * size)}, {"fc.bias": (size,)}
    if record.norm_before_fc:
        needed["input_norm.weight"] = (joined,)
    if record.fc_norm:
        needed |= {f"fc_norm.{index}.weight": (record.target_size,) for index in range(count)}
    for index in range(spec.layers):
        needed |= layer_shapes(record, index, pairs=index == 0 and not record.pair_fc)
    if record.draft_vocab_size != spec.vocab_size:
        needed[D2T] = maps[D2T]
    return needed, maps | {EMBEDDING: (spec.vocab_size, size), HEAD: (record.draft_vocab_size, size)}


def layer_name(record: HeadRecord, index: int) -> str:
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


FIRST = "layers.0.self_attn.q_proj.weight"
FOREIGN = frozenset({"norm.weight", "hidden_norm.weight"})  # of other heads with an `fc`
TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # of a whole model


def is_eagle(place: Path) -> bool:
    """Return whether a folder holds an EAGLE-1 or EAGLE-2 head, as its config and its tensors' names say."""
    if is_eagle3(place) or not (place / CONFIG).is_file():
        return False
    try:
        if (place / SINGLE).is_file():
            with SafetensorsFile(place / SINGLE) as opened:
                names = frozenset(opened.tensors)
                return {"fc.weight", FIRST} <= names and FOREIGN.isdisjoint(names)
        one_layer = read_json(place / CONFIG).get("num_hidden_layers") == 1
    except CheckpointError:
        return False
    whole = any((place / name).is_file() for name in TOKENIZERS)
    return one_layer and not whole and not has_weights(place)


def read_eagle(place: Path) -> Eagle3Files:
    """Return the head in a folder, as its config and the headers of its weights say."""
    config = read_json(place / CONFIG)
    refuse_pickles(place)
    headers = weight_headers(place, AS_STORED)
    read = ConfigReader(config)
    record = record_of(read, config, OF_THE_HEAD | {"bias", "qkv_bias"}, None)
    spec = record.spec
    if read.flag("qkv_bias", if_null=False):
        spec = replace(spec, qkv_bias=True)
    if read.take("bias") is not None and read.flag("bias") != ("fc.bias" in headers):
        raise CheckpointError(
            f"{place}: config.json has bias = {str(config['bias']).lower()}, but fc.bias is"
            f" {'there' if 'fc.bias' in headers else 'missing'}",
            remedy=ONE_HEAD,
        )
    record = replace(
        record, spec=spec, layer="layers.0", format="SafeAILab", target_size=spec.hidden_size, pair_fc=True,
        final_norm=True, own_embedding=EMBEDDING in headers, own_head=HEAD in headers,
    )  # fmt: skip
    return Eagle3Files(place, record, checked_shapes(place, *head_shapes(record, 1), headers))
