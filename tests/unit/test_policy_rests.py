"""Rests of the policy: where nothing pays, plain rounds of which it is not asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import foredraft
from foredraft import SamplingParams
from foredraft.decode.policy import Candidates, Policy
from foredraft.decode.policy.auto import Auto
from foredraft.decode.policy.requests import LONGEST_WAIT, RequestState, Rest
from tests.support.mutation import Mutant, assert_caught, caught_by
from tests.support.mutations import around, before
from tests.support.simulation import Row, Simulated, flat, right_with, sequence_of, simulate

PROMPTS = ["def f(x):", "Once upon a time"]
LONGEST = 10
USELESS = Row({"small": right_with(0.0)}, 512)


class WithoutRests(Auto):
    rests = Policy.rests


class Recording(Auto):
    """Keeps what it knows of requests."""

    def start(self) -> RequestState:
        self.states = [*getattr(self, "states", []), super().start()]
        return self.states[-1]


def trials(found: Simulated) -> list[int]:
    return [at for at, round in enumerate(found.rounds) if any(budget for _, budget in round)]


def test_a_useless_drafter_is_asked_about_ever_more_seldom_and_tried_as_often() -> None:
    resting, asked = Auto(LONGEST, flat()), WithoutRests(LONGEST, flat())
    for _ in range(3):
        found, other = simulate(resting, flat(), [USELESS]), simulate(asked, flat(), [USELESS])
        assert found.rests >= 0.85 * len(found.rounds) and not other.rests
        assert len(trials(found)) >= len(trials(other)) - 1
        assert found.speedup == pytest.approx(other.speedup, abs=0.005)


def test_a_rest_is_time_of_the_request_and_of_the_drafter() -> None:
    policy = Recording(LONGEST, flat())
    drafted = trials(simulate(policy, flat(), [USELESS]))
    policy.rests([])  # the last rest ends
    policy._settle()
    assert policy.states[0].spent == pytest.approx(512, rel=0.02)
    assert [pooled.waited for pooled in policy._pool.values()] == [512 - drafted[-1]]


def test_a_drafter_that_becomes_right_is_found() -> None:
    late = Row({"small": lambda position: position >= 600}, 2048)
    policy = Auto(LONGEST, flat())
    for _ in range(3):
        found = simulate(policy, flat(), [late])
        first = next((at for at in trials(found) if at >= 600), 2048)
        assert first <= 600 + 2 * LONGEST_WAIT and found.speedup > 1.5


def test_a_rest_ends_before_a_trial() -> None:
    """Plain rounds are timed between them, since a trial is judged by the last ones."""
    policy = Auto(LONGEST, flat())
    for _ in range(3):
        simulate(policy, flat(), [USELESS])
    policy.rests([])
    policy._settle()
    [pooled] = policy._pool.values()
    pooled.wait, pooled.waited, policy._rest.longest = 64, 20, LONGEST_WAIT
    policy.decide([Candidates(sequence_of(policy, id=-1), {"small": LONGEST})])
    assert 0 < policy._rest.left < pooled.wait - pooled.waited - 1


def test_no_rest_while_a_guess_may_come() -> None:
    """It has nothing to propose for 100 tokens, and then is right."""
    row = Row({"lookup": right_with(1.0)}, 200, {"lookup": lambda done: LONGEST * (done >= 100)})
    found = simulate(Auto(LONGEST, flat()), flat(), [row])
    assert found.rests == 0 and trials(found)[0] == 100


def test_a_rest_ends_where_rows_change() -> None:
    policy = Auto(LONGEST, flat())
    for _ in range(3):
        simulate(policy, flat(), [USELESS])
    found = simulate(policy, flat(), [USELESS, Row({"small": right_with(0.0)}, 512, enters=100)])
    assert 0 < found.rests < len(found.rounds)
    rest = Rest()
    one, two = (sequence_of(policy, id=id) for id in (1, 2))
    rest.begin(8, [one])
    assert rest.goes_on([one]) and not rest.goes_on([one, two]) and not rest.goes_on([two])
    assert rest.end() == (1, [one]) and not rest.goes_on([one])


def test_a_policy_at_rest_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = foredraft.load(policy="auto", drafter="draft-model", device="cpu", max_batch=2, max_length=160)
    params = SamplingParams(temperature=0, max_new_tokens=24)
    asked: list[str] = []
    with monkeypatch.context() as at_rest:
        at_rest.setattr(Auto, "rests", lambda self, rows: True)
        for name in ("decide", "learn", "took"):
            at_rest.setattr(Auto, name, lambda self, *given, name=name: asked.append(name))
        resting = llm.generate(PROMPTS, params)
    plain = llm.generate(PROMPTS, replace(params, drafter="none"))
    assert [each.token_ids for each in resting] == [each.token_ids for each in plain]
    assert not asked and all(each.stats.drafted == 0 for each in resting)
    llm.close()


def rests_unasked(decide: Any, policy: Auto, rows: Any) -> Any:
    decisions = decide(policy, rows)
    if not any(decision.budget for decision in decisions):
        policy._rest.begin(64, [row.sequence for row in rows])
    return decisions


def no_round_passes(rest: Rest) -> None:
    rest.passed = 0


DEFECTS: dict[Callable[[], object], list[tuple[Any, ...]]] = {
    test_a_useless_drafter_is_asked_about_ever_more_seldom_and_tried_as_often: [
        ("no rest", Rest.goes_on, lambda _: lambda rest, rows: False),
        (
            "rests of one length",
            Rest.begin,
            lambda sound: lambda rest, rounds, rows: sound(rest, min(rounds, 8), rows),
        ),
    ],
    test_a_rest_is_time_of_the_request_and_of_the_drafter: [
        ("rests take no time", Rest.end, before(no_round_passes)),
    ],
    test_a_drafter_that_becomes_right_is_found: [
        ("the drafter has not waited", Rest.end, before(no_round_passes)),
    ],
    test_a_rest_ends_before_a_trial: [
        ("past a trial", Auto._wait, lambda _: lambda policy, row: LONGEST_WAIT),
        ("up to a trial", Auto._wait, lambda wait: lambda policy, row: 2 + wait(policy, row)),
    ],
    test_no_rest_while_a_guess_may_come: [
        ("rests where nothing is proposed", Auto.decide, around(rests_unasked)),
    ],
    test_a_rest_ends_where_rows_change: [
        ("a rest of any rows", Rest.goes_on, lambda sound: lambda rest, rows: sound(rest, rest.rows)),
    ],
}


@pytest.mark.parametrize("mutant", caught_by(DEFECTS), ids=lambda mutant: str(mutant.name))
def test_defects_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
