"""Checkpoints of a real model's shape with random weights, for costs that do not depend on the text."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": {  # the shape of Llama 3.2 1B: 1.24 billion weights
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "tie_word_embeddings": True,
    },
}
COMMON = {
    "max_position_embeddings": 4096,
    "rope_theta": 500_000.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
SHARD_BYTES = 2**28  # bytes of weights in one file, at most


def random_checkpoint(
    folder: Path, keys: dict[str, Any], dtype: torch.dtype = torch.bfloat16, shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write a random Llama without a tokenizer, whose config has these keys, and return the folder.

    Norms are ones, linear layers keep the scale of their inputs, and each weight is a function of its name.
    Only one shard, of so many bytes at most, or the largest tensor, is in memory at a time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = transformers.LlamaConfig(dtype=dtype, **COMMON, **keys)
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in transformers.LlamaForCausalLM(config).named_parameters()}
    listed: dict[str, str] = {}
    for number, names in enumerate(_shards(shapes, dtype, shard_bytes), start=1):
        file = f"model-{number:05}.safetensors"
        save_file({name: _drawn(name, shapes[name], dtype) for name in names}, folder / file)
        listed |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def _shards(shapes: dict[str, torch.Size], dtype: torch.dtype, most: int) -> Iterator[list[str]]:
    """Yield the tensor names of each file: the tensors that begin within the same `most` bytes."""
    begins, end = {}, 0
    for name, shape in shapes.items():
        begins[name] = end // most
        end += shape.numel() * dtype.itemsize
    for _, names in groupby(shapes, begins.__getitem__):
        yield list(names)


def _drawn(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape, dtype=dtype).normal_(0.0, 1 / math.sqrt(shape[1]), generator=random)
