"""Constraints of requests that share a batch, and banned words in front of stop strings, on the demo models."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

import foredraft
from foredraft import LLM, SamplingParams

PROMPT = "def fibonacci(n):\n"
REQUESTS: list[dict[str, Any]] = [
    {},
    {"ban": ["return", "if "]},
    {"ban": ["return", "n"], "ban_mode": "rollback"},
    {"ban": ["re", "e"], "ban_whole_words": True, "ban_ignore_case": True},
    {"regex": r"[a-z_]{1,12}( [a-z_]{1,12}){3,9}\."},
    {"json_schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 9}, "ban": ["7", "10"]},
    {"json_object": True, "stop": ["}"]},
    {"choices": ["return n", "return fibonacci(n - 1) + fibonacci(n - 2)"]},
    {"grammar": 'start: ("ab" | "ba" | "\u00e9")+', "frequency_penalty": 0.4},
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return foredraft.load(policy="fixed", max_batch=6)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 5}], ids=["greedy", "coupled"])
@pytest.mark.parametrize("drafter", ["none", "draft-model", "lookup"])
def test_a_text_is_the_same_alone_and_in_a_batch(llm: LLM, drafter: str, sampling: dict[str, Any]) -> None:
    """Nine requests, six rows: rows are left and taken while others roll back or jump forward."""
    params = [
        SamplingParams(max_new_tokens=20 + 5 * place, drafter=drafter, **options, **sampling)
        for place, options in enumerate(REQUESTS)
    ]
    alone = [llm.generate(PROMPT, own)[0] for own in params]
    together = llm.generate([PROMPT] * len(params), params)
    for one, other in zip(alone, together, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (
            other.token_ids,
            other.text,
            other.finish_reason,
        )


@pytest.mark.parametrize("mode", ["mask", "rollback"])
@pytest.mark.parametrize("stop", [[" = "], ["b", "c", "(n"], ["onacci", "rn", "\n"]], ids=str)
def test_a_word_that_a_stop_string_completes_is_banned(llm: LLM, stop: list[str], mode: str) -> None:
    """The text ends in front of the stop string, so a whole word may end there."""
    words = ["a", "b", "fib", "fibonacci", "retu", "n", "range", "return"]
    params = SamplingParams(
        ban=words, ban_whole_words=True, ban_mode=mode, ban_prompt=False, stop=stop, max_new_tokens=40,
        drafter="draft-model",
    )  # fmt: skip
    outputs = llm.generate(PROMPT, params, n=40)
    assert any(output.finish_reason == "stop" for output in outputs)
    found = [
        (word, output.text)
        for word, output in itertools.product(words, outputs)
        if re.search(rf"(?<!\w){word}(?!\w)", output.text or "")
    ]
    assert not found
