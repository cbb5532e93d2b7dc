"""Quantised inputs of linear layers: bit for bit those of the library that defines them, and local to a row.

Seen to fail on every defect of the table at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.bench.model_size import model_record
from foredraft.drafters.low_bit import low_bit_copy
from foredraft.errors import CheckpointError
from foredraft.kernels.compilation import library
from foredraft.model.layers import Linear, QuantisedInputs
from foredraft.model.quantisation import ActivationFormat, quantise
from foredraft.model.runner import Runner
from foredraft.model.runner.native import NativeCodes, NativeLinear, pack_codes, pack_native
from foredraft.model.weights import load_decoder, parameter_count
from tests.support import quantising
from tests.support.checkpoints import save_checkpoint
from tests.support.planting import Spoiler, assert_caught, defect
from tests.support.quantising import KINDS, by_token, edit_config

FORMATS = list(ActivationFormat)
DTYPES = [torch.float32, torch.bfloat16]
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


def check_library(format: ActivationFormat, dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_inputs_become_those_of_the_library(format: ActivationFormat, dtype: torch.dtype) -> None:
    check_library(format, dtype)


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
    """Return every kind of product with one weight, over quantised inputs."""
    weight = torch.randn(72, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes = quantise(weight, 8)
    native = [pack_native(weight, None), pack_codes(codes, dtype, None)]
    return [replace(product, inputs=format) for product in native]


@NEEDS_KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_beside_any_others(format: ActivationFormat, dtype: torch.dtype) -> None:
    x, before = inputs(256, dtype), torch.get_num_threads()
    try:
        for product in products(format, dtype):
            whole = product(x)
            plain = replace(product, inputs=None)
            assert torch.equal(whole, plain(format.rounded(x)))
            for threads in (1, 2):
                torch.set_num_threads(threads)
                for count in (1, 2, 5, 16, 17, 33):
                    assert torch.equal(product(x[3:][:count]), whole[3:][:count]), (threads, count)
    finally:
        torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of the compiler
@pytest.mark.parametrize("format", [ActivationFormat.INT8, ActivationFormat.FP8_GROUPS])
def test_compiled_layers_round_every_step(format: ActivationFormat) -> None:
    identity = QuantisedInputs(Linear(torch.eye(128, dtype=torch.bfloat16)), format)
    x = inputs(128, torch.bfloat16)
    assert torch.equal(torch.compile(identity, dynamic=False)(x), format.rounded(x))


@pytest.mark.parametrize("name", ["w8a8", "fp8-dynamic"])
@pytest.mark.parametrize("native", [pytest.param(True, marks=NEEDS_KERNELS), False])
def test_reports_count_the_weights(tmp_path: Path, name: str, native: bool) -> None:
    runner = Runner(load_decoder(save(tmp_path / "model", name), native=native))
    assert model_record("target", name, runner).parameters == parameter_count(runner.decoder.spec)


@NEEDS_KERNELS
@pytest.mark.parametrize("bits", [4, 8])
def test_a_copy_in_few_bits_rounds_its_inputs_too(tmp_path: Path, bits: int) -> None:
    target = Runner(load_decoder(save(tmp_path / "model", "w8a8"), native=True))
    for product in low_bit_copy(target, bits).decoder.layers[0].products:
        assert isinstance(product, NativeCodes) and product.inputs == ActivationFormat.INT8


def save(folder: Path, name: str, **keys: Any) -> Path:
    save_checkpoint(folder, "llama", **keys)
    quantising.quantise(folder, KINDS[name])
    return folder


@pytest.mark.parametrize("native", [pytest.param(True, marks=NEEDS_KERNELS), False])
@pytest.mark.parametrize("name", ["w8a8", "fp8-dynamic", "int8"])
def test_layers_round_their_inputs_and_the_head_does_not(tmp_path: Path, name: str, native: bool) -> None:
    decoder = load_decoder(save(tmp_path / "model", name), native=native)
    wanted = {"w8a8": ActivationFormat.INT8, "fp8-dynamic": ActivationFormat.FP8}.get(name)
    for product in decoder.products:
        found = None
        if isinstance(product, QuantisedInputs):
            found = product.format
        elif isinstance(product, NativeLinear | NativeCodes):
            found = product.inputs
        assert found == (None if product is decoder.output else wanted)


def test_layers_that_share_their_inputs_quantise_them_alike(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "w8a8")
    config: dict[str, Any] = dict(KINDS["w8a8"].config)
    keys = {"targets": ["re:.*k_proj"], "weights": config["config_groups"]["group_0"]["weights"]}
    config["config_groups"] = {**config["config_groups"], "keys": keys}
    edit_config(folder, {"quantization_config": config})
    with pytest.raises(CheckpointError) as caught:
        load_decoder(folder)
    assert "layers that share their inputs quantise them differently" in str(caught.value)
    assert "model.layers.0.self_attn.k_proj: none" in str(caught.value)


def test_inputs_without_whole_groups_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "fp8-square")
    config: dict[str, Any] = dict(KINDS["fp8-square"].config)
    rounding = {**config["config_groups"]["group_0"], "input_activations": BY_GROUP}
    edit_config(folder, {"quantization_config": {**config, "config_groups": {"group_0": rounding}}})
    with pytest.raises(CheckpointError) as caught:
        load_decoder(folder)
    assert "model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj" in str(caught.value)
    assert "inputs of 64 columns have no whole groups (activations in FP8 by groups of 128)" in str(
        caught.value
    )


def one_scale(rounded: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Take the scale from all rows of a pass."""
    return lambda self, x: rounded(self, x.flatten()).view(x.shape)


def without_rounding(rounded: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, x: x


def in_float32(rounded: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Round to the dtype at the end only."""
    return lambda self, x: rounded(self, x.float()).to(x.dtype)


def by_127(rounded: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def spoilt(self: ActivationFormat, x: Tensor) -> Tensor:
        scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        return (x / scales).round().clamp(-128, 127) * scales

    return spoilt


def one_scale_a_row(rounded: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, x: rounded(ActivationFormat.FP8, x)


def test_a_scale_of_a_whole_row_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("compressed_tensors")

    def check() -> None:
        check_library(ActivationFormat.FP8_GROUPS, torch.bfloat16)

    check()
    assert_caught(defect("planted", ActivationFormat.rounded, one_scale_a_row, check), monkeypatch)


@pytest.mark.parametrize(
    "spoiler", [one_scale, without_rounding, in_float32, by_127], ids=lambda s: s.__name__
)
def test_a_planted_defect_is_caught(spoiler: Spoiler, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("compressed_tensors")

    def check() -> None:
        check_library(ActivationFormat.INT8, torch.bfloat16)

    check()
    assert_caught(defect("planted", ActivationFormat.rounded, spoiler, check), monkeypatch)
