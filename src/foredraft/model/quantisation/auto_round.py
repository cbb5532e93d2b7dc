"""AutoRound (arXiv:2309.05516): integers of 4 or 8 bits whose rounding was learnt, packed as GPTQ or AWQ.

`packing_format` says how a weight is packed. "auto_round:auto_gptq" is GPTQ's first format: zero points are
stored less 1. "auto_round" is the same with zero points as they are. "auto_round:auto_awq" is AWQ.
`extra_config` has settings of single modules, by name or by a regular expression. The definition is that of
AutoRound (https://github.com/intel/auto-round, `inference/convert_model.py` and `auto_round_extension/torch`)
in exact arithmetic: AutoRound itself rounds the product to the scale's dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from foredraft.errors import shortened
from foredraft.model.config import ConfigReader
from foredraft.model.quantisation.awq import AWQFormat
from foredraft.model.quantisation.gptq import GPTQFormat
from foredraft.model.quantisation.scheme import (
    Quantisation,
    SchemeRule,
    WeightFormat,
    check_plain_inputs,
    exactly,
    read_expression,
    read_group,
    read_names,
)
from foredraft.model.tensor_names import Naming

__all__ = ["HARMLESS", "METHOD", "read_auto_round"]

METHOD = "auto-round"
# Keys that say how the weights were found, or how a library runs them. AutoRound writes them into configs of
# GPTQ and AWQ, too.
HARMLESS = frozenset(
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
BLOCKS = ("quant_block_list", "block_name_to_quantize", "to_quant_block_names")  # the last is an old name


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of a module.

    Attributes:
        bits: Of a number.
        group: Columns of a group; None if a row is one group.
        symmetric: Every zero point is the middle.
    """

    bits: int
    group: int | None
    symmetric: bool

    def packed(self, packing: str) -> WeightFormat | None:
        """Return the format of the weight; None if it is not quantised."""
        if self.bits in PLAIN:
            return None
        if packing == AWQ:
            return AWQFormat(self.group, self.symmetric)
        return GPTQFormat(self.bits, self.group, self.symmetric, less_one=packing == GPTQ)


def read_auto_round(read: ConfigReader, naming: Naming) -> Quantisation:
    """Return the scheme of a `quantization_config` of AutoRound.

    Args:
        read: The config.
        naming: How the checkpoint names modules.

    Raises:
        CheckpointError: A key has a value that is not supported.
    """
    packing = PACKINGS[read.choice("packing_format", tuple(PACKINGS), "auto_round:gptq")]
    bits = (4,) if packing == AWQ else (4, 8)
    common = Numbers(
        read.choice("bits", bits, 4), read_group(read, "group_size", 128), read.flag("sym", default=True)
    )
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
    single = _modules(read, packing, bits, common)
    return Quantisation(
        METHOD, (*kept, *single, SchemeRule(_blocks(read, naming.stored_layers), common.packed(packing)))
    )


def _modules(read: ConfigReader, packing: str, bits: tuple[int, ...], common: Numbers) -> list[SchemeRule]:
    """Return the rules of `extra_config`.

    The settings under a module's name go before those under an expression. Every key is an expression, too,
    and the first that matches decides.
    """
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
        format = _numbers(inner, bits, common).packed(packing)
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


def _numbers(read: ConfigReader, bits: tuple[int, ...], common: Numbers) -> Numbers:
    """Return the numbers of a single module; what is not given is that of all."""
    own = read.choice("bits", (*bits, *PLAIN, None), None) or common.bits
    if own in PLAIN:
        for key in ("data_type", "group_size", "sym"):
            read.take(key)
    check_plain_inputs(read, weights=own not in PLAIN)
    if own in PLAIN:
        return Numbers(own, None, symmetric=True)
    group = common.group if read.take("group_size") is None else read_group(read, "group_size")
    return Numbers(own, group, read.flag("sym", default=common.symmetric, if_null=common.symmetric))


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
    """Return the pattern of modules that one of the expressions matches at any place of their names."""
    return f".*?(?:{'|'.join(f'(?:{expression})' for expression in expressions)})"
