"""The cost of an early exit, by its layer, in plain steps.

Contract: as in `plan_costs`, an exit is never timed by itself; the first and the last one are, and what lies
between them lies on a line. Its steps keep to exact shapes and are taken one by one, and the verifying pass
resumes from their states (`drafters.layer_skip`): both are another cost than that of a plan which leaves out
the same layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from foredraft.decode.drafter import DraftPass
from foredraft.drafters.skips import Skips
from foredraft.llm import LLM
from foredraft.model.runner import Resume, Runner
from foredraft.profiling.forwards import BareForwards, Draws, draft_seconds, in_sequence
from foredraft.profiling.timing import Work, interleaved

__all__ = ["ExitCosts", "Line", "measure_exit_costs"]

Line = tuple[float, float]  # at no layer, and for each layer
LIKELIEST = Draws(draw=lambda column, logits: logits.argmax(-1))


@dataclass(frozen=True, slots=True)
class ExitCosts:
    """Lines over the exit's layer. step: c. verifying: v(2), v(3), ... of passes that resume there."""

    step: Line
    verifying: tuple[Line, ...]

    def at(self, exit: int) -> tuple[float, list[float]]:
        """c, and v(2), v(3), ...: 1 at least, since the last drafted token goes through all layers."""
        return _on(self.step, exit), [max(1.0, _on(line, exit)) for line in self.verifying]


def measure_exit_costs(
    llm: LLM, context: int, longest: int, repeats: int, after: Callable[[], None]
) -> ExitCosts | None:
    """At batch 1, with `context` tokens before the drafts; `after` each turn (`Turns`), of which there is one
    more than repeats. None where a model has no layer to exit before."""
    layers = llm._spec.layers
    if layers < 2:
        return None
    exits = sorted({1, layers - 1})
    seconds = _timed(llm, exits, context, longest, repeats, after)
    step, last = median(seconds["step"]), longest + 1

    def v(exit: int, rows: int) -> float:
        """The median of the ratios within the repeats, as a machine that slows down burdens both sides."""
        pairs = zip(seconds["verify", exit, rows], seconds["step"], strict=True)
        return median(own / plain for own, plain in pairs)

    drafts = [
        draft_seconds(seconds["round", exit], seconds["verify", exit, last]) / longest / step
        for exit in exits
    ]
    verifying = [_line(exits, [v(exit, rows) for exit in exits]) for rows in range(2, last + 1)]
    return ExitCosts(_line(exits, drafts), tuple(verifying))


def _timed(
    llm: LLM, exits: list[int], context: int, longest: int, repeats: int, after: Callable[[], None]
) -> dict[object, list[float]]:
    """Seconds of "step", of ("verify", exit, rows), and of ("round", exit), a whole one."""
    runner = llm._engine.target
    assert isinstance(runner, Runner)
    bare = BareForwards(runner, 1, context, longest + 1)
    states = runner.decoder.embed(bare.tokens(longest + 1))
    works: dict[object, Work] = {"step": bare.verify(1)}
    for exit in exits:
        for rows in range(2, longest + 2):  # all but the last drafted token were read
            works["verify", exit, rows] = bare.verify(rows, Resume(exit, states[:, :rows], [rows - 1]))
        draft_pass = DraftPass(runner, Skips(exit=exit).plan(llm._spec.layers), exact=True)
        draft = bare.draft(draft_pass, longest, lambda: LIKELIEST)
        works["round", exit] = in_sequence(draft, works["verify", exit, longest + 1])
    return interleaved(works, llm._engine.device, repeats, warm=1, settle=0.0, after=after)


def _line(exits: list[int], costs: list[float]) -> Line:
    """Through all of them, at most two."""
    (start, slope), *_ = np.linalg.lstsq(np.array([[1, exit] for exit in exits], float), np.array(costs))
    return float(start), float(slope)


def _on(line: Line, exit: int) -> float:
    return line[0] + line[1] * exit
