"""Planted defects of merging LoRAs; the comparison with PEFT must catch each of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.model.lora import finding, folder, merging
from foredraft.model.lora.lora_config import LoraConfig
from foredraft.model.lora.lora_tensors import Product, Replacement, Shift
from tests.parity.test_lora import assert_logits, assert_weights
from tests.support.loras import save_case, save_lora
from tests.support.planting import Mutant, Spoiler, assert_caught, defect

Function = Callable[..., Any]


def logits(name: str) -> Callable[[], None]:
    def check() -> None:
        with tempfile.TemporaryDirectory() as place:
            base, lora = save_case(Path(place), name)
            assert_logits(base, [lora])

    return check


def weights(name: str, dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    def check() -> None:
        with tempfile.TemporaryDirectory() as place:
            base, lora = save_case(Path(place), name)
            assert_weights(base, [lora], dtype)

    return check


def two_loras() -> None:
    with tempfile.TemporaryDirectory() as place:
        base, first = save_case(Path(place), "attention")
        second = save_lora(base, Path(place) / "second", seed=5, target_modules=["q_proj"], r=2, lora_alpha=7)
        assert_weights(base, [first, second])


def small_pieces() -> None:
    """Compare the logits of a model whose weights are merged a few rows at a time."""
    sound = merging.PIECE
    merging.PIECE = 7 * 64
    try:
        logits("embedding")()
    finally:
        merging.PIECE = sound


def spoilt_change(spoil: Callable[..., Tensor]) -> Spoiler:
    """Merge each change by `spoil`, which gets the sound function and its arguments."""
    return lambda changed: lambda *given, **named: spoil(changed, *given, **named)


def twice(changed: Function, values: Tensor, *rest: Any, **named: Any) -> Tensor:
    once: Tensor = changed(values, *rest, **named)
    again: Tensor = changed(once, *rest, **named)
    return again


def rounded_before(changed: Function, values: Tensor, *rest: Any, **named: Any) -> Tensor:
    merged: Tensor = changed(values.bfloat16().float(), *rest, **named)
    return merged


def rounded_change(changed: Function, values: Tensor, *rest: Any, **named: Any) -> Tensor:
    added: Tensor = changed(torch.zeros_like(values), *rest, **named)
    return values + added.bfloat16().float()


def subtracted(changed: Function, values: Tensor, *rest: Any, **named: Any) -> Tensor:
    added: Tensor = changed(torch.zeros_like(values), *rest, **named)
    return values - added


def exchanged(
    changed: Function, values: Tensor, lora: Any, what: Any, piece: slice, read: Any, **named: Any
) -> Tensor:
    """Merge (B·A)ᵀ in place of B·A."""
    merged: Tensor = changed(values, lora, what, piece, read, transposed=not named["transposed"])
    return merged


def first_rows_again(
    changed: Function, values: Tensor, lora: Any, what: Any, piece: slice, *rest: Any, **named: Any
) -> Tensor:
    """Give every piece of a weight the change of its first rows."""
    merged: Tensor = changed(values, lora, what, slice(0, piece.stop - piece.start), *rest, **named)
    return merged


def without(kind: type) -> Spoiler:
    """Leave out the changes of a kind."""
    return spoilt_change(
        lambda changed, values, lora, what, *rest, **named: (
            values if isinstance(what, kind) else changed(values, lora, what, *rest, **named)
        )
    )


def unscaled_shift(
    changed: Function, values: Tensor, lora: Any, what: Any, *rest: Any, **named: Any
) -> Tensor:
    merged: Tensor = changed(
        values, lora, replace(what, scale=1.0) if isinstance(what, Shift) else what, *rest, **named
    )
    return merged


def last_lora_alone(find: Function) -> Function:
    return lambda files, loras, *rest: find(files, loras[-1:], *rest)


DEFECTS: list[Mutant] = [
    defect("alpha ÷ rank forgotten", LoraConfig.scale_of, lambda sound: lambda self, module: 1.0, logits("attention")),
    defect("alpha not divided by the rank", LoraConfig.scale_of, lambda sound: LoraConfig.alpha_of, logits("attention")),
    defect(
        "rslora's root forgotten", LoraConfig.scale_of,
        lambda sound: lambda self, module: sound(replace(self, root=False), module), logits("rslora"),
    ),
    defect(
        "a root without rslora", LoraConfig.scale_of,
        lambda sound: lambda self, module: sound(replace(self, root=True), module), logits("attention"),
    ),
    defect(
        "alpha_pattern ignored", LoraConfig.alpha_of, lambda sound: lambda self, module: self.alpha, logits("patterns")
    ),
    defect("B·A transposed", merging.changed, spoilt_change(exchanged), logits("square")),
    defect("merged twice", merging.changed, spoilt_change(twice), logits("attention")),
    defect("subtracted", merging.changed, spoilt_change(subtracted), logits("attention")),
    defect(
        "weight rounded before merging", merging.changed, spoilt_change(rounded_before),
        weights("attention", torch.bfloat16),
    ),
    defect(
        "change rounded before merging", merging.changed, spoilt_change(rounded_change),
        weights("attention", torch.bfloat16),
    ),
    defect("rows of another piece", merging.changed, spoilt_change(first_rows_again), small_pieces),
    defect("modules_to_save ignored", merging.changed, without(Replacement), logits("saved-head")),
    defect("changed biases ignored", merging.changed, without(Replacement), logits("own-biases")),
    defect("products ignored", merging.changed, without(Product), logits("all-linear")),
    defect("bias of B ignored", merging.changed, without(Shift), logits("lora-bias")),
    defect("bias of B not scaled", merging.changed, spoilt_change(unscaled_shift), weights("lora-bias")),
    defect("tied embedding changed with the head", folder._unties, lambda sound: lambda lora: False, logits("tied-embedding")),
    defect("last LoRA alone", finding.changed_tensors, last_lora_alone, two_loras),
]  # fmt: skip


@pytest.mark.parametrize("mutant", DEFECTS, ids=lambda mutant: mutant.name)
def test_planted_defects_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
