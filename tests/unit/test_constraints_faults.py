"""Constraints that fail, are slow or never end harm their own request alone, on the demo models."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits

import foredraft
from foredraft import LLM, RequestError, SamplingParams
from foredraft.constraints import compiling, pace
from foredraft.constraints.banned import BannedByMask, BannedByRollback
from foredraft.constraints.compiling import SPELLED
from foredraft.constraints.grammar import Grammar
from foredraft.constraints.kept import KEPT_BYTES, Kept
from foredraft.constraints.pace import MaskThreads
from foredraft.decode.constraint import Constraint
from foredraft.model.byte_codec import ByteCodec
from tests.support.panics import panic

PROMPT = "def fibonacci(n):\n"
# The first mask fits into the library's limits; the token "aa" makes more items than a row may have.
MANY = "\n".join(
    ["start: " + " | ".join(f"r{i}" for i in range(1500)), *(f'r{i}: "a" r{i} | "b{i}"' for i in range(1500))]
)
EXHAUSTING = r"(.|\n)*[aeiou](.|\n){300}[xyz](.|\n)*"  # nearly each token makes new states of the lexer
AMBIGUOUS = "start: s\ns: s s s | s s | /(.|\\n)/ |"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return foredraft.load(policy="fixed", max_batch=4)


def beside(llm: LLM, failing: SamplingParams, drafter: str) -> tuple[foredraft.Output, SamplingParams]:
    """Run a request beside another one, whose text must be what it is alone; return the first one's output."""
    other = SamplingParams(temperature=0.9, seed=3, max_new_tokens=24, drafter=drafter, ban=["return"])
    [alone] = llm.generate(PROMPT, other)
    output, beside = llm.generate([PROMPT, PROMPT], [failing, other])
    assert beside.token_ids == alone.token_ids and beside.finish_reason == alone.finish_reason
    assert beside.error is None
    return output, other


