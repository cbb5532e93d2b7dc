"""Turn the metadata of a GGUF file into the `config.json` that the model had.

Every key of the architecture is read, has a neutral value, or is refused. What a file does not say is what
llama.cpp assumes (https://github.com/ggml-org/llama.cpp/tree/master/src/models); what is written:
https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from foredraft.model.config import ConfigReader
from foredraft.model.families import FAMILIES, IN_GGUF
from foredraft.model.families.shared import FULL, GGUF, SLIDING
from foredraft.model.gguf.tensors import (
    LONG_FACTORS,
    PLAIN,
    ROPE_FACTORS,
    SHORT_FACTORS,
    GGUFModel,
    model_name,
    stored_values,
)
from foredraft.model.quantisation.scheme import METHOD, TENSORS
from foredraft.model.rope import Rope, frequencies
from foredraft.model.unsupported import refusal_of_gguf

CONVERT_AGAIN = "convert the model again, or give its checkpoint folder"
HARMLESS = ("tensor_data_layout", "rope.scaling.finetuned")
NEUTRAL: dict[str, object] = {  # keys that change what a forward computes, except with this value
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
THETA = 10_000.0  # RoPE's base where the file does not say
# Llama 3.1's RoPE factors come as a tensor alone. These parameters of its formula are the same in all models.
LOW, HIGH = 1.0, 4.0


class MetadataReader(ConfigReader):
    """Reads the keys of the architecture, without the architecture's name in front."""

    ROPE_FACTORS = ROPE_FACTORS
    LONG_ROPE = SHORT_FACTORS, LONG_FACTORS

    def __init__(self, file: GGUFModel, architecture: str) -> None:
        own = _under(file, f"{architecture}.")
        super().__init__(own, f"{file.path}, {architecture}", frozenset(HARMLESS))
        self.file, self.architecture = file, architecture

    def has(self, key: str) -> bool:
        return key in self.config

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def rope(self, sizes: dict[str, Any]) -> dict[str, Any]:
        """Return the rotary parameters, of layers with full attention where there are others."""
        theta, factor = self.number("rope.freq_base", THETA), self._factor()
        kind = self.take("rope.scaling.type", "linear" if factor else "none")
        if self.has_tensor(ROPE_FACTORS):
            if factor and kind != "none":
                raise self.error("rope.scaling.type", f"the file has {ROPE_FACTORS}, too")
            return _llama3(self, theta, sizes["head_dim"])
        if kind == "none" or (kind == "linear" and factor in (None, 1.0)):
            return {"rope_type": "default", "rope_theta": theta}
        if kind == "linear":
            return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
        if kind != "yarn":
            raise self.error("rope.scaling.type", "supported are none, linear, yarn")
        found: dict[str, Any] = {"rope_type": "yarn", "rope_theta": theta, "factor": factor}
        found |= {key: self.number(own) for key, own in YARN.items() if self.has(own)}
        if ORIGINAL in found:
            found[ORIGINAL] = int(found[ORIGINAL])
        return found

    def partial_rope(self, sizes: dict[str, Any]) -> dict[str, Any]:
        rotated = self.count("rope.dimension_count", sizes["head_dim"])
        return self.rope(sizes) | {"partial_rotary_factor": rotated / sizes["head_dim"]}

    def _factor(self) -> float | None:
        """Return what RoPE's positions are divided by; older files spell it otherwise."""
        self.take("rope.scaling.original_context_length")  # it counts with yarn and Llama 3.1's factors only
        found = self.optional_number("rope.scaling.factor", zero_is_null=True)
        older = self.optional_number("rope.scale_linear", zero_is_null=True)
        if found is not None and older not in (None, found):
            raise self.error("rope.scale_linear", f"rope.scaling.factor is {found}")
        return found or older

    def factors(self, name: str, count: int) -> list[float]:
        """Return the numbers of a tensor of RoPE's divisors."""
        info = self.file.tensors.get(name)
        if info is None or info.dtype not in PLAIN or info.shape != (count,):
            raise self.file.error(f"has no {count} numbers in {name}", CONVERT_AGAIN)
        numbers: list[float] = stored_values(self.file, info).float().tolist()
        return numbers

    def windows(self, sizes: dict[str, Any], pattern: int = 4) -> dict[str, Any]:
        given = self.take("attention.sliding_window_pattern", pattern)
        if isinstance(given, list):
            windowed = [bool(each) for each in given]
        else:
            every = self.count("attention.sliding_window_pattern", pattern)
            windowed = [(layer + 1) % every != 0 for layer in range(sizes["num_hidden_layers"])]
        return {
            "sliding_window": self.count("attention.sliding_window"),
            "layer_types": [SLIDING if each else FULL for each in windowed],
        }

    @staticmethod
    def exact(value: Any) -> Any:
        """Return the shortest decimal number that float32 rounds to the value, if that is a float32."""
        if not isinstance(value, float) or float(np.float32(value)) != value:
            return value
        return float(str(np.float32(value)))


