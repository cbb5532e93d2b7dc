"""Write a DFlash or DSpark head as a GGUF file, as llama.cpp's converter does it, with the `gguf` package's writer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tests.support.blocks import BLOCK, BODY, HEAD_DIM, SLIDING, defined_logits, save_block
from tests.support.eagle3_gguf import plain_of, write_head_gguf

# format -> the format in safetensors files of the same head, what its config says otherwise, and the type
FORMATS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gguf": ("z-lab", {"is_causal": False, **SLIDING}, "F32"),
    "gguf reduced": ("speculators", {"sliding_window_non_causal": True}, "F32"),
    "gguf with a bias": ("deepspec", {}, "Q8_0"),
}  # fmt: skip


def save_block_gguf(
    file: Path,
    format: str,
    vocabulary: int,
    *,
    keys: dict[str, Any] | None = None,
    tensors: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
    **head: Any,
) -> Path:
    plain, config, kind = FORMATS[format]
    body = {**BODY, "vocab_size": vocabulary}
    if plain == "speculators":  # without windows, which reach back from the anchor there
        config = {**config, "transformer_layer_config": body}
    head["config"] = {**config, **head.get("config", {})}
    folder = save_block(plain_of(file), plain, vocabulary, **head)
    told = json.loads((folder / "config.json").read_text())
    told = {**told, **told.get("dflash_config", {})}
    own = {
        "attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM, "block_size": BLOCK,
        "target_layers": told.get("aux_hidden_state_layer_ids") or [layer + 1 for layer in told["target_layer_ids"]],
        **(keys or {}),
    }  # fmt: skip
    if "layer_types" in told:
        own["attention.sliding_window"] = told["sliding_window"]
        own["attention.sliding_window_pattern"] = [
            each == "sliding_attention" for each in told["layer_types"]
        ]
    return write_head_gguf(file, "dflash", body, own, kind, tensors, mask=told["mask_token_id"])


def defined_gguf(file: Path, model: Any, text: list[int], drafted: list[int]) -> Tensor:
    return defined_logits(plain_of(file), model, text, drafted)
