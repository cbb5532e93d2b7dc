"""How GGUF files hold gated delta nets otherwise than Hugging Face does.

Where there are more heads of values than of keys, head h of values takes key head h modulo their number, so
the heads of values lie in another order: as rows, and as columns of the last projection. In the place of
A_log stands -exp(A_log), and the taps of a convolution are a matrix
(https://github.com/ggml-org/llama.cpp/blob/master/conversion/qwen.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

DECAYS, TAPS, OUTPUT = "ssm_a", "ssm_conv1d", "ssm_out"
BEHIND_KEYS = ("attn_qkv", TAPS)  # whose last rows are those of the heads of values
BY_HEAD = ("attn_gate", "ssm_alpha", "ssm_beta", DECAYS, "ssm_dt")  # whose rows all are
KEY_HEADS, VALUE_HEADS, VALUE_DIM = "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim"


def are_taps(name: str) -> bool:
    """Return whether a tensor of a file holds the taps of a convolution."""
    return name.endswith((f".{TAPS}.weight", ".shortconv.conv.weight"))


def value_rows(part: str, rows: int, config: Mapping[str, Any]) -> Tensor | None:
    """Return the row of the file for each row of the model's tensor, [rows]; None where they are the same."""
    heads = _heads(config)
    if heads is None or part not in BEHIND_KEYS + BY_HEAD:
        return None
    size = config[VALUE_DIM] if part in BEHIND_KEYS else rows // len(heads)
    first = rows - len(heads) * size
    return torch.cat([torch.arange(first), first + _spread(heads, size)])


def value_columns(part: str, columns: int, config: Mapping[str, Any]) -> Tensor | None:
    """Return the column of the file for each column of the model's tensor; None where they are the same."""
    heads = _heads(config)
    if heads is None or part != OUTPUT:
        return None
    return _spread(heads, columns // len(heads))


def _heads(config: Mapping[str, Any]) -> Tensor | None:
    """Return the place in the file of each head of values.

    Examples:
        >>> _heads({KEY_HEADS: 2, VALUE_HEADS: 6}).tolist()
        [0, 2, 4, 1, 3, 5]
    """
    keys, values = config.get(KEY_HEADS), config.get(VALUE_HEADS)
    if keys is None or values is None or keys == values:
        return None
    return torch.arange(values).view(-1, keys).T.flatten()


def _spread(heads: Tensor, size: int) -> Tensor:
    return (heads[:, None] * size + torch.arange(size)).flatten()
