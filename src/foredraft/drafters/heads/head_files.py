"""The files of a head: the tensors that its record implies, and the check that these and no others are there.

Every tensor is known, and has the shape that the config implies. Weights are safetensors or lie in a GGUF
file: a pickle can run any program when it is read, so none is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol

import torch
from torch import Tensor

from foredraft.drafters.heads.record import BlockRecord, HeadRecord, Record
from foredraft.errors import CheckpointError
from foredraft.model.checkpoint import CheckpointTensors, Shapes

EMBEDDING, HEAD, D2T, T2D = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
MARKOV, CONFIDENCE = "markov_head", "confidence_head.proj"
MAP_DTYPES = {D2T: ("I64", "I32"), T2D: ("BOOL", "U8")}
FLOATS = ("BF16", "F16", "F32", "F64")  # dtypes of unquantized weights
TRAINING = frozenset({"verifier_norm.weight", "verifier_lm_head.weight"})  # copies of the target's
ONE_HEAD = "take both files from one head"
Headers = Mapping[str, tuple[str, tuple[int, ...]]]  # the stored dtype and shape of each tensor, by name


class HeadTensors(Protocol):
    """Gives the tensors of a head by name, those of one call joined along their first dimension."""

    def load(self, shapes: Shapes) -> Tensor: ...


class HeadSource(HeadTensors, Protocol):
    """Gives the tensors of a head's files; it checks shapes and dtypes as `CheckpointTensors` does."""

    def view(self, name: str, shape: tuple[int, ...], dtypes: Collection[str]) -> Tensor:
        """Return a tensor as it is stored; the caller must not keep it."""


@dataclass(frozen=True, slots=True)
class HeadFiles(Generic[Record]):
    """A head whose weights are not read yet."""

    folder: Path  # holds it, or is its GGUF file
    record: Record  # what it is
    shapes: Mapping[str, tuple[int, ...]]  # the shape of every tensor that is read, by name
    # gives the tensors of a GGUF file; None: those of the folder
    source: Callable[[torch.device, torch.dtype], HeadSource] | None = None

    def open(self, stack: ExitStack, device: torch.device, dtype: torch.dtype) -> HeadSource:
        """Return the source of the tensors, which the stack closes."""
        if self.source is not None:
            return self.source(device, dtype)
        return CheckpointTensors(self.folder, stack, device, dtype)

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for name, shape in self.shapes.items() if name not in MAP_DTYPES)


