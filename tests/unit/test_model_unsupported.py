"""A model that is not supported is refused with what it is, and with a supported one of about its size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from foredraft.errors import CheckpointError
from foredraft.model import unsupported
from foredraft.model.families import FAMILIES, IN_GGUF
from foredraft.model.spec import ModelSpec
from foredraft.model.unsupported import INSTEAD, KINDS, KNOWN, PAGE, kind_of, refusal_of_gguf
from tests.support.mutation import Mutant, Mutation, assert_caught, defect

SUPPORTED = {family.model_type for family in FAMILIES.values()}
MOE, LATENT = "a mixture of experts", "a model with latent attention"
RECURRENT = "a model with recurrent layers"
SIZES = {
    "vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 4, "num_attention_heads": 4,
}  # fmt: skip
UNLIKE = "bailing_hybrid glm5_next inkling_mm_model inkling2 jamba kimi_linear qwen4_exp qwen4_exp_text"
# `model_type` and further keys, as makers write them -> the kind
MODELS: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"num_local_experts": 8}, MOE),
    ("llama4", {"text_config": {"model_type": "llama4_text"}}, MOE),
    ("olmoe", {}, MOE),
    ("deepseek_v3", {"kv_lora_rank": 512}, f"{MOE} with latent attention"),
    ("minicpm3", {}, LATENT),
    ("mamba", {}, RECURRENT),
    ("qwen3_next", SIZES, f"{MOE} with recurrent layers"),
    # their layers are recurrent in another way than those of Qwen 3.5
    *((name, {}, f"{MOE} with recurrent layers") for name in UNLIKE.split()),
    *((name, {}, RECURRENT) for name in ("bamba", "lfm3", "zamba2")),
    ("bert", {}, "an encoder, which writes no text"),
    ("t5", {}, "an encoder-decoder"),
    ("vit", {}, "a model of images, with or without text"),
    ("whisper", {}, "a model of speech or sound"),
    # no table holds these names: the keys of the config tell the kind
    ("new_moe", {"num_experts": 64}, MOE),
    ("new_moe", {"n_routed_experts": 64, "kv_lora_rank": 512}, f"{MOE} with latent attention"),
    ("new_latent", {"kv_lora_rank": 256}, LATENT),
    ("new_hybrid", {"layer_types": ["linear_attention", "full_attention"]}, RECURRENT),
    ("new_hybrid", {"layer_types": ["hybrid", "hybrid_sliding"]}, RECURRENT),
    ("new_hybrid", {"layer_types": ["mamba"], "num_experts": 8}, f"{MOE} with recurrent layers"),
    ("new_wrapper", {"text_config": {"num_experts": 8}}, MOE),
    ("new_seq2seq", {"is_encoder_decoder": True}, "an encoder-decoder"),
]
ATTENTION = {"layer_types": ["attention"] * 4, "mamba_d_state": 256, "num_local_experts": 0}


@pytest.mark.parametrize(
    ("model_type", "keys", "instead"),
    [
        ("llama4_text", {"num_local_experts": 0, "hidden_size": 2048}, "Qwen/Qwen3-4B"),  # MobileLLM-R1
        ("jamba", {**ATTENTION, "hidden_size": 1024}, "Qwen/Qwen3-0.6B"),
        ("newdense", {"hidden_size": 4096}, "Qwen/Qwen3-8B"),
        ("newdense", {"hidden_size": 5120}, "Qwen/Qwen3-14B"),
        ("newdense", {"hidden_size": 8192}, "Qwen/Qwen3-32B"),
        ("newdense", {}, "Qwen/Qwen3-4B"),
    ],
)
def test_a_dense_model_is_not_called_a_mixture_and_gets_one_of_its_size(
    model_type: str, keys: dict[str, Any], instead: str
) -> None:
    message = refused({"model_type": model_type, **keys})
    assert "it is" not in message and f"such as {instead}; supported are " in message


def test_layers_that_are_recurrent_decide_where_they_are_listed() -> None:
    assert kind_of(ATTENTION) is None
    assert kind_of({**ATTENTION, "layer_types": ["attention", "mamba"]}) == "hybrid"


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        ModelSpec.from_hf(config)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


@pytest.mark.parametrize(("model_type", "keys", "what"), MODELS)
def test_a_model_is_refused_with_what_it_is_and_what_to_give(
    model_type: str, keys: dict[str, Any], what: str
) -> None:
    message = refused({"model_type": model_type, **keys})
    assert message.startswith(
        f"config.json: model_type '{model_type}' is not supported: it is {what}; give a dense"
    )
    assert any(f"such as {name}; {PAGE}" in message for name in INSTEAD)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("qwen-3", "qwen3"), ("lama", "llama"), ("gemma3_txt", "gemma3_text"), ("mistrall", "mistral")],
)
def test_an_unknown_architecture_gets_the_nearest_name_and_the_page(given: str, nearest: str) -> None:
    message = refused({"model_type": given})
    assert f"{PAGE}. Did you mean '{nearest}'?" in message and "supported are " in message
    assert f"Did you mean '{nearest}'" in refused({"architectures": [f"{given.replace('-', '')}ForCausalLM"]})
    message = refused({"model_type": "zzz"})  # like no name
    assert "Did you mean" not in message and message.endswith(PAGE)


# model type -> the kind that the defaults of its class are
OF_DEFAULTS = {
    "qwen3_5_text": "hybrid",
    "granitemoehybrid": "hybrid-experts",
    "qwen3_next": "hybrid-experts",
    "nemotron_h": "hybrid-experts",
}


def test_no_supported_model_is_in_the_table() -> None:
    assert SUPPORTED & KNOWN.keys() == {"qwen3_next"}  # but for those without experts
    assert not IN_GGUF.keys() & KNOWN.keys()
    assert {kind for kind, _ in KNOWN.values()} == KINDS.keys()
    assert {instead for _, instead in KNOWN.values()} <= INSTEAD.keys()
    assert {*INSTEAD.values()} <= SUPPORTED
    for family in FAMILIES.values():
        if family.keys is None:  # transformers has a class of the architecture
            kind = OF_DEFAULTS.get(family.model_type)
            assert kind_of(CONFIG_MAPPING[family.model_type]().to_dict()) == kind


@pytest.mark.parametrize(
    ("architecture", "metadata", "what"),
    [
        ("deepseek2", {}, f"{MOE} with latent attention"),
        ("mamba", {}, RECURRENT),
        ("t5", {}, "an encoder-decoder"),
        ("new", {"new.expert_count": 8}, MOE),
        ("new", {"new.ssm.state_size": 8}, RECURRENT),
        ("new", {"new.kda.head_dim": 128}, RECURRENT),
        *((name, {}, f"{MOE} with recurrent layers") for name in ("qwen4exp", "kimi-linear", "glm5-next")),
        ("new", {"new.expert_count": 0}, None),
        ("new", {"new.expert_count": 1}, None),
        ("lama", {}, None),
    ],
)
def test_a_gguf_file_is_refused_with_what_it_is(
    architecture: str, metadata: dict[str, Any], what: str | None
) -> None:
    problem, remedy = refusal_of_gguf(architecture, metadata, IN_GGUF)
    assert f"has the architecture '{architecture}', which is not supported" in problem
    assert f"it is {what}" in problem if what else "it is" not in problem
    assert PAGE in remedy and "such as " in remedy and ("supported are" in remedy) == (what is None)
    assert ("Did you mean 'llama'" in remedy) == (architecture == "lama")


def told(model_type: str) -> Callable[[], None]:
    def check() -> None:
        for name, keys, what in (case for case in MODELS if case[0] == model_type):
            test_a_model_is_refused_with_what_it_is_and_what_to_give(name, keys, what)

    return check


def without(*keys: str) -> Mutation:
    return lambda sound: (
        lambda config, *rest: sound({key: config[key] for key in config if key not in keys}, *rest)
    )


def few_experts() -> None:
    for count in (0, 1):
        test_a_gguf_file_is_refused_with_what_it_is("new", {"new.expert_count": count}, None)


DEFECTS = [
    defect("experts not counted", unsupported._counts, lambda sound: lambda value: False, told("new_moe")),
    defect("no expert counted", unsupported._counts, lambda sound: lambda value: value is not None, few_experts),
    defect("one expert counted", unsupported._counts, lambda sound: bool, few_experts),
    defect("kinds of layers not read", kind_of, without("layer_types"), told("new_hybrid")),
    defect("latent attention not read", kind_of, without("kv_lora_rank"), told("new_latent")),
    defect("encoders not read", kind_of, without("is_encoder_decoder"), told("new_seq2seq")),
    defect("text config not read", unsupported.refusal, without("text_config"), told("new_wrapper")),
    defect("keys not read", unsupported._known, lambda sound: lambda name, config: sound(name, {}), told("new_moe")),
    defect("names not read", unsupported._known, lambda sound: lambda name, config: sound("", config), told("olmoe")),
]  # fmt: skip


@pytest.mark.parametrize("mutant", DEFECTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.check()
    assert_caught(mutant, monkeypatch)
