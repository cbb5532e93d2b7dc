"""How convert_hf_to_gguf.py of llama.cpp writes gated delta nets, and layers that predict further tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
import torch

KEYS, VALUES = "linear_num_key_heads", "linear_num_value_heads"
NEXTN = {
    "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
}


def further_layers(config: Mapping[str, Any]) -> int:
    return config.get("mtp_num_hidden_layers", 0)


def add_linear(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config[KEYS])
    writer.add_ssm_time_step_rank(config[VALUES])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config[VALUES])
    recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    recurrent += [False] * further_layers(config)
    writer.add_array("qwen35.attention.recurrent_layers", recurrent)
    writer.add_full_attention_interval(4)
    share = config["rope_parameters"].get("partial_rotary_factor", 0.25)
    writer.add_rope_dimension_count(int(config["head_dim"] * share))
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    if further_layers(config):
        writer.add_nextn_predict_layers(further_layers(config))


def name_in_file(config: Mapping[str, Any], name: str) -> str:
    """Return the name of a tensor for the table of names, or that in a file where the table has none."""
    layers = config["num_hidden_layers"]
    module, _, kind = name.rpartition(".")
    if module in NEXTN:
        return f"blk.{layers}.{NEXTN[module]}.{kind}"
    name = name.replace("mtp.layers.0.", f"model.layers.{layers}.")
    return name.replace(".dt_bias", ".dt_proj.bias")


def written(config: Mapping[str, Any], name: str, values: np.ndarray) -> np.ndarray:
    """Return a tensor as a file holds it, but for the one that norms add."""
    if name.endswith(".A_log"):
        values = -torch.exp(torch.from_numpy(values)).numpy()
    return in_heads_order(config, name, values.squeeze() if "conv1d" in name else values)


def in_heads_order(
    config: Mapping[str, Any], name: str, values: np.ndarray, *, undo: bool = False
) -> np.ndarray:
    """Return a tensor whose heads of values lie so that each takes the key head of its number modulo theirs."""
    keys, heads = config[KEYS], config[VALUES]
    outer = (heads // keys, keys) if undo else (keys, heads // keys)

    def swapped(part: np.ndarray, axis: int) -> np.ndarray:
        split = part.reshape(*part.shape[:axis], *outer, -1, *part.shape[axis + 1 :])
        return np.ascontiguousarray(split.swapaxes(axis, axis + 1).reshape(part.shape))

    if "out_proj" in name:
        return swapped(values, 1)
    first = 2 * keys * config["linear_key_head_dim"] if "in_proj_qkv" in name or "conv1d" in name else 0
    return np.concatenate([values[:first], swapped(values[first:], 0)]) if "norm" not in name else values
