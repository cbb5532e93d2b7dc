"""Always: every round drafts, in checks of a policy that would draft only where it pays.

What `auto` decides depends on the costs of a machine, and a draft that it does not take shows no defect. Its
decisions never change the distribution of a text, so any others test the same code: here all drafters that it
may choose take turns within each text.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

from foredraft.decode.engine import Engine
from foredraft.decode.policy import PLAIN, Candidates, Decision, Policy

__all__ = ["DraftsAlways", "drafting_always"]


class DraftsAlways(Policy):
    """Drafts in every round that has a candidate; the candidates of a row take turns.

    Args:
        loaded: The policy in whose place it decides. Requests that name that one mean this one.
    """

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
    """Let every round draft within the context, under policies that else would only where it pays.

    Args:
        engine: No sequence has a row, neither at the beginning nor at the end.
    """
    loaded = engine.policy
    if loaded.uses_costs:
        engine.policy = DraftsAlways(loaded)
    try:
        yield
    finally:
        engine.policy = loaded
