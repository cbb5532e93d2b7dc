"""What bare forwards cost: v(n) of the target, c of the drafters, in plain steps.

Contract: nothing but forwards through the runner, as the engine calls it, over caches of their own; medians
of interleaved repeats after a warm-up. c is a token's share of the longest draft. All host work of a round is
missing here, which is what makes the predicted speed-up that of a round without any (docs/architecture.md,
"Words").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foredraft.bench.records import Bandwidth, Cost, Costs, Spread
from foredraft.bench.timing import interleaved
from foredraft.decode.draft import Drafter
from foredraft.decode.draft_pass import ModelDrafter
from foredraft.llm import LLM

__all__ = ["WIDE", "measure_costs", "predicted", "round_cost"]

WIDE = (8, 16, 32)  # rows beyond the longest draft that are measured for one sequence
REPEATS = 30


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
    widths = list(range(1, longest + 2))
    if batch == 1:
        widths += [rows for rows in WIDE if longest + 1 < rows <= target.max_queries]
    forwards = [_forward(target, batch, context, width) for width in widths]
    drafters = {
        name: _draft(drafter, batch, context, longest) for name, drafter in llm.engine.drafters.items()
    }
    drafts = [draft for draft in drafters.values() if draft is not None]
    # drafts in between: as in a round, the target's weights have just been where theirs were
    actions = dict(enumerate([forwards[0], *drafts, *forwards[1:]]))
    seconds = interleaved(actions, llm.engine.device, repeats, warm=1)
    first, *others = filter(None, map(Spread.of, seconds.values()))
    taken, spreads = iter(others[: len(drafts)]), [first, *others[len(drafts) :]]
    step = first.median
    verifying = tuple(
        Cost(width, spread.median / step, spread) for width, spread in zip(widths, spreads, strict=True)
    )
    drafting = {
        name: 0.0 if draft is None else next(taken).median / longest / step
        for name, draft in drafters.items()
    }
    share = None if bandwidth is None else step_bytes / step / bandwidth.bytes_per_second
    return Costs(batch, context, verifying, drafting, share)


def round_cost(costs: Costs, drafter: str | None, length: float) -> float:
    """k c + v(k + 1) at a mean draft length k; v between two row counts lies on the line between theirs."""
    known = {cost.rows: cost.v for cost in costs.verifying}
    below = int(length) + 1
    above = below + 1 if length > int(length) else below
    v = known[below] + (length - int(length)) * (known[above] - known[below])
    return v + (length * costs.drafting[drafter] if drafter is not None else 0.0)


def predicted(costs: Costs, drafter: str | None, length: float, tau: float) -> float:
    """S = tau / (k c + v(k + 1)): the speed-up if nothing but forwards took time."""
    return tau / round_cost(costs, drafter, length)


def _forward(runner: Any, batch: int, context: int, width: int) -> Callable[[], object]:
    cache = runner.new_cache(batch, context + width)
    tokens = torch.zeros(batch, width, dtype=torch.int64, device=cache.data.device)
    starts = [context - 1] * batch
    return lambda: runner.forward(cache, tokens, starts)


def _draft(drafter: Drafter, batch: int, context: int, longest: int) -> Callable[[], object] | None:
    """`longest` tokens of each sequence, drafted one after the other: only the first one's forward finds
    the weights as the target left them. None where the drafter has no model."""
    if not isinstance(drafter, ModelDrafter):
        return None
    draft_pass = drafter.draft_pass
    cache = draft_pass.runner.new_cache(batch, context + longest)
    tokens = torch.zeros(batch, 1, dtype=torch.int64, device=cache.data.device)
    at = torch.zeros(batch, dtype=torch.int64, device=tokens.device)

    def draft() -> None:
        for position in range(context, context + longest):
            draft_pass(cache, tokens, [position - 1] * batch, at=at)

    return draft
