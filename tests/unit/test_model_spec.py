"""`ModelSpec` reads every supported config key, and refuses every other key or value by name."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import foredraft
from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import ConfigReader
from foredraft.model.spec import ModelSpec
from tests.support.checkpoints import (
    FAMILIES,
    FULL,
    GEMMA2,
    IN_ROPE,
    LLAMA,
    LLAMA3_ROPE,
    SCALED,
    SLIDING,
    save_checkpoint,
)

LLAMA_CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **LLAMA}
GEMMA2_CONFIG: dict[str, Any] = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **GEMMA2}
CONFIGS: dict[str, dict[str, Any]] = {
    family: {"architectures": [model_class.__name__], "model_type": config_class.model_type, **base}
    for family, (config_class, model_class, base) in FAMILIES.items()
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
OLD_ROPE = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "llama3": OLD_ROPE,
}
INF = float("inf")
NO_TYPE = {"model_type": None}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def scaled(kind: str, **keys: Any) -> dict[str, Any]:
    return {"rope_scaling": {**SCALINGS[kind], **keys}}


IDS = "eos_token_ids bos_token_id"
MISTRAL, BARE_LLAMA = "MistralForCausalLM", without(LLAMA_CONFIG, "bos_token_id")
BARE_GEMMA2 = without(GEMMA2_CONFIG, "eos_token_id", "bos_token_id")
NEGATIVE = {**LLAMA_CONFIG, "eos_token_id": -1, "bos_token_id": -1}  # some files write it for no id
LONE_SIZE = {**without(GEMMA2_CONFIG, "sliding_window"), "sliding_window_size": 4096}
NO_SOFTCAPS = {**GEMMA2_CONFIG, "attn_logit_softcapping": None, "final_logit_softcapping": None}
LINEAR, DYNAMIC = SCALINGS["linear"], SCALINGS["dynamic"]
# config, generation config, attributes and their values
READ: list[tuple[dict[str, Any], dict[str, Any] | None, str, Any]] = [
    (NO_SOFTCAPS, None, "attention_softcap logit_softcap", (None, None)),
    (LONE_SIZE, None, "windows", (4096, None) * 2),
    (
        LLAMA_CONFIG | {"eos_token_id": [2, 5]},
        {"eos_token_id": [5, 9], "top_p": 0.9},
        "eos_token_ids",
        (2, 5, 9),
    ),
    (LLAMA_CONFIG | {"eos_token_id": None}, None, IDS, ((), 1)),
    (NEGATIVE, None, IDS, ((), None)),
    (NEGATIVE, {"eos_token_id": -1, "bos_token_id": -(2**70)}, IDS, ((), None)),
    # generation_config.json may come from a larger vocabulary
    (BARE_LLAMA, {"eos_token_id": [5, 97, 10**400, -1], "bos_token_id": 97}, IDS, ((2, 5), None)),
    # transformers applies its defaults only where there is no generation_config.json
    (BARE_GEMMA2, None, IDS, ((1,), 2)),
    (BARE_GEMMA2, {"bos_token_id": 5}, IDS, ((), 5)),
    *(
        (LLAMA_CONFIG | keys, None, "dtype", dtype)
        for keys, dtype in (
            ({}, "float32"),
            ({"dtype": "bfloat16"}, "bfloat16"),
            ({"torch_dtype": "torch.float16"}, "float16"),
            ({"dtype": None, "torch_dtype": "float16"}, "float16"),
            ({"dtype": "bfloat16", "torch_dtype": "bfloat16"}, "bfloat16"),
        )
    ),
    # the model type decides
    *(
        (LLAMA_CONFIG | {"architectures": names}, None, "architecture", "LlamaForCausalLM")
        for names in (None, ["LLaMAForCausalLM"], [MISTRAL], ["LlamaForCausalLM", "X"])
    ),
    (LLAMA_CONFIG | NO_TYPE | {"architectures": [MISTRAL]}, None, "architecture", MISTRAL),
    *(
        (LLAMA_CONFIG | {"rope_scaling": rope} | keys, None, "max_positions", positions)
        for rope, keys, positions in (
            (None, {}, 2048),
            (LINEAR, {}, 2048),  # the scaled length
            (LINEAR, {"max_sequence_length": 8192}, 8192),
            (LINEAR, {"max_sequence_length": None}, 2048),
            (LINEAR, {"max_sequence_length": 64}, 2048),
            (YARN, {"max_sequence_length": 8192}, 2048),
            (DYNAMIC | {"factor": 2.5}, {}, 5120),
            (DYNAMIC | {"factor": 0.5}, {}, 2048),
            (DYNAMIC | {"factor": 1e300}, {}, 2**31 - 1),
            (YARN | {"original_max_position_embeddings": 2048}, {}, 8192),
            (YARN, {}, 2048),  # 4 times 64 would be less
            (OLD_ROPE, {}, 2048),
        )
    ),
]


@pytest.mark.parametrize(("config", "generation", "names", "values"), READ)
def test_keys_are_read(config: Any, generation: Any, names: str, values: Any) -> None:
    spec = ModelSpec.from_hf(config, generation)
    found = tuple(getattr(spec, name) for name in names.split())
    assert found == (values if " " in names else (values,))


# config -> keys without effect, as published checkpoints have them
NEUTRAL: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"sliding_window": None, "use_sliding_window": False, "layer_types": None},
        {"layer_types": [FULL] * 3},
        {"residual_multiplier": 1.0, "embedding_multiplier": 1, "logits_scaling": 1.0},
        {"residual_multiplier": None, "attention_multiplier": None},
        {"attention_multiplier": 0.25},  # the default scale, 1 / sqrt(head_dim)
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": None},
        {"auto_map": None, "quantization_config": None},
        {"num_key_value_heads": None, "head_dim": None},
        {"use_cache": False, "transformers_version": "4.1", "initializer_range": 9.0},
        {"pretraining_tp": 2, "neftune_noise_alpha": 5, "model_max_length": 4096},
        {"max_sequence_length": 10**6},  # without linear scaling
    ],
    "mistral": [
        {"attention_bias": False, "use_sliding_window": False, "layer_types": None},
        {"layer_types": [SLIDING] * 3},
    ],
    "qwen2": [
        {"use_mrope": False, "use_sliding_window": False, "max_window_layers": 28, "sliding_window": 9},
        {"layer_types": [FULL] * 3, "head_dim": 16, "rope_scaling": None},
    ],
    "qwen3": [{"max_window_layers": 28, "sliding_window": None, "use_sliding_window": False}],
    "gemma2": [
        {"sliding_window_size": size} for size in (24, None)
    ],  # google/gemma-2-9b has both window keys
    "gemma3": [
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_scaling": None},
        {"sliding_window_pattern": 6, "_sliding_window_pattern": 6},
        {"use_bidirectional_attention": False, "cache_implementation": "hybrid"},
    ],
}


@pytest.mark.parametrize("family", NEUTRAL)
def test_neutral_values_are_accepted(family: str) -> None:
    for keys in NEUTRAL[family]:
        assert ModelSpec.from_hf({**CONFIGS[family], **keys}) == ModelSpec.from_hf(CONFIGS[family]), keys


@pytest.mark.parametrize("family", CONFIGS)
def test_a_null_key_counts_as_absent(family: str) -> None:
    """Unknown keys, keys that are not read, and some keys that are."""
    nulls = dict.fromkeys(["num_experts", "compression_config", "is_decoder", "rope_interleaved"])
    # there null is false
    read = {} if family in ("glm4", "gpt_neox", "seed-oss") else {"attention_bias": None}
    read |= {"mlp_bias": None} if family == "llama" else {}
    spec = ModelSpec.from_hf({**CONFIGS[family], **nulls, **read})
    assert spec == ModelSpec.from_hf(CONFIGS[family])
    if family not in SCALED:
        return
    config = {key: value for key, value in CONFIGS[family].items() if key != "rope_parameters"}
    yarn = {**YARN, **IN_ROPE.get(family, {})}
    rope = {**yarn, "alpha": None, "attn_factor": None}
    assert ModelSpec.from_hf({**config, "rope_scaling": rope}) == ModelSpec.from_hf(
        {**config, "rope_scaling": yarn}
    )


def test_the_ignored_keys_are_named(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    rope = {"rope_parameters": {**YARN, "attn_factor": 0.5}}
    save_checkpoint(tmp_path, unk_token_id=0, use_cache=False, **rope)
    with caplog.at_level("INFO", "foredraft"):
        foredraft.load(tmp_path, device="cpu")
    lines = [record.getMessage() for record in caplog.records if "does not read" in record.getMessage()]
    assert lines == [
        f"{tmp_path / 'config.json'}: ignored, because transformers does not read it:"
        " unk_token_id = 0, rope_parameters.attn_factor = 0.5"
    ]


def test_a_section_of_another_file_is_as_strict_as_ever() -> None:
    """`quantization_config`, and the metadata of a GGUF file, are not read by the rule of config.json."""
    reader = ConfigReader({"known": 1, "other": 2})
    assert reader.take("known") == 1
    with pytest.raises(CheckpointError, match="other = 2 is not known"):
        reader.reject_unknown_keys()


# config, or kind of rotary parameters -> the keys that decide what is computed: no value is overlooked
DECIDING = {
    "llama": "hidden_size vocab_size num_hidden_layers num_attention_heads intermediate_size head_dim num_key_value_heads"
    " rms_norm_eps hidden_act attention_bias mlp_bias tie_word_embeddings max_position_embeddings rope_theta"
    " layer_types sliding_window attention_multiplier residual_multiplier final_logit_softcapping"
    # with a meaning elsewhere; tests/parity/test_keys.py has those that transformers reads
    " quantization dual_chunk_attention_config logit_scale scale_emb rope_traditional transformers_weights",
    "gemma2": "head_dim attn_logit_softcapping final_logit_softcapping layer_types query_pre_attn_scalar sliding_window"
    " hidden_activation use_bidirectional_attention",
    "qwen2": "use_sliding_window",
    "gemma3": "attn_logit_softcapping sliding_window sliding_window_pattern query_pre_attn_scalar layer_types",
    "dynamic": "alpha factor",
    "yarn": "attention_factor beta_fast beta_slow factor mscale original_max_position_embeddings truncate",
    "llama3": "factor high_freq_factor low_freq_factor original_max_position_embeddings",
}
WRONG: list[Any] = ["other", -3, [1], {"a": 1}]
# the borders of each check of a number, and of what a model can have
VALUES: dict[str, dict[str, list[Any]]] = {
    "llama": {
        "hidden_size": [None, 64.5, INF, 10**400],
        "vocab_size": [True, 2**40],
        "head_dim": [15],
        "num_key_value_heads": [3],
        "rms_norm_eps": [0, float("nan")],
        "layer_types": [[FULL, FULL, SLIDING]],
        "rope_theta": [None],
        "rope_parameters": ["other", [1]],
        "eos_token_id": ["</s>"],
        "bos_token_id": [10**400, [1]],
    },
    "gemma2": {
        "sliding_window": [None],
        "head_dim": [None],
        "layer_types": [[FULL], ["chunked_attention"] * 4],
    },
    "qwen2": {"max_window_layers": [-1, 1.5, False]},
    "gemma3": {"sliding_window_pattern": [0, None], "layer_types": [[SLIDING] * 6 + [[FULL]]]},
    "yarn": {"attention_factor": [0], "beta_slow": [64], "truncate": [None]},
    "llama3": {"factor": [True, INF], "low_freq_factor": [4.0], "original_max_position_embeddings": [0]},
}


def refusal(family: str, keys: dict[str, Any]) -> str:
    """Return the one line that a config is refused with; it is empty for one that is accepted."""
    line = ""
    try:
        ModelSpec.from_hf({**CONFIGS[family], **keys})
    except CheckpointError as error:
        line = str(error)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("name", DECIDING)
def test_a_refused_value_is_named_with_its_key(name: str) -> None:
    borders = [(key, value) for key, values in VALUES.get(name, {}).items() for value in values]
    for key, value in [*itertools.product(DECIDING[name].split(), WRONG), *borders]:
        keys = {key: value} if name in CONFIGS else scaled(name, **{key: value})
        line, shown = refusal(name if name in CONFIGS else "llama", keys), shortened(value)
        assert f"{key} is {shown}" in line or f"{key} = {shown}" in line, f"{key} = {value!r}: {line}"


KEEP_ONE = "keep the one that the model was trained with"
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 500.0}
BARE_LINEAR = {"rope_type": "linear", "factor": 4.0}
# config -> keys, and what the refusal says beside them
SAID: dict[str, list[tuple[dict[str, Any], str]]] = {
    "llama": [
        (scaled("linear", type="su"), "'su' is not supported; supported are default, dynamic, linear"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3'; it must be a JSON object"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": without(OLD_ROPE, "high_freq_factor")}, "high_freq_factor is missing"),
        (scaled("llama3", type="yarn"), "type is 'yarn'; rope_type is 'llama3'"),
        (scaled("llama3", high_freq_factor=0.5), "high_freq_factor, 0.5"),
        (scaled("yarn", beta_fast=1.0), "beta_slow, 1.0, must be less than beta_fast, 1.0"),
        (scaled("yarn", rope_theta=1.0), "rope_theta is 1.0; yarn needs a base above 1"),
        (scaled("dynamic") | {"head_dim": 2}, "head_dim is 2"),
        (scaled("linear") | {"max_sequence_length": "8192"}, "max_sequence_length is '8192'"),
        (scaled("yarn") | {"original_max_position_embeddings": 32}, "rope_scaling has 64"),
        ({"rope_parameters": {"full_attention": YARN}}, "full_attention"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters: rope_theta is 0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        # transformers prefers rope_scaling to rope_parameters, and the inner rope_theta to the outer one
        ({"rope_scaling": {"rope_type": "default"}, "rope_parameters": LLAMA3_ROPE}, KEEP_ONE),
        ({"rope_scaling": OLD_ROPE, "rope_parameters": LLAMA3_ROPE}, KEEP_ONE),  # with the default theta
        ({"rope_theta": 1e6, "rope_parameters": LLAMA3_ROPE}, KEEP_ONE),
        ({"logits_scaling": 8.0}, "logits_scaling = 8.0 is not supported: exllamav2 divides logits; use"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "torch_dtype is 'bfloat16'; dtype is 'float16'"),
        ({"eos_token_id": 97}, "json: eos_token_id is 97, but vocab_size is 97; give an id below it"),
        ({"eos_token_id": [2, 2**63]}, "eos_token_id is [2, 9223372036854775808], but vocab_size is 97"),
        ({"architectures": ["MambaForCausalLM"], **NO_TYPE}, "'MambaForCausalLM' is not supported"),
        ({"architectures": ["LlamaForCausalLM", "X"], **NO_TYPE}, "is not supported"),
        ({"architectures": None, "model_type": "bert"}, "model_type 'bert' is not supported"),
        ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
        ({"architectures": None, **NO_TYPE}, "None is not supported"),
    ],
    "gemma2": [({"sliding_window_size": 4096}, "_size is 4096; it must equal sliding_window, 24")],
    "mistral": [({"sliding_window": None, "layer_types": [SLIDING] * 3}, "layer_types")],
    "qwen2": [({"layer_types": [SLIDING] * 3}, "it must name full_attention for each")],
    "gemma3": [
        ({"rope_parameters": {FULL: BARE_LINEAR}, "rope_scaling": DEFAULT_ROPE}, KEEP_ONE),
        ({"rope_parameters": {FULL: DEFAULT_ROPE}, "rope_theta": 1e6}, "rope_theta is 1000000.0"),
        ({"rope_parameters": {SLIDING: DEFAULT_ROPE}, "rope_local_base_freq": 1e4}, "base_freq is 10000.0"),
        ({"rope_parameters": DEFAULT_ROPE}, "rope_parameters: rope_type = 'default' is not supported"),
        ({"rope_parameters": {FULL: "default"}}, "full_attention is 'default'"),
        ({"rope_parameters": {"truncate": None}}, "rope_parameters: truncate is None"),
        ({"rope_scaling": LINEAR}, "rope_scaling: type is 'linear'; spell it rope_type"),
        ({"rope_local_base_freq": "1"}, "rope_local_base_freq is '1'"),
        ({"sliding_window_pattern": 2, "layer_types": [FULL] * 7}, "layer_types differs"),
        ({"model_type": "gemma3"}, "text_config is missing"),
        ({"model_type": "llava", "text_config": {}}, "a model of images, with or without text; give a dense"),
    ],
}


def test_a_refusal_names_the_generation_config() -> None:
    with pytest.raises(CheckpointError, match=r"^generation_config\.json: eos_token_id is 'x'"):
        ModelSpec.from_hf(LLAMA_CONFIG, {"eos_token_id": "x"})


@pytest.mark.parametrize("family", SAID)
def test_a_refusal_says_what_to_do(family: str) -> None:
    for keys, said in SAID[family]:
        assert said in (line := refusal(family, keys)), f"{keys}: {line}"


SCALARS = st.floats() | st.sampled_from(
    [None, True, False, "llama3", "yarn", "dynamic", "", -1, 0, 1, 3, 2**40, 10**400, 0.5, 1e300, -0.0]
)
ROPE_KEYS = [*LLAMA3_ROPE, *YARN, *"type attention_factor mscale mscale_all_dim beta_fast truncate".split()]
NESTED = st.lists(SCALARS, max_size=2) | st.dictionaries(st.sampled_from(ROPE_KEYS), SCALARS)


KEYS = """rope_theta rope_scaling rope_parameters dtype hidden_act layer_types hidden_activation rms_norm_eps
attention_bias sliding_window_size attention_multiplier use_sliding_window max_window_layers sliding_window_pattern
_sliding_window_pattern rope_local_base_freq""".split()


OF_LAYERS = st.dictionaries(st.sampled_from([FULL, SLIDING]), NESTED)
ANY = SCALARS | NESTED | st.lists(NESTED, max_size=2) | OF_LAYERS


@given(
    st.sampled_from([*CONFIGS]),
    st.dictionaries(st.sampled_from([*GEMMA2_CONFIG, *KEYS]), ANY, min_size=1, max_size=3),
)
def test_any_value_is_accepted_or_refused_in_one_line(family: str, keys: dict[str, Any]) -> None:
    refusal(family, keys)


def test_a_folder_is_read_and_a_broken_config_named(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    for content, says in (
        (None, "no config.json"),
        *((each, r"config\.json") for each in (b"{", b"[]", b"\xff")),
    ):
        if content is not None:
            config.write_bytes(content)
        with pytest.raises(CheckpointError, match=says):
            ModelSpec.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match="not a folder"):
        ModelSpec.from_folder(tmp_path / "nowhere")
    config.write_text(json.dumps(LLAMA_CONFIG))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert ModelSpec.from_folder(tmp_path).eos_token_ids == (2, 7)


def test_layouts_of_several_depths_are_several() -> None:
    """The last norm of an OPT with norms of sums is named by its layer; a cache of layouts must tell them apart."""
    own = {"model_type": "opt", "do_layer_norm_before": False, "word_embed_proj_dim": 24}
    for layers in (2, 3):
        spec = ModelSpec.from_hf(FAMILIES["opt"][2] | own | {"num_hidden_layers": layers})
        name = spec.naming.stored_name("model.norm.weight")
        assert name == f"model.decoder.layers.{layers - 1}.final_layer_norm.weight"


@pytest.mark.parametrize(
    ("config", "generation", "token", "ends"),
    [
        ({}, {}, "<end>", (5,)),
        ({}, None, {"content": "<end>"}, (5,)),
        ({"eos_token_id": None}, None, "<end>", (5,)),
        ({"eos_token_id": 3}, None, "<end>", (3,)),
        ({"eos_token_id": -1}, None, "<end>", ()),
        ({}, {"eos_token_id": 4}, "<end>", (4,)),
        ({}, None, "<other>", (2,)),  # the default of the class
        ({}, None, None, (2,)),
        ({}, {}, "<far>", ()),  # beyond the vocabulary
    ],
)
def test_the_tokenizer_names_the_end_where_no_config_does(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, token: Any, ends: tuple[int, ...]
) -> None:  # fmt: skip
    added = [{"id": 5, "content": "<end>"}, {"id": 10**6, "content": "<far>"}]
    files = {
        "config.json": without(LLAMA_CONFIG, "eos_token_id") | config, "tokenizer.json": {"added_tokens": added},
        "tokenizer_config.json": {"eos_token": token}, "generation_config.json": generation,
    }  # fmt: skip
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert ModelSpec.from_folder(tmp_path).eos_token_ids == ends


@pytest.mark.parametrize(
    ("code", "loads"),
    [
        ({"AutoTokenizer": ["tokenization_x.X", None]}, True),
        ({"AutoConfig": "configuration_llama.LlamaConfig", "AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}, True),
        ({"AutoModelForCausalLM": "owner/name--modeling_llama.LlamaForCausalLM", "AutoTokenizer": "x.Y"}, True),
        ({"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}, False),
        ({"AutoConfig": "configuration_llama.LlamaConfig", "AutoModelForCausalLM": "modeling.Mine"}, False),
        ({"AutoModelForCausalLM": None}, False),
        ("modeling_llama.LlamaForCausalLM", False),
    ],
)  # fmt: skip
def test_code_of_the_reference_s_own_classes_is_the_reference_s(code: Any, loads: bool) -> None:
    config = LLAMA_CONFIG | {"auto_map": code}
    if loads:
        assert ModelSpec.from_hf(config).architecture == "LlamaForCausalLM"
    else:
        with pytest.raises(CheckpointError, match="auto_map"):
            ModelSpec.from_hf(config)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}}, "ModelOpt quantised by 'FP8'"),
        ({"config.json": {"quantization": {"group_size": 64, "bits": 4}, "quantization_config": {"group_size": 64, "bits": 4}}}, "MLX packs weights"),
    ],
)  # fmt: skip
def test_weights_of_other_programs_are_named(tmp_path: Path, files: dict[str, Any], says: str) -> None:
    for name, content in ({"config.json": {}} | files).items():
        own = LLAMA_CONFIG | content if name == "config.json" else content
        (tmp_path / name).write_text(json.dumps(own))
    with pytest.raises(CheckpointError, match=says):
        ModelSpec.from_folder(tmp_path)
