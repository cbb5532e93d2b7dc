"""Turn the metadata of a GGUF file into the `config.json` that the model had.

Contract: every key of the architecture is read, has a neutral value, or is refused, because a model that
ignores a key is another model. What the file does not say is what llama.cpp assumes. Numbers that the file
holds as float32 become the shortest decimals that stand for them, so 1e-5 is 1e-5 again.

Sources: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py for what is written, and
https://github.com/ggml-org/llama.cpp/tree/master/src/models for what llama.cpp assumes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from foredraft.model.config import ConfigReader
from foredraft.model.gguf import gemma4_config, llama_like, norms_config
from foredraft.model.gguf.names import ROPE_FACTORS, model_name
from foredraft.model.gguf.parts import GGUFModel
from foredraft.model.gguf.tensors import PLAIN, stored_values
from foredraft.model.quantisation.gguf import METHOD, TENSORS
from foredraft.model.rope import Rope, frequencies
from foredraft.model.unsupported import refusal_of_gguf

__all__ = ["ARCHITECTURES", "config_of", "generation_of"]

FULL, SLIDING = "full_attention", "sliding_attention"
CONVERT_AGAIN = "convert the model again, or give its checkpoint folder"
PARTLY_ROTATED = (
    "glm4",
    "gptneox",
    "phi2",
    "phi3",
    "stablelm",
)  # architectures that may rotate a part of each head
BY_LAYER = {"gemma4": gemma4_config.BY_LAYER}  # architecture -> the sizes that it may give as lists
HARMLESS = ("tensor_data_layout", "rope.scaling.finetuned")
# keys that change what a forward computes, except with this value
NEUTRAL: dict[str, object] = {
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.attn_factor": 1.0,
    "use_parallel_residual": False,
}
# values of general.type, besides "model" (`GGUFType` in
# https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py)
OTHER_KINDS = {
    "mmproj": "the vision part of a model (mmproj)",
    "adapter": "an adapter for a model (LoRA)",
    "imatrix": "an importance matrix (imatrix), made for quantising a model",
}
# sampling settings of a file -> their names in generation_config.json, where these differ
SAMPLING, RENAMED = "general.sampling.", {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
# Layers of the Gemma models with 27 billion weights. Their attention scale is not that of the smaller ones,
# and the file does not say it.
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
THETA = 10_000.0  # RoPE's base where the file does not say
# Llama 3.1's RoPE factors come as a tensor alone. These parameters of its formula are the same in all models.
LOW, HIGH = 1.0, 4.0


class Reader(ConfigReader):
    """Reads the keys of the architecture, without the architecture's name in front."""

    def __init__(self, file: GGUFModel, architecture: str) -> None:
        prefix = f"{architecture}."
        own = {
            key.removeprefix(prefix): _exact(value)
            for key, value in file.metadata.items()
            if key.startswith(prefix)
        }
        super().__init__(own, f"{file.path}, {architecture}", frozenset(HARMLESS))
        self.file, self.architecture = file, architecture

    def has(self, key: str) -> bool:
        """Return whether the file has the key."""
        return key in self.config

    def has_tensor(self, name: str) -> bool:
        """Return whether the file has the tensor."""
        return name in self.file.tensors

    def rope(self, sizes: dict[str, Any]) -> dict[str, Any]:
        """Return the rotary parameters, of layers with full attention where there are others."""
        return _rope(self, sizes)


