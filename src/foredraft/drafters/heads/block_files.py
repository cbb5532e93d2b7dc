"""Read the files of DFlash and DSpark heads: z-lab's, DeepSpec's and speculators' formats.

    z-lab          keys of a Qwen 3 beside block_size; `dflash_config`, or its keys at the top
    DeepSpec       the keys of both at the top; it drafts from the anchor; a head and an embedding of its own
    speculators    the keys of the layers in `transformer_layer_config`

An id in `target_layer_ids` names a layer whose output is read, -1 the embedding; one in
`aux_hidden_state_layer_ids` a layer that the states enter. The confidence head of DSpark is checked and not
read: a policy decides where drafts end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foredraft.drafters.heads.eagle3_files import (
    CONFIG,
    D2T,
    EMBEDDING,
    ENDS,
    GENERAL,
    HEAD,
    LAYER,
    OF_SPECULATORS,
    T2D,
    Eagle3Files,
    aux_ids,
    checked_shapes,
    layer_shapes,
    proposed_by,
    spec_of,
    verifier_of,
)
from foredraft.drafters.heads.record import (
    MARKOV_FORMS,
    BlockRecord,
    architectures_of,
    config_of,
    refuse_pickles,
    spread_aux_layers,
)
from foredraft.errors import CheckpointError
from foredraft.model.checkpoint import weight_headers
from foredraft.model.config import ConfigReader, read_json
from foredraft.model.spec import ModelSpec
from foredraft.model.tensor_names import AS_STORED

DFLASH = "dflash_config"
MARKOV = "markov_head"
CONFIDENCE = "confidence_head.proj"
KINDS = {
    "DFlashDraftModel": "dflash", "DFlash2DraftModel": "dflash", "DFlashSpeculator": "dflash",
    "Qwen3DSparkModel": "dspark", "DSparkDraftModel": "dspark", "DSparkSpeculator": "dspark",
}  # fmt: skip
MODEL_TYPES = {"dflash": "dflash", "dflash2": "dflash", "dspark": "dspark"}  # of speculators
MOST_SLOTS = 256  # of a block: the slack of a cache row takes so many positions past the text
LARGEST_RANK = 2**16
OF_CONFIDENCE = frozenset({"enable_confidence_head", "confidence_head_with_markov"})
# keys of a head that the form of its layers does not depend on
OF_THE_HEAD = GENERAL | ENDS | OF_CONFIDENCE | {
    "auto_map", "block_size", DFLASH, "num_target_layers", "mask_token_id", "target_layer_ids", "is_causal",
    "num_anchors", "markov_rank", "markov_head_type", "input_embedding_scale", "output_multiplier",
    "final_logit_softcapping", "draft_vocab_size",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlockFiles(Eagle3Files):
    """A block drafter whose weights are not read yet."""

    record: BlockRecord


def is_dflash(place: Path) -> bool:
    return _kind(place) == "dflash"


def is_dspark(place: Path) -> bool:
    return _kind(place) == "dspark"


def _kind(place: Path) -> str | None:
    config = config_of(place)
    told = config.get("speculators_model_type")
    if told is not None:
        return MODEL_TYPES.get(told) if isinstance(told, str) else None
    named = [KINDS[name] for name in architectures_of(config) if name in KINDS]
    kind = next(iter(named), "dflash" if isinstance(config.get(DFLASH), dict) else None)
    inner = config.get(DFLASH) if isinstance(config.get(DFLASH), dict) else {}
    ranks = [where.get("markov_rank") for where in (config, inner or {})]
    return "dspark" if kind and any(type(rank) is int and rank > 0 for rank in ranks) else kind


def read_block(folder: Path) -> BlockFiles:
    """Return the head in a folder, as its config and the headers of its weights say."""
    config = read_json(folder / CONFIG)
    refuse_pickles(folder)
    _refuse_dflash_2(config)
    headers = weight_headers(folder, AS_STORED)
    record = _speculators(config) if "speculators_model_type" in config else _plain(config)
    record = replace(record, own_embedding=EMBEDDING in headers, own_head=HEAD in headers)
    shapes = checked_shapes(folder, *shapes_of(record, headers), headers)
    return BlockFiles(folder, record, without_confidence(shapes))


def without_confidence(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that are read."""
    return {name: shape for name, shape in shapes.items() if not name.startswith(CONFIDENCE)}


def _refuse_dflash_2(config: Mapping[str, Any]) -> None:
    named = "DFlash2DraftModel" in architectures_of(config)
    if named or config.get("speculators_model_type") == "dflash2":
        raise CheckpointError(
            "config.json: a DFlash 2 head, with convolutions and a selector, is not supported",
            remedy="give a DFlash or DSpark head",
        )


