"""The text halves of multimodal checkpoints: logits and tokens of the whole models of transformers; what is refused."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForImageTextToText

import foredraft
from foredraft import CheckpointError, RequestError, SamplingParams
from foredraft.llm.requests import Requests
from foredraft.model import tensor_names, wrappers
from foredraft.model.checkpoint import weight_headers
from foredraft.model.families import FAMILIES
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder, parameter_count, read_tensors
from tests.parity.test_logits import Pair, close, decoded, greedy, prompt_logits
from tests.support.mutation import Mutant, assert_caught, defect
from tests.support.mutations import Function, around, instead
from tests.support.wrapped import NEWER, OLDER, WRAPPED, edit_config, rename, save_wrapped


@functools.cache
def pair(name: str, spelling: str = OLDER) -> Pair:
    with tempfile.TemporaryDirectory() as folder:
        saved = save_wrapped(Path(folder), name, spelling)
        return Pair(saved, kind=AutoModelForImageTextToText, ids=90)


SPELT = [
    (name, spelling)
    for name in WRAPPED
    for spelling in (OLDER, NEWER)
    if not (name.startswith("gemma4") and spelling == OLDER)  # transformers writes it the newer way
]


@pytest.mark.parametrize(("name", "spelling"), SPELT)
def test_logits_and_greedy_tokens_equal_those_of_transformers(name: str, spelling: str) -> None:
    found = pair(name, spelling)
    assert close(prompt_logits(found.runner, found.tokens), found.expected)
    prompt = found.tokens[:, :40]
    assert decoded(found.runner, prompt, 64) == greedy(found, prompt, 64)


@pytest.mark.parametrize("name", WRAPPED)
def test_other_parts_are_neither_read_nor_counted(tmp_path: Path, name: str) -> None:
    folder = save_wrapped(tmp_path, name)
    spec = ModelSpec.from_folder(folder)
    texts = [stored for stored in weight_headers(folder) if stored.startswith(("model.", "lm_head."))]
    assert [*weight_headers(folder)] == texts
    sizes = {stored: torch.Size(shape).numel() for stored, (_, shape) in weight_headers(folder).items()}
    assert parameter_count(spec) == sum(sizes.values())
    assert read_tensors(folder, lambda name: True).keys() == sizes.keys()


def refused(folder: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_decoder(folder)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_mix_of_both_spellings_is_refused() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = save_wrapped(Path(temporary), "gemma3")
        norm = "language_model.model.norm.weight"
        rename(folder, lambda name: "model.language_model.norm.weight" if name == norm else name)
        refused(folder, "model.language_model.norm.weight", "spelled in two ways")


def test_an_unknown_part_is_refused_by_name(tmp_path: Path) -> None:
    folder = save_wrapped(tmp_path, "gemma3")
    changed = "language_model.memory.weight"
    rename(folder, lambda name: changed if name == "vision_tower.post_layernorm.bias" else name)
    refused(folder, changed, "Gemma3ForConditionalGeneration")


def test_a_text_model_has_no_parts_of_images(tmp_path: Path) -> None:
    folder = save_wrapped(tmp_path, "mistral3")
    (folder / "config.json").write_text(json.dumps({**WRAPPED["mistral3"][2]}))
    refused(folder, "tensor lm_head.weight is missing")


@pytest.mark.parametrize(
    ("key", "top"), [("vocab_size", 96), ("sliding_window", 12), ("eos_token_id", 7), ("dtype", "bfloat16")]
)
def test_levels_that_contradict_each_other_are_refused(tmp_path: Path, key: str, top: object) -> None:
    folder = save_wrapped(tmp_path, "mistral3")
    edit_config(folder, lambda config: config["text_config"].setdefault("dtype", "float32"))
    edit_config(folder, lambda config: config.update({key: top}))
    refused(folder, f"{key} is {top!r}, but ", "in text_config")


def test_the_end_of_text_ids_are_those_of_the_top_level() -> None:
    config = {"model_type": "gemma3", "text_config": {**WRAPPED["gemma3"][2], "eos_token_id": 1}}
    assert ModelSpec.from_hf({**config, "eos_token_id": [1, 6]}).eos_token_ids == (1, 6)
    assert ModelSpec.from_hf(config).eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("top", "text", "tied"),
    [
        (None, None, False),
        (None, None, True),
        (True, False, False),
        (True, False, True),
        (False, None, False),
        (None, True, True),
    ],
)
def test_a_head_of_its_own_is_found(tmp_path: Path, top: bool | None, text: bool | None, tied: bool) -> None:
    folder = save_wrapped(tmp_path, "mistral3-tied" if tied else "mistral3")

    def change(config: dict[str, Any]) -> None:
        for level, value in ((config, top), (config["text_config"], text)):
            level.pop("tie_word_embeddings", None)
            if value is not None:
                level["tie_word_embeddings"] = value

    edit_config(folder, change)
    assert ModelSpec.from_folder(folder).tied is tied
    load_decoder(folder)


def test_absent_sizes_are_those_of_the_classes() -> None:
    names = (
        "Gemma3Text",
        "Gemma4Text",
        "Gemma4UnifiedText",
        "Lfm2",
        "Mistral",
        "Ministral3",
        "MuseGlimmerText",
        "Qwen3_5Text",
    )
    text_configs = [getattr(transformers, f"{name}Config") for name in names]
    classes = {config_class.model_type: config_class for config_class in text_configs}
    assert wrappers.DEFAULT_SIZES.keys() == classes.keys()
    for kind, sizes in wrappers.DEFAULT_SIZES.items():
        assert [getattr(classes[kind](), key) for key in wrappers.SIZES] == [*sizes]
    spec = ModelSpec.from_hf({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}})
    assert (spec.hidden_size, spec.layers, spec.vocab_size, spec.tied) == (2304, 26, 262_208, True)


def test_every_text_model_of_a_wrapper_is_a_family() -> None:
    known = {family.model_type for family in FAMILIES.values()}
    for wrapper in wrappers.WRAPPERS.values():
        assert {wrapper.text, *wrapper.texts} <= known
        assert wrapper.text in wrapper.texts


def test_keys_of_other_parts_are_silent_and_unknown_ones_named() -> None:
    top = WRAPPED["gemma3"][3]
    config = {"model_type": "gemma3", "text_config": WRAPPED["gemma3"][2], **top}
    assert ModelSpec.from_hf(config).ignored == ()
    assert ModelSpec.from_hf({**config, "hidden_sizes": 8}).ignored == ("hidden_sizes = 8",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ({}, "text_config"),
        ({"text_config": None}, "text_config"),
        ({"text_config": 3}, "text_config"),
        (
            {"text_config": {"model_type": "qwen2"}},
            "'qwen2' is not supported in a Mistral3ForConditionalGeneration",
        ),
    ],
)
def test_a_missing_or_another_text_config_is_refused(text: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        ModelSpec.from_hf({"model_type": "mistral3", **text})


MEDIA = {
    "gemma3": ((95, "image_token_index"), (93, "boi_token_index")),
    "gemma4": ((92, "image_token_id"), (95, "eoa_token_index"), (96, "audio_token_id")),
}


@pytest.mark.parametrize("name", MEDIA)
def test_prompts_with_image_ids_are_refused_by_name(name: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        llm = foredraft.load(save_wrapped(Path(temporary), name), device="cpu", max_length=64)
    for token, key in MEDIA[name]:
        with pytest.raises(RequestError, match=f"token {token}, the {key}"):
            llm.generate([[5, token, 6]], SamplingParams(max_new_tokens=1))


def test_a_scheme_of_quantised_weights_names_the_modules_of_the_text_model() -> None:
    kept = ["model.language_model.layers.0.mlp.down_proj"]
    scheme = {"quant_method": "fp8", "modules_to_not_convert": kept}
    config = {"model_type": "mistral3", "text_config": {}, "quantization_config": scheme}
    found = wrappers.text_config_of(config)
    assert found["quantization_config"]["modules_to_not_convert"] == ["model.layers.0.mlp.down_proj"]


# --- planted defects ------------------------------------------------------------------------------------


@around
def text_config_first(sound: Function, config: Any) -> Any:
    """Take the text config's keys where both levels have them."""
    part = sound(config)
    if part is not None:
        part.config.update({key: value for key, value in config["text_config"].items() if key in config})
    return part


unchecked = instead(lambda *given: None)

eos, spellings = test_the_end_of_text_ids_are_those_of_the_top_level, test_a_mix_of_both_spellings_is_refused
scheme = test_a_scheme_of_quantised_weights_names_the_modules_of_the_text_model
images = functools.partial(test_prompts_with_image_ids_are_refused_by_name, "gemma3")
NO_ERROR = pytest.fail.Exception
MUTANTS = [
    defect("the top level's eos ignored", wrappers.text_part_of, text_config_first, eos),
    defect(
        "tensors in both spellings accepted", tensor_names._check_spelling, unchecked, spellings, NO_ERROR
    ),
    defect("image ids accepted", Requests._check_media, unchecked, images, NO_ERROR),
    defect("modules of a scheme keep their names", wrappers._of_text, lambda _: lambda value: value, scheme),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