def config_of(file: GGUFModel, begin: int | None, ends: Sequence[int]) -> dict[str, Any]:
    """Return the content of the `config.json` of a file's model.

    Args:
        file: The file.
        begin: The id that begins a text.
        ends: The ids that end one.

    Raises:
        CheckpointError: The architecture is not supported, or a key is missing, wrong or not supported.
    """
    architecture = file.metadata.get("general.architecture")
    _check_kind(file, architecture)
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise file.error(*refusal_of_gguf(architecture, file.metadata, ARCHITECTURES))
    read = Reader(file, architecture)
    name, model_type, own = ARCHITECTURES[architecture]
    whole = architecture not in PARTLY_ROTATED
    sizes = _sizes(read, rotates_whole=whole, by_layer=BY_LAYER.get(architecture, ()))
    config = {
        "architectures": [name],
        "model_type": model_type,
        **sizes,
        **own(read, sizes),
        "tie_word_embeddings": not read.has_tensor("output.weight"),
        "dtype": _dtype(file),
        "bos_token_id": begin,
        "eos_token_id": [*ends] or None,
    }
    if quantised := _quantised(file, architecture):
        config["quantization_config"] = {"quant_method": METHOD, TENSORS: quantised}
    for key, neutral in NEUTRAL.items():
        if key not in read.seen and read.take(key, neutral) != neutral:
            raise read.error(key, f"only {neutral} is supported")
    read.reject_unknown_keys()
    return config


def _check_kind(file: GGUFModel, architecture: object) -> None:
    """Raise CheckpointError where a file is no language model, but a part or a by-product of one."""
    kind = file.metadata.get("general.type")
    if kind is None and architecture == "clip":  # as files of 2024 have it
        kind = "mmproj"
    if isinstance(kind, str) and kind in OTHER_KINDS:
        raise file.error(f"is {OTHER_KINDS[kind]}", "give the file of the language model")


def generation_of(file: GGUFModel) -> dict[str, Any]:
    """Return the content of a `generation_config.json`: the sampling settings that the file recommends."""
    given = {
        key.removeprefix(SAMPLING): _exact(value)
        for key, value in file.metadata.items()
        if key.startswith(SAMPLING)
    }
    return {RENAMED.get(key, key): value for key, value in given.items()}


