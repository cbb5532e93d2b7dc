"""Planted defects of Kangaroo, in real forwards.

A table entry reads: name, seam, spoiler, check. A spoiler takes the sound function and returns the defective one.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from foredraft import LLM
from foredraft.decode.policy import Fixed
from foredraft.drafters.kangaroo import Kangaroo
from foredraft.drafters.known_states import KnownStates
from tests.exactness import test_kangaroo as kangaroo
from tests.exactness.test_bits import PROMPTS
from tests.support.loaded import engine_of
from tests.support.planting import defect
from tests.support.spoilers import last_token_known

Function = Callable[..., Any]


@functools.cache
def loaded() -> tuple[LLM, list[list[int]]]:
    with tempfile.TemporaryDirectory() as folder:
        llm = kangaroo.load(Path(folder), "llama", "float32", "kernels")
    return llm, kangaroo.plainly(llm)


def cache_of_one_token_drafts() -> None:
    kangaroo.check_cache(loaded()[0], "good", Fixed(1))


def cache_of_longer_drafts() -> None:
    kangaroo.check_cache(loaded()[0], "good", Fixed(4))


def tokens() -> None:
    llm, want = loaded()
    engine_of(llm).policy = Fixed(4)
    kangaroo.assert_plain(llm, ["good"] * len(PROMPTS), want)


def perfect_drafts() -> None:
    llm, _ = loaded()
    for length in (1, 4):
        engine_of(llm).policy = Fixed(length)
        for output in llm.generate(PROMPTS[2:6], replace(kangaroo.GREEDY, drafter="perfect")):
            assert output.stats.accepted == output.stats.drafted > 0


def resumed() -> None:
    kangaroo.check_resumed(loaded()[0])


def rolled_back() -> None:
    kangaroo.check_rollback(*loaded())


def last_accepted_token_taken_for_read(observe: Function) -> Function:
    def spoilt(drafter: Kangaroo, sequence: Any, start: int, states: Mapping[int, Tensor]) -> None:
        drafter._stepped = {row: read + 1 for row, read in drafter._stepped.items()}
        observe(drafter, sequence, start, states)

    return spoilt


def rejected_tokens_taken_for_read(observe: Function) -> Function:
    """The states of the committed positions are taken for those of the positions after them."""

    def spoilt(drafter: Kangaroo, sequence: Any, start: int, states: Mapping[int, Tensor]) -> None:
        observe(drafter, sequence, start + 1, states)

    return spoilt


def read_is_forgotten(observe: Function) -> Function:
    """The row's drafted tokens count as read, whether they were accepted or not."""

    def spoilt(drafter: Kangaroo, sequence: Any, start: int, states: Mapping[int, Tensor]) -> None:
        read = drafter._stepped.pop(sequence.row, None)
        if read is None:
            observe(drafter, sequence, start, states)
        else:
            drafter.cache.lengths[sequence.row] = read

    return spoilt


def states_of_the_position_before(read: Function) -> Function:
    def spoilt(drafter: Kangaroo, waiting: Any) -> None:
        for each in waiting:
            each.states = each.states.roll(1, 0)
        read(drafter, waiting)

    return spoilt


MUTANTS = [
    defect(
        "the last accepted token taken for read by the adapter",
        Kangaroo.observe,
        last_accepted_token_taken_for_read,
        cache_of_one_token_drafts,
    ),
    defect(
        "states one position late",
        Kangaroo.observe,
        rejected_tokens_taken_for_read,
        cache_of_one_token_drafts,
    ),
    defect(
        "the adapter's cache not rolled back", Kangaroo.observe, read_is_forgotten, cache_of_longer_drafts
    ),
    defect(
        "the adapter not rolled back by a ban", Kangaroo.rewind, lambda rewind: lambda *_: None, rolled_back
    ),
    defect("a tap one position early", Kangaroo._read_waiting, states_of_the_position_before, perfect_drafts),
    defect(
        "states that wait never read", Kangaroo._read_waiting, lambda read: lambda *_: None, perfect_drafts
    ),
    defect("the last drafted token's state taken for known", KnownStates.take, last_token_known, tokens),
    defect(
        "nothing known to the verifying pass",
        KnownStates.take,
        lambda take: lambda known: known.forget(),
        resumed,
    ),
]

CHECKS = list(dict.fromkeys(mutant.check for mutant in MUTANTS))
