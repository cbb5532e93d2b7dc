"""Schemes: which modules of a checkpoint are quantised, in which weight formats; what the inputs of products
become.

Each row has one scale, or one for every `GROUP` columns, so a token's result does not depend on its
neighbours. Every step is rounded in the dtype, as in compressed-tensors (`calculate_qparams`, `fake_quantize`
in https://github.com/vllm-project/compressed-tensors/tree/main/src/compressed_tensors/quantization). As
integers, 32 columns of a row have 16 bits in steps of a power of two; their products with codes add up
without rounding, and the sums of columns that share a scale are added in float32, in order.

A weight format knows which tensors stand for a weight, by the suffixes of their names, and turns them into
`Codes`. `checkpoint.py` reads the tensors, checks their shapes and dtypes, and expands the codes.

How a checkpoint is quantised is read as strictly as every other key of a config.json. A method is refused
whose result for a token depends on the other tokens of a pass: speculation could not be lossless there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import Tensor

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import ConfigReader
from foredraft.model.quantisation.codes import BLOCK_ROWS, CodeFormat, Codes
from foredraft.model.tensor_names import AS_STORED, Naming

GROUP = 128  # columns that share a scale, where not all do


class ActivationFormat(IntEnum):
    """The numbers that inputs become; the values are those of kernels.c."""

    INT8 = 1  # integers from -128 to 127
    FP8 = 2  # float8_e4m3fn
    FP8_GROUPS = 3  # the same, by groups of columns

    def __str__(self) -> str:
        numbers = "8 bits" if self is ActivationFormat.INT8 else "FP8"
        shares = f"groups of {GROUP}" if self is ActivationFormat.FP8_GROUPS else "token"
        return f"activations in {numbers} by {shares}"

    def holds(self, columns: int) -> bool:
        return self is not ActivationFormat.FP8_GROUPS or columns % GROUP == 0

    def rounded(self, x: Tensor) -> Tensor:
        """Return what the numbers of x [..., K] stand for; the definition of the kernels' rounding."""
        if torch.compiler.is_compiling():  # its code rounds at the end only
            traced: Tensor = torch.ops.foredraft.rounded_inputs(x, int(self))
            return traced
        return _rounded(x, self)


def _rounded(x: Tensor, format: int) -> Tensor:
    if format == ActivationFormat.FP8_GROUPS:
        grouped = x.reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)
        return _rounded(grouped, ActivationFormat.FP8).flatten(-2)
    integers = format == ActivationFormat.INT8
    scales = x.abs().amax(-1, keepdim=True)
    # divided by a tensor: a number might be inverted first
    scales = scales / torch.full_like(scales, 127.5 if integers else 448)
    scales = torch.where(scales == 0, torch.finfo(x.dtype).eps, scales)
    shares = x / scales
    if integers:
        return shares.clamp(-128, 127).round() * scales
    return shares.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scales