def config_of(file: GGUFModel, begin: int | None, ends: Sequence[int]) -> dict[str, Any]:
    architecture = file.metadata.get("general.architecture")
    _check_kind(file, architecture)
    if not isinstance(architecture, str) or architecture not in IN_GGUF:
        raise file.error(*refusal_of_gguf(architecture, file.metadata, IN_GGUF))
    read = MetadataReader(file, architecture)
    name, of = IN_GGUF[architecture]
    config = {"architectures": [name], "model_type": FAMILIES[name].model_type} | _sizes(read, of)
    config |= {of.activation_key: of.activation, **of.fixed}
    config |= {key: read.has_tensor(f"blk.0.{part}.bias") for key, part in of.biases.items()}
    if of.norm_key != "rms_norm_eps":
        config |= {"rms_norm_eps": None, of.norm_key: config["rms_norm_eps"]}
    if of.rope != "own":
        config["rope_parameters"] = (read.rope if of.rope == "whole" else read.partial_rope)(config)
    if not of.windows:  # llama.cpp runs it without sliding windows, and scales as usual
        positions, usual = config["max_position_embeddings"], config["head_dim"] ** -0.5
        if read.optional_number("attention.sliding_window", zero_is_null=True) not in (None, positions):
            raise read.error("attention.sliding_window", "windows are supported in gemma2 and gemma3 only")
        if abs(read.number("attention.scale", usual) / usual - 1) > 1e-6:  # the file has float32
            raise read.error("attention.scale", f"only {usual:.7g} is supported")
    if of.keys is not None:
        config |= of.keys(read, config)
    config |= {
        "tie_word_embeddings": not read.has_tensor("output.weight"),
        "dtype": _dtype(file, architecture),
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
    return {RENAMED.get(key, key): value for key, value in _under(file, SAMPLING).items()}


FEED_FORWARD, KEY_HEADS = "feed_forward_length", "attention.head_count_kv"
EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")  # of RMS and of layer norms


def _sizes(read: MetadataReader, of: GGUF) -> dict[str, Any]:
    embedding = read.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise read.file.error("has no matrix token_embd.weight", CONVERT_AGAIN)
    words = embedding.shape[0]
    if read.count("vocab_size", words) != words:
        raise read.error("vocab_size", f"token_embd.weight has {words} rows")
    hidden, heads = read.count("embedding_length"), read.count("attention.head_count")
    head_dim = read.count("attention.key_length", max(1, hidden // heads))
    for key in ("attention.value_length", *(["rope.dimension_count"] if of.rope != "part" else [])):
        if read.count(key, head_dim) != head_dim:
            raise read.error(key, f"only the size of a key head, {head_dim}, is supported")
    return {
        "vocab_size": words,
        "hidden_size": hidden,
        "intermediate_size": None if FEED_FORWARD in of.by_layer else read.count(FEED_FORWARD),
        "num_hidden_layers": read.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": None if KEY_HEADS in of.by_layer else read.count(KEY_HEADS, heads),
        "head_dim": head_dim,
        "max_position_embeddings": read.count("context_length"),
        "rms_norm_eps": read.number(EPSILONS[read.has(EPSILONS[1])]),
    }


ORIGINAL = "original_max_position_embeddings"
YARN = {  # key of config.json -> that of the file
    ORIGINAL: "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}


def _llama3(read: MetadataReader, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the parameters of Llama 3.1's scaling that give the factors in the file."""
    given = torch.tensor(read.factors(ROPE_FACTORS, head_dim // 2))
    largest = MetadataReader.exact(float(given.max()))
    for original in (8192, *(2**power for power in range(5, 21))):  # Llama's own first
        rope = Rope("llama3", theta, largest, LOW, HIGH, original)
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
    problem = f"has factors in {ROPE_FACTORS} that are not those of Llama 3.1"
    raise read.file.error(problem, "give the model's checkpoint folder")


def _quantised(file: GGUFModel, architecture: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, info in file.tensors.items():
        own = model_name(architecture, name)
        if info.dtype not in PLAIN and own is not None:
            found.setdefault(info.dtype, []).append(own.removesuffix(".weight"))
    return found


def _dtype(file: GGUFModel, architecture: str) -> str:
    """Return the dtype to run the model in: that of its matrices, and bfloat16 where they are quantised.

    Gemma in float16 runs in bfloat16, too: its states grow beyond what float16 holds.
    """
    kinds = {info.dtype for info in file.tensors.values() if len(info.shape) > 1}
    if kinds <= {"F32", "F64"}:
        return "float32"
    return "float16" if kinds <= {"F16", "F32"} and not architecture.startswith("gemma") else "bfloat16"


def _under(file: GGUFModel, prefix: str) -> dict[str, Any]:
    given = ((key, value) for key, value in file.metadata.items() if key.startswith(prefix))
    return {key.removeprefix(prefix): MetadataReader.exact(value) for key, value in given}
