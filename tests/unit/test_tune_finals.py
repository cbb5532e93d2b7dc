"""Predicted and decoded tau, where drafts are drawn: what agrees, what does not, and who could not tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import foredraft
from foredraft import LLM
from foredraft.bench.records import Spread
from foredraft.decode.stats import Stats
from foredraft.drafters.skips import Skips
from foredraft.model.runner import Runner
from foredraft.tune import finals as race_module
from foredraft.tune.agreement import Agreement
from foredraft.tune.finals import finals
from foredraft.tune.options import Options
from foredraft.tune.records import AGREEMENT, LEVEL, Finalist, Trial, by_chance
from tests.support.checkpoints import save_checkpoint

PROMPTS = [[(5 * number + 7 * i) % 90 + 5 for i in range(8 + number)] for number in range(8)]
TRIAL = Trial(0, "skip:attn=1/mlp=2", 1.3, 2, (1.5, 1.8))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = save_checkpoint(tmp_path_factory.mktemp("race"), eos_token_id=None, initializer_range=0.12)
    return foredraft.load(folder, drafter="none", max_batch=2, max_length=200)


def silent(stage: str, done: int, total: int, note: str = "", /) -> None:
    return None


def uses_gumbel_argmax(llm: LLM, trial: Trial = TRIAL, **options: float) -> Finalist:
    given = Options(**{"new_tokens": 60, "repeats": 1, "temperature": 1.0, **options})  # type: ignore[arg-type]
    [found] = finals(llm, [trial], PROMPTS, given, silent)
    return found


@pytest.mark.parametrize("skips", ["skip:attn=1/mlp=2", "exit:2"])
def test_a_plan_decodes_until_its_tau_is_known(llm: LLM, skips: str) -> None:
    found = uses_gumbel_argmax(llm, Trial(0, skips, 1.3, 2, (1.5, 1.8)))
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
        found = uses_gumbel_argmax(llm, temperature=temperature)
        assert abs(found.predicted_tau / found.tau - 1) > 2 * AGREEMENT
        fast = replace(found, speedup=Spread(2.0, 2.0, 2.0, 8), faster=8)
        told = f"it decodes at a tau of {found.tau:.2f}, where trials say {found.predicted_tau:.2f}"
        assert fast.objection == told


def test_too_few_tokens_tell_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race_module, "TURNS", 1)
    assert uses_gumbel_argmax(llm, new_tokens=4).tau_error > AGREEMENT / 2
    assert uses_gumbel_argmax(llm, new_tokens=4, temperature=0.0).tau_error == 0


def timings(speeds: list[list[float]]) -> Any:
    """Of prompts, each in several runs: tokens a second, and always the same tokens."""
    return [
        [SimpleNamespace(tokens_per_second=speed, tokens=[[1, 2]], stats=Stats()) for speed in several]
        for several in speeds
    ]


def finalist(ratios: list[float], skips: str = "skip:attn=1") -> Finalist:
    """As the race makes one, of ratios that it met on the prompts."""
    agreement: Any = SimpleNamespace(predicted_tau=1.8, tau=1.8, error=0.0)
    plain, own = timings([[10.0]] * len(ratios)), timings([[10 * ratio] for ratio in ratios])
    return race_module._finalist(replace(TRIAL, skips=skips), plain, own, 0.5, agreement, 0.0)


def test_wins_by_chance() -> None:
    assert by_chance(0, 7) == 1 and by_chance(1, 1) == 0.5 and by_chance(6, 6) == 1 / 64
    assert by_chance(15, 16) == pytest.approx(17 / 2**16)
    least = {prompts: [wins for wins in range(prompts + 1) if by_chance(wins, prompts) <= LEVEL][:1]
             for prompts in (1, 5, 6, 7, 8, 16)}  # fmt: skip
    assert least == {1: [], 5: [], 6: [6], 7: [7], 8: [8], 16: [13]}


@pytest.mark.parametrize(
    ("ratios", "objection"),
    [
        ([1.05] * 6, None),
        ([1.2] * 13 + [0.9] * 3, None),
        ([3.0] * 12 + [0.99] * 4, "it is faster than plain decoding on 12 of 16 held-out prompts, which may"),
        ([0.89] * 4 + [1.0] + [1.103] * 7 + [1.31] * 4, "on 11 of 16 held-out prompts, which may be chance"),
        ([2.0] * 5, "no speed can be told from chance on 5 held-out prompts; give more prompts"),
        ([2.0], "no speed can be told from chance on 1 held-out prompts"),
        ([0.98] * 5, "it is not faster than plain decoding"),
        ([1.0] * 16, "it is not faster than plain decoding"),
    ],
)
def test_what_may_be_chance_does_not_win(ratios: list[float], objection: str | None) -> None:
    found = finalist(ratios)
    assert found.objection is None if objection is None else objection in (found.objection or "")


def test_the_model_itself_never_wins() -> None:
    told = "it is the model itself, which cannot be faster than itself"
    assert finalist([2.0] * 16, "skip:none").objection == told
