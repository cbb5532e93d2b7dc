"""What the rounds of an engine do on the pretended device: waits, launches and captures of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from foredraft import LLM
from tests.rehearsal.copies import PAGEABLE
from tests.rehearsal.graphs import Graph
from tests.rehearsal.ledger import LEDGER
from tests.support.loaded import engine_of
from tests.support.mutation import replaced


class RoundCosts(NamedTuple):
    """What one round made the host do."""

    waits: int
    pageable: int  # of these, copies from pageable memory
    launches: int  # a replay of a graph is one
    captures: int

    @classmethod
    def so_far(cls) -> RoundCosts:
        return cls(LEDGER.waits, LEDGER.count(PAGEABLE), LEDGER.launches, Graph.made)


@contextmanager
def costs_of_rounds(llm: LLM) -> Iterator[list[RoundCosts]]:
    engine, found = engine_of(llm), list[RoundCosts]()
    sound = engine.round

    def counted() -> object:
        before = RoundCosts.so_far()
        result = sound()
        found.append(RoundCosts(*(b - a for a, b in zip(before, RoundCosts.so_far(), strict=True))))
        return result

    with replaced(engine, "round", counted):
        yield found
