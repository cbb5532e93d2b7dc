"""Read the folder of a head: its config.json, in the format of any project, and the headers of its weights.

Every key is read, or refused by its name.

    SafeAILab, SpecForge    EAGLE-3: `midlayer.*`; keys of a Llama beside draft_vocab_size; layers in
                            `eagle_config`. EAGLE-1 and 2: an `fc` over pairs
    z-lab                   DFlash: keys of a Qwen 3 beside block_size; `dflash_config`, or its keys too
    DeepSpec                DSpark: the keys of both at the top; it drafts from the anchor; a head and an
                            embedding of its own
    speculators             all: `layers.0.*`; the keys of the layers in `transformer_layer_config`

Id k of an auxiliary layer of EAGLE-3 names the states after k layers, but a first id of 1 in an
`eagle_config` tells that these ids name the layers whose outputs are read (SGLang, TensorRT-LLM). Of a block
drafter, an id in `target_layer_ids` names a layer whose output is read, -1 the embedding; one in
`aux_hidden_state_layer_ids` a layer that the states enter. The confidence head of DSpark is checked and not
read: a policy decides where drafts end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from foredraft.drafters.assets import DFLASH, architectures_of, refuse_pickles
from foredraft.drafters.heads.record import (
    EMBEDDING,
    HEAD,
    MARKOV_FORMS,
    ONE_HEAD,
    BlockRecord,
    Headers,
    HeadFiles,
    HeadRecord,
    Record,
    checked_shapes,
    spread_aux_layers,
)
from foredraft.errors import CheckpointError, shortened
from foredraft.model.checkpoint import weight_headers
from foredraft.model.config import ConfigReader, read_json
from foredraft.model.spec import CONFIG, ModelSpec
from foredraft.model.tensor_names import AS_STORED

EAGLE, LAYER, SPECULATOR = "eagle_config", "transformer_layer_config", "speculators_config"
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
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
    "speculators_model_type", "speculators_version", SPECULATOR, LAYER, "auto_map",
    "transformers_version", "has_no_defaults_at_init", "model_type",
}  # fmt: skip
OF_CONFIDENCE = frozenset({"enable_confidence_head", "confidence_head_with_markov"})
OF_A_BLOCK = GENERAL | ENDS | OF_CONFIDENCE | {
    "auto_map", "block_size", DFLASH, "num_target_layers", "mask_token_id", "target_layer_ids", "is_causal",
    "num_anchors", "markov_rank", "markov_head_type", "input_embedding_scale", "output_multiplier",
    "final_logit_softcapping", "draft_vocab_size",
}  # fmt: skip
MOST_SLOTS = 256  # of a block: the slack of a cache row takes so many positions past the text
LARGEST_RANK = 2**16


def _read(folder: Path, record_of: Callable[[dict[str, Any], Headers], Record]) -> HeadFiles[Record]:
    """Return the head in a folder, as its config and the headers of its weights say."""
    config = read_json(folder / CONFIG)
    refuse_pickles(folder)
    headers = weight_headers(folder, AS_STORED)
    record = replace(record_of(config, headers), own_embedding=EMBEDDING in headers, own_head=HEAD in headers)
    return HeadFiles(folder, record, checked_shapes(folder, record, headers))


def _eagle3(config: Mapping[str, Any], headers: Headers) -> HeadRecord:
    speculators = "speculators_model_type" in config
    record = _eagle3_of_speculators(config) if speculators else _eagle3_of_others(config)
    layer, later = FIRST_LAYERS.values()
    return replace(
        record, format=SPECULATORS if speculators else OTHERS,
        layer=layer if any(name.startswith(f"{layer}.") for name in headers) else later,
        target_size=record.target_size or record.spec.hidden_size,
    )  # fmt: skip


read_eagle3 = partial(_read, record_of=_eagle3)  # of a folder


def _eagle3_of_others(config: Mapping[str, Any]) -> HeadRecord:
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
    return eagle3_record(read, config, OF_THE_HEAD, aux_layers)


def _eagle3_of_speculators(config: Mapping[str, Any]) -> HeadRecord:
    read = ConfigReader(config, harmless=OF_SPECULATORS | OF_EAGLE3 | {"embed_requires_grad"})
    read.reject_unknown_keys()
    layer = read.section(LAYER)
    if layer is None:
        raise read.error(LAYER, "a head of speculators needs the config of its layer")
    record = eagle3_record(read, layer.config, GENERAL | ENDS, aux_ids(read, AUX_LAYERS))
    verifier, planned = _proposal(read)
    return replace(record, verifier=verifier, planned=planned)


def eagle3_record(
    read: ConfigReader, layer: Mapping[str, Any], skipped: frozenset[str], aux_layers: tuple[int, ...] | None
) -> HeadRecord:
    """Return the record without what the tensors tell."""
    spec = spec_of({key: value for key, value in layer.items() if key not in skipped}, "llama")
    flags: dict[str, Any] = {name: read.flag(name, if_null=False) for name in FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        remedy = "norm_before_fc is true, too; keep the one that the head was trained with"
        raise read.error("fc_norm", remedy)
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
        problem = "config.json: quantized weights of a head are not supported"
        raise CheckpointError(problem, remedy="give the head unquantized")
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


def _proposal(read: ConfigReader) -> tuple[str | None, int | None]:
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
    return _read(folder, lambda config, headers: _eagle(folder, config, headers))


def _eagle(place: Path, config: Mapping[str, Any], headers: Headers) -> HeadRecord:
    read = ConfigReader(config)
    record = eagle3_record(read, config, OF_THE_HEAD | {"bias", "qkv_bias"}, None)
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


def _block(config: Mapping[str, Any], headers: Headers) -> BlockRecord:
    named = "DFlash2DraftModel" in architectures_of(config)
    if named or config.get("speculators_model_type") == "dflash2":
        raise dflash_2("config.json: a DFlash 2 head, with convolutions and a selector, is not supported")
    return _block_of_speculators(config) if "speculators_model_type" in config else _block_of_others(config)


read_block = partial(_read, record_of=_block)  # of a folder


def dflash_2(problem: str) -> CheckpointError:
    return CheckpointError(problem, remedy="give a DFlash or DSpark head")


def _block_of_others(config: Mapping[str, Any]) -> BlockRecord:
    """Read the config of z-lab or DeepSpec: a Qwen 3's, with keys of the head among them or in a section."""
    outer = ConfigReader(config)
    inner = outer.section(DFLASH) or ConfigReader({}, f"{outer.where}, {DFLASH}")
    spec = layers_of({key: value for key, value in config.items() if key not in OF_A_BLOCK})

    def reader(key: str) -> ConfigReader:
        return inner if inner.take(key) is not None else outer

    if inner.flag("use_swa", if_null=False):
        raise inner.error("use_swa", "windows are read from layer_types and sliding_window")
    for key in ("swa_window_size", "num_anchors", *OF_CONFIDENCE):  # of training, and told by the tensors
        inner.take(key)
    layers = None if outer.take("num_target_layers") is None else outer.count("num_target_layers")
    aux_layers = aux_ids(reader("target_layer_ids"), "target_layer_ids", shift=1, rising=True)
    if aux_layers is None and layers is None:
        raise inner.error("target_layer_ids", "the head does not say which layers of the target it reads")
    causal = reader("causal").take("causal")
    if causal is None:
        causal = outer.take("is_causal")
    if causal not in (None, True, False):
        raise inner.error("causal", "it must be true or false")
    softcap = reader("final_logit_softcapping").optional_number("final_logit_softcapping", zero_is_null=True)
    made = block_record(
        "z-lab's or DeepSpec's", spec, reader("block_size"), reader("mask_token_id"),
        **_markov(reader("markov_rank"), reader("markov_head_type")),
        aux_layers=spread_aux_layers(layers or 0, spec.layers) if aux_layers is None else aux_layers,
        target_size=spec.hidden_size, draft_vocab_size=outer.count("draft_vocab_size", spec.vocab_size),
        from_anchor="Qwen3DSparkModel" in architectures_of(config), causal=bool(causal),
        causal_windows=causal is not False, logit_softcap=softcap,
        embedding_scale=reader("input_embedding_scale").number("input_embedding_scale", 1.0),
        logit_scale=reader("output_multiplier").number("output_multiplier", 1.0),
        target_layers=layers, last_is_normed=True,
    )  # fmt: skip
    inner.reject_unknown_keys()
    return made


