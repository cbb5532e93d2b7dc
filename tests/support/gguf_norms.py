"""Write tiny checkpoints of the families with other norms and positions as GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from tests.support.gguf_files import add_common, named, names_of, write_tensors

# model_type -> the file's
ARCHITECTURES = {
    name: name for name in ("cohere2", "exaone4", "glm4", "gpt2", "olmo2", "stablelm", "starcoder2")
}
ARCHITECTURES |= {"gpt_neox": "gptneox", "olmo3": "olmo2", "phi": "phi2"}
TRANSPOSED = ("c_attn.weight", "c_fc.weight", "c_proj.weight")  # of GPT-2
EPSILONS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")


def write_gguf(folder: Path, file: Path, kind: str = "F32") -> Path:
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(file, architecture)
    add_keys(writer, config)

    def kind_of(name: str, values: np.ndarray) -> str:
        return kind if values.ndim > 1 and "position" not in name else "F32"

    write_tensors(writer, dict(converted(folder, config, architecture)), kind_of)
    return file


def add_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    sizes = {**config, **{key: config[own] for key, own in SPELLED.items() if own in config}}
    add_common(writer, sizes)
    if "num_key_value_heads" in config:
        writer.add_head_count_kv(config["num_key_value_heads"])
    if (own := next((key for key in EPSILONS if key in config), None)) is not None:
        writer.add_layer_norm_eps(config[own])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    head_dim = config.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if rope:
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "partial_rotary_factor" in rope:
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    if "use_parallel_residual" in config:
        writer.add_parallel_residual(config["use_parallel_residual"])
    if "logit_scale" in config:
        writer.add_logit_scale(config["logit_scale"])
    if config["model_type"] in ("cohere2", "exaone4", "olmo3") and config["sliding_window"] is not None:
        writer.add_sliding_window(config["sliding_window"])
        if config["model_type"] != "cohere2":
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


SPELLED = {
    "max_position_embeddings": "n_positions",
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
}


def converted(folder: Path, config: Mapping[str, Any], architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    names = names_of(architecture, config.get("num_hidden_layers") or config["n_layer"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        if config["model_type"] == "gpt2" and name.endswith(TRANSPOSED):
            values = np.ascontiguousarray(values.T)
        if "query_key_value" in name:
            heads = config["num_attention_heads"]
            split = values.reshape(heads, 3, -1, *values.shape[1:])
            values = split.swapaxes(0, 1).reshape(values.shape)
        yield named(names, name), values
