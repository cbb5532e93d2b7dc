"""The record of a draft head: what every published spelling of one is read into.

Contract: nothing behind this record knows a spelling. A *boundary* k is the residual stream of the target
after k layers; 0 is the embedding. The projects count taps in other ways; the reader of each turns them into
boundaries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from foredraft.errors import CheckpointError
from foredraft.model.spec import ModelSpec

__all__ = ["ANCHOR_SHIFT", "HeadRecord", "default_taps"]

ANCHOR_SHIFT = 1  # positions from the state of a pair to its token, in every EAGLE head


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRecord:
    """What an EAGLE head is.

    Attributes:
        spec: The form of its layers, its rotary parameters and its sizes; `vocab_size` is the target's.
        spelling: The project whose names its files have.
        layer: The name of its first layer among its tensors: "midlayer" or "layers.0".
        taps: The boundaries of the target that it reads, in the order in which they are joined; None stands
            for `default_taps`, or for the last boundary where `fc` joins pairs.
        target_size: Hidden size of the target.
        words: Size of its own vocabulary.
        pair_fc: `fc` joins the embedding and the state of a pair (EAGLE-1 and 2), not the taps. The first
            layer has no norm before its attention, and no norm stands before the head.
        final_norm: The tap is read after the target's final norm.
        norm_before_residual: The residual of the first layer is the normed state.
        norm_before_fc: One norm over the joined taps stands before `fc`.
        fc_norm: Each tap has a norm of its own before `fc`.
        norm_output: The normed state recurs (EAGLE-3.1), not the raw one.
        absolute_words: `d2t` holds ids of the target, not offsets; None where its values tell.
        own_embedding: Tokens are embedded by its own tensor, not by the target's.
        own_head: Logits come of its own head, not of rows of the target's.
        verifier: The target that its config names; None where it names none.
        planned: Draft length that its config proposes, in tokens.
    """

    spec: ModelSpec
    spelling: str
    layer: str
    taps: tuple[int, ...] | None
    target_size: int
    words: int
    pair_fc: bool = False
    final_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    absolute_words: bool | None = False
    own_embedding: bool = False
    own_head: bool = True
    verifier: str | None = None
    planned: int | None = None

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
        """Return the record with its taps, after checking that the head is for this target.

        Args:
            target: The target.
            name: Of the head, for messages.

        Raises:
            CheckpointError: It is for another target.
        """
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
        if not self.own_embedding and self.spec.hidden_size != target.hidden_size:
            raise CheckpointError(
                f"{name} has no embed_tokens.weight, and its hidden size {self.spec.hidden_size} is not that"
                f" of the target's embedding, {target.hidden_size}",
                remedy=remedy,
            )
        if not self.own_head and self.spec.hidden_size != target.hidden_size:
            raise CheckpointError(
                f"{name} has no lm_head.weight, and its hidden size {self.spec.hidden_size} is not that of"
                f" the target's head, {target.hidden_size}",
                remedy=remedy,
            )
        usual = (target.layers,) if self.pair_fc else default_taps(target.layers)
        taps = usual if self.taps is None else self.taps
        beyond = [tap for tap in taps if not 0 <= tap <= target.layers]
        if beyond:
            raise CheckpointError(
                f"{name} reads the target after layer {beyond[0]}, but the target has {target.layers} layers",
                remedy=remedy,
            )
        return replace(self, taps=taps)


def default_taps(layers: int) -> tuple[int, int, int]:
    """Return the boundaries that all projects read unless a head's config says otherwise.

    Examples:
        >>> default_taps(32)
        (2, 16, 29)
    """
    return 2, layers // 2, layers - 3
