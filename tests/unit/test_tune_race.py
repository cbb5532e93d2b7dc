"""Predicted and decoded tau, where drafts are drawn: what agrees, what does not, and who could not tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import foredraft
from checkpoints import save_checkpoint
from foredraft import LLM
from foredraft.bench.records import Spread
from foredraft.drafters.skips import Skips
from foredraft.model.runner import Runner
from foredraft.tune import race as race_module
from foredraft.tune.agreement import Agreement
from foredraft.tune.options import Options
from foredraft.tune.race import race
from foredraft.tune.records import AGREEMENT, Finalist, Trial

PROMPTS = [[(5 * number + 7 * i) % 90 + 5 for i in range(8 + number)] for number in range(8)]
TRIAL = Trial(0, "skip:attn=1/mlp=2", 1.3, 2, (1.5, 1.8))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = save_checkpoint(tmp_path_factory.mktemp("race"), eos_token_id=None, initializer_range=0.12)
    return foredraft.load(folder, drafter="none", max_batch=2, max_length=200)


def silent(stage: str, done: int, total: int, note: str = "", /) -> None:
    return None


def raced(llm: LLM, trial: Trial = TRIAL, **options: float) -> Finalist:
    given = Options(**{"new_tokens": 60, "repeats": 1, "temperature": 1.0, **options})  # type: ignore[arg-type]
    [found] = race(llm, [trial], PROMPTS, given, silent)
    return found


@pytest.mark.parametrize("skips", ["skip:attn=1/mlp=2", "exit:2"])
def test_a_plan_decodes_until_its_tau_is_known(llm: LLM, skips: str) -> None:
    found = raced(llm, Trial(0, skips, 1.3, 2, (1.5, 1.8)))
    assert 0 < found.tau_error <= AGREEMENT / 2
    assert found.tau == pytest.approx(found.predicted_tau, rel=5 * found.tau_error)  # five standard errors


def test_a_plan_that_decodes_otherwise_than_its_trials_say_is_not_kept(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted one: what trials say is said of a plan that leaves more out."""

    class Wrong(Agreement):
        def __init__(self, runner: Runner, skips: Skips, draft: int, temperature: float) -> None:
            super().__init__(runner, Skips((0, 1), (1, 2)), draft, temperature)

    monkeypatch.setattr(race_module, "Agreement", Wrong)
    for temperature in (0.0, 1.0):
        found = raced(llm, temperature=temperature)
        assert abs(found.predicted_tau / found.tau - 1) > 2 * AGREEMENT
        fast = replace(found, speedup=Spread(2.0, 2.0, 2.0, 1))
        told = f"it decodes at a tau of {found.tau:.2f}, where trials say {found.predicted_tau:.2f}"
        assert fast.objection == told


def test_too_few_tokens_tell_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race_module, "TURNS", 1)
    assert raced(llm, new_tokens=4).tau_error > AGREEMENT / 2
    assert raced(llm, new_tokens=4, temperature=0.0).tau_error == 0
