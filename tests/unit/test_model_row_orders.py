"""Row orders: what a checkpoint stores in another order than the decoder computes in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foredraft.model.checkpoint import channel_order, grouped_rows, qkv_order
from foredraft.model.rope import rope_table
from foredraft.model.spec import ModelSpec
from tests.support.checkpoints import LLAMA
from tests.support.mutation import assert_caught, defect

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


def test_neighbours_rotate_as_halves_after_reordering() -> None:
    order = channel_order(HALF)
    assert order is not None and sorted(order.tolist()) == [*range(16)]
    x, position = torch.randn(16, generator=torch.Generator().manual_seed(0)), 5
    cos, sin = rope_table(HALF.rope, 16, 8, torch.device("cpu"), torch.float32)[position]
    ordered = x[order]
    first = ordered[:8] * cos + ordered[:8].roll(4) * sin
    got = torch.cat([first, ordered[8:]])
    assert torch.allclose(got, rotated_as_stored(x, position)[order], atol=1e-6)
    assert channel_order(SPEC) is None and qkv_order(SPEC) is None, "stored in order"


def test_queries_and_keys_are_reordered_and_values_are_not() -> None:
    order, grouped = qkv_order(HALF), qkv_order(replace(HALF, grouped_qkv=True))
    channels = channel_order(HALF)
    assert order is not None and grouped is not None and channels is not None
    for head in range(4 + 2):  # queries and keys
        assert torch.equal(order[16 * head : 16 * (head + 1)], 16 * head + channels)
    assert torch.equal(order[96:], torch.arange(96, 128))
    stored = grouped_rows(4, 2, 16).view(-1, 16)
    assert torch.equal(grouped[:96].view(-1, 16), stored[:6, channels])
    assert torch.equal(grouped[96:], stored[6:].flatten())


def test_each_head_may_have_its_own_key() -> None:
    """As GPT-NeoX stores it: query, key and value of head 0, then of head 1."""
    assert grouped_rows(heads=2, kv_heads=2, head_dim=1).tolist() == [0, 3, 1, 4, 2, 5]


def test_rows_that_are_not_undone_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    as_stored = defect(
        "interleaved rows not undone",
        channel_order,
        lambda sound: lambda spec: torch.arange(spec.head_dim),
        test_neighbours_rotate_as_halves_after_reordering,
    )
    assert_caught(as_stored, monkeypatch)
