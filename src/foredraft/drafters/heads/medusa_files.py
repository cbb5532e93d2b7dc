"""Read the files of Medusa heads: FasterDecoding's and vLLM's spellings.

Contract: the tensors tell how many heads there are, and of how many blocks; the counts in the configs of
published heads are often wrong. Every tensor is known, and its shape agrees with the others. Weights are
safetensors: a pickle can run any program when it is read, so none is.

    FasterDecoding    `{head}.{block}.linear.weight`, then `{head}.{blocks}.weight`
    vLLM              `blocks.{head}.layers.{block}.weight`, `lm_heads.{head}.weight`, perhaps `token_map`
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.drafters.heads.weight_files import FLOATS, refuse_pickles
from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import ConfigReader, read_json
from foredraft.model.safetensors_file import SINGLE, SafetensorsFile
from foredraft.model.spec import CONFIG, ModelSpec

__all__ = ["TOKEN_MAP", "HeadTensors", "MedusaFiles", "is_medusa", "read_medusa"]

OWN = "medusa_lm_head.safetensors"
PREFIX = "medusa_heads."
BLOCK = re.compile(r"(?:(\d+)\.(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+))\.(weight|bias)")
OUTPUT = re.compile(r"(?:(\d+)\.(\d+)|lm_heads\.(\d+))\.weight")
SHARED, TOKEN_MAP = "lm_head.weight", "token_map"
REMEDY = "take a file that one program wrote"


@dataclass(frozen=True, slots=True)
class HeadTensors:
    """The names of one head's tensors.

    Attributes:
        blocks: Of each residual block, its weight and its bias; None where it has no bias.
        output: The head over the words.
    """

    blocks: tuple[tuple[str, str | None], ...]
    output: str


@dataclass(frozen=True, slots=True)
class MedusaFiles:
    """Heads whose weights are not read yet.

    Attributes:
        folder: Holds them.
        file: Their tensors.
        heads: The first one drafts the first token.
        size: Hidden size of the target.
        rows: Of every output, by the name of its tensor.
        words: Size of their own vocabulary; None where it is the target's.
        verifier: The target that the config names; None where it names none.
        parameters: The values of all weights.
    """

    folder: Path
    file: Path
    heads: tuple[HeadTensors, ...]
    size: int
    rows: Mapping[str, int]
    words: int | None
    verifier: str | None
    parameters: int

    def check_target(self, target: ModelSpec) -> None:
        """Raise CheckpointError unless the heads are for a target of this form."""
        made_for = "" if self.verifier is None else f" (their config names {self.verifier})"
        remedy = f"give heads of this target{made_for}"
        if self.size != target.hidden_size:
            raise CheckpointError(
                f"{self.folder} is for a target of hidden size {self.size}, but the target's is"
                f" {target.hidden_size}",
                remedy=remedy,
            )
        for name, rows in self.rows.items():
            if rows not in (self.words, target.vocab_size):
                raise CheckpointError(
                    f"{self.folder} is for a target of vocabulary {rows} (tensor {name}), but the target's is"
                    f" {target.vocab_size}",
                    remedy=remedy,
                )


def is_medusa(place: Path) -> bool:
    """Return whether a folder holds Medusa heads, as its config or the name of its file says."""
    if any((place / name).is_file() for name in (OWN, "medusa_lm_head.pt")):
        return True
    if not (place / CONFIG).is_file():
        return False
    try:
        config = read_json(place / CONFIG)
    except CheckpointError:
        return False
    named = config.get("architectures")
    return (
        config.get("model_type") == "medusa"
        or "medusa_num_heads" in config
        or (isinstance(named, list) and "MedusaModel" in named)
    )


def read_medusa(folder: Path) -> MedusaFiles:
    """Return the heads in a folder, as their config and the header of their file say.

    Raises:
        CheckpointError: The files are broken, contradict each other, or need what is not supported.
    """
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if ConfigReader(config).number("logit_scale", 1.0) != 1:
        raise CheckpointError(
            f"{folder / CONFIG}: logit_scale = {shortened(config['logit_scale'])} is not supported",
            remedy="give heads without it",
        )
    refuse_pickles(folder)
    file = next((folder / name for name in (OWN, SINGLE) if (folder / name).is_file()), None)
    if file is None:
        raise CheckpointError(
            f"{folder} has neither {OWN} nor {SINGLE}", remedy="give a whole folder of heads"
        )
    with SafetensorsFile(file) as opened:
        headers = {name: (info.dtype, info.shape) for name, info in opened.tensors.items()}
    return _files(folder, file, headers, config)


def _files(
    folder: Path, file: Path, headers: Mapping[str, tuple[str, tuple[int, ...]]], config: Mapping[str, Any]
) -> MedusaFiles:
    heads = _heads(file, headers, one_output=config.get("original_lm_head") is True)
    size = headers[heads[0].output][1][-1] if headers[heads[0].output][1] else 0
    words = math.prod(headers[TOKEN_MAP][1]) if TOKEN_MAP in headers else None
    shapes: dict[str, tuple[int, ...]] = {} if words is None else {TOKEN_MAP: (words,)}
    for head in heads:
        rows = headers[head.output][1][0] if headers[head.output][1] else 0
        shapes[head.output] = (rows, size)
        for weight, bias in head.blocks:
            shapes[weight] = (size, size)
            if bias is not None:
                shapes[bias] = (size,)
    for name, (dtype, shape) in headers.items():
        if name not in shapes:
            continue  # outputs that are not read
        if shape != shapes[name]:
            raise CheckpointError(
                f"{file}: tensor {name} has shape {list(shape)}, but the head {heads[0].output} implies"
                f" {list(shapes[name])}",
                remedy=REMEDY,
            )
        if dtype not in (("I64", "I32") if name == TOKEN_MAP else FLOATS):
            raise CheckpointError(f"{file}: tensor {name} is stored as {dtype}", remedy="give it unquantized")
    verifier = config.get("base_model_name_or_path")
    return MedusaFiles(
        folder, file, heads, size, {head.output: shapes[head.output][0] for head in heads}, words,
        verifier if isinstance(verifier, str) and verifier else None,
        sum(math.prod(shape) for name, shape in shapes.items() if name != TOKEN_MAP),
    )  # fmt: skip


def _heads(file: Path, names: Mapping[str, Any], *, one_output: bool) -> tuple[HeadTensors, ...]:
    """Return the tensors of each head, after checking that none is missing and none is left over.

    Args:
        file: Holds them, for messages.
        names: Of all tensors.
        one_output: All heads have the first one's output, however many are stored.
    """
    parts: dict[tuple[int, int], dict[str, str]] = {}  # (head, block) -> "weight" or "bias" -> name
    outputs: dict[int, tuple[str, int | None]] = {}  # head -> name, and the blocks before it if it tells
    for name in names:
        plain = name.removeprefix(PREFIX)
        if (block := BLOCK.fullmatch(plain)) is not None:
            head, place = (int(each) for each in block.groups()[:4] if each is not None)
            parts.setdefault((head, place), {})[block[5]] = name
        elif (named := OUTPUT.fullmatch(plain)) is not None:
            head = int(named[1] or named[3])
            outputs[head] = name, None if named[2] is None else int(named[2])
        elif plain not in (SHARED, TOKEN_MAP):
            raise CheckpointError(
                f"{file}: tensor {shortened(name)} is not part of Medusa heads", remedy=REMEDY
            )
    count = 1 + max((*outputs, *(head for head, _ in parts)), default=-1)
    shared = next((name for name in names if name.removeprefix(PREFIX) == SHARED), None)
    if one_output and shared is None:
        shared, outputs = outputs.get(0, (None, None))[0], {}
    found: list[HeadTensors] = []
    for head in range(count):
        blocks = sum(each == head for each, _ in parts)
        output, before = outputs.get(head, (shared, None))
        own = [parts.get((head, place), {}) for place in range(blocks)]
        if output is None or before not in (None, blocks) or not all("weight" in each for each in own):
            raise CheckpointError(f"{file} lacks tensors of head {head} of {count}", remedy=REMEDY)
        found.append(HeadTensors(tuple((each["weight"], each.get("bias")) for each in own), output))
    if not found or (shared is not None and len(outputs) == count):
        raise CheckpointError(f"{file} has no Medusa heads, or one head twice", remedy=REMEDY)
    return tuple(found)
