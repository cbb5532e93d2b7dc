"""The special tokens of GGUF files, and which of them end a text."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.model.gguf import special
from foredraft.model.gguf.special import end_ids, special_ids
from tests.support.vocabularies import KEY, sentencepiece

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def metadata(tokens: dict[str, int], **changes: Any) -> dict[str, Any]:
    """Return metadata with tokens, given by their types, after one that is ordinary."""
    found = {"model": "gpt2", "tokens": ["a", *tokens], "token_type": [NORMAL, *tokens.values()]}
    return {KEY + name: value for name, value in (found | changes).items()}


def test_ids_are_named_or_those_of_sentencepiece() -> None:
    assert special_ids(sentencepiece()) == {"bos": 1, "eos": 2, "unk": 0}
    assert special_ids({f"{KEY}model": "llama"}) == {"bos": 1, "eos": 2, "unk": 0}
    assert special_ids({f"{KEY}model": "gpt2", f"{KEY}bos_token_id": 2**32 - 1}) == {}


def test_named_ends_come_first_and_once() -> None:
    found = metadata(
        {"<|im_end|>": CONTROL, "b": CONTROL, "c": CONTROL},
        eos_token_id=1,
        eot_token_id=2,
        eom_token_id=3,
    )
    assert end_ids(found) == [1, 2, 3]


ENDS = ["<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|endoftext|>", "<｜end▁of▁sentence｜>", "<eos>"]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_ends_are_found_by_their_texts(end: str, kind: int) -> None:
    assert end_ids(metadata({"<|im_start|>": CONTROL, end: kind}, eos_token_id=0)) == [0, 2]


@pytest.mark.parametrize("end", ["<|im_end|>", "<eos>"])
def test_ordinary_tokens_end_nothing(end: str) -> None:
    assert end_ids(metadata({end: NORMAL})) == []


@pytest.mark.parametrize("token", ["</s>", "<|file_sep|>", "<|im_start|>"])
def test_other_added_tokens_end_nothing(token: str) -> None:
    assert end_ids(metadata({token: USER_DEFINED})) == []


@pytest.mark.parametrize("parts", [("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>")])
def test_an_end_within_a_turn_ends_nothing(parts: tuple[str, str]) -> None:
    assert end_ids(metadata({"<|end|>": CONTROL, **dict.fromkeys(parts, CONTROL)})) == [2, 3]
    assert end_ids(metadata({"<|end|>": CONTROL, parts[0]: CONTROL})) == [1, 2]


def test_lost_texts_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(special, "ENDS", frozenset())
    with pytest.raises(AssertionError):
        test_ends_are_found_by_their_texts("<|im_end|>", CONTROL)
