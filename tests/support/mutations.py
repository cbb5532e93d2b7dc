"""Mutations that several tables of planted defects share: from a sound function, each makes a defective one."""

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
from foredraft.drafters.states import KnownStates
from foredraft.model.quantisation.codes import Codes
from foredraft.model.runner import Forward, Resume
from tests.support.mutation import Mutation, replaced

Function = Callable[..., Any]


def around(work: Function) -> Mutation:
    """Replace a function by one that gets the sound one before its arguments."""
    return lambda sound: lambda *args, **more: work(sound, *args, **more)


def instead(other: Function) -> Mutation:
    """Replace a function by another one."""
    return lambda sound: other


def during(owner: Any, name: str, value: Any) -> Mutation:
    """Give a module or class another constant, function or method while the sound function runs."""
    return holding(lambda *args: (owner, name, value))


def holding(edit: Function) -> Mutation:
    """Replace an attribute while the sound function runs: `edit` gets its arguments, and gives (owner, name, value)."""

    def mutation(sound: Function) -> Function:
        def mutated(*args: Any, **more: Any) -> Any:
            with replaced(*edit(*args)):
                return sound(*args, **more)

        return mutated

    return mutation


def before(work: Function) -> Mutation:
    def mutation(sound: Function) -> Function:
        def mutated(*args: Any, **more: Any) -> Any:
            work(*args)
            return sound(*args, **more)

        return mutated

    return mutation


def after(work: Function) -> Mutation:
    return changed(lambda result: (result, work(result))[0])


def changed(change: Function) -> Mutation:
    return lambda sound: lambda *args, **more: change(sound(*args, **more))


def argument(place: int, change: Function) -> Mutation:
    """Change an argument of each call, that at a place among the positional ones."""

    def mutation(sound: Function) -> Function:
        return lambda *args, **more: sound(*args[:place], change(args[place]), *args[place + 1 :], **more)

    return mutation


def residual_with_epsilon(epsilon: float) -> Mutation:
    def mutation(residual: Function) -> Function:
        def mutated(ops: VocabOps, p: Tensor, q: Tensor, where: Tensor) -> Tensor:
            left = residual(ops, p, q, where)
            return torch.where(where[..., None], left.clamp_min(epsilon), left)

        return mutated

    return mutation


def padding_kept(sound: Function) -> Function:
    return lambda keep, lengths: sound(keep, torch.full_like(lengths, keep.shape[1]))


def kept_after_a_rejection(sound: Function) -> Function:
    return lambda keep, lengths: torch.minimum(keep.sum(1), lengths)


def matches_differing(match_prefix: Function) -> Function:
    """Keep the longest prefix of tokens that differ from the target's."""

    def mutated(ops: VocabOps, drafted: Tensor, own: Tensor, lengths: Tensor) -> Any:
        target = own[:, :-1]
        return match_prefix(ops, torch.where(drafted == target, target + 1, target), own, lengths)

    return mutated


def added(
    token: Function | None = None, q: Function | None = None, drawable: Function | None = None,
    finite: Function | None = None,
) -> Mutation:  # fmt: skip
    """Mutate what the draft loop keeps of a step: each function gets (token, q, drawable, finite)."""

    def mutation(add: Function) -> Function:
        def mutated(steps: _Steps, *sound: Any) -> None:
            changes = (token, q, drawable, finite)
            kept = [
                was if change is None else change(*sound) for was, change in zip(sound, changes, strict=True)
            ]
            add(steps, *kept)

        return mutated

    return mutation


def drawn_from_power_of_q(power: float) -> Mutation:
    def mutation(draw: Function) -> Function:
        def mutated(q: Distribution, *rest: Any) -> Tensor:
            probs = None if q.probs is None else q.probs**power
            return draw(replace(q, probs=probs), *rest)

        return mutated

    return mutation


def top_k_ties_dropped(probs: Function) -> Function:
    def mutated(ops: VocabOps, x: Tensor, by: Any) -> Any:
        if by.top_k is not None:
            rank = x.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
            k = by.top_k[:, None, None]
            x = x.masked_fill((k > 0) & (rank >= k), float("-inf"))
        return probs(ops, x, by)

    return mutated


def verified(change: Function) -> Mutation:
    """Mutate the verifying pass: `change` alters the last two of (engine, inputs, draft, starts, options)."""

    def mutation(verify: Function) -> Function:
        def mutated(engine: Engine, inputs: RoundInputs, draft: Draft) -> Forward:
            sound = engine.target.forward

            def forward(cache: Any, tokens: Tensor, starts: list[int], **options: Any) -> Forward:
                starts = list(starts)
                change(engine, inputs, draft, starts, options)
                return sound(cache, tokens, starts, **options)

            with replaced(engine.target, "forward", forward):
                made: Forward = verify(engine, inputs, draft)
            return made

        return mutated

    return mutation


def with_the_drafts_plan(engine: Engine, inputs: Any, draft: Any, starts: Any, options: Any) -> None:
    if draft.tokens.shape[1]:
        options["plan"] = engine.drafters["layer-skip"].draft_pass.plan  # type: ignore[attr-defined]


def last_token_known(take: Function) -> Function:
    """Claim to know the state of the last drafted token, which no step read."""

    def mutated(known: KnownStates) -> Resume | None:
        made: Resume | None = take(known)
        return made and replace(made, known=[count + (count > 0) for count in made.known])

    return mutated


def code_format_of_the_first(of_all: Function) -> Function:
    return lambda code_formats: of_all(list(code_formats)[:1])


def scales_of_the_first_dtype(joined: Function) -> Function:
    def mutated(parts: list[Codes]) -> Codes:
        dtype = parts[0].scales.dtype
        return joined([replace(part, scales=part.scales.to(dtype)) for part in parts])

    return mutated