def checked_shapes(
    folder: Path, record: HeadRecord, headers: Headers, floats: Collection[str] = FLOATS
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that are read, after checking all headers."""
    needed, optional = head_shapes(record, headers)
    allowed = {**optional, **needed}
    for name in needed:
        if name not in headers:
            raise CheckpointError(f"{folder} lacks tensor {name}, which its config implies", remedy=ONE_HEAD)
    for name, (dtype, shape) in headers.items():
        if name in TRAINING:
            continue
        problem, remedy = None, ONE_HEAD
        if name not in allowed:
            problem = "is not part of a head as its config describes it"
        elif shape != allowed[name]:
            problem = f"has shape {list(shape)}, but config.json implies {list(allowed[name])}"
        elif dtype not in MAP_DTYPES.get(name, floats):
            problem, remedy = f"is stored as {dtype}", "give the head unquantized"
        if problem is not None:
            raise CheckpointError(f"{folder}: tensor {name} {problem}", remedy=remedy)
    unread = [name for name in headers if name in TRAINING or name.startswith(CONFIDENCE)]
    return {name: shape for name, (_, shape) in headers.items() if name not in unread}


def head_shapes(
    record: HeadRecord, headers: Headers | None = None
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return the shapes of the tensors that must be there, and of those that may be."""
    spec, size, target = record.spec, record.spec.hidden_size, record.target_size
    count = 3 if record.aux_layers is None else len(record.aux_layers)  # 3: `default_aux_layers`
    parts: dict[str, tuple[int, ...]] = {"fc": (size, count * target)}  # the weight of each norm and product
    biased: set[str] = set()  # products with a bias
    optional: dict[str, tuple[int, ...]] = {
        D2T: (record.draft_vocab_size,), T2D: (spec.vocab_size,), EMBEDDING: (spec.vocab_size, size),
        HEAD: (record.draft_vocab_size, size),
    }  # fmt: skip
    if isinstance(record, BlockRecord):
        rank, joined = record.markov_rank, size + record.markov_rank
        parts |= {"hidden_norm": (size,), "norm": (size,)}
        if record.markov is not None:
            parts[f"{MARKOV}.markov_w1"] = spec.vocab_size, rank
            parts[f"{MARKOV}.markov_w2"] = record.draft_vocab_size, rank
        if record.markov in JOINTS:
            name, rows, states = JOINTS[record.markov]
            parts[name] = rows * rank, joined + states * rank
            biased.add(name)
        told = (headers or {}).get(f"{CONFIDENCE}.weight")
        wide = told is not None and told[1] == (1, joined)
        optional |= {f"{CONFIDENCE}.weight": (1, joined if wide else size), f"{CONFIDENCE}.bias": (1,)}
    elif record.pair_fc:
        parts["fc"] = size, 2 * size
        optional = {name: optional[name] for name in (EMBEDDING, HEAD)} | {"fc.bias": (size,)}
    else:
        parts["norm"] = (size,)
    parts |= {"input_norm": (count * target,)} if record.norm_before_fc else {}
    parts |= {f"fc_norm.{index}": (target,) for index in range(count)} if record.fc_norm else {}
    for index in range(spec.layers):
        _add_layer(record, index, parts, biased)
    needed = {f"{name}.weight": shape for name, shape in parts.items()}
    needed |= {f"{name}.bias": parts[name][:1] for name in parts if name in biased}
    if D2T in optional and record.draft_vocab_size != spec.vocab_size:
        needed[D2T] = optional[D2T]
    return needed, optional


# form of a Markov head -> its further product, that one's outputs in ranks, and the states that it reads
JOINTS = {"gated": (f"{MARKOV}.gate_proj", 1, 0), "rnn": (f"{MARKOV}.joint_proj", 3, 1)}


def layer_name(record: HeadRecord, index: int) -> str:
    return record.layer if index == 0 else f"layers.{index}"


def _add_layer(record: HeadRecord, index: int, parts: dict[str, tuple[int, ...]], biased: set[str]) -> None:
    """Add the norms and the products of a layer; that of EAGLE-3 which is first reads pairs."""
    spec, name = record.spec, layer_name(record, index)
    size, inner, attention, mlp = spec.hidden_size, spec.intermediate_size, f"{name}.self_attn", f"{name}.mlp"
    pairs = index == 0 and not record.pair_fc and not isinstance(record, BlockRecord)
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    parts |= {f"{name}.input_layernorm": (size,)} if index or not record.pair_fc else {}
    parts[f"{name}.post_attention_layernorm"] = (size,)
    for each, rows in (("q", queries), ("k", keys), ("v", keys)):
        parts[f"{attention}.{each}_proj"] = rows, 2 * size if pairs else size
        biased |= {f"{attention}.{each}_proj"} if spec.qkv_bias else set()
    parts[f"{attention}.o_proj"] = size, queries
    # speculators makes q, k and v anew with the config's bias, and keeps the layer's own o_proj
    biased |= {f"{attention}.o_proj"} if spec.output_bias else set()
    shapes = {"gate": (inner, size), "up": (inner, size), "down": (size, inner)}
    parts |= {f"{mlp}.{each}_proj": shape for each, shape in shapes.items()}
    biased |= {f"{mlp}.{each}_proj" for each in shapes} if spec.mlp_bias else set()
    parts |= {f"{name}.hidden_norm": (size,)} if pairs else {}
    parts |= {f"{attention}.{each}_norm": (spec.head_dim,) for each in "qk"} if spec.head_norms else {}
