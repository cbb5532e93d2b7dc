"""Planted defects of coded products, in every format of codes: each makes the values differ from the definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from foredraft.kernels.compilation import library
from foredraft.model.quantisation.codes import CodeFormat, Codes
from foredraft.model.runner.native.products import pack_codes
from tests.support.compiling import Defects
from tests.support.mutation import Mutation, assert_caught, defect
from tests.support.mutations import code_format_of_the_first, scales_of_the_first_dtype
from tests.unit import test_kernels_codes as products
from tests.unit.test_kernels_codes import CODE_FORMATS, DTYPES, Coded, check_product, codes_of

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels")
FOUR, EIGHT = (CodeFormat(4), torch.bfloat16), (CodeFormat(8), torch.bfloat16)
HALF_FOUR, HALF_EIGHT = (CodeFormat(4), torch.float16), (CodeFormat(8), torch.float16)
FIVE, ZEROS = (CodeFormat(5), torch.float16), (CodeFormat(4, zeros=True), torch.float16)
NESTED_FOUR = CodeFormat(4, unsigned=True, nested=True, offsets=True), torch.int8
NESTED_FIVE = CodeFormat(5, unsigned=True, nested=True, offsets=True), torch.int8
NESTED_SIX = CodeFormat(6, group=16, nested=True), torch.int8
NESTED_THREE = CodeFormat(3, group=16, nested=True), torch.int8
NESTED_BOOK = CodeFormat(4, nested=True, codebook="iq4"), torch.int8
BOOK = CodeFormat(4, codebook="iq4"), torch.float16
PARTS: dict[str, list[Coded]] = {
    "4 and 8 bits": [FOUR, EIGHT],
    "8 and 4 bits": [EIGHT, FOUR],
    "zero points and 8 bits": [ZEROS, HALF_EIGHT],
    "zero points and none": [HALF_FOUR, ZEROS],
    "nested scales of 4 and 6 bits": [NESTED_FOUR, NESTED_SIX],
    "nested scales of 3 and 5 bits": [NESTED_THREE, NESTED_FIVE],
    "nested scales of a codebook and 5 bits": [NESTED_BOOK, NESTED_FIVE],
    "nested scales of a codebook and 6 bits": [NESTED_BOOK, NESTED_SIX],
    "nested scales and others": [NESTED_FIVE, BOOK, NESTED_SIX],
    "5 and 8 bits": [FIVE, HALF_EIGHT],
    "4 bits with offsets and none": [(CodeFormat(4, unsigned=True, offsets=True), torch.float16), HALF_FOUR],
    "two codebooks": [BOOK, (CodeFormat(4, codebook="mxfp4"), torch.bfloat16)],
    "scales of two dtypes": [FOUR, HALF_FOUR],
    "scales of three dtypes": [EIGHT, (CodeFormat(4), torch.float32), HALF_EIGHT],
}


def check_joined(parts: list[Coded], dtype: torch.dtype) -> None:
    columns = 512 if any(code_format.nested for code_format, _ in parts) else 96
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
    assert codes.code_format is not None
    moved = codes.codes.view(torch.int8) + 2 ** (codes.code_format.bits - 1)
    return replace(codes, codes=moved.view(codes.codes.dtype))


def last_group_dropped(codes: Codes) -> Codes:
    return replace(codes, codes=torch.nn.functional.pad(codes.codes[:, :-32], (0, 32)))


def last_group_short(codes: Codes) -> Codes:
    return replace(codes, codes=torch.nn.functional.pad(codes.codes[:, :-2], (0, 2)))


def read_past_the_row(codes: Codes) -> Codes:
    """Read the codes of the last group, two columns late, from those of the next row."""
    flat = codes.codes.flatten().roll(-2).view(codes.shape)
    return replace(codes, codes=torch.cat([codes.codes[:, :-32], flat[:, -32:]], 1))


def scale_past_the_row(codes: Codes) -> Codes:
    scales = codes.scales.clone()
    scales[:, -1] = codes.scales[:, 0].roll(-1)
    return replace(codes, scales=scales)


def packs_other(mutated: Callable[[Codes], Codes]) -> Mutation:
    return lambda sound: lambda codes, *more: sound(mutated(codes), *more)


MUTATED: list[Callable[[Codes], Codes]] = [
    neighbours_swapped, neighbours_scale, signless, last_group_dropped, last_group_short, read_past_the_row,
    scale_past_the_row,
]  # fmt: skip


@pytest.mark.parametrize("mutated", MUTATED, ids=lambda mutated: mutated.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("coded", CODE_FORMATS, ids=str)
def test_defects_of_packed_codes_are_caught(
    coded: Coded, dtype: torch.dtype, mutated: Callable[[Codes], Codes], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (72, 256 if coded[0].nested else 96)
    check = defect(
        "packed",
        pack_codes,
        packs_other(mutated),
        lambda: products.test_values_are_those_of_the_definition(coded, shape, dtype),
    )
    assert_caught(check, monkeypatch)


def scales_reread(joined: Callable[[Any], Codes]) -> Callable[[Any], Codes]:
    """Read the scales of all parts as those of the first, where they are as wide."""

    def mutated(parts: list[Codes]) -> Codes:
        first = parts[0].scales.dtype
        return joined([replace(x, scales=x.scales.half().view(torch.int16).view(first)) for x in parts])

    return mutated


def zero_points_forgotten(of_all: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda code_formats: replace(of_all(code_formats), zeros=False)


def offsets_forgotten(of_all: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda code_formats: replace(of_all(code_formats), offsets=False)


def steps_forgotten(in_steps: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda codes, numbers, steps, *rows: in_steps(codes, numbers, None, *rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("parts", "point", "mutation"),
    [
        ("4 and 8 bits", CodeFormat.of_all, code_format_of_the_first),
        ("zero points and 8 bits", CodeFormat.of_all, code_format_of_the_first),
        ("zero points and none", CodeFormat.of_all, code_format_of_the_first),
        ("zero points and none", CodeFormat.of_all, zero_points_forgotten),
        ("nested scales of 4 and 6 bits", CodeFormat.of_all, offsets_forgotten),
        ("nested scales of 3 and 5 bits", CodeFormat.of_all, code_format_of_the_first),
        ("nested scales of a codebook and 5 bits", CodeFormat.of_all, code_format_of_the_first),
        ("nested scales and others", CodeFormat.of_all, offsets_forgotten),
        ("nested scales and others", Codes._in_steps, steps_forgotten),
        ("5 and 8 bits", CodeFormat.of_all, code_format_of_the_first),
        ("4 bits with offsets and none", CodeFormat.of_all, offsets_forgotten),
        ("two codebooks", CodeFormat.of_all, code_format_of_the_first),
        ("scales of two dtypes", Codes.joined, scales_of_the_first_dtype),
        ("scales of two dtypes", Codes.joined, scales_reread),
        ("scales of three dtypes", Codes.joined, scales_of_the_first_dtype),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_defects_of_joined_parts_are_caught(
    parts: str, point: Any, mutation: Mutation, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = defect(parts, point, mutation, lambda: check_joined(PARTS[parts], dtype))
    assert_caught(joined, monkeypatch)


def other_order(mutated: Callable[[Any], Any]) -> Mutation:

    def mutation(pack: Callable[..., Any]) -> Callable[..., Any]:
        def packs(*given: Any) -> Any:
            product = pack(*given)
            return product if product.order is None else replace(product, order=mutated(product.order))

        return packs

    return mutation


@pytest.mark.parametrize(
    "mutated",
    [lambda order: None, lambda order: order.argsort().int(), lambda order: order.roll(1)],
    ids=["not gathered", "gathered the other way", "gathered one place late"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_defects_of_the_order_of_columns_are_caught(
    dtype: torch.dtype, mutated: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = defect(
        "order",
        pack_codes,
        other_order(mutated),
        lambda: products.test_columns_may_have_an_order_of_their_own(CODE_FORMATS[0], dtype),
    )
    assert_caught(check, monkeypatch)


# name: (old source, new source) of products of integers
INTEGERS = {
    "steps twice as wide": ("exponent > 15 ? exponent - 14 : 1", "exponent > 15 ? exponent - 13 : 1"),
    "inputs cut, not rounded": ("nearest(halves[i] * splat(times))", "halves[i] * splat(times)"),
    "an input that is not finite taken for 0": ("(uint32_t)step << 23 : 0x7fc00000", "(uint32_t)step << 23 : 0"),
    "a book's codes one too high": ("[i % 16] + BOOK_MIDDLE", "[i % 16] + BOOK_MIDDLE + 1"),
    "the sum of the columns before": ("sums[from * 2 / SUMMED]", "sums[0]"),
    "codes that begin at 0": (": book ? -BOOK_MIDDLE : code_format.lowest", ": book ? -BOOK_MIDDLE : 0"),
    "zero points of the group before": ("lowest[i] = codes[i] - 16", "lowest[i] = number ? scaling[0].lowest[i] : codes[i] - 16"),
    "high bits beside the low ones": ("base, k, p) << low_bits;", "base, k, p) << (low_bits - 1);"),
}  # fmt: skip


PLANTED = Defects(INTEGERS.values())


@pytest.mark.heavy
@pytest.mark.parametrize("name", INTEGERS)
def test_defects_of_products_of_integers_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_all() -> None:
        for coded in CODE_FORMATS:
            products.test_products_of_integers_are_the_definition_s_to_the_bit(coded, torch.float16)

    PLANTED.assert_caught(check_all, INTEGERS[name], monkeypatch)
