"""Make the fixtures of quantised weights, with the code of the libraries that define the formats.

    python make_fixtures.py AUTO_GPTQ GPTQMODEL AUTOAWQ AUTO_ROUND [--out FOLDER]

The arguments are the unpacked wheel or source distributions of auto-gptq, gptqmodel, autoawq and auto-round. The
environment has compressed-tensors (with loguru), accelerate, torch and transformers. The committed files were made
with compressed-tensors 0.20.0, auto-gptq 0.7.1, gptqmodel 7.7.0, autoawq 0.2.9 and auto-round 0.16.1.

A library quantises or packs each weight, and dequantises it: that is the tensor `expected`. All but
compressed-tensors dequantise with their scales in float32, so that nothing is rounded. No module of this project
takes part.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

Case = tuple[dict[str, Any], dict[str, Tensor]]  # quantization_config, tensors by suffix


def weight(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / 8


def compressed_tensors() -> dict[str, Case]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    def case(layout: str, rows: int, columns: int, dtype: torch.dtype, **settings: Any) -> Case:
        args = QuantizationArgs(**settings)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
        found = weight(rows, columns, len(cases)).to(dtype)
        grouped = found.reshape(1, 1, -1) if args.strategy == "tensor" else found.reshape(rows, 1, -1)
        if args.strategy == "group":
            grouped = found.reshape(rows, -1, args.group_size)
        scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
        if args.strategy == "tensor":
            scale, zero = scale.reshape(1), zero.reshape(1)
        state = {"weight": found, "weight_scale": scale.to(dtype)}
        if not args.symmetric:
            state["weight_zero_point"] = zero
        compressor = BaseCompressor.get_value_from_registry(layout)
        stored = compressor.compress(state, scheme)
        expected = compressor.decompress(stored, scheme)["weight"]
        about = {"format": layout, "quantization_status": "compressed", "ignore": ["lm_head"]}
        config = QuantizationConfig(config_groups={"group_0": scheme}, **about)
        return json.loads(config.model_dump_json()), {**stored, "expected": expected}

    pack, naive = "pack-quantized", "naive-quantized"
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    cases: dict[str, Case] = {}
    group: dict[str, Any] = {"strategy": "group", "group_size": 32}
    channel: dict[str, Any] = {"num_bits": 8, "strategy": "channel"}
    cases["w4-group"] = case(pack, 24, 96, bf16, num_bits=4, symmetric=True, **group)
    cases["w4-group-zeros"] = case(pack, 20, 96, bf16, num_bits=4, symmetric=False, **group)
    cases["w4-channel-odd"] = case(pack, 7, 37, f16, num_bits=4, symmetric=True, strategy="channel")
    cases["w4-channel-odd-zeros"] = case(pack, 13, 37, f32, num_bits=4, symmetric=False, strategy="channel")
    cases["w8-group"] = case(pack, 12, 64, f16, num_bits=8, symmetric=True, **group)
    cases["w8-group-zeros"] = case(pack, 10, 64, bf16, num_bits=8, symmetric=False, **group)
    cases["w8-channel-odd"] = case(pack, 9, 35, bf16, symmetric=True, **channel)
    cases["int8-channel"] = case("int-quantized", 12, 40, bf16, symmetric=True, **channel)
    cases["int8-channel-zeros"] = case(naive, 11, 33, f16, symmetric=False, **channel)
    cases["int8-tensor"] = case(naive, 9, 16, bf16, num_bits=8, symmetric=True, strategy="tensor")
    float8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    cases["fp8-channel"] = case("float-quantized", 10, 40, bf16, **float8, strategy="channel")
    cases["fp8-tensor"] = case(naive, 10, 24, f32, **float8, strategy="tensor")
    return cases


def parameters(found: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Return scales and zero points [N, G] of rounding to nearest; zero points from 1 to 2^bits - 1."""
    grouped = found.reshape(len(found), -1, group)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    if symmetric:
        scales = (2 * torch.maximum(-low, high) / (2**bits - 1)).half().float()
        return scales, torch.full_like(scales, 2 ** (bits - 1))
    scales = ((high - low) / (2**bits - 1)).half().float()
    return scales, torch.round(-low / scales).clamp(1, 2**bits - 1)


