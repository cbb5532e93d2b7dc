"""The records of draft heads, which every published format is read into, and their draft vocabularies.

Auxiliary layer k names the target's residual stream after k layers; 0 is the embedding. Nothing behind a
record knows a format. A block is a pending token, the *anchor*, in slot 0, and masked slots after it. In
safetensors files of EAGLE-3 `d2t` holds offsets: output i is the target's id i + d2t[i].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import torch
from torch import Tensor

from foredraft.drafters.draft_model import VocabularyMap
from foredraft.errors import CheckpointError
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PEagleRecord(HeadRecord):
    """An EAGLE-3 head that drafts all tokens in one pass."""

    # the target's id whose embedding stands in masked slots; None: the one that SpecForge takes from the
    # target's tokenizer
    mask_token: int | None

    @property
    def misread(self) -> tuple[str, ...]:
        return ("norm_before_residual",)  # nothing recurs


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
    markov_prefix: str = "markov_head."  # of the names of its tensors
    # taps of the dynamic convolutions around the sub-layers, and the channels that share a kernel; 0: none
    conv_taps: int = 0
    conv_group: int = 0
    # tokens of a slot among which the selector chooses, and its rank; 0: there is none
    candidates: int = 0
    selector_rank: int = 0
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
