"""Wrappers: multimodal architectures whose text model is one of `families`.

A wrapper is one line of `WRAPPERS`. Its `config.json` holds the text model's under `text_config`; the top
level gives what concerns the whole checkpoint (`WHOLE`). Where both levels hold a key, they agree, or the
config is refused; only about a tied head they may differ (`with_tie`). Sizes that the text config lacks are
those of its class in `transformers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import read_json
from foredraft.model.quantisation.scheme import KEYS as QUANTISATION_KEYS
from foredraft.model.safetensors_file import INDEX, SINGLE, SafetensorsFile
from foredraft.model.tensor_names import unnested
from foredraft.model.unsupported import HARMLESS, NEUTRAL

TEXT = "text_config"
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
DEFAULT_SIZES = {  # model type of a text model -> the sizes of its class, in the order of SIZES
    "gemma3_text": (262_208, 2304, 9216, 26, 8),
    "gemma4_text": (262_144, 2304, 9216, 30, 8),
    "gemma4_unified_text": (262_144, 2304, 9216, 30, 8),
    "lfm2": (65_536, 2560, 12_288, 32, 32),
    "ministral3": (131_072, 4096, 14_336, 34, 32),
    "mistral": (32_000, 4096, 14_336, 32, 32),
    "muse_glimmer_text": (202_048, 6656, 19_968, 52, 32),
    "qwen3_5_text": (248_320, 4096, 12_288, 32, 16),
}
TIED = "tie_word_embeddings"
# keys that concern the whole checkpoint: the top level's count, or else the text config's
WHOLE = (TIED, "dtype", "torch_dtype", "eos_token_id", "bos_token_id", "pad_token_id", *QUANTISATION_KEYS)
MEDIA_IDS = tuple(  # of tokens for images, videos and sounds, and around them
    f"{kind}_token_{name}"
    for kind in ("image", "video", "audio", "boi", "eoi", "boa", "eoa")
    for name in ("id", "index")
)
OTHER_PARTS = {  # keys of the other parts
    *"audio_config mm_tokens_per_image multimodal_projector_bias projector_hidden_act".split(),
    *"downsample_factor out_hidden_size projector_bias projector_hidden_size".split(),
    "projector_use_layernorm",
    *"spatial_merge_size vision_config vision_feature_layer vision_soft_tokens_per_image".split(),
    *"vision_end_token_id vision_start_token_id".split(),
    *(TEXT, *MEDIA_IDS),
}


@dataclass(frozen=True, slots=True)
class Wrapper:
    model_type: str  # the `model_type` of its config
    text: str  # the model type of a text config that names none
    texts: tuple[str, ...]  # the model types that a text config may have
    tied: bool = True  # `tie_word_embeddings` where neither level has it


WRAPPERS: dict[str, Wrapper] = {
    "Gemma3ForConditionalGeneration": Wrapper("gemma3", "gemma3_text", ("gemma3_text",)),
    "Gemma4ForConditionalGeneration": Wrapper("gemma4", "gemma4_text", ("gemma4_text",)),
    "Gemma4UnifiedForConditionalGeneration": Wrapper(
        "gemma4_unified", "gemma4_unified_text", ("gemma4_unified_text",)
    ),
    "Lfm2VlForConditionalGeneration": Wrapper("lfm2_vl", "lfm2", ("lfm2",)),
    "Mistral3ForConditionalGeneration": Wrapper("mistral3", "mistral", ("mistral", "ministral3")),
    "MuseGlimmerForConditionalGeneration": Wrapper(
        "muse_glimmer", "muse_glimmer_text", ("muse_glimmer_text",), tied=False
    ),
    "Qwen3_5ForConditionalGeneration": Wrapper("qwen3_5", "qwen3_5_text", ("qwen3_5_text",), tied=False),
}


@dataclass(frozen=True, slots=True)
class TextPart:
    architecture: str  # the architecture of the whole
    config: dict[str, Any]  # what the text model's own `config.json` would hold
    media: tuple[tuple[str, int], ...]  # the ids of tokens that stand for images or sounds, by their keys
    ignored: dict[str, object]  # keys of the top level that change nothing, with their values


def text_part_of(config: Mapping[str, Any]) -> TextPart | None:
    found = _wrapper(config)
    if found is None:
        return None
    architecture, wrapper = found
    text = config.get(TEXT)
    if not isinstance(text, dict):
        problem = f"config.json: {TEXT} is {'missing' if text is None else shortened(text)}"
        raise CheckpointError(problem, remedy="it must be a JSON object, the config of the text model")
    kind = text.get("model_type", wrapper.text)
    if kind not in wrapper.texts:
        problem = f"config.json, {TEXT}: model_type {shortened(kind)} is not supported in a {architecture}"
        raise CheckpointError(problem, remedy=f"supported are {', '.join(wrapper.texts)}")
    sizes = dict(zip(SIZES, DEFAULT_SIZES[kind], strict=True))
    own = {TIED: wrapper.tied, **sizes, **text, "model_type": kind}
    ignored: dict[str, object] = {}
    for key, value in config.items():
        if value is None or key in OTHER_PARTS or (key in HARMLESS and key not in WHOLE):
            continue
        if text.get(key) is not None and key != TIED and not _agree(key, text[key], value):
            problem = f"config.json: {key} is {shortened(value)}, but {shortened(text[key])} in {TEXT}"
            raise CheckpointError(problem, remedy="keep the one that the model was trained with")
        if key in WHOLE or key in NEUTRAL:
            own[key] = _of_text(value) if key in QUANTISATION_KEYS else value
        elif key not in text:
            ignored[key] = value
    own.pop("architectures", None)
    given = ((key, config.get(key)) for key in MEDIA_IDS)
    media = tuple((key, id) for key, id in given if isinstance(id, int) and id >= 0)
    return TextPart(architecture, own, media, ignored)


def text_config_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a checkpoint's text model alone: of one that is not multimodal, its own."""
    part = text_part_of(config)
    return dict(config) if part is None else part.config


