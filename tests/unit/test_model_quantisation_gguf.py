"""The block formats of GGUF files expand to the bits of `gguf.quants.dequantize` (gguf 0.19.0)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from foredraft.model.gguf import file
from foredraft.model.quantisation import blocks as formats
from foredraft.model.quantisation.blocks import BLOCKS, GGUFFormat, fields
from foredraft.model.quantisation.codes import Codes, codebook_values
from tests.support.mutation import Mutant, Mutation, assert_caught, defect

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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_a_format_expands_to_the_bits_of_the_package(kind: str, rows: int, blocks: int) -> None:
    raw = gguf.GGMLQuantizationType[kind]
    stored = random_bytes(kind, rows, blocks)
    wanted = torch.from_numpy(gguf.quants.dequantize(stored, raw))
    columns = blocks * gguf.GGML_QUANT_SIZES[raw][0]
    found = unpack(kind, stored, columns)
    assert found.shape == tuple(wanted.shape) == (rows, columns)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(found.expand(dtype).view(torch.uint8), wanted.to(dtype).view(torch.uint8)), dtype


@pytest.mark.parametrize("kind", [*KINDS, "Q1_0"])
def test_the_size_of_a_block_is_that_of_the_package(kind: str) -> None:
    block = BLOCKS[kind]
    assert (block.values, block.size) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def test_every_type_of_the_package_that_stands_in_files_is_read() -> None:
    within = ("Q8_1", "Q8_K")  # of products in ggml alone
    assert {kind.name for kind in gguf.GGMLQuantizationType} - {*within} <= {*file.BLOCKS}


def test_the_grids_are_those_of_the_package() -> None:
    assert all(torch.equal(formats._grid(name), grid) for name, grid in recipes.grids.grids().items())


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


def moved(size: int, *parts: slice) -> Mutation:
    """Put these parts of each block of so many bytes in the place of the block."""

    def mutation(sound: Callable[..., object]) -> Callable[..., object]:
        def mutated(format: GGUFFormat, shape: tuple[int, int], tensors: dict[str, torch.Tensor]) -> object:
            blocks = tensors["weight"].view(-1, size)
            weight = torch.cat([blocks[:, part] for part in parts], dim=1).view(shape[0], -1)
            return sound(format, shape, {"weight": weight})

        return mutated

    return mutation


DMIN_FIRST = moved(144, slice(2, 4), slice(2), slice(4, None))
NEXT_HIGH_BYTE = moved(176, slice(16), slice(17, 49), slice(48, None))  # the fifth bits of Q5_K one byte late


def added(sound: Callable[..., Codes]) -> Callable[..., Codes]:
    def mutated(*given: object) -> Codes:
        codes = sound(*given)
        assert codes.offsets is not None
        if codes.offset_steps is None:
            return replace(codes, offsets=-codes.offsets)
        return replace(codes, offset_steps=-codes.offset_steps)

    return mutated


def neighbours(sound: Callable[..., Codes]) -> Callable[..., Codes]:
    def mutated(format: GGUFFormat, shape: tuple[int, int], tensors: dict[str, torch.Tensor]) -> Codes:
        codes = sound(format, shape, tensors)
        groups = BLOCKS[format.kind].values // codes.group  # of a block
        return replace(codes, scales=codes.scales.roll(groups, dims=1))

    return mutated


check = test_a_format_expands_to_the_bits_of_the_package
IN_BITS = [kind for kind in KINDS if kind not in ("Q8_0", "TQ1_0", "IQ1_S")]
MUTATIONS: list[tuple[str, Any, Mutation, Sequence[str]]] = [
    ("each block is scaled as its neighbour", GGUFFormat.codes, neighbours, KINDS),
    ("the highest bits first", fields, lambda sound: lambda *given: sound(*given).flip(-2), IN_BITS),
    ("minimums added", GGUFFormat.codes, added, ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")),
    ("the fifth bits from the next byte", formats._five_bits,
     lambda sound: lambda packed: sound(torch.cat([packed[:, 1:5], packed[:, 4:]], dim=1)), ("Q5_0", "Q5_1")),
    ("the fifth bits from the next byte", GGUFFormat.codes, NEXT_HIGH_BYTE, ("Q5_K",)),
    ("a codebook shifted", codebook_values, lambda sound: lambda book, numbers: sound(book, (numbers + 1) & 15),
     ("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4")),
    ("the eighth sign forgotten", formats._signs_of,
     lambda sound: lambda numbers: sound(numbers).index_fill(-1, torch.tensor([7]), 1), ("IQ2_XXS", "IQ2_XS", "IQ3_XXS")),
    ("scales and minimums exchanged", formats._six_bits, lambda sound: lambda packed: sound(packed)[::-1], ("Q4_K", "Q5_K")),
    ("d and dmin exchanged", GGUFFormat.codes, DMIN_FIRST, ("Q4_K",)),
]  # fmt: skip
DEFECTS = [
    defect(f"{what}, {kind}", point, mutation, partial(check, kind, 2, 3))
    for what, point, mutation, kinds in MUTATIONS
    for kind in kinds
]


@pytest.mark.parametrize("mutant", DEFECTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
