"""Schemes: which modules of a checkpoint are quantised, in which weight formats.

A weight format knows which tensors stand for a weight, by the suffixes of their names, and turns them into
`Codes`. `checkpoint.py` reads the tensors, checks their shapes and dtypes, and expands the codes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import ConfigReader
from foredraft.model.quantisation.activations import ActivationFormat
from foredraft.model.quantisation.codes import BLOCK_ROWS, Codes, Coding
from foredraft.model.tensor_names import AS_STORED, Naming

__all__ = [
    "INT32",
    "SCALES",
    "Part",
    "Quantisation",
    "SchemeRule",
    "WeightFormat",
    "check_auto_round",
    "check_plain_inputs",
    "count_groups",
    "exactly",
    "pieces",
    "read_expression",
    "read_group",
    "read_names",
    "shown_group",
]

PIECE = 2**17  # weights that are unpacked at a time: it bounds the memory
INT32 = ("I32",)  # dtypes as safetensors names them
SCALES = ("BF16", "F16", "F32")
MAX_REPEATS = 4  # in an expression; a match that fails takes about 60 ** 4 / 24 steps


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor among those that stand for a weight.

    Attributes:
        shape: The shape that it must have.
        dtypes: The dtypes that it may have, as safetensors names them.
        optional: It may be absent.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    optional: bool = False


class WeightFormat(Protocol):
    """How tensors stand for the weight [M, K] of a module; frozen and hashable.

    `shape` is (M, K). `tensors` are those that the checkpoint has of `parts`, by suffix.
    """

    @property
    def coding(self) -> Coding | None:
        """How the kernels can keep its weights coded; None where they cannot."""
        ...

    @property
    def by_rows(self) -> bool:
        """Whether row i of a weight stands in row i of its tensors, so that some rows can be read alone."""
        ...

    def __str__(self) -> str:
        """Return bits and groups, as people say them: "4 bits in groups of 128"."""
        ...

    def parts(self, module: str, shape: tuple[int, int]) -> dict[str, Part]:
        """Return the tensors that stand for the weight, by the suffix of their names.

        Raises:
            CheckpointError: The format cannot hold a weight of this shape.
        """
        ...

    def check(self, module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> None:
        """Check the values of the small tensors.

        Raises:
            CheckpointError: A tensor contradicts config.json, or its meaning is not settled.
        """
        ...

    def codes(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes:
        """Return the quantised weight."""
        ...


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
    """A rule of a scheme.

    Attributes:
        pattern: A regular expression; modules match whose name begins with it.
        format: The format of the weights of the modules that match; None leaves them unquantised.
        inputs: The format of their inputs; None leaves these as they are.
        layer_class: The class in `transformers` of the modules that match; None: any.
    """

    pattern: str
    format: WeightFormat | None
    inputs: ActivationFormat | None = None
    layer_class: str | None = None

    def __str__(self) -> str:
        return ", ".join(str(part) for part in (self.format, self.inputs) if part is not None)


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the linear layers of a checkpoint are quantised.

    Attributes:
        method: The `quant_method` of its config.
        rules: The first rule that a module matches decides; without one, a module is not quantised.
        note: What Foredraft computes otherwise than the method's authors; None if nothing.
        embedding: The rules hold for the embedding, too; otherwise it is not quantised.
        float32_scales: Scales are float32, whatever the dtype of the checkpoint.
        naming: How the checkpoint, and so the rules, name modules.
    """

    method: str
    rules: tuple[SchemeRule, ...]
    note: str | None = None
    embedding: bool = False
    float32_scales: bool = False
    naming: Naming = AS_STORED

    def format_of(self, module: str) -> WeightFormat | None:
        """Return the format of a linear layer's weight; None if it is not quantised.

        Args:
            module: Its name in the decoder, such as "model.layers.0.mlp.up_proj".
        """
        rule = self._rule_of(module)
        return None if rule is None else rule.format

    def inputs_of(self, module: str) -> ActivationFormat | None:
        """Return the format of a linear layer's inputs; None if they are not quantised."""
        rule = self._rule_of(module)
        return None if rule is None else rule.inputs

    def _rule_of(self, module: str) -> SchemeRule | None:
        stored, own = self.naming.stored_module(module), (None, self.naming.layer_class(module))
        return next(
            (rule for rule in self.rules if rule.layer_class in own and re.match(rule.pattern, stored)), None
        )

    @property
    def bits(self) -> int | None:
        """The most bits of a quantised weight that the kernels keep coded; None where one is not kept so."""
        codings = [rule.format.coding for rule in self.rules if rule.format is not None]
        known = [coding.bits for coding in codings if coding is not None]
        return max(known, default=None) if len(known) == len(codings) else None

    @property
    def described(self) -> str:
        """Method and formats, and the note: "gptq, 4 bits in groups of 128"."""
        formats = dict.fromkeys(str(rule) for rule in self.rules if rule.format is not None)
        note = "" if self.note is None else f" ({self.note})"
        return f"{self.method}, {' and '.join(formats)}{note}"