def with_tie(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a multimodal config that says rightly whether the head is the embedding.

    `transformers` writes "tied" even where the text model has a head of its own: a head in the checkpoint
    counts.
    """
    found, text = _wrapper(config), config.get(TEXT)
    tied = found is not None and config.get(TIED) in (None, True) and found[1].tied
    if not tied or not isinstance(text, dict) or text.get(TIED) is True:
        return config
    names: Iterable[str] = ()
    if (folder / SINGLE).is_file():
        with SafetensorsFile(folder / SINGLE) as file:
            names = file.tensors
    elif (folder / INDEX).is_file():
        listed = read_json(folder / INDEX).get("weight_map")
        names = listed if isinstance(listed, dict) else ()
    return config | {TIED: False} if any(unnested(name) == "lm_head.weight" for name in names) else config


def _wrapper(config: Mapping[str, Any]) -> tuple[str, Wrapper] | None:
    kind, names = config.get("model_type"), config.get("architectures")
    for name, wrapper in WRAPPERS.items():
        if kind == wrapper.model_type or (kind is None and names == [name]):
            return name, wrapper
    return None


def _agree(key: str, one: object, other: object) -> bool:
    if key == "eos_token_id":
        few, many = ({*ids} if isinstance(ids, list) else {ids} for ids in (one, other))
        return few <= many
    if key in ("dtype", "torch_dtype"):
        return str(one).removeprefix("torch.") == str(other).removeprefix("torch.")
    return one == other


def _of_text(value: Any) -> Any:
    """Return a scheme of quantised weights with the modules' names in the text model alone."""
    if isinstance(value, str):
        return unnested(value)
    if isinstance(value, list):
        return [_of_text(each) for each in value]
    if isinstance(value, dict):
        return {_of_text(key): _of_text(each) for key, each in value.items()}
    return value