def _block_of_speculators(config: Mapping[str, Any]) -> BlockRecord:
    read = ConfigReader(config, harmless=OF_SPECULATORS | OF_CONFIDENCE)
    layer = read.section(LAYER)
    if layer is None:
        raise read.error(LAYER, "a head of speculators needs the config of its layers")
    skipped = (GENERAL | ENDS) - {"torch_dtype"}
    spec = layers_of({key: value for key, value in layer.config.items() if key not in skipped})
    aux_layers = aux_ids(read, "aux_hidden_state_layer_ids", rising=True)
    if aux_layers is None:
        raise read.error("aux_hidden_state_layer_ids", "the head does not say which layers it reads")
    verifier, proposed = _proposal(read)
    own_size = read.take("target_hidden_size") is None
    made = block_record(
        "speculators'", spec, read, read, **_markov(read, read), aux_layers=aux_layers,
        target_size=spec.hidden_size if own_size else read.count("target_hidden_size"),
        draft_vocab_size=read.count("draft_vocab_size", spec.vocab_size, if_null=spec.vocab_size),
        from_anchor=read.flag("sample_from_anchor", read.take("speculators_model_type") == "dspark"),
        causal_windows=not read.flag("sliding_window_non_causal", if_null=False), window_from_anchor=True,
        verifier=verifier,
    )  # fmt: skip
    read.reject_unknown_keys()
    return replace(made, planned=made.planned if proposed is None else min(proposed, made.drafts))


