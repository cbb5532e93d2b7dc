"""Planted defects of coded products, in every coding: each makes the values differ from the definition.

A weight may be joined from parts of several codings, and with scales of several dtypes, as q, k and v are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from foredraft.kernels.compilation import library
from foredraft.model.quantisation import Codes, Coding
from foredraft.model.runner.native import pack_codes
from tests.support.planting import Spoiler, assert_caught, defect
from tests.support.spoilers import coding_of_the_first, scales_of_the_first_dtype
from tests.unit.test_kernels_codes import (
    CODINGS,
    DTYPES,
    Coded,
    check_order,
    check_product,
    check_values,
    codes_of,
)

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels")
PARTS: dict[str, list[Coded]] = {
    "4 and 8 bits": [(Coding(4), torch.bfloat16), (Coding(8), torch.bfloat16)],
    "8 and 4 bits": [(Coding(8), torch.bfloat16), (Coding(4), torch.bfloat16)],
    "zero points and 8 bits": [(Coding(4, zeros=True), torch.float16), (Coding(8), torch.float16)],
    "zero points and none": [(Coding(4), torch.float16), (Coding(4, zeros=True), torch.float16)],
    "nested scales of 4 and 6 bits": [
        (Coding(4, unsigned=True, nested=True, offsets=True), torch.int8),
        (Coding(6, group=16, nested=True), torch.int8),
    ],
    "nested scales of 3 and 5 bits": [
        (Coding(3, group=16, nested=True), torch.int8),
        (Coding(5, unsigned=True, nested=True, offsets=True), torch.int8),
    ],
    "nested scales of a codebook and 5 bits": [
        (Coding(4, nested=True, codebook="iq4"), torch.int8),
        (Coding(5, unsigned=True, nested=True, offsets=True), torch.int8),
    ],
    "nested scales of a codebook and 6 bits": [
        (Coding(4, nested=True, codebook="iq4"), torch.int8),
        (Coding(6, group=16, nested=True), torch.int8),
    ],
    "nested scales and others": [
        (Coding(5, unsigned=True, nested=True, offsets=True), torch.int8),
        (Coding(4, codebook="iq4"), torch.float16),
        (Coding(6, group=16, nested=True), torch.int8),
    ],
    "5 and 8 bits": [(Coding(5), torch.float16), (Coding(8), torch.float16)],
    "4 bits with and without offsets": [
        (Coding(4, unsigned=True, offsets=True), torch.float16),
        (Coding(4), torch.float16),
    ],
    "two codebooks": [
        (Coding(4, codebook="iq4"), torch.float16),
        (Coding(4, codebook="mxfp4"), torch.bfloat16),
    ],
    "scales of two dtypes": [(Coding(4), torch.bfloat16), (Coding(4), torch.float16)],
    "scales of three dtypes": [
        (Coding(8), torch.bfloat16),
        (Coding(4), torch.float32),
        (Coding(8), torch.float16),
    ],
}


def check_joined(parts: list[Coded], dtype: torch.dtype) -> None:
    """Hold a product joined from parts against the definitions of the parts."""
    columns = 512 if any(coding.nested for coding, _ in parts) else 96
    codes = [codes_of(rows, columns, coded) for rows, coded in zip((40, 24, 8), parts, strict=False)]
    check_product(Codes.joined(codes), codes, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_a_joined_product_has_the_values_of_its_parts(parts: list[Coded], dtype: torch.dtype) -> None:
    check_joined(parts, dtype)


def neighbours_swapped(codes: Codes) -> Codes:
    numbers = codes.codes.view(torch.int8).view(len(codes.codes), -1, 2)
    return replace(codes, codes=numbers.flip(-1).reshape(codes.shape).view(codes.codes.dtype))


def neighbours_scale(codes: Codes) -> Codes:
    return replace(codes, scales=codes.scales.roll(1, 1))


def signless(codes: Codes) -> Codes:
    """Give every number the other sign, which is half of the numbers away, or a bit."""
    assert codes.coding is not None
    moved = codes.codes.view(torch.int8) + 2 ** (codes.coding.bits - 1)
    return replace(codes, codes=moved.view(codes.codes.dtype))


def last_group_dropped(codes: Codes) -> Codes:
    """Stop before the last group of a row."""
    return replace(codes, codes=torch.nn.functional.pad(codes.codes[:, :-32], (0, 32)))


def last_group_short(codes: Codes) -> Codes:
    """Stop before the last two columns of a row, a word."""
    return replace(codes, codes=torch.nn.functional.pad(codes.codes[:, :-2], (0, 2)))


def read_past_the_row(codes: Codes) -> Codes:
    """Read the codes of the last group, two columns late, from those of the next row."""
    flat = codes.codes.flatten().roll(-2).view(codes.shape)
    return replace(codes, codes=torch.cat([codes.codes[:, :-32], flat[:, -32:]], 1))


def scale_past_the_row(codes: Codes) -> Codes:
    """Scale the last group of a row by the first scale of the next row."""
    scales = codes.scales.clone()
    scales[:, -1] = codes.scales[:, 0].roll(-1)
    return replace(codes, scales=scales)


def packs_other(spoilt: Callable[[Codes], Codes]) -> Spoiler:
    """Return the spoiler of `pack_codes` that packs other codes than it is given."""
    return lambda sound: lambda codes, *more: sound(spoilt(codes), *more)


SPOILT: list[Callable[[Codes], Codes]] = [
    neighbours_swapped, neighbours_scale, signless, last_group_dropped, last_group_short, read_past_the_row,
    scale_past_the_row,
]  # fmt: skip


@pytest.mark.parametrize("spoilt", SPOILT, ids=lambda spoilt: spoilt.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("coded", CODINGS, ids=str)
def test_defects_of_packed_codes_are_caught(
    coded: Coded, dtype: torch.dtype, spoilt: Callable[[Codes], Codes], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (72, 256 if coded[0].nested else 96)
    check = defect("packed", pack_codes, packs_other(spoilt), lambda: check_values(coded, shape, dtype))
    assert_caught(check, monkeypatch)


def scales_reread(joined: Callable[[Any], Codes]) -> Callable[[Any], Codes]:
    """Read the scales of all parts as those of the first, where they are as wide."""

    def spoilt(parts: list[Codes]) -> Codes:
        first = parts[0].scales.dtype
        return joined(
            [replace(part, scales=part.scales.half().view(torch.int16).view(first)) for part in parts]
        )

    return spoilt


def zero_points_forgotten(of_all: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda codings: replace(of_all(codings), zeros=False)


def offsets_forgotten(of_all: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda codings: replace(of_all(codings), offsets=False)


def steps_forgotten(in_steps: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda codes, numbers, steps, *rows: in_steps(codes, numbers, None, *rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("parts", "seam", "spoiler"),
    [
        ("4 and 8 bits", Coding.of_all, coding_of_the_first),
        ("zero points and 8 bits", Coding.of_all, coding_of_the_first),
        ("zero points and none", Coding.of_all, coding_of_the_first),
        ("zero points and none", Coding.of_all, zero_points_forgotten),
        ("nested scales of 4 and 6 bits", Coding.of_all, offsets_forgotten),
        ("nested scales of 3 and 5 bits", Coding.of_all, coding_of_the_first),
        ("nested scales of a codebook and 5 bits", Coding.of_all, coding_of_the_first),
        ("nested scales and others", Coding.of_all, offsets_forgotten),
        ("nested scales and others", Codes._in_steps, steps_forgotten),
        ("5 and 8 bits", Coding.of_all, coding_of_the_first),
        ("4 bits with and without offsets", Coding.of_all, offsets_forgotten),
        ("two codebooks", Coding.of_all, coding_of_the_first),
        ("scales of two dtypes", Codes.joined, scales_of_the_first_dtype),
        ("scales of two dtypes", Codes.joined, scales_reread),
        ("scales of three dtypes", Codes.joined, scales_of_the_first_dtype),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_defects_of_joined_parts_are_caught(
    parts: str, seam: Any, spoiler: Spoiler, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = defect(parts, seam, spoiler, lambda: check_joined(PARTS[parts], dtype))
    assert_caught(joined, monkeypatch)


def other_order(spoilt: Callable[[Any], Any]) -> Spoiler:
    """Return the spoiler of `pack_codes` that gives the product another order of columns."""

    def spoiler(pack: Callable[..., Any]) -> Callable[..., Any]:
        def packs(*given: Any) -> Any:
            product = pack(*given)
            return product if product.order is None else replace(product, order=spoilt(product.order))

        return packs

    return spoiler


@pytest.mark.parametrize(
    "spoilt",
    [lambda order: None, lambda order: order.argsort().int(), lambda order: order.roll(1)],
    ids=["not gathered", "gathered the other way", "gathered one place late"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_defects_of_the_order_of_columns_are_caught(
    dtype: torch.dtype, spoilt: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = defect("order", pack_codes, other_order(spoilt), lambda: check_order(CODINGS[0], dtype))
    assert_caught(check, monkeypatch)
