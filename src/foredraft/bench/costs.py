"""What bare forwards cost as decoding has them: v(n) of the target, c of the drafters, in plain steps.

Contract: nothing but forwards through the runner, as the engine calls it, over caches of their own; medians
of interleaved repeats after a warm-up. Each follows one of its own kind, as in decoding: a plain step a plain
step, a verifying pass another one, a round a round. What a draft takes is what a round has beyond its
verifying pass, so that it pays for the weights that it drives out of the caches; c is a token's share of the
longest draft. All host work of a round is missing here, which is what makes the predicted speed-up
(`prediction`) that of a round without any (docs/architecture.md, "Words").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from foredraft.bench.records import Bandwidth, Cost, Costs, Spread
from foredraft.bench.timing import interleaved
from foredraft.decode.draft import Drafter
from foredraft.decode.draft_pass import ModelDrafter
from foredraft.llm import LLM

__all__ = ["SETTLE", "WIDE", "draft_seconds", "measure_costs", "one_after_the_other"]

WIDE = (8, 16, 32)  # rows beyond the longest draft that are measured for one sequence
REPEATS = 30
SETTLE = 1  # runs of a forward or a round just before it is timed

Work = Callable[[], object]


def measure_costs(
    llm: LLM,
    batch: int,
    context: int,
    longest: int,
    step_bytes: int,
    bandwidth: Bandwidth | None,
    repeats: int = REPEATS,
) -> Costs:
    """Of `batch` sequences with `context` tokens each; longest: of the drafts."""
    target: Any = llm.engine.target
    works: dict[int | str, Work] = {}
    for rows in range(1, longest + 2):
        works[rows] = _forward(target, batch, context, rows)
    for name, drafter in llm.engine.drafters.items():
        draft = _draft(drafter, batch, context, longest)
        if draft is not None:
            works[name] = one_after_the_other(draft, works[longest + 1])
    if batch == 1:
        wide = [rows for rows in WIDE if longest + 1 < rows <= target.max_queries]
        works |= {rows: _forward(target, batch, context, rows) for rows in wide}
    seconds = interleaved(works, llm.engine.device, repeats, warm=1, settle=SETTLE)
    step = median(seconds[1])
    verifying = []
    for rows in (key for key in works if isinstance(key, int)):
        spread = Spread.of(seconds[rows])
        assert spread is not None
        verifying.append(Cost(rows, spread.median / step, spread))
    drafting = {
        name: draft_seconds(seconds[name], seconds[longest + 1]) / longest / step if name in seconds else 0.0
        for name in llm.engine.drafters
    }
    share = None if bandwidth is None else step_bytes / step / bandwidth.bytes_per_second
    return Costs(batch, context, tuple(verifying), drafting, share)


def one_after_the_other(draft: Work, verify: Work) -> Work:
    """The forwards of a round."""

    def round() -> None:
        draft()
        verify()

    return round


def draft_seconds(rounds: Sequence[float], verifying: Sequence[float]) -> float:
    """Of a draft: what a round takes beyond a verifying pass that follows another one. The median of the
    differences within the repeats, so that a machine that slows down burdens both sides alike."""
    return max(0.0, median(whole - part for whole, part in zip(rounds, verifying, strict=True)))


def _forward(runner: Any, batch: int, context: int, width: int) -> Work:
    cache = runner.new_cache(batch, context + width)
    tokens = torch.zeros(batch, width, dtype=torch.int64, device=cache.device)
    starts = [context - 1] * batch
    return lambda: runner.forward(cache, tokens, starts)


def _draft(drafter: Drafter, batch: int, context: int, longest: int) -> Work | None:
    """`longest` tokens of each sequence, one after the other, in one call where the engine would: only the
    first one's forward finds the weights as the target left them. None where the drafter has no model."""
    if not isinstance(drafter, ModelDrafter):
        return None
    draft_pass = drafter.draft_pass
    cache = draft_pass.runner.new_cache(batch, context + longest)
    tokens = torch.zeros(batch, 1, dtype=torch.int64, device=cache.device)
    at = torch.zeros(batch, dtype=torch.int64, device=tokens.device)

    def draft() -> None:
        if draft_pass.at_once(cache, [[0]] * batch, [context - 1] * batch, [longest] * batch) is not None:
            return
        for position in range(context, context + longest):
            draft_pass(cache, tokens, [position - 1] * batch, at=at)

    return draft