def exactly(names: Iterable[str]) -> str:
    """Return the pattern that the given names match, and no other."""
    return rf"(?:{'|'.join(re.escape(name) for name in names)})\Z"


def read_names(read: ConfigReader, key: str) -> list[str]:
    """Return the list of names under a key; an absent or null key is an empty list."""
    names = read.take(key)
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise read.error(key, "it must be a list of names or null")
    return names


def read_expression(read: ConfigReader, key: str, given: str, expression: str) -> str:
    """Return a regular expression that a config has under a key.

    Args:
        read: The config.
        key: The key.
        given: The text that the config has.
        expression: What it stands for.

    Raises:
        CheckpointError: It is none, or it may take for ever to match.
    """
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError):
        raise read.error(key, f"{shortened(given)} is not a regular expression") from None
    plain = re.sub(r"\[\^?\]?[^]]*\]", "x", re.sub(r"\\.", "x", expression))  # without escapes and sets
    if re.search(r"\)[*+{]", plain) or len(re.findall(r"[*+{]", plain)) > MAX_REPEATS:
        remedy = f"repeat no groups, and at most {MAX_REPEATS} times"
        raise read.error(key, f"{shortened(given)} may take for ever to match; {remedy}")
    return expression


def check_auto_round(read: ConfigReader, naming: Naming) -> None:
    """Check the keys that AutoRound adds to a config of another method.

    Args:
        read: The config.
        naming: How the checkpoint names modules.

    Raises:
        CheckpointError: A key has a value that is not supported.
    """
    read.choice("to_quant_block_names", (naming.stored_layers, None), None)
    check_plain_inputs(read)


def check_plain_inputs(read: ConfigReader, *, weights: bool = True) -> None:
    """Check the keys of AutoRound that say what numbers are: weights are integers, inputs stay as they are.

    Args:
        read: A config that AutoRound wrote, of any method.
        weights: Weights are quantised.

    Raises:
        CheckpointError: They are others.
    """
    if weights:
        read.choice("data_type", ("int", None), None)
    if read.take("act_bits") not in (None, 16, 32):
        raise read.error("act_bits", "export models with quantised activations in the format llm_compressor")
    for key in ("act_data_type", "act_dynamic", "act_group_size", "act_sym"):
        read.take(key)  # they describe what `act_bits` leaves out


def read_group(read: ConfigReader, key: str, default: int | None = None) -> int | None:
    """Return the columns of a group; None for -1, which makes a row one group."""
    return None if read.take(key, default) == -1 else read.count(key, default)


def count_groups(module: str, columns: int, group: int | None) -> int:
    """Return the number of groups in a row; the columns of a group are None if a row is one.

    Raises:
        CheckpointError: Groups do not divide the row.
    """
    if group is None:
        return 1
    if columns % group:
        raise CheckpointError(
            f"{module} has {columns} columns, which groups of {group} do not divide",
            remedy="use a checkpoint whose groups do",
        )
    return columns // group


def shown_group(group: int | None) -> str:
    """Return how people say the size of groups."""
    return "per channel" if group is None else f"in groups of {group}"
