"""The records of draft heads, which every published format is read into, and their draft vocabularies.

Auxiliary layer k names the target's residual stream after k layers; 0 is the embedding. Nothing behind a
record knows a format. A block is a pending token, the *anchor*, in slot 0, and masked slots after it. In
safetensors files of EAGLE-3 `d2t` holds offsets: output i is the target's id i + d2t[i].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from foredraft.drafters.draft_model import VocabularyMap
from foredraft.errors import CheckpointError
from foredraft.model.config import read_json
from foredraft.model.decoder import Decoder
from foredraft.model.source import weights_to_come
from foredraft.model.spec import CONFIG, ModelSpec

REMEDY = "take both maps from one head"


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
    places = torch.arange(count)
    ids, offsets = d2t.cpu(), places + d2t.cpu()
    relative = [offsets] if t2d is None else [offsets, ids]
    readings = {True: [ids], None: [ids, offsets], False: relative}[absolute]
    sound = [each for each in readings if _is_sound(each, vocabulary)]
    if not sound:
        raise CheckpointError(
            f"{where}: {name} does not give {count} different token ids below {vocabulary}", remedy=REMEDY
        )
    if t2d is not None:
        marked = t2d.cpu().nonzero().flatten()
        sound = [each for each in sound if torch.equal(each.sort().values, marked)]
        if not sound:
            raise CheckpointError(f"{where}: {name} and t2d name different token ids", remedy=REMEDY)
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
    return VocabularyMap.of_draft_vocab(draft_vocab.tolist(), target.spec.vocab_size, target.device)


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

    def windowed(self, window: int) -> Self:
        """Return the record with a window of so many positions in every layer."""
        return replace(self, spec=replace(self.spec, windows=(window,) * self.spec.layers))

    def for_target(self, target: ModelSpec, name: str) -> Self:
        """Return the record with its layers, after checking that the head is for this target."""
        made_for = "" if self.verifier is None else f" (its config names {self.verifier})"
        remedy = f"give a head of this target{made_for}"
        for what, own, of_target in (
            ("hidden size", self.target_size, target.hidden_size),
            ("vocabulary", self.spec.vocab_size, target.vocab_size),
        ):
            if own != of_target:
                raise CheckpointError(
                    f"{name} is for a target of {what} {own}, but the target's is {of_target}", remedy=remedy
                )
        size = self.spec.hidden_size
        for tensor, part, has_own in (
            ("embed_tokens", "embedding", self.own_embedding),
            ("lm_head", "head", self.own_head),
        ):
            if not has_own and size != target.hidden_size:
                raise CheckpointError(
                    f"{name} has no {tensor}.weight, and its hidden size {size} is not that of the target's"
                    f" {part}, {target.hidden_size}",
                    remedy=remedy,
                )
        usual = (target.layers,) if self.pair_fc else default_aux_layers(target.layers)
        aux_layers = usual if self.aux_layers is None else self.aux_layers
        beyond = [layer for layer in aux_layers if not 0 <= layer <= target.layers]
        if beyond:
            raise CheckpointError(
                f"{name} reads the target after layer {beyond[0]}, but the target has {target.layers} layers",
                remedy=remedy,
            )
        return replace(self, aux_layers=aux_layers)


def default_aux_layers(layers: int) -> tuple[int, int, int]:
    """Return the auxiliary layers that all projects read unless a head's config says otherwise.

    Examples:
        >>> default_aux_layers(32)
        (2, 16, 29)
    """
    return 2, layers // 2, layers - 3


def config_of(place: Path) -> dict[str, Any]:
    """Return the config.json of a folder; an empty one where there is none that can be read."""
    try:
        return read_json(place / CONFIG) if (place / CONFIG).is_file() else {}
    except CheckpointError:
        return {}


def architectures_of(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FLOATS = ("BF16", "F16", "F32", "F64")  # dtypes of unquantized weights


def has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def not_downloaded(head: Path) -> bool:
    """Return whether a head is a folder of the hub's cache whose weights were not fetched."""
    return head.is_dir() and not has_weights(head) and _pickle(head) is None and weights_to_come(head)


def refuse_pickles(folder: Path) -> None:
    """Raise CheckpointError where the weights in a folder are pickles alone; none is ever read."""
    pickle = _pickle(folder)
    if pickle is not None:
        raise CheckpointError(
            f"{pickle} is a pickle, which can run any program when it is read, so it is not read",
            remedy="convert it to model.safetensors, or give a copy of the head in that format",
        )


def _pickle(folder: Path) -> Path | None:
    """Return a pickle of a folder that has no weights in another format; None for other folders."""
    if has_weights(folder):
        return None
    return next((file for pattern in PICKLES for file in sorted(folder.glob(pattern))), None)


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
        """The tokens of a whole draft."""
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

    def for_target(self, target: ModelSpec, name: str) -> Self:
        checked = HeadRecord.for_target(self, target, name)
        if self.target_layers not in (None, target.layers):
            raise CheckpointError(
                f"{name} is for a target of {self.target_layers} layers, but the target has {target.layers}",
                remedy="give a head of this target",
            )
        if self.last_is_normed and target.layers in (checked.aux_layers or ()):
            raise CheckpointError(
                f"{name} reads the target's last state after its norm, which is not supported",
                remedy="give a head that reads the target before its last layer",
            )
        return checked


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
