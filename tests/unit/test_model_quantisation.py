"""Weight formats: each stands bit for bit for what the library that defines it makes of the same tensors.

The fixtures were made by the code of those libraries (`tests/data/quantised/make_fixtures.py`). Seen to fail on
every defect of the table below.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foredraft.model.config import ConfigReader
from foredraft.model.quantisation import (
    Codes,
    Coding,
    Quantisation,
    WeightFormat,
    awq,
    gptq,
    packing,
    read_quantisation,
)
from foredraft.model.quantisation.compressed_tensors import PackedFormat
from foredraft.model.quantisation.fp8 import FP8BlockFormat
from tests.support.planting import Mutant, assert_caught, defect
from tests.support.quantising import KINDS
from tests.support.running import ROOT

DATA = ROOT / "tests/data/quantised"
MODULE = "model.layers.0.mlp.up_proj"


def configs(method: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / f"{method}.json").read_text())
    return found


@functools.cache
def tensors(method: str) -> dict[str, Tensor]:
    return load_file(DATA / f"{method}.safetensors")


def scheme(config: dict[str, Any], key: str = "quantization_config") -> Quantisation:
    found = read_quantisation(ConfigReader({key: config}))
    assert found is not None
    return found


def expand(
    format: WeightFormat, stored: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    parts = format.parts(MODULE, shape)
    needed = {suffix for suffix, part in parts.items() if not part.optional}
    assert needed <= set(stored) <= set(parts)
    for suffix, tensor in stored.items():
        assert tuple(tensor.shape) == parts[suffix].shape, suffix
    format.check(MODULE, shape, stored)
    return format.codes(shape, stored).expand(dtype)


CASES = [
    (method, case)
    for method in ("compressed-tensors", "gptq", "awq", "auto-round")
    for case in configs(method)
]


def check_fixture(method: str, case: str) -> None:
    stored = {
        name.removeprefix(f"{case}."): tensor
        for name, tensor in tensors(method).items()
        if name.startswith(f"{case}.")
    }
    expected = stored.pop("expected")
    format = scheme(configs(method)[case]).format_of(MODULE)
    assert format is not None
    rows, columns = expected.shape
    found = expand(format, stored, (rows, columns), expected.dtype)
    assert expected.unique().numel() > 10
    assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize(("method", "case"), CASES, ids=[f"{method}-{case}" for method, case in CASES])
def test_a_weight_is_what_the_library_makes_of_it(method: str, case: str) -> None:
    check_fixture(method, case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_weight_is_rounded_once_to_the_models_dtype(dtype: torch.dtype) -> None:
    """The fixture's expected values are exact in float32."""
    stored = {name: tensors("gptq")[f"w4-v1.{name}"] for name in ("qweight", "qzeros", "scales")}
    expected = tensors("gptq")["w4-v1.expected"]
    rows, columns = expected.shape
    format = scheme(configs("gptq")["w4-v1"]).format_of(MODULE)
    assert format is not None
    assert torch.equal(expand(format, stored, (rows, columns), dtype), expected.to(dtype))


