"""Finalists: decoded against predicted τ, and the objections to a plan."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import foredraft
from foredraft import LLM
from foredraft.bench.bench_records import Spread
from foredraft.bench.figures import Runs
from foredraft.bench.measurement import measure_costs
from foredraft.bench.settings import TuneSettings, silent
from foredraft.bench.workload import Group
from foredraft.decode.stats import Stats
from foredraft.drafters.plan_files import Skips
from foredraft.tune import finals as finals_module
from foredraft.tune.finals import Agreement, decode_finalists
from foredraft.tune.teacher_forced import TeacherForced
from foredraft.tune.tune_records import SIGNIFICANCE, TAU_TOLERANCE, Finalist, Trial, sign_test
from tests.support.checkpoints import save_checkpoint

PROMPTS = [[(5 * number + 7 * i) % 90 + 5 for i in range(8 + number)] for number in range(8)]
TRIAL = Trial(0, "skip:attn=1/mlp=2", 1.3, 2, (1.5, 1.8))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_checkpoint(tmp_path_factory.mktemp("finals"), eos_token_id=None, initializer_range=0.12)
    return foredraft.load(folder, drafter="none", max_batch=2, max_length=200)


@pytest.fixture(autouse=True)
def few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time every cost a few times only, since no test here asks for exact ones."""
    monkeypatch.setattr(finals_module, "measure_costs", partial(measure_costs, repeats=3))


def decode(llm: LLM, trial: Trial = TRIAL, **options: float) -> Finalist:
    given = TuneSettings(**{"new_tokens": 60, "repeats": 1, "temperature": 1.0, **options})  # type: ignore[arg-type]
    [found] = decode_finalists(llm, [trial], PROMPTS, given, silent)
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("skips", ["skip:attn=1/mlp=2", "exit:2"])
def test_a_plan_decodes_until_its_tau_is_accurate(llm: LLM, skips: str) -> None:
    found = decode(llm, Trial(0, skips, 1.3, 2, (1.5, 1.8)))
    assert 0 < found.tau_error <= TAU_TOLERANCE / 2
    assert found.tau == pytest.approx(found.predicted_tau, rel=5 * found.tau_error)  # five standard errors


@pytest.mark.heavy
def test_a_plan_that_decodes_to_another_tau_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the prediction is that of a plan that skips more."""

    class Wrong(TeacherForced):
        def rounds(self, plan: Any, **options: Any) -> Any:
            return super().rounds(Skips((0, 1), (1, 2)).plan(3), **options)

    monkeypatch.setattr(finals_module, "TeacherForced", Wrong)
    monkeypatch.setattr(finals_module, "MAX_TURNS", 3)
    for temperature in (0.0, 1.0):
        found = decode(llm, temperature=temperature)
        assert abs(found.predicted_tau / found.tau - 1) > 2 * TAU_TOLERANCE
        fast = replace(found, speedup=Spread(2.0, 2.0, 2.0, 8), faster=8)
        assert fast.objection == (
            f"its tau in decoding is {found.tau:.2f}, but the predicted one is {found.predicted_tau:.2f}"
        )


@pytest.mark.heavy
def test_few_tokens_leave_tau_inaccurate(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finals_module, "MAX_TURNS", 1)
    # one sample in about a hundred is near enough by chance
    assert max(decode(llm, new_tokens=4).tau_error for _ in range(3)) > TAU_TOLERANCE / 2
    assert decode(llm, new_tokens=4, temperature=0.0).tau_error == 0


def finalist(ratios: list[float], skips: str = "skip:attn=1") -> Finalist:
    """Return the finalist of plans that run at these ratios, one for each prompt, with equal tokens."""

    def timing(speed: float) -> Any:
        return SimpleNamespace(tokens_per_second=speed, tokens=[[1, 2]], stats=Stats())

    runs = [Runs(Group((0,), True), {"none": [timing(10)], "own": [timing(10 * ratio)]}) for ratio in ratios]
    trial = replace(TRIAL, skips=skips)
    return finals_module._finalist("own", trial, runs, 0.5, Agreement(1.8, 1.8, 0.0), 0.0)


def test_the_sign_test_gives_the_binomial_tail() -> None:
    assert sign_test(0, 7) == 1 and sign_test(1, 1) == 0.5 and sign_test(6, 6) == 1 / 64
    assert sign_test(15, 16) == pytest.approx(17 / 2**16)
    least = {prompts: [wins for wins in range(prompts + 1) if sign_test(wins, prompts) <= SIGNIFICANCE][:1]
             for prompts in (1, 5, 6, 7, 8, 16)}  # fmt: skip
    assert least == {1: [], 5: [], 6: [6], 7: [7], 8: [8], 16: [13]}


@pytest.mark.parametrize(
    ("ratios", "objection"),
    [
        ([1.05] * 6, None),
        ([1.2] * 13 + [0.9] * 3, None),
        (
            [3.0] * 12 + [0.99] * 4,
            "it is faster than plain decoding on only 12 of 16 held-out prompts, which",
        ),
        (
            [0.89] * 4 + [1.0] + [1.103] * 7 + [1.31] * 4,
            "on only 11 of 16 held-out prompts, which may be chance",
        ),
        ([2.0] * 5, "5 held-out prompt(s) are too few to rule out chance; give more prompts"),
        ([2.0], "1 held-out prompt(s) are too few to rule out chance"),
        ([0.98] * 5, "it is not faster than plain decoding"),
        ([1.0] * 16, "it is not faster than plain decoding"),
    ],
)
def test_a_speedup_that_may_be_chance_is_refused(ratios: list[float], objection: str | None) -> None:
    found = finalist(ratios)
    assert found.objection is None if objection is None else objection in (found.objection or "")


def test_a_plan_that_skips_nothing_is_refused() -> None:
    objection = finalist([2.0] * 16, "skip:none").objection
    assert objection == "it skips nothing, so it cannot be faster than plain decoding"
