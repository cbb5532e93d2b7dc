"""The records of draft heads, which every published format is read into, and their draft vocabularies.

Auxiliary layer k names the target's residual stream after k layers; 0 is the embedding. Nothing behind a
record knows a format. A block is a pending token, the *anchor*, in slot 0, and masked slots after it. In
safetensors files of EAGLE-3 `d2t` holds offsets: output i is the target's id i + d2t[i].

Every tensor of a head's files is known, and has the shape that the record implies. Weights are safetensors or
lie in a GGUF file: a pickle can run any program when it is read, so none is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from foredraft.drafters.draft_model import VocabularyMap
from foredraft.errors import CheckpointError
from foredraft.model.checkpoint import CheckpointTensors, Shapes
from foredraft.model.decoder import Decoder
from foredraft.model.runner.native.products import is_native
from foredraft.model.spec import ModelSpec


def draft_ids(
    where: str,
    count: int,
    vocabulary: int,
    d2t: Tensor | None,
    t2d: Tensor | None,
    *,
    name: str = "d2t",
    absolute: bool | None = False,
) -> Tensor | None:
    """Return the target's id of every output, [count] int64; None where output i is id i.

    Examples:
        >>> draft_ids("a head", 3, 8, torch.tensor([0, 1, 4]), None).tolist()
        [0, 2, 6]
    """
    if d2t is None:
        return None
    places, remedy = torch.arange(count), "take both maps from one head"
    ids, offsets = d2t.cpu(), places + d2t.cpu()
    relative = [offsets] if t2d is None else [offsets, ids]
    readings = {True: [ids], None: [ids, offsets], False: relative}[absolute]
    sound = [each for each in readings if _is_sound(each, vocabulary)]
    if not sound:
        problem = f"{where}: {name} does not give {count} different token ids below {vocabulary}"
        raise CheckpointError(problem, remedy=remedy)
    if t2d is not None:
        marked = t2d.cpu().nonzero().flatten()
        sound = [each for each in sound if torch.equal(each.sort().values, marked)]
        if not sound:
            raise CheckpointError(f"{where}: {name} and t2d name different token ids", remedy=remedy)
    if count == vocabulary and torch.equal(sound[0], places):
        return None
    return sound[0].to(d2t.device)


def _is_sound(ids: Tensor, vocabulary: int) -> bool:
    within = bool((ids >= 0).all()) and bool((ids < vocabulary).all())
    return within and len(set(ids.tolist())) == len(ids)


def map_of(draft_vocab: Tensor | None, target: Decoder) -> VocabularyMap | None:
    """Return the map from a head's logits to the target's ids; None where output i is id i."""
    if draft_vocab is None:
        return None
    pairs = [(id, output) for output, id in enumerate(draft_vocab.tolist())]
    return VocabularyMap(pairs, (target.spec.vocab_size, len(pairs)), 0, target.device)


def target_rows(target: Decoder, ids: Tensor) -> Tensor:
    """Return the rows [n, hidden] of the target's head for some ids."""
    head = target.output
    if is_native(head):
        return head.rows(ids)
    # a head that oneDNN packs is copied to be read
    return target.embedding_rows(ids) if target.spec.tied else head.dense()[ids]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRecord:
    spec: ModelSpec  # the form of its layers and its sizes; `vocab_size` is the target's
    format: str  # the project whose names its files have
    layer: str  # the name of its first layer among its tensors: "midlayer" or "layers.0"
    # layers that it reads, in the order of joining; None: `default_aux_layers`, or for pairs the last one
    aux_layers: tuple[int, ...] | None
    target_size: int  # hidden size of the target
    draft_vocab_size: int
    # `fc` joins the embedding and the state of a pair (EAGLE-1 and 2), not those of layers. The first layer
    # has no norm before its attention, and no norm stands before the head
    pair_fc: bool = False
    final_norm: bool = False  # the state is read after the target's final norm
    norm_before_residual: bool = False  # the residual of the first layer is the normed state
    norm_before_fc: bool = False  # one norm over the joined states stands before `fc`
    fc_norm: bool = False  # each layer's states have a norm of their own before `fc`
    norm_output: bool = False  # the normed state recurs (EAGLE-3.1), not the raw one
    absolute_d2t: bool | None = False  # `d2t` holds ids, not offsets; None where its values tell
    own_embedding: bool = False  # tokens are embedded by its own tensor, not by the target's
    own_head: bool = True  # logits come of its own head, not of rows of the target's
    verifier: str | None = None  # the target that its config names; None where it names none
    planned: int | None = None  # draft length that its config proposes, in tokens

    @property
    def misread(self) -> tuple[str, ...]:
        """The flags that a config may have wrong, for the doctor to try the other way."""
        return ("final_norm",) if self.pair_fc else ("norm_before_residual", "norm_output")

    @property
    def tried_length(self) -> int | None:
        """The tokens of a draft that every setting which the doctor tries can give; None for any number."""
        return None

    @property
    def drafts(self) -> int | None:
        """The tokens of a whole draft; None for any number."""
        return None

    def layer_name(self, index: int) -> str:
        return self.layer if index == 0 else f"layers.{index}"

    def windowed(self, window: int) -> Self:
        """Return the record with a window of so many positions in every layer."""
        return replace(self, spec=replace(self.spec, windows=(window,) * self.spec.layers))

    def for_target(self, target: ModelSpec, name: str) -> Self:
        """Return the record with its layers, after checking that the head is for this target."""
        usual = (target.layers,) if self.pair_fc else default_aux_layers(target.layers)
        checked = self if self.aux_layers is not None else replace(self, aux_layers=usual)
        made_for = "" if self.verifier is None else f" (its config names {self.verifier})"
        for problem, remedy in checked.mismatches(target):
            remedy = remedy or f"give a head of this target{made_for}"
            raise CheckpointError(f"{name} {problem}", remedy=remedy)
        return checked

    def mismatches(self, target: ModelSpec) -> Iterator[tuple[str, str]]:
        """Yield why the head is not for a target, and the remedy, "" for the usual one."""
        for what, own, of_target in (
            ("hidden size", self.target_size, target.hidden_size),
            ("vocabulary", self.spec.vocab_size, target.vocab_size),
        ):
            if own != of_target:
                yield f"is for a target of {what} {own}, but the target's is {of_target}", ""
        size = self.spec.hidden_size
        for tensor, part, has_own in (
            ("embed_tokens", "embedding", self.own_embedding),
            ("lm_head", "head", self.own_head),
        ):
            if not has_own and size != target.hidden_size:
                its = f"its hidden size {size} is not that of the target's {part}, {target.hidden_size}"
                yield f"has no {tensor}.weight, and {its}", ""
        for layer in self.aux_layers or ():
            if not 0 <= layer <= target.layers:
                yield f"reads the target after layer {layer}, but the target has {target.layers} layers", ""


