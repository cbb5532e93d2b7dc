"""Quantised inputs of linear layers: bit for bit those of the library that defines them, and local to a row."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.bench.machine_record import model_record
from foredraft.drafters.layer_skip import low_bit_copy
from foredraft.errors import CheckpointError
from foredraft.kernels.compilation import library
from foredraft.model.layers import Linear
from foredraft.model.quantisation.codes import quantise
from foredraft.model.quantisation.scheme import ActivationFormat
from foredraft.model.runner import Runner
from foredraft.model.runner.native.products import NativeCodes, pack_codes, pack_native
from foredraft.model.weights import load_decoder, parameter_count
from tests.support import quantising
from tests.support.checkpoints import save_checkpoint
from tests.support.mutation import Mutation, assert_caught, defect
from tests.support.quantising import KINDS, by_token, edit_config

FORMATS = list(ActivationFormat)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BY_GROUP = by_token("float") | {"strategy": "group", "group_size": 128}
KEYS = {  # of `input_activations`
    ActivationFormat.INT8: by_token("int"),
    ActivationFormat.FP8: by_token("float"),
    ActivationFormat.FP8_GROUPS: BY_GROUP,
}
NEEDS_KERNELS = pytest.mark.skipif(library() is None, reason="no kernels")


def inputs(columns: int, dtype: torch.dtype) -> Tensor:
    """Return rows of many sizes, of skewed values, and of zeros."""
    random = torch.Generator().manual_seed(columns)
    rows = torch.randn(37, columns, generator=random) * torch.logspace(-4, 4, 37)[:, None]
    rows[5] = 0
    rows[7] *= torch.linspace(-1, 1, columns) ** 9
    return rows.to(dtype)


def widths(format: ActivationFormat, *others: int) -> tuple[int, ...]:
    """Return numbers of columns; others than whole groups, where there need be none."""
    return (128, 384, 2048) if format == ActivationFormat.FP8_GROUPS else (*others, 2048)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_inputs_become_those_of_the_library(format: ActivationFormat, dtype: torch.dtype) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationStatus
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    args, linear = QuantizationArgs(**KEYS[format]), torch.nn.Linear(1, 1)
    linear.quantization_status = QuantizationStatus.COMPRESSED  # type: ignore[assignment]
    for columns in widths(format, 33, 96):
        x = inputs(columns, dtype)
        expected = forward_quantize(linear, x[None], "input", args)[0]
        assert (expected != x).any()
        assert torch.equal(format.rounded(x), expected)


@NEEDS_KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_the_kernels_round_as_it_is_defined(format: ActivationFormat, dtype: torch.dtype) -> None:
    for columns in widths(format, 34, 96):
        x, identity = inputs(columns, dtype), pack_native(torch.eye(columns, dtype=dtype), None)
        kept = x.clone()
        assert torch.equal(replace(identity, inputs=format)(x), format.rounded(x))
        assert torch.equal(x, kept), "a caller's tensor stays as it is"
        transposed = x.T.contiguous().T
        assert torch.equal(replace(identity, inputs=format)(transposed), format.rounded(x))


def products(format: ActivationFormat, dtype: torch.dtype) -> list[Any]:
    weight = torch.randn(72, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    native = [pack_native(weight, None), pack_codes(quantise(weight, 8), dtype, None)]
    return [replace(product, inputs=format) for product in native]


@NEEDS_KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_beside_any_others(format: ActivationFormat, dtype: torch.dtype) -> None:
    x, before = inputs(256, dtype), torch.get_num_threads()
    try:
        for product in products(format, dtype):
            whole, plain = product(x), replace(product, inputs=None)
            assert torch.equal(whole, plain(format.rounded(x)))
            for threads, count in itertools.product((1, 2), (1, 2, 5, 16, 17, 33)):
                torch.set_num_threads(threads)
                assert torch.equal(product(x[3:][:count]), whole[3:][:count]), (threads, count)
    finally:
        torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of the compiler
@pytest.mark.parametrize("format", [ActivationFormat.INT8, ActivationFormat.FP8_GROUPS])
def test_compiled_layers_round_every_step(format: ActivationFormat) -> None:
    identity = Linear(torch.eye(128, dtype=torch.bfloat16), inputs=format)
    x = inputs(128, torch.bfloat16)
    assert torch.equal(torch.compile(identity, dynamic=False)(x), format.rounded(x))


def save(folder: Path, name: str) -> Path:
    save_checkpoint(folder, "llama")
    quantising.quantise(folder, KINDS[name])
    return folder


@NEEDS_KERNELS
@pytest.mark.parametrize("bits", [4, 8])
def test_a_copy_in_few_bits_rounds_its_inputs_too(tmp_path: Path, bits: int) -> None:
    target = Runner(load_decoder(save(tmp_path / "model", "w8a8"), native=True))
    for product in low_bit_copy(target, bits).decoder.layers[0].products:
        assert isinstance(product, NativeCodes) and product.inputs == ActivationFormat.INT8


@pytest.mark.parametrize("native", [pytest.param(True, marks=NEEDS_KERNELS), False])
@pytest.mark.parametrize(
    ("name", "wanted"),
    [("w8a8", ActivationFormat.INT8), ("fp8-dynamic", ActivationFormat.FP8), ("int8", None)],
)
def test_layers_round_their_inputs_and_the_head_does_not(
    tmp_path: Path, name: str, wanted: ActivationFormat | None, native: bool
) -> None:
    decoder = load_decoder(save(tmp_path / "model", name), native=native)
    for product in decoder.products:
        assert product.inputs == (None if product is decoder.output else wanted)
    record = model_record("target", name, Runner(decoder))
    assert record.parameters == parameter_count(decoder.spec), "reports count the weights"


def with_group(name: str, group: str, **keys: Any) -> dict[str, Any]:
    """Return the keys of a config.json with the scheme of a kind, and a group of modules with other keys."""
    config: dict[str, Any] = dict(KINDS[name].config)
    changed = {**config["config_groups"]["group_0"], **keys}
    return {"quantization_config": {**config, "config_groups": {**config["config_groups"], group: changed}}}


NONE = with_group("w8a8", "keys", targets=["re:.*k_proj"], input_activations=None)
TOO_WIDE = with_group("fp8-square", "group_0", input_activations=BY_GROUP)
Q, K = (rf"model\.layers\.0\.self_attn\.{name}_proj" for name in "qk")


@pytest.mark.parametrize(
    ("name", "keys", "says"),
    [
        ("w8a8", NONE, rf"layers that share their inputs quantise them differently.*{K}: none"),
        (
            "fp8-square",
            TOO_WIDE,
            rf"{Q}, {K}.*inputs of 64 columns have no whole groups \(activations in FP8 by gr",
        ),
    ],
)
def test_inputs_that_cannot_be_rounded_are_refused(
    tmp_path: Path, name: str, keys: dict[str, Any], says: str
) -> None:
    folder = save(tmp_path / "model", name)
    edit_config(folder, keys)
    with pytest.raises(CheckpointError, match=says):
        load_decoder(folder)


def by_127(rounded: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def mutated(self: ActivationFormat, x: Tensor) -> Tensor:
        scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        return (x / scales).round().clamp(-128, 127) * scales

    return mutated


INT8, GROUPS = ActivationFormat.INT8, ActivationFormat.FP8_GROUPS


DEFECTS: list[tuple[str, Mutation, ActivationFormat]] = [
    ("one scale", lambda rounded: lambda self, x: rounded(self, x.flatten()).view(x.shape), INT8),
    ("without rounding", lambda rounded: lambda self, x: x, INT8),
    ("in float32", lambda rounded: lambda self, x: rounded(self, x.float()).to(x.dtype), INT8),
    ("by 127", by_127, INT8),
    ("one scale a row", lambda rounded: lambda self, x: rounded(ActivationFormat.FP8, x), GROUPS),
]


@pytest.mark.parametrize(("name", "mutation", "format"), DEFECTS, ids=[case[0] for case in DEFECTS])
def test_a_planted_defect_is_caught(
    name: str, mutation: Mutation, format: ActivationFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("compressed_tensors")
    check = functools.partial(test_inputs_become_those_of_the_library, format, torch.bfloat16)
    check()
    assert_caught(defect(name, ActivationFormat.rounded, mutation, check), monkeypatch)
