"""Write tiny checkpoints of Gemma 4 as GGUF files, as llama.cpp's conversion/gemma.py does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from tests.support.gguf_files import add_common, named, names_of, write_tensors

SLIDING = "sliding_attention"


def write_gguf(folder: Path, file: Path, kind: str = "F32", **keys: Any) -> Path:
    """Write a checkpoint folder as a GGUF file, with these keys of config.json in place of its own."""
    config = json.loads((folder / "config.json").read_text())
    heads = config.pop("per_layer_config", {})
    full = heads.get(str(config["layer_types"].index("full_attention")), {})
    config["global_head_dim"] = full.get("head_dim", config["head_dim"])
    config["num_global_key_value_heads"] = full.get("num_key_value_heads", config["num_key_value_heads"])
    writer = gguf.GGUFWriter(file, "gemma4")
    add_keys(writer, {**config, **keys})
    arrays = dict(converted(folder, config))
    write_tensors(writer, arrays, lambda name, values: kind if values.ndim > 1 else "F32")
    return file


def add_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    windowed = [kind == SLIDING for kind in config["layer_types"]]
    layers, shared, inner = len(windowed), config["num_kv_shared_layers"], config["intermediate_size"]
    wide = config.get("use_double_wide_mlp", False)
    heads = config["num_key_value_heads"], config["num_global_key_value_heads"]
    inners = [inner * (1 + (layer >= layers - shared)) for layer in range(layers)]
    add_common(writer, {**config, "intermediate_size": inners if wide else inner})
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
    names = names_of("gemma4", len(config["layer_types"]))
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings", True):
            continue
        stored = f"{name}.weight" if name.endswith("layer_scalar") else name
        yield named(names, stored), tensor.float().numpy()
    half = config["global_head_dim"] // 2
    turning = int(half * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    yield "rope_freqs.weight", np.array([1.0] * turning + [1e30] * (half - turning), dtype=np.float32)
