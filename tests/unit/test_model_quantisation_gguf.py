"""The block formats of GGUF files expand to the bits of `gguf.quants.dequantize` (gguf 0.19.0)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from foredraft.model.quantisation import Codes
from foredraft.model.quantisation import gguf as formats
from foredraft.model.quantisation.gguf import BLOCKS, GGUFFormat
from tests.support.planting import Mutant, assert_caught, defect

gguf = pytest.importorskip("gguf")

SHAPES = [(1, 1), (3, 1), (5, 3), (2, 7)]  # rows, blocks in a row


def random_bytes(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Return rows of random blocks, in which every bit takes part; scales that are not finite are left out."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    found = np.random.default_rng(rows * 100 + blocks).integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in {"Q4_0": [0], "Q8_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}[kind]:
        found[..., at + 1] &= 0b10111111  # the top bit of a float16's exponent
    return found.reshape(rows, -1)


def unpack(kind: str, stored: np.ndarray, columns: int) -> Codes:
    return GGUFFormat(kind).codes((len(stored), columns), {"weight": torch.from_numpy(stored)})


def check(kind: str, rows: int, blocks: int) -> None:
    raw = gguf.GGMLQuantizationType[kind]
    stored = random_bytes(kind, rows, blocks)
    wanted = torch.from_numpy(gguf.quants.dequantize(stored, raw))
    columns = blocks * gguf.GGML_QUANT_SIZES[raw][0]
    found = unpack(kind, stored, columns)
    assert found.shape == tuple(wanted.shape) == (rows, columns)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(found.expand(dtype).view(torch.uint8), wanted.to(dtype).view(torch.uint8)), dtype


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_a_format_expands_to_the_bits_of_the_package(kind: str, rows: int, blocks: int) -> None:
    check(kind, rows, blocks)


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_size_of_a_block_is_that_of_the_package(kind: str) -> None:
    assert BLOCKS[kind][:2] == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_quantised_weights_are_near_the_weights(kind: str) -> None:
    weights = np.random.default_rng(0).normal(size=(8, 96)).astype(np.float32)
    stored = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[kind])
    error = (unpack(kind, stored, 96).expand(torch.float32) - torch.from_numpy(weights)).abs().max()
    assert error < {"Q4_0": 0.4, "Q8_0": 0.02}[kind]


def dmin_first(sound: Callable[..., object]) -> Callable[..., object]:
    """Exchange the first two numbers of each block of Q4_K."""

    def spoilt(format: GGUFFormat, shape: tuple[int, int], tensors: dict[str, torch.Tensor]) -> object:
        blocks = tensors["weight"].view(-1, 144)
        exchanged = torch.cat([blocks[:, 2:4], blocks[:, :2], blocks[:, 4:]], dim=1)
        return sound(format, shape, {"weight": exchanged.view(shape[0], -1)})

    return spoilt


def swapped(sound: Callable[..., tuple[object, object]]) -> Callable[..., tuple[object, object]]:
    return lambda packed: sound(packed)[::-1]


def neighbours(sound: Callable[..., Codes]) -> Callable[..., Codes]:
    """Give each block the scales of the block before it."""

    def spoilt(format: GGUFFormat, shape: tuple[int, int], tensors: dict[str, torch.Tensor]) -> Codes:
        codes = sound(format, shape, tensors)
        groups = BLOCKS[format.kind][0] // codes.group  # of a block
        return replace(codes, scales=codes.scales.roll(groups, dims=1))

    return spoilt


DEFECTS = [
    *(
        defect(f"each block is scaled as its neighbour, {kind}", GGUFFormat.codes, neighbours,
               lambda kind=kind: check(kind, 2, 3))
        for kind in BLOCKS
    ),
    *(
        defect(f"high halves first, {kind}", formats._halves, swapped, lambda kind=kind: check(kind, 2, 3))
        for kind in ("Q4_0", "Q4_K", "Q6_K")
    ),
    defect("scales and minimums exchanged", formats._six_bits, swapped, lambda: check("Q4_K", 2, 3)),
    defect("d and dmin exchanged", GGUFFormat.codes, dmin_first, lambda: check("Q4_K", 2, 3)),
]  # fmt: skip


@pytest.mark.parametrize("mutant", DEFECTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
