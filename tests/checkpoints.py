"""Tiny random checkpoints of every family and variant, saved by transformers; every test suite uses these.

Contract: the same arguments give the same weights. Nothing here is downloaded. Importing it puts torch on one
thread: models this small gain nothing from more, and on busy cores lose a factor of ten.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

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
# keys that a config.json may leave out
LLAMA_DEFAULTS = """attention_bias head_dim hidden_act mlp_bias num_key_value_heads rms_norm_eps rope_parameters
tie_word_embeddings""".split()
GEMMA2_DEFAULTS = """attention_bias attn_logit_softcapping final_logit_softcapping head_dim hidden_activation layer_types
num_key_value_heads query_pre_attn_scalar rms_norm_eps rope_parameters sliding_window tie_word_embeddings
use_bidirectional_attention""".split()
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ABSENT = object()  # as a key's value: transformers' default, and the key is not in config.json
# every variant of the config that changes the arithmetic: name -> (family, changed keys)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-gqa-tied": ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24, "num_key_value_heads": 2}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-theta-eps": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-3},
    ),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-absent": ("llama", dict.fromkeys(LLAMA_DEFAULTS, ABSENT)),
    "gemma2": ("gemma2", {}),
    "gemma2-no-softcaps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-attention-cap-only": ("gemma2", {"final_logit_softcapping": None}),
    "gemma2-layer-types": ("gemma2", {"layer_types": ["full_attention", *["sliding_attention"] * 3]}),
    "gemma2-untied-biases": ("gemma2", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma2-head-dim": ("gemma2", {"head_dim": 24}),
    "gemma2-silu": ("gemma2", {"hidden_activation": "silu"}),
    "gemma2-absent": ("gemma2", dict.fromkeys(GEMMA2_DEFAULTS, ABSENT)),
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, LLAMA),
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM, GEMMA2),
}


def reference_model(
    family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **keys: Any
) -> transformers.PreTrainedModel:
    """A random model of transformers with eager attention; `keys` change the tiny config."""
    config_class, model_class, base = FAMILIES[family]
    config = config_class(**{key: value for key, value in {**base, **keys}.items() if value is not ABSENT})
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        for name, tensor in model.named_parameters():  # transformers starts norms at 1 and biases at 0
            if name.endswith("bias"):
                torch.nn.init.normal_(tensor, std=0.3)
            elif "norm" in name:
                torch.nn.init.normal_(tensor, mean=1.0 if family == "llama" else 0.0, std=0.2)
    return model.to(dtype).eval()


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
    """Save a tiny random checkpoint; with `tokenizer`, its vocabulary is the tokenizer's."""
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        made = tiny_tokenizer(keys.pop("vocab_size", 384))
        made.save(str(folder / "tokenizer.json"))
        keys["vocab_size"] = made.get_vocab_size()
    model = reference_model(family, seed=seed, dtype=dtype, **keys)
    model.save_pretrained(folder, max_shard_size="40KB" if shards else "1GB")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in config.items() if keys.get(key) is not ABSENT}))
    return folder


def save_variant(folder: Path, name: str, **options: Any) -> Path:
    """Save one of `VARIANTS`."""
    family, keys = VARIANTS[name]
    return save_checkpoint(folder, family, **{**keys, **options})


def tiny_tokenizer(vocab_size: int = 384) -> Tokenizer:
    """A byte-level BPE tokenizer trained on `TEXT`, with <pad>, <s> (put first) and </s> as ids 0, 1, 2."""
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
