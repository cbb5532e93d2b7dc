"""Planted defects of Kangaroo, in real forwards (form: `mutants`)."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from foredraft import LLM
from foredraft.decode.policy import Fixed
from foredraft.drafters.kangaroo import Kangaroo
from foredraft.drafters.states import KnownStates
from tests.exactness import test_kangaroo as kangaroo
from tests.exactness.matrix import PROMPTS, assert_same, plain_ids
from tests.support.mutation import caught_by
from tests.support.mutations import Function, argument, around, before, last_token_known


@functools.cache
def loaded() -> tuple[LLM, list[list[int]]]:
    with tempfile.TemporaryDirectory() as folder:
        llm = kangaroo.load(Path(folder), "llama", "float32", "kernels")
    return llm, plain_ids(llm, params=kangaroo.GREEDY)


def cache(gamma: int) -> None:
    kangaroo.test_the_adapters_cache_is_that_of_a_fresh_prefill(loaded()[0], "good", Fixed(gamma))


def tokens() -> None:
    llm, want = loaded()
    llm.loaded.engine.policy = Fixed(4)
    assert_same(llm, ["good"] * len(PROMPTS), want, params=kangaroo.GREEDY)


def perfect_drafts() -> None:
    llm, _ = loaded()
    for length in (1, 4):
        llm.loaded.engine.policy = Fixed(length)
        for output in llm.generate(PROMPTS[2:6], replace(kangaroo.GREEDY, drafter="perfect")):
            assert output.stats.accepted == output.stats.drafted > 0


def take_the_last_for_read(drafter: Kangaroo, *_: Any) -> None:
    drafter._stepped = {row: read + 1 for row, read in drafter._stepped.items()}


@around
def read_is_forgotten(observe: Function, drafter: Kangaroo, sequence: Any, start: int, states: Any) -> None:
    read = drafter._stepped.pop(sequence.row, None)
    if read is None:
        observe(drafter, sequence, start, states)
    else:
        drafter.cache.lengths[sequence.row] = read


def delay_states(drafter: Kangaroo, waiting: Any) -> None:
    for each in waiting:
        each.states = each.states.roll(1, 0)


TABLE = {
    functools.partial(cache, 1): [
        ("the last accepted token taken for read", Kangaroo.observe, before(take_the_last_for_read)),
        ("states one position late", Kangaroo.observe, argument(2, lambda start: start + 1)),
    ],
    functools.partial(cache, 4): [("the adapter not rolled back", Kangaroo.observe, read_is_forgotten)],
    lambda: kangaroo.test_a_bans_rollback_takes_back_the_adapters_part(*loaded()): [
        ("the adapter not rolled back by a ban", Kangaroo.rewind, lambda rewind: lambda *_: None)
    ],
    perfect_drafts: [
        ("states one position early", Kangaroo.read_states, before(delay_states)),
        ("states that wait never read", Kangaroo.read_states, lambda read: lambda *_: None),
    ],
    tokens: [("the last drafted token's state taken for known", KnownStates.take, last_token_known)],
    lambda: kangaroo.test_the_verifying_pass_resumes_from_the_drafts_states(loaded()[0]): [
        ("nothing known to the target", KnownStates.take, lambda take: lambda known: known.forget())
    ],
}
MUTANTS = caught_by(TABLE)
