"""Weight formats: each stands bit for bit for what the library that defines it makes of the same tensors.

The fixtures were made by the code of those libraries (`tests/data/quantised/make_fixtures.py`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foredraft.model.config import ConfigReader
from foredraft.model.quantisation import gptq, read_quantisation
from foredraft.model.quantisation.codes import CodeFormat, Codes
from foredraft.model.quantisation.compressed_tensors import PackedFormat, PlainFormat
from foredraft.model.quantisation.scheme import Quantisation, WeightFormat
from tests.support.mutation import Mutant, Mutation, assert_caught, defect
from tests.support.mutations import around, instead
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


def scheme(config: dict[str, Any]) -> Quantisation:
    found = read_quantisation(ConfigReader({"quantization_config": config}))
    assert found is not None
    return found


def format_of(config: Mapping[str, Any]) -> WeightFormat:
    found = scheme(dict(config)).format_of(MODULE)
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


@pytest.mark.parametrize(("method", "case"), CASES, ids=[f"{method}-{case}" for method, case in CASES])
def test_a_weight_is_what_the_library_makes_of_it(method: str, case: str) -> None:
    """And rounded once to the model's dtype, where the fixture's values are exact in float32."""
    found = {tuple(name.split(".")): tensor for name, tensor in tensors(method).items()}
    stored = {part: tensor for (own, part), tensor in found.items() if own == case}
    expected, format = stored.pop("expected"), format_of(configs(method)[case])
    rows, columns = expected.shape
    assert expected.unique().numel() > 10
    exact = (torch.bfloat16, torch.float16) if case == "w4-v1" else ()
    for dtype in (expected.dtype, *exact):
        assert torch.equal(expand(format, stored, (rows, columns), dtype), expected.to(dtype)), dtype


@pytest.mark.parametrize(("rows", "columns"), [(128, 256), (130, 200), (5, 7), (256, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_blocks_are_what_transformers_makes_of_them(rows: int, columns: int, dtype: torch.dtype) -> None:
    integration: Any = pytest.importorskip("transformers.integrations.finegrained_fp8")
    random = torch.Generator().manual_seed(rows)
    numbers = torch.randn(rows, columns, generator=random).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=random)
    expected = integration._dequantize_fp8_weight(numbers, scales, [128, 128], torch.float32).to(dtype)
    stored = {"weight": numbers, "weight_scale_inv": scales}
    found = expand(format_of(KINDS["fp8-blocks"].config), stored, (rows, columns), dtype)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("rows", "columns"), [(256, 128), (130, 200), (5, 7), (132, 160)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_are_what_compressed_tensors_makes_of_them(
    rows: int, columns: int, dtype: torch.dtype
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    config = KINDS["fp8-square"].config
    args = QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    plan = QuantizationScheme(targets=["Linear"], weights=args, format="float-quantized")
    random = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=random).to(dtype)
    scales = (torch.rand(-(-rows // 128), -(-columns // 128), generator=random) + 0.01).to(dtype) / 64
    library = BaseCompressor.get_value_from_registry("float-quantized")
    stored = library.compress({"weight": weight, "weight_scale": scales}, plan)
    expected = library.decompress(stored, plan)["weight"]
    assert expected.dtype == dtype and expected.unique().numel() > 10
    assert torch.equal(expand(format_of(config), stored, (rows, columns), dtype), expected)


def test_columns_are_read_group_by_group_in_their_own_order() -> None:
    format = format_of(KINDS["gptq-order"].config)
    for groups, columns in (
        ([0] * 32 + [1] * 32, None),  # in order
        ([1, 0] * 32, [*range(1, 64, 2), *range(0, 64, 2)]),
        ([1] * 32 + [0] * 32, [*range(32, 64), *range(32)]),
    ):
        stored, _ = KINDS["gptq-order"].pack(torch.randn(8, 64))
        order = format.codes((8, 64), stored | {"g_idx": torch.tensor(groups, dtype=torch.int32)}).order
        assert (None if order is None else order.tolist()) == columns


def test_weights_of_several_orders_are_not_joined() -> None:
    codes = Codes(torch.zeros(4, 64, dtype=torch.int8), torch.ones(4, 2), 32, CodeFormat(4))
    one, other = (replace(codes, order=torch.randperm(64).int()) for _ in range(2))
    assert all(map(Codes.can_join, ((codes, codes), (one, one), (one,))))
    assert not any(map(Codes.can_join, ((one, other), (codes, one), (one, codes))))
    assert Codes.joined([one, one]).order is one.order
    wide = Codes(torch.zeros(1, 2**17, dtype=torch.int8), torch.ones(1, 2**12), 32, CodeFormat(4))
    assert Codes.can_join([wide]) and not Codes.can_join([replace(wide, order=torch.arange(2**17).int())])


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("gptq", "gptq, 4 bits in groups of 32"),
        ("w4-zeros", "compressed-tensors, 4 bits in groups of 32"),
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


def mutate_result(change: Callable[..., Any]) -> Mutation:
    """Change what a function returns, given its last argument, too."""
    return lambda sound: lambda *given: change(sound(*given), given[-1])


def rolled(shift: int, dim: int) -> Mutation:
    """Give each group the scale of another."""
    return mutate_result(lambda found, _: Codes(found.codes, found.scales.roll(shift, dims=dim), found.group))


def as_signed(numbers: Tensor, bits: int) -> Tensor:
    """Return unsigned numbers, read as two's complement."""
    return torch.where(numbers >= 2 ** (bits - 1), numbers.short() - 2**bits, numbers.short())


