"""Row orders: what a checkpoint stores in another order than the decoder computes in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foredraft.model.rope import rope_table
from foredraft.model.row_orders import channel_order, grouped_rows, qkv_order
from foredraft.model.spec import ModelSpec
from tests.support.checkpoints import LLAMA
from tests.support.planting import Mutant, assert_caught, defect

SPEC = ModelSpec.from_hf({**LLAMA, "model_type": "llama", "num_key_value_heads": 2})
HALF = replace(SPEC, interleaved=True, rope=replace(SPEC.rope, share=0.5))


def rotated_as_stored(x: Tensor, position: int) -> Tensor:
    """Rotate channels 2i and 2i + 1 of the first half of a head, [D], as GPT-J and GLM do."""
    out = x.clone()
    frequencies = 10_000.0 ** -(torch.arange(4) / 4)
    cos, sin = (position * frequencies).cos(), (position * frequencies).sin()
    even, odd = x[0:8:2], x[1:8:2]
    out[0:8:2], out[1:8:2] = even * cos - odd * sin, odd * cos + even * sin
    return out


def interleaved_pairs() -> None:
    order = channel_order(HALF)
    assert order is not None and sorted(order.tolist()) == [*range(16)]
    x, position = torch.randn(16, generator=torch.Generator().manual_seed(0)), 5
    cos, sin = rope_table(HALF.rope, 16, 8, torch.device("cpu"), torch.float32)[position]
    ordered = x[order]
    first = ordered[:8] * cos + ordered[:8].roll(4) * sin
    got = torch.cat([first, ordered[8:]])
    assert torch.allclose(got, rotated_as_stored(x, position)[order], atol=1e-6)


def test_neighbours_rotate_as_halves_after_reordering() -> None:
    interleaved_pairs()


def test_queries_and_keys_are_reordered_and_values_are_not() -> None:
    order, channels = qkv_order(HALF), channel_order(HALF)
    assert order is not None and channels is not None
    for head in range(4 + 2):  # queries and keys
        assert torch.equal(order[16 * head : 16 * (head + 1)], 16 * head + channels)
    assert torch.equal(order[96:], torch.arange(96, 128))


def test_groups_and_neighbours_are_undone_together() -> None:
    order = qkv_order(replace(HALF, grouped_qkv=True))
    channels = channel_order(HALF)
    assert order is not None and channels is not None
    stored = grouped_rows(4, 2, 16).view(-1, 16)
    assert torch.equal(order[:96].view(-1, 16), stored[:6, channels])
    assert torch.equal(order[96:], stored[6:].flatten())


def test_what_is_stored_in_order_stays() -> None:
    assert qkv_order(SPEC) is None and channel_order(SPEC) is None


def test_each_head_may_have_its_own_key() -> None:
    """As GPT-NeoX stores it: query, key and value of head 0, then of head 1."""
    assert grouped_rows(heads=2, kv_heads=2, head_dim=1).tolist() == [0, 3, 1, 4, 2, 5]


MUTANTS = [
    defect(
        "interleaved rows not undone",
        channel_order,
        lambda sound: lambda spec: torch.arange(spec.head_dim),
        interleaved_pairs,
    )
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
