"""The tensors of heads by name and shape, and the files that hold them.

Every tensor of a head's files is known, and has the shape that its record implies. Weights are safetensors or
lie in a GGUF file: a pickle can run any program when it is read, so none is.
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

from foredraft.drafters.heads.record import BlockRecord, HeadRecord, PEagleRecord, Record, draft_ids
from foredraft.errors import CheckpointError
from foredraft.model.checkpoint import CheckpointTensors, Shapes
from foredraft.model.tensor_names import AS_STORED, Naming

EMBEDDING, HEAD, D2T, T2D = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
CONFIDENCE = ("confidence_head.proj", "confidence_proj")  # DeepSpec's name, and that of NVIDIA's ModelOpt
MASK_HIDDEN, SELECTOR = "mask_hidden", "candidate_selector"
CODEBOOKS = (f"{SELECTOR}.predecessor_codebook", f"{SELECTOR}.successor_codebook")
CONVOLVED = ("attention_conv", "mlp_conv")  # what convolves the input and the output of each sub-layer
MAP_DTYPES = {D2T: ("I64", "I32"), T2D: ("BOOL", "U8")}
FLOATS = ("BF16", "F16", "F32", "F64")  # dtypes of unquantized weights
TRAINING = frozenset({"verifier_norm.weight", "verifier_lm_head.weight"})  # copies of the target's
ONE_HEAD = "take both files from one head"
Headers = Mapping[str, tuple[str, tuple[int, ...]]]  # the stored dtype and shape of each tensor, by name


class HeadSource(Protocol):
    """Gives the tensors of a head's files; it checks shapes and dtypes as `CheckpointTensors` does."""

    def load(self, shapes: Shapes) -> Tensor: ...  # joined along their first dimension

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
    naming: Naming = AS_STORED  # of the tensors in a folder
    # gives what each row of the target's embedding is multiplied by before it enters, [V]; None: nothing
    row_scales: Callable[[], Tensor] | None = None

    def open(self, stack: ExitStack, device: torch.device, dtype: torch.dtype) -> HeadSource:
        """Return the source of the tensors, which the stack closes."""
        if self.source is not None:
            return self.source(device, dtype)
        return CheckpointTensors(self.folder, stack, device, dtype, naming=self.naming)

    def draft_vocab(self, tensors: HeadSource) -> Tensor | None:
        """Return the target's ids that the head can draft, [draft_vocab]; None where it can draft all."""
        d2t, t2d = (
            tensors.view(name, self.shapes[name], dtypes).long().clone() if name in self.shapes else None
            for name, dtypes in MAP_DTYPES.items()
        )
        record: HeadRecord = self.record
        sizes = record.draft_vocab_size, record.spec.vocab_size
        return draft_ids(str(self.folder), *sizes, d2t, t2d, absolute=record.absolute_d2t)

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
    count = 1 if record.pair_fc else count
    parts: dict[str, tuple[int, ...]] = {"fc": (size, count * target)}  # the weight of each norm and product
    biased: set[str] = set()  # products with a bias
    optional: dict[str, tuple[int, ...]] = {
        D2T: (record.draft_vocab_size,), T2D: (spec.vocab_size,), EMBEDDING: (spec.vocab_size, size),
        HEAD: (record.draft_vocab_size, size),
    }  # fmt: skip
    bare: dict[str, tuple[int, ...]] = {}  # tensors whose names have no end
    headers = headers or {}
    if isinstance(record, BlockRecord):
        _add_block(record, headers, parts, biased, bare, optional)
    elif record.pair_fc:
        parts["fc"] = size, 2 * size
        optional = {name: optional[name] for name in (EMBEDDING, HEAD)} | {"fc.bias": (size,)}
    else:
        parts["norm"] = (size,)
    if isinstance(record, PEagleRecord):
        stored = headers.get(MASK_HIDDEN, ("", ()))[1]
        wide = math.prod(stored) == stored[-1] == count * target if stored else False
        bare[MASK_HIDDEN] = stored if wide else (1, 1, count * target)
    parts |= {"input_norm": (count * target,)} if record.norm_before_fc else {}
    parts |= {f"fc_norm.{index}": (target,) for index in range(count)} if record.fc_norm else {}
    for index in range(spec.layers):
        _add_layer(record, index, parts, biased)
    needed = {f"{name}.weight": shape for name, shape in parts.items()} | bare
    needed |= {f"{name}.bias": parts[name][:1] for name in parts if name in biased}
    if D2T in optional and record.draft_vocab_size != spec.vocab_size:
        needed[D2T] = optional[D2T]
    return needed, optional


# form of a Markov head -> its further product, that one's outputs in ranks, and the states that it reads
JOINTS = {"gated": ("gate_proj", 1, 0), "rnn": ("joint_proj", 3, 1)}


def _add_block(
    record: BlockRecord,
    headers: Headers,
    parts: dict[str, tuple[int, ...]],
    biased: set[str],
    bare: dict[str, tuple[int, ...]],
    optional: dict[str, tuple[int, ...]],
) -> None:
    """Add what a block drafter has besides its layers."""
    spec, size, rank, prefix = record.spec, record.spec.hidden_size, record.markov_rank, record.markov_prefix
    parts |= {"hidden_norm": (size,), "norm": (size,)}
    joined = size + rank
    if record.markov is not None:
        parts[f"{prefix}markov_w1"] = spec.vocab_size, rank
        parts[f"{prefix}markov_w2"] = record.draft_vocab_size, rank
    if record.markov in JOINTS:
        name, rows, states = JOINTS[record.markov]
        parts[f"{prefix}{name}"] = rows * rank, joined + states * rank
        biased.add(f"{prefix}{name}")
    for name in CONFIDENCE:
        wide = headers.get(f"{name}.weight", ("", ()))[1] == (1, joined)
        optional |= {f"{name}.weight": (1, joined if wide else size), f"{name}.bias": (1,)}
    if record.selector_rank:
        parts[f"{SELECTOR}.hidden_projection"] = record.selector_rank, size
        stored = (name if name in headers else f"{name}.weight" for name in CODEBOOKS)  # both are published
        bare |= dict.fromkeys(stored, (spec.vocab_size, record.selector_rank))
    for index in range(spec.layers if record.conv_taps else 0):
        for name in (f"{record.layer_name(index)}.{each}" for each in CONVOLVED):
            parts[f"{name}.kernel_projection"] = 2 * record.conv_taps * (size // record.conv_group), size
            bare[f"{name}.base_kernel"] = 2, record.conv_taps, size


def _add_layer(record: HeadRecord, index: int, parts: dict[str, tuple[int, ...]], biased: set[str]) -> None:
    """Add the norms and the products of a layer; that of EAGLE-3 which is first reads pairs."""
    spec, name = record.spec, record.layer_name(index)
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