def high_first(numbers: Tensor, bits: int) -> Tensor:
    return numbers.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


blocks_transposed = around(
    lambda codes, self, shape, tensors: codes(
        self, shape, {name: tensor.T if "scale" in name else tensor for name, tensor in tensors.items()}
    )
)


@instead
def last_group_short(self: Codes, dtype: torch.dtype) -> Tensor:
    """Let groups begin one column early, so that the last one is short."""
    scales = self.scales.float().repeat_interleave(self.group, dim=1).roll(-1, dims=1)
    return (self.codes.float() * scales[:, : self.codes.shape[1]]).to(dtype)


def fixture(method: str, case: str) -> Callable[[], None]:
    return lambda: test_a_weight_is_what_the_library_makes_of_it(method, case)


BLOCKS = functools.partial(test_fp8_blocks_are_what_transformers_makes_of_them, 256, 128, torch.float32)
SQUARES = functools.partial(test_blocks_are_what_compressed_tensors_makes_of_them, 132, 160, torch.float32)
TENSORS = "compressed-tensors"
ORDERS = [("gptq", case) for case in ("w4-order", "w4-order-zeros", "w8-order-v2-zeros", "w4-order-unsaid")]
ZEROS = gptq.GPTQFormat._zeros
MUTATIONS: list[tuple[str, Any, Mutation, list[tuple[str, str]]]] = [
    ("nibble order", gptq.unpack, mutate_result(high_first), [("gptq", "w4-v1"), ("awq", "gemm"), (TENSORS, "w4-group")]),
    ("zero point off by one", gptq.subtract_zeros,
     lambda sound: lambda stored, zeros, bits: sound(stored, zeros.short() + 1, bits),
     [("gptq", "w8-v1"), ("awq", "gemm"), (TENSORS, "w4-group"), (TENSORS, "int8-channel-zeros")]),
    ("scale of the neighbouring group", gptq.GPTQFormat.codes, rolled(1, 1), [("gptq", "w4-v1")]),
    ("scale of the neighbouring group", gptq.AWQFormat.codes, rolled(1, 1), [("awq", "gemm")]),
    ("scale of the neighbouring group", PackedFormat.codes, rolled(1, 1), [(TENSORS, "w8-group")]),
    ("order ignored", gptq._order, lambda sound: lambda groups: None, ORDERS),
    ("places for columns", gptq._order, mutate_result(lambda found, _: None if found is None else found.argsort().int()),
     ORDERS),
    ("columns of codes not put back", Codes.expand,
     lambda sound: lambda self, dtype: sound(replace(self, order=None), dtype), [("gptq", "w4-order")]),
    ("zeros less 1", ZEROS, lambda sound: lambda self, tensors: sound(self, tensors) - int(self.less_one),
     [("auto-round", "gptq-zeros"), ("gptq", "w4-v1-zeros")]),
    ("zeros 1 more", ZEROS, mutate_result(lambda zeros, _: zeros + 1), [("auto-round", "plain-zeros")]),
    ("AWQ order", gptq._ordered, lambda sound: lambda words: gptq.unpack(words, 4).T, [("awq", "gemm")]),
    ("unsigned read as signed", gptq.unpack, mutate_result(as_signed),
     [("gptq", "w4-v1"), ("gptq", "w8-v2-zeros"), ("awq", "gemm"), (TENSORS, "w4-group-zeros")]),
    ("last group short", Codes.expand, last_group_short, [(TENSORS, "w4-group")]),
]  # fmt: skip
MUTANTS = [
    defect("scale of a neighbouring block", PlainFormat.codes, rolled(128, 0), BLOCKS),
    defect("scales of blocks transposed", PlainFormat.codes, blocks_transposed, SQUARES),
    *(
        defect(f"{what}, {method} {case}", point, mutation, fixture(method, case))
        for what, point, mutation, cases in MUTATIONS
        for method, case in cases
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_planted_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)


@pytest.mark.parametrize(
    ("kinds", "bits"), [(("Q4_K",), 4), (("Q4_K", "Q6_K"), 6), (("Q4_0", "Q6_K"), 6), (("Q8_0", "Q4_K"), 8)]
)
def test_bits_of_a_scheme_are_the_most_of_its_formats(kinds: tuple[str, ...], bits: int) -> None:
    config = {"quant_method": "gguf", "tensors": {kind: [f"model.{kind}"] for kind in kinds}}
    assert scheme(config).bits == bits


@pytest.mark.parametrize("columns", [96, 128, 160, 256])
def test_fp8_blocks_of_any_width_are_coded_as_they_are(columns: int) -> None:
    stored, _ = KINDS["fp8-blocks"].pack(torch.randn(130, columns))
    format = format_of(KINDS["fp8-blocks"].config)
    codes = format.codes((130, columns), stored)
    joined = Codes.joined([codes])
    assert joined.group == 32 and joined.scales.shape == (130, columns // 32)
    assert torch.equal(joined.expand(torch.float32), codes.expand(torch.float32))
