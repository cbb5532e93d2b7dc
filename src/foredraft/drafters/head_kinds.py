"""Which head a folder or a GGUF file holds: its tensors' names tell, or its config where they are not here.

A config inherits keys of the target, its `model_type` and its count of layers among them, so these tell
nothing. Nothing here reads weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError
from foredraft.model.config import read_json
from foredraft.model.families import IN_GGUF
from foredraft.model.gguf.file import architecture_of
from foredraft.model.safetensors_file import INDEX, SINGLE, SafetensorsFile
from foredraft.model.spec import CONFIG

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MEDUSA, MEDUSA_PICKLE = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
DFLASH, DSPARK = "dflash_config", "dspark_config"  # sections of a config
ASSISTANTS = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}
BIAS = "markov_w1.weight"  # in GGUF files; it makes a DFlash head one of DSpark
PREDICTING = [
    name for name, (_, of) in IN_GGUF.items() if of.further
]  # whose files may predict further tokens
# the drafters that read heads
READ = ("eagle3", "p-eagle", "eagle", "mtp", "medusa", "dflash", "dspark")
# a tensor of a layer that predicts further tokens
FURTHER = r"(mtp|(model\.)?mtp_layers\.0|model\.layers\.\d+)\.(pre_fc_norm_hidden|hidden_layernorm|hnorm)\."
# a pattern that the name of a tensor matches -> what holds such a tensor, the first that fits
BY_TENSOR = {
    r"hydra_": "Hydra",
    r"(prefix_gru|embed_proj)\.": "Domino",
    r"lilicorr\.": "LiLiCorr",
    r"parallel_draft_heads\.": "EAGLE-3 with Medusa heads",
    FURTHER: "mtp",
    r"(speculator\.)?(forget_emb|cell_emb|input_emb|output_emb|emb\.0)\.": "LSTM",
    r"mask_hidden$": "p-eagle",
    r"(markov_head\.)?markov_w1\.": "dspark",
    r"(hidden_norm|candidate_selector|encoder\.output_norm_enc)\.": "dflash",
    r"(midlayer|layers\.0)\.hidden_norm\.": "eagle3",
    r"(medusa_heads\.)?(\d+\.\d+\.linear|blocks\.\d+\.layers\.\d+)\.weight$": "medusa",
}
# an architecture, or a type of speculators -> the same
BY_ARCHITECTURE = {
    **dict.fromkeys(
        ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"), "eagle3"
    ),
    **dict.fromkeys(("PEagleDraftModel", "PEagleSpeculator", "PeagleLlamaForCausalLM"), "p-eagle"),
    **dict.fromkeys(("DFlashDraftModel", "DFlash2DraftModel", "DFlashSpeculator"), "dflash"),
    **dict.fromkeys(("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator"), "dspark"),
    "MedusaModel": "medusa", "MLPSpeculatorPreTrainedModel": "LSTM",
    "ArcticLSTMSpeculatorPreTrainedModel": "LSTM", "MTPDraftModel": "mtp", "DominoDraftModel": "Domino",
    "DFlareDraftModel": "DFlare",
    "LiLiCorrDraftModel": "LiLiCorr",
}  # fmt: skip
FIRST_LAYER = re.compile(r"(language_)?model\.(language_model\.|model\.)?layers\.0\.")
MUSE = "muse_glimmer_assistant"  # the type of the DFlash head of a Muse Glimmer
BY_TYPE = {
    "eagle3": "eagle3", "peagle": "p-eagle", "dflash": "dflash", "dflash2": "dflash", "dspark": "dspark",
    "mtp": "mtp", "dflare": "DFlare", "domino": "Domino", "hydra": "Hydra", "mlp": "LSTM",
}  # fmt: skip
# of an EAGLE-1 or EAGLE-2 head, which has no norm before its output
PAIRS, FINAL_NORM = frozenset({"fc.weight", "layers.0.self_attn.q_proj.weight"}), "norm.weight"
TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # of a whole model


def config_of(place: Path) -> dict[str, Any]:
    """Return the config.json of a folder; an empty one where there is none that can be read."""
    try:
        return read_json(place / CONFIG) if (place / CONFIG).is_file() else {}
    except (CheckpointError, OSError):
        return {}


def architectures_of(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def sections_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a config and its sections of a block drafter."""
    return [config, *(section for key in (DFLASH, DSPARK) if isinstance(section := config.get(key), dict))]


