"""Checks for planted defects, which compare logits with transformers; and mutations that several tables use."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.model import attention
from foredraft.model.config import ConfigReader
from foredraft.model.decoder import EAGER_PARTS, Attention, Decoder
from foredraft.model.runner import Runner
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder
from tests.parity import test_logits
from tests.parity.test_logits import Pair
from tests.support.checkpoints import save_variant
from tests.support.mutation import Mutation, replaced
from tests.support.mutations import Function, around


@functools.cache
def pair(name: str) -> Pair:
    with tempfile.TemporaryDirectory() as folder:
        return Pair(save_variant(Path(folder), name))


def with_new_runner(name: str, decoder: Decoder | None = None) -> Pair:
    """Return the same expected logits, with a runner that is made under the defect, of the same weights or of others."""
    original, copy = pair(name), object.__new__(Pair)
    copy.__dict__.update(original.__dict__, runner=Runner(decoder or original.runner.decoder))
    return copy


def prompt_logits(name: str) -> None:
    test_logits.test_prompt_logits_equal_those_of_transformers(pair(name))


def decoding_logits(name: str) -> None:
    test_logits.test_decoding_logits_equal_those_of_transformers(with_new_runner(name))


def reloaded_logits(name: str) -> None:
    """Compare with the same expected logits, after loading the checkpoint under the defect."""
    with tempfile.TemporaryDirectory() as folder:
        decoder = load_decoder(save_variant(Path(folder), name), length=test_logits.TOTAL)
    test_logits.test_decoding_logits_equal_those_of_transformers(with_new_runner(name, decoder))


prompt, decoding, reloaded = (
    functools.partial(functools.partial, each) for each in (prompt_logits, decoding_logits, reloaded_logits)
)


def given(**fields: Any) -> Mutation:
    """Give a function a first argument with other fields."""
    return lambda sound: lambda own, *rest: sound(replace(own, **fields), *rest)


def with_spec(**fields: Any) -> Mutation:
    """Mutate a method of an object that reads another spec."""

    @around
    def mutation(method: Function, own: Any, *rest: Any) -> Any:
        with replaced(own, "spec", replace(own.spec, **fields)):
            return method(own, *rest)

    return mutation


without_scale = around(lambda embed, own, *rest: embed(own, *rest) / own.embedding_scale)


def norms_with(offset: float, *, of_heads: bool = False) -> Mutation:
    """Build norms, or those of heads alone, whose weights are that much larger."""

    @around
    def mutation(
        norm: Function, builder: Any, name: str, size: int | None = None, *rest: Any, **eps: Any
    ) -> Any:
        made = norm(builder, name, size, *rest, **eps)
        return made if of_heads and size is None else replace(made, weight=made.weight + offset)

    return mutation


def with_parts(**mutations: Mutation) -> Mutation:
    """Mutate the position-wise parts of a layer."""
    parts = {name: mutation(getattr(EAGER_PARTS, name)) for name, mutation in mutations.items()}
    return lambda run: lambda *args: run(*args, parts=replace(EAGER_PARTS, **parts))


def configured(**keys: Any) -> Mutation:
    @around
    def mutation(sound: Function, read: ConfigReader) -> Any:
        with replaced(read, "config", {**read.config, **keys}):
            return sound(read)

    return mutation


def windows(change: Callable[[int | None, int, int], int | None]) -> Mutation:
    """Build the masks of other windows: `change` gets a window (None: full attention), a column, and their number."""

    @around
    def mutation(masks: Function, spec: ModelSpec, positions: Tensor, *rest: Any) -> dict[int | None, Tensor]:
        columns = positions.split(1, dim=1)

        def mask_of(window: int | None, at: int) -> Tensor:
            other = change(window, at, len(columns))
            mask: Tensor = masks(replace(spec, windows=(other,)), columns[at], *rest)[other]
            return mask

        return {
            window: torch.cat([mask_of(window, at) for at in range(len(columns))], 2)
            for window in dict.fromkeys(spec.windows)
        }

    return mutation


def projected_with(change: Callable[[Attention], Attention]) -> Mutation:
    return with_parts(project=lambda project: lambda spec, own, *rest: project(spec, change(own), *rest))


MASKS, RUN = attention.causal_masks, Decoder.run
WIDER = windows(lambda window, at, columns: window and window + 1)
NARROWER = windows(lambda window, at, columns: window and window - 1)
