"""What the rounds of an engine do on the pretended device: waits, launches and captures of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from foredraft import LLM
from tests.rehearsal.graphs import Graph
from tests.rehearsal.ledger import LEDGER
from tests.rehearsal.tensors import PAGEABLE
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


def _counted(function: Callable[..., Any], found: list[RoundCosts]) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        before = RoundCosts.so_far()
        result = function(*args)
        found.append(RoundCosts(*(b - a for a, b in zip(before, RoundCosts.so_far(), strict=True))))
        return result

    return counted


@contextmanager
def costs_of_rounds(llm: LLM, *, scored: bool = False) -> Iterator[list[RoundCosts]]:
    """Gather them, and check that reading a prompt makes the host wait for nothing but the prompt's scores."""
    engine, rounds, chunks = llm.loaded.engine, list[RoundCosts](), list[RoundCosts]()
    count_rounds = replaced(engine, "round", _counted(engine.round, rounds))
    with count_rounds, replaced(engine, "_prefill", _counted(engine._prefill, chunks)):
        yield rounds
    steady = [cost.waits for cost in chunks if not cost.captures]
    assert chunks and max(steady, default=0) <= scored, "waits of a prompt"
