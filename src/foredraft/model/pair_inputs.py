"""Pairs: what a draft head reads in place of tokens, a state and the embedding of the token after it."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.model.layers import Norm, Product

__all__ = ["PairInputs"]


@dataclass(frozen=True, slots=True)
class PairInputs:
    """How pairs enter the first layer of a head.

    The pair at position 0 has no state before it: nothing attends to it.

    Attributes:
        token_norm: Of the embedding; None leaves it as it is.
        state_norm: Of the state, likewise.
        join: Makes the state that enters the first layer, of both halves side by side; None: the first
            layer's projections read both, and it adds its attention to the state.
        normed_residual: It adds that to the normed state.
        normed_output: The state of the pair after is the last layer's output after the final norm.
    """

    token_norm: Norm | None
    state_norm: Norm | None
    join: Product | None
    normed_residual: bool
    normed_output: bool
