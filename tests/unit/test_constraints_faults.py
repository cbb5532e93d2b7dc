"""Constraints that fail, are slow or never end harm their own request alone, on the demo models."""

from __future__ import annotations

import itertools
import string
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLParserLimits

import foredraft
from foredraft import LLM, Output, RequestError, SamplingParams
from foredraft.constraints import grammar
from foredraft.constraints.banned import BannedByMask, BannedByRollback
from foredraft.constraints.grammar import SPELLED, Grammar, MaskThreads
from foredraft.constraints.shared_cache import KEPT_BYTES, LRUCache
from foredraft.decode.constraint import Constraint
from foredraft.model.byte_codec import ByteCodec
from tests.support.panics import panic

PROMPT = "def fibonacci(n):\n"
# The first mask fits into the library's limits; the token "aa" makes more items than a row may have.
RULES = "\n".join(f'r{i}: "a" r{i} | "b{i}"' for i in range(1500))
MANY = f"start: {' | '.join(f'r{i}' for i in range(1500))}\n{RULES}"
EXHAUSTING = r"(.|\n)*[aeiou](.|\n){300}[xyz](.|\n)*"  # nearly each token makes new states of the lexer
BUSY = 60.0  # seconds within which a mask comes, however busy the machine is
AMBIGUOUS = "start: s\ns: s s s | s s | /(.|\\n)/ |"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return foredraft.load(policy="fixed", max_batch=4)


OTHER = SamplingParams(temperature=0.9, seed=3, max_new_tokens=24, ban=["return"])
Failing = Callable[..., list[Output]]


@pytest.fixture(scope="module")
def failing(llm: LLM) -> Failing:
    """Return a function that runs a request that fails beside another one, whose text must be what it is alone."""
    [alone] = llm.generate(PROMPT, OTHER)

    def run(params: SamplingParams, n: int = 1) -> list[Output]:
        outputs = llm.generate([PROMPT, PROMPT], [params, OTHER], n=n)
        assert (outputs[n].token_ids, outputs[n].finish_reason) == (alone.token_ids, alone.finish_reason)
        assert {output.finish_reason for output in outputs[:n]} == {"error"}
        return outputs[:n]

    return run


@pytest.mark.parametrize("drafter", ["none", "draft-model", "lookup"])
def test_a_grammar_that_fails_while_it_reads_a_token_ends_its_own_text(
    failing: Failing, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    monkeypatch.setattr(grammar, "LIMITS", LLParserLimits(max_items_in_row=2000, verbose_errors=False))
    monkeypatch.setattr(grammar, "OVERDUE", BUSY)
    params = SamplingParams(temperature=0, grammar=MANY, ban=["b"], drafter=drafter, max_new_tokens=20)
    [output] = failing(params)
    error = output.error or ""
    assert error.startswith("grammar failed: ") and "items" in error and "\n" not in error


GRAMMAR = {"regex": "[a-z ]{60}", "max_new_tokens": 50}
BAN = {"regex": "[ab]{3}c", "ban": ["c"], "ban_mode": "rollback"}


@pytest.mark.parametrize("error", [RuntimeError("planted"), panic()], ids=["error", "panic"])
@pytest.mark.parametrize("method", ["mask", "advance", "rewind", "forced", "settled", "roll_back", "retreat"])
@pytest.mark.parametrize("drafter", ["none", "draft-model"])
def test_any_error_of_a_constraint_ends_its_own_text(
    llm: LLM, failing: Failing, monkeypatch: pytest.MonkeyPatch, drafter: str, method: str, error: Any
) -> None:
    banned = method in ("roll_back", "retreat")
    kind, calls = BannedByRollback if banned else Grammar, itertools.count()
    original = getattr(kind, method)

    def broken(self: Constraint, *given: Any) -> Any:
        if next(calls) >= (0 if banned else 7):
            raise error
        return original(self, *given)

    monkeypatch.setattr(kind, method, broken)
    params = SamplingParams(temperature=0, drafter=drafter, **BAN if banned else GRAMMAR)
    if method == "settled":  # only streams ask for it
        *_, last = llm.stream(PROMPT, params)
        output: Any = last.output
    else:
        [output] = failing(params)
    name = "ban and regex" if banned else "regex"
    says = f"{name} failed: {type(error).__name__}: {error}"
    assert (output.finish_reason, output.error) == ("error", says)
    assert set(output.text or "") <= {*string.ascii_lowercase, " "}


def test_an_error_before_any_token_refuses_the_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BannedByMask, "mask", lambda self: 1 / 0)
    with pytest.raises(RequestError, match=r"^ban cannot be used: ban failed: ZeroDivisionError"):
        llm.generate(PROMPT, SamplingParams(ban=["x"]))


