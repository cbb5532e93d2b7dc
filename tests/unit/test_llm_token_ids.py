"""Options of token ids: those that end a text, and those that may be drawn at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import foredraft
from foredraft import LLM, RequestError, SamplingParams
from foredraft.constraints.allowed import AllowedTokens
from foredraft.decode.text_buffer import TextBuffer
from tests.support.planting import Mutant, assert_caught, defect

PROMPT = "def accept(draft, p, q):"
DRAFTERS = ["none", "lookup", "draft-model"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return foredraft.load(dtype="float32", device="cpu", max_batch=3, max_length=512, policy="fixed")


def greedy(llm: LLM, **options: Any) -> foredraft.Output:
    (output,) = llm.generate(
        PROMPT, **{"temperature": 0, "max_new_tokens": 30, "ignore_eos": True, **options}
    )
    return output


def ends_at_a_stop_token(llm: LLM, drafter: str = "draft-model") -> None:
    """At its first place, wherever that lies in a draft; its text is left out, as a stop string's is."""
    whole = greedy(llm, drafter="none")
    assert whole.pieces is not None
    for stop in dict.fromkeys(whole.token_ids):
        at = whole.token_ids.index(stop)
        found = greedy(llm, drafter=drafter, stop_token_ids=[stop, 4095])
        assert found.token_ids == whole.token_ids[: at + 1] and found.finish_reason == "eos"
        assert found.text == "".join(whole.pieces[:at])
        shown = greedy(llm, drafter=drafter, stop_token_ids=[stop], include_stop=True)
        assert shown.text == "".join(whole.pieces[: at + 1])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_stop_token_ends_the_text(llm: LLM, drafter: str) -> None:
    ends_at_a_stop_token(llm, drafter)


def test_a_stop_token_waits_for_the_shortest_length(llm: LLM) -> None:
    whole = greedy(llm, drafter="none")
    found = greedy(llm, stop_token_ids=[whole.token_ids[2]], min_new_tokens=6)
    assert len(found.token_ids) >= 6 and whole.token_ids[2] not in found.token_ids[:6]


def draws_allowed_tokens(llm: LLM, drafter: str = "draft-model") -> None:
    allowed = sorted({*greedy(llm, drafter="none").token_ids[:8], 300, 301})
    for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 3}):
        plain = greedy(llm, allowed_token_ids=allowed, **options, drafter="none")
        found = greedy(llm, allowed_token_ids=allowed, **options, drafter=drafter)
        assert {*found.token_ids} <= {*allowed} and len({*found.token_ids}) > 1
        assert found.token_ids == plain.token_ids


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_only_allowed_tokens_are_drawn(llm: LLM, drafter: str) -> None:
    draws_allowed_tokens(llm, drafter)


def test_allowed_tokens_hold_together_with_other_constraints(llm: LLM) -> None:
    digits = [id for text in "0123456789" for id in llm.encode(text)[0][-1:]]
    found = greedy(llm, allowed_token_ids=digits, ban=["1", "2"], ignore_eos=False, drafter="draft-model")
    assert found.text and not {*found.text} & {"1", "2"} and found.text.isdecimal()
    with pytest.raises(RequestError, match="leaves no token to begin with"):
        greedy(llm, allowed_token_ids=llm.encode("x")[0][-1:], regex="[0-9]+", ignore_eos=False)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_ids_beyond_the_vocabulary_are_refused(llm: LLM, name: str) -> None:
    with pytest.raises(RequestError, match=f"^{name} names token 99999; give ids from 0 to 4095"):
        greedy(llm, **{name: [5, 99999]})
    with pytest.raises(RequestError, match=f"^{name} is "):
        SamplingParams(**{name: 5})


MUTANTS: list[tuple[str, Any, Any, Callable[[LLM], None], type[Exception]]] = [
    ("a stop token ends nothing", SamplingParams.ends, lambda _: lambda self, eos: eos, ends_at_a_stop_token, AssertionError),
    ("every token is allowed", AllowedTokens.mask, lambda _: lambda self: None, draws_allowed_tokens, AssertionError),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant[0])
def test_a_defect_is_caught(mutant: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    name, seam, spoiler, check, raises = mutant
    found: Mutant = defect(name, seam, spoiler, lambda: check(llm), raises)
    assert_caught(found, monkeypatch)


def test_the_text_of_a_stop_token_is_shown_under_a_defect(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(sound: Callable[..., None]) -> Callable[..., None]:
        return lambda self, *given, **named: sound(self, *given, **{**named, "silent": ()})

    assert_caught(defect("shown", TextBuffer.__init__, shown, lambda: ends_at_a_stop_token(llm)), monkeypatch)
