"""The whole verification on tiny random checkpoints: lossless pairs pass, planted defects are found."""

from __future__ import annotations

import functools
import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import foredraft
from foredraft import LLM, ConfigError, Output, RequestError, SamplingParams
from foredraft.decode import accept, step_draws
from foredraft.decode.distribution import Distribution
from foredraft.decode.drafting import _Steps
from foredraft.decode.engine import Engine
from foredraft.decode.policy import CostTable
from foredraft.decode.round_draft import RoundInputs
from foredraft.decode.sampling import SamplingTable
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Stats
from foredraft.decode.vocab_ops import TorchVocabOps
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.lookup import Lookup
from foredraft.verify import DistributionTest, VerifyReport, VerifySettings, verify
from foredraft.verify import verify_run as run
from foredraft.verify.always import DraftsAlways
from foredraft.verify.cells import Cells
from foredraft.verify.defects import DEFECTS as PLANTED
from foredraft.verify.distribution_tests import DistributionCheck, run_test
from foredraft.verify.plain_target import PlainTarget
from foredraft.verify.planting import planted
from foredraft.verify.prompt_choice import PROBES, choose_cases
from foredraft.verify.sampler import BATCH, TARGET, TREE_WIDTHS, Sampler, SamplingCase
from foredraft.verify.sampling_settings import SETTINGS
from foredraft.verify.verify_records import TextRun
from foredraft.verify.verify_run import FAMILY_LEVEL, _affordable, _checks
from tests.support.checkpoints import save_checkpoint
from tests.support.loaded import engine_of
from tests.support.planting import Edit, Mutant, Spoiler
from tests.support.spoilers import (
    added,
    drawn_from_power_of_q,
    matches_what_differs,
    residual_with_epsilon,
    verified,
)
from tests.support.vocab_ops_choice import by_definition

VOCABULARY = 40
PROMPTS = [[1, 5, 9, 5], [1, 7, 3, 30, 12], [1, 20], [1, *range(3, 33)], [1, 8, 8, 8, 9]]
QUICK = VerifySettings(tokens=10, detect=0.1, seed=3)
# A weak drafter's drafts are seldom accepted whole, so the few samples of these tests may hold too few.
FEW_BONUSES = "too few tokens for a test of the bonus token; take more samples, or other prompts"
SELF_TEST = replace(QUICK, self_test="residual")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target with spread distributions and a weak draft model: tokens are both accepted and rejected."""
    base = tmp_path_factory.mktemp("models")
    small = {"vocab_size": VOCABULARY, "initializer_range": 0.2, "num_hidden_layers": 1}
    target = save_checkpoint(base / "target", seed=3, **small)
    return target, save_checkpoint(base / "draft", seed=5, **small)


def loaded(folders: tuple[Path, Path], **options: Any) -> LLM:
    target, small = folders
    return foredraft.load(
        target,
        **{"draft": small, "device": "cpu", "max_batch": 32, "max_length": 64, "policy": "fixed"} | options,
    )


@pytest.fixture
def llm(folders: tuple[Path, Path]) -> LLM:
    return loaded(folders)


@pytest.fixture(scope="module")
def report_of(folders: tuple[Path, Path]) -> Callable[[VerifySettings], VerifyReport]:
    """Return verify's report of the pair: the same settings give the same report, so it is made once."""
    return functools.cache(lambda settings: verify(loaded(folders), PROMPTS, settings))


def plant(monkeypatch: pytest.MonkeyPatch, *edits: Edit) -> None:
    """Plant defects in the PyTorch definitions, and run these instead of the kernels."""
    by_definition(monkeypatch)
    Mutant("", edits, lambda: None).plant(monkeypatch)


def failed(report: VerifyReport) -> set[tuple[str, str]]:
    """Return (drafter, acceptance rule) of the chi-square tests that failed; a stand-in is the drafter."""
    return {
        (test.drafter if test.control else "draft-model", test.acceptance)
        for test in report.tests
        if not test.passed
    }


SPECULATIVE = {("draft-model", "speculative")}
DRAFTED = SPECULATIVE | {("draft-model", "coupled")}
ALL = DRAFTED | {("none", "speculative")}


