"""Drafts from texts of other requests change no text: not at temperature 0, and not the law of sampled ones."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.decode.policy import Fixed
from foredraft.decode.sequence import Sequence
from foredraft.drafters.recent_texts import RecentTexts, Suffix, TextsFile
from tests.exactness.test_enumeration import POLICIES, case, enumerate_and_compare
from tests.exactness.test_identity import DRAFT, PROMPTS, TARGET, V, greedy, reference
from tests.support.harness import CheckedEngine, make_engine, run
from tests.support.parts import LateBan, recalling, suffix


def learning_engine(rows: int, most_bytes: int = 1 << 20) -> tuple[CheckedEngine, Suffix]:
    engine = make_engine(TARGET, DRAFT, Fixed(7), rows=rows)
    made = Suffix(RecentTexts(most_bytes), TextsFile(None, None, V))
    engine.drafters["suffix"] = made
    return engine, made


def drafted(sequences: list[Sequence]) -> tuple[int, int]:
    rounds = [turn for sequence in sequences for turn in sequence.rounds]
    return sum(turn.drafted for turn in rounds), sum(turn.accepted for turn in rounds)


@pytest.mark.parametrize(("rows", "most_bytes"), [(1, 1 << 20), (3, 1 << 20), (3, 30 << 10)])
def test_texts_of_earlier_requests_change_no_text(rows: int, most_bytes: int) -> None:
    engine, made = learning_engine(rows, most_bytes)
    waves = [[greedy(prompt, "suffix") for prompt in PROMPTS] for _ in range(3)]
    for sequences in waves:
        assert run(engine, sequences) == [reference(s.prompt) for s in sequences]
        assert made.texts.bytes <= most_bytes and not made.indices
    (_, first), *_, (all_drafted, last) = map(drafted, waves)
    assert last < all_drafted, "a weak drafter is rejected sometimes"
    if most_bytes > 1 << 19:
        assert len(made.texts) == 3 * len(PROMPTS) and last > first


def test_a_ban_s_rollback_leaves_no_trace_in_drafts_or_texts() -> None:
    engine, made = learning_engine(2)
    banned = tuple(reference((0,), 12)[2:5])
    wishes = [greedy((0,), "suffix", constraint=LateBan(V, banned), max_new_tokens=12) for _ in range(4)]
    want = reference((0,), 12, constraint=LateBan(V, banned))
    assert run(engine, wishes) == [want] * 4
    assert [text.tokens for text in made.texts.all()] == [[0, *want]] * 4


@pytest.mark.parametrize("transform", ["as it is", "cold top-k", "repetition", "greedy"])
def test_texts_of_other_requests_leave_the_law(transform: str) -> None:
    prompts = [tuple(text.tokens[at : at + 6]) for text in recalling(3).texts.all() for at in (7, 31)]
    cases: list[Any] = [case(transform, "recalling", prompt=prompt) for prompt in prompts]
    for found in enumerate_and_compare(cases, POLICIES["fixed-3"]):
        assert found.drafted > 0


def test_those_drafts_are_of_other_requests() -> None:
    differ, own, both = 0, suffix(3), recalling(3)
    for text in both.texts.all():
        for at in range(6, 60):
            tokens = text.tokens[at - 6 : at]
            one, other = greedy(tokens, "suffix"), greedy(tokens, "recalling")
            own.join(one)
            both.join(other)
            differ += own.propose([(one, 3)]) != both.propose([(other, 3)])
            assert both.texts.search(b"", tokens, 3).length >= 3
    assert differ > 40