Record = TypeVar("Record", bound=HeadRecord)


def default_aux_layers(layers: int) -> tuple[int, int, int]:
    """Return the auxiliary layers that all projects read unless a head's config says otherwise.

    Examples:
        >>> default_aux_layers(32)
        (2, 16, 29)
    """
    return 2, layers // 2, layers - 3


MARKOV_FORMS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecord(HeadRecord):
    block: int  # slots of a block, the anchor's among them
    mask_token: int  # the target's id whose embedding stands in the masked slots
    from_anchor: bool = False  # the anchor's slot drafts, too
    causal: bool = False  # a slot attends to no later slot of its block in layers without a window
    causal_windows: bool = True  # the same in layers with one
    # windows reach back from the anchor and hold whole blocks; else they reach back from each slot
    window_from_anchor: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    markov: str | None = None  # the form of the bias of the token before a slot; None for no bias
    markov_rank: int = 0  # rank of that bias
    target_layers: int | None = None  # of the target that it was made for; None: its config does not say
    last_is_normed: bool = False  # states after the last layer mean normed ones, which no target gives

    @property
    def drafts(self) -> int:
        return self.block if self.from_anchor else self.block - 1

    @property
    def first_slot(self) -> int:
        """The slot that gives the first token of a draft."""
        return 0 if self.from_anchor else 1

    @property
    def misread(self) -> tuple[str, ...]:
        # a block of the anchor alone drafts from it
        return ("from_anchor", "causal") if self.block > 1 else ()

    @property
    def tried_length(self) -> int | None:
        return max(1, self.block - 1)

    def windowed(self, window: int) -> Self:
        spec = replace(self.spec, windows=(window,) * self.spec.layers)
        causal = self.causal_windows if any(self.spec.windows) else self.causal
        return replace(self, spec=spec, causal_windows=causal)

    def mismatches(self, target: ModelSpec) -> Iterator[tuple[str, str]]:
        yield from HeadRecord.mismatches(self, target)
        if self.target_layers not in (None, target.layers):
            yield f"is for a target of {self.target_layers} layers, but the target has {target.layers}", ""
        if self.last_is_normed and target.layers in (self.aux_layers or ()):
            remedy = "give a head that reads the target before its last layer"
            yield "reads the target's last state after its norm, which is not supported", remedy


def spread_aux_layers(target_layers: int, layers: int) -> tuple[int, ...]:
    """Return the auxiliary layers that z-lab's heads read where their config names none: one for each layer.

    Examples:
        >>> spread_aux_layers(36, 5)
        (2, 10, 18, 26, 34)
    """
    if layers == 1:
        return (target_layers // 2 + 1,)
    step = (target_layers - 4) / (layers - 1)
    return tuple(round(1 + index * step) + 1 for index in range(layers))


EMBEDDING, HEAD, D2T, T2D = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
MARKOV, CONFIDENCE = "markov_head", "confidence_head.proj"
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

    def open(self, stack: ExitStack, device: torch.device, dtype: torch.dtype) -> HeadSource:
        """Return the source of the tensors, which the stack closes."""
        if self.source is not None:
            return self.source(device, dtype)
        return CheckpointTensors(self.folder, stack, device, dtype)

    def draft_vocab(self, tensors: HeadSource) -> Tensor | None:
        """Return the target's ids that the head can draft, [draft_vocab]; None where it can draft all."""
        d2t, t2d = (
            tensors.view(name, self.shapes[name], dtypes).long().clone() if name in self.shapes else None
            for name, dtypes in MAP_DTYPES.items()
        )
        record, sizes = self.record, (self.record.draft_vocab_size, self.record.spec.vocab_size)
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