def has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def pickle_in(folder: Path) -> Path | None:
    """Return a pickle of a folder that has no weights in another format; None for other folders."""
    if has_weights(folder):
        return None
    return next((file for pattern in PICKLES for file in sorted(folder.glob(pattern))), None)


def refuse_pickles(folder: Path) -> None:
    """Raise CheckpointError where the weights in a folder are pickles alone; none is ever read."""
    if (pickle := pickle_in(folder)) is not None:
        raise CheckpointError(
            f"{pickle} is a pickle, which can run any program when it is read, so it is not read",
            remedy="convert it to model.safetensors, or give a copy of the head in that format",
        )


def head_kind(place: Path) -> str | None:
    """Return the drafter that reads the head in a folder or a GGUF file; None for a place without a head.

    A kind of head that no drafter reads is returned by its name, which begins with a capital.
    """
    if not place.is_dir():
        return _kind_in_file(place)
    if any((place / name).is_file() for name in (MEDUSA, MEDUSA_PICKLE)):
        return "medusa"
    config, names = config_of(place), _tensor_names(place)
    if config.get("model_type") in ASSISTANTS:
        return "gemma4-assistant"
    if config.get("model_type") == MUSE:
        return "dflash"
    told = config.get("speculators_model_type")
    named = None if told is None else BY_TYPE.get(str(told), f"{str(told)[:20].title()} of speculators")
    if named is not None and named[:1].isupper():
        return named
    for pattern, kind in BY_TENSOR.items():
        if any(re.match(pattern, name) for name in names):
            whole = kind == "mtp" and any(FIRST_LAYER.match(name) for name in names)
            return None if whole else kind
    if names >= PAIRS and FINAL_NORM not in names and config:
        return "eagle"
    return named or _kind_by_config(place, config)


def _kind_in_file(place: Path) -> str | None:
    architecture = architecture_of(place)
    if architecture not in ("dflash", *PREDICTING):
        return architecture if architecture == "eagle3" else None
    from foredraft.model.gguf.tensors import GGUFModel, is_further_alone

    try:
        model = GGUFModel(place, lists=False)
    except CheckpointError:
        return "dflash" if architecture == "dflash" else None
    if architecture == "dflash":
        return "dspark" if BIAS in model.tensors else "dflash"
    return "mtp" if is_further_alone(model) else None


def may_predict_further(place: Path) -> bool:
    """Return whether a GGUF file, or the names of a folder's tensors, may hold a layer for further tokens."""
    return not place.is_dir() or any(re.search(FURTHER, name) for name in _tensor_names(place))


def _tensor_names(folder: Path) -> frozenset[str]:
    """Return the names of the tensors in a folder; none where no header is here, or none can be read."""
    try:
        if (folder / SINGLE).is_file():
            with SafetensorsFile(folder / SINGLE) as opened:
                return frozenset(opened.tensors)
        if (folder / INDEX).is_file():
            return frozenset(read_json(folder / INDEX).get("weight_map", {}))
    except (CheckpointError, OSError):
        pass
    return frozenset()


def _kind_by_config(place: Path, config: Mapping[str, Any]) -> str | None:
    """Return what a folder holds whose tensors are not here."""
    kinds = [BY_ARCHITECTURE[name] for name in architectures_of(config) if name in BY_ARCHITECTURE]
    kind = next(iter(kinds), None)
    if kind is None and (config.get("model_type") == "medusa" or "medusa_num_heads" in config):
        return "medusa"
    if "hydra_num_heads" in config:
        return "Hydra"
    sections = sections_of(config)
    if kind == "dflash" or (kind is None and len(sections) > 1):
        ranks = [section.get("markov_rank") for section in sections]
        return "dspark" if any(type(rank) is int and rank > 0 for rank in ranks) else "dflash"
    one_layer = config.get("num_hidden_layers") == 1
    if kind is None and one_layer and "draft_vocab_size" in config and "block_size" not in config:
        return "eagle3"
    whole = any((place / name).is_file() for name in TOKENIZERS)
    return kind or ("eagle" if one_layer and not whole and not has_weights(place) else None)


def refuse_unsupported(place: Path) -> None:
    """Raise CheckpointError for a head that no drafter reads."""
    kind = head_kind(place)
    if kind is not None and kind[:1].isupper():
        raise CheckpointError(
            f"{place} holds a head of the kind {kind}, which is not supported",
            remedy=f"give a head of one of the drafters {', '.join(READ)}, or a draft model",
        )