_library: Any = torch.library.Library("foredraft", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("rounded_inputs(Tensor x, int format) -> Tensor")
_library.impl("rounded_inputs", _rounded, "CompositeExplicitAutograd")
torch.library.register_fake("foredraft::rounded_inputs", lambda x, format: torch.empty_like(x), lib=_library)


STEP_GROUP = 32  # columns that share a step
BITS = 15  # of the largest integer of a group
LEAST = -126  # exponent of the least step


def rounded_to_integers(x: Tensor) -> Tensor:
    """Return what the integers of x [..., K] stand for, in float32; NaN in groups that are not finite."""
    integers, steps = integers_of(x)
    return (integers * steps).flatten(-2)


def integers_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers [..., K / 32, 32] of x [..., K], as float32, and their steps [..., K / 32, 1]."""
    grouped = x.float().reshape(*x.shape[:-1], -1, STEP_GROUP)
    largest = grouped.abs().amax(-1, keepdim=True)
    exponents = (torch.frexp(largest).exponent - BITS).clamp(min=LEAST)
    steps = torch.ldexp(torch.ones_like(largest), exponents)
    finite = largest.isfinite()
    return torch.where(finite, grouped / steps, 0).round(), torch.where(finite, steps, torch.nan)


PIECE = 2**17  # weights that are unpacked at a time: it bounds the memory
INT32 = ("I32",)  # dtypes as safetensors names them
SCALES = ("BF16", "F16", "F32")
MAX_REPEATS = 4  # in an expression; a match that fails takes about 60 ** 4 / 24 steps


@dataclass(frozen=True, slots=True)
class TensorSpec:
    shape: tuple[int, ...]  # the shape that it must have
    dtypes: tuple[str, ...]  # the dtypes that it may have, as safetensors names them
    optional: bool = False  # it may be absent


class WeightFormat(Protocol):
    """How tensors, by suffix, stand for the weight of a module, of `shape` (M, K); frozen and hashable."""

    @property
    def code_format(self) -> CodeFormat | None: ...  # how the kernels can keep weights; None: they cannot
    @property
    def by_rows(self) -> bool:
        """Whether row i of a weight stands in row i of its tensors, so that some rows can be read alone."""
        return False

    def __str__(self) -> str: ...  # as people say it: "4 bits in groups of 128"
    def parts(self, module: str, shape: tuple[int, int]) -> dict[str, TensorSpec]: ...  # by suffix
    def codes(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes: ...

    def check(self, module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> None:
        """Check the values of the small tensors, where a format has such."""
        return


@dataclass(frozen=True, slots=True)
class IntegerFormat(WeightFormat):
    """A format of integers, of which groups of columns, or whole rows, share a scale."""

    bits: int  # bits of a number, 4 or 8
    group: int | None  # columns of a group; None if a row is one group
    symmetric: bool  # every zero point is the middle, 2^(bits - 1), or there are none

    def __str__(self) -> str:
        return f"{self.bits} bits {shown_group(self.group)}"

    @property
    def code_format(self) -> CodeFormat | None:
        return CodeFormat.of(self.bits, self.group, symmetric=self.symmetric)


def pieces(format: WeightFormat, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Iterator[Codes]:
    """Yield a quantised weight from the first row on, by rows in pieces of whole blocks of them."""
    rows, columns = shape
    step = max(1, PIECE // (columns * BLOCK_ROWS)) * BLOCK_ROWS if format.by_rows else rows
    for first in range(0, rows, step):
        piece = tensors
        if format.by_rows:
            piece = {suffix: tensor[first : first + step] for suffix, tensor in tensors.items()}
        yield format.codes((min(step, rows - first), columns), piece)


@dataclass(frozen=True, slots=True)
class SchemeRule:
    pattern: str  # a regular expression; modules match whose name begins with it
    format: WeightFormat | None  # of their weights; None leaves these unquantised
    inputs: ActivationFormat | None = None  # the format of their inputs; None leaves these as they are
    layer_class: str | None = None  # the class in `transformers` of the modules that match; None: any

    def __str__(self) -> str:
        return ", ".join(str(part) for part in (self.format, self.inputs) if part is not None)


@dataclass(frozen=True, slots=True)
class Quantisation:
    method: str  # the `quant_method` of its config
    rules: tuple[SchemeRule, ...]  # the first that a module matches decides; none: it is not quantised
    note: str | None = None  # what Foredraft computes otherwise than the method's authors; None if nothing
    embedding: bool = False  # the rules hold for the embedding, too; otherwise it is not quantised
    float32_scales: bool = False  # scales are float32, whatever the dtype of the checkpoint
    naming: Naming = AS_STORED  # how the checkpoint, and so the rules, name modules

    def format_of(self, module: str) -> WeightFormat | None:
        rule = self._rule_of(module)
        return None if rule is None else rule.format

    def inputs_of(self, module: str) -> ActivationFormat | None:
        rule = self._rule_of(module)
        return None if rule is None else rule.inputs

    def _rule_of(self, module: str) -> SchemeRule | None:
        stored, own = self.naming.stored_module(module), (None, self.naming.layer_class(module))
        rules = (rule for rule in self.rules if rule.layer_class in own)
        return next((rule for rule in rules if re.match(rule.pattern, stored)), None)

    @property
    def bits(self) -> int | None:
        """The most bits of a quantised weight that the kernels keep coded; None where one is not kept so."""
        code_formats = [rule.format.code_format for rule in self.rules if rule.format is not None]
        known = [code_format.bits for code_format in code_formats if code_format is not None]
        return max(known, default=None) if len(known) == len(code_formats) else None

    @property
    def described(self) -> str:
        """Method and formats, and the note: "gptq, 4 bits in groups of 128"."""
        formats = dict.fromkeys(str(rule) for rule in self.rules if rule.format is not None)
        note = "" if self.note is None else f" ({self.note})"
        return f"{self.method}, {' and '.join(formats)}{note}"


def exactly(names: Iterable[str]) -> str:
    return rf"(?:{'|'.join(re.escape(name) for name in names)})\Z"


def read_names(read: ConfigReader, key: str) -> list[str]:
    names = read.take(key)
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise read.error(key, "it must be a list of names or null")
    return names


def read_expression(read: ConfigReader, key: str, given: str, expression: str) -> str:
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError):
        raise read.error(key, f"{shortened(given)} is not a regular expression") from None
    plain = re.sub(r"\[\^?\]?[^]]*\]", "x", re.sub(r"\\.", "x", expression))  # without escapes and sets
    if re.search(r"\)[*+{]", plain) or len(re.findall(r"[*+{]", plain)) > MAX_REPEATS:
        remedy = f"repeat no groups, and at most {MAX_REPEATS} times"
        raise read.error(key, f"{shortened(given)} may take for ever to match; {remedy}")
    return expression


def check_plain_inputs(read: ConfigReader, *, weights: bool = True) -> None:
    """Check AutoRound's keys of what numbers are: weights are integers, inputs stay as they are."""
    if weights:
        read.choice("data_type", ("int", None), None)
    if read.take("act_bits") not in (None, 16, 32):
        raise read.error("act_bits", "export models with quantised activations in the format llm_compressor")
    for key in ("act_data_type", "act_dynamic", "act_group_size", "act_sym"):
        read.take(key)  # they describe what `act_bits` leaves out


def read_group(read: ConfigReader, key: str, default: int | None = None) -> int | None:
    return None if read.take(key, default) == -1 else read.count(key, default)


def count_groups(module: str, columns: int, group: int | None) -> int:
    if group is None:
        return 1
    if columns % group:
        problem = f"{module} has {columns} columns, which groups of {group} do not divide"
        raise CheckpointError(problem, remedy="use a checkpoint whose groups do")
    return columns // group


def shown_group(group: int | None) -> str:
    return "per channel" if group is None else f"in groups of {group}"


KEYS = ("quantization_config", "compression_config")  # the second is compressed-tensors' old name
METHOD, TENSORS = "gguf", "tensors"  # the quant_method of GGUF files, and its key: modules by format
