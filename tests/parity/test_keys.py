"""Every config key that transformers reads is honoured as transformers honours it, or refused by name.

Each key of the table has another value than its default here, in every family. An absent key has the default
of transformers."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft.errors import CheckpointError
from foredraft.model import config, rope, spec, unsupported
from foredraft.model.families import shared
from foredraft.model.spec import ModelSpec
from foredraft.model.unsupported import ELSEWHERE, ELSEWHERE_IN_ROPE, HARMLESS, NEUTRAL
from recipes.reference_keys import TABLE, table
from tests.parity.mutant_checks import given
from tests.parity.test_logits import Pair, close, decoded, greedy, prompt_logits
from tests.support import variants_hybrids, variants_norms
from tests.support.checkpoints import DEFAULTS, FAMILIES, FULL, ROPES, SLIDING, save_checkpoint
from tests.support.mutation import Mutant, Mutation, assert_caught, defect
from tests.support.mutations import argument, around

PROMPT, NEW = 40, 24  # tokens: more than the windows of the test checkpoints
NOT_HERE = {"dtype", "torch_dtype"}  # test_model_spec.py; other dtypes have other logits
# A value that differs from the default of the class or of the test checkpoints, for every key of the table.
VALUES: dict[str, Any] = {
    **dict.fromkeys(
        """_attn_implementation _attn_implementation_internal _experts_implementation
        _experts_implementation_internal attn_implementation experts_implementation""".split(),
        "eager",
    ),
    **dict.fromkeys(
        """_commit_hash _name_or_path default_rope_type name_or_path transformers_version transformers_weights
        vision_aspect_ratio vision_feature_select_strategy""".split(),
        "elsewhere",
    ),
    **dict.fromkeys("is_causal use_cache".split(), False),
    **dict.fromkeys(
        """_output_attentions allow_global_per_layer_attribute_access attention_bias attention_k_eq_v
        attention_out_bias enable_moe_block gradient_checkpointing is_encoder_decoder mlp_bias
        output_attentions output_hidden_states output_router_logits serialize_explicit_per_layer_config
        tie_word_embeddings use_bidirectional_attention use_double_wide_mlp use_sliding_window""".split(),
        True,
    ),
    **dict.fromkeys("attention_chunk_size global_head_dim".split(), 16),
    **dict.fromkeys(
        """attention_dropout attention_multiplier embd_pdrop partial_rotary_factor resid_pdrop residual_dropout
        residual_multiplier""".split(),
        0.5,
    ),
    **dict.fromkeys(
        """attn_logit_softcapping embedding_multiplier final_logit_softcapping logits_scaling""".split(), 3.0
    ),
    **{key: {"layers.*.mlp": "other"} for key in ("base_model_ep_plan", "base_model_fsdp_plan")},
    **{key: {"hidden_size": 8} for key in ("decoder", "generator", "text_config")},
    **dict.fromkeys("hidden_size_per_layer_input moe_intermediate_size num_attention_heads".split(), 8),
    **dict.fromkeys(
        """no_rope_layer_interval num_global_key_value_heads num_hidden_layers num_kv_shared_layers
        pretraining_tp top_k_experts""".split(),
        2,
    ),
    **dict.fromkeys("max_window_layers num_key_value_heads".split(), 1),
    **dict.fromkeys("num_heads num_labels sliding_window_pattern".split(), 3),
    **dict.fromkeys("chunk_size_feed_forward query_pre_attn_scalar".split(), 7),
    **dict.fromkeys("head_dim hidden_size original_max_position_embeddings".split(), 32),
    "_heterogeneity_spec": {"1": {}},
    "_rope_type_labels": ["other"],
    "architectures": ["LLaMAForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
    "base_model_pp_plan": {"norm": [["a"], ["b"]]},
    "base_model_tp_plan": {"layers.*.mlp": "rowwise"},
    "bos_token_id": 5,
    "configuration_files": ["config.5.0.0.json"],
    "default_theta": 7.0,
    "eos_token_id": [5, 6],
    "fusion_config": {"qkv": True},
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "silu",
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "ignore_keys_at_rope_validation": ["factor"],
    "initializer_range": 0.2,
    "intermediate_size": 48,
    "kv_sharing_modes": ["reuse"] * 3,
    "label2id": {"a": 0, "b": 1, "c": 2},
    "layer_types": [FULL, SLIDING, FULL],
    "max_position_embeddings": 512,
    "mlp_layer_types": ["sparse"] * 3,
    "model_type": "bert",
    "mtp_layer_types": [FULL],
    "no_rope_layers": [0, 1, 1, 0, 1],
    "num_experts": 4,
    "pad_token_id": 9,
    "per_layer_config": {"1": {"intermediate_size": 32}},
    "problem_type": "regression",
    "quantization_config": {"quant_method": "hqq"},
    "return_dict": True,  # with false, transformers cannot run a pass
    "rms_norm_eps": 0.1,
    "rope_local_base_freq": 50.0,
    "rope_parameters": ROPES["linear"],
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "rope_theta": 500.0,
    "sliding_window": PROMPT + NEW,
    "sub_configs_defaults": {"text_config": {}},
    "vision_feature_layer": -2,
    "vocab_size": 101,
    "vocab_size_per_layer_input": 120,
    **variants_norms.KEY_VALUES,
    **variants_hybrids.KEY_VALUES,
}
LISTED = [SLIDING, FULL, *[SLIDING] * 4, FULL]  # a layer of each kind before the last two
GEMMA4: dict[str, Any] = {
    "layer_types": LISTED,
    "per_layer_config": {"5": {"head_dim": 8}, "6": {"head_dim": 8}},
    "rope_parameters": {FULL: ROPES["yarn"], SLIDING: ROPES["linear"]},
    "sliding_window": 16,
    "tie_word_embeddings": False,
    "use_bidirectional_attention": "all",
}
# where a family needs another value
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"layer_types": [FULL, *[SLIDING] * 3], "tie_word_embeddings": False, "num_hidden_layers": 3}
    | {"sliding_window": 16},
    "gemma3": {"layer_types": [FULL, *[SLIDING] * 6], "tie_word_embeddings": False, "num_hidden_layers": 6}
    | {"sliding_window": 16, "rope_parameters": {FULL: ROPES["linear"], SLIDING: ROPES["linear"]}},
    **dict.fromkeys(("gemma4", "gemma4-unified"), GEMMA4),
    "ministral": {"sliding_window": 16},
    "mistral": {"sliding_window": 16},
    **variants_norms.OWN_VALUES,
    **variants_hybrids.OWN_VALUES,
}
OWN["gemma4"] = {**GEMMA4, "use_bidirectional_attention": "vision"}
MORE: dict[str, dict[str, Any]] = {  # keys without which another has no effect
    "max_window_layers": {"use_sliding_window": True, "sliding_window": 16, "layer_types": None},
    "layer_types": {"head_dim": 16},  # in Mistral, transformers needs it
    "num_kv_shared_layers": {"layer_types": LISTED, "hidden_size_per_layer_input": 8},
    "use_double_wide_mlp": {"layer_types": LISTED, "hidden_size_per_layer_input": 8}
    | {"num_kv_shared_layers": 2},
    "use_sliding_window": {"sliding_window": 16, "max_window_layers": 1, "layer_types": None},
    "vocab_size_per_layer_input": {"hidden_size_per_layer_input": 8},
}
TABLES = {family: config.CONFIG_KEYS[each.model_type] for family, (each, _, _) in FAMILIES.items()}
# what Gemma 4's two types share, one function reads
TESTED = {**TABLES, "gemma4-unified": TABLES["gemma4-unified"] - TABLES["gemma4"]}
CASES = [(family, key) for family, keys in TESTED.items() for key in sorted(keys - HARMLESS - NOT_HERE)]


def checked(folder: Path, family: str, keys: dict[str, Any], names: set[str]) -> ModelSpec | None:
    """Return the spec of a config that computes what transformers computes; None where a key among `names` is refused."""
    config_class, model_class, base = FAMILIES[family]
    whole = {"architectures": [model_class.__name__], "model_type": config_class.model_type, **base, **keys}
    try:
        found = ModelSpec.from_hf(copy.deepcopy(whole))
    except CheckpointError as error:
        if any(name in str(error) for name in names):
            return None
        raise
    shaping = {key: value for key, value in keys.items() if key in TABLES[family] - HARMLESS}
    save_checkpoint(folder, family, **copy.deepcopy(shaping))
    (folder / "config.json").write_text(json.dumps(whole))
    pair = Pair(folder)
    tokens = pair.tokens[:, :PROMPT]
    assert close(prompt_logits(pair.runner, tokens), pair.expected[:PROMPT])
    assert decoded(pair.runner, tokens, NEW) == greedy(pair, tokens, NEW)
    return found


def values_of(family: str) -> dict[str, Any]:
    return VALUES | OWN.get(family, {})


@pytest.mark.parametrize(("family", "key"), CASES, ids=str)
def test_a_key_that_transformers_reads_is_honoured_or_refused(tmp_path: Path, family: str, key: str) -> None:
    checked(tmp_path, family, {key: values_of(family)[key], **MORE.get(key, {})}, {key})


@pytest.mark.parametrize("family", FAMILIES)
def test_harmless_keys_change_nothing(tmp_path: Path, family: str) -> None:
    """All of them at once, with the options of `generate` that transformers takes from generation_config.json."""
    read = {"model_type", "bos_token_id", "eos_token_id"}
    keys = {key: values_of(family)[key] for key in TABLES[family] & HARMLESS - read}
    found = checked(tmp_path, family, keys | {"top_k": 3, "bad_words_ids": [[5]]}, set())
    config_class, model_class, base = FAMILIES[family]
    plain = {"architectures": [model_class.__name__], "model_type": config_class.model_type, **base}
    assert found == ModelSpec.from_hf(copy.deepcopy(plain))
    assert found is not None and found.ignored == ()


# Keys of published files and of transformers' own output that transformers does not read.
UNREAD: list[tuple[str, dict[str, Any]]] = [
    *(
        (family, {key: value})
        for family in FAMILIES
        for key, value in {
            "_model_name_or_path": "Smollm2 135M 8k Lc100K Mix1 Ep2",
            "unk_token_id": 0,
            "max_seq_len": 8,
        }.items()
    ),
    ("llama", {"internal_version": "x"}),
    ("llama", {"badwordsids": [[5]]}),
    ("llama", {"use_flash_attn": True}),
    ("llama", {"hyb_act": False}),
    ("llama", {"vision_config": {"hidden_size": 8}, "num_experts": 8, "use_mrope": True}),
    ("llama", {"use_bidirectional_attention": True, "use_sliding_window": True, "qkv_bias": True}),
    ("llama", {"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3], "factor": 4.0}}),
    ("llama", {"rope_scaling": {**ROPES["linear"], "low_freq_factor": 1.0, "finetuned": True}}),
    ("llama", {"rope_parameters": {**ROPES["yarn"], "attn_factor": 0.5, "mrope_section": [2, 3, 3]}}),
    ("qwen3", {"rope_parameters": {**ROPES["yarn"], "attn_factor": 0.878, "beta_fast": 8.0}}),
    ("qwen2", {"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}}),
    ("qwen2", {"attention_bias": True}),
    ("qwen2", {"mlp_bias": True, "use_mrope": True}),
    ("mistral", {"attention_bias": True, "mlp_bias": True, "use_sliding_window": False}),
    ("gemma2", {"hidden_act": "relu", "mlp_bias": True, "sliding_window_pattern": 3}),
    ("gemma3", {"boi_token_index": 5}),
    ("gemma3", {"mm_tokens_per_image": 256, "hidden_act": "relu"}),
    ("gemma3", {"_sliding_window_pattern": 2}),
    ("gemma3", {"original_max_position_embeddings": 32, "rope_scaling": ROPES["yarn"]}),
    ("gemma3", {"rope_scaling": {**ROPES["yarn"], "truncate": False}}),
]


@pytest.mark.parametrize(("family", "keys"), UNREAD, ids=str)
def test_a_key_that_transformers_does_not_read_is_ignored_and_named(
    tmp_path: Path, family: str, keys: dict[str, Any]
) -> None:
    found = checked(tmp_path, family, keys, set())
    assert found is not None
    named = " ".join(found.ignored)
    inner = {key for value in keys.values() if isinstance(value, dict) for key in value}
    for key in {*keys, *inner} - TABLES[family] - {*ROPES["yarn"], "beta_fast", "type", "hidden_size"}:
        assert key in named


def lacking(key: str, keys: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in keys.items() if name != key}


ORIGINAL_KEY, DEFAULT = "original_max_position_embeddings", {"rope_type": "default", "rope_theta": 500.0}
LINEAR, LLAMA3, YARN = (lacking("rope_theta", ROPES[kind]) for kind in ("linear", "llama3", "yarn"))
USED = {"use_sliding_window": True}
# Keys that transformers reads only beside others, or reads in its own way.
TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("llama", {ORIGINAL_KEY: 16}),
    *(
        ("llama", {ORIGINAL_KEY: 16, "rope_scaling": {**rope, "rope_theta": 500.0}})
        for rope in (
            lacking(ORIGINAL_KEY, LLAMA3),
            {"rope_type": "yarn", "factor": 8.0, "truncate": False},
            {"rope_type": "yarn", "factor": None},
            ROPES["linear"],
            ROPES["dynamic"],
        )
    ),
    ("llama", {"rope_scaling": None, "rope_parameters": ROPES["llama3"]}),
    ("llama", {"rope_scaling": {}, "rope_parameters": DEFAULT}),
    ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500.0, "rope_parameters": ROPES["llama3"]}),
    *(
        ("llama", {"rope_scaling": rope, "rope_theta": 700.0})
        for rope in (
            {"type": "llama3", **LLAMA3},
            lacking(ORIGINAL_KEY, YARN),
            {**YARN, "attention_factor": 0.7, "mscale": 2.0, "mscale_all_dim": 1.0},
            {**YARN, "mscale": 2.0, "mscale_all_dim": 1.0},
            {**YARN, "mscale": 2.0},
            {**YARN, **dict.fromkeys(("attention_factor", "mscale", "beta_fast", "beta_slow"))},
            {**YARN, "beta_fast": 8, "beta_slow": 0.5},
            {**YARN, "mscale": 0, "mscale_all_dim": 1.0},
            {**YARN, "mscale": 0.0, "mscale_all_dim": 0, "beta_fast": 0, "beta_slow": 0},
            {**LINEAR, ORIGINAL_KEY: 64, "finetuned": True},
            {"rope_type": "dynamic", "factor": 4.0, ORIGINAL_KEY: 64},
            {**YARN, "factor": None},
            {**YARN, "factor": 0.5},
        )
    ),
    *(
        ("gemma3", keys)
        for keys in (
            {"rope_theta": 500.0, "rope_local_base_freq": 50.0},
            {"rope_scaling": {**LINEAR, "type": "linear"}, "rope_theta": 500.0},
            {"rope_parameters": {FULL: {"type": "linear", "factor": 4.0}}},
            {"rope_parameters": {FULL: LINEAR, SLIDING: DEFAULT}},
            {"rope_parameters": {FULL: {**LINEAR, "rope_theta": 500.0}}, "rope_scaling": None},
            {"rope_parameters": {FULL: None, SLIDING: {"rope_theta": 50.0}}},
            {"rope_parameters": {FULL: LINEAR}, "rope_scaling": LINEAR},
            {"rope_parameters": {FULL: DEFAULT}, "rope_theta": 500.0},
            {"rope_parameters": None, "rope_theta": 500},
            {"sliding_window_pattern": 1, "_sliding_window_pattern": 1},
            {"layer_types": [FULL, *[SLIDING] * 6], "_sliding_window_pattern": 6},
            {"layer_types": None, "sliding_window": 7},
        )
    ),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {**USED, "sliding_window": None, "max_window_layers": 0}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 0}),
    ("qwen3", {**USED, "sliding_window": 7, "max_window_layers": 0}),
    ("qwen3", {**USED, "sliding_window": 7, "layer_types": [SLIDING, FULL, SLIDING]}),
    ("llama", {"architectures": ["LLaMAForCausalLM"]}),
    ("llama", {"sliding_window": 16, "layer_types": [FULL] * 3}),
    ("mistral", {"layer_types": [FULL] * 3, "head_dim": 16}),
    ("gemma3", {"rope_parameters": {FULL: ROPES["yarn"], SLIDING: ROPES["yarn"], "truncate": False}}),
]


@pytest.mark.parametrize(("family", "keys"), TOGETHER, ids=str)
def test_keys_are_honoured_together(tmp_path: Path, family: str, keys: dict[str, Any]) -> None:
    assert checked(tmp_path, family, keys, set()) is not None


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"qwen3_next"}))  # whose default has experts
def test_what_transformers_writes_by_default_is_read(family: str) -> None:
    """The whole config, and the shorter one that `save_pretrained` writes."""
    config = FAMILIES[family][0]()
    for short in (False, True):
        found = ModelSpec.from_hf(json.loads(config.to_json_string(use_diff=short)))
        assert found.ignored in ((), ("_sliding_window_pattern = 6",))


# head counts that the default number of key heads divides, and vocabularies with the default ids of special tokens
HEADS: dict[str, dict[str, Any]] = {
    "exaone4": {"num_attention_heads": 32},
    "gemma": {"num_attention_heads": 16},
    **{family: {"num_attention_heads": 8} for family in ("ministral", "ministral3", "mistral", "seed-oss")},
    "phi3": {"vocab_size": 40_000},
    "smollm3": {"vocab_size": 130_000},
    "stablelm": {"num_attention_heads": 32, "hidden_size": 256},
    "qwen2": {"num_attention_heads": 32, "hidden_size": 128},
    "qwen3": {"num_attention_heads": 32},
}
ALWAYS = ("bos_token_id", "eos_token_id", "max_position_embeddings")
ABSENT = [(family, key) for family, keys in DEFAULTS.items() for key in {*keys, *ALWAYS}]


@pytest.mark.parametrize(("family", "key"), sorted(ABSENT), ids="-".join)
def test_an_absent_key_has_the_default_of_transformers(family: str, key: str) -> None:
    config_class, model_class, base = FAMILIES[family]
    rest = lacking(key, {**base, **HEADS.get(family, {})})
    defaults = config_class(**rest).to_dict()
    own = config_class.attribute_map.get(key, key)
    place = own if own in defaults else "per_layer_config"  # where it writes what it makes of a Gemma 4's
    names = {"architectures": [model_class.__name__]}
    assert ModelSpec.from_hf(names | rest) == ModelSpec.from_hf(names | rest | {place: defaults[place]})


def test_the_texts_of_a_llama_with_a_window_end_with_it() -> None:
    """Longer texts of transformers depend on how the prompt is passed."""
    config = {"model_type": "llama", **FAMILIES["llama"][2]}
    assert ModelSpec.from_hf({**config, "sliding_window": 64}).max_positions == 64
    assert ModelSpec.from_hf({**config, "sliding_window": 4096}).max_positions == 2048


@pytest.mark.heavy
def test_the_table_is_that_of_the_installed_transformers() -> None:
    """If it differs, `python -m recipes.reference_keys` renews it; see then that each new key is understood."""
    assert TABLE.read_text(encoding="utf-8") == table()


def test_no_list_of_keys_has_an_unknown_one() -> None:
    known = frozenset().union(*TABLES.values())
    rotary = frozenset().union(*config.KEYS_BY_ROPE.values())
    assert known | config.GENERATION_KEYS >= HARMLESS
    assert known >= NEUTRAL.keys()
    assert not rotary & ELSEWHERE_IN_ROPE.keys()
    assert not HARMLESS & (ELSEWHERE.keys() | NEUTRAL.keys())
    assert known - NOT_HERE == VALUES.keys()


# --- planted defects ------------------------------------------------------------------------------------


def without(key: str) -> Mutation:
    return lambda sound: lambda read, keys, *rest: sound(read, keys - {key}, *rest)


def check(family: str, keys: dict[str, Any]) -> Callable[[], object]:
    def compare() -> None:
        with tempfile.TemporaryDirectory() as folder:
            checked(Path(folder), family, keys, {*keys})

    return compare


layers_of_one_kind = around(
    lambda windows, read, known, kinds: windows(read, known, kinds) and (known[kinds[0]],) * 3
)
other_positions = around(
    lambda family_of, config: (family_of(config)[0], replace(family_of(config)[1], positions=8192))
)
biases_everywhere = around(
    lambda family_of, config: (
        family_of(config)[0],
        replace(
            (family := family_of(config)[1]),
            own=lambda read: family.fields(read) | {"output_bias": read.flag("attention_bias")},
        ),
    )
)
whole_length_ignored = argument(3, lambda original: None)

ORIGINAL = {key: value for key, value in TOGETHER[1][1].items() if key != "rope_parameters"}
UNTRUNCATED, WINDOWS = TOGETHER[-1][1], {"layer_types": [FULL, SLIDING, FULL], "head_dim": 16}
window_of_a_llama = test_the_texts_of_a_llama_with_a_window_end_with_it
positions_of_a_llama = functools.partial(
    test_an_absent_key_has_the_default_of_transformers, "llama", "max_position_embeddings"
)
IGNORED = (
    *((family, "is_causal", False) for family in ("llama", "qwen2", "gemma2")),
    ("llama", "attention_chunk_size", 16),
)
MUTANTS = [
    *(
        defect(
            f"{key} ignored in {family}", unsupported.check_unread, without(key), check(family, {key: value})
        )
        for family, key, value in IGNORED
    ),
    defect(
        "length of the whole config ignored",
        rope._read_one,
        whole_length_ignored,
        check("llama", ORIGINAL),
    ),
    defect(
        "truncate of Gemma 3 ignored", rope._by_channel, given(truncate=True), check("gemma3", UNTRUNCATED)
    ),
    defect(
        "the window of a Llama's cache ignored",
        shared.longest,
        lambda longest: lambda read: read.seen.add("sliding_window"),
        window_of_a_llama,
    ),
    defect(
        "attention_bias of Qwen 2 honoured",
        spec._family,
        biases_everywhere,
        check("qwen2", {"attention_bias": True}),
        CheckpointError,
    ),
    defect(
        "layer_types of Mistral ignored", shared.read_windows, layers_of_one_kind, check("mistral", WINDOWS)
    ),
    defect("default positions of another family", spec._family, other_positions, positions_of_a_llama),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
