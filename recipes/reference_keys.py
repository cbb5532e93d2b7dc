"""Make the table of the config keys that `transformers` reads: `src/foredraft/model/reference_keys.json`.

A key is read if `transformers` asks for it while a model of that type is loaded, runs a pass and generates,
whether the config has it or not; or if the config class declares it, or takes it from its keyword arguments.
Names that are asked for one after another, because the config has them, do not count.

    python -m recipes.reference_keys
"""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

TABLE = Path(__file__).parents[1] / "src" / "foredraft" / "model" / "reference_keys.json"
MODEL_TYPES = (
    "cohere2 exaone4 gemma gemma2 gemma3_text gemma4_text gemma4_unified_text glm4 gpt2 "
    "gpt_neox granite granitemoehybrid lfm2 llama ministral ministral3 mistral nemotron_h olmo2 olmo3 opt "
    "phi phi3 qwen2 qwen3 qwen3_5_text qwen3_next seed_oss smollm3 stablelm starcoder2"
).split()
LENGTH = 40  # tokens of the pass: more than TRAINED, so that dynamic scaling takes part
TRAINED = 32
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": TRAINED,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
UNROTATED = {"gpt2", "opt"}  # their learned positions end with the trained length
WIDER = {"hidden_size": 32, "head_dim": 16}  # where a quarter of each head is rotated
OWN_SIZES = {
    **dict.fromkeys(("gpt_neox", "qwen3_5_text", "qwen3_next", "stablelm"), WIDER),
    **{model_type: {"max_position_embeddings": 2 * LENGTH} for model_type in UNROTATED},
}
# The configs that run: between them, every branch on a key of these families is taken.
VARIANTS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1, "sliding_window_pattern": 2},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
]
OWN_VARIANTS: dict[str, list[dict[str, Any]]] = {
    "mistral": [{"sliding_window": None}],
    "lfm2": [{"full_attn_idxs": [1, 3]}],
    "smollm3": [{"no_rope_layers": [0, 1, 1, 1, 1, 1], "use_sliding_window": True, "sliding_window": 8}],
}
GROWTH = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
_GEMMA4: list[dict[str, Any]] = [
    {"sliding_window": 8, "global_head_dim": 8},
    {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 16},
    {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 5.0}
    | {"layer_types": ["sliding_attention", "full_attention"] * 3},
]
# of a type whose class refuses some of `VARIANTS`: all that it runs
ONLY: dict[str, list[dict[str, Any]]] = {
    "gemma4_text": [
        {"vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": size, **keys}
        for keys, size in zip(_GEMMA4, (0, 4, 4), strict=True)
    ],
    "gemma4_unified_text": _GEMMA4,
    "ministral3": [
        {},
        {"sliding_window": 8},
        *(
            {**each, "rope_scaling": {**each["rope_scaling"], **GROWTH}}
            for each in VARIANTS
            if "rope_scaling" in each
        ),
    ],
    "granitemoehybrid": [
        {"mamba_n_heads": 2, "layer_types": ["mamba", "attention"] * 3, **keys}
        for keys in ({}, {"num_local_experts": 0, "position_embedding_type": "rope"})
    ],
    "nemotron_h": [
        {
            "mamba_num_heads": 2,
            "n_groups": 1,
            "ssm_state_size": 8,
            "hybrid_override_pattern": "M-*E*M",
            "n_routed_experts": 2,
            "moe_intermediate_size": 8,
            "moe_shared_expert_intermediate_size": 8,
        },
    ],
    "phi3": [{}, {"sliding_window": 8}, {"rope_scaling": LONG, "original_max_position_embeddings": 16}],
}
# Types whose classes ask their rotary parameters for more than the computation of a scaling type does. What
# they ask for counts only for scaling types that no other class has run.
MORE_IN_ROPE = ("ministral3", "phi3", "qwen3_5_text")
SCALINGS = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")
LAYERS = "by layer"  # rotary parameters that hold those of each kind of layer
# functions that ask for every key that the config has, or only look for options of `generate`
EXHAUSTIVE = {"validate_token_ids", "_get_generation_parameters"}
CONSTRUCTORS = ("__post_init__", "convert_rope_params_to_dict")


