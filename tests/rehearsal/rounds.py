"""What the rounds of an engine do on the pretended device: waits, launches and captures of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from foredraft import LLM
from tests.rehearsal.copies import PAGEABLE
from tests.rehearsal.graphs import Graph
from tests.rehearsal.ledger import LEDGER
from tests.support.loaded import engine_of
from tests.support.planting import replaced

__all__ = ["RoundCosts", "costs_of_rounds"]


@dataclass(frozen=True)
class RoundCosts:
    """What one round made the host do.

    Attributes:
        waits: How often it waited for the device.
        pageable: How many of these were copies from pageable memory.
        launches: Kernels and copies that it launched; a replay of a graph is one.
        captures: Graphs that it captured.
    """

    waits: int
    pageable: int
    launches: int
    captures: int


@contextmanager
def costs_of_rounds(llm: LLM) -> Iterator[list[RoundCosts]]:
    """Gather the costs of all rounds within the block."""
    engine, found = engine_of(llm), list[RoundCosts]()
    sound = engine.round

    def counted() -> object:
        before = _costs()
        result = sound()
        after = _costs()
        found.append(RoundCosts(*(b - a for a, b in zip(before, after, strict=True))))
        return result

    with replaced(engine, "round", counted):
        yield found


def _costs() -> tuple[int, int, int, int]:
    return LEDGER.waits, LEDGER.count(PAGEABLE), LEDGER.launches, Graph.made
