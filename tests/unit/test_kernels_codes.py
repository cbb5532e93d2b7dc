"""Products with coded weights: right values, the same bits at every shape, and codes that come back as they were."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foredraft.kernels.compilation import library
from foredraft.kernels.pool import Arena
from foredraft.model.quantisation.codes import (
    BITS,
    MOST,
    SUPER,
    CodeFormat,
    Codes,
    codebook_values,
    define,
    quantise,
)
from foredraft.model.quantisation.scheme import rounded_to_integers
from foredraft.model.runner.native.products import (
    NativeCodes,
    code_native,
    coded_bytes,
    multiplies_integers,
    pack_codes,
    pack_native,
    pack_pieces,
)
from tests.support.quantising import integer_product

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels")
SHAPES = [(72, 96), (32, 32), (1, 64), (256, 320), (100, 2048)]
NESTED_SHAPES = [(72, 256), (1, 512), (100, 2048)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


CODE_FORMATS = [
    (CodeFormat(4), torch.bfloat16),
    (CodeFormat(8), torch.bfloat16),
    (CodeFormat(4, zeros=True), torch.float16),
    (CodeFormat(8), torch.float16),
    (CodeFormat(4), torch.float32),
    (CodeFormat(8, float8=True), torch.bfloat16),
    (CodeFormat(8, float8=True), torch.float32),
    (CodeFormat(4, unsigned=True, offsets=True), torch.float16),
    (CodeFormat(5), torch.float16),
    (CodeFormat(5, unsigned=True, offsets=True), torch.float16),
    (CodeFormat(8, offsets=True), torch.float16),
    (CodeFormat(8, offsets=True, wide=True), torch.float32),
    (CodeFormat(8, group=16, offsets=True, wide=True), torch.float32),
    (CodeFormat(6, group=16), torch.bfloat16),
    (CodeFormat(4, codebook="iq4"), torch.float16),
    (CodeFormat(4, codebook="mxfp4"), torch.bfloat16),
    (CodeFormat(2, group=16, unsigned=True, nested=True, offsets=True), torch.int8),
    (CodeFormat(3, group=16, nested=True), torch.int8),
    (CodeFormat(4, unsigned=True, nested=True, offsets=True), torch.int8),
    (CodeFormat(4, nested=True), torch.int8),
    (CodeFormat(4, nested=True, codebook="iq4"), torch.int8),
    (CodeFormat(4, nested=True, offsets=True, codebook="iq4"), torch.int8),
    (CodeFormat(5, unsigned=True, nested=True, offsets=True), torch.int8),
    (CodeFormat(6, group=16, nested=True), torch.int8),
    (CodeFormat(6, group=16, nested=True, offsets=True), torch.int8),
    (CodeFormat(8, nested=True, offsets=True), torch.int8),
    (CodeFormat(8, group=16, nested=True, offsets=True), torch.int8),
]
CASES = [(coded, shape) for coded in CODE_FORMATS for shape in (NESTED_SHAPES if coded[0].nested else SHAPES)]
PARTS = ("codes", "scales", "steps", "offsets", "offset_steps")
Coded = tuple[CodeFormat, torch.dtype]


def codes_of(rows: int, columns: int, coded: Coded) -> Codes:
    """Return random codes, with the extreme ones, and random scales, with subnormal ones."""
    code_format, dtype = coded
    random = torch.Generator().manual_seed(rows + columns)
    low, high = code_format.lowest, code_format.lowest + 2**code_format.bits
    codes = torch.randint(low, high, (rows, columns), generator=random, dtype=torch.int8)
    codes[0, :2] = torch.tensor([low, high - 1])
    if code_format.codebook is not None:
        codes = codebook_values(code_format.codebook, codes - low)
    if code_format.float8:
        codes = codes.where((codes & 127) != 127, 0).view(torch.float8_e4m3fn)
    shape = rows, columns // code_format.group
    if code_format.nested:
        steps = rows, columns // SUPER
        # a scaled code is exact in float32: codes of more than 6 bits have scales of 6
        most = 32 if code_format.bits == 8 or code_format.codebook is not None else 128
        numbers = [torch.randint(-most, most, shape, generator=random, dtype=torch.int8) for _ in range(2)]
        sizes = [torch.randn(steps, generator=random).half() for _ in range(2)]
        sizes[0][0, 0] = 2.0**-22
        more = {"offsets": numbers[1], "offset_steps": sizes[1]} if code_format.offsets else {}
        return Codes(codes, numbers[0], code_format.group, code_format, sizes[0], **more)
    scales = torch.randn(shape, generator=random)
    if dtype == torch.float16:
        scales[::3] *= 2.0**-22
    offsets = torch.randn(shape, generator=random).to(dtype) if code_format.offsets else None
    if code_format.wide:  # nested ones were widened, so that a scaled code is exact
        scales = torch.randn(shape, generator=random).half() * torch.arange(shape[1]).remainder(64)
    if code_format.zeros:
        shifts = torch.randint(-8, 9, scales.shape, generator=random, dtype=torch.int8)
        shifts[0, 0] = -8
        codes = (codes + shifts.repeat_interleave(32, 1)).clamp_max(15)
    return Codes(codes, scales.to(dtype), code_format.group, code_format, offsets=offsets)


def wide_enough(coded: Coded) -> int:
    return 512 if coded[0].nested else 320


def in_steps(numbers: Tensor, steps: Tensor | None, group: int) -> Tensor:
    found = numbers.double().repeat_interleave(group, 1)
    return found if steps is None else found * steps.double().repeat_interleave(SUPER, 1)


def scaled_and_offsets(codes: Codes) -> tuple[Tensor, Tensor]:
    scaled = codes.codes.double() * in_steps(codes.scales, codes.steps, codes.group)
    if codes.offsets is None:
        return scaled, torch.zeros_like(scaled)
    return scaled, in_steps(codes.offsets, codes.offset_steps, codes.group)


def by_integers(codes: Codes, dtype: torch.dtype) -> bool:
    return multiplies_integers(dtype) and codes.code_format is not None and not codes.code_format.float8


def check_product(codes: Codes, parts: list[Codes], dtype: torch.dtype) -> None:
    """Hold the product of codes against the definition of the parts that are joined in them."""
    rows, columns = codes.shape
    bias = torch.randn(rows)
    product = pack_codes(codes, dtype, bias.to(dtype))
    x = (torch.randn(7, columns, generator=torch.Generator().manual_seed(1)) / 64).to(dtype)
    found = product(x)
    if by_integers(codes, dtype):
        x = rounded_to_integers(x)
    scaled, offsets = map(torch.cat, zip(*map(scaled_and_offsets, parts), strict=True))
    want = x.double() @ (scaled - offsets).T + bias.to(dtype).double()
    size = x.double().abs() @ (scaled.abs() + offsets.abs()).T + want.abs()
    error = torch.finfo(torch.float32).eps * 8 * size + torch.finfo(dtype).eps * want.abs()
    assert ((found.double() - want).abs() <= error).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("coded", "shape"), CASES, ids=str)
def test_values_are_those_of_the_definition(coded: Coded, shape: tuple[int, int], dtype: torch.dtype) -> None:
    codes = codes_of(*shape, coded)
    check_product(codes, [codes], dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("coded", CODE_FORMATS, ids=str)
def test_products_of_integers_are_the_definition_s_to_the_bit(coded: Coded, dtype: torch.dtype) -> None:
    codes = codes_of(72, 512, coded)
    if not by_integers(codes, dtype):
        return
    random = torch.Generator().manual_seed(4)
    x = torch.randn(11, 512, generator=random) * torch.randn(11, 512, generator=random).exp() / 4096
    x[:, ::16] *= 256  # beside them the others have few bits, which show where the weights of these are 0
    form = codes.code_format
    if form is not None and form.codebook is None and not form.zeros:  # whose groups may begin above 0
        codes.codes[:, ::16] = 0
    x[1, 5], x[2, 40], x[3, :64], x[4] = torch.nan, torch.inf, 0, 1e-7
    x[5:, ::7] = 0
    x = x.to(dtype)
    found, want = pack_codes(codes, dtype, None)(x), integer_product(x, codes).to(dtype)
    assert torch.equal(found.isnan(), want.isnan()) and want[1:3].isnan().all()
    assert torch.equal(found.nan_to_num(), want.nan_to_num())


def assert_at_every_row_count(product: NativeCodes, x: Tensor, want: Tensor) -> None:
    """Hold products of some of the 70 rows of x against those of all, by one thread and by two."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for count in (*range(1, 35), 63, 64, 65, 70):
                for first in {0, min(3, 70 - count), 70 - count}:
                    rows = slice(first, first + count)
                    assert torch.equal(product(x[rows]), want[rows]), (threads, count, first)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("coded", CODE_FORMATS, ids=str)