def _llama(read: Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    biases = {"attention_bias": read.has_tensor("blk.0.attn_q.bias")}
    biases["mlp_bias"] = read.has_tensor("blk.0.ffn_up.bias")
    return _without_window(read, sizes) | biases | {"rope_parameters": _rope(read, sizes)}


def _qwen2(read: Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    return _without_window(read, sizes) | {"rope_parameters": _rope(read, sizes)}


def _qwen3(read: Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    return _qwen2(read, sizes) | {"attention_bias": read.has_tensor("blk.0.attn_q.bias")}


def _without_window(read: Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a family that llama.cpp runs without sliding windows, and scales as usual."""
    positions = sizes["max_position_embeddings"]
    if read.optional_number("attention.sliding_window", zero_is_null=True) not in (None, positions):
        raise read.error("attention.sliding_window", "windows are supported in gemma2 and gemma3 only")
    usual = sizes["head_dim"] ** -0.5
    if abs(read.number("attention.scale", usual) / usual - 1) > 1e-6:  # the file has float32
        raise read.error("attention.scale", f"only {usual:.7g} is supported")
    return {"hidden_act": "silu"}


def _gemma2(read: Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    return _gemma(read, sizes, "gemma2", pattern=2) | {
        "rope_parameters": _rope(read, sizes),
        "attn_logit_softcapping": read.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": read.number("final_logit_softcapping", 30.0),
    }


def _gemma3(read: Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    read.number("rope.freq_base")  # the layers with full attention have another base than the usual one
    windowed = {"rope_type": "default", "rope_theta": read.number("rope.freq_base_swa", THETA)}
    return _gemma(read, sizes, "gemma3", pattern=6) | {
        "rope_parameters": {FULL: _rope(read, sizes), SLIDING: windowed},
        "final_logit_softcapping": read.optional_number("final_logit_softcapping", zero_is_null=True),
    }


def _gemma(read: Reader, sizes: dict[str, Any], architecture: str, pattern: int) -> dict[str, Any]:
    """Return the keys that Gemma 2 and 3 share; every `pattern`-th layer has full attention."""
    layers, heads = sizes["num_hidden_layers"], sizes["num_attention_heads"]
    large = layers == LAYERS_OF_27B[architecture]
    scalar = sizes["hidden_size"] / heads if large else sizes["head_dim"]
    if read.has("attention.scale"):
        scalar = _exact(read.number("attention.scale") ** -2)
    given = read.take("attention.sliding_window_pattern", pattern)
    if isinstance(given, list):
        windowed = [bool(each) for each in given]
    else:
        every = read.count("attention.sliding_window_pattern", pattern)
        windowed = [(layer + 1) % every != 0 for layer in range(layers)]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "attention_bias": read.has_tensor("blk.0.attn_q.bias"),
        "sliding_window": read.count("attention.sliding_window"),
        "layer_types": [SLIDING if each else FULL for each in windowed],
    }


def _with_rope(
    own: Callable[[Reader, dict[str, Any], dict[str, Any]], dict[str, Any]],
) -> Callable[[Reader, dict[str, Any]], dict[str, Any]]:
    """Return a reader of the keys of an architecture that gets the rotary parameters, too."""
    return lambda read, sizes: own(read, sizes, _rope(read, sizes))


# architecture of a file -> that of Hugging Face, its model_type, and the keys of its own
ARCHITECTURES: dict[str, tuple[str, str, Callable[[Reader, dict[str, Any]], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", "llama", _llama),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", _qwen2),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", _qwen3),
    "gemma": ("GemmaForCausalLM", "gemma", _with_rope(llama_like.gemma)),
    "granite": ("GraniteForCausalLM", "granite", _with_rope(llama_like.granite)),
    "internlm2": ("LlamaForCausalLM", "llama", _llama),
    "mistral3": ("Ministral3ForCausalLM", "ministral3", _with_rope(llama_like.mistral3)),
    "phi3": ("Phi3ForCausalLM", "phi3", _with_rope(llama_like.phi3)),
    "seed_oss": ("SeedOssForCausalLM", "seed_oss", _with_rope(llama_like.seed_oss)),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3", _with_rope(llama_like.smollm3)),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", _gemma2),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", _gemma3),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text", gemma4_config.gemma4),
    "cohere2": ("Cohere2ForCausalLM", "cohere2", norms_config.cohere2),
    "exaone4": ("Exaone4ForCausalLM", "exaone4", norms_config.exaone4),
    "glm4": ("Glm4ForCausalLM", "glm4", norms_config.glm4),
    "gpt2": ("GPT2LMHeadModel", "gpt2", norms_config.gpt2),
    "gptneox": ("GPTNeoXForCausalLM", "gpt_neox", norms_config.gpt_neox),
    "olmo2": ("Olmo2ForCausalLM", "olmo2", norms_config.olmo2),
    "phi2": ("PhiForCausalLM", "phi", norms_config.phi2),
    "stablelm": ("StableLmForCausalLM", "stablelm", norms_config.stablelm),
    "starcoder2": ("Starcoder2ForCausalLM", "starcoder2", norms_config.starcoder2),
}


FEED_FORWARD, KEY_HEADS = "feed_forward_length", "attention.head_count_kv"
EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")  # of RMS and of layer norms


def _sizes(read: Reader, *, rotates_whole: bool, by_layer: Collection[str]) -> dict[str, Any]:
    """Return the keys that are the same in every architecture.

    Args:
        read: The keys.
        rotates_whole: A head is rotated as a whole.
        by_layer: Sizes that the architecture's own function reads, because they may differ by layer.
    """
    embedding = read.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise read.file.error("has no matrix token_embd.weight", CONVERT_AGAIN)
    words = embedding.shape[0]
    if read.count("vocab_size", words) != words:
        raise read.error("vocab_size", f"token_embd.weight has {words} rows")
    hidden, heads = read.count("embedding_length"), read.count("attention.head_count")
    head_dim = read.count("attention.key_length", max(1, hidden // heads))
    for key in ("attention.value_length", *(["rope.dimension_count"] if rotates_whole else [])):
        if read.count(key, head_dim) != head_dim:
            raise read.error(key, f"only the size of a key head, {head_dim}, is supported")
    return {
        "vocab_size": words,
        "hidden_size": hidden,
        "intermediate_size": None if FEED_FORWARD in by_layer else read.count(FEED_FORWARD),
        "num_hidden_layers": read.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": None if KEY_HEADS in by_layer else read.count(KEY_HEADS, heads),
        "head_dim": head_dim,
        "max_position_embeddings": read.count("context_length"),
        "rms_norm_eps": read.number(EPSILONS[read.has(EPSILONS[1])]),
    }


def _rope(read: Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters, of layers with full attention where there are others.

    Without a type, a factor scales linearly.
    """
    theta, factor = read.number("rope.freq_base", THETA), _factor(read)
    kind = read.take("rope.scaling.type", "linear" if factor else "none")
    if read.has_tensor(ROPE_FACTORS):
        if factor and kind != "none":
            raise read.error("rope.scaling.type", f"the file has {ROPE_FACTORS}, too")
        return _llama3(read, theta, sizes["head_dim"])
    if kind == "none" or (kind == "linear" and factor in (None, 1.0)):
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind != "yarn":
        raise read.error("rope.scaling.type", "supported are none, linear, yarn")
    found: dict[str, Any] = {"rope_type": "yarn", "rope_theta": theta, "factor": factor}
    for key, own in YARN.items():
        if read.has(own):
            found[key] = read.number(own)
    if ORIGINAL in found:
        found[ORIGINAL] = int(found[ORIGINAL])
    return found


ORIGINAL = "original_max_position_embeddings"
YARN = {  # key of config.json -> that of the file
    ORIGINAL: "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}


def _factor(read: Reader) -> float | None:
    """Return what RoPE's positions are divided by; older files spell it otherwise."""
    read.take("rope.scaling.original_context_length")  # it counts with yarn and Llama 3.1's factors only
    found = read.optional_number("rope.scaling.factor", zero_is_null=True)
    older = read.optional_number("rope.scale_linear", zero_is_null=True)
    if found is not None and older not in (None, found):
        raise read.error("rope.scale_linear", f"rope.scaling.factor is {found}")
    return found or older


def _llama3(read: Reader, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the parameters of Llama 3.1's scaling whose factors are those that the file holds.

    The factors follow from the largest of them and from the original context length, a power of two.
    """
    info = read.file.tensors[ROPE_FACTORS]
    if info.kind not in PLAIN or info.shape != (head_dim // 2,):
        raise read.file.error(f"has {ROPE_FACTORS} of shape {[*info.shape]}", CONVERT_AGAIN)
    given = stored_values(read.file, info).float()
    largest = _exact(float(given.max()))
    for original in _powers(read):
        rope = Rope(
            "llama3",
            theta,
            factor=largest,
            low_frequency=LOW,
            high_frequency=HIGH,
            original_positions=original,
        )
        plain, scaled = (frequencies(each, head_dim) for each in (Rope("default", theta), rope))
        if torch.allclose(plain / scaled, given, rtol=1e-4, atol=0.0):
            return {
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": largest,
                "low_freq_factor": LOW,
                "high_freq_factor": HIGH,
                ORIGINAL: original,
            }
    raise read.file.error(
        f"has factors in {ROPE_FACTORS} that are not those of Llama 3.1", "give the model's checkpoint folder"
    )


def _powers(read: Reader) -> Iterator[int]:
    """Yield the original context lengths that may be meant: Llama's own first, then 32 to a million."""
    yield 8192
    yield from (2**power for power in range(5, 21))


def _quantised(file: GGUFModel, architecture: str) -> dict[str, list[str]]:
    """Return the quantised modules of a file by their format."""
    found: dict[str, list[str]] = {}
    for name, info in file.tensors.items():
        own = model_name(architecture, name)
        if info.kind not in PLAIN and own is not None:
            found.setdefault(info.kind, []).append(own.removesuffix(".weight"))
    return found


def _dtype(file: GGUFModel) -> str:
    """Return the dtype to run the model in: that of its matrices, and bfloat16 where they are quantised."""
    kinds = {info.kind for info in file.tensors.values() if len(info.shape) > 1}
    if kinds <= {"F32", "F64"}:
        return "float32"
    return "float16" if kinds <= {"F16", "F32"} else "bfloat16"


def _exact(value: Any) -> Any:
    """Return the shortest decimal number that float32 rounds to the value, if that is a float32."""
    if not isinstance(value, float) or float(np.float32(value)) != value:
        return value
    return float(str(np.float32(value)))
