"""Save tiny random checkpoints of every family and variant with transformers, for all tests.

Contract: the same arguments give the same weights, and nothing is downloaded. Importing this module limits torch
to one thread: models this small gain nothing from more, and are ten times slower with them on busy cores.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.support import variants_gemma4, variants_llama_like, variants_norms
from tests.support.variants_llama_like import ABSENT, FULL, SLIDING

torch.set_num_threads(1)

TEXT = """The drafter guesses a few tokens ahead; the target checks all of them in one forward pass.
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Voix ambiguë d'un cœur qui préfère.
いろはにほへと ちりぬるを。 Съешь ещё этих мягких французских булок, да выпей чаю. 🙂👍🏽👩‍👩‍👧 1234567890
def accept(draft, p, q): return [x for x in draft if u * q[x] < p[x]]
"""

LLAMA: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
MISTRAL: dict[str, Any] = {**LLAMA, "num_key_value_heads": 2, "sliding_window": 24}
QWEN2: dict[str, Any] = {**LLAMA, "num_key_value_heads": 2}
QWEN3: dict[str, Any] = {**QWEN2, "head_dim": 24}
GEMMA2: dict[str, Any] = {
    **LLAMA,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 24,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 8.0,
    "pad_token_id": 0,
}
GEMMA3: dict[str, Any] = {
    **{key: value for key, value in GEMMA2.items() if "softcapping" not in key},
    "num_hidden_layers": 7,  # so that the sixth has full attention
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, LLAMA),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, MISTRAL),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, QWEN2),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, QWEN3),
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM, GEMMA2),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM, GEMMA3),
    **variants_gemma4.FAMILIES,
    **variants_norms.FAMILIES,
    **variants_llama_like.FAMILIES,
}
UNROTATED = variants_norms.UNROTATED  # families without rotary embeddings
NESTED = {"gemma3", *variants_norms.NESTED}  # families with rotary parameters for each kind of layer
# config keys that have a default
DEFAULTS: dict[str, list[str]] = {
    "llama": """attention_bias head_dim hidden_act mlp_bias num_key_value_heads rms_norm_eps rope_parameters
        tie_word_embeddings""".split(),
    "mistral": """head_dim hidden_act num_key_value_heads rms_norm_eps rope_parameters sliding_window
        tie_word_embeddings""".split(),
    "qwen2": """hidden_act layer_types max_window_layers num_key_value_heads rms_norm_eps rope_parameters
        sliding_window tie_word_embeddings use_sliding_window""".split(),
    "qwen3": """attention_bias head_dim hidden_act layer_types max_window_layers num_key_value_heads rms_norm_eps
        rope_parameters sliding_window tie_word_embeddings use_sliding_window""".split(),
    "gemma2": """attention_bias attn_logit_softcapping final_logit_softcapping head_dim hidden_activation
        layer_types num_key_value_heads query_pre_attn_scalar rms_norm_eps rope_parameters sliding_window
        tie_word_embeddings use_bidirectional_attention""".split(),
    "gemma3": """attention_bias attn_logit_softcapping final_logit_softcapping head_dim hidden_activation
        layer_types num_key_value_heads query_pre_attn_scalar rms_norm_eps rope_parameters sliding_window
        tie_word_embeddings use_bidirectional_attention""".split(),
    **variants_gemma4.DEFAULTS,
    **variants_llama_like.DEFAULTS,
    **variants_norms.DEFAULTS,
}
IN_ROPE = variants_llama_like.IN_ROPE
UNSCALED = {*variants_llama_like.UNSCALED, *UNROTATED, *variants_gemma4.FAMILIES}
SCALED = [family for family in FAMILIES if family not in UNSCALED]
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0},  # of the 48 positions in TRAINED
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
LLAMA3_ROPE = ROPES["llama3"]
TRAINED = {"dynamic": {"max_position_embeddings": 48}}  # so that test texts exceed it


def _scaled(family: str, kind: str, **keys: Any) -> dict[str, Any]:
    """Return the config keys of a variant with RoPE scaling; `keys` are further keys of the scaling."""
    rope = ROPES[kind] | keys | IN_ROPE.get(family, {})
    local = {"rope_type": "default", "rope_theta": 50.0}
    nested = {FULL: rope, SLIDING: local} if family in NESTED else rope
    return {"rope_parameters": nested, **TRAINED.get(kind, {})}


# every config variant that changes the arithmetic: its family, and the keys that differ from the base
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-gqa-tied": ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24, "num_key_value_heads": 2}),
    "llama-theta-eps": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-3},
    ),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-yarn-untruncated": (
        "llama",
        _scaled("llama", "yarn", truncate=False, beta_fast=16.0, beta_slow=2.0),
    ),
    "llama-yarn-attention-factor": ("llama", _scaled("llama", "yarn", attention_factor=0.8)),
    "llama-yarn-mscale": ("llama", _scaled("llama", "yarn", mscale=2.0, mscale_all_dim=0.5)),
    "llama-old-rope": (
        "llama",
        {
            "rope_parameters": ABSENT,
            "rope_theta": 500.0,
            "rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
        },
    ),
    "llama-absent": ("llama", {}),
    "mistral": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "mistral-head-dim-tied": ("mistral", {"head_dim": 24, "tie_word_embeddings": True}),
    "mistral-theta-eps": (
        "mistral",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-3},
    ),
    "mistral-gelu": ("mistral", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral-layer-types": (
        "mistral",
        {"head_dim": 16, "layer_types": [SLIDING, FULL, SLIDING]},  # transformers needs head_dim here
    ),
    "mistral-absent": ("mistral", {"num_attention_heads": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": (
        "qwen2",
        {"layer_types": ABSENT, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen2-windows-off": (
        "qwen2",
        {"layer_types": ABSENT, "use_sliding_window": False, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen2-every-window": (
        "qwen2",
        {"layer_types": ABSENT, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0},
    ),
    "qwen2-layer-types": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "layer_types": [SLIDING, FULL, SLIDING]},
    ),
    "qwen2-gelu-head-dim": ("qwen2", {"hidden_act": "gelu_pytorch_tanh", "head_dim": 24}),
    "qwen2-theta-eps": (
        "qwen2",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-3},
    ),
    "qwen2-absent": ("qwen2", {"hidden_size": 128, "num_attention_heads": 32}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-windows": (
        "qwen3",
        {"layer_types": ABSENT, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3-layer-types": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 24, "layer_types": [SLIDING, FULL, SLIDING]},
    ),
    "qwen3-theta-eps": (
        "qwen3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-1},
    ),
    "qwen3-gelu": ("qwen3", {"hidden_act": "gelu_pytorch_tanh"}),
    "qwen3-absent": ("qwen3", {"num_attention_heads": 32}),
    "gemma2": ("gemma2", {}),
    "gemma2-no-softcaps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-attention-cap-only": ("gemma2", {"final_logit_softcapping": None}),
    "gemma2-layer-types": ("gemma2", {"layer_types": [FULL, *[SLIDING] * 3]}),
    "gemma2-untied-biases": ("gemma2", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma2-head-dim": ("gemma2", {"head_dim": 24}),
    "gemma2-silu": ("gemma2", {"hidden_activation": "silu"}),
    "gemma2-absent": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
    "gemma3-pattern": ("gemma3", {"sliding_window_pattern": 3, "layer_types": ABSENT}),
    "gemma3-default-pattern": ("gemma3", {"layer_types": ABSENT, "_sliding_window_pattern": ABSENT}),
    "gemma3-old-rope": (
        "gemma3",
        {
            "rope_parameters": ABSENT,
            "rope_theta": 500.0,
            "rope_local_base_freq": 50.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    "gemma3-layer-types": ("gemma3", {"layer_types": [FULL, *[SLIDING] * 5, FULL]}),
    "gemma3-thetas": (
        "gemma3",
        {
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 500.0},
                SLIDING: {"rope_type": "default", "rope_theta": 50.0},
            }
        },
    ),
    "gemma3-local-linear": (
        "gemma3",
        {"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 500.0}, SLIDING: ROPES["linear"]}},
    ),
    "gemma3-untied-biases": ("gemma3", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma3-head-dim-scalar": ("gemma3", {"head_dim": 24, "query_pre_attn_scalar": 7}),
    "gemma3-logit-cap": ("gemma3", {"final_logit_softcapping": 8.0}),
    "gemma3-silu": ("gemma3", {"hidden_activation": "silu", "rms_norm_eps": 1e-1}),
    "gemma3-absent": ("gemma3", {}),
    **variants_gemma4.variants(ABSENT),
    **variants_llama_like.VARIANTS,
    **variants_norms.VARIANTS,
}
VARIANTS |= {f"{family}-{kind}": (family, _scaled(family, kind)) for family in SCALED for kind in ROPES}
for _family, _keys in DEFAULTS.items():
    VARIANTS[f"{_family}-absent"][1].update(dict.fromkeys(_keys, ABSENT))


def reference_model(
    family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **keys: Any
) -> transformers.PreTrainedModel:
    """Return a random model of transformers with eager attention; `keys` change its tiny config."""
    config_class, model_class, base = FAMILIES[family]
    given = {key: value for key, value in {**base, **keys}.items() if value is not ABSENT}
    config = config_class(**copy.deepcopy(given))  # transformers adds keys to rotary parameters
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        for name, tensor in model.named_parameters():  # transformers initialises norms to 1 and biases to 0
            if name.endswith("bias"):
                torch.nn.init.normal_(tensor, std=0.3)
            elif "norm" in name or "ln_" in name:
                offset = family.startswith("gemma") and family not in variants_gemma4.FAMILIES
                torch.nn.init.normal_(tensor, mean=0.0 if offset else 1.0, std=0.2)
        if family in variants_gemma4.FAMILIES:
            variants_gemma4.fill(model)
    return model.to(dtype).eval()


def layers_of(model: Any) -> tuple[Any, str]:
    """Return which module of a model of transformers holds the list of layers, and its name there."""
    body = next(each for each in model.children() if len([*each.children()]) > 1 or hasattr(each, "decoder"))
    body = getattr(body, "decoder", body)
    return body, "h" if hasattr(body, "h") else "layers"


def save_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: bool = False,
    tokenizer: bool = False,
    **keys: Any,
) -> Path:
    """Save a tiny random checkpoint; with `tokenizer`, also a tokenizer of the same vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        trained = tiny_tokenizer(keys.pop("vocab_size", 384))
        trained.save(str(folder / "tokenizer.json"))
        keys["vocab_size"] = trained.get_vocab_size()
    model = reference_model(family, seed=seed, dtype=dtype, **keys)
    model.save_pretrained(folder, max_shard_size="40KB" if shards else "1GB")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    written = {**config, **keys}  # keys as given, not as transformers rewrites them
    file.write_text(json.dumps({key: value for key, value in written.items() if value is not ABSENT}))
    return folder


def save_pair(folder: Path) -> Path:
    """Save `big` and `small`, a target and a draft model with one tokenizer and no end-of-text id."""
    save_checkpoint(folder / "big", tokenizer=True, seed=1, eos_token_id=None)
    save_checkpoint(folder / "small", tokenizer=True, seed=2, eos_token_id=None, num_hidden_layers=1)
    return folder


def save_variant(folder: Path, name: str, **options: Any) -> Path:
    """Save the checkpoint of one of `VARIANTS`."""
    family, keys = VARIANTS[name]
    return save_checkpoint(folder, family, **{**keys, **options})


def tiny_tokenizer(vocab_size: int = 384) -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on `TEXT`; <pad>, <s> and </s> are ids 0 to 2, <s> is prepended."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer
