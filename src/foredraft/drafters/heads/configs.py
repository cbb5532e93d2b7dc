"""Read the folder of an EAGLE head: its config.json, in any project's format, and the headers of its weights.

Every key is read, or refused by its name; `keys` tells which of them change nothing.

    SafeAILab, SpecForge    EAGLE-3: `midlayer.*`; keys of a Llama beside draft_vocab_size; layers in
                            `eagle_config`. EAGLE-1 and 2: an `fc` over pairs
    ModelOpt                as SafeAILab, with `layers.0.*` and more keys in `eagle_config`
    speculators             `layers.0.*`; the keys of the layers in `transformer_layer_config`
    SpecForge, Amazon       P-EAGLE: as EAGLE-3, with `mask_hidden`; the token of masked slots in
                            mask_token_id, ptd_token_id or pard_token, or in a `peagle_config.json`

Id k of an auxiliary layer names the states after k layers, but a first id of 1 in an `eagle_config` tells
that these ids name the layers whose outputs are read (SGLang, TensorRT-LLM). The tensors tell the family of
the layers and their count, which a config may have inherited from the target.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from foredraft.drafters.head_kinds import refuse_pickles
from foredraft.drafters.heads.keys import layer_keys, pass_over
from foredraft.drafters.heads.record import HeadRecord, PEagleRecord, Record
from foredraft.drafters.heads.tensors import EMBEDDING, HEAD, ONE_HEAD, Headers, HeadFiles, checked_shapes
from foredraft.errors import CheckpointError
from foredraft.model.checkpoint import weight_headers
from foredraft.model.config import ConfigReader, read_json
from foredraft.model.spec import CONFIG, ModelSpec
from foredraft.model.tensor_names import AS_STORED, Naming

EAGLE, LAYER, SPECULATOR = "eagle_config", "transformer_layer_config", "speculators_config"
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
SPECULATORS, OTHERS = "speculators", "SafeAILab or SpecForge"  # formats
FIRST_LAYERS = {OTHERS: "midlayer", SPECULATORS: "layers.0"}  # format -> the layer that reads pairs
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
MASK_TOKENS = ("mask_token_id", "ptd_token_id", "pard_token")
# the keys of a head that its readers read, beside those of its layers
OF_EAGLE3 = frozenset({*FLAGS, "draft_vocab_size", "target_hidden_size", AUX_LAYERS, EAGLE})
OF_EAGLE = OF_EAGLE3 | {"bias", "qkv_bias"}
OF_SPECULATORS = frozenset({"speculators_model_type", SPECULATOR, LAYER})
P_EAGLE = "peagle_config.json"  # SpecForge's program writes it beside config.json
DEPTHS = "num_depths"


def read_head(
    folder: Path, record_of: Callable[[dict[str, Any], Headers], Record], naming: Naming = AS_STORED
) -> HeadFiles[Record]:
    """Return the head in a folder, as its config and the headers of its weights say."""
    config = read_json(folder / CONFIG)
    refuse_pickles(folder)
    headers = weight_headers(folder, naming)
    record = replace(record_of(config, headers), own_embedding=EMBEDDING in headers, own_head=HEAD in headers)
    return HeadFiles(folder, record, checked_shapes(folder, record, headers), naming=naming)


def _eagle3(config: Mapping[str, Any], headers: Headers, more: Collection[str] = ()) -> HeadRecord:
    """Return the record; `more` keys are read by the caller."""
    speculators = "speculators_model_type" in config
    own = OF_EAGLE3 | frozenset(more)
    if speculators:
        record = _eagle3_of_speculators(config, headers, own)
    else:
        record = _eagle3_of_others(config, headers, own)
    first, other = FIRST_LAYERS.values()
    return replace(
        record, format=SPECULATORS if speculators else OTHERS,
        layer=first if any(name.startswith(f"{first}.") for name in headers) else other,
        target_size=record.target_size or record.spec.hidden_size,
    )  # fmt: skip


read_eagle3 = partial(read_head, record_of=_eagle3)  # of a folder


def read_p_eagle(folder: Path) -> HeadFiles[PEagleRecord]:
    beside = folder / P_EAGLE
    told = read_json(beside) if beside.is_file() else {}
    return read_head(folder, lambda config, headers: _p_eagle({**config, **told}, headers))


def _p_eagle(config: Mapping[str, Any], headers: Headers) -> PEagleRecord:
    record, read = _eagle3(config, headers, MASK_TOKENS), ConfigReader(config)
    key = next((key for key in MASK_TOKENS if read.take(key) is not None), None)
    mask = None if key is None else token_below(record.spec.vocab_size, read, key)
    depths = None if read.take(DEPTHS) is None else read.count(DEPTHS)
    own = {each.name: getattr(record, each.name) for each in fields(HeadRecord)}
    return PEagleRecord(**{**own, "planned": record.planned or depths, "mask_token": mask})


def token_below(vocabulary: int, read: ConfigReader, key: str) -> int:
    """Return the id of a token under a key."""
    token = read.count(key, allow_zero=True)
    if token >= vocabulary:
        raise read.error(key, f"the vocabulary has {vocabulary} tokens")
    return token


def _eagle3_of_others(config: Mapping[str, Any], headers: Headers, own: frozenset[str]) -> HeadRecord:
    """Read the config of SafeAILab, SpecForge or ModelOpt: a Llama's, with keys of the head among them."""
    read = ConfigReader(config)
    pass_over(read)
    aux_layers = aux_ids(read, AUX_LAYERS)
    section = read.section(EAGLE)
    if section is not None:
        pass_over(section)
        nested = aux_ids(section, AUX_LAYERS)
        if nested is not None and nested[:1] == (1,):  # ids of layers, whose outputs are read
            nested = tuple(layer + 1 for layer in nested)
        if nested is not None and aux_layers not in (None, nested):
            raise section.error(AUX_LAYERS, f"config.json has {list(aux_layers or ())}, too")
        aux_layers = aux_layers if nested is None else nested
        section.reject_unknown_keys()
    return eagle3_record(read, layer_keys(config, own), aux_layers, headers)


