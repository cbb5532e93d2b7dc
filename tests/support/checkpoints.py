"""Save tiny random checkpoints of every family and variant with transformers: the same arguments give the same weights.

Importing this module limits torch to one thread: models this small are ten times slower with more on busy cores.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.support import variants_hybrids, variants_llama_like, variants_norms
from tests.support.variants_llama_like import ABSENT, FULL, GROUPED, SLIDING, TIED, UNTIED, WIDE

GEMMA4_FAMILIES = variants_llama_like.GEMMA4_FAMILIES
GELU, WINDOWS = variants_llama_like.GELU, variants_llama_like.WINDOWS
outside, theta_eps = variants_llama_like.outside, variants_llama_like.theta_eps
torch.set_num_threads(1)

TEXT = """The drafter guesses a few tokens ahead; the target checks all of them in one forward pass.
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Voix ambiguë d'un cœur qui préfère.
いろはにほへと ちりぬるを。 Съешь ещё этих мягких французских булок, да выпей чаю. 🙂👍🏽👩‍👩‍👧 1234567890
def accept(draft, p, q): return [x for x in draft if u * q[x] < p[x]]
"""

LLAMA: dict[str, Any] = {**WIDE, "num_key_value_heads": 4}
MISTRAL: dict[str, Any] = {**GROUPED, "sliding_window": 24}
QWEN3: dict[str, Any] = {**GROUPED, "head_dim": 24}
GEMMA3: dict[str, Any] = {
    **MISTRAL,
    "num_hidden_layers": 7,  # so that the sixth has full attention
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "pad_token_id": 0,
}
SOFTCAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}
GEMMA2: dict[str, Any] = {**GEMMA3, "num_hidden_layers": 4, **SOFTCAPS}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, LLAMA),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, MISTRAL),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, GROUPED),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, QWEN3),
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM, GEMMA2),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM, GEMMA3),
    **variants_norms.FAMILIES,
    **variants_llama_like.FAMILIES,
    **GEMMA4_FAMILIES,
    **variants_hybrids.FAMILIES,
}
HYBRIDS = variants_hybrids.FAMILIES.keys()
ATTENDING = [family for family in FAMILIES if family not in HYBRIDS]  # whose own layers draft, and train
UNROTATED = variants_norms.UNROTATED  # families without rotary embeddings
NESTED = {"gemma3", *variants_norms.NESTED}  # families with rotary parameters for each kind of layer
_GEMMA = """attention_bias attn_logit_softcapping final_logit_softcapping head_dim hidden_activation
    layer_types num_key_value_heads query_pre_attn_scalar rms_norm_eps rope_parameters sliding_window
    tie_word_embeddings use_bidirectional_attention""".split()
# config keys that have a default
_DEFAULTS = {
    "llama": "attention_bias head_dim mlp_bias",
    "mistral": "head_dim sliding_window",
    "qwen2": "layer_types max_window_layers sliding_window use_sliding_window",
    "qwen3": "attention_bias head_dim layer_types max_window_layers sliding_window use_sliding_window",
}
DEFAULTS = {
    **variants_llama_like.together(variants_llama_like.COMMON, _DEFAULTS),
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    **variants_llama_like.DEFAULTS,
    **variants_norms.DEFAULTS,
    **variants_hybrids.DEFAULTS,
}
IN_ROPE = variants_llama_like.IN_ROPE
UNSCALED = {*variants_llama_like.UNSCALED, *UNROTATED}
SCALED = [family for family in FAMILIES if family not in UNSCALED]
ORIGINAL = {"factor": 8.0, "original_max_position_embeddings": 64}
FREQUENCIES = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0},  # of the 48 positions in TRAINED
    "yarn": {"rope_type": "yarn", "rope_theta": 500.0, **ORIGINAL},
    "llama3": {"rope_type": "llama3", "rope_theta": 500.0, **ORIGINAL, **FREQUENCIES},
}
LLAMA3_ROPE = ROPES["llama3"]
THETA, LOCAL_THETA = ({"rope_type": "default", "rope_theta": theta} for theta in (500.0, 50.0))
TRAINED = {"dynamic": {"max_position_embeddings": 48}}  # so that test texts exceed it


def _scaled(family: str, kind: str, **keys: Any) -> dict[str, Any]:
    rope = ROPES[kind] | keys | IN_ROPE.get(family, {})
    nested = {FULL: rope, SLIDING: LOCAL_THETA} if family in NESTED else rope
    return {"rope_parameters": nested, **TRAINED.get(kind, {})}


OFF = {**WINDOWS, "use_sliding_window": False}
# family -> the end of a variant's name -> the keys that differ from the base, as in `variants_llama_like`
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "gqa-tied": {"num_key_value_heads": 2, **TIED},
        "mqa": {"num_key_value_heads": 1},
        "biases": {"attention_bias": True, "mlp_bias": True},
        "head-dim": {"head_dim": 24, "num_key_value_heads": 2},
        "theta-eps": theta_eps(1e-3),
        "gelu": GELU,
        "yarn-untruncated": _scaled("llama", "yarn", truncate=False, beta_fast=16.0, beta_slow=2.0),
        "yarn-attention-factor": _scaled("llama", "yarn", attention_factor=0.8),
        "yarn-mscale": _scaled("llama", "yarn", mscale=2.0, mscale_all_dim=0.5),
        "old-rope": outside(rope_scaling={"type": "yarn", **ORIGINAL}),
    },
    "mistral": {
        "no-window": {"sliding_window": None},
        "head-dim-tied": {"head_dim": 24, **TIED},
        "theta-eps": theta_eps(1e-3),
        "gelu": GELU,
        # transformers needs head_dim here
        "layer-types": {"head_dim": 16, "layer_types": [SLIDING, FULL, SLIDING]},
        "absent": {"num_attention_heads": 8},
    },
    "qwen2": {
        "tied": TIED,
        "windows": {**WINDOWS, "layer_types": ABSENT, "max_window_layers": 1},
        "windows-off": {**OFF, "layer_types": ABSENT, "max_window_layers": 1},
        "every-window": {**WINDOWS, "layer_types": ABSENT, "max_window_layers": 0},
        "layer-types": {**WINDOWS, "layer_types": [SLIDING, FULL, SLIDING]},
        "gelu-head-dim": {**GELU, "head_dim": 24},
        "theta-eps": theta_eps(1e-3),
        "absent": {"hidden_size": 128, "num_attention_heads": 32},
    },
    "qwen3": {
        "tied": TIED,
        "biases": {"attention_bias": True},
        "windows": {**WINDOWS, "layer_types": ABSENT, "max_window_layers": 1},
        "layer-types": {**WINDOWS, "layer_types": [SLIDING, FULL, SLIDING]},
        "theta-eps": theta_eps(1e-1),
        "gelu": GELU,
        "absent": {"num_attention_heads": 32},
    },
    "gemma2": {
        "no-softcaps": dict.fromkeys(SOFTCAPS),
        "attention-cap-only": {"final_logit_softcapping": None},
        "layer-types": {"layer_types": [FULL, *[SLIDING] * 3]},
        "untied-biases": {**UNTIED, "attention_bias": True},
        "head-dim": {"head_dim": 24},
        "silu": {"hidden_activation": "silu"},
    },
    "gemma3": {
        "pattern": {"sliding_window_pattern": 3, "layer_types": ABSENT},
        "default-pattern": {"layer_types": ABSENT, "_sliding_window_pattern": ABSENT},
        "old-rope": outside(rope_local_base_freq=50.0, rope_scaling={"rope_type": "linear", "factor": 4.0}),
        "layer-types": {"layer_types": [FULL, *[SLIDING] * 5, FULL]},
        "thetas": {"rope_parameters": {FULL: THETA, SLIDING: LOCAL_THETA}},
        "local-linear": {"rope_parameters": {FULL: THETA, SLIDING: ROPES["linear"]}},
        "untied-biases": {**UNTIED, "attention_bias": True},
        "head-dim-scalar": {"head_dim": 24, "query_pre_attn_scalar": 7},
        "logit-cap": {"final_logit_softcapping": 8.0},
        "silu": {"hidden_activation": "silu", "rms_norm_eps": 1e-1},
    },
    **variants_llama_like.CHANGES,
    **variants_norms.CHANGES,
    **variants_hybrids.CHANGES,
}
# every config variant that changes the arithmetic: its family, and the keys that differ from the base
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {}
for _family, _changes in CHANGES.items():
    _absent = _changes.pop("absent", {}) | dict.fromkeys(DEFAULTS[_family], ABSENT)
    for _end, _keys in {"": {}, **_changes, "absent": _absent}.items():
        VARIANTS["-".join(filter(None, [_family, _end]))] = _family, _keys
VARIANTS |= {f"{family}-{kind}": (family, _scaled(family, kind)) for family in SCALED for kind in ROPES}


def reference_model(
    family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **keys: Any
) -> transformers.PreTrainedModel:
    config_class, model_class, base = FAMILIES[family]
    given = {key: value for key, value in {**base, **keys}.items() if value is not ABSENT}
    config = config_class(**copy.deepcopy(given))  # transformers adds keys to rotary parameters
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        for name, tensor in model.named_parameters():  # transformers initialises norms to 1 and biases to 0
            if family in HYBRIDS:
                continue
            if name.endswith("bias"):
                torch.nn.init.normal_(tensor, std=0.3)
            elif "norm" in name or "ln_" in name:
                offset = family.startswith("gemma") and family not in GEMMA4_FAMILIES
                torch.nn.init.normal_(tensor, mean=0.0 if offset else 1.0, std=0.2)
        if family in HYBRIDS:
            variants_hybrids.fill(model)
        if family in GEMMA4_FAMILIES:
            variants_llama_like.fill_gemma4(model)
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
    family, keys = VARIANTS[name]
    return save_checkpoint(folder, family, **{**keys, **options})


def tiny_tokenizer(vocab_size: int = 384) -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on `TEXT`; <pad>, <s> and </s> are ids 0 to 2, <s> is prepended."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    start = {
        "special_tokens": ["<pad>", "<s>", "</s>"],
        "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(),
    }
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **start)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


# A model of one layer, whose embedding and head are half a tebibyte each in 16 bits.
SPARSE: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 2**15, "head_dim": 16, "intermediate_size": 32,
}  # fmt: skip
SPARSE_WORDS = 2**23


def save_sparse(folder: Path) -> Path:
    """Save a model that is larger than any machine's memory: files with valid headers, and holes for values."""
    save_checkpoint(folder, dtype=torch.bfloat16, tokenizer=True, **SPARSE)
    config = json.loads((folder / "config.json").read_text())
    shapes = {}
    with safe_open(folder / "model.safetensors", "pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - safe_open offers no iteration
            rows, *columns = opened.get_slice(name).get_shape()
            shapes[name] = (SPARSE_WORDS if rows == config["vocab_size"] else rows, *columns)
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": SPARSE_WORDS}))
    write_sparse(folder / "model.safetensors", shapes)
    return folder


def write_sparse(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    at, header = 0, {}
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    file.unlink(missing_ok=True)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + at)
