"""What the files of architectures after llama say about their models: the keys of their own.

Contract: each function gets a reader of the file's keys, and the sizes and the rotary parameters that are the
same in all architectures. It returns keys of a `config.json`. What a file does not say is what llama.cpp
assumes (https://github.com/ggml-org/llama.cpp/tree/master/src/models).
"""

from __future__ import annotations

from typing import Any, Protocol

from foredraft.errors import CheckpointError
from foredraft.model.gguf.names import LONG_FACTORS, SHORT_FACTORS
from foredraft.model.gguf.parts import GGUFModel
from foredraft.model.gguf.tensors import PLAIN, stored_values

__all__ = ["gemma", "granite", "mistral3", "phi3", "seed_oss", "smollm3"]

ORIGINAL, ORIGINAL_KEY = "original_max_position_embeddings", "rope.scaling.original_context_length"
WINDOW = "attention.sliding_window"
UNROTATED = 4  # llama.cpp rotates none of every so many layers of SmolLM 3, whatever the model


class Reader(Protocol):
    """What these functions ask of the reader of a file's keys (`ConfigReader`)."""

    file: GGUFModel

    def number(self, key: str, default: float | None = None) -> float: ...
    def optional_number(
        self, key: str, default: float | None = None, *, zero_is_null: bool = False
    ) -> float | None: ...
    def count(self, key: str, default: int | None = None) -> int: ...
    def take(self, key: str, default: Any = None) -> Any: ...
    def error(self, key: str, remedy: str) -> CheckpointError: ...
    def has_tensor(self, name: str) -> bool: ...


def gemma(read: Reader, sizes: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": read.has_tensor("blk.0.attn_q.bias"),
        "rope_parameters": rope,
    }


def granite(read: Reader, sizes: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    return _biases(read) | {
        "attention_multiplier": read.number("attention.scale", sizes["head_dim"] ** -0.5),
        "embedding_multiplier": read.number("embedding_scale", 1.0),
        "residual_multiplier": read.number("residual_scale", 1.0),
        "logits_scaling": read.number("logit_scale"),
        "rope_parameters": rope,
    }


def mistral3(read: Reader, sizes: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """A Mistral, or a Ministral 3, whose queries grow; a growth of 0 is none."""
    rope.setdefault(ORIGINAL, read.count(ORIGINAL_KEY, sizes["max_position_embeddings"]))
    growth = read.optional_number("attention.temperature_scale", zero_is_null=True)
    if read.take("attention.temperature_length", rope[ORIGINAL]) != rope[ORIGINAL]:
        raise read.error("attention.temperature_length", f"{ORIGINAL_KEY} is {rope[ORIGINAL]}")
    log = read.optional_number("rope.scaling.yarn_log_multiplier", zero_is_null=True)
    scales = {} if log is None or rope["rope_type"] != "yarn" else {"mscale": 1.0, "mscale_all_dim": log}
    return {
        "hidden_act": "silu",
        "rope_parameters": {**rope, **scales, "llama_4_scaling_beta": growth or 0.0},
    }


def phi3(read: Reader, sizes: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    head_dim = sizes["head_dim"]
    rotated = read.count("rope.dimension_count", head_dim)
    share = rotated / head_dim
    if int(head_dim * share) != rotated:  # the quotient was rounded down
        share = (rotated + 0.5) / head_dim
    found: dict[str, Any] = {
        "hidden_act": "silu",
        "sliding_window": None if read.take(WINDOW, 0) == 0 else read.count(WINDOW),
        "rope_parameters": {**rope, "partial_rotary_factor": share},
    }
    if not read.has_tensor(LONG_FACTORS) and not read.has_tensor(SHORT_FACTORS):
        return found
    found["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": share,
        "short_factor": _factors(read, SHORT_FACTORS, rotated // 2),
        "long_factor": _factors(read, LONG_FACTORS, rotated // 2),
        "attention_factor": read.number("rope.scaling.attn_factor", 1.0),
    }
    return found | {ORIGINAL: read.count(ORIGINAL_KEY)}


def seed_oss(read: Reader, sizes: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    return _biases(read) | {
        "attention_out_bias": read.has_tensor("blk.0.attn_output.bias"),
        "rope_parameters": rope,
    }


def smollm3(read: Reader, sizes: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    return _biases(read) | {"no_rope_layer_interval": UNROTATED, "rope_parameters": rope}


def _biases(read: Reader) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "attention_bias": read.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": read.has_tensor("blk.0.ffn_up.bias"),
    }


def _factors(read: Reader, name: str, count: int) -> list[float]:
    """Return LongRoPE's divisors of the frequencies, one for each."""
    info = read.file.tensors.get(name)
    if info is None or info.kind not in PLAIN or info.shape != (count,):
        raise _unfit(read, name, count)
    numbers: list[float] = stored_values(read.file, info).float().tolist()
    return numbers


def _unfit(read: Reader, name: str, count: int) -> CheckpointError:
    return read.file.error(
        f"has no {count} numbers in {name}", "convert the model again, or give its checkpoint folder"
    )