def _eagle3_of_speculators(config: Mapping[str, Any], headers: Headers, own: frozenset[str]) -> HeadRecord:
    read = ConfigReader(config, harmless=OF_SPECULATORS | own)
    pass_over(read)
    read.reject_unknown_keys()
    layer = read.section(LAYER)
    if layer is None:
        raise read.error(LAYER, "a head of speculators needs the config of its layer")
    layers = layer_keys(layer.config, frozenset())
    record = eagle3_record(read, layers, aux_ids(read, AUX_LAYERS), headers)
    verifier, planned = proposal(read)
    return replace(record, verifier=verifier, planned=planned)


def eagle3_record(
    read: ConfigReader,
    layers: Mapping[str, Any],
    aux_layers: tuple[int, ...] | None,
    names: Collection[str] = (),  # of its tensors
) -> HeadRecord:
    """Return the record without what the tensors tell."""
    spec = spec_of(layers, names)
    flags: dict[str, Any] = {name: read.flag(name, if_null=False) for name in FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        remedy = "norm_before_fc is true, too; keep the one that the head was trained with"
        raise read.error("fc_norm", remedy)
    return HeadRecord(
        spec=spec, format="", layer="", aux_layers=aux_layers,
        target_size=0 if read.take("target_hidden_size") is None else read.count("target_hidden_size"),
        draft_vocab_size=read.count("draft_vocab_size", spec.vocab_size, if_null=spec.vocab_size), **flags,
    )  # fmt: skip


def spec_of(layers: Mapping[str, Any], names: Collection[str], body: str | None = None) -> ModelSpec:
    """Return the form of a head's layers: of a family, or of the one that the tensors have."""
    normed = any(name.endswith("self_attn.q_norm.weight") for name in names)
    named = {match[0] for name in names if (match := re.match(r"midlayer\.|layers\.\d+\.", name))}
    told = {**layers, "model_type": body or ("qwen3" if normed else "llama")}
    if named:
        told["num_hidden_layers"] = len(named)
        if isinstance(types := told.get("layer_types"), list):
            told["layer_types"] = types[: len(named)]
    spec = ModelSpec.from_hf(told)
    if spec.quantisation is not None:
        problem = "config.json: quantized weights of a head are not supported"
        raise CheckpointError(problem, remedy="give the head unquantized")
    return spec


def aux_ids(read: ConfigReader, key: str, *, shift: int = 0, rising: bool = False) -> tuple[int, ...] | None:
    """Return the auxiliary layers under a key, `shift` from its ids; None where there are none."""
    ids = read.take(key)
    if ids is None or ids == []:
        return None
    sound = isinstance(ids, list) and all(type(layer) is int and layer + shift >= 0 for layer in ids)
    if not sound or (sorted(set(ids)) != ids if rising else len(set(ids)) != len(ids)):
        kind = "rising list of whole" if rising else "list of different whole"
        raise read.error(key, f"it must be a {kind} numbers, {-shift} or more")
    return tuple(layer + shift for layer in ids)


def proposal(read: ConfigReader) -> tuple[str | None, int | None]:
    """Return the target that a config of speculators names, and the draft length that it proposes, if any."""
    section = read.section(SPECULATOR)
    if section is None:
        return None, None
    verifier = section.section("verifier")
    name = None if verifier is None else verifier.take("name_or_path")
    methods = section.take("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    count = first.get("speculative_tokens") if isinstance(first, dict) else None
    named = isinstance(name, str) and name
    return name if named else None, count if type(count) is int and count > 0 else None


def read_eagle(folder: Path) -> HeadFiles[HeadRecord]:
    return read_head(folder, lambda config, headers: _eagle(folder, config, headers))


def _eagle(place: Path, config: Mapping[str, Any], headers: Headers) -> HeadRecord:
    read = ConfigReader(config)
    pass_over(read)
    record = eagle3_record(read, layer_keys(config, OF_EAGLE), None, headers)
    spec, has_bias = record.spec, "fc.bias" in headers
    if record.draft_vocab_size != spec.vocab_size:
        raise read.error("draft_vocab_size", "an EAGLE-1 or EAGLE-2 head drafts over the whole vocabulary")
    if read.flag("qkv_bias", if_null=False):
        spec = replace(spec, qkv_bias=True)
    if read.take("bias") is not None and read.flag("bias") != has_bias:
        said, found = str(config["bias"]).lower(), "there" if has_bias else "missing"
        problem = f"{place}: config.json has bias = {said}, but fc.bias is {found}"
        raise CheckpointError(problem, remedy=ONE_HEAD)
    return replace(
        record, spec=spec, layer="layers.0", format="SafeAILab", target_size=spec.hidden_size, pair_fc=True,
        final_norm=True,
    )  # fmt: skip
