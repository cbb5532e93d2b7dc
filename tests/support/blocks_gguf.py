"""Write a DFlash or DSpark head as a GGUF file, as llama.cpp's converter does it, with the `gguf` package's writer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.blocks import BLOCK, BODY, HEAD_DIM, defined_logits, save_block
from tests.support.eagle3_gguf import NAMES as OF_HEADS
from tests.support.eagle3_gguf import add_value
from tests.support.gguf_files import add_tensor, quantised
from tests.support.heads import HEADS, KV_HEADS

OUTER = {
    "fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight", "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight", "embed_tokens.weight": "token_embd.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight", "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight", "confidence_head.proj.bias": "conf_proj.bias",
}  # fmt: skip
LAYER = {
    **{name.removeprefix("midlayer."): own.removeprefix("blk.0.") for name, own in OF_HEADS.items()},
    "self_attn.q_norm.weight": "attn_q_norm.weight", "self_attn.k_norm.weight": "attn_k_norm.weight",
}  # fmt: skip
# spelling -> the spelling in safetensors files of the same head, what its config says otherwise, and the type
SPELLINGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gguf": ("z-lab", {"is_causal": False, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1,
                       "layer_types": ["sliding_attention", "full_attention"]}, "F32"),
    "gguf of words": ("speculators", {"sliding_window_non_causal": True}, "F32"),
    "gguf with a bias": ("deepspec", {}, "Q8_0"),
}  # fmt: skip


def save_block_gguf(
    file: Path,
    spelling: str,
    vocabulary: int,
    *,
    keys: dict[str, Any] | None = None,
    tensors: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
    **head: Any,
) -> Path:
    """Write a head, and beside it the folder `FILE-plain` of the same head in safetensors.

    Args:
        file: The head's.
        spelling: A key of SPELLINGS.
        vocabulary: Size of the target's.
        keys: Replaces or adds keys of the architecture; None drops one.
        tensors: Changes the tensors, by their names in the file.
        **head: Further arguments of `save_block`.
    """
    plain, config, kind = SPELLINGS[spelling]
    body = {**BODY, "vocab_size": vocabulary}
    if plain == "speculators":  # without windows, which reach back from the anchor there
        config = {**config, "transformer_layer_config": body}
    folder = save_block(
        file.with_name(f"{file.name}-plain"),
        plain,
        vocabulary,
        **{**head, "config": {**config, **head.get("config", {})}},
    )
    told = json.loads((folder / "config.json").read_text())
    told = {**told, **told.get("dflash_config", {})}
    stored, raw = load_file(folder / "model.safetensors"), gguf.GGMLQuantizationType[kind]

    def fits(t: Any) -> bool:
        return t.ndim == 2 and t.shape[1] % gguf.GGML_QUANT_SIZES[raw][0] == 0

    rounded = {
        name: torch.from_numpy(gguf.quants.dequantize(quantised(t.numpy(), kind), raw).copy()).view(t.shape)
        if fits(t)
        else t
        for name, t in stored.items()
    }
    save_file(rounded, folder / "model.safetensors")
    ids = told.get("aux_hidden_state_layer_ids") or [tap + 1 for tap in told["target_layer_ids"]]
    written = {
        "context_length": BODY["max_position_embeddings"], "embedding_length": BODY["hidden_size"],
        "block_count": BODY["num_hidden_layers"], "feed_forward_length": BODY["intermediate_size"],
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM, "attention.layer_norm_rms_epsilon": BODY["rms_norm_eps"],
        "rope.freq_base": BODY["rope_theta"], "vocab_size": vocabulary, "block_size": BLOCK, "target_layers": ids,
        **(keys or {}),
    }  # fmt: skip
    if "layer_types" in told:
        written["attention.sliding_window"] = told["sliding_window"]
        written["attention.sliding_window_pattern"] = [
            kind == "sliding_attention" for kind in told["layer_types"]
        ]
    writer = gguf.GGUFWriter(file, "dflash")
    for key, value in written.items():
        add_value(writer, f"dflash.{key}", value)
    writer.add_uint32("tokenizer.ggml.mask_token_id", told["mask_token_id"])
    arrays: dict[str, np.ndarray] = {}
    for name, t in stored.items():
        if name.startswith("layers."):
            _, index, part = name.split(".", 2)
            arrays[f"blk.{index}.{LAYER[part]}"] = t.float().numpy()
        elif name in OUTER:
            arrays[OUTER[name]] = t.float().numpy()
    if "d2t" in stored:
        arrays["d2t"] = (stored["d2t"] + torch.arange(len(stored["d2t"]))).numpy()
    tensors(arrays)
    for name, values in arrays.items():
        if values.dtype == np.int64:
            writer.add_tensor(name, values)
        else:
            add_tensor(writer, name, values, kind if fits(values) else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def defined_gguf(file: Path, model: Any, text: list[int], drafted: list[int]) -> Tensor:
    """Return the logits of the folder beside the file, as `blocks.defined_logits` does."""
    return defined_logits(file.with_name(f"{file.name}-plain"), model, text, drafted)
