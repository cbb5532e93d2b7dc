"""Prompts of a kind that Python iterates over, but that are no sequence of tokens, are refused."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest

import foredraft
from foredraft import LLM, RequestError


@pytest.fixture(scope="module")
def llm() -> LLM:
    return foredraft.load(drafter="none", max_length=64)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (b"hello", "bytes; decode it"),
        (bytearray(b"x"), "bytes; decode it"),
        ({"input_ids": [3, 4], "attention_mask": [1, 1]}, r'encoding\["input_ids"\]'),
        (UserDict(input_ids=[3]), r'encoding\["input_ids"\]'),
        ({3: 1}, "a mapping, of which only the keys would be read"),
        ({3, 4}, "a set, which has no order"),
        (frozenset({3}), "a set"),
        (3, "is 3; give text"),
    ],
    ids=str,
)
@pytest.mark.parametrize("listed", [False, True])
def test_a_prompt_of_another_kind_is_refused_with_the_remedy(
    llm: LLM, prompt: Any, says: str, listed: bool
) -> None:
    if listed and prompt == 3:
        pytest.skip("a list of one token")
    with pytest.raises(RequestError, match=says):
        llm.generate([prompt, "x"] if listed else prompt)