def test_a_used_up_lexer_is_new_for_the_next_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "LIMITS", LLParserLimits(max_lexer_states=2000, verbose_errors=False))
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
    monkeypatch.setattr(grammar, "OVERDUE", BUSY)
    params = SamplingParams(temperature=0, max_new_tokens=600, drafter="none", **options)
    [output] = llm.generate(PROMPT, params)
    assert max(spelled) <= SPELLED
    assert output.finish_reason == "length" and len(output.text or "") > 2 * SPELLED
    whole = options.get("regex") or '"' + options["json_schema"]["const"] + '"'
    assert whole.startswith(output.text or "x")
    assert (output.stats.mean_accepted_length or 0) > 4, "the forced tokens are drafts"


def test_a_grammar_of_slow_masks_ends_its_own_text(failing: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: next(clock) * 0.01)  # of each call
    params = SamplingParams(temperature=0, regex="[a-z ]{90}", drafter="none", max_new_tokens=80)
    [output] = failing(params)
    says = "regex is too slow for this machine: its masks took 0.5 s of a proc"
    assert (output.error or "").startswith(says)
    assert 3 < len(output.token_ids) < 60


@pytest.mark.parametrize("n", [1, 4])
def test_a_mask_that_takes_long_ends_its_own_request(
    llm: LLM, failing: Failing, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """The fourth mask takes until all texts have ended. Samples share a grammar, so one mask ends all."""
    assert llm.requests.constraints is not None
    threads, go_on, asked = llm.requests.constraints.grammars.threads, threading.Event(), itertools.count()
    compute = MaskThreads.compute

    def stall(self: MaskThreads, matcher: Any) -> tuple[bytes, float]:
        if next(asked) == 3:
            monkeypatch.setattr(grammar, "OVERDUE", 0.02)
            matcher = SimpleNamespace(compute_bitmask=lambda: go_on.wait(60))
        return compute(self, matcher)

    monkeypatch.setattr(grammar, "OVERDUE", BUSY)
    monkeypatch.setattr(MaskThreads, "compute", stall)
    params = SamplingParams(grammar="start: /[a-z ]{40}/", max_new_tokens=20)
    try:
        says = "grammar is too slow for this machine: a mask took more than 0.02 s; give a simpler one"
        assert {output.error for output in failing(params, n)} == {says}
        assert threads.overdue == 1
    finally:
        go_on.set()
    end = time.monotonic() + 60
    while threads.overdue:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_masks_that_still_run_bar_further_grammars(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.requests.constraints.grammars.threads, "overdue", 2)  # type: ignore[union-attr]
    with pytest.raises(
        RequestError, match="^regex cannot be used now: 2 masks .* still run; try again later$"
    ):
        llm.generate(PROMPT, SamplingParams(regex="a"))
    assert llm.generate(PROMPT, SamplingParams(ban=["a"], max_new_tokens=1))


def test_an_ambiguous_grammar_meets_a_limit(failing: Failing) -> None:
    params = SamplingParams(temperature=1, seed=1, grammar=AMBIGUOUS, max_new_tokens=400, drafter="none")
    [output] = failing(params)
    assert (output.error or "").startswith("grammar ")


@pytest.mark.heavy
def test_tokens_taken_back_are_bounded_by_the_longest_text(llm: LLM) -> None:
    ban: dict[str, Any] = {"ban": ["c"], "ban_mode": "rollback", "ban_rollbacks": 10_000}
    params = SamplingParams(temperature=0, regex="[ab]{40}c", max_new_tokens=64, drafter="none", **ban)
    [output] = llm.generate(PROMPT, params)
    says = "ban: more than 256 tokens were taken back"
    assert (output.finish_reason, output.stopped_by) == ("constraint", says)
    assert output.stats.rounds <= 9 * 64


def test_a_large_ban_is_not_kept(llm: LLM) -> None:
    params = SamplingParams(ban="a" * (KEPT_BYTES + 1), ban_mode="rollback", max_new_tokens=1, drafter="none")
    llm.generate(PROMPT, params)
    assert llm.requests.constraints is not None and llm.requests.constraints.bans.lists.total <= KEPT_BYTES


def test_what_is_kept_is_bounded_by_its_size() -> None:
    kept, made = LRUCache[str, str](most=3, size=10), list[str]()

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
