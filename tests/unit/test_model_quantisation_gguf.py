"""The block formats of GGUF files expand to the bits of `gguf.quants.dequantize` (gguf 0.19.0)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from foredraft.model.gguf import file
from foredraft.model.quantisation import Codes
from foredraft.model.quantisation.blocks import BLOCKS, grids, nested, plain
from foredraft.model.quantisation.blocks.bits import fields
from foredraft.model.quantisation.codes import codebook_values
from foredraft.model.quantisation.gguf import GGUFFormat
from tests.support.planting import Mutant, assert_caught, defect

gguf = pytest.importorskip("gguf")

import recipes.grids  # noqa: E402
from tests.support.gguf_files import HALVES, KINDS  # noqa: E402

SHAPES = [(1, 1), (3, 1), (5, 3), (2, 7)]  # rows, blocks in a row


def random_bytes(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Return rows of random blocks, in which every bit takes part; scales that are not finite are left out."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    found = np.random.default_rng(rows * 100 + blocks).integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in HALVES[kind]:
        found[..., at + 1] &= 0b10111111  # the top bit of a float16's exponent
    if kind == "IQ1_M":
        found[..., 55] &= 0b10111111
    if kind == "MXFP4":
        found[..., 0] = found[..., 0].clip(max=250)  # larger numbers are not finite
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_a_format_expands_to_the_bits_of_the_package(kind: str, rows: int, blocks: int) -> None:
    check(kind, rows, blocks)


@pytest.mark.parametrize("kind", [*KINDS, "Q1_0"])
def test_the_size_of_a_block_is_that_of_the_package(kind: str) -> None:
    block = BLOCKS[kind]
    assert (block.values, block.size) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def test_every_type_of_the_package_that_stands_in_files_is_read() -> None:
    within = ("Q8_1", "Q8_K")  # of products in ggml alone
    assert {kind.name for kind in gguf.GGMLQuantizationType} - {*within} <= {*file.BLOCKS}


def test_the_grids_are_those_of_the_package() -> None:
    assert all(torch.equal(grids._grid(name), grid) for name, grid in recipes.grids.grids().items())


@pytest.mark.parametrize(("kind", "bits", "lowest"), [("Q1_0", 1, -1), ("Q2_0", 2, -1)])
def test_types_that_the_package_does_not_expand(kind: str, bits: int, lowest: int) -> None:
    """A block is a float16 and its codes in their order, the lowest bits first."""
    block, step = BLOCKS[kind], {1: 2, 2: 1}[bits]
    numbers = np.random.default_rng(0).integers(0, 2**bits, (3, 2, block.values), dtype=np.uint8)
    each = (numbers[..., None] >> np.arange(bits)) & 1
    packed = np.packbits(each.reshape(3, 2, -1).astype(np.uint8), axis=-1, bitorder="little")
    scales = np.random.default_rng(1).normal(size=(3, 2, 1)).astype(np.float16)
    stored = np.concatenate([scales.view(np.uint8), packed], axis=-1).reshape(3, -1)
    wanted = (numbers.astype(np.float32) * step + lowest) * scales.astype(np.float32)
    found = unpack(kind, stored, 2 * block.values).expand(torch.float32)
    assert torch.equal(found, torch.from_numpy(wanted.reshape(3, -1)))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_quantised_weights_are_near_the_weights(kind: str) -> None:
    weights = np.random.default_rng(0).normal(size=(8, 96)).astype(np.float32)
    stored = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[kind])
    error = (unpack(kind, stored, 96).expand(torch.float32) - torch.from_numpy(weights)).abs().max()
    most = {"Q4_0": 0.4, "Q4_1": 0.3, "Q5_0": 0.2, "Q5_1": 0.15, "Q8_0": 0.02, "MXFP4": 1.0}
    assert error < most[kind]


def dmin_first(sound: Callable[..., object]) -> Callable[..., object]:
    """Exchange the first two numbers of each block of Q4_K."""

    def spoilt(format: GGUFFormat, shape: tuple[int, int], tensors: dict[str, torch.Tensor]) -> object:
        blocks = tensors["weight"].view(-1, 144)
        exchanged = torch.cat([blocks[:, 2:4], blocks[:, :2], blocks[:, 4:]], dim=1)
        return sound(format, shape, {"weight": exchanged.view(shape[0], -1)})

    return spoilt


def swapped(sound: Callable[..., tuple[object, object]]) -> Callable[..., tuple[object, object]]:
    return lambda packed: sound(packed)[::-1]


def highest_first(sound: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda packed, bits: sound(packed, bits).flip(-2)


def next_byte(sound: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Take the fifth bits of Q5_0 and Q5_1 one byte late."""
    return lambda packed: sound(torch.cat([packed[:, 1:5], packed[:, 4:]], dim=1))


