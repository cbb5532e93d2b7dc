"""The size of a loaded model: its parameters, and the weights that one step reads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from foredraft.bench.bench_records import ModelRecord
from foredraft.model.decoder import Decoder
from foredraft.model.runner import Runner
from foredraft.model.runner.native import NativeCodes
from foredraft.model.transfers import dtype_name

__all__ = ["model_record"]


def model_record(role: str, name: str, runner: Runner, weights: str | None = None) -> ModelRecord:
    """Return the record of a loaded model.

    A tied head counts once, as the head, because every step reads it. An untied embedding counts as
    parameters but not as bytes per step, because a step only looks up rows of it.

    Args:
        role: "target" or "draft".
        name: The model's name.
        runner: The model's runner.
        weights: How the weights are quantised.
    """
    decoder = runner.decoder
    read = sum(_sizes(decoder))
    coded = [product for product in decoder.products if isinstance(product, NativeCodes)]
    saved = sum(math.prod(each.shape) * decoder.dtype.itemsize - each.weight.nbytes for each in coded)
    looked_up = 0 if decoder.spec.tied else decoder.spec.vocab_size * decoder.spec.hidden_size
    return ModelRecord(
        role=role,
        name=name,
        parameters=read + looked_up,
        step_bytes=read * decoder.dtype.itemsize - saved,
        dtype=dtype_name(decoder.dtype),
        weights=weights,
    )


def _sizes(decoder: Decoder) -> Iterator[int]:
    """Yield the number of elements of each weight that a step reads."""
    yield from _elements(decoder.layers)
    yield from _elements(decoder.norm)
    yield from _elements(decoder.output)


def _elements(part: Any) -> Iterator[int]:
    if isinstance(part, Tensor):
        yield part.numel()
    elif isinstance(part, tuple):
        for item in part:
            yield from _elements(item)
    elif hasattr(part, "shape"):  # a linear layer; the tensor of a packed one may be padded
        yield part.shape[0] * part.shape[1]
        yield from _elements(part.bias)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _elements(getattr(part, field.name))
