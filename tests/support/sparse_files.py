"""Write models that are larger than any machine's memory: files with valid headers, and holes for values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.support.checkpoints import save_checkpoint

# A model of one layer, whose embedding and head are half a tebibyte each in 16 bits.
KEYS: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 2**15, "head_dim": 16, "intermediate_size": 32,
}  # fmt: skip
WORDS = 2**23


def save_sparse(folder: Path) -> Path:
    save_checkpoint(folder, dtype=torch.bfloat16, tokenizer=True, **KEYS)
    config = json.loads((folder / "config.json").read_text())
    shapes = {}
    with safe_open(folder / "model.safetensors", "pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - safe_open offers no iteration
            rows, *columns = opened.get_slice(name).get_shape()
            shapes[name] = (WORDS if rows == config["vocab_size"] else rows, *columns)
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": WORDS}))
    write_sparse(folder / "model.safetensors", shapes)
    return folder


def write_sparse(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    at, header = 0, {}
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    file.unlink(missing_ok=True)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + at)
