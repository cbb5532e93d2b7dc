"""Wrappers: multimodal architectures whose text model is one of `families`.

Contract: a wrapper is one line of `WRAPPERS`. Its `config.json` holds the text model's under `text_config`.
`text_config_of` returns that of the text model alone. The top level gives what concerns the whole checkpoint
(`WHOLE`). Where both levels hold a key of the text model, they agree, or the config is refused; only about a
tied head they may differ (`with_tie`). Sizes that the text config lacks are those of its class in
`transformers`. Keys of images and audio change no text. All other keys of the top level are not read by
`transformers`, and named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import read_json
from foredraft.model.quantisation.reading import KEYS as QUANTISATION_KEYS
from foredraft.model.reference import HARMLESS, NEUTRAL
from foredraft.model.safetensors_file import INDEX, SINGLE, SafetensorsFile
from foredraft.model.tensor_names import unnested

__all__ = ["WRAPPERS", "TextPart", "Wrapper", "text_config_of", "text_part_of", "with_tie"]

TEXT = "text_config"
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# model type of a text model -> the sizes of its class in transformers, in the order of SIZES
DEFAULT_SIZES = {
    "gemma3_text": (262_208, 2304, 9216, 26, 8),
    "gemma4_text": (262_144, 2304, 9216, 30, 8),
    "gemma4_unified_text": (262_144, 2304, 9216, 30, 8),
    "ministral3": (131_072, 4096, 14_336, 34, 32),
    "mistral": (32_000, 4096, 14_336, 32, 32),
}
TIED = "tie_word_embeddings"
# keys that concern the whole checkpoint: the top level's count, or else the text config's
WHOLE = (TIED, "dtype", "torch_dtype", "eos_token_id", "bos_token_id", "pad_token_id", *QUANTISATION_KEYS)
# ids of tokens in whose places images, videos or sounds are put, and of those around them
MEDIA_IDS = tuple(
    f"{kind}_token_{name}"
    for kind in ("image", "video", "audio", "boi", "eoi", "boa", "eoa")
    for name in ("id", "index")
)
# keys of the other parts
OTHER_PARTS = {
    TEXT,
    "audio_config",
    "mm_tokens_per_image",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "vision_config",
    "vision_feature_layer",
    "vision_soft_tokens_per_image",
    *MEDIA_IDS,
}


@dataclass(frozen=True, slots=True)
class Wrapper:
    """One multimodal architecture.

    Attributes:
        model_type: The `model_type` of its config.
        text: The model type of a text config that names none.
        texts: The model types that a text config may have.
        tied: `tie_word_embeddings` where neither level has it.
    """

    model_type: str
    text: str
    texts: tuple[str, ...]
    tied: bool = True


WRAPPERS: dict[str, Wrapper] = {
    "Gemma3ForConditionalGeneration": Wrapper("gemma3", "gemma3_text", ("gemma3_text",)),
    "Gemma4ForConditionalGeneration": Wrapper("gemma4", "gemma4_text", ("gemma4_text",)),
    "Gemma4UnifiedForConditionalGeneration": Wrapper(
        "gemma4_unified", "gemma4_unified_text", ("gemma4_unified_text",)
    ),
    "Mistral3ForConditionalGeneration": Wrapper("mistral3", "mistral", ("mistral", "ministral3")),
}


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text model of a multimodal checkpoint.

    Attributes:
        architecture: The architecture of the whole.
        config: What the text model's own `config.json` would hold.
        media: The ids of tokens that stand for images or sounds, by their keys.
        ignored: Keys of the top level that change nothing, with their values.
    """

    architecture: str
    config: dict[str, Any]
    media: tuple[tuple[str, int], ...]
    ignored: dict[str, object]


