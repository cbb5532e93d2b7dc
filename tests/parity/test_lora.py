"""A model with LoRAs has the logits of PEFT running them beside it, and in every dtype the weights that PEFT merges."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.model.checkpoint import CheckpointTensors
from foredraft.model.locate import with_loras
from foredraft.model.lora import merging
from foredraft.model.lora.adapter import Change, LoraConfig
from foredraft.model.runner import Runner
from foredraft.model.weights import load_decoder
from tests.parity.test_logits import close, prompt_logits
from tests.support.loras import LORAS, peft_logits, peft_weights, save_case, save_lora
from tests.support.mutation import Mutant, Mutation, assert_caught, defect, replaced
from tests.support.mutations import Function, argument

TOKENS = torch.randint(3, 97, (1, 70), generator=torch.Generator().manual_seed(7))  # longer than windows


def assert_logits(base: Path, loras: Sequence[Path]) -> None:
    expected = peft_logits(base, *loras, tokens=TOKENS)
    without = prompt_logits(Runner(load_decoder(base)), TOKENS)
    got = prompt_logits(Runner(load_decoder(with_loras(base, loras))), TOKENS)
    assert close(got, expected)
    assert not close(without, expected)


def assert_weights(base: Path, loras: Sequence[Path], dtype: torch.dtype = torch.float32) -> None:
    expected, got = peft_weights(base, *loras), merged_weights(with_loras(base, loras), dtype)
    assert got.keys() == expected.keys() - ({"lm_head.weight"} - got.keys())
    for name, weight in got.items():
        assert torch.equal(weight, expected[name].to(dtype)), name
    changed = [
        name for name, weight in merged_weights(base, dtype).items() if not torch.equal(weight, got[name])
    ]
    assert changed


def merged_weights(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint as a decoder in `dtype` gets it."""
    with ExitStack() as stack:
        tensors = CheckpointTensors(folder, stack, torch.device("cpu"), dtype)
        shapes = {name: stored.shape for name, stored in tensors.files.items()}
        return {name: tensors.load({name: shape}) for name, shape in shapes.items()}


def check(name: str, comparison: Function, *more: Any) -> None:
    with tempfile.TemporaryDirectory() as place:
        base, lora = save_case(Path(place), name)
        comparison(base, [lora], *more)


@pytest.mark.parametrize("name", LORAS)
def test_logits_equal_those_of_peft(name: str) -> None:
    check(name, assert_logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name, case in LORAS.items() if case.merges])
def test_merged_weights_are_those_of_peft_rounded_once(name: str, dtype: torch.dtype) -> None:
    check(name, assert_weights, dtype)


def test_several_loras_add_up() -> None:
    with tempfile.TemporaryDirectory() as place:
        base, first = save_case(Path(place), "attention")
        second = save_lora(
            base, Path(place) / "second", seed=5, target_modules=["q_proj", "up_proj"], r=2, lora_alpha=7
        )
        assert_logits(base, [first, second])
        assert_weights(base, [first, second])
        assert_weights(base, [first, second], torch.bfloat16)


def test_a_large_weight_is_merged_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, lora = save_case(tmp_path, "embedding")
    folder = with_loras(base, [lora])
    whole = merged_weights(folder, torch.float32)
    monkeypatch.setattr(merging, "MERGED", 7 * 64)
    pieces = merged_weights(folder, torch.float32)
    for name, weight in whole.items():
        torch.testing.assert_close(pieces[name], weight, rtol=1e-5, atol=1e-6)


def test_shards_and_stored_dtypes_change_nothing(tmp_path: Path) -> None:
    base, lora = save_case(tmp_path, "attention", shards=True, dtype=torch.bfloat16)
    assert len(list(base.glob("*.safetensors"))) > 1
    assert_weights(base, [lora])
    assert_weights(base, [lora], torch.bfloat16)


# --- planted defects ------------------------------------------------------------------------------------


def logits(name: str) -> Callable[[], None]:
    return functools.partial(check, name, assert_logits)


def weights(name: str, dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    return functools.partial(check, name, assert_weights, dtype)


def small_pieces() -> None:
    """Compare the logits of a model whose weights are merged a few rows at a time."""
    with replaced(merging, "MERGED", 7 * 64):
        logits("embedding")()


def mutated_change(mutate: Callable[..., Tensor]) -> Mutation:
    """Merge each change by `mutate`, which gets the sound function and its arguments."""
    return lambda changed: lambda *given, **named: mutate(changed, *given, **named)


def mutated_values(mutate: Callable[[Function, Tensor], Tensor]) -> Mutation:
    """Merge each change by `mutate`, which gets a function of values to merged ones, and the values."""
    return lambda changed: (
        lambda values, *rest, **named: mutate(lambda given: changed(given, *rest, **named), values)
    )


def change_of(merge: Function, values: Tensor) -> Tensor:
    change: Tensor = merge(torch.zeros_like(values))
    return change


TWICE = mutated_values(lambda merge, values: merge(merge(values)))
SUBTRACTED = mutated_values(lambda merge, values: values - change_of(merge, values))
ROUNDED_BEFORE = mutated_values(lambda merge, values: merge(values.bfloat16().float()))
ROUNDED_CHANGE = mutated_values(lambda merge, values: values + change_of(merge, values).bfloat16().float())
# (B·A)ᵀ in place of B·A
EXCHANGED = mutated_change(lambda changed, *given, transposed: changed(*given, transposed=not transposed))
# every piece of a weight gets the change of its first rows
FIRST_ROWS_AGAIN = mutated_change(
    lambda changed, values, change, piece, *rest, **named: changed(
        values, change, slice(0, piece.stop - piece.start), *rest, **named
    )
)
UNSCALED_SHIFT = mutated_change(
    lambda changed, values, change, *rest, **named: changed(
        values, change if change.is_product else replace(change, scale=1.0), *rest, **named
    )
)


def is_shift(change: Change) -> bool:
    return not (change.replaces or change.is_product)


def without(kind: Callable[[Change], bool]) -> Mutation:
    """Leave out the changes of a kind."""
    return mutated_change(
        lambda changed, values, change, *rest, **named: (
            values if kind(change) else changed(values, change, *rest, **named)
        )
    )


last_lora_alone = argument(1, lambda loras: loras[-1:])

MUTANTS = [
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
    defect("B·A transposed", merging.changed, EXCHANGED, logits("square")),
    defect("merged twice", merging.changed, TWICE, logits("attention")),
    defect("subtracted", merging.changed, SUBTRACTED, logits("attention")),
    defect(
        "weight rounded before merging", merging.changed, ROUNDED_BEFORE, weights("attention", torch.bfloat16)
    ),
    defect(
        "change rounded before merging", merging.changed, ROUNDED_CHANGE, weights("attention", torch.bfloat16)
    ),
    defect("rows of another piece", merging.changed, FIRST_ROWS_AGAIN, small_pieces),
    defect("modules_to_save ignored", merging.changed, without(lambda change: change.replaces), logits("saved-head")),
    defect("changed biases ignored", merging.changed, without(lambda change: change.replaces), logits("own-biases")),
    defect("products ignored", merging.changed, without(lambda change: change.is_product), logits("all-linear")),
    defect("bias of B ignored", merging.changed, without(is_shift), logits("lora-bias")),
    defect("bias of B not scaled", merging.changed, UNSCALED_SHIFT, weights("lora-bias")),
    defect("tied embedding changed with the head", merging.unties, lambda sound: lambda lora: False, logits("tied-embedding")),
    defect("last LoRA alone", merging.changed_tensors, last_lora_alone, test_several_loras_add_up),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_planted_defects_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
