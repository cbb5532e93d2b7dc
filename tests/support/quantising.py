"""Whole checkpoints with quantised weights: their linear layers rounded to nearest and packed, format by format.

The packers share no code with the library. What the bits mean is tested against the libraries that define the formats
(`tests/data/quantised`); these checkpoints test how loading finds and joins the weights.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.model.quantisation.codes import SUPER, Codes
from foredraft.model.quantisation.scheme import STEP_GROUP, integers_of

SINGLE = "model.safetensors"
GROUP = 32  # columns of a group
LINEAR = re.compile(r"(model\.layers\.\d+\..+_proj)\.weight")
Packed = tuple[dict[str, Tensor], Tensor]  # tensors by suffix, and the weight that they stand for
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Kind:
    config: Mapping[str, Any]  # its `quantization_config`
    pack: Callable[[Tensor], Packed]  # packs the weight of one module


def words(numbers: Tensor, bits: int) -> Tensor:
    """Return unsigned numbers [N, L] in int32 words [N, ceil(L * bits / 32)], the lowest bits first."""
    factor = 32 // bits
    padded = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % factor))
    shifted = padded.reshape(len(numbers), -1, factor) << (bits * torch.arange(factor))
    return shifted.sum(-1).to(torch.int32)


def rounded(weight: Tensor, bits: int, group: int, zeros: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return numbers [M, K] from 0, scales and zero points [M, G], and the weight that they stand for."""
    grouped = weight.float().reshape(len(weight), -1, group)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    if not zeros:
        high = torch.maximum(-low, high)
        low = -high
    scales = ((high - low) / (2**bits - 1)).half()
    middle = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.float32)
    points = (-low / scales.float()).round().clamp(1, 2**bits - 1) if zeros else middle
    numbers = (grouped / scales.float()[..., None] + points[..., None]).round().clamp(0, 2**bits - 1)
    values = (numbers - points[..., None]) * scales.float()[..., None]
    return numbers.reshape(weight.shape), scales, points, values.reshape(weight.shape)


