"""Checks that must catch planted defects: comparisons of logits with transformers; and spoilers that several tables use."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.model import forward_context
from foredraft.model.config import ConfigReader
from foredraft.model.decoder import EAGER_PARTS, Attention, Decoder
from foredraft.model.runner.runner import Runner
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder
from tests.parity import test_logits
from tests.parity.test_logits import Pair
from tests.support.checkpoints import save_variant
from tests.support.planting import Spoiler, replaced

Function = Callable[..., Any]


@functools.cache
def pair(name: str) -> Pair:
    with tempfile.TemporaryDirectory() as folder:
        return Pair(save_variant(Path(folder), name))


def with_new_runner(name: str) -> Pair:
    """Return the same weights and expected logits, with a runner that is made under the defect."""
    original, copy = pair(name), object.__new__(Pair)
    copy.__dict__.update(original.__dict__, runner=Runner(original.runner.decoder))
    return copy


def prompt_logits(name: str) -> None:
    test_logits.test_prompt_logits_equal_those_of_transformers(pair(name))


def decoding_logits(name: str) -> None:
    test_logits.test_decoding_logits_equal_those_of_transformers(with_new_runner(name))


def reloaded_logits(name: str) -> None:
    """Compare with the same expected logits, after loading the checkpoint under the defect."""
    original, copy = pair(name), object.__new__(Pair)
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(load_decoder(save_variant(Path(folder), name), length=test_logits.TOTAL))
    copy.__dict__.update(original.__dict__, runner=runner)
    test_logits.test_decoding_logits_equal_those_of_transformers(copy)


def check(kind: object, name: str) -> functools.partial[None]:
    return functools.partial(kind, name)  # type: ignore[call-overload,no-any-return]


def with_rope(**changed: Any) -> Spoiler:
    """Give a function of rotary parameters others."""
    return lambda sound: lambda own, *rest: sound(replace(own, **changed), *rest)


def with_parts(**spoilers: Spoiler) -> Spoiler:
    """Spoil the position-wise parts of a layer."""
    parts = {name: spoiler(getattr(EAGER_PARTS, name)) for name, spoiler in spoilers.items()}
    return lambda run: lambda *args: run(*args, parts=replace(EAGER_PARTS, **parts))


def configured(**keys: Any) -> Spoiler:
    """Read a config in which some keys have other values."""

    def spoiler(sound: Function) -> Function:
        def spoilt(read: ConfigReader) -> Any:
            with replaced(read, "config", {**read.config, **keys}):
                return sound(read)

        return spoilt

    return spoiler


def windows(change: Callable[[int | None, int, int], int | None]) -> Spoiler:
    """Build the masks of other windows: `change` gets a window (None: full attention), a column, and their number."""

    def spoiler(masks: Function) -> Function:
        def spoilt(spec: ModelSpec, positions: Tensor, *rest: Any) -> dict[int | None, Tensor]:
            columns = positions.split(1, dim=1)

            def mask_of(window: int | None, at: int) -> Tensor:
                other = change(window, at, len(columns))
                mask: Tensor = masks(replace(spec, windows=(other,)), columns[at], *rest)[other]
                return mask

            return {
                window: torch.cat([mask_of(window, at) for at in range(len(columns))], 2)
                for window in dict.fromkeys(spec.windows)
            }

        return spoilt

    return spoiler


def projected_with(change: Callable[[Attention], Attention]) -> Spoiler:
    """Project with other weights of an attention sub-layer."""
    return with_parts(
        project=lambda project: lambda spec, own, *rest: project(spec, change(own), *rest),
    )


MASKS, RUN = forward_context.causal_masks, Decoder.run
WIDER = windows(lambda window, at, columns: window and window + 1)
NARROWER = windows(lambda window, at, columns: window and window - 1)
