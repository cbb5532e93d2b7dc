"""Host work: what a round of the real engine takes beside its forwards."""

from __future__ import annotations

import time
from statistics import median_low

from foredraft.decode.drafter import Guesser
from foredraft.decode.engine import Engine
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Fixed
from foredraft.decode.sequence import Sequence
from foredraft.profiling.phases import RoundClock, observed

__all__ = ["host_ms"]

ROUNDS = 7  # timed rounds, of which the least half counts; two more come before them
SECONDS = 0.2  # after which no further round begins
PROMPT = 2  # tokens of the sequences: host work does not depend on them


def host_ms(engine: Engine, batch: int, length: int, *, draws: bool) -> float:
    """Return the ms of a round outside of drafts and forwards; each of `batch` rows drafts `length` tokens.

    The rounds run over the engine's target and cache, which must hold no sequence and are left empty.
    """
    assert not engine.rows.sequences
    tokens = (ROUNDS + 2) * (length + 1) + 1
    if PROMPT + tokens > engine.cache.positions:
        tokens = engine.cache.positions - PROMPT
    own = Engine(
        engine.target, engine.cache, Fixed(length), {"filler": _Filler()}, vocabulary=engine.vocabulary,
        device=engine.device, vocab_ops=engine.vocab_ops,
    )  # fmt: skip
    params = SamplingParams(temperature=float(draws), max_new_tokens=tokens, ignore_eos=True)
    drafters = ("filler",) if length else ()
    for row in range(batch):
        own.submit(Sequence(row, [row % engine.vocabulary] * PROMPT, params, 0, drafters=drafters))
    clock, host = RoundClock(own), list[float]()
    try:
        with observed(own, clock):
            while not own.scheduler.steady and not own.scheduler.idle:
                own.step()
            started = time.perf_counter()
            while own.scheduler.steady and len(host) < ROUNDS + 2:
                if len(host) > 2 and time.perf_counter() - started > SECONDS:
                    break
                before = clock.host
                own.round()
                host.append(1e3 * (clock.host - before))
    finally:
        for sequence in list(own.rows.sequences):
            own.cancel(sequence)
    return median_low(sorted(host[2:] or host or [0.0])[: ROUNDS // 2 + 1])


class _Filler(Guesser):
    """Proposes tokens at no cost."""

    name = "filler"

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [[0] * budget for _, budget in requests]
