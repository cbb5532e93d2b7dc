"""A model that is not supported is refused with what it is, and with a supported one of about its size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from foredraft.cli import main
from foredraft.errors import CheckpointError
from foredraft.model import unsupported
from foredraft.model.families import FAMILIES
from foredraft.model.gguf.gguf_config import ARCHITECTURES
from foredraft.model.spec import ModelSpec
from foredraft.model.unsupported import INSTEAD, KINDS, KNOWN, PAGE, kind_of, refusal_of_gguf
from tests.support.checkpoints import save_checkpoint
from tests.support.planting import Mutant, Spoiler, assert_caught, defect

SUPPORTED = {family.model_type for family in FAMILIES.values()}
# What models of each kind are, by keys as their makers write them: `model_type`, further keys -> the kind.
MODELS: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"num_local_experts": 8}, "a mixture of experts"),
    ("qwen3_moe", {"num_experts": 128}, "a mixture of experts"),
    ("gpt_oss", {"num_local_experts": 32}, "a mixture of experts"),
    ("llama4", {"text_config": {"model_type": "llama4_text"}}, "a mixture of experts"),
    ("olmoe", {}, "a mixture of experts"),
    ("granitemoe", {}, "a mixture of experts"),
    ("phimoe", {}, "a mixture of experts"),
    ("deepseek_v3", {"kv_lora_rank": 512}, "a mixture of experts with latent attention"),
    ("deepseek_v2", {}, "a mixture of experts with latent attention"),
    ("kimi_k2", {}, "a mixture of experts with latent attention"),
    ("minicpm3", {}, "a model with latent attention"),
    ("mamba", {}, "a model with recurrent layers"),
    ("falcon_h1", {}, "a model with recurrent layers"),
    ("lfm2", {}, "a model with recurrent layers"),
    ("rwkv", {}, "a model with recurrent layers"),
    ("qwen3_5", {"text_config": {"model_type": "qwen3_5_text"}}, "a model with recurrent layers"),
    ("qwen3_next", {}, "a mixture of experts with recurrent layers"),
    ("jamba", {}, "a mixture of experts with recurrent layers"),
    ("granitemoehybrid", {}, "a mixture of experts with recurrent layers"),
    ("bert", {}, "an encoder, which writes no text"),
    ("t5", {}, "an encoder-decoder"),
    ("bart", {}, "an encoder-decoder"),
    ("vit", {}, "a model of images, with or without text"),
    ("whisper", {}, "a model of speech or sound"),
    # no table holds these names: the keys of the config tell the kind
    ("new_moe", {"num_experts": 64}, "a mixture of experts"),
    ("new_moe", {"n_routed_experts": 64, "kv_lora_rank": 512}, "a mixture of experts with latent attention"),
    ("new_latent", {"kv_lora_rank": 256}, "a model with latent attention"),
    ("new_hybrid", {"layer_types": ["linear_attention", "full_attention"]}, "a model with recurrent layers"),
    (
        "new_hybrid",
        {"layer_types": ["mamba"], "num_experts": 8},
        "a mixture of experts with recurrent layers",
    ),
    ("new_wrapper", {"text_config": {"num_experts": 8}}, "a mixture of experts"),
    ("new_seq2seq", {"is_encoder_decoder": True}, "an encoder-decoder"),
]


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        ModelSpec.from_hf(config)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 440
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


def test_an_unknown_name_without_any_likeness_gets_the_page_alone() -> None:
    message = refused({"model_type": "zzz"})
    assert "Did you mean" not in message and message.endswith(PAGE)


def test_no_supported_model_is_in_the_table() -> None:
    assert not SUPPORTED & KNOWN.keys() and not ARCHITECTURES.keys() & KNOWN.keys()


def test_every_kind_is_used_and_every_model_to_give_is_supported() -> None:
    assert {kind for kind, _ in KNOWN.values()} == KINDS.keys()
    assert {instead for _, instead in KNOWN.values()} <= INSTEAD.keys()
    assert {*INSTEAD.values()} <= SUPPORTED


def test_supported_configs_are_of_no_kind() -> None:
    for family in FAMILIES.values():
        if family.keys is None:  # transformers has a class of the architecture
            assert kind_of(CONFIG_MAPPING[family.model_type]().to_dict()) is None


@pytest.mark.parametrize(
    ("architecture", "metadata", "what"),
    [
        ("qwen3moe", {}, "it is a mixture of experts"),
        ("deepseek2", {}, "it is a mixture of experts with latent attention"),
        ("mamba", {}, "it is a model with recurrent layers"),
        ("lfm2", {}, "it is a model with recurrent layers"),
        ("qwen3next", {}, "it is a mixture of experts with recurrent layers"),
        ("t5", {}, "it is an encoder-decoder"),
        ("bert", {}, "it is an encoder"),
        ("new", {"new.expert_count": 8}, "it is a mixture of experts"),
        ("new", {"new.ssm.state_size": 8}, "it is a model with recurrent layers"),
        ("new", {"new.expert_count": 0}, "which is not supported"),
        ("new", {"new.expert_count": 1}, "which is not supported"),
        ("lama", {}, "which is not supported"),
    ],
)
def test_a_gguf_file_is_refused_with_what_it_is(
    architecture: str, metadata: dict[str, Any], what: str
) -> None:
    problem, remedy = refusal_of_gguf(architecture, metadata, ARCHITECTURES)
    assert f"has the architecture '{architecture}', which is not supported" in problem and what in problem
    assert what.startswith("it is") == ("it is" in problem)
    assert PAGE in remedy and ("such as" in remedy) == ("it is" in problem)
    assert ("Did you mean 'llama'" in remedy) == (architecture == "lama")


def test_a_real_gguf_file_of_experts_is_refused_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "qwen3moe")
    writer.add_expert_count(8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert main(["info", str(file)]) == 2
    assert "which is not supported: it is a mixture of experts; give a dense model" in capsys.readouterr().err


def test_a_folder_of_experts_is_refused_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(tmp_path / "model", model_type="olmoe")
    assert main(["generate", "--model", str(tmp_path / "model"), "x"]) == 2
    assert "'olmoe' is not supported: it is a mixture of experts; give a dense" in capsys.readouterr().err


Function = Callable[..., Any]


def told(model_type: str) -> Callable[[], None]:
    """Return the check of all rows of `MODELS` with this model type."""

    def check() -> None:
        for name, keys, what in MODELS:
            if name == model_type:
                test_a_model_is_refused_with_what_it_is_and_what_to_give(name, keys, what)

    return check


def without(*keys: str) -> Spoiler:
    """Leave keys out of the config that a function reads."""
    return lambda sound: (
        lambda config, *rest: sound({key: config[key] for key in config if key not in keys}, *rest)
    )


def few_experts() -> None:
    for count in (0, 1):
        keys = {"new.expert_count": count}
        test_a_gguf_file_is_refused_with_what_it_is("new", keys, "which is not supported")


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
