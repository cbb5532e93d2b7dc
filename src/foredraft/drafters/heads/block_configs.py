"""Read the folder of a block drafter's head: DFlash, DFlash 2 or DSpark, in the format of any project.

    z-lab         DFlash: keys of a Qwen 3 beside block_size; `dflash_config`, or its keys too
    SpecForge     as z-lab, for DSpark too, whose keys may stand in a `dspark_config`
    ModelOpt      as z-lab; windows in use_swa; `markov_w1` and others without a prefix; whether a DSpark head
                  drafts from the anchor in shift_label
    DeepSpec      DSpark: the keys of both at the top; a head and an embedding of its own
    speculators   all: the keys of the layers in `transformer_layer_config`
    Muse Glimmer  DFlash: keys of a Qwen 3, whose vocabulary the target tells

An id in `target_layer_ids` names a layer whose output is read, -1 the embedding; one in
`aux_hidden_state_layer_ids` a layer that the states enter. The confidence head of DSpark is checked and not
read: a policy decides where drafts end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from foredraft.drafters.head_kinds import BIAS, DFLASH, DSPARK
from foredraft.drafters.heads.configs import (
    LAYER,
    OF_SPECULATORS,
    aux_ids,
    proposal,
    read_head,
    spec_of,
    token_below,
)
from foredraft.drafters.heads.keys import layer_keys, pass_over
from foredraft.drafters.heads.record import MARKOV_FORMS, BlockRecord, spread_aux_layers
from foredraft.drafters.heads.tensors import Headers, HeadFiles
from foredraft.model.config import ConfigReader
from foredraft.model.spec import ModelSpec
from foredraft.model.tensor_names import Naming

AUX_LAYERS = "target_layer_ids"
OF_A_BLOCK = frozenset({
    "block_size", DFLASH, DSPARK, "num_target_layers", "mask_token_id", AUX_LAYERS, "is_causal", "causal",
    "markov_rank", "markov_head_type", "input_embedding_scale", "output_multiplier",
    "final_logit_softcapping", "draft_vocab_size", "shift_label", "conv_kernel_size", "conv_group_size",
    "selector_rank", "selector_top_k",
})  # fmt: skip
MOST_SLOTS = 256  # of a block: the slack of a cache row takes so many positions past the text
LARGEST_RANK = 2**16
MOST_CANDIDATES = 1024  # of a slot


def _block(config: Mapping[str, Any], headers: Headers) -> BlockRecord:
    read = _of_speculators if "speculators_model_type" in config else _of_others
    record = read(config, headers)
    return replace(record, markov_prefix="" if BIAS in headers else "markov_head.")


read_block = partial(read_head, record_of=_block)  # of a folder


class SectionReaders:
    """The readers of a config and of its sections; a key is read where it stands."""

    def __init__(self, outer: ConfigReader) -> None:
        sections = (outer.section(key) for key in (DFLASH, DSPARK))
        self.readers = [*(section for section in sections if section is not None), outer]
        for each in self.readers:
            pass_over(each)

    def __call__(self, key: str) -> ConfigReader:
        return next((each for each in self.readers if each.take(key) is not None), self.readers[0])


def _of_others(config: Mapping[str, Any], headers: Headers) -> BlockRecord:
    """Read the config of z-lab, SpecForge, ModelOpt or DeepSpec."""
    outer = ConfigReader(config)
    reader = SectionReaders(outer)
    layers = _windowed(layer_keys(config, OF_A_BLOCK), reader("use_swa"))
    spec = layers_of(layers, headers)
    depth = None if outer.take("num_target_layers") is None else outer.count("num_target_layers")
    aux_layers = aux_ids(reader(AUX_LAYERS), AUX_LAYERS, shift=1, rising=True)
    if aux_layers is None and depth is None:
        remedy = "the head does not say which layers of the target it reads"
        raise reader(AUX_LAYERS).error(AUX_LAYERS, remedy)
    causal = reader("causal").take("causal")
    if causal is None:
        causal = outer.take("is_causal")
    if causal not in (None, True, False):
        raise reader("causal").error("causal", "it must be true or false")
    softcap = reader("final_logit_softcapping").optional_number("final_logit_softcapping", zero_is_null=True)
    markov = _markov(reader)
    made = block_record(
        "z-lab's, SpecForge's or DeepSpec's", spec, reader, **markov, **dflash_2(reader, spec),
        aux_layers=spread_aux_layers(depth or 0, spec.layers) if aux_layers is None else aux_layers,
        target_size=spec.hidden_size, draft_vocab_size=outer.count("draft_vocab_size", spec.vocab_size),
        from_anchor=reader("shift_label").flag("shift_label", bool(markov), if_null=bool(markov)),
        causal=bool(causal), causal_windows=causal is not False, logit_softcap=softcap,
        embedding_scale=reader("input_embedding_scale").number("input_embedding_scale", 1.0),
        logit_scale=reader("output_multiplier").number("output_multiplier", 1.0),
        target_layers=depth, last_is_normed=True,
    )  # fmt: skip
    for section in reader.readers[:-1]:
        section.reject_unknown_keys()
    return made


MUSE_NAMES = Naming(prefixes=("encoder.",), outer={"fc": "fc", "output_norm_enc": "hidden_norm"})


def read_muse(folder: Path, vocabulary: int) -> HeadFiles[BlockRecord]:
    """Return the head that comes with a Muse Glimmer; slots of a block see each other within a window."""

    def record_of(config: Mapping[str, Any], headers: Headers) -> BlockRecord:
        read = ConfigReader({**config, "vocab_size": vocabulary})
        pass_over(read)
        layers = layer_keys(read.config, OF_A_BLOCK)
        kinds = {"layer_types": ["sliding_attention"] * read.count("num_hidden_layers")}
        # a slot sees so many positions before its own
        window = {"use_sliding_window": True, "sliding_window": read.count("sliding_window", 2048) + 1}
        spec = layers_of(kinds | layers | window, headers)
        aux_layers = aux_ids(read, AUX_LAYERS, shift=1, rising=True) or MUSE_LAYERS
        return block_record(
            "Muse Glimmer's", spec, lambda _: read, aux_layers=aux_layers, target_size=spec.hidden_size,
            draft_vocab_size=spec.vocab_size, from_anchor=False, causal_windows=False,
        )  # fmt: skip

    return read_head(folder, record_of, MUSE_NAMES)


MUSE_LAYERS = (2, 14, 26, 38, 50)  # that it reads where its config names none


def _windowed(layers: dict[str, Any], read: ConfigReader) -> dict[str, Any]:
    """Return the keys of the layers with the windows of ModelOpt, which every layer has."""
    size = read.take("swa_window_size")
    if not read.flag("use_swa", if_null=False):
        return layers
    if size is not None:
        layers["sliding_window"] = read.count("swa_window_size")
    count = layers.get("num_hidden_layers")
    kinds = ["sliding_attention"] * count if type(count) is int else None
    return {**layers, "layer_types": kinds, "use_sliding_window": True}


def _of_speculators(config: Mapping[str, Any], headers: Headers) -> BlockRecord:
    read = ConfigReader(config, harmless=OF_SPECULATORS)
    pass_over(read)
    layer = read.section(LAYER)
    if layer is None:
        raise read.error(LAYER, "a head of speculators needs the config of its layers")
    spec = layers_of(layer_keys(layer.config, frozenset()), headers)
    aux_layers = aux_ids(read, "aux_hidden_state_layer_ids", rising=True)
    if aux_layers is None:
        raise read.error("aux_hidden_state_layer_ids", "the head does not say which layers it reads")
    verifier, proposed = proposal(read)
    own_size, kind = read.take("target_hidden_size") is None, read.take("speculators_model_type")
    shifted = read.flag("shift_label", if_null=False)  # targets one place on, as from an anchor
    made = block_record(
        "speculators'", spec, lambda _: read, **_markov(lambda _: read),
        **dflash_2(lambda _: read, spec), aux_layers=aux_layers,
        target_size=spec.hidden_size if own_size else read.count("target_hidden_size"),
        draft_vocab_size=read.count("draft_vocab_size", spec.vocab_size, if_null=spec.vocab_size),
        from_anchor=read.flag("sample_from_anchor", shifted or kind == "dspark"),
        causal_windows=not read.flag("sliding_window_non_causal", kind == "dflash2", if_null=False),
        window_from_anchor=True, verifier=verifier,
    )  # fmt: skip
    read.reject_unknown_keys()
    return replace(made, planned=made.planned if proposed is None else min(proposed, made.drafts))


def layers_of(layers: Mapping[str, Any], names: Collection[str] = ()) -> ModelSpec:
    """Return the form of the layers: Qwen 3's, with norms of the heads, whichever family's keys they have."""
    return replace(spec_of(layers, names, "qwen3"), head_norms=True, mlp_bias=False)


def block_record(format: str, spec: ModelSpec, reader: Any, **fields: Any) -> BlockRecord:
    """Return the record without what the tensors tell, after checking the block.

    `reader` gives the reader of a key.
    """
    block, slots = reader("block_size"), reader("block_size").count("block_size")
    least = 1 if fields["from_anchor"] else 2
    if not least <= slots <= MOST_SLOTS:
        raise block.error("block_size", f"supported are {least} to {MOST_SLOTS}")
    mask = reader("mask_token_id")
    if mask.take("mask_token_id") is None:
        raise mask.error("mask_token_id", "the head does not say which token stands in its masked slots")
    token = token_below(spec.vocab_size, mask, "mask_token_id")
    made = BlockRecord(spec=spec, format=format, layer="layers.0", block=slots, mask_token=token, **fields)
    return replace(made, planned=made.drafts)


def _markov(reader: Any) -> dict[str, Any]:
    """Return the fields of the bias of the token before; none without one."""
    rank, form = reader("markov_rank"), reader("markov_head_type")
    count = rank.count("markov_rank", 0, if_null=0, allow_zero=True)
    named = form.choice("markov_head_type", (*MARKOV_FORMS, None), None)
    if count > LARGEST_RANK:
        raise rank.error("markov_rank", f"it must be at most {LARGEST_RANK:,}")
    return {"markov_rank": count, "markov": named or "vanilla"} if count else {}


def dflash_2(reader: Any, spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of DFlash 2's convolutions and selector; none without them."""
    found: dict[str, Any] = {}
    counts = {"conv_taps": "conv_kernel_size", "conv_group": "conv_group_size",
              "selector_rank": "selector_rank", "candidates": "selector_top_k"}  # fmt: skip
    for field, key in counts.items():
        found[field] = reader(key).count(key, 0, if_null=0, allow_zero=True)
    group, chosen = found["conv_group"], found["candidates"]
    if bool(found["conv_taps"]) != bool(group) or spec.hidden_size % max(1, group):
        raise reader("conv_group_size").error("conv_group_size", "it must divide the hidden size")
    if bool(found["selector_rank"]) != bool(chosen) or chosen > MOST_CANDIDATES:
        raise reader("selector_top_k").error("selector_top_k", f"give 1 to {MOST_CANDIDATES:,} with a rank")
    return found