def gptq(
    bits: int, group: int, *, zeros: bool, less_one: bool, order: bool = True, act_order: bool = False
) -> Callable[[Tensor], Packed]:
    def pack(weight: Tensor) -> Packed:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        places = torch.arange(columns)
        if act_order:
            places = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        groups = (places // size).int()
        by_group = groups.argsort(stable=True)
        numbers, scales, points, values = rounded(weight[:, by_group], bits, size, zeros)
        back = by_group.argsort()
        numbers, values = numbers[:, back], values[:, back]
        tensors = {"qweight": words(numbers, bits).T, "scales": scales.T}
        tensors["qzeros"] = words(points.T - int(less_one), bits)
        return tensors | ({"g_idx": groups} if order else {}), values

    return pack


def awq(weight: Tensor) -> Packed:
    numbers, scales, points, values = rounded(weight, 4, GROUP, zeros=True)

    def ordered(by_column: Tensor) -> Tensor:
        return words(by_column.reshape(len(by_column), -1, 8)[:, :, AWQ_ORDER].flatten(1), 4)

    return {"qweight": ordered(numbers.T), "qzeros": ordered(points.T), "scales": scales.T}, values


def packed(bits: int, group: int | None, *, zeros: bool) -> Callable[[Tensor], Packed]:
    def pack(weight: Tensor) -> Packed:
        numbers, scales, points, values = rounded(weight, bits, group or weight.shape[1], zeros)
        tensors = {"weight_packed": words(numbers, bits), "weight_scale": scales}
        tensors["weight_shape"] = torch.tensor(weight.shape)
        return tensors | ({"weight_zero_point": words(points.T, bits).T} if zeros else {}), values

    return pack


def int8(weight: Tensor) -> Packed:
    numbers, scales, points, values = rounded(weight, 8, weight.shape[1], zeros=False)
    return {"weight": (numbers - points).to(torch.int8), "weight_scale": scales}, values


def float8(weight: Tensor) -> Packed:
    scales = (weight.float().abs().amax(1, keepdim=True) / 448).bfloat16()
    numbers = (weight.float() / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales.float()


def expanded(scales: Tensor, weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    return scales.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


def float8_blocks(weight: Tensor) -> Packed:
    blocks = [part.split(128, 1) for part in weight.float().split(128)]
    scales = torch.tensor([[block.abs().amax() / 448 for block in row] for row in blocks])
    spread = expanded(scales, weight)
    numbers = (weight.float() / spread).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale_inv": scales}, numbers.float() * spread


def float8_square_blocks(weight: Tensor) -> Packed:
    tensors, _ = float8_blocks(weight)
    numbers, scales = tensors["weight"], tensors["weight_scale_inv"].bfloat16()
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * expanded(scales, weight)


def gptq_config(bits: int, group: int, sym: bool, layout: str = "gptq") -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": sym,
        "damp_percent": 0.1, "true_sequential": True, "checkpoint_format": layout, "lm_head": False,
    }  # fmt: skip


def auto_round_config(bits: int, packing: str, sym: bool) -> dict[str, Any]:
    return {
        "quant_method": "auto-round", "packing_format": packing, "bits": bits, "group_size": GROUP, "sym": sym,
        "data_type": "int", "iters": 200, "autoround_version": "0.16.1", "block_name_to_quantize": "model.layers",
    }  # fmt: skip


def by_token(type: str) -> dict[str, Any]:
    return {
        "num_bits": 8, "type": type, "symmetric": True, "strategy": "token", "dynamic": True, "group_size": None,
        "block_structure": None, "actorder": None, "observer": None, "observer_kwargs": {},
    }  # fmt: skip


def tensors_config(layout: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
        "sparsity_config": {}, "transform_config": {}, "version": "0.12.2",
    }  # fmt: skip


PACK = "pack-quantized"
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
W4_ZEROS = {"num_bits": 4, "symmetric": False, "group_size": GROUP, "actorder": "weight"}
BLOCKS = FLOAT8 | {"strategy": "block", "block_structure": [128, 128]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "GEMM"}
ZEROS = gptq_config(4, GROUP, sym=False)
OF_INPUTS = by_token("float") | {"strategy": "group", "group_size": 128}
KINDS: dict[str, Kind] = {
    "gptq": Kind(gptq_config(4, GROUP, sym=True), gptq(4, GROUP, zeros=False, less_one=True)),
    "gptq-zeros": Kind(ZEROS, gptq(4, GROUP, zeros=True, less_one=True, order=False)),
    "gptq-v2-8": Kind(gptq_config(8, -1, False, "gptq_v2"), gptq(8, -1, zeros=True, less_one=False)),
    "gptq-order": Kind(ZEROS | {"desc_act": True}, gptq(4, GROUP, zeros=True, less_one=True, act_order=True)),
    "auto-round": Kind(
        auto_round_config(4, "auto_round:auto_gptq", sym=True),
        gptq(4, GROUP, zeros=False, less_one=True, order=False),
    ),
    "auto-round-zeros": Kind(
        auto_round_config(4, "auto_round", sym=False),
        gptq(4, GROUP, zeros=True, less_one=False, order=False),
    ),
    "auto-round-awq": Kind(auto_round_config(4, "auto_round:auto_awq", sym=False), awq),
    "awq": Kind(AWQ, awq),
    "w4": Kind(tensors_config(PACK, **W4), packed(4, GROUP, zeros=False)),
    "w4-zeros": Kind(tensors_config(PACK, **W4_ZEROS), packed(4, GROUP, zeros=True)),
    "w8-channel": Kind(tensors_config(PACK, num_bits=8, strategy="channel"), packed(8, None, zeros=False)),
    "int8": Kind(tensors_config("int-quantized", num_bits=8, strategy="channel"), int8),
    "fp8-channel": Kind(tensors_config("float-quantized", **FLOAT8), float8),
    "w8a8": Kind(tensors_config("int-quantized", by_token("int"), num_bits=8, strategy="channel"), int8),
    "fp8-square": Kind(tensors_config("float-quantized", **BLOCKS), float8_square_blocks),
    "fp8-dynamic": Kind(tensors_config("float-quantized", by_token("float"), **FLOAT8), float8),
    "fp8-blocks": Kind(FP8, float8_blocks),
}
# kinds whose layers need inputs of whole groups of 128 columns
WIDE = {
    "fp8-square-dynamic": Kind(tensors_config("float-quantized", OF_INPUTS, **BLOCKS), float8_square_blocks)
}


def quantise(
    folder: Path,
    kind: Kind,
    *,
    skipped: str = r"(?!)",
    key: str = "quantization_config",
    linear: re.Pattern[str] = LINEAR,
    transposed: bool = False,
) -> Path:
    """Quantise a checkpoint in place, and return a folder beside it with the same weights, expanded.

    Modules that match `skipped` stay as they are. The first group of `linear` matches the modules. `transposed` weights are
    stored as [K, M].
    """
    twin = folder.with_name(f"{folder.name}-expanded")
    shutil.copytree(folder, twin)
    coded: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / SINGLE).items():
        match = linear.fullmatch(name)
        if match is None or re.search(skipped, match[1]):
            coded[name] = whole[name] = tensor
            continue
        parts, values = kind.pack(tensor.T if transposed else tensor)
        coded |= {f"{match[1]}.{suffix}": part.contiguous() for suffix, part in parts.items()}
        whole[name] = (values.T if transposed else values).to(tensor.dtype).contiguous()
    save_file(coded, folder / SINGLE)
    save_file(whole, twin / SINGLE)
    edit_config(folder, {key: dict(kind.config)})
    return twin


def edit_config(folder: Path, keys: Mapping[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(keys)))


def edit_tensors(folder: Path, changes: Mapping[str, Tensor | None]) -> None:
    tensors: dict[str, Any] = load_file(folder / SINGLE) | dict(changes)
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / SINGLE)


def integer_product(x: Tensor, weight: Codes) -> Tensor:
    """Return x [N, K] times a coded weight [M, K], in float32, to the bit: the definition of `kernels/integers.inc`."""
    integers, steps = integers_of(x)
    sums = torch.zeros(len(x), weight.shape[0])
    codes = weight.codes.double().view(weight.shape[0], -1, weight.group)
    scales, offsets = (
        None if part is None else part.float() if step is None else
        part.float() * step.float().repeat_interleave(SUPER // weight.group, 1)
        for part, step in ((weight.scales, weight.steps), (weight.offsets, weight.offset_steps))
    )  # fmt: skip
    for part, inputs in enumerate(torch.split(integers.double().flatten(-2), weight.group, -1)):
        step = steps[:, part * weight.group // STEP_GROUP]
        products = (inputs @ codes[:, part].T).float() * step
        sums = _multiply_add(products, scales[:, part], sums)
        if offsets is not None:
            sums = _multiply_add(-inputs.sum(-1, keepdim=True).float() * step, offsets[:, part], sums)
    return sums


def _multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a b + c in float32, rounded once."""
    product, other = a.double() * b.double(), c.double()  # the product is exact
    found = product + other
    back = found - product
    error = (product - (found - back)) + (other - back)
    # A sum that was rounded becomes odd, so that the second rounding sees on which side of a tie it lay.
    bits = found.contiguous().view(torch.int64)
    away = torch.where((error > 0) == (found > 0), 1, -1)
    return (bits + away * ((error != 0) & (bits % 2 == 0))).view(torch.float64).float()
