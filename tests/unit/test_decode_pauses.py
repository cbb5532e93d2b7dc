"""Paused sequences: the same texts, rows for others, and nothing left behind."""

from __future__ import annotations

import random
from typing import Any

import pytest

import foredraft
from foredraft import LLM
from foredraft.decode.engine import Engine
from foredraft.decode.scheduler import Scheduler
from foredraft.decode.sequence import Sequence, State
from foredraft.llm.requests import Submission
from foredraft.model.cache import KVCache
from tests.support.loaded import engine_of
from tests.support.mutation import assert_caught, defect
from tests.support.mutations import around, before

PROMPTS = [f"def f{place}(x):\n" for place in range(5)]
OPTIONS: list[dict[str, Any]] = [
    {"drafter": "draft-model", "temperature": 0},
    {"drafter": "draft-model", "seed": 3, "acceptance": "speculative"},
    {"drafter": "lookup", "temperature": 0, "repetition_penalty": 1.2},
    {"drafter": "draft-model", "temperature": 0, "ban": "return", "ban_mode": "rollback"},
    {"drafter": "none", "seed": 5, "n": 3},
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return foredraft.load(policy="fixed", max_batch=2, max_length=128)


def sequences(llm: LLM, n: int = 1, **options: Any) -> list[Sequence]:
    params = llm.params(**{"max_new_tokens": 16, "ignore_eos": True, **options})
    return [
        each for ids in llm.encode(PROMPTS) for each in llm.requests.sequences(Submission(ids, params, n))
    ]


def finish(engine: Engine, given: list[Sequence], dice: random.Random) -> int:
    """Run sequences that pause and go on at random; return how many steps found one parked."""
    for each in given:
        engine.submit(each)
    parked = 0
    while not engine.scheduler.idle:
        for each in given:
            (engine.pause if dice.random() < 0.4 else engine.resume)(each)
        if not engine.scheduler.stalled:
            engine.step()
        parked += any(each.parked for each in given)
        assert sum(each.parked is not None for each in given) <= engine.rows.capacity
    return parked


def check(llm: LLM, options: dict[str, Any]) -> None:
    given, engine = sequences(llm, **options), engine_of(llm)
    parked = finish(engine, given, random.Random(0))
    assert parked > 5, "no row was ever given to another sequence"
    want = llm.generate(PROMPTS, max_new_tokens=16, ignore_eos=True, **options)
    assert [each.new_ids for each in given] == [output.token_ids for output in want]
    assert not engine.rows.sequences and not any(cache.lengths[0] for cache in engine.rows.caches)
    assert not any(each.parked for each in given)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_pauses_change_no_text(llm: LLM, options: dict[str, Any]) -> None:
    check(llm, options)


@around
def unrestored(put_back: Any, cache: KVCache, span: Any) -> None:
    if span.start or span.stop % 2:
        put_back(cache, span)


def pass_on(scheduler: Scheduler, *_: Any) -> None:
    """Let a parked choice take a row over as if it held its prompt alone."""
    for each in scheduler.waiting:
        if each.paused_at is None and each.parked is not None:
            each.parked = None


DEFECTS = [
    ("a row not restored", KVCache.put_back, unrestored, OPTIONS[0]),
    ("a row taken over by a parked choice", Scheduler.leave, before(pass_on), OPTIONS[-1]),
]


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "point", "mutation", "options"), DEFECTS, ids=[each[0] for each in DEFECTS])
def test_defects_are_caught(
    llm: LLM, name: str, point: Any, mutation: Any, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_caught(defect(name, point, mutation, lambda: check(llm, options)), monkeypatch)


def test_a_paused_sequence_takes_no_step_and_the_others_do(llm: LLM) -> None:
    engine = engine_of(llm)
    first, second, third, *_ = sequences(llm, temperature=0, max_new_tokens=60)
    for each in (first, second):
        engine.submit(each)
    while not (first.new_ids and second.new_ids):
        engine.step()
    engine.pause(first)
    before, row = list(first.tokens), list(first.rounds)
    for _ in range(3):
        engine.step()
    assert first.tokens == before and first.rounds == row and first.row >= 0  # nothing else wants its row
    assert len(second.rounds) > len(row)
    engine.submit(third)
    while third.state is not State.FINISHED:
        engine.step()
    assert first.parked is not None and first.tokens == before
    while second.state is not State.FINISHED:
        engine.step()
    assert engine.scheduler.stalled and not engine.scheduler.idle
    began = first.started
    engine.cancel(first)
    assert engine.scheduler.idle and first.parked is None and first.new_ids == before[len(first.prompt) :]
    assert began < first.ended < third.ended  # its pause is none of its seconds


def test_no_more_rows_are_parked_than_there_are(llm: LLM) -> None:
    engine, given = engine_of(llm), [*sequences(llm, temperature=0), *sequences(llm, temperature=0)]
    for each in given:
        engine.submit(each)
    for _ in range(200):
        engine.step() if not engine.scheduler.stalled else None
        for each in given:
            if each.new_ids:
                engine.pause(each)
    assert engine.scheduler.stalled
    parked = sum(each.parked is not None for each in given)
    assert parked == engine.rows.capacity == len(engine.rows.sequences)
    back = next(each for each in given if each.parked is not None)
    engine.resume(back)  # a row of a paused one is its own again, though as many as may be are parked
    assert not engine.scheduler.stalled
    engine.step()
    assert back.row >= 0 and sum(each.parked is not None for each in given) == engine.rows.capacity
    engine.pause(back)
    engine.cancel(given[0])  # what ends gives its place to the next
    assert not engine.scheduler.stalled
    for each in given:
        engine.cancel(each)
    assert engine.scheduler.idle