def text_part_of(config: Mapping[str, Any]) -> TextPart | None:
    """Return the text model of a multimodal config; None for any other config.

    Raises:
        CheckpointError: The text config is missing or not supported, or contradicts the top level.
    """
    found = _wrapper(config)
    if found is None:
        return None
    architecture, wrapper = found
    text = config.get(TEXT)
    if not isinstance(text, dict):
        raise CheckpointError(
            f"config.json: {TEXT} is {'missing' if text is None else shortened(text)}",
            remedy="it must be a JSON object, the config of the text model",
        )
    kind = text.get("model_type", wrapper.text)
    if kind not in wrapper.texts:
        raise CheckpointError(
            f"config.json, {TEXT}: model_type {shortened(kind)} is not supported in a {architecture}",
            remedy=f"supported are {', '.join(wrapper.texts)}",
        )
    sizes = dict(zip(SIZES, DEFAULT_SIZES[kind], strict=True))
    own = {TIED: wrapper.tied, **sizes, **text, "model_type": kind}
    ignored: dict[str, object] = {}
    for key, value in config.items():
        if value is None or key in OTHER_PARTS or (key in HARMLESS and key not in WHOLE):
            continue
        if text.get(key) is not None and key != TIED and not _agree(key, text[key], value):
            raise CheckpointError(
                f"config.json: {key} is {shortened(value)}, but {shortened(text[key])} in {TEXT}",
                remedy="keep the one that the model was trained with",
            )
        if key in WHOLE or key in NEUTRAL:
            own[key] = _of_text(value) if key in QUANTISATION_KEYS else value
        elif key not in text:
            ignored[key] = value
    own.pop("architectures", None)
    media = tuple(
        (key, config[key]) for key in MEDIA_IDS if isinstance(config.get(key), int) and config[key] >= 0
    )
    return TextPart(architecture, own, media, ignored)


def text_config_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a checkpoint's text model alone: of one that is not multimodal, its own."""
    part = text_part_of(config)
    return dict(config) if part is None else part.config


def with_tie(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a multimodal config that says rightly whether the head is the embedding.

    The top level says so. Its default ties them, and `transformers` writes that even where the text model has
    a head of its own: a head in the checkpoint counts, unless the text config ties it too.
    """
    found, text = _wrapper(config), config.get(TEXT)
    tied = found is not None and config.get(TIED) in (None, True) and found[1].tied
    if not tied or not isinstance(text, dict) or text.get(TIED) is True:
        return config
    heads = [name for name in _stored_names(folder) if unnested(name) == "lm_head.weight"]
    return config | {TIED: False} if heads else config


def _wrapper(config: Mapping[str, Any]) -> tuple[str, Wrapper] | None:
    """Return the wrapper of `model_type`, or of `architectures` where there is none."""
    kind, names = config.get("model_type"), config.get("architectures")
    for name, wrapper in WRAPPERS.items():
        if kind == wrapper.model_type or (kind is None and names == [name]):
            return name, wrapper
    return None


def _agree(key: str, one: object, other: object) -> bool:
    """Return whether the text config's value of a key fits that of the top level."""
    if key == "eos_token_id":
        return _ids(one) <= _ids(other)
    if key in ("dtype", "torch_dtype"):
        return str(one).removeprefix("torch.") == str(other).removeprefix("torch.")
    return one == other


def _ids(value: object) -> set[object]:
    return set(value) if isinstance(value, list) else {value}


def _of_text(value: Any) -> Any:
    """Return a scheme of quantised weights with the modules' names in the text model alone."""
    if isinstance(value, str):
        return unnested(value)
    if isinstance(value, list):
        return [_of_text(each) for each in value]
    if isinstance(value, dict):
        return {_of_text(key): _of_text(each) for key, each in value.items()}
    return value


def _stored_names(folder: Path) -> Iterable[str]:
    """Return the names of a checkpoint's tensors; none where its weights are not there."""
    if (folder / SINGLE).is_file():
        with SafetensorsFile(folder / SINGLE) as file:
            return [*file.keys()]
    names = read_json(folder / INDEX).get("weight_map") if (folder / INDEX).is_file() else None
    return [*names] if isinstance(names, dict) else []
