"""Provenance: a stream tells, piece by piece, exactly what a whole reply tells at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.serving import Served

PROMPT = "def fibonacci(n):\n"
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "drafter": "draft-model"},
    "plain": {"temperature": 0, "drafter": "none"},
    "sampled": {"temperature": 1.0, "seed": 3, "drafter": "draft-model"},
    # at this temperature the target draws parts of characters, some of which never become one
    "cut characters": {"temperature": 4.0, "seed": 5, "drafter": "draft-model", "max_tokens": 120},
    "a possible stop string": {"temperature": 0, "stop": ["n - 1)\n no such line", "return n\n\n"]},
    "a ban that rolls back": {
        "temperature": 0, "ban": ["return"], "ban_mode": "rollback", "drafter": "draft-model"
    },
    "two samples": {"temperature": 1.0, "seed": 4, "n": 2, "drafter": "draft-model"},
}  # fmt: skip


def body(served: Served, **more: Any) -> dict[str, Any]:
    assert served.state.model is not None
    common = {"model": served.state.model.names[0], "prompt": PROMPT, "max_tokens": 48, "ignore_eos": True}
    return {**common, "provenance": True, **more}


def streamed(served: Served, sent: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the choices of all chunks, by sample."""
    events = served.client.post("/v1/completions", json={**sent, "stream": True}).text.split("\n\n")
    choices = [
        json.loads(event.removeprefix("data: "))["choices"][0]
        for event in events
        if event.startswith("data: {")
    ]
    return [[each for each in choices if each["index"] == sample] for sample in range(sent.get("n", 1))]


@pytest.mark.parametrize("case", CASES)
def test_a_stream_tells_what_a_whole_reply_tells(served: Served, case: str) -> None:
    sent = body(served, **CASES[case])
    whole = served.client.post("/v1/completions", json=sent).json()["choices"]
    for choice, chunks in zip(whole, streamed(served, sent), strict=True):
        for field in ("provenance", "trace"):
            assert [each for chunk in chunks for each in chunk.get(field, ())] == choice[field], field
        assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
        assert "".join(each["text"] for each in choice["provenance"]) == choice["text"]
        told = 0  # characters of entries: never ahead of the text
        text = 0
        for chunk in chunks:
            told += sum(len(each["text"]) for each in chunk.get("provenance", ()))
            text += len(chunk["text"])
            assert told <= text
        spread = sum(bool(chunk.get("trace")) for chunk in chunks)
        assert spread > 1, "the rounds come as they happen"


def test_a_round_has_the_text_of_each_candidate(served: Served) -> None:
    """A rejected token stands in no other field; a part of a character shows its bytes."""
    sent = body(served, **CASES["cut characters"])
    [choice] = served.client.post("/v1/completions", json=sent).json()["choices"]
    seen = {"rejected": 0, "cut": 0}
    for round in choice["trace"]:
        ids = [*round["draft"], round["next_token"]]
        texts = [*round["draft_texts"], round["next_text"]]
        seen["rejected"] += len(round["draft"]) - round["accepted"]
        for id, text in zip(ids, texts, strict=True):
            [tokens] = [served.client.post("/detokenize", json={"tokens": [id]}).json()["prompt"]]
            assert "\N{REPLACEMENT CHARACTER}" not in text
            if "\N{REPLACEMENT CHARACTER}" in tokens:
                seen["cut"] += 1
                assert text.startswith("<0x") and text.endswith(">")
            else:
                assert text == tokens
    assert min(seen.values()) > 0, seen