@pytest.mark.parametrize(("rows", "columns"), [(128, 256), (130, 200), (5, 7), (256, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_blocks_are_what_transformers_makes_of_them(rows: int, columns: int, dtype: torch.dtype) -> None:
    integration: Any = pytest.importorskip("transformers.integrations.finegrained_fp8")
    random = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=random)
    blocks = -(-rows // 128), -(-columns // 128)
    settings = SimpleNamespace(weight_block_size=[128, 128], scale_fmt="float")
    quantizer = SimpleNamespace(quantization_config=settings)
    if rows % 128 or columns % 128:  # transformers quantises whole blocks only
        numbers, scales = weight.to(torch.float8_e4m3fn), torch.rand(blocks, generator=random)
        expected = integration._dequantize_fp8_weight(numbers, scales, [128, 128], torch.float32).to(dtype)
    else:
        made = integration.Fp8Quantize(quantizer)._quantize_one("x.weight", weight)
        numbers, scales = made["x.weight"], made["x.weight_scale_inv"]
        expected = integration.Fp8Dequantize(quantizer)._dequantize_one(numbers, scales, dtype)
    format = scheme(dict(KINDS["fp8-blocks"].config)).format_of(MODULE)
    assert format is not None
    found = expand(format, {"weight": numbers, "weight_scale_inv": scales}, (rows, columns), dtype)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("rows", "columns"), [(256, 128), (130, 200), (5, 7), (132, 160)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_are_what_compressed_tensors_makes_of_them(
    rows: int, columns: int, dtype: torch.dtype
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    config = dict(KINDS["fp8-square"].config)
    settings = config["config_groups"]["group_0"]["weights"]
    args = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**settings), format="float-quantized"
    )
    random = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=random).to(dtype)
    scales = (torch.rand(-(-rows // 128), -(-columns // 128), generator=random) + 0.01).to(dtype) / 64
    library = BaseCompressor.get_value_from_registry("float-quantized")
    stored = library.compress({"weight": weight, "weight_scale": scales}, args)
    expected = library.decompress(stored, args)["weight"]
    format = scheme(config).format_of(MODULE)
    assert format is not None
    found = expand(format, stored, (rows, columns), dtype)
    assert expected.dtype == dtype and expected.unique().numel() > 10
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(8, 32), (40, 96), (24, 160)])
def test_shapes_of_every_kind(name: str, rows: int, columns: int) -> None:
    stored, expected = KINDS[name].pack(torch.randn(rows, columns))
    format = scheme(dict(KINDS[name].config)).format_of(MODULE)
    assert format is not None
    assert torch.equal(expand(format, stored, (rows, columns), torch.float32), expected)


def check_order(groups: list[int], columns: list[int] | None) -> None:
    """Hold the columns that are read group by group against those expected; None: they are in order."""
    stored, _ = KINDS["gptq-order"].pack(torch.randn(8, 64))
    stored["g_idx"] = torch.tensor(groups, dtype=torch.int32)
    format = scheme(dict(KINDS["gptq-order"].config)).format_of(MODULE)
    assert format is not None
    order = format.codes((8, 64), stored).order
    assert (None if order is None else order.tolist()) == columns


def test_columns_are_read_group_by_group_in_their_own_order() -> None:
    check_order([0] * 32 + [1] * 32, None)
    check_order([1, 0] * 32, [*range(1, 64, 2), *range(0, 64, 2)])
    check_order([1] * 32 + [0] * 32, [*range(32, 64), *range(32)])


def test_weights_of_several_orders_are_not_joined() -> None:
    codes = Codes(torch.zeros(4, 64, dtype=torch.int8), torch.ones(4, 2), 32, Coding(4))
    one, other = (replace(codes, order=torch.randperm(64).int()) for _ in range(2))
    for parts, joins in [
        ((codes, codes), True), ((one, one), True), ((one,), True), ((one, other), False), ((codes, one), False),
        ((one, codes), False),
    ]:  # fmt: skip
        assert Codes.can_join(parts) is joins
    assert Codes.joined([one, one]).order is one.order
    wide = Codes(torch.zeros(1, 2**17, dtype=torch.int8), torch.ones(1, 2**12), 32, Coding(4))
    assert Codes.can_join([wide]) and not Codes.can_join([replace(wide, order=torch.arange(2**17).int())])


def test_joined_codes_stand_for_the_joined_weights() -> None:
    format = scheme(dict(KINDS["w4-zeros"].config)).format_of(MODULE)
    assert format is not None
    packs = [KINDS["w4-zeros"].pack(torch.randn(rows, 64)) for rows in (5, 12)]
    codes = [format.codes((rows, 64), stored) for rows, (stored, _) in zip((5, 12), packs, strict=True)]
    assert torch.equal(Codes.joined(codes).expand(torch.float32), torch.cat([values for _, values in packs]))


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("gptq", "gptq, 4 bits in groups of 32"),
        ("gptq-v2-8", "gptq, 8 bits per channel"),
        ("gptq-order", "gptq, 4 bits in groups of 32"),
        ("auto-round", "auto-round, 4 bits in groups of 32"),
        ("awq", "awq, 4 bits in groups of 32"),
        ("w4-zeros", "compressed-tensors, 4 bits in groups of 32"),
        ("int8", "compressed-tensors, 8 bits per channel"),
        ("fp8-channel", "compressed-tensors, FP8 per channel"),
        ("w8a8", "compressed-tensors, 8 bits per channel, activations in 8 bits by token"),
        ("fp8-square", "compressed-tensors, FP8 in blocks of 128 x 128"),
        ("fp8-dynamic", "compressed-tensors, FP8 per channel, activations in FP8 by token"),
        ("fp8-blocks", "fp8, FP8 in blocks of 128 x 128 (activations stay in the model's dtype;"),
    ],
)
def test_a_scheme_is_shown_by_method_bits_and_groups(name: str, shown: str) -> None:
    found = scheme(dict(KINDS[name].config))
    assert found.described.startswith(shown)
    assert (found.note is not None) == (name == "fp8-blocks")
    assert hash(found) == hash(scheme(dict(KINDS[name].config)))


Function = Callable[..., Any]


def high_nibble_first(unpack: Function) -> Function:
    return lambda packed, bits: unpack(packed, bits).reshape(*packed.shape, -1, 2).flip(-1).flatten(-3)


def signed_as_unsigned(unpack: Function) -> Function:
    """Read the stored numbers as two's complement."""

    def spoilt(packed: Tensor, bits: int) -> Tensor:
        numbers = unpack(packed, bits).short()
        return torch.where(numbers >= 2 ** (bits - 1), numbers - 2**bits, numbers)

    return spoilt


def neighbouring_scale(codes: Function) -> Function:
    def spoilt(*given: Any) -> Codes:
        found: Codes = codes(*given)
        return Codes(found.codes, found.scales.roll(1, dims=1), found.group)

    return spoilt


def zeros_off_by_one(subtract_zeros: Function) -> Function:
    return lambda stored, zeros, bits: subtract_zeros(stored, zeros.short() + 1, bits)


def other_block_rows(codes: Function) -> Function:
    """Give a row the scale of the block above."""

    def spoilt(*given: Any) -> Codes:
        found: Codes = codes(*given)
        return Codes(found.codes, found.scales.roll(128, dims=0), found.group)

    return spoilt


def rows_in_order(ordered: Function) -> Function:
    """Read the numbers of a word in the order of their bits."""
    return lambda words: packing.unpack(words, 4).T


def zeros_of_v2(zeros: Function) -> Function:
    return lambda self, tensors: zeros(self, tensors) - int(self.less_one)


def zeros_one_more(zeros: Function) -> Function:
    return lambda self, tensors: zeros(self, tensors) + 1


def groups_ignored(order: Function) -> Function:
    return lambda groups: None


def columns_of_places(order: Function) -> Function:
    """Return the place of each column instead of the column at each place."""

    def spoilt(groups: Tensor | None) -> Tensor | None:
        found = order(groups)
        return None if found is None else found.argsort().int()

    return spoilt


def blocks_transposed(codes: Function) -> Function:
    return lambda self, shape, tensors: codes(
        self, shape, {name: tensor.T if "scale" in name else tensor for name, tensor in tensors.items()}
    )


def places_forgotten(expand: Function) -> Function:
    """Leave the columns of codes where they are."""
    return lambda self, dtype: expand(replace(self, order=None), dtype)


def last_group_short(expand: Function) -> Function:
    """Let groups begin one column early, so that the last one is short."""

    def spoilt(self: Codes, dtype: torch.dtype) -> Tensor:
        scales = self.scales.float().repeat_interleave(self.group, dim=1).roll(-1, dims=1)
        return (self.codes.float() * scales[:, : self.codes.shape[1]]).to(dtype)

    return spoilt


def fixture(method: str, case: str) -> Callable[[], None]:
    return lambda: check_fixture(method, case)


def check_blocks() -> None:
    test_fp8_blocks_are_what_transformers_makes_of_them(256, 128, torch.float32)


def check_square_blocks() -> None:
    test_blocks_are_what_compressed_tensors_makes_of_them(132, 160, torch.float32)


TENSORS = "compressed-tensors"
MUTANTS: list[Mutant] = [
    *(
        defect(f"nibble order, {method}", packing.unpack, high_nibble_first, fixture(method, case))
        for method, case in [("gptq", "w4-v1"), ("awq", "gemm"), (TENSORS, "w4-group")]
    ),
    *(
        defect(f"zero point off by one, {case}", packing.subtract_zeros, zeros_off_by_one, fixture(method, case))
        for method, case in [("gptq", "w8-v1"), ("awq", "gemm"), (TENSORS, "w4-group"), (TENSORS, "int8-channel-zeros")]
    ),
    *(
        defect(f"scale of the neighbouring group, {seam.__qualname__}", seam, neighbouring_scale, fixture(method, case))
        for seam, method, case in [
            (gptq.GPTQFormat.codes, "gptq", "w4-v1"),
            (awq.AWQFormat.codes, "awq", "gemm"),
            (PackedFormat.codes, TENSORS, "w8-group"),
        ]
    ),
    defect("scale of a neighbouring block", FP8BlockFormat.codes, other_block_rows, check_blocks),
    defect("scales of blocks transposed", FP8BlockFormat.codes, blocks_transposed, check_square_blocks),
    *(
        defect(f"{spoiler.__name__}, {case}", gptq._order, spoiler, fixture("gptq", case))
        for spoiler in (groups_ignored, columns_of_places)
        for case in ("w4-order", "w4-order-zeros", "w8-order-v2-zeros", "w4-order-unsaid")
    ),
    defect("columns of codes not put back", Codes.expand, places_forgotten, fixture("gptq", "w4-order")),
    defect("AutoRound zeros not less 1", gptq.GPTQFormat._zeros, zeros_of_v2, fixture("auto-round", "gptq-zeros")),
    defect("AutoRound zeros less 1", gptq.GPTQFormat._zeros, zeros_one_more, fixture("auto-round", "plain-zeros")),
    defect("AWQ order", awq._ordered, rows_in_order, fixture("awq", "gemm")),
    defect("GPTQ v1 zeros read as v2", gptq.GPTQFormat._zeros, zeros_of_v2, fixture("gptq", "w4-v1-zeros")),
    *(
        defect(f"unsigned read as signed, {case}", packing.unpack, signed_as_unsigned, fixture(method, case))
        for method, case in [("gptq", "w4-v1"), ("gptq", "w8-v2-zeros"), ("awq", "gemm"), (TENSORS, "w4-group-zeros")]
    ),
    defect("last group short", Codes.expand, last_group_short, fixture(TENSORS, "w4-group")),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_planted_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)


@pytest.mark.parametrize(
    ("kinds", "bits"),
    [(("Q4_K",), 4), (("Q4_K", "Q6_K"), 6), (("Q4_0", "Q6_K"), 6), (("Q8_0", "Q4_K"), 8)],
)
def test_bits_of_a_scheme_are_the_most_of_its_formats(kinds: tuple[str, ...], bits: int) -> None:
    """Whether one coding could hold them all or not."""
    config = {"quant_method": "gguf", "tensors": {kind: [f"model.{kind}"] for kind in kinds}}
    assert scheme(config).bits == bits


@pytest.mark.parametrize("columns", [96, 128, 160, 256])
def test_fp8_blocks_of_any_width_are_coded_as_they_are(columns: int) -> None:
    """The last block of a row may have fewer columns."""
    stored, _ = KINDS["fp8-blocks"].pack(torch.randn(130, columns))
    format = scheme(dict(KINDS["fp8-blocks"].config)).format_of(MODULE)
    assert format is not None
    codes = format.codes((130, columns), stored)
    joined = Codes.joined([codes])
    assert joined.group == 32 and joined.scales.shape == (130, columns // 32)
    assert torch.equal(joined.expand(torch.float32), codes.expand(torch.float32))
