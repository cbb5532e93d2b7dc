"""GPTQ (arXiv:2210.17323), AWQ (arXiv:2306.00978) and AutoRound (arXiv:2309.05516), which packs weights as
they do.

A weight is s · (q - z). GPTQ packs q along the columns and z along the rows: as z - 1 in `checkpoint_format`
"gptq" (v1), as z in "gptq_v2" (https://github.com/AutoGPTQ/AutoGPTQ, `qlinear_cuda.py`, in exact arithmetic).
A v1 file with a zero of all bits is refused, because GPTQModel (https://github.com/ModelCloud/GPTQModel)
carries into its neighbour. `g_idx` says to which group a column belongs, and codes are read group by group.
AWQ packs along the *rows*: a word has the rows 0, 2, 4, 6, 1, 3, 5, 7 of eight
(https://github.com/casper-hansen/AutoAWQ, `packing_utils.py`).

`packing_format` says how: "auto_round:auto_gptq" is GPTQ's first format, "auto_round" the same with zero
points as they are, "auto_round:auto_awq" is AWQ. The definition is AutoRound's
(https://github.com/intel/auto-round, `inference/convert_model.py` and `auto_round_extension/torch`) in exact
arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import ConfigReader, mismatch
from foredraft.model.quantisation.codes import Codes
from foredraft.model.quantisation.scheme import (
    INT32,
    SCALES,
    IntegerFormat,
    Quantisation,
    SchemeRule,
    TensorSpec,
    WeightFormat,
    check_plain_inputs,
    count_groups,
    exactly,
    read_expression,
    read_group,
    read_names,
)
from foredraft.model.tensor_names import HEAD, LINEAR, Naming


def words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return words [M, W] of codes [M, K]: each is stored as code + 2^(bits - 1), the lowest bits first."""
    numbers = (codes.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % (32 // bits)))
    if bits == 4:
        numbers = numbers[:, ::2] | (numbers[:, 1::2] << 4)
    return numbers.contiguous().view(torch.int32)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the numbers in words, the lowest bits of a word first."""
    numbers = packed.contiguous().view(torch.uint8)  # little-endian, as safetensors files are
    return numbers if bits == 8 else torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(-2)


def subtract_zeros(stored: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Return the codes [M, K]: the stored numbers less the zero points [M, G] of their groups."""
    dtype = torch.int8 if bits == 4 else torch.int16
    grouped = stored.to(dtype).reshape(len(stored), zeros.shape[1], -1)  # [M, G, group]
    return (grouped - zeros.to(dtype)[:, :, None]).flatten(1)


# Keys that say how the weights were found, or how a library runs them.
HARMLESS_IN_GPTQ = frozenset(
    """
    act_group_aware backend batch_size cache_block_outputs damp_auto_increment damp_percent dataset
    disable_exllama exllama_config max_input_length meta model_file_base_name model_name_or_path model_seqlen
    module_name_preceding_first_block mse pad_token_id static_groups tokenizer true_sequential use_cuda_fp16
    use_exllama
    """.split()
)
V1, V2 = "gptq", "gptq_v2"  # names of `checkpoint_format`


@dataclass(frozen=True, slots=True)
class GPTQFormat(IntegerFormat):
    less_one: bool  # zero points are stored less 1, as v1 does
    act_order: bool = False  # `g_idx` must be there

    def parts(self, module: str, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        rows, columns = shape
        groups, factor = count_groups(module, columns, self.group), 32 // self.bits
        if rows % factor or columns % factor:
            problem = f"{module} has {rows} rows and {columns} columns, but GPTQ packs {factor} at a time"
            raise CheckpointError(problem, remedy="use a checkpoint of another format")
        return {
            "qweight": TensorSpec((columns // factor, rows), INT32),
            "qzeros": TensorSpec((groups, rows // factor), INT32),
            "scales": TensorSpec((groups, rows), SCALES),
            "g_idx": TensorSpec((columns,), INT32, optional=not self.act_order),
        }

    def check(self, module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> None:
        if (found := tensors.get("g_idx")) is not None:
            size = self.group or shape[1]
            groups, name = shape[1] // size, f"tensor {module}.g_idx"
            if bool((found < 0).any()) or bool((found >= groups).any()):
                raise mismatch(f"{name} names a group beyond 0 to {groups - 1}")
            counts = torch.bincount(found, minlength=groups)
            if bool((counts != size).any()):
                group = int((counts != size).nonzero()[0])
                given = f"{name} gives group {group} {int(counts[group])} columns"
                raise mismatch(f"{given}, but config.json implies {size}")
        stored, name = unpack(tensors["qzeros"], self.bits), f"tensor {module}.qzeros"
        if self.less_one and bool((stored == 2**self.bits - 1).any()):
            raise CheckpointError(
                f"{name} has a stored zero point of {2**self.bits - 1}, which libraries read in two ways",
                remedy=f"use a checkpoint in checkpoint_format {V2}",
            )
        if self.symmetric and bool((self._zeros(tensors) != 2 ** (self.bits - 1)).any()):
            middle = 2 ** (self.bits - 1)
            raise mismatch(f"{name} has a zero point other than {middle}, but config.json has sym true")

    def codes(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes:
        stored = unpack(tensors["qweight"].T, self.bits)  # [M, K]
        order = _order(tensors.get("g_idx"))
        if order is not None:
            stored = stored[:, order.long()]
        codes = subtract_zeros(stored, self._zeros(tensors), self.bits)
        scales = tensors["scales"].T.contiguous()
        return Codes(codes, scales, self.group or shape[1], self.code_format, order=order)

    def _zeros(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return unpack(tensors["qzeros"], self.bits).T.to(torch.int16) + int(self.less_one)


def _check_common(read: ConfigReader, method: str, naming: Naming) -> None:
    read.choice("pack_dtype", ("int32",), "int32")
    read.choice("method", (method,), method)
    read.choice("to_quant_block_names", (naming.stored_layers, None), None)
    check_plain_inputs(read)


def _order(groups: Tensor | None) -> Tensor | None:
    """Return the columns [K] int32 group by group, of the group of each; None if they lie so."""
    if groups is None or bool((groups.diff() >= 0).all()):
        return None
    return groups.argsort(stable=True).to(torch.int32)


def read_gptq(read: ConfigReader, naming: Naming) -> Quantisation:
    read.choice("is_marlin_format", (False,), False)
    _check_common(read, "gptq", naming)
    read.choice("block_name_to_quantize", (naming.stored_layers, None), None)
    layout = read.choice("checkpoint_format", (V1, V2), read.choice("format", (V1, V2), V1))
    group = read_group(read, "group_size")
    bits, symmetric = read.choice("bits", (4, 8)), read.flag("sym", default=True)
    act_order = read.flag("desc_act", if_null=False) and group is not None
    found = GPTQFormat(bits, group, symmetric, layout == V1, act_order)
    coded_head = read.flag("lm_head", if_null=False)
    head = SchemeRule(exactly([naming.stored_module(HEAD)]), found if coded_head else None)
    key, pattern = "modules_in_block_to_quantize", ""
    if (lists := read.take(key)) is not None:
        sound = isinstance(lists, list) and all(isinstance(names, list) for names in lists)
        names = [name for names in lists for name in names] if sound else []
        if not names or not all(isinstance(name, str) and name for name in names):
            raise read.error(key, "it must be a list of lists of names or null")
        pattern = rf".*\.(?:{'|'.join(re.escape(name) for name in names)})\Z"
    return Quantisation("gptq", (head, *_singled_out(read, found), SchemeRule(pattern, found)))


def _singled_out(read: ConfigReader, format: WeightFormat) -> list[SchemeRule]:
    """Return the rules of modules that `dynamic` names; behind "-:" they stay as they are."""
    given = read.take("dynamic") or {}
    if not isinstance(given, dict) or any(given.values()):
        raise read.error("dynamic", "settings of single modules are not supported; they must be empty")
    names = {key: read_expression(read, "dynamic", key, re.sub(r"\A[-+]:", "", key)) for key in given}
    return [SchemeRule(name, None if key.startswith("-:") else format) for key, name in names.items()]


HARMLESS_IN_AWQ = frozenset("do_fuse exllama_config fuse_max_seq_len meta modules_to_fuse".split())
BITS, FACTOR = 4, 8  # bits of a number, numbers of a word
MIDDLE = 8  # the zero point of numbers that are symmetric about 0
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # row of eight -> its place in a word
VERSION = "gemm"


@dataclass(frozen=True, slots=True)
class AWQFormat(IntegerFormat):
    def parts(self, module: str, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        rows, columns = shape
        groups = count_groups(module, columns, self.group)
        if rows % FACTOR:
            problem = f"{module} has {rows} rows, but AWQ packs {FACTOR} at a time"
            raise CheckpointError(problem, remedy="use a checkpoint of another format")
        return {
            "qweight": TensorSpec((columns, rows // FACTOR), INT32),
            "qzeros": TensorSpec((groups, rows // FACTOR), INT32),
            "scales": TensorSpec((groups, rows), SCALES),
        }

    def check(self, module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> None:
        if self.symmetric and bool((_ordered(tensors["qzeros"]) != MIDDLE).any()):
            name = f"tensor {module}.qzeros"
            raise mismatch(f"{name} has a zero point other than {MIDDLE}, but config.json has none")

    def codes(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes:
        stored, zeros = _ordered(tensors["qweight"]), _ordered(tensors["qzeros"])  # [M, K], [M, G]
        codes = subtract_zeros(stored, zeros, BITS)
        return Codes(codes, tensors["scales"].T.contiguous(), self.group or shape[1], self.code_format)


def _ordered(packed: Tensor) -> Tensor:
    """Return the numbers [N, L] in words [L, N / 8], in the order of the weight's rows."""
    numbers = unpack(packed, BITS).reshape(len(packed), -1, FACTOR)
    return numbers[:, :, PLACES].flatten(1).T.contiguous()


def read_awq(read: ConfigReader, naming: Naming) -> Quantisation:
    for key in ("version", "format", "checkpoint_format"):
        name = read.take(key, VERSION)
        if not isinstance(name, str) or name.lower() != VERSION:
            raise read.error(key, f"only {VERSION!r} is supported")
    if read.take("backend") == "llm-awq":
        raise read.error("backend", "its order of numbers is not supported")
    read.choice("desc_act", (False,), False)
    if read.take("dynamic"):
        raise read.error("dynamic", "settings of single modules are not supported; it must be empty")
    _check_common(read, "awq", naming)
    read.choice("lm_head", (False,), False)
    bits, group = (_either(read, *keys) for keys in (("bits", "w_bit"), ("group_size", "q_group_size")))
    read.choice(bits, (BITS,), BITS)
    zero_point = read.flag("zero_point", default=not read.flag("sym"))
    if "sym" in read.config and read.flag("sym") == zero_point:
        raise read.error("sym", f"zero_point is {zero_point}; they must differ")
    found = AWQFormat(BITS, read_group(read, group, 128), not zero_point)
    kept = [re.escape(name) for name in read_names(read, "modules_to_not_convert")]  # parts of names
    rules = [SchemeRule(rf".*(?:{'|'.join(kept)})", None)] if kept else []
    head = SchemeRule(exactly([naming.stored_module(HEAD)]), None)
    return Quantisation("awq", (*rules, head, SchemeRule("", found, layer_class=LINEAR)))


def _either(read: ConfigReader, key: str, old: str) -> str:
    if key in read.config and read.take(old, read.take(key)) != read.take(key):
        raise read.error(old, f"{key} is another number")
    return key if key in read.config else old


AUTO_ROUND = "auto-round"
# Keys of how the weights were found or are run; AutoRound writes them into configs of GPTQ and AWQ, too.
HARMLESS_OF_AUTO_ROUND = frozenset(
    """
    amp autoround_version backend batch_size dataset enable_minmax_tuning enable_norm_bias_tuning
    enable_quanted_input gradient_accumulate_steps iters low_gpu_mem_usage lr minmax_lr model_free n_samples
    nsamples provider scale_dtype seqlen static_attention_granularity static_kv_granularity train_bs
    """.split()
)
HARMLESS_IN_MODULES = frozenset("fixed_by_user in_blocks scale_dtype".split())
GPTQ, GPTQ_PLAIN_ZEROS, AWQ = "GPTQ", "GPTQ with zero points as they are", "AWQ"
PACKINGS = {  # the spellings that AutoRound reads, and those of its exports to AutoGPTQ and AutoAWQ
    "auto_round:auto_gptq": GPTQ,
    "auto_round:gptq": GPTQ,
    "auto_gptq": GPTQ,
    "auto": GPTQ,
    "auto_round": GPTQ_PLAIN_ZEROS,
    "auto_round:gptqmodel": GPTQ_PLAIN_ZEROS,
    "auto_round:auto_awq": AWQ,
    "auto_round:awq": AWQ,
    "auto_awq": AWQ,
}
PLAIN = (16, 32)  # bits of a weight that is not quantised
Common = tuple[int, int | None, bool]  # bits, columns of a group, whether every zero point is the middle
BLOCKS = ("quant_block_list", "block_name_to_quantize", "to_quant_block_names")  # the last is an old name


def _packed(packing: str, bits: int, group: int | None, symmetric: bool) -> WeightFormat | None:
    if bits in PLAIN:
        return None
    if packing == AWQ:
        return AWQFormat(bits, group, symmetric)
    return GPTQFormat(bits, group, symmetric, less_one=packing == GPTQ)


def read_auto_round(read: ConfigReader, naming: Naming) -> Quantisation:
    packing = PACKINGS[read.choice("packing_format", tuple(PACKINGS), "auto_round:gptq")]
    bits = (4,) if packing == AWQ else (4, 8)
    own, group = read.choice("bits", bits, 4), read_group(read, "group_size", 128)
    common = own, group, read.flag("sym", default=True)
    check_plain_inputs(read)
    for key in ("static_kv_dtype", "static_attention_dtype"):
        if read.take(key) is not None:
            raise read.error(key, "a quantised KV cache is not supported; it must be null")
    if read.take("rotation_config"):
        raise read.error("rotation_config", "rotated weights are not supported; it must be empty")
    skipped = read_names(read, "modules_to_not_convert")
    for name in skipped:
        read_expression(read, "modules_to_not_convert", name, _anywhere([name]))
    kept = [SchemeRule(_anywhere(skipped), None)] if skipped else []
    single = _rules_of(read, packing, bits, common)
    blocks = SchemeRule(_blocks(read, naming.stored_layers), _packed(packing, *common))
    return Quantisation(AUTO_ROUND, (*kept, *single, blocks))


def _rules_of(read: ConfigReader, packing: str, bits: tuple[int, ...], common: Common) -> list[SchemeRule]:
    """Return the rules of `extra_config`: those of names, then all keys as expressions, in their order."""
    found = read.take("extra_config")
    if found is None:
        return []
    if not isinstance(found, dict):
        raise read.error("extra_config", "it must be a JSON object or null")
    names: dict[WeightFormat | None, list[str]] = {}
    expressions: list[tuple[WeightFormat | None, list[str]]] = []  # neighbours of one format together
    for name, settings in found.items():
        if not isinstance(settings, dict):
            raise read.error("extra_config", f"{shortened(name)} must be a JSON object")
        if not settings:
            continue
        inner = ConfigReader(settings, f"{read.where}, extra_config, {shortened(name)}", HARMLESS_IN_MODULES)
        format = _packed(packing, *_numbers(inner, bits, common))
        inner.reject_unknown_keys()
        read_expression(read, "extra_config", name, _anywhere([name]))
        names.setdefault(format, []).append(name)
        if not expressions or expressions[-1][0] != format:
            expressions.append((format, []))
        expressions[-1][1].append(name)
    return [
        *(SchemeRule(exactly(listed), format) for format, listed in names.items()),
        *(SchemeRule(_anywhere(listed), format) for format, listed in expressions),
    ]


def _numbers(read: ConfigReader, bits: tuple[int, ...], common: Common) -> Common:
    usual_bits, group, symmetric = common
    own = read.choice("bits", (*bits, *PLAIN, None), None) or usual_bits
    if own in PLAIN:
        for key in ("data_type", "group_size", "sym"):
            read.take(key)
    check_plain_inputs(read, weights=own not in PLAIN)
    if own in PLAIN:
        return own, None, True
    group = group if read.take("group_size") is None else read_group(read, "group_size")
    return own, group, read.flag("sym", default=symmetric, if_null=symmetric)


def _blocks(read: ConfigReader, layers: str) -> str:
    """Return the pattern of the modules in the blocks that are quantised; `layers` is the list of layers."""
    for key in BLOCKS:
        if (given := read.take(key)) is None:
            continue
        names = _flat(given.split(",") if isinstance(given, str) else given)
        if not all(isinstance(name, str) and name.strip().startswith(layers) for name in names) or not names:
            raise read.error(key, f"it must name {layers} or blocks of it")
        return "|".join(re.escape(name.strip()) for name in names)
    return re.escape(f"{layers}.")


def _flat(given: Any) -> list[Any]:
    """Return the items of nested lists; something else is one item."""
    return [item for part in given for item in _flat(part)] if isinstance(given, list) else [given]


def _anywhere(expressions: Iterable[str]) -> str:
    return f".*?(?:{'|'.join(f'(?:{expression})' for expression in expressions)})"