def layers_of(config: Mapping[str, Any]) -> ModelSpec:
    """Return the form of the layers: Qwen 3's, with norms of the heads, whichever family's keys they have."""
    return replace(spec_of(config, "qwen3"), head_norms=True, mlp_bias=False)


def block_record(
    format: str, spec: ModelSpec, block: ConfigReader, mask: ConfigReader, **fields: Any
) -> BlockRecord:
    """Return the record without what the tensors tell, after checking the block."""
    slots, least = block.count("block_size"), 1 if fields["from_anchor"] else 2
    if not least <= slots <= MOST_SLOTS:
        raise block.error("block_size", f"supported are {least} to {MOST_SLOTS}")
    if mask.take("mask_token_id") is None:
        raise mask.error("mask_token_id", "the head does not say which token stands in its masked slots")
    token = mask.count("mask_token_id", allow_zero=True)
    if token >= spec.vocab_size:
        raise mask.error("mask_token_id", f"the vocabulary has {spec.vocab_size} tokens")
    made = BlockRecord(spec=spec, format=format, layer="layers.0", block=slots, mask_token=token, **fields)
    return replace(made, planned=made.drafts)


def _markov(rank: ConfigReader, form: ConfigReader) -> dict[str, Any]:
    """Return the fields of the bias of the token before; none without one."""
    count = rank.count("markov_rank", 0, if_null=0, allow_zero=True)
    named = form.choice("markov_head_type", (*MARKOV_FORMS, None), None)
    if count > LARGEST_RANK:
        raise rank.error("markov_rank", f"it must be at most {LARGEST_RANK:,}")
    return {"markov_rank": count, "markov": named or "vanilla"} if count else {}
