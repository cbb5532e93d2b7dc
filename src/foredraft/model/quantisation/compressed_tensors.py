"""compressed-tensors: integers of 4 or 8 bits, or float8_e4m3fn, of the layers that a config selects; FP8 by
block.

A weight is s · (q - z): `weight_packed` holds q + 2^(bits - 1), packed along the columns, and
`weight_zero_point` z likewise, along the rows (https://github.com/vllm-project/compressed-tensors,
`compressors/`). In FP8 it is q · s, where `weight_scale_inv` holds s of 128 x 128 numbers
(https://github.com/huggingface/transformers, `integrations/finegrained_fp8.py`). FP8 rounds activations, too,
and Foredraft does not, as the scheme's `note` says. Weights with one scale are refused: a token's activations
would depend on its neighbours in a pass.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from foredraft.errors import shortened
from foredraft.model.config import ConfigReader, mismatch
from foredraft.model.quantisation.codes import CodeFormat, Codes
from foredraft.model.quantisation.gptq import subtract_zeros, unpack, words
from foredraft.model.quantisation.scheme import GROUP as ACTIVATION_GROUP
from foredraft.model.quantisation.scheme import (
    INT32,
    SCALES,
    ActivationFormat,
    IntegerFormat,
    Quantisation,
    SchemeRule,
    TensorSpec,
    WeightFormat,
    count_groups,
    exactly,
    read_expression,
    read_group,
    read_names,
    shown_group,
)
from foredraft.model.tensor_names import CONV1D, HEAD, LINEAR, Naming

HARMLESS_IN_FP8 = frozenset({"dequantize"})  # says how a library runs the weights
BLOCK = 128  # rows and columns of a block
NOTE = "activations stay in the model's dtype; the method's authors round them to FP8 too"


def read_fp8(read: ConfigReader, naming: Naming) -> Quantisation:
    if read.take("activation_scheme", "dynamic") != "dynamic":
        raise read.error("activation_scheme", "fixed scales of activations are not supported")
    block = read.take("weight_block_size")
    if block is None:
        raise read.error(
            "weight_block_size",
            "without blocks, activations have one scale in a pass, so a token would depend on its neighbours",
        )
    if block != [BLOCK, BLOCK]:
        raise read.error("weight_block_size", f"only {[BLOCK, BLOCK]} is supported")
    for key, value in {"fmt": "e4m3", "scale_fmt": "float", "expert_dtype": "fp8"}.items():
        read.choice(key, (value,), value)
    if read.take("modules_to_convert"):
        raise read.error("modules_to_convert", "it must be empty")
    lists = [key for key in ("modules_to_not_convert", "ignored_layers") if read.take(key) is not None]
    if len(lists) == 2:
        raise read.error("ignored_layers", "keep modules_to_not_convert alone")
    # transformers leaves the head alone unless a list is given
    kept = [re.escape(name) for key in lists for name in read_names(read, key)]
    pattern = rf"(?:.*\.)?(?:{'|'.join(kept)})(?:\.|\Z)" if kept else exactly([naming.stored_module(HEAD)])
    rules = [] if lists and not kept else [SchemeRule(pattern, None)]
    blocks = SchemeRule("", PlainFormat(True, "block", BLOCK, True, "weight_scale_inv"), layer_class=LINEAR)
    return Quantisation("fp8", (*rules, blocks), NOTE, float32_scales=True)


HARMLESS = frozenset({"global_compression_ratio", "version"})
HARMLESS_IN_NUMBERS = frozenset({"observer", "observer_kwargs", "zp_dtype"})  # the stored dtypes are checked
PACKED, INTEGERS, FLOATS, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
MIXED = "mixed-precision"  # every group of modules has a format of its own
CLASSES = (LINEAR, CONV1D)  # of the modules that this project has
SCALE_DTYPES = (None, "torch.bfloat16", "torch.float16", "torch.float32")


@dataclass(frozen=True, slots=True)
class PackedFormat(IntegerFormat):
    def parts(self, module: str, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        rows, columns = shape
        groups = count_groups(module, columns, self.group)
        found = {
            "weight_packed": TensorSpec((rows, words(columns, self.bits)), INT32),
            "weight_scale": TensorSpec((rows, groups), SCALES),
            "weight_shape": TensorSpec((2,), ("I64", "I32")),
        }
        zeros = TensorSpec((words(rows, self.bits), groups), INT32)
        return found if self.symmetric else found | {"weight_zero_point": zeros}

    def check(self, module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> None:
        if (stored := tensors["weight_shape"].tolist()) != list(shape):
            name = f"tensor {module}.weight_shape"
            raise mismatch(f"{name} is {stored}, but config.json implies {list(shape)}")

    def codes(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes:
        rows, columns = shape
        stored = unpack(tensors["weight_packed"], self.bits)[:, :columns]
        if self.symmetric:
            zeros = stored.new_full((1, 1), 2 ** (self.bits - 1))
        else:
            zeros = unpack(tensors["weight_zero_point"].T, self.bits)[:, :rows].T
        codes = subtract_zeros(stored, zeros, self.bits)
        return Codes(codes, tensors["weight_scale"], self.group or columns, self.code_format)


@dataclass(frozen=True, slots=True)
class PlainFormat(WeightFormat):
    """The format of numbers of 8 bits that have a dtype of their own."""

    float8: bool  # the numbers are float8_e4m3fn; otherwise int8
    strategy: str  # what shares a scale: "block", "group", "channel" or "tensor"
    group: int | None  # columns of a block or a group; None if a row is one
    symmetric: bool  # there are no zero points
    scales: str = "weight_scale"  # the suffix of the tensor of scales

    def __str__(self) -> str:
        shares = {"tensor": "per tensor", "block": f"in blocks of {BLOCK} x {BLOCK}"}
        return f"{'FP8' if self.float8 else '8 bits'} {shares.get(self.strategy) or shown_group(self.group)}"

    @property
    def code_format(self) -> CodeFormat | None:
        found = CodeFormat.of(8, self.group, symmetric=self.symmetric)
        return None if found is None else replace(found, float8=self.float8)

    def parts(self, module: str, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        rows, columns = shape
        if self.strategy == "block":
            scales: tuple[int, ...] = -(-rows // BLOCK), -(-columns // BLOCK)
        else:
            groups = count_groups(module, columns, self.group)
            scales = (1,) if self.strategy == "tensor" else (rows, groups)
        weight = TensorSpec(shape, ("F8_E4M3",) if self.float8 else ("I8",))
        found = {"weight": weight, self.scales: TensorSpec(scales, SCALES)}
        return found if self.symmetric else found | {"weight_zero_point": TensorSpec(scales, ("I8",))}

    def codes(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes:
        rows, columns = shape
        codes, scales = tensors["weight"], tensors[self.scales]
        if self.strategy == "tensor":
            scales = scales[None].expand(rows, 1)
        elif self.strategy == "block":
            scales = scales.repeat_interleave(BLOCK, dim=0)[:rows]
        if not self.symmetric:
            zeros = tensors["weight_zero_point"]
            codes = subtract_zeros(codes, zeros[None] if zeros.dim() == 1 else zeros, 8)
        return Codes(codes, scales, self.group or columns, self.code_format)


def read_compressed_tensors(read: ConfigReader, _: Naming) -> Quantisation:
    if read.take("kv_cache_scheme") is not None:
        raise read.error("kv_cache_scheme", "a quantised KV cache is not supported; it must be null")
    for key in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        if read.take(key):
            raise read.error(key, "it is not supported; it must be empty")
    # old versions of the library say "frozen" of compressed weights too; the stored dtypes are checked
    read.choice("quantization_status", ("compressed", "frozen"))
    layout = read.choice("format", (PACKED, INTEGERS, FLOATS, NAIVE, MIXED))
    ignored = [_rule(read, "ignore", name) for name in read_names(read, "ignore")]
    return Quantisation("compressed-tensors", (*ignored, *_rules(read, layout)))


def _rules(read: ConfigReader, layout: str) -> list[SchemeRule]:
    """Return the rules of the groups of modules, in the order in which compressed-tensors matches them."""
    groups = read.take("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise read.error("config_groups", "it must be a JSON object of groups")
    found: dict[str, SchemeRule] = {}
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise read.error("config_groups", f"{shortened(name)} must be a JSON object")
        inner = ConfigReader(group, f"{read.where}, config_groups, {shortened(name)}", frozenset())
        format, inputs = _group(inner, layout)
        targets = read_names(inner, "targets")
        if not targets:
            raise inner.error("targets", "it must name modules")
        for target in targets:
            if target in found:
                raise inner.error("targets", f"another group has the target {shortened(target)}")
            if target[0].isupper() and target not in CLASSES:
                remedy = f"of the classes of modules only {' and '.join(CLASSES)} are supported"
                raise inner.error("targets", remedy)
            found[target] = _rule(inner, "targets", target, format, inputs)
        inner.reject_unknown_keys()
    # names go before expressions, and classes come last
    order = sorted(found, key=lambda target: (target in CLASSES, target.startswith("re:"), target))
    return [found[target] for target in order]


def _group(read: ConfigReader, layout: str) -> tuple[WeightFormat, ActivationFormat | None]:
    inputs = _inputs(read)
    if read.take("output_activations") is not None:
        raise read.error("output_activations", "quantised outputs are not supported; it must be null")
    own = read.choice("format", (PACKED, INTEGERS, FLOATS, NAIVE, None), None)
    if layout == MIXED and own is None:
        raise read.error("format", f"it must be given where the format of all is {MIXED}")
    section = read.take("weights")
    if not isinstance(section, dict):
        raise read.error("weights", "it must be a JSON object")
    weights = ConfigReader(section, f"{read.where}, weights", HARMLESS_IN_NUMBERS)
    found = _weights(weights, own or layout)
    weights.reject_unknown_keys()
    return found, inputs


def _inputs(read: ConfigReader) -> ActivationFormat | None:
    section = read.take("input_activations")
    if section is None:
        return None
    if not isinstance(section, dict):
        raise read.error("input_activations", "it must be a JSON object or null")
    inputs = ConfigReader(section, f"{read.where}, input_activations", HARMLESS_IN_NUMBERS)
    if inputs.take("dynamic", False) is not True:
        raise inputs.error("dynamic", "fixed scales of activations are not supported; it must be true")
    if inputs.take("strategy") in (None, "tensor"):
        remedy = "activations have one scale in a pass, so a token would depend on its neighbours"
        raise inputs.error("strategy", remedy)
    float8 = inputs.choice("type", ("int", "float"), "int") == "float"
    groups = inputs.choice("strategy", ("token", "group") if float8 else ("token",)) == "group"
    inputs.choice("group_size", (ACTIVATION_GROUP,) if groups else (None,), None)
    only = {"num_bits": 8, "symmetric": True, "block_structure": None, "actorder": None, "scale_dtype": None}
    for key, value in only.items():
        inputs.choice(key, (value,), value)
    inputs.reject_unknown_keys()
    if groups:
        return ActivationFormat.FP8_GROUPS
    return ActivationFormat.FP8 if float8 else ActivationFormat.INT8


def _weights(read: ConfigReader, layout: str) -> WeightFormat:
    kinds = {PACKED: ("int",), INTEGERS: ("int",), FLOATS: ("float",)}.get(layout, ("int", "float"))
    float8 = read.choice("type", kinds, "int") == "float"
    bits = read.choice("num_bits", (4, 8) if layout == PACKED else (8,), 8)
    supported = ["channel", "block" if float8 else "group"] + ["tensor"] * (layout != PACKED)
    size = read.take("group_size")
    group = None if size is None else read_group(read, "group_size")
    implied = "tensor" if size is None else "channel" if group is None else "group"
    strategy = implied if read.take("strategy") is None else read.take("strategy")
    if strategy not in supported:
        raise read.error("strategy", f"supported are {', '.join(supported)}")
    if (strategy == "group") != (group is not None):
        raise read.error("group_size", f"it does not fit the strategy {strategy!r}")
    symmetric = read.flag("symmetric", default=True)
    if float8 and not symmetric:
        raise read.error("symmetric", "it must be true with numbers of type float")
    read.choice("dynamic", (False,), False)
    read.choice("actorder", (None, False, "weight", "static"), None)  # these do not change what is stored
    blocks = strategy == "block"
    read.choice("block_structure", ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}") if blocks else (None,), None)
    read.choice("scale_dtype", SCALE_DTYPES, None)
    if layout == PACKED:
        return PackedFormat(bits, group, symmetric)
    return PlainFormat(float8, strategy, BLOCK if blocks else group, symmetric)


def _rule(
    read: ConfigReader,
    key: str,
    target: str,
    format: WeightFormat | None = None,
    inputs: ActivationFormat | None = None,
) -> SchemeRule:
    if target in CLASSES:
        return SchemeRule("", format, inputs, target)
    if not target.startswith("re:"):
        return SchemeRule(exactly([target]), format, inputs)
    return SchemeRule(read_expression(read, key, target, target.removeprefix("re:")), format, inputs)
