"""Medusa: independent heads over the target's last hidden state draft (Cai et al. 2024, arXiv:2401.10774);
their files.

Head k drafts the token in slot k, whatever the others draft, so q of a slot is the head's marginal; ordinary
rejection is exact for every q that is fixed before the token is drawn. The tensors tell how many heads there
are, and of how many blocks.

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

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.drafters.asset import Found
from foredraft.drafters.head_kinds import MEDUSA, refuse_pickles
from foredraft.drafters.heads.layers import TimedPass, packed_product
from foredraft.drafters.heads.record import draft_ids, map_of
from foredraft.drafters.heads.tensors import FLOATS, Headers
from foredraft.drafters.states import LastStateReader, states_spec
from foredraft.errors import CheckpointError, shortened
from foredraft.model.cache import KVCache
from foredraft.model.checkpoint import Checkpoint
from foredraft.model.config import ConfigReader, read_json
from foredraft.model.decoder import Decoder
from foredraft.model.layers import Product
from foredraft.model.runner import Runner
from foredraft.model.safetensors_file import SINGLE, SafetensorsFile
from foredraft.model.spec import CONFIG, ModelSpec

PREFIX = "medusa_heads."
BLOCK = re.compile(r"(?:(\d+)\.(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+))\.(weight|bias)")
OUTPUT = re.compile(r"(?:(\d+)\.(\d+)|lm_heads\.(\d+))\.weight")
SHARED, TOKEN_MAP = "lm_head.weight", "token_map"
REMEDY = "take a file that one program wrote"


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names of one head's tensors."""

    blocks: tuple[
        Mapping[str, str], ...
    ]  # of each residual block: its "weight", and its "bias" if it has one
    output: str  # the head over the draft vocabulary


@dataclass(frozen=True, slots=True)
class MedusaFiles:
    """Heads whose weights are not read yet."""

    folder: Path  # holds them
    file: Path  # their tensors
    heads: tuple[TensorNames, ...]  # the first one drafts the first token
    size: int  # hidden size of the target
    rows: Mapping[str, int]  # of every output, by the name of its tensor
    draft_vocab_size: int | None  # None where it is that of the target's vocabulary
    verifier: str | None  # the target that the config names; None where it names none
    parameters: int  # the values of all weights

    def check_target(self, target: ModelSpec) -> None:
        """Raise CheckpointError unless the heads are for a target of this form."""
        made_for = "" if self.verifier is None else f" (their config names {self.verifier})"
        remedy = f"give heads of this target{made_for}"
        problem = None
        if self.size != target.hidden_size:
            problem = f"hidden size {self.size}, but the target's is {target.hidden_size}"
        for name, rows in self.rows.items():
            if problem is None and rows not in (self.draft_vocab_size, target.vocab_size):
                problem = f"vocabulary {rows} (tensor {name}), but the target's is {target.vocab_size}"
        if problem is not None:
            raise CheckpointError(f"{self.folder} is for a target of {problem}", remedy=remedy)


def read_medusa(folder: Path) -> MedusaFiles:
    """Return the heads in a folder, as their config and the header of their file say."""
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if ConfigReader(config).number("logit_scale", 1.0) != 1:
        raise CheckpointError(
            f"{folder / CONFIG}: logit_scale = {shortened(config['logit_scale'])} is not supported",
            remedy="give heads without it",
        )
    refuse_pickles(folder)
    file = next((folder / name for name in (MEDUSA, SINGLE) if (folder / name).is_file()), None)
    if file is None:
        problem = f"{folder} has neither {MEDUSA} nor {SINGLE}"
        raise CheckpointError(problem, remedy="give a whole folder of heads")
    with SafetensorsFile(file) as opened:
        headers = {name: (info.dtype, info.shape) for name, info in opened.tensors.items()}
    return _files(folder, file, headers, config)


def _files(folder: Path, file: Path, headers: Headers, config: Mapping[str, Any]) -> MedusaFiles:
    heads = _heads(file, headers, one_output=config.get("original_lm_head") is True)
    size = headers[heads[0].output][1][-1] if headers[heads[0].output][1] else 0
    reduced = math.prod(headers[TOKEN_MAP][1]) if TOKEN_MAP in headers else None
    shapes: dict[str, tuple[int, ...]] = {} if reduced is None else {TOKEN_MAP: (reduced,)}
    for head in heads:
        rows = headers[head.output][1][0] if headers[head.output][1] else 0
        shapes[head.output] = (rows, size)
        for block in head.blocks:
            shapes |= {name: (size, size) if kind == "weight" else (size,) for kind, name in block.items()}
    for name, (dtype, shape) in headers.items():
        if name not in shapes:
            continue  # outputs that are not read
        if shape != shapes[name]:
            implied = f"but the head {heads[0].output} implies {list(shapes[name])}"
            problem = f"{file}: tensor {name} has shape {list(shape)}, {implied}"
            raise CheckpointError(problem, remedy=REMEDY)
        if dtype not in (("I64", "I32") if name == TOKEN_MAP else FLOATS):
            raise CheckpointError(f"{file}: tensor {name} is stored as {dtype}", remedy="give it unquantized")
    verifier = config.get("base_model_name_or_path")
    return MedusaFiles(
        folder, file, heads, size, {head.output: shapes[head.output][0] for head in heads}, reduced,
        verifier if isinstance(verifier, str) and verifier else None,
        sum(math.prod(shape) for name, shape in shapes.items() if name != TOKEN_MAP),
    )  # fmt: skip