def rounded(found: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Return the nearest values that can be packed: the libraries do not clamp."""
    grouped = found.reshape(*scales.shape, -1)
    codes = torch.round(grouped / scales[..., None] + zeros[..., None]).clamp(0, 2**bits - 1)
    return ((codes - zeros[..., None]) * scales[..., None]).reshape(found.shape)


def gptq(auto_gptq: Path, gptqmodel: Path) -> dict[str, Case]:
    packing = file_module("qlinear_cuda", auto_gptq / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py")
    to_v2 = single_function(gptqmodel / "gptqmodel/utils/model.py", "convert_gptq_v1_to_v2_format_module")

    def case(
        rows: int, columns: int, bits: int, group: int, symmetric: bool, layout: str = "gptq", **flags: bool
    ) -> Case:
        size = columns if group == -1 else group
        found = weight(rows, columns, 100 + len(cases))
        places = torch.arange(columns)
        if flags.pop("ordered", False):  # by activation: any order will do
            places = torch.randperm(columns, generator=torch.Generator().manual_seed(len(cases)))
        groups = places // size
        order = groups.argsort(stable=True)
        scales, zeros = parameters(found[:, order], bits, size, symmetric)
        linear = nn.Linear(columns, rows, bias=False)
        linear.weight.data[:, order] = rounded(found[:, order], scales, zeros, bits)
        module = packing.QuantLinear(bits, group, columns, rows, bias=False, weight_dtype=torch.float32)
        module.pack(linear, scales, zeros.clone(), groups.to(torch.int32))
        expected = module(torch.eye(columns)).T.contiguous()  # float32: no product is rounded
        if layout == "gptq_v2":
            module.qzero_format = lambda format: None
            to_v2(module, bits, torch.int32)
        stored = {name: getattr(module, name) for name in ("qweight", "qzeros", "g_idx")}
        config = {
            "quant_method": "gptq", "bits": bits, "group_size": group, "damp_percent": 0.01, "desc_act": False,
            "static_groups": False, "sym": symmetric, "true_sequential": True, "checkpoint_format": layout,
        }  # fmt: skip
        config |= flags
        return config, {**stored, "scales": module.scales.half(), "expected": expected}

    cases: dict[str, Case] = {}
    cases["w4-v1"] = case(32, 96, 4, 32, True)
    cases["w4-v1-zeros"] = case(64, 64, 4, 32, False)
    cases["w4-v2-zeros"] = case(32, 64, 4, 16, False, "gptq_v2")
    cases["w8-v1"] = case(32, 32, 8, -1, True)
    cases["w8-v1-zeros"] = case(32, 64, 8, 32, False)
    cases["w8-v2-zeros"] = case(32, 32, 8, 16, False, "gptq_v2")
    cases["w4-order"] = case(32, 96, 4, 32, True, ordered=True, desc_act=True)
    cases["w4-order-zeros"] = case(32, 64, 4, 16, False, ordered=True, desc_act=True)
    cases["w8-order-v2-zeros"] = case(32, 64, 8, 32, False, "gptq_v2", ordered=True, desc_act=True)
    cases["w4-order-unsaid"] = case(32, 64, 4, 32, True, ordered=True)
    cases["w4-order-static"] = case(32, 64, 4, 32, True, desc_act=True, static_groups=True)
    cases["w4-order-channel"] = case(32, 32, 4, -1, True, ordered=True, desc_act=True)
    return cases


def awq(autoawq: Path) -> dict[str, Case]:
    add_packages(autoawq, "awq", "awq.modules", "awq.modules.linear", "awq.models")
    from awq.models._config import AwqConfig
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    def case(rows: int, columns: int, group: int, zero_point: bool) -> Case:
        size = columns if group == -1 else group
        found = weight(rows, columns, 200 + len(cases))
        scales, zeros = parameters(found, 4, size, not zero_point)
        linear = nn.Linear(columns, rows, bias=False)
        linear.weight.data = rounded(found, scales, zeros, 4)
        by_column = {"scales": scales.T.contiguous(), "zeros": zeros.T.contiguous()}
        module = WQLinear_GEMM.from_linear(linear, 4, size, **by_column)
        expected = dequantize_gemm(module.qweight, module.qzeros, module.scales.float(), 4, size)
        config = AwqConfig(zero_point=zero_point, q_group_size=group).to_transformers_dict()
        stored = {name: getattr(module, name) for name in ("qweight", "qzeros", "scales")}
        return config, {**stored, "expected": expected.T.contiguous()}

    cases: dict[str, Case] = {}
    cases["gemm"] = case(32, 96, 32, zero_point=True)
    cases["gemm-symmetric"] = case(32, 64, 32, zero_point=False)
    cases["gemm-channel"] = case(64, 20, -1, zero_point=True)
    return cases


def auto_round(source: Path) -> dict[str, Case]:
    sys.path.insert(0, str(source))
    packages = ("auto_round", "auto_round.utils", "auto_round.export", "auto_round.export.export_to_awq")
    add_packages(source, *packages)
    sys.modules["auto_round.utils"].get_packing_device = torch.device
    exporting = source / "auto_round/export/export_to_autoround/export.py"
    class_for = single_function(exporting, "dynamic_import_quant_linear_for_packing")

    def case(packing: str, rows: int, columns: int, bits: int, group: int, symmetric: bool) -> Case:
        size = columns if group == -1 else group
        found = weight(rows, columns, 300 + len(cases))
        scales, zeros = parameters(found, bits, size, symmetric)
        if symmetric:  # AutoRound gives a scale the sign of the largest weight
            scales[::2] *= -1
        linear = nn.Linear(columns, rows, bias=False)
        linear.weight.data = rounded(found, scales, zeros, bits)
        chosen = class_for(packing, bits, group, symmetric)
        if "awq" in packing:
            by_column = {"scales": scales.T.contiguous(), "zeros": zeros.T.contiguous()}
            module = chosen.from_linear(linear, bits, size, **by_column, device="cpu")
            dequantize, packed = (
                sys.modules[chosen.__module__].dequantize_gemm,
                (module.qweight, module.qzeros),
            )
            expected = dequantize(*packed, module.scales.float(), bits, size).T.contiguous()
        else:
            module = chosen(bits, group, columns, rows, bias=False, weight_dtype=torch.float32)
            module.device = "cpu"
            module.pack(linear, scales, zeros.clone(), None, device="cpu")
            half, module.scales = module.scales, module.scales.float()
            expected = module(torch.eye(columns)).T.contiguous()
            module.scales = half
        names = [name for name in ("qweight", "qzeros", "scales", "g_idx") if hasattr(module, name)]
        stored = {name: getattr(module, name) for name in names}
        config = {
            "bits": bits, "data_type": "int", "group_size": group, "sym": symmetric, "iters": 0,
            "autoround_version": "0.16.1", "block_name_to_quantize": "model.layers", "quant_method": "auto-round",
            "packing_format": packing,
        }  # fmt: skip
        return config, {**stored, "expected": expected}

    cases: dict[str, Case] = {}
    cases["gptq"] = case("auto_round:auto_gptq", 32, 96, 4, 32, True)
    cases["gptq-zeros"] = case("auto_round:auto_gptq", 32, 64, 4, 32, False)
    cases["gptq-8"] = case("auto_round:auto_gptq", 32, 64, 8, -1, True)
    cases["plain-zeros"] = case("auto_round", 32, 64, 4, 32, False)
    cases["plain-8-zeros"] = case("auto_round", 32, 64, 8, 32, False)
    cases["gptqmodel"] = case("auto_round:gptqmodel", 32, 64, 4, 32, True)
    cases["awq"] = case("auto_round:auto_awq", 32, 64, 4, 32, True)
    cases["awq-zeros"] = case("auto_round:auto_awq", 32, 64, 4, 32, False)
    return cases


def add_packages(source: Path, *names: str) -> None:
    """Add packages of a library without what they import."""
    for name in names:
        package = ModuleType(name)
        package.__path__ = [str(source / name.replace(".", "/"))]
        sys.modules[name] = package


def file_module(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def single_function(path: Path, name: str) -> Any:
    """Return one function of a file whose other imports are not installed; it may use torch alone."""
    [node] = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) == name]
    logger = type("Logger", (), {"info": type("Info", (), {"once": print})})
    names: dict[str, Any] = {"torch": torch, "nn": nn, "BaseQuantLinear": nn.Module, "log": logger}
    names |= {"functools": functools, "__package__": f"auto_round.export.{path.parent.name}"}
    exec(compile(ast.Module([node], []), str(path), "exec"), names)
    return names[name]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("auto_gptq", "gptqmodel", "autoawq", "auto_round"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    made = {
        "compressed-tensors": compressed_tensors(),
        "gptq": gptq(given.auto_gptq, given.gptqmodel),
        "awq": awq(given.autoawq),
        "auto-round": auto_round(given.auto_round),
    }
    for method, cases in made.items():
        tensors = {f"{case}.{name}": t for case, (_, own) in cases.items() for name, t in own.items()}
        stored = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(stored, given.out / f"{method}.safetensors")
        configs = {case: config for case, (config, _) in cases.items()}
        (given.out / f"{method}.json").write_text(json.dumps(configs, indent=1) + "\n")


if __name__ == "__main__":
    main()
