"""Planting: breaks the rounds of one engine in the ways that `verify_settings` names; and a policy that
always drafts.

The decisions of `auto` never change the distribution of a text, so here all drafters that it may choose take
turns. Every greedy test without penalties passes with these defects, and so does every test whose drafter is
the target: a verification that cannot find them proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
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
from foredraft.decode.policy import PLAIN, Candidates, Decision, Policy
from foredraft.decode.round_draft import AcceptResult, Draft, RoundInputs
from foredraft.decode.sampling import PenaltyContext
from foredraft.model.memory import upload
from foredraft.verify.verify_settings import DEFECTS


class DraftsAlways(Policy):
    """Drafts in every round that has a candidate; the candidates of a row take turns."""

    uses_costs = True  # so a request may have several drafters, which read and propose as under `auto`

    def __init__(self, loaded: Policy) -> None:
        self.name, self.max_draft = loaded.name, loaded.max_draft

    def decide(self, rows: Seq[Candidates]) -> list[Decision]:
        return [self._decide(row) for row in rows]

    def _decide(self, row: Candidates) -> Decision:
        names = list(row.limits)
        if not names:
            return PLAIN
        # Samples of one prompt begin with different drafters, so that each meets every position of a text.
        name = names[(row.sequence.sample + row.sequence.round_count) % len(names)]
        return Decision(name, min(self.max_draft, row.limits[name]))


@contextmanager
def drafting_always(engine: Engine) -> Iterator[None]:
    """Let every round draft within the context, under policies that else would only where it pays."""
    loaded = engine.policy
    if loaded.uses_costs:
        engine.policy = DraftsAlways(loaded)
    try:
        yield
    finally:
        engine.policy = loaded


@contextmanager
def planted(engine: Engine, name: str | None) -> Iterator[None]:
    """Plant a defect in the rounds of this engine within the context."""
    if name is None:
        yield
        return
    point, mutate = _INJECTION_POINTS[name]
    sound = getattr(engine, point)
    setattr(engine, point, mutate(sound))
    try:
        yield
    finally:
        setattr(engine, point, sound)


def _mutated_corrections(
    correction: Callable[[Draft, Distribution, Tensor], Distribution],
) -> Callable[..., Any]:
    """Return what makes an acceptance rule draw the token after the accepted ones once more, from
    `correction`.

    Rows under the `coupled` rule are unchanged: that rule has no residual.
    """

    def mutate(accept: Callable[..., AcceptResult]) -> Callable[..., AcceptResult]:
        def defective(
            draft: Draft,
            p: Distribution,
            keys: DrawKeys | None,
            noise: Noise,
            is_coupled: list[bool],
            limit: SurpriseLimit | None,
            is_block: list[bool],
        ) -> AcceptResult:
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

    return mutate


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
_INJECTION_POINTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "residual": ("accept", _mutated_corrections(_without_residual)),
    "position": ("accept", _mutated_corrections(_residual_of_the_position_before)),
    "coin": ("noise", _SharedCoin),
    "round-noise": ("round_inputs", lambda sound: _KeyedByRound),
    "penalties": ("round_inputs", lambda sound: _PenaltiesNotAlong),
}
assert _INJECTION_POINTS.keys() == DEFECTS.keys()