def next_high_byte(sound: Callable[..., Codes]) -> Callable[..., Codes]:
    """Take the fifth bits of Q5_K one byte late."""

    def spoilt(format: GGUFFormat, shape: tuple[int, int], tensors: dict[str, torch.Tensor]) -> Codes:
        blocks = tensors["weight"].view(-1, 176)
        late = torch.cat([blocks[:, :16], blocks[:, 17:49], blocks[:, 48:]], dim=1)
        return sound(format, shape, {"weight": late.view(shape[0], -1)})

    return spoilt


def added(sound: Callable[..., Codes]) -> Callable[..., Codes]:
    """Add offsets instead of subtracting them."""

    def spoilt(*given: object) -> Codes:
        codes = sound(*given)
        assert codes.offsets is not None
        if codes.offset_steps is None:
            return replace(codes, offsets=-codes.offsets)
        return replace(codes, offset_steps=-codes.offset_steps)

    return spoilt


def shifted(sound: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Begin a codebook one code late."""
    return lambda book, numbers: sound(book, (numbers + 1) & 15)


def wrong_sign(sound: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Leave out the eighth sign."""
    return lambda numbers: sound(numbers).index_fill(-1, torch.tensor([7]), 1)


def neighbours(sound: Callable[..., Codes]) -> Callable[..., Codes]:
    """Give each block the scales of the block before it."""

    def spoilt(format: GGUFFormat, shape: tuple[int, int], tensors: dict[str, torch.Tensor]) -> Codes:
        codes = sound(format, shape, tensors)
        groups = BLOCKS[format.kind].values // codes.group  # of a block
        return replace(codes, scales=codes.scales.roll(groups, dims=1))

    return spoilt


OFFSETS = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
DEFECTS = [
    *(
        defect(f"each block is scaled as its neighbour, {kind}", GGUFFormat.codes, neighbours,
               lambda kind=kind: check(kind, 2, 3))
        for kind in KINDS
    ),
    *(
        defect(f"the highest bits first, {kind}", fields, highest_first, lambda kind=kind: check(kind, 2, 3))
        for kind in KINDS if kind not in ("Q8_0", "TQ1_0", "IQ1_S")
    ),
    *(
        defect(f"minimums added, {kind}", GGUFFormat.codes, added, lambda kind=kind: check(kind, 2, 3))
        for kind in OFFSETS
    ),
    *(
        defect(f"the fifth bits from the next byte, {kind}", plain._five_bits, next_byte,
               lambda kind=kind: check(kind, 2, 3))
        for kind in ("Q5_0", "Q5_1")
    ),
    defect("the fifth bits from the next byte, Q5_K", GGUFFormat.codes, next_high_byte, lambda: check("Q5_K", 2, 3)),
    *(
        defect(f"a codebook shifted, {kind}", codebook_values, shifted, lambda kind=kind: check(kind, 2, 3))
        for kind in ("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4")
    ),
    *(
        defect(f"the eighth sign forgotten, {kind}", grids._signs_of, wrong_sign, lambda kind=kind: check(kind, 2, 3))
        for kind in ("IQ2_XXS", "IQ2_XS", "IQ3_XXS")
    ),
    *(
        defect(f"scales and minimums exchanged, {kind}", nested._six_bits, swapped, lambda kind=kind: check(kind, 2, 3))
        for kind in ("Q4_K", "Q5_K")
    ),
    defect("d and dmin exchanged", GGUFFormat.codes, dmin_first, lambda: check("Q4_K", 2, 3)),
]  # fmt: skip


@pytest.mark.parametrize("mutant", DEFECTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
