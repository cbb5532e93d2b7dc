"""Planting: breaks the rounds of one engine in the ways that `defects` names.

Every greedy test without penalties passes with these defects, and so does every test whose drafter is the
target itself. A verification that cannot find them proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from foredraft.decode.accept import SurpriseLimit
from foredraft.decode.distribution import Distribution
from foredraft.decode.engine import Engine
from foredraft.decode.noise import RESIDUAL, DrawKeys, Noise, NoiseKeys
from foredraft.decode.penalty_context import PenaltyContext
from foredraft.decode.round_draft import Draft, RoundInputs
from foredraft.decode.verdict import Verdict
from foredraft.model.transfers import upload
from foredraft.verify.defects import DEFECTS

__all__ = ["planted"]


@contextmanager
def planted(engine: Engine, name: str | None) -> Iterator[None]:
    """Plant a defect in the rounds of this engine within the context.

    Args:
        engine: Decodes with the defect.
        name: A key of `DEFECTS`; None plants nothing.
    """
    if name is None:
        yield
        return
    seam, spoil = _SEAMS[name]
    sound = getattr(engine, seam)
    setattr(engine, seam, spoil(sound))
    try:
        yield
    finally:
        setattr(engine, seam, sound)


def _spoilt_corrections(
    correction: Callable[[Draft, Distribution, Tensor], Distribution],
) -> Callable[..., Any]:
    """Return a spoiler of the acceptance rules that draws the token after the accepted ones once more.

    Rows under the `coupled` rule are unchanged: that rule has no residual.

    Args:
        correction: (draft, p, accepted tokens [B]) -> the distribution to draw from.
    """

    def spoil(accept: Callable[..., Verdict]) -> Callable[..., Verdict]:
        def defective(
            draft: Draft,
            p: Distribution,
            keys: DrawKeys | None,
            noise: Noise,
            is_coupled: list[bool],
            limit: SurpriseLimit | None,
            is_block: list[bool],
        ) -> Verdict:
            verdict = accept(draft, p, keys, noise, is_coupled, limit, is_block)
            if not draft.tokens.shape[1]:
                return verdict

            def pick(weights: Tensor) -> Tensor:
                assert keys is not None
                return noise.pick(weights, keys.columns(verdict.accepted), RESIDUAL)

            drawn = correction(draft, p, verdict.accepted).draw(pick)[:, 0]
            unchanged = upload(is_coupled, drawn.device)
            return replace(verdict, next_token=torch.where(unchanged, verdict.next_token, drawn))

        return defective

    return spoil


def _without_residual(draft: Draft, p: Distribution, accepted: Tensor) -> Distribution:
    return p.position(accepted)


def _residual_of_the_position_before(draft: Draft, p: Distribution, accepted: Tensor) -> Distribution:
    q = draft.q.position((accepted - 1).clamp_min(0))
    return p.position(accepted).minus(q, accepted < draft.lengths)


class _SharedCoin(Noise):
    """Noise whose coins are those of the first position."""

    def __init__(self, sound: Noise) -> None:
        self._sound, self.uses_gumbel_argmax = sound, sound.uses_gumbel_argmax

    def coin(self, keys: DrawKeys, purpose: int) -> Tensor:
        coins = self._sound.coin(keys, purpose)
        return coins[:, :1].expand_as(coins)

    def pick(self, weights: Tensor, keys: DrawKeys, purpose: int) -> Tensor:
        return self._sound.pick(weights, keys, purpose)


class _RoundKeys(NoiseKeys):
    """Keys that hold the round for every purpose."""

    def _hash(self, purpose: int) -> Tensor:
        return self.vocab_ops.hash_keys(self.base, self.round, self.position, self.attempt, purpose)


class _KeyedByRound(RoundInputs):
    @cached_property
    def noise(self) -> NoiseKeys:
        sound = super().noise
        return _RoundKeys(
            sound.base, sound.position, sound.attempt, sound.round, sound.vocab_ops, sound.coupled
        )


class _CommittedContext(PenaltyContext):
    """A context that every column of a pass shares: that of the committed tokens."""

    __slots__ = ()

    def along(self, drafted: Tensor, ahead: int | Tensor = 0) -> PenaltyContext:
        return self


class _PenaltiesNotAlong(RoundInputs):
    @cached_property
    def penalty_context(self) -> PenaltyContext | None:
        sound = super().penalty_context
        if sound is None or sound.ids is None:
            return sound
        return _CommittedContext(**{each.name: getattr(sound, each.name) for each in fields(sound)})


# Name of a defect -> the engine's attribute that it replaces, and a function from the sound attribute to the
# defective one.
_SEAMS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "residual": ("accept", _spoilt_corrections(_without_residual)),
    "position": ("accept", _spoilt_corrections(_residual_of_the_position_before)),
    "coin": ("noise", _SharedCoin),
    "round-noise": ("round_inputs", lambda sound: _KeyedByRound),
    "penalties": ("round_inputs", lambda sound: _PenaltiesNotAlong),
}
assert _SEAMS.keys() == DEFECTS.keys()
