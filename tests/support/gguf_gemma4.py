"""Write tiny checkpoints of Gemma 4 as GGUF files, as llama.cpp's converter does.

Names come from the `gguf` package's own table; the keys and the rotary factors from
https://github.com/ggml-org/llama.cpp/blob/master/conversion/gemma.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from tests.support.gguf_files import add_tensor

SLIDING = "sliding_attention"


def write_gguf(folder: Path, file: Path, kind: str = "F32", **keys: Any) -> Path:
    """Write a checkpoint folder as a GGUF file, with matrices of a type, and return it.

    `keys` are those of config.json that the file is to have instead of the folder's.
    """
    config = json.loads((folder / "config.json").read_text())
    heads = config.pop("per_layer_config", {})
    full = heads.get(str(config["layer_types"].index("full_attention")), {})
    config["global_head_dim"] = full.get("head_dim", config["head_dim"])
    config["num_global_key_value_heads"] = full.get("num_key_value_heads", config["num_key_value_heads"])
    writer = gguf.GGUFWriter(file, "gemma4")
    add_keys(writer, {**config, **keys})
    for name, values in converted(folder, config):
        add_tensor(writer, name, values, kind if values.ndim > 1 else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Add the sizes and the arithmetic of a model."""
    windowed = [kind == SLIDING for kind in config["layer_types"]]
    layers, shared, inner = len(windowed), config["num_kv_shared_layers"], config["intermediate_size"]
    wide = config.get("use_double_wide_mlp", False)
    heads = config["num_key_value_heads"], config["num_global_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(
        [inner * (1 + (layer >= layers - shared)) for layer in range(layers)] if wide else inner
    )
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([heads[not each] for each in windowed] if heads[0] != heads[1] else heads[0])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["global_head_dim"])
    writer.add_value_length(config["global_head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(config["global_head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config["rope_parameters"][SLIDING]["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(windowed)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input") or 0)
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def converted(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a checkpoint by their names in the file, and the rotary factors."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, len(config["layer_types"]))
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings", True):
            continue
        stored = f"{name}.weight" if name.endswith("layer_scalar") else name
        own = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        yield own, tensor.float().numpy()
    half = config["global_head_dim"] // 2
    turning = int(half * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    yield "rope_freqs.weight", np.array([1.0] * turning + [1e30] * (half - turning), dtype=np.float32)
