"""The cost of an early exit, by its layer, in plain steps.

Contract: only the exits after the first layer and before the last are timed; the others lie on the line
between them. The steps of an exit keep to batch-invariant shapes, and the verifying pass resumes from
their states (`drafters.layer_skip`). So an exit has other costs than a plan that skips the same layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from foredraft.decode.drafter import DraftPass
from foredraft.drafters.skips import Skips
from foredraft.llm.loaded import Loaded
from foredraft.model.runner import Resume
from foredraft.profiling.forwards import BareForwards, Draws, draft_seconds, in_sequence
from foredraft.profiling.timing import Work, interleaved

__all__ = ["ExitCosts", "Line", "measure_exit_costs"]

Line = tuple[float, float]  # (intercept, slope by layer)
LIKELIEST = Draws(draw=lambda column, logits: logits.argmax(-1))


@dataclass(frozen=True, slots=True)
class ExitCosts:
    """Costs by the exit's layer, in plain steps.

    Attributes:
        step: c.
        verifying: v(2), v(3), ... of passes that resume at the exit.
    """

    step: Line
    verifying: tuple[Line, ...]

    def at(self, exit: int) -> tuple[float, list[float]]:
        """Return c and v(2), v(3), ... of an exit.

        Each v is 1 at least, because the last drafted token runs through all layers.
        """
        return _on(self.step, exit), [max(1.0, _on(line, exit)) for line in self.verifying]


def measure_exit_costs(
    loaded: Loaded, context: int, longest: int, repeats: int, after: Callable[[], None]
) -> ExitCosts | None:
    """Measure the costs at batch 1; None where the model has no layer to exit before.

    Args:
        loaded: The model.
        context: Tokens before the drafts.
        longest: Tokens of a draft.
        repeats: Turns that count; one more warms up.
        after: Called after each turn.
    """
    layers = loaded.spec.layers
    if layers < 2:
        return None
    exits = sorted({1, layers - 1})
    seconds = _timed(loaded, exits, context, longest, repeats, after)
    step, last = median(seconds["step"]), longest + 1

    def v(exit: int, rows: int) -> float:
        """Return the median ratio to a plain step of the same turn, robust to a machine that slows down."""
        pairs = zip(seconds["verify", exit, rows], seconds["step"], strict=True)
        return median(own / plain for own, plain in pairs)

    drafts = [
        draft_seconds(seconds["round", exit], seconds["verify", exit, last]) / longest / step
        for exit in exits
    ]
    verifying = [_line(exits, [v(exit, rows) for exit in exits]) for rows in range(2, last + 1)]
    return ExitCosts(_line(exits, drafts), tuple(verifying))


def _timed(
    loaded: Loaded, exits: list[int], context: int, longest: int, repeats: int, after: Callable[[], None]
) -> dict[object, list[float]]:
    """Return the seconds of each turn, by "step", by ("verify", exit, rows) and by ("round", exit)."""
    runner = loaded.runner
    bare = BareForwards(runner, 1, context, longest + 1)
    tokens = bare.tokens(longest + 1)
    states = runner.decoder.embed(tokens, tokens)  # token 0 at position 0
    works: dict[object, Work] = {"step": bare.verify(1)}
    for exit in exits:
        for rows in range(2, longest + 2):  # all but the last drafted token were read
            works["verify", exit, rows] = bare.verify(rows, Resume(exit, states[:, :rows], [rows - 1]))
        draft_pass = DraftPass(runner, Skips(exit=exit).plan(loaded.spec.layers), tap=exit)
        draft = bare.draft(draft_pass, longest, lambda: LIKELIEST)
        works["round", exit] = in_sequence(draft, works["verify", exit, longest + 1])
    return interleaved(works, loaded.engine.device, repeats, warm=1, settle=0.0, after=after)


def _line(exits: list[int], costs: list[float]) -> Line:
    """Return the line through the costs of one or two exits."""
    (start, slope), *_ = np.linalg.lstsq(np.array([[1, exit] for exit in exits], float), np.array(costs))
    return float(start), float(slope)


def _on(line: Line, exit: int) -> float:
    return line[0] + line[1] * exit