class Recorder:
    """Records which keys `transformers` asks for."""

    def __init__(self, rope: defaultdict[str, set[str]]) -> None:
        self.config: set[str] = set()  # keys of the config and its file
        self.rope = rope  # keys of rotary parameters, by their type

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record within the block."""
        ask, read = PreTrainedConfig.__getattribute__, vars(PreTrainedConfig)["_dict_from_json_file"].__func__

        def asked(config: PreTrainedConfig, key: str) -> Any:
            caller = sys._getframe(1)
            while caller.f_code.co_name == "__getattribute__" and caller.f_back is not None:
                caller = caller.f_back
            if caller.f_code.co_name not in EXHAUSTIVE and _may_be_key(config, key):
                self.config.add(key)
            value = ask(config, key)
            if key == "rope_parameters" and type(value) is dict:
                value = config.__dict__[key] = _Parameters(self.rope, value)
            return value

        def from_file(cls: type[PreTrainedConfig], file: str) -> dict[str, Any]:
            return _Asked(self.config, read(cls, file))

        with (
            patch.object(PreTrainedConfig, "__getattribute__", asked),
            patch.object(PreTrainedConfig, "_dict_from_json_file", classmethod(from_file)),
        ):
            yield


def _recording(name: str) -> Any:
    """Return the method of a dictionary, which records the key."""

    def asked(self: _Asked, key: str, *given: Any) -> Any:
        self.record(key)
        return getattr(dict, name)(self, key, *given)

    return asked


class _Asked(dict[str, Any]):
    """A JSON object that records the keys that it is asked for; copies are plain."""

    def __init__(self, found: set[str], content: dict[str, Any]) -> None:
        super().__init__(content)
        self.found = found

    def record(self, key: str) -> None:
        self.found.add(key)

    __getitem__ = _recording("__getitem__")
    __contains__ = _recording("__contains__")
    get, setdefault, pop = _recording("get"), _recording("setdefault"), _recording("pop")

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return json.loads(json.dumps(self))  # type: ignore[no-any-return]


class _Parameters(_Asked):
    """Rotary parameters; what they are asked for counts for their type."""

    def __init__(self, found: defaultdict[str, set[str]], content: dict[str, Any]) -> None:
        inner = {
            key: _Parameters(found, value) if type(value) is dict else value for key, value in content.items()
        }
        super().__init__(set(), inner)
        self.by_type = found

    def record(self, key: str) -> None:
        nested = any(isinstance(value, dict) for value in self.values())
        kind = dict.get(self, "rope_type") or dict.get(self, "type") or "default"
        self.by_type[LAYERS if nested else kind].add(key)


def _may_be_key(config: PreTrainedConfig, name: str) -> bool:
    """Return whether a key of a file can set the attribute: methods and computed properties are none."""
    found = inspect.getattr_static(type(config), name, None)
    computed = isinstance(found, property) and found.fset is None
    return not name.startswith("__") and not computed and not callable(getattr(type(config), name, None))


def _taken(config_class: type[PreTrainedConfig]) -> set[str]:
    """Return the names that the constructors of a class and its bases take from their keyword arguments."""
    names: set[str] = set()
    functions = [vars(each).get(name) for each in config_class.__mro__ for name in CONSTRUCTORS]
    for function in filter(None, functions):
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name("kwargs"), attr="get" | "pop"),
                    args=[ast.Constant(str(name)), *_],
                ):
                    names.add(name)
                case ast.Compare(ast.Constant(str(name)), [ast.In()], [ast.Name("kwargs")]):
                    names.add(name)
    return names


def keys_of(model_type: str, rope: defaultdict[str, set[str]]) -> set[str]:
    """Return the keys of a config.json that a model type reads; `rope` takes those of rotary parameters."""
    recorder = Recorder(rope)
    config_class = type(transformers.AutoConfig.for_model(model_type))
    sizes = SIZES | OWN_SIZES.get(model_type, {})
    for variant in ONLY.get(model_type) or VARIANTS + OWN_VARIANTS.get(model_type, []):
        if model_type in UNROTATED and "rope_scaling" in variant:
            continue
        with tempfile.TemporaryDirectory() as folder:
            config = config_class(**json.loads(json.dumps(sizes | variant)))
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            file = Path(folder) / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | variant))
            with recorder.recording():
                model = AutoModelForCausalLM.from_pretrained(folder).eval()
                tokens = torch.full((1, LENGTH), 3)
                model(tokens)
                model.generate(
                    tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=2, do_sample=False
                )
    declared = {field.name for field in fields(config_class)}
    return recorder.config | declared | _taken(config_class)


def table() -> str:
    """Return the content of the table's file."""
    rope, more = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    keys = {
        model_type: keys_of(model_type, more if model_type in MORE_IN_ROPE else rope)
        for model_type in MODEL_TYPES
    }
    rope = more | rope
    shared = set.intersection(*keys.values())
    content = {
        "transformers": transformers.__version__,
        "shared": sorted(shared),
        "config": {model_type: sorted(found - shared) for model_type, found in keys.items()},
        "rope": {kind: sorted(rope[kind]) for kind in SCALINGS},
        "generation": sorted(vars(GenerationConfig())),
    }
    return json.dumps(content, indent=1) + "\n"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    TABLE.write_text(table(), encoding="utf-8")
    print(TABLE)