def _plain(config: Mapping[str, Any]) -> BlockRecord:
    """Read the config of z-lab or DeepSpec: a Qwen 3's, with keys of the head among them or in a section."""
    outer = ConfigReader(config)
    inner = outer.section(DFLASH) or ConfigReader({}, f"{outer.where}, {DFLASH}")
    from_anchor = "Qwen3DSparkModel" in architectures_of(config)
    spec = layers_of({key: value for key, value in config.items() if key not in OF_THE_HEAD})

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
    rank, form = _markov(reader("markov_rank"), reader("markov_head_type"))
    softcap = reader("final_logit_softcapping").optional_number("final_logit_softcapping", zero_is_null=True)
    made = record_of_block(
        "z-lab's or DeepSpec's", spec, reader("block_size"), reader("mask_token_id"), rank, form,
        aux_layers=spread_aux_layers(layers or 0, spec.layers) if aux_layers is None else aux_layers,
        target_size=spec.hidden_size, draft_vocab_size=outer.count("draft_vocab_size", spec.vocab_size),
        from_anchor=from_anchor, causal=bool(causal), causal_windows=causal is not False,
        embedding_scale=reader("input_embedding_scale").number("input_embedding_scale", 1.0),
        logit_scale=reader("output_multiplier").number("output_multiplier", 1.0), logit_softcap=softcap,
        target_layers=layers, last_is_normed=True,
    )  # fmt: skip
    inner.reject_unknown_keys()
    return made


def _speculators(config: Mapping[str, Any]) -> BlockRecord:
    read = ConfigReader(config, harmless=OF_SPECULATORS | OF_CONFIDENCE)
    layer = read.section(LAYER)
    if layer is None:
        raise read.error(LAYER, "a head of speculators needs the config of its layers")
    skipped = (GENERAL | ENDS) - {"torch_dtype"}
    spec = layers_of({key: value for key, value in layer.config.items() if key not in skipped})
    aux_layers = aux_ids(read, "aux_hidden_state_layer_ids", rising=True)
    if aux_layers is None:
        raise read.error("aux_hidden_state_layer_ids", "the head does not say which layers it reads")
    rank, form = _markov(read, read)
    section = read.section("speculators_config")
    made = record_of_block(
        "speculators'", spec, read, read, rank, form, aux_layers=aux_layers,
        target_size=spec.hidden_size if read.take("target_hidden_size") is None
        else read.count("target_hidden_size"),
        draft_vocab_size=read.count("draft_vocab_size", spec.vocab_size, if_null=spec.vocab_size),
        from_anchor=read.flag("sample_from_anchor", read.take("speculators_model_type") == "dspark"),
        causal_windows=not read.flag("sliding_window_non_causal", if_null=False), window_from_anchor=True,
        verifier=None if section is None else verifier_of(section),
    )  # fmt: skip
    read.reject_unknown_keys()
    proposed = None if section is None else proposed_by(section)
    return replace(made, planned=made.planned if proposed is None else min(proposed, made.drafts))


def layers_of(config: Mapping[str, Any]) -> ModelSpec:
    """Return the form of the layers: Qwen 3's, with norms of the heads, whichever family's keys they have."""
    return replace(spec_of(config, "qwen3"), head_norms=True, mlp_bias=False)


def record_of_block(
    format: str,
    spec: ModelSpec,
    block: ConfigReader,
    mask: ConfigReader,
    rank: int,
    form: str | None,
    **fields: Any,
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
    made = BlockRecord(
        spec=spec, format=format, layer="layers.0", block=slots, mask_token=token, markov=form,
        markov_rank=rank, **fields,
    )  # fmt: skip
    return replace(made, planned=made.drafts)


def _markov(rank: ConfigReader, form: ConfigReader) -> tuple[int, str | None]:
    """Return the rank and the form of the bias of the token before; (0, None) for none."""
    count = rank.count("markov_rank", 0, if_null=0, allow_zero=True)
    named = form.choice("markov_head_type", (*MARKOV_FORMS, None), None)
    if count > LARGEST_RANK:
        raise rank.error("markov_rank", f"it must be at most {LARGEST_RANK:,}")
    return (count, named or "vanilla") if count else (0, None)


def shapes_of(
    record: BlockRecord, headers: Mapping[str, object]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return the shapes of the tensors that must be there, and of those that may be."""
    spec, size, rank = record.spec, record.spec.hidden_size, record.markov_rank
    joined = len(record.aux_layers or ()) * record.target_size
    needed: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, joined), "hidden_norm.weight": (size,), "norm.weight": (size,),
    }  # fmt: skip
    for index in range(spec.layers):
        needed |= layer_shapes(record, index, pairs=False)
    if record.markov is not None:
        needed[f"{MARKOV}.markov_w1.weight"] = (spec.vocab_size, rank)
        needed[f"{MARKOV}.markov_w2.weight"] = (record.draft_vocab_size, rank)
    if record.markov == "gated":
        needed |= {f"{MARKOV}.gate_proj.weight": (rank, size + rank), f"{MARKOV}.gate_proj.bias": (rank,)}
    if record.markov == "rnn":
        needed[f"{MARKOV}.joint_proj.weight"] = (3 * rank, 2 * rank + size)
        needed[f"{MARKOV}.joint_proj.bias"] = (3 * rank,)
    maps: dict[str, tuple[int, ...]] = {D2T: (record.draft_vocab_size,), T2D: (spec.vocab_size,)}
    if record.draft_vocab_size != spec.vocab_size:
        needed[D2T] = maps[D2T]
    optional = maps | {EMBEDDING: (spec.vocab_size, size), HEAD: (record.draft_vocab_size, size)}
    told = headers.get(f"{CONFIDENCE}.weight")
    wide = isinstance(told, tuple) and told[1] == (1, size + rank)
    optional |= {f"{CONFIDENCE}.weight": (1, size + rank if wide else size), f"{CONFIDENCE}.bias": (1,)}
    return needed, optional