def _heads(file: Path, names: Mapping[str, Any], *, one_output: bool) -> tuple[TensorNames, ...]:
    """Return the tensors of each head, after checking that none is missing and none is left over."""
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
            problem = f"{file}: tensor {shortened(name)} is not part of Medusa heads"
            raise CheckpointError(problem, remedy=REMEDY)
    count = 1 + max((*outputs, *(head for head, _ in parts)), default=-1)
    shared = next((name for name in names if name.removeprefix(PREFIX) == SHARED), None)
    if one_output and shared is None:
        shared, outputs = outputs.get(0, (None, None))[0], {}
    found: list[TensorNames] = []
    for head in range(count):
        blocks = sum(each == head for each, _ in parts)
        output, before = outputs.get(head, (shared, None))
        own = [parts.get((head, place), {}) for place in range(blocks)]
        if output is None or before not in (None, blocks) or not all("weight" in each for each in own):
            raise CheckpointError(f"{file} lacks tensors of head {head} of {count}", remedy=REMEDY)
        found.append(TensorNames(tuple(own), output))
    if not found or (shared is not None and len(outputs) == count):
        raise CheckpointError(f"{file} has no Medusa heads, or one head twice", remedy=REMEDY)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class MedusaHead:
    blocks: tuple[Product, ...]  # the products of its residual blocks
    output: Product  # over the draft vocabulary

    def __call__(self, x: Tensor) -> Tensor:
        """Return logits [N, draft_vocab] float32 of normed states [N, D]."""
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.output(x).float()


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """All heads beside their target."""

    target: Decoder  # the target's decoder
    heads: tuple[MedusaHead, ...]  # the first one drafts the first token
    draft_vocab: Tensor | None  # the ids that they can draft, [draft_vocab]; None where they can draft all

    def entering(self, states: Tensor) -> Tensor:
        """Return what the heads read of the states [N, D] that leave the target's last layer."""
        normed: Tensor = self.target.norm(states)
        return normed


def load_medusa(files: MedusaFiles, target: Runner) -> MedusaHeads:
    """Read the weights, in the target's dtype."""
    decoder = target.decoder
    with SafetensorsFile(files.file) as opened:

        def read(name: str) -> Tensor:
            return opened.get_tensor(name).to(decoder.device, decoder.dtype, copy=True)

        ids = None
        if files.draft_vocab_size is not None:
            ids = draft_ids(
                str(files.folder), files.draft_vocab_size, decoder.spec.vocab_size,
                opened.get_tensor(TOKEN_MAP).long().clone(), None, name=TOKEN_MAP, absolute=True,
            )  # fmt: skip
            ids = None if ids is None else ids.to(decoder.device)

        def output(name: str) -> Product:
            weight = read(name)
            whole = ids is None or len(weight) == files.draft_vocab_size
            return packed_product(target, weight if whole else weight[ids])

        outputs = {name: output(name) for name in files.rows}  # heads may share one

        def head(names: TensorNames) -> MedusaHead:
            parts = ({kind: read(name) for kind, name in block.items()} for block in names.blocks)
            return MedusaHead(tuple(packed_product(target, **each) for each in parts), outputs[names.output])

        return MedusaHeads(decoder, tuple(head(names) for names in files.heads), ids)


class Medusa(LastStateReader):
    """An autoregressive drafter over Medusa heads and the target's last hidden states."""

    name = "medusa"

    def __init__(self, target: Runner, cache: KVCache, heads: MedusaHeads) -> None:
        super().__init__(target, cache)
        self.head = heads
        self.planned = self.max_draft = len(heads.heads)
        spec, first, like = target.decoder.spec, heads.heads[0], self.states.layer(0)
        self.draft_pass = TimedPass(
            target, name=f"{len(first.blocks)} blocks and a head over {first.output.shape[0]} tokens",
            step=lambda _, __, starts: first(heads.entering(like.new_zeros(len(starts), spec.hidden_size))),
        )  # fmt: skip
        self.vocabulary = map_of(heads.draft_vocab, target.decoder)
        self._reads: Tensor | None = None  # what the heads of this draft read, [B, D]; None before a draft
        self._drafts: list[bool] = []  # rows of this draft that have a state
        self._slot = 0

    @classmethod
    def found(cls, place: Path, target: Checkpoint) -> Found:
        files, spec = read_medusa(place), target.spec
        files.check_target(spec)
        reduced = "" if files.draft_vocab_size is None else f", draft vocabulary {files.draft_vocab_size}"
        about = f"{len(files.heads)} Medusa heads of {place}, {files.parameters / 1e6:.1f} M weights{reduced}"
        return Found(
            bytes=files.parameters * target.dtype.itemsize, planned=len(files.heads), about=about,
            specs=(states_spec(spec, spec.hidden_size),), dtype=target.dtype,
            build=lambda parts: cls(parts.target, parts.cache, load_medusa(files, parts.target)),
        )  # fmt: skip

    @torch.inference_mode()
    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        if self._reads is None:
            # a text that began with one token has no state before it: its q is uniform
            self._drafts = [not is_idle and start > 0 for start, is_idle in zip(starts, idle, strict=True)]
            places = [start if has else 0 for start, has in zip(starts, self._drafts, strict=True)]
            self._reads, self._slot = self.head.entering(self.states_before(places)), 0
        logits = self.head.heads[self._slot](self._reads)
        self._slot += 1
        return self.over_target(logits, self._drafts)

    def end_draft(self) -> None:
        self._reads = None
