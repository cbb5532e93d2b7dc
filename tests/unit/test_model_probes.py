"""Cancelling probes show the order of additions, which ordinary values hide.

The tests simulate a kernel with another order by splitting a sum. On ordinary bfloat16 values about one result in
ten thousand differs; on the probes, most do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.model import attention
from foredraft.model.layers import Linear
from foredraft.model.runner.invariant_shapes import FALLBACK, find_shapes
from foredraft.model.runner.probes import AttentionProbe, ProductProbe
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import save_checkpoint

COLUMNS, OUTPUTS = 320, 96


def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class SplitLinear(Linear):
    """A product that sums more than 8 rows in two parts, in float32, and so in another order."""

    def __call__(self, x: Tensor) -> Tensor:
        wide, weight = x.float(), self.weight.float()
        parts = [slice(0, COLUMNS)] if x.shape[0] <= 8 else [slice(0, 128), slice(128, COLUMNS)]
        sums = [(wide[:, None, part] * weight[:, part]).sum(-1) for part in parts]
        return torch.stack(sums).sum(0).to(x.dtype)


def test_ordinary_values_hide_the_order_of_additions() -> None:
    x, weight = (
        torch.randn(16, COLUMNS, generator=random()),
        torch.randn(OUTPUTS, COLUMNS, generator=random()),
    )
    product = SplitLinear(weight.bfloat16())
    low = x.bfloat16()
    assert (product(low)[:8] != product(low[:8])).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_product_probe_shows_the_order_of_additions(dtype: torch.dtype) -> None:
    like = torch.zeros(1, dtype=dtype)
    probe = ProductProbe(SplitLinear, (OUTPUTS, COLUMNS), 16, like, random())
    assert probe.agrees(8, 8)
    assert probe.agrees(5, 8)
    assert not probe.agrees(9, 8)
    exact = probe.rows.double() @ probe.product.dense().double().T
    assert exact.abs().max() < 1e-12  # the terms cancel, so the result of a kernel is its rounding error


def test_scores_and_half_of_the_values_of_an_attention_probe_cancel() -> None:
    spec = ModelSpec.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 9,
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 8,
            "max_position_embeddings": 64,
        }
    )
    for dtype in (torch.float32, torch.bfloat16):
        probe = AttentionProbe(spec, 187, 8, torch.zeros(1, dtype=dtype), random())
        scores = probe.q.double() @ probe.k.double().transpose(2, 3)
        assert scores.abs().max() < 1e-6
        halves = probe.output(1, 8, 256, 0, 1.0, apart=False).float().abs().mean((0, 1, 2)).split(8)
        assert halves[0].mean() < 1e-6 < halves[1].mean()


def test_a_kernel_that_splits_long_contexts_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel computes in bfloat16, whose rounding hides most differences."""

    def blockwise(spec: ModelSpec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q.double() @ k.double().transpose(2, 3) * spec.attention_scale + mask
        weights = torch.softmax(scores, -1).float()
        size = 64 if k.shape[2] > 512 else 96
        parts = [
            (w.double() @ x.double()).float()
            for w, x in zip(weights.split(size, -1), v.split(size, 2), strict=True)
        ]
        total = torch.zeros_like(parts[0])
        for part in parts:
            total = total + part
        return total.to(q.dtype)

    monkeypatch.setattr(attention, "_batch_attention", blockwise)
    found = find_shapes(load_decoder(save_checkpoint(tmp_path, dtype=torch.bfloat16)))
    assert found == FALLBACK or found.length_quantum == 1024
