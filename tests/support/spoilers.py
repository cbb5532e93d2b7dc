"""Spoilers that several tables of planted defects share: each takes a sound function and returns a defective one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foredraft.decode.distribution import Distribution
from foredraft.decode.drafting import _Steps
from foredraft.decode.engine import Engine
from foredraft.decode.round_draft import Draft, RoundInputs
from foredraft.decode.vocab_ops import VocabOps
from foredraft.drafters.known_states import KnownStates
from foredraft.model.quantisation import Codes
from foredraft.model.runner import Forward, Resume
from tests.support.planting import Spoiler, replaced

Function = Callable[..., Any]


def during(owner: Any, name: str, value: Any) -> Spoiler:
    """Give a module or class another constant, function or method while the sound function runs."""

    def spoiler(sound: Function) -> Function:
        def spoilt(*args: Any, **more: Any) -> Any:
            with replaced(owner, name, value):
                return sound(*args, **more)

        return spoilt

    return spoiler


def residual_with_epsilon(epsilon: float) -> Spoiler:
    """Clamp the residual at epsilon instead of 0."""

    def spoiler(residual: Function) -> Function:
        def spoilt(ops: VocabOps, p: Tensor, q: Tensor, where: Tensor) -> Tensor:
            left = residual(ops, p, q, where)
            return torch.where(where[..., None], left.clamp_min(epsilon), left)

        return spoilt

    return spoiler


def padding_kept(sound: Function) -> Function:
    """Count kept tokens past the end of a row's draft."""
    return lambda keep, lengths: sound(keep, torch.full_like(lengths, keep.shape[1]))


def kept_after_a_rejection(sound: Function) -> Function:
    """Count kept tokens after the first rejection."""
    return lambda keep, lengths: torch.minimum(keep.sum(1), lengths)


def matches_what_differs(match_prefix: Function) -> Function:
    """Keep the longest prefix of tokens that differ from the target's."""

    def spoilt(ops: VocabOps, drafted: Tensor, own: Tensor, lengths: Tensor) -> Any:
        target = own[:, :-1]
        return match_prefix(ops, torch.where(drafted == target, target + 1, target), own, lengths)

    return spoilt


def added(
    token: Function | None = None, q: Function | None = None, drawable: Function | None = None,
    finite: Function | None = None,
) -> Spoiler:  # fmt: skip
    """Spoil what the draft loop keeps of a step: each function gets (token, q, drawable, finite)."""

    def spoiler(add: Function) -> Function:
        def spoilt(steps: _Steps, *sound: Any) -> None:
            changes = (token, q, drawable, finite)
            kept = [
                was if change is None else change(*sound) for was, change in zip(sound, changes, strict=True)
            ]
            add(steps, *kept)

        return spoilt

    return spoiler


def drawn_from_power_of_q(power: float) -> Spoiler:
    """Draw drafted tokens from q to a power; q is kept as it is."""

    def spoiler(draw: Function) -> Function:
        def spoilt(q: Distribution, *rest: Any) -> Tensor:
            probs = None if q.probs is None else q.probs**power
            drawn: Tensor = draw(replace(q, probs=probs), *rest)
            return drawn

        return spoilt

    return spoiler


def ties_at_top_k_dropped(probs: Function) -> Function:
    """Keep exactly k tokens."""

    def spoilt(ops: VocabOps, x: Tensor, by: Any) -> Any:
        if by.top_k is not None:
            rank = x.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
            k = by.top_k[:, None, None]
            x = x.masked_fill((k > 0) & (rank >= k), float("-inf"))
        return probs(ops, x, by)

    return spoilt


def verified(change: Function) -> Spoiler:
    """Spoil the verifying pass: `change` gets (engine, inputs, draft, starts, options) and alters the last two."""

    def spoiler(verify: Function) -> Function:
        def spoilt(engine: Engine, inputs: RoundInputs, draft: Draft) -> Forward:
            sound = engine.target.forward

            def forward(cache: Any, tokens: Tensor, starts: list[int], **options: Any) -> Forward:
                starts = list(starts)
                change(engine, inputs, draft, starts, options)
                return sound(cache, tokens, starts, **options)

            with replaced(engine.target, "forward", forward):
                made: Forward = verify(engine, inputs, draft)
            return made

        return spoilt

    return spoiler


def with_the_drafts_plan(engine: Engine, inputs: Any, draft: Any, starts: Any, options: Any) -> None:
    """Skip the layers of the draft in the verifying pass (for `verified`)."""
    drafter: Any = engine.drafters["layer-skip"]
    options["plan"] = drafter.draft_pass.plan


def last_token_known(take: Function) -> Function:
    """Claim to know the state of the last drafted token, which no step read."""

    def spoilt(known: KnownStates) -> Resume | None:
        made: Resume | None = take(known)
        return made and replace(made, known=[count + (count > 0) for count in made.known])

    return spoilt


def coding_of_the_first(of_all: Function) -> Function:
    """Take the coding of the first part of a joined weight for that of all."""
    return lambda codings: of_all(list(codings)[:1])


def scales_of_the_first_dtype(joined: Function) -> Function:
    """Round the scales of all parts of a joined weight to the dtype of the first."""

    def spoilt(parts: list[Codes]) -> Codes:
        dtype = parts[0].scales.dtype
        made: Codes = joined([replace(part, scales=part.scales.to(dtype)) for part in parts])
        return made

    return spoilt