def test_a_row_has_the_same_bits_in_every_product(coded: Coded, dtype: torch.dtype) -> None:
    columns = wide_enough(coded)
    product, x = pack_codes(codes_of(100, columns, coded), dtype, None), torch.randn(70, columns).to(dtype)
    assert_at_every_row_count(product, x, product(x))


@pytest.mark.parametrize("coded", [CODE_FORMATS[at] for at in (0, 1, 5, -1)], ids=str)
def test_a_row_of_tiny_inputs_has_the_same_bits_in_every_product(coded: Coded) -> None:
    """Products and sums of them are denormal numbers, which the matrix unit takes for 0."""
    columns = wide_enough(coded)
    codes = codes_of(100, columns, coded)
    large = replace(
        codes,
        offsets=None,
        offset_steps=None,
        code_format=replace(coded[0], offsets=False),
        scales=torch.full_like(codes.scales, 64),
        steps=None if codes.steps is None else torch.full_like(codes.steps, 64),
    )
    x = torch.randn(70, columns).mul(2.0**-126).bfloat16()
    x[:, ::3] = 0
    product = pack_codes(large, torch.bfloat16, None)
    assert_at_every_row_count(product, x, product(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_than_there_is_room_for_sums_of(dtype: torch.dtype) -> None:
    coded = CodeFormat(6, group=16, nested=True, offsets=True), torch.int8
    columns = 16_384  # room for 16 rows
    product, x = pack_codes(codes_of(40, columns, coded), dtype, None), torch.randn(40, columns).to(dtype)
    whole = product(x)
    for count in (1, 15, 16, 17, 33):
        assert torch.equal(product(x[3:][:count]), whole[3:][:count]), count
    test_values_are_those_of_the_definition(coded, (40, columns), dtype)
    assert not coded[0].holds(2 * MOST)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("coded", "shape"), CASES, ids=str)
def test_packed_codes_come_back(coded: Coded, shape: tuple[int, int], dtype: torch.dtype) -> None:
    codes = codes_of(*shape, coded)
    product = pack_codes(codes, dtype, None, Arena())
    dense = product.dense()
    assert torch.equal(dense, codes.expand(dtype))
    assert product.weight.numel() == coded_bytes(*shape, *coded)
    ids = torch.randint(shape[0], (3, 50), generator=torch.Generator().manual_seed(2))
    for each in (product, pack_native(dense, None)):
        assert torch.equal(each.rows(ids), dense[ids])


@pytest.mark.parametrize("coded", CODE_FORMATS, ids=str)
def test_pieces_are_packed_as_the_whole(coded: Coded) -> None:
    whole = codes_of(100, 512, coded)
    parts = {name: part for name in PARTS if (part := getattr(whole, name)) is not None}
    pieces = (
        replace(whole, **{name: part[first:last] for name, part in parts.items()})
        for first, last in ((0, 32), (32, 96), (96, 100))
    )
    product = pack_pieces(whole.shape, pieces, torch.float32, None)
    assert torch.equal(product.weight, pack_codes(whole, torch.float32, None).weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("coded", CODE_FORMATS, ids=str)
def test_columns_may_have_an_order_of_their_own(coded: Coded, dtype: torch.dtype) -> None:
    """As a product of gathered inputs, to the bit, at every row count."""
    columns = wide_enough(coded)
    plain, bias = codes_of(72, columns, coded), torch.randn(72)
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    product, gathered = (pack_codes(each, dtype, bias) for each in (replace(plain, order=order), plain))
    weight = product.dense()
    assert torch.equal(weight[:, order.long()], plain.expand(dtype))
    x = torch.randn(70, columns).to(dtype)
    kept = x.clone()
    assert_at_every_row_count(product, x, gathered(x[:, order.long()]))
    assert torch.equal(x, kept), "a caller's tensor stays as it is"
    ids = torch.tensor([[0, 71], [5, 33]])
    assert torch.equal(product.rows(ids), weight[ids])


def test_a_copy_in_few_bits_has_the_columns_in_order() -> None:
    order = torch.randperm(320).to(torch.int32)
    codes = replace(codes_of(72, 320, (CodeFormat(8), torch.float32)), order=order)
    product = pack_codes(codes, torch.float32, None)
    copied = code_native(product, 4, Arena())
    assert isinstance(copied, NativeCodes) and copied.order is None
    assert torch.equal(copied.dense(), quantise(product.dense(), 4).expand(torch.float32))


def error_of(weight: Tensor, codes: Codes) -> float:
    difference = codes.expand(torch.float32) - weight.float()
    return float(difference.norm() / weight.float().norm())


@pytest.mark.parametrize(("bits", "most"), [(4, 0.09), (8, 0.006)])
def test_quantised_weights_are_near(bits: int, most: float) -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 96, generator=random).bfloat16()
    codes = quantise(weight, bits)
    assert error_of(weight, codes) < most
    # scales by least squares are nearer than those of the largest weight
    groups = weight.float().view(300, 3, 32)
    scale = groups.abs().amax(-1) / (2 ** (bits - 1) - 1)
    plain = (groups / scale[..., None]).round().view(300, 96).to(torch.int8)
    assert error_of(weight, codes) < error_of(weight, Codes(plain, scale, 32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS.values())
def test_the_kernel_quantises_as_it_is_defined(bits: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, k, generator=random) ** power for n, k, power in ((300, 320, 1), (70, 64, 3))]
    for weight in (*weights, torch.zeros(3, 32), weights[0] * 1e-30, weights[0] * 1e30, weights[0].abs()):
        found, want = quantise(weight.to(dtype), bits), define(weight.to(dtype), bits)
        assert torch.equal(found.codes, want.codes) and torch.equal(found.scales, want.scales)


def test_weights_that_are_codes_stay_exact() -> None:
    codes = codes_of(40, 64, CODE_FORMATS[1])
    ends = codes.codes.view(40, 2, 32).clone()
    ends[..., 0] = -128  # the code of the largest weight
    exact = Codes(ends.view(40, 64), codes.scales, 32, CodeFormat(8))
    weight = exact.expand(torch.float32)
    assert torch.equal(quantise(weight, 8).expand(torch.float32), weight)
    assert torch.equal(quantise(torch.zeros(3, 64), 4).expand(torch.float32), torch.zeros(3, 64))


def test_what_has_no_whole_groups_or_no_more_bits_stays() -> None:
    odd = pack_native(torch.randn(40, 48), None)
    assert code_native(odd, 4, Arena()) is odd
    eight = code_native(pack_native(torch.randn(40, 64), None), 8, Arena())
    assert code_native(eight, 8, Arena()) is eight
    four = code_native(eight, 4, Arena())
    assert isinstance(four, NativeCodes) and four.code_format == CodeFormat(4)
