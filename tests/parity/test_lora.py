"""A model with LoRAs equals what PEFT makes of them: the logits of PEFT's layers, and its merged weights.

Logits are compared with PEFT running the LoRA beside the model, as it was trained. Merged weights are equal
bit for bit in float32, and in other dtypes to PEFT's in float32, rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.model.checkpoint import CheckpointTensors
from foredraft.model.lora import merging
from foredraft.model.lora.folder import with_loras
from foredraft.model.runner import Runner
from foredraft.model.weights import load_decoder
from tests.parity.test_logits import close, prompt_logits
from tests.support.loras import LORAS, peft_logits, peft_weights, save_case, save_lora

TOKENS = torch.randint(3, 97, (1, 70), generator=torch.Generator().manual_seed(7))  # longer than windows


def assert_logits(base: Path, loras: Sequence[Path]) -> None:
    expected = peft_logits(base, *loras, tokens=TOKENS)
    without = prompt_logits(Runner(load_decoder(base)), TOKENS)
    got = prompt_logits(Runner(load_decoder(with_loras(base, loras))), TOKENS)
    assert close(got, expected)
    assert not close(without, expected)


def assert_weights(base: Path, loras: Sequence[Path], dtype: torch.dtype = torch.float32) -> None:
    """Check every weight of the decoder, in the dtype that it is loaded in."""
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
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in tensors.files.items()}
        return {name: tensors.load({name: shape}) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", LORAS)
def test_logits_equal_those_of_peft(name: str, tmp_path: Path) -> None:
    base, lora = save_case(tmp_path, name)
    assert_logits(base, [lora])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name, case in LORAS.items() if case.merges])
def test_merged_weights_are_those_of_peft_rounded_once(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base, lora = save_case(tmp_path, name)
    assert_weights(base, [lora], dtype)


def test_several_loras_add_up(tmp_path: Path) -> None:
    base, first = save_case(tmp_path, "attention")
    second = save_lora(
        base, tmp_path / "second", seed=5, target_modules=["q_proj", "up_proj"], r=2, lora_alpha=7
    )
    assert_logits(base, [first, second])
    assert_weights(base, [first, second])
    assert_weights(base, [first, second], torch.bfloat16)


def test_a_large_weight_is_merged_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, lora = save_case(tmp_path, "embedding")
    folder = with_loras(base, [lora])
    whole = merged_weights(folder, torch.float32)
    monkeypatch.setattr(merging, "PIECE", 7 * 64)
    pieces = merged_weights(folder, torch.float32)
    for name, weight in whole.items():
        torch.testing.assert_close(pieces[name], weight, rtol=1e-5, atol=1e-6)


def test_shards_and_stored_dtypes_change_nothing(tmp_path: Path) -> None:
    base, lora = save_case(tmp_path, "attention", shards=True, dtype=torch.bfloat16)
    assert len(list(base.glob("*.safetensors"))) > 1
    assert_weights(base, [lora])
    assert_weights(base, [lora], torch.bfloat16)