# --- lossless pairs pass ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft_sampling": "greedy"},
        {"drafter": "lookup"},
        {"policy": "heuristic", "max_draft": 2, "max_batch": 3},
        {"deterministic": False, "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_a_lossless_pair_passes(folders: tuple[Path, Path], options: dict[str, Any]) -> None:
    report = verify(loaded(folders, **options), PROMPTS, QUICK)
    assert report.verdict == ("inconclusive" if report.doubts else "passed")
    assert report.doubts in ([], [FEW_BONUSES])
    assert report.detectable <= 0.1
    assert len(report.tests) == 9 and sum(test.control for test in report.tests) == 3
    assert {test.drafter for test in report.tests} - {TARGET} == {
        options.get("drafter", "draft-model"),
        "none",
    }
    assert [identity.passed for identity in report.identities] == [True] * 4


def test_all_tests_together_have_the_family_level(
    report_of: Callable[[VerifySettings], VerifyReport],
) -> None:
    report = report_of(QUICK)
    levels = [test.level for test in report.tests]
    levels += [position.level for test in report.tests for position in test.positions]
    assert len(levels) == 9 + 3 * 4
    assert sum(levels) == pytest.approx(FAMILY_LEVEL) == pytest.approx(report.family_level)


def test_the_same_seed_gives_the_same_report(llm: LLM) -> None:
    few = replace(QUICK, samples=100)
    first, again, other = (verify(llm, PROMPTS, replace(few, seed=seed)) for seed in (3, 3, 4))
    assert first == again
    assert [test.statistic for test in first.tests] != [test.statistic for test in other.tests]


def test_without_a_seed_each_run_draws_one_and_reports_it(llm: LLM) -> None:
    options = replace(QUICK, seed=None, samples=20)
    first, second = verify(llm, PROMPTS, options), verify(llm, PROMPTS, options)
    assert first.seed != second.seed
    assert verify(llm, PROMPTS, replace(options, seed=first.seed)) == first


@pytest.mark.parametrize(
    ("seconds", "distance"), [(0.0, 0.03), (0.002, 0.03), (0.01, 0.05), (0.03, 0.1), (9.0, 0.1)]
)
def test_without_a_distance_the_tests_detect_what_a_few_minutes_can(seconds: float, distance: float) -> None:
    """The time of the samples that chose the prompts decides: about 47,000 samples detect 0.03, 4,300 0.1."""
    case = SamplingCase(0, PROMPTS[0], SamplingParams(drafter="draft-model"))
    checks = _checks([case] * len(SETTINGS), "draft-model", VerifySettings())
    assert _affordable(checks, seconds) == distance


def test_the_users_number_of_samples_does_not_lower_what_they_must_detect(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sampler, "seconds_per_sample", property(lambda self: 9.0))
    assert verify(llm, PROMPTS, replace(QUICK, detect=None, samples=20)).detect == 0.03
    monkeypatch.setattr(run, "_affordable", lambda plans, seconds: seconds / 10)
    assert verify(llm, PROMPTS[:1], replace(QUICK, tokens=2, detect=None)).detect == 0.9


def test_nothing_of_a_single_sample_is_kept(llm: LLM) -> None:
    """What stays of each sample would pin memory between the tables over a large vocabulary."""
    plain = PlainTarget(llm.loaded, 60)
    params = SamplingParams(drafter="draft-model", acceptance="speculative")
    check = DistributionCheck(
        SamplingCase(0, PROMPTS[0], params),
        "speculative",
        SETTINGS[0],
        full=True,
        by_position=True,
        level=1e-3,
    )
    alive: list[int] = []

    def progress(done: int, total: int) -> None:
        gc.collect()
        alive.append(sum(type(each) is Stats for each in gc.get_objects()))

    run_test(Sampler(llm, 3), plain, check, lambda cells: 3 * BATCH, progress)
    assert alive[-1] - alive[0] <= BATCH + 1  # those of the last call, and their sum


def test_the_sampler_measures_the_time_of_its_samples(llm: LLM) -> None:
    sampler = Sampler(llm, 3)
    assert sampler.seconds_per_sample == 0
    start = time.perf_counter()
    [outputs] = sampler.draw(SamplingCase(0, PROMPTS[0], SamplingParams(drafter="draft-model")), 50)
    most = (time.perf_counter() - start) / len(outputs)
    assert 0 < sampler.seconds_per_sample <= most


def test_the_report_states_what_is_loaded(folders: tuple[Path, Path]) -> None:
    llm = loaded(folders, policy="heuristic", dtype="bfloat16", draft_sampling="greedy", deterministic=False)
    about = verify(llm, PROMPTS, replace(QUICK, samples=20)).about
    expected = {
        "drafter": "draft-model",
        "policy": "heuristic",
        "greedy_drafts": True,
        "dtype": "bfloat16",
        "device": "cpu",
        "deterministic": False,
        "max_batch": 32,
        "foredraft": foredraft.__version__,
    }
    assert about | expected == about


def test_each_test_samples_with_the_settings_that_it_reports(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, drawn = LLM.generate, []

    def noted(self: LLM, prompts: Any, params: Any, *, n: int = 1, **more: Any) -> list[Output]:
        if n > 1:
            drawn.append((params, n, engine_of(self).draft_temperature))
        return generate(self, prompts, params, n=n, **more)

    monkeypatch.setattr(LLM, "generate", noted)
    report = verify(llm, PROMPTS, replace(QUICK, samples=300))
    tested = [part for part in drawn if part[1] != PROBES]
    assert [n for _, n, _ in tested] == [BATCH, BATCH, 300 - 2 * BATCH] * 3 + [18] * 6
    assert len({params.seed for params, _, _ in drawn}) == len(drawn)  # no noise is used twice
    parts = [tested[i] for i in (0, 3, 6, 9, 10, 11, 12, 13, 14)]
    for test, (params, _, draft_temperature) in zip(report.tests, parts, strict=True):
        assert {name: getattr(params, name) for name in test.setting.options} == test.setting.options
        assert (test.drafter, test.acceptance) == (params.drafter, params.acceptance)
        assert (test.tokens, params.ignore_eos) == (params.max_new_tokens, True)
        assert test.draft_temperature == draft_temperature
        assert test.full == (test.samples == 300)
    for first in (0, 3, 6):
        assert tuple(test.setting for test in report.tests[first : first + 3]) == SETTINGS
    assert [test.draft_temperature != 1 for test in report.tests] == [False, False, True] + [False] * 6
    assert len({test.prompt for test in report.tests}) > 1


def test_seeded_texts_have_seeds_of_their_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, seeded = LLM.generate, []

    def noted(self: LLM, prompts: Any, params: Any, **more: Any) -> list[Output]:
        if isinstance(params, list) and not params[0].greedy:
            seeded.append((params, prompts))
        return generate(self, prompts, params, **more)

    monkeypatch.setattr(LLM, "generate", noted)
    report = verify(llm, PROMPTS, replace(QUICK, samples=20))
    seeds: dict[int | None, set[tuple[tuple[int, ...], float]]] = {}
    for params, prompts in seeded:
        for own, prompt in zip(params, prompts, strict=True):
            assert own.is_coupled and own.acceptance == "coupled"
            seeds.setdefault(own.seed, set()).add((tuple(prompt), own.temperature))
    assert len(seeds) == 2 * len(PROMPTS)
    assert all(len(uses) == 1 for uses in seeds.values())
    assert {len(prompts) for _, prompts in seeded} == {1, len(PROMPTS)}  # alone and in a batch
    assert [(i.acceptance, i.setting.penalised) for i in report.identities] == [
        (None, False),
        (None, True),
        ("coupled", False),
        ("coupled", True),
    ]
    assert all(i.setting.temperature > 0 for i in report.identities if i.acceptance)


def test_one_acceptance_rule_can_be_tested_alone(llm: LLM) -> None:
    report = verify(llm, PROMPTS, replace(QUICK, acceptance="coupled"))
    assert [(test.acceptance, test.full) for test in report.tests] == [("coupled", True)] * 3 + [
        ("coupled", False)
    ] * 3
    assert (report.verdict, len(report.identities)) == ("passed", 4)
    for rule in ("speculative", "block"):
        only = verify(llm, PROMPTS, replace(QUICK, acceptance=rule))
        assert [test.acceptance for test in only.tests] == [rule] * 6
        assert [identity.acceptance for identity in only.identities] == [None] * 2
        assert [bool(test.positions) for test in only.tests] == [rule == "speculative"] * 3 + [False] * 3


def test_a_draft_temperature_changes_q_and_no_output_of_the_coupled_rule(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused and single draft steps divide the logits alike, and a text depends on its seed alone."""
    params = SamplingParams(max_new_tokens=12, seed=4, ignore_eos=True, acceptance="coupled")

    def traced(temperature: float) -> tuple[list[int], list[list[int]], list[float]]:
        engine_of(llm).draft_temperature = temperature
        [output] = llm.generate([PROMPTS[3]], params, trace=True)
        assert output.trace is not None
        return (
            output.token_ids,
            [each.draft for each in output.trace],
            [q for each in output.trace for q in each.q],
        )

    tokens, drafts, q = traced(1.0)
    sharper_tokens, sharper_drafts, sharper_q = traced(0.5)
    assert tokens == sharper_tokens and drafts != sharper_drafts
    assert np.mean(sharper_q) > np.mean(q) + 0.1
    monkeypatch.setattr(DraftModel, "fused_draft", lambda *args: None)
    _, single_drafts, single_q = traced(0.5)
    assert single_drafts == sharper_drafts
    assert single_q == pytest.approx(sharper_q, rel=1e-4)


# --- the default policy -----------------------------------------------------------------------------


@pytest.fixture
def auto(folders: tuple[Path, Path]) -> LLM:
    """All drafters at hand under policy auto, as programs load them by default."""
    return loaded(folders, policy="auto", plan="skip:mlp=0")


def test_under_auto_the_drafters_at_hand_draft_in_turns(auto: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `auto` decides is a matter of costs: here no draft pays, and all the same each drafter is tested."""
    policy: Any = engine_of(auto).policy
    policy.use(CostTable({1: {1: 1.0, 8: 100.0}}, {}))
    generate, drafters = LLM.generate, dict[tuple[bool, bool], set[str]]()

    def noted(self: LLM, prompts: Any, params: Any, *, n: int = 1, **more: Any) -> list[Output]:
        outputs = generate(self, prompts, params, n=n, **more)
        own = (params if isinstance(params, list) else [params])[0]
        if own.drafter == "auto":
            always = isinstance(engine_of(self).policy, DraftsAlways)
            names = {name for output in outputs for name in output.stats.drafts}
            drafters.setdefault((n > 1, always), set()).update(names)
        return outputs

    monkeypatch.setattr(LLM, "generate", noted)
    report = verify(auto, PROMPTS, QUICK)
    assert report.doubts in ([], [FEW_BONUSES]) and report.verdict != "failed"
    assert report.about["drafters"] == ["lookup", "draft-model", "layer-skip"]
    every = set(report.about["drafters"])
    assert drafters == {(False, False): set(), (False, True): every, (True, True): every}
    own = [TextRun("auto", batched, always) for always in (False, True) for batched in (False, True)]
    for identity in report.identities:
        assert set(identity.runs) == {*own, TextRun("none", True)}
    assert {test.drafter for test in report.tests} - {TARGET} == {"auto", "none"}
    assert engine_of(auto).policy is policy and TARGET not in engine_of(auto).drafters


@pytest.mark.parametrize("name", PLANTED)
def test_the_self_test_finds_each_planted_defect_under_auto(auto: LLM, name: str) -> None:
    assert verify(auto, PROMPTS, replace(QUICK, self_test=name)).found_planted


def test_under_auto_a_drafter_without_probabilities_has_the_target_as_its_stand_in(
    folders: tuple[Path, Path],
) -> None:
    llm = loaded(folders, policy="auto", draft=None, drafter="lookup")
    report = verify(llm, PROMPTS, QUICK)
    assert report.verdict != "failed" and report.about["drafters"] == ["lookup"]
    assert [test.drafter for test in report.tests[:3]] == ["lookup", "lookup", TARGET]


# --- defects are found ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANTED)
def test_the_self_test_finds_each_planted_defect(
    report_of: Callable[[VerifySettings], VerifyReport], name: str
) -> None:
    report = report_of(replace(QUICK, self_test=name))
    assert report.planted == name
    assert (report.found_planted, report.verdict) == (True, "failed")
    assert report.identities[0].passed  # no greedy test without penalties detects it


@pytest.mark.parametrize("name", ["residual", "position", "coin"])
@pytest.mark.parametrize("options", [{"drafter": "lookup"}, {"draft": "target"}], ids=["lookup", "perfect"])
def test_a_stand_in_shows_defects_that_the_drafter_hides(
    folders: tuple[Path, Path], name: str, options: dict[str, Any]
) -> None:
    """The target rejects no token of a draft model that is the target itself, and nearly all of a poor one."""
    given = {"draft": folders[0]} if "draft" in options else options
    assert verify(loaded(folders, **given), PROMPTS, replace(QUICK, self_test=name)).found_planted


@pytest.mark.parametrize("name", ["position", "coin"])
def test_a_defect_past_the_first_position_fails_the_tests_of_these_positions(
    report_of: Callable[[VerifySettings], VerifyReport], name: str
) -> None:
    """Joint tests alone may miss them; a test of the position sees them, and the first position is right."""
    report = report_of(replace(QUICK, self_test=name))
    failing = {
        each.position
        for test in report.tests
        for each in test.positions
        if not each.passed and not each.bonus
    }
    assert 1 in failing and 0 not in failing


def test_noise_keyed_by_the_round_changes_seeded_texts_of_the_drafter_only(
    report_of: Callable[[VerifySettings], VerifyReport],
) -> None:
    report = report_of(replace(QUICK, self_test="round-noise"))
    for identity in report.identities:
        assert identity.drafter_diverged == (identity.acceptance == "coupled")
        assert not identity.control_diverged
    assert all(test.passed for test in report.tests)  # the distribution is right
    found = [each for identity in report.identities for each in identity.divergences]
    assert all(each.seed is not None for each in found)


def test_penalties_that_do_not_follow_the_draft_change_penalised_texts_and_samples(
    report_of: Callable[[VerifySettings], VerifyReport],
) -> None:
    report = report_of(replace(QUICK, self_test="penalties"))
    for identity in report.identities:
        assert identity.setting.penalised or identity.passed
    assert report.identities[1].drafter_diverged
    assert {test.setting.penalised for test in report.tests if not test.passed} == {True}


@pytest.mark.parametrize("name", PLANTED)
def test_the_defect_is_removed_after_the_self_test(llm: LLM, folders: tuple[Path, Path], name: str) -> None:
    def seams() -> list[object]:
        engine = engine_of(llm)
        return [engine.accept, engine.noise, engine.round_inputs, sorted(engine.drafters)]

    sound = seams()
    with planted(engine_of(llm), name):
        assert seams() != sound
        assert verify(loaded(folders), PROMPTS, replace(QUICK, samples=20)).identities[3].passed
    assert seams() == sound
    with pytest.raises(RequestError):
        verify(llm, [[VOCABULARY]], replace(QUICK, self_test=name))
    assert seams() == sound and engine_of(llm).draft_temperature == 1


def test_a_failed_request_does_not_count_as_finding_the_defect(
    report_of: Callable[[VerifySettings], VerifyReport],
) -> None:
    report = report_of(SELF_TEST)
    first, *others = report.tests
    failing = replace(report, tests=(replace(first, errors=("out of memory",)), *others))
    assert (failing.found_planted, failing.verdict) == (False, "inconclusive")


def test_a_check_that_the_defect_cannot_break_does_not_count_as_finding_it(
    report_of: Callable[[VerifySettings], VerifyReport],
) -> None:
    report = report_of(replace(QUICK, self_test="round-noise"))
    assert report.found_planted
    greedy, *others = report.identities
    broken = replace(greedy, divergences=report.identities[2].divergences[:1])
    assert not replace(report, identities=(broken, *others)).found_planted


def test_the_self_test_is_inconclusive_without_evidence(llm: LLM) -> None:
    report = verify(llm, PROMPTS, replace(SELF_TEST, samples=20))
    assert (report.found_planted, report.verdict) == (False, "inconclusive")


def sharpened_q(token: Tensor, q: Distribution, drawable: Tensor, finite: Tensor) -> Distribution:
    return replace(q, probs=None if q.probs is None else q.probs**3)


def fused_q_sharpened(fused_draft: Callable[..., Any]) -> Callable[..., Any]:
    def spoilt(*args: Any) -> Any:
        fused = fused_draft(*args)
        return fused and replace(fused, probs=None if fused.probs is None else fused.probs**3)

    return spoilt


def drawn_from_power_of_weights(power: int) -> Spoiler:
    return lambda race: lambda ops, weights, keys: race(ops, weights.pow(power), keys)


EPSILON: Edit = (TorchVocabOps.residual, residual_with_epsilon(1e-3))
# (edit, the tests that must fail)
DEFECTS: dict[str, tuple[Edit, set[tuple[str, str]]]] = {
    "epsilon in the residual": (EPSILON, SPECULATIVE),
    "every draft accepted": (
        (accept._keeps, lambda _: lambda u, q, p: torch.ones_like(p, dtype=torch.bool)),
        SPECULATIVE,
    ),
    "the token is not drawn from q": ((step_draws._token, drawn_from_power_of_q(3)), SPECULATIVE),
    "the q that is kept is not the q of the draw": ((_Steps.add, added(q=sharpened_q)), SPECULATIVE),
    "the q that is kept of a fused draft is not the q of the draw": (
        (DraftModel.fused_draft, fused_q_sharpened),
        SPECULATIVE,
    ),
    "coupled keeps tokens that differ": (
        (TorchVocabOps.match_prefix, matches_what_differs),
        {("draft-model", "coupled")},
    ),
    "plain sampling is wrong too": ((TorchVocabOps.gumbel_argmax, drawn_from_power_of_weights(2)), ALL),
    "top-p ignored in p and q": (
        (SamplingTable.of, lambda of: lambda *args, **more: replace(of(*args, **more), top_p=None)),
        set(),  # the expected distribution shares the transforms, which have tests of their own
    ),
}
SINGLE_STEPS = step_draws._token, _Steps.add  # a fused draft calls none of these


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_fails_exactly_the_affected_tests(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    edit, affected = DEFECTS[name]
    single = edit[0] in SINGLE_STEPS
    plant(monkeypatch, edit)
    if single:
        monkeypatch.setattr(DraftModel, "fused_draft", lambda *args: None)
    report = verify(llm, PROMPTS, replace(QUICK, detect=0.1))
    assert failed(report) == affected
    assert (report.verdict == "failed") == bool(affected)


def test_one_sample_of_probability_zero_fails_the_test(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, EPSILON)
    report = verify(llm, PROMPTS, QUICK)
    truncated = [
        test
        for test in report.tests
        if test.setting.top_k and test.acceptance == "speculative" and not test.control
    ]
    assert [(test.impossible > 0, test.p_value, test.passed) for test in truncated] == [(True, 0.0, False)]


def test_a_self_test_with_failing_controls_is_inconclusive(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, (TorchVocabOps.gumbel_argmax, drawn_from_power_of_weights(8)))
    report = verify(llm, PROMPTS, SELF_TEST)
    assert not report.found_planted


@pytest.fixture
def altered(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Callable[[SamplingParams, int, Output], Output]], None]:
    """Changes the last prompt's output at temperature 0, given the parameters and the number of prompts."""

    def alter(change: Callable[[SamplingParams, int, Output], Output]) -> None:
        generate = LLM.generate

        def altering(self: LLM, prompts: Any, params: Any, **more: Any) -> list[Output]:
            outputs = generate(self, prompts, params, **more)
            [own, *_] = params if isinstance(params, list) else [params]
            if own.greedy and not own.penalised and prompts[-1] == PROMPTS[-1]:
                outputs[-1] = change(own, len(prompts), outputs[-1])
            return outputs

        monkeypatch.setattr(LLM, "generate", altering)

    return alter


@pytest.mark.parametrize(
    ("drafter", "batched"), [("draft-model", False), ("none", True), ("draft-model", True)]
)
def test_a_divergence_is_reported_with_the_margin(
    llm: LLM, altered: Any, drafter: str, batched: bool
) -> None:
    ids = llm.generate([PROMPTS[-1]], SamplingParams(temperature=0, max_new_tokens=10, drafter="none"))
    [right] = [output.token_ids for output in ids]

    def change(params: SamplingParams, count: int, output: Output) -> Output:
        if (params.drafter, count > 1) != (drafter, batched):
            return output
        wrong = [*output.token_ids[:4], (output.token_ids[4] + 1) % VOCABULARY, *output.token_ids[5:]]
        return replace(output, token_ids=wrong)

    altered(change)
    report = verify(llm, PROMPTS, replace(QUICK, samples=20))
    [found] = report.identities[0].divergences
    assert (found.prompt, found.run, found.position) == (4, TextRun(drafter, batched), 4)
    assert (found.expected, found.found) == (right[4], (right[4] + 1) % VOCABULARY)
    logits = PlainTarget(llm.loaded, 60).logits(PROMPTS[-1], right[:4])
    assert found.best == tuple(logits.argsort(descending=True)[:2].tolist())
    assert found.best[0] == right[4]
    assert found.logits == tuple(logits[list(found.best)].tolist())
    assert found.margin == found.logits[0] - found.logits[1] > 0
    assert report.verdict == "failed"
    assert report.identities[0].diverged(TextRun(drafter, batched)) == 1


def test_a_divergence_at_a_tie_names_the_smallest_ids(
    llm: LLM, altered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered(
        lambda params, count, output: replace(output, token_ids=output.token_ids[: 3 if count > 1 else 9])
    )
    tied = torch.ones(VOCABULARY).index_fill(0, torch.tensor([0]), 0.0)
    monkeypatch.setattr(PlainTarget, "logits", lambda *given: tied)
    report = verify(llm, PROMPTS, replace(QUICK, samples=20))
    for found in report.identities[0].divergences:
        assert (found.best, found.logits, found.margin) == ((1, 2), (1.0, 1.0), 0.0)
    assert report.identities[0].divergences


def test_an_output_that_ends_early_diverges_at_its_end(llm: LLM, altered: Any) -> None:
    altered(
        lambda params, count, output: replace(output, token_ids=output.token_ids[: 3 if count > 1 else 9])
    )
    report = verify(llm, PROMPTS, replace(QUICK, samples=20))
    assert [(d.position, d.found) for d in report.identities[0].divergences] == [(3, None)] * 2
    assert all(d.expected is not None for d in report.identities[0].divergences)


def test_a_failed_request_fails_the_verification(llm: LLM, altered: Any) -> None:
    altered(lambda params, count, output: replace(output, error="no room" if count > 1 else None))
    report = verify(llm, PROMPTS, replace(QUICK, detect=0.2))
    assert report.identities[0].errors == ("prompt 4, none: no room", "prompt 4, draft-model: no room")
    assert report.verdict == "failed"


def test_a_failed_sample_fails_its_test(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = LLM.generate

    def failing(self: LLM, prompts: Any, params: Any, *, n: int = 1, **more: Any) -> list[Output]:
        outputs = generate(self, prompts, params, n=n, **more)
        return [replace(o, error="no room") for o in outputs] if n > 1 and params.is_coupled else outputs

    monkeypatch.setattr(LLM, "generate", failing)
    report = verify(llm, PROMPTS, replace(QUICK, detect=0.2))
    assert failed(report) == {("draft-model", "coupled")}
    assert {test.errors for test in report.tests if not test.passed} == {("no room",)}


def test_a_wrong_position_after_a_draft_diverges(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_off(engine: Any, inputs: RoundInputs, draft: Any, starts: list[int], options: Any) -> None:
        for row, sequence in enumerate(inputs.sequences):
            starts[row] += bool(sequence.rounds and sequence.rounds[-1].drafted)

    plant(monkeypatch, (Engine._verify, verified(one_off)))
    report = verify(llm, PROMPTS, replace(QUICK, samples=20))
    greedy = report.identities[0]
    assert greedy.diverged(TextRun("draft-model", False)) and not greedy.diverged(TextRun("none", True))


# --- weak evidence ----------------------------------------------------------------------------------


def test_too_few_samples_are_inconclusive(llm: LLM) -> None:
    report = verify(llm, PROMPTS, replace(QUICK, samples=200, detect=0.03))
    assert report.verdict == "inconclusive"
    doubt, *others = report.doubts
    assert [other.partition(" of ")[0] for other in others] == ["too few tokens for a test"]
    assert doubt.startswith(f"the tests detect a total variation distance of {report.detectable:.4f} at best")


def test_positions_without_tokens_are_inconclusive(llm: LLM) -> None:
    """The joint tests reach what is asked for, but a position of which no test saw enough is no pass."""
    report = verify(llm, PROMPTS, replace(QUICK, detect=0.1))
    enough = {"tokens": 90, "corrections": 30, "degrees": 1, "p_value": 0.5, "detectable": 0.4}
    none = {"tokens": 0, "corrections": 0, "degrees": 0, "p_value": 1.0, "detectable": 1.0}

    def without(*numbers: int) -> VerifyReport:
        def changed(test: DistributionTest) -> DistributionTest:
            made = [replace(e, **(none if e.position in numbers else enough)) for e in test.positions]
            return replace(test, positions=tuple(made))

        return replace(report, tests=tuple(map(changed, report.tests)))

    assert (without().verdict, without().doubts) == ("passed", [])
    third, last = without(2), without(2, 3)
    assert (third.verdict, last.verdict) == ("inconclusive", "inconclusive")
    assert third.doubts == ["too few tokens for a test of position 3; take more samples, or other prompts"]
    assert last.doubts[0].startswith("too few tokens for a test of position 3 and the bonus token;")
    assert [each.position for each in third.best_by_position] == [0, 1]
    assert [each["passed"] for each in third.as_dict()["tests"][0]["positions"]] == [True, True, False, True]


def test_corrections_that_no_test_counts_are_no_evidence(llm: LLM) -> None:
    report = verify(llm, PROMPTS, QUICK)
    tests = tuple(
        replace(test, positions=tuple(replace(each, corrections=0) for each in test.positions))
        for test in report.tests
    )
    doubt = replace(report, tests=tests).doubts[-1]
    assert doubt.startswith("hardly any draft was corrected at position 1 and 2 and 3;")
    assert replace(report, tests=tests).best_by_position == []


def test_a_drafter_that_drafts_nothing_is_inconclusive(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lookup, "propose", lambda self, requests: [[] for _ in requests])
    report = verify(loaded(folders, drafter="lookup"), PROMPTS, QUICK)
    assert report.verdict == "inconclusive"
    assert [doubt.split(";")[0] for doubt in report.doubts] == [
        "nothing was drafted at temperature 0",
        "nothing was drafted in 5 of the chi-square tests",
    ]


def chosen(llm: LLM, monkeypatch: pytest.MonkeyPatch, drafts: dict[int, str]) -> list[int]:
    """Return the prompts in the order of choice.

    Args:
        llm: The loaded models.
        monkeypatch: Replaces the proposals of the lookup drafter.
        drafts: Number of a prompt -> the token that is drafted, "most likely" or "least likely"; nothing is
            drafted for other prompts.
    """
    plain = PlainTarget(llm.loaded, 60)

    def draft(sequence: Sequence, budget: int) -> list[int]:
        kind = drafts.get(PROMPTS.index(sequence.prompt))
        if kind is None:
            return []
        logits = plain.logits(sequence.prompt, sequence.new_ids)
        return [int(logits.argmax() if kind == "most likely" else logits.argmin())][:budget]

    def propose(self: Lookup, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [draft(sequence, budget) for sequence, budget in requests]

    monkeypatch.setattr(Lookup, "propose", propose)
    params = SamplingParams(drafter="lookup", acceptance="speculative")
    plain = PlainTarget(llm.loaded, 60)
    cases = choose_cases(Sampler(llm, 5), plain, PROMPTS, params, 5, lambda done, total: None)
    return [case.number for case in cases]


def test_prompts_with_mixed_acceptance_and_high_entropy_come_first(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts with both outcomes precede those with rejections only, and these precede undrafted ones."""
    plain, params = PlainTarget(llm.loaded, 60), SamplingParams()
    entropies = {i: Cells.of(plain.next_token(p, params), TREE_WIDTHS).entropy for i, p in enumerate(PROMPTS)}
    ranked = sorted(entropies, key=lambda i: -entropies[i])
    assert ranked != sorted(entropies)
    assert chosen(llm, monkeypatch, {}) == ranked
    last, before = ranked[-1], ranked[-2]
    assert chosen(llm, monkeypatch, {last: "least likely"}) == [last, *ranked[:-1]]
    both = {last: "most likely", before: "least likely"}
    assert chosen(llm, monkeypatch, both) == [last, before, *ranked[:-2]]


def test_a_failure_outweighs_weak_evidence(llm: LLM, altered: Any) -> None:
    altered(lambda params, count, output: replace(output, token_ids=[9] if count > 1 else output.token_ids))
    report = verify(llm, PROMPTS, replace(QUICK, samples=20))
    assert report.doubts and report.verdict == "failed"


# --- options and records ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens is 0; give 1 or more"),
        ({"samples": 0}, "samples is 0; give 1 or more"),
        ({"detect": 0.0}, "detect is 0.0; give a total variation distance between 0 and 1"),
        ({"detect": float("nan")}, "detect is nan; give"),
        ({"seed": -1}, "seed is -1; give a whole number"),
        ({"acceptance": "bild"}, "acceptance is 'bild', which is not lossless"),
        (
            {"self_test": "residual", "acceptance": "coupled"},
            "self_test is 'residual', but corrections drawn from p, not from the residual breaks nothing under"
            " acceptance='coupled'; leave one out",
        ),
        (
            {"self_test": "bonus"},
            "self_test is 'bonus', which is no defect to plant; give residual, position, coin, round-noise,"
            " penalties",
        ),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VerifySettings(**options)


def test_missing_drafters_and_wrong_prompts_are_refused(llm: LLM, folders: tuple[Path, Path]) -> None:
    with pytest.raises(
        ConfigError, match="no drafter, so there is nothing to verify; give draft or drafter='lookup'"
    ):
        verify(loaded(folders, draft=None, drafter="none"), PROMPTS, QUICK)
    for empty in ([], [[]], [[1], []]):
        with pytest.raises(ConfigError, match="a prompt is empty, or there are none"):
            verify(llm, empty, QUICK)
    with pytest.raises(RequestError, match="exceed the 64 positions"):
        verify(llm, [[3] * 60], QUICK)
    with pytest.raises(RequestError, match="outside the model's vocabulary"):
        verify(llm, [[VOCABULARY]], QUICK)


def test_long_prompts_are_truncated_on_request(llm: LLM) -> None:
    report = verify(llm, [[1, *[4, 5] * 40], *PROMPTS], replace(QUICK, samples=20), truncate="left")
    assert report.identities[0].passed and report.identities[0].prompts == 6


def test_the_report_is_json_without_nan(llm: LLM) -> None:
    report = verify(llm, PROMPTS, replace(SELF_TEST, samples=20))
    document = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert document["verdict"] == report.verdict
    first = {"drafter": "draft-model", "batched": False, "always": False}
    assert document["identities"][0]["runs"][0] == first
    assert [test["passed"] for test in document["tests"]] == [test.passed for test in report.tests]
    assert (document["planted"], document["found_planted"]) == ("residual", report.found_planted)


def test_progress_reaches_the_end_of_every_stage(llm: LLM) -> None:
    seen: dict[str, tuple[int, int]] = {}
    verify(llm, PROMPTS, QUICK, progress=lambda stage, done, total: seen.update({stage: (done, total)}))
    assert list(seen) == [
        *(f"Texts {i} of 4" for i in range(1, 5)),
        "Choosing prompts",
        *(f"Chi-square test {i} of 9" for i in range(1, 10)),
    ]
    assert all(done == total for done, total in seen.values())