@pytest.mark.parametrize("drafter", ["none", "draft-model", "lookup"])
def test_a_grammar_that_fails_while_it_reads_a_token_ends_its_own_text(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    monkeypatch.setattr(compiling, "LIMITS", LLParserLimits(max_items_in_row=2000, verbose_errors=False))
    params = SamplingParams(temperature=0, grammar=MANY, ban=["b"], drafter=drafter, max_new_tokens=20)
    output, _ = beside(llm, params, drafter)
    assert output.finish_reason == "error"
    assert (output.error or "").startswith("grammar failed: ") and "items" in (output.error or "")
    assert "\n" not in (output.error or "")


def failing(method: str, error: BaseException, after: int) -> Callable[..., Any]:
    calls, original = itertools.count(), getattr(Grammar, method)

    def call(self: Constraint, *given: Any) -> Any:
        if next(calls) >= after:
            raise error
        return original(self, *given)

    return call


@pytest.mark.parametrize("error", [RuntimeError("planted"), panic()], ids=["error", "panic"])
@pytest.mark.parametrize("method", ["mask", "advance", "rewind", "forced", "settled"])
@pytest.mark.parametrize("drafter", ["none", "draft-model"])
def test_any_error_of_a_constraint_ends_its_own_text(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, drafter: str, method: str, error: BaseException
) -> None:
    monkeypatch.setattr(Grammar, method, failing(method, error, after=7))
    params = SamplingParams(temperature=0, regex="[a-z ]{60}", drafter=drafter, max_new_tokens=50)
    if method == "settled":  # only streams ask for it
        *_, last = llm.stream(PROMPT, params)
        assert last.output is not None
        output = last.output
    else:
        output, _ = beside(llm, params, drafter)
    assert output.finish_reason == "error"
    assert output.error == f"regex failed: {type(error).__name__}: {error}"
    assert set(output.text or "") <= set("abcdefghijklmnopqrstuvwxyz ")


@pytest.mark.parametrize("method", ["roll_back", "retreat"])
def test_an_error_of_a_rollback_ends_its_own_text(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(self: Constraint, *given: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(BannedByRollback, method, fail)
    params = SamplingParams(temperature=0, regex="[ab]{3}c", ban=["c"], ban_mode="rollback")
    output, _ = beside(llm, params, "none")
    assert (output.finish_reason, output.error) == ("error", "ban and regex failed: RuntimeError: planted")


def test_an_error_before_the_first_token_refuses_the_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BannedByMask, "mask", lambda self: 1 / 0)
    with pytest.raises(RequestError, match=r"^ban cannot be used: ban failed: ZeroDivisionError"):
        llm.generate(PROMPT, SamplingParams(ban=["x"]))


def test_a_lexer_that_is_used_up_is_new_for_the_next_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary of 49,152 uses up the real limit in nine tokens, the demo's in some hundred."""
    monkeypatch.setattr(compiling, "LIMITS", LLParserLimits(max_lexer_states=2000, verbose_errors=False))
    params = SamplingParams(temperature=1, seed=1, regex=EXHAUSTING, max_new_tokens=60, drafter="none")
    outputs = [llm.generate(PROMPT, params)[0] for _ in range(3)]
    assert {output.finish_reason for output in outputs} == {"error"}
    assert (outputs[0].error or "").startswith("regex failed: lexer error: ")
    assert len(outputs[0].token_ids) > 1
    assert [output.token_ids for output in outputs] == [outputs[0].token_ids] * 3


@pytest.mark.parametrize(
    "options", [{"regex": "a" * 20_000}, {"json_schema": {"const": "lorem ipsum " * 2_000}}], ids=["regex", "const"]
)  # fmt: skip
def test_a_long_forced_text_is_cut_into_tokens_bit_by_bit(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    spelled, spell = list[int](), ByteCodec.spell

    def note(self: ByteCodec, text: str) -> list[int]:
        spelled.append(len(text))
        return spell(self, text)

    monkeypatch.setattr(ByteCodec, "spell", note)
    params = SamplingParams(temperature=0, max_new_tokens=600, drafter="none", **options)
    [output] = llm.generate(PROMPT, params)
    assert max(spelled) <= SPELLED
    assert output.finish_reason == "length" and len(output.text or "") > 2 * SPELLED
    whole = options.get("regex") or '"' + options["json_schema"]["const"] + '"'
    assert whole.startswith(output.text or "x")
    assert (output.stats.mean_accepted_length or 0) > 4, "the forced tokens are drafts"


def test_a_grammar_whose_masks_stay_slow_ends_its_own_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: next(clock) * 0.01)  # of each call
    params = SamplingParams(temperature=0, regex="[a-z ]{90}", drafter="none", max_new_tokens=80)
    output, _ = beside(llm, params, "none")
    assert output.finish_reason == "error"
    assert (output.error or "").startswith(
        "regex is too slow for this machine: its masks took 0.5 s of a proc"
    )
    assert 3 < len(output.token_ids) < 60


@pytest.mark.parametrize("n", [1, 4])
def test_a_mask_that_takes_long_ends_its_own_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """What comes before it takes no time, so nothing warns. Samples share a grammar, so one mask ends all."""
    monkeypatch.setattr(pace, "OVERDUE", 0.02)
    threads, told = llm.requests.constraints._mask_threads, list[int]()  # type: ignore[union-attr]
    compute = MaskThreads.compute

    def note(self: MaskThreads, matcher: LLMatcher) -> tuple[bytes, float]:
        try:
            return compute(self, matcher)
        except TimeoutError:
            told.append(self.overdue)
            raise

    monkeypatch.setattr(MaskThreads, "compute", note)
    lists = [
        {"type": "array", "items": {"$ref": "#/$defs/any"}, "maxItems": 100 + place} for place in range(200)
    ]
    pair = {"type": "array", "prefixItems": [{"const": 12}, {"$ref": "#/$defs/any"}], "minItems": 2}
    params = SamplingParams(json_schema={"$defs": {"any": {"anyOf": lists}}, **pair}, max_new_tokens=20)
    other = SamplingParams(temperature=0.9, seed=3, max_new_tokens=24, ban=["return"])
    [alone] = llm.generate(PROMPT, other)
    *outputs, sound = llm.generate([PROMPT, PROMPT], [params, other], n=n)[: n + 1]
    assert (sound.token_ids, sound.error) == (alone.token_ids, None)
    assert {output.finish_reason for output in outputs} == {"error"}
    says = "json_schema is too slow for this machine: a mask took more than 0.02 s; give a simpler one"
    assert {output.error for output in outputs} == {says}
    assert told == [1]
    end = time.monotonic() + 60
    while threads.overdue:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_masks_that_still_run_bar_further_grammars(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.requests.constraints._mask_threads, "overdue", 2)  # type: ignore[union-attr]
    with pytest.raises(
        RequestError, match=r"^regex cannot be used now: 2 masks .* still run; try again later$"
    ):
        llm.generate(PROMPT, SamplingParams(regex="a"))
    assert llm.generate(PROMPT, SamplingParams(ban=["a"], max_new_tokens=1))


def test_an_ambiguous_grammar_meets_a_limit(llm: LLM) -> None:
    """Each mask takes longer than the one before it."""
    params = SamplingParams(temperature=1, seed=1, grammar=AMBIGUOUS, max_new_tokens=400, drafter="none")
    output, _ = beside(llm, params, "none")
    assert output.finish_reason == "error"
    assert (output.error or "").startswith("grammar ")


def test_tokens_taken_back_are_bounded_by_the_longest_text(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, regex="[ab]{50}c", ban=["c"], ban_mode="rollback", ban_rollbacks=10_000,
        max_new_tokens=80, drafter="none",
    )  # fmt: skip
    [output] = llm.generate(PROMPT, params)
    assert (output.finish_reason, output.stopped_by) == (
        "constraint",
        "ban: more than 320 tokens were taken back",
    )
    assert output.stats.rounds <= 9 * 80


def test_rollbacks_have_a_maximum() -> None:
    with pytest.raises(RequestError, match=r"^ban_rollbacks is 10001; .*from 0 to 10000$"):
        SamplingParams(ban=["a"], ban_rollbacks=10_001)


def test_a_large_ban_is_not_kept(llm: LLM) -> None:
    params = SamplingParams(
        ban=["a" * (KEPT_BYTES + 1)], ban_mode="rollback", max_new_tokens=1, drafter="none"
    )
    llm.generate(PROMPT, params)
    assert llm.requests.constraints is not None and llm.requests.constraints._lists.total <= KEPT_BYTES


def test_what_is_kept_is_bounded_by_its_size() -> None:
    kept, made = Kept[str, str](most=3, size=10), list[str]()

    def make(name: str, size: int) -> str:
        return kept.get(name, size, lambda: made.append(name) or name)  # type: ignore[func-returns-value]

    assert [make("a", 4), make("b", 4), make("a", 4)] == ["a", "b", "a"] and made == ["a", "b"]
    make("c", 4)  # in place of b, which was not asked for the longest
    assert (make("a", 4), kept.total, made) == ("a", 8, ["a", "b", "c"])
    make("large", 11)  # is never kept
    assert (make("c", 4), kept.total, made) == ("c", 8, ["a", "b", "c", "large"])
    for name in "defg":
        make(name, 1)
    assert kept.total == 3 and make("g", 1) == "g" and made[-1] == "g"
