"""The whole verification on tiny random checkpoints: lossless pairs pass, planted defects are found."""

from __future__ import annotations

import functools
import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import foredraft
from foredraft import LLM, ConfigError, Output, RequestError, SamplingParams
from foredraft.bench.settings import DEFECTS as PLANTED
from foredraft.bench.settings import PENALISED, SETTINGS
from foredraft.decode import accept, step_draws
from foredraft.decode.distribution import Distribution
from foredraft.decode.drafting import _Steps
from foredraft.decode.engine import Engine
from foredraft.decode.policy.cost_table import CostTable
from foredraft.decode.round_draft import RoundInputs
from foredraft.decode.sampling import SamplingTable
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Stats
from foredraft.decode.vocab_ops import TorchVocabOps
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.lookup import Lookup
from foredraft.verify import DistributionTest, VerifyReport, VerifySettings, verify
from foredraft.verify import verify_run as run
from foredraft.verify.chi_square import Cells
from foredraft.verify.distribution_tests import PROBES, DistributionCheck, choose_cases, run_test
from foredraft.verify.sampler import (
    BATCH,
    TARGET,
    TREE_WIDTHS,
    DraftsAlways,
    PlainTarget,
    Sampler,
    SamplingCase,
    planted,
)
from foredraft.verify.verify_records import TextRun
from foredraft.verify.verify_run import FAMILY_LEVEL, _affordable, _checks
from tests.support.checkpoints import save_checkpoint
from tests.support.loaded import engine_of
from tests.support.mutation import Edit, Mutant, Mutation
from tests.support.mutations import (
    added,
    drawn_from_power_of_q,
    matches_differing,
    residual_with_epsilon,
    verified,
)
from tests.support.vocab_ops_choice import by_definition

Reports = Callable[[VerifySettings], VerifyReport]
Change = Callable[[SamplingParams, int, Output], Output]
VOCABULARY = 40
PROMPTS = [[1, 5, 9, 5], [1, 7, 3, 30, 12], [1, 20], [1, *range(3, 33)], [1, 8, 8, 8, 9]]
QUICK = VerifySettings(tokens=6, detect=0.2, seed=3)
FEW = replace(QUICK, samples=20)
MORE = replace(QUICK, detect=0.1)  # so many samples that every position has enough tokens


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("models")
    small = {"vocab_size": VOCABULARY, "initializer_range": 0.2, "num_hidden_layers": 1}
    target = save_checkpoint(base / "target", seed=3, **small)
    return target, save_checkpoint(base / "draft", seed=5, **small)


def loaded(folders: tuple[Path, Path], **options: Any) -> LLM:
    target, small = folders
    return foredraft.load(
        target,
        **{"draft": small, "device": "cpu", "max_batch": 64, "max_length": 64, "policy": "fixed"} | options,
    )


@pytest.fixture(scope="module")
def llm(folders: tuple[Path, Path]) -> LLM:
    return loaded(folders)


@pytest.fixture(scope="module")
def report_of(llm: LLM) -> Reports:
    """Return verify's report of the pair: the same settings give the same report, so it is made once."""
    return functools.cache(lambda settings: verify(llm, PROMPTS, settings))


def plant(monkeypatch: pytest.MonkeyPatch, *edits: Edit) -> None:
    by_definition(monkeypatch)
    Mutant("", edits, lambda: None).plant(monkeypatch)


def failed(report: VerifyReport) -> set[tuple[str, str]]:
    """Return (drafter, acceptance rule) of the chi-square tests that failed; a stand-in is the drafter."""
    wrong = [test for test in report.tests if not test.passed]
    return {(test.drafter if test.control else "draft-model", test.acceptance) for test in wrong}


SPECULATIVE = {("draft-model", "speculative")}
DRAFTED = SPECULATIVE | {("draft-model", "coupled")}
ALL = DRAFTED | {("none", "speculative")}


# --- lossless pairs pass ----------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("options", "about"),
    [
        ({}, {"drafter": "draft-model", "policy": "fixed", "dtype": "float32", "deterministic": True}),
        ({"draft_sampling": "greedy"}, {"greedy_drafts": True}),
        ({"drafter": "lookup"}, {"drafter": "lookup"}),
        ({"policy": "heuristic", "max_draft": 2, "max_batch": 3}, {"policy": "heuristic", "max_batch": 3}),
        ({"deterministic": False, "dtype": "bfloat16"}, {"deterministic": False, "dtype": "bfloat16"}),
    ],
    ids=["as it is", "greedy drafts", "lookup", "heuristic", "bfloat16"],
)
def test_a_lossless_pair(folders: tuple[Path, Path], options: dict[str, Any], about: dict[str, Any]) -> None:
    report = verify(loaded(folders, **options), PROMPTS, QUICK)
    assert report.verdict == ("inconclusive" if report.doubts else "passed")
    # a weak drafter's drafts are seldom accepted whole, so that few samples reach the last positions
    assert all(doubt.startswith("too few tokens for a test of") for doubt in report.doubts)
    assert report.detectable <= QUICK.detect
    assert len(report.tests) == 9 and sum(test.control for test in report.tests) == 3
    drafters = {test.drafter for test in report.tests} - {TARGET}
    assert drafters == {options.get("drafter", "draft-model"), "none"}
    assert [identity.passed for identity in report.identities] == [True] * 4
    assert report.about.items() >= {**about, "device": "cpu", "foredraft": foredraft.__version__}.items()


@pytest.mark.heavy
def test_all_tests_together_have_the_family_level(report_of: Reports) -> None:
    report = report_of(QUICK)
    levels = [test.level for test in report.tests]
    levels += [position.level for test in report.tests for position in test.positions]
    assert len(levels) == 9 + 3 * 4
    assert sum(levels) == pytest.approx(FAMILY_LEVEL) == pytest.approx(report.family_level)


@pytest.mark.heavy
def test_the_same_seed_gives_the_same_report_and_without_one_a_run_draws_its_own(llm: LLM) -> None:
    options = replace(QUICK, seed=None, samples=100)
    first, second = verify(llm, PROMPTS[:2], options), verify(llm, PROMPTS[:2], options)
    assert first.seed != second.seed
    assert [test.statistic for test in first.tests] != [test.statistic for test in second.tests]
    assert verify(llm, PROMPTS[:2], replace(options, seed=first.seed)) == first


@pytest.mark.parametrize(
    ("seconds", "distance"), [(0, 0.03), (0.002, 0.03), (0.01, 0.05), (0.03, 0.1), (9, 0.1)]
)
def test_without_a_distance_the_tests_detect_what_a_few_minutes_can(seconds: float, distance: float) -> None:
    """The time of the samples that chose the prompts decides: about 47,000 samples detect 0.03, 4,300 0.1."""
    case = SamplingCase(0, PROMPTS[0], SamplingParams(drafter="draft-model"))
    checks = _checks([case] * len(SETTINGS), "draft-model", VerifySettings())
    assert _affordable(checks, seconds) == distance


def test_the_users_samples_leave_what_they_must_detect(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "seconds_per_sample", property(lambda self: 9.0))
    assert verify(llm, PROMPTS[:1], replace(FEW, detect=None)).detect == 0.03
    monkeypatch.setattr(run, "_affordable", lambda plans, seconds: seconds / 10)
    assert verify(llm, PROMPTS[:1], replace(QUICK, tokens=2, detect=None)).detect == 0.9


def test_nothing_of_a_single_sample_is_kept(llm: LLM) -> None:
    """What stays of each sample would pin memory between the tables over a large vocabulary."""
    plain = PlainTarget(llm.loaded, 60)
    params = SamplingParams(drafter="draft-model", acceptance="speculative")
    case = SamplingCase(0, PROMPTS[0], params)
    check = DistributionCheck(case, "speculative", SETTINGS[0], full=True, by_position=True, level=1e-3)
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


class Noted(NamedTuple):
    """A run of 300 samples, and what it asked of the model: parameters, prompts, samples, draft temperature."""

    report: VerifyReport
    calls: list[tuple[Any, Any, int, float]]


@pytest.fixture(scope="module")
def noted(llm: LLM) -> Noted:
    generate, calls = LLM.generate, list[tuple[Any, Any, int, float]]()

    def noting(self: LLM, prompts: Any, params: Any, *, n: int = 1, **more: Any) -> list[Output]:
        calls.append((params, prompts, n, engine_of(self).draft_temperature))
        return generate(self, prompts, params, n=n, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLM, "generate", noting)
        return Noted(verify(llm, PROMPTS, replace(QUICK, samples=300)), calls)


@pytest.mark.heavy
def test_each_test_samples_with_the_settings_that_it_reports(noted: Noted) -> None:
    report, drawn = noted.report, [call for call in noted.calls if call[2] > 1]
    tested = [call for call in drawn if call[2] != PROBES]
    assert [n for _, _, n, _ in tested] == [BATCH, BATCH, 300 - 2 * BATCH] * 3 + [18] * 6
    assert len({params.seed for params, *_ in drawn}) == len(drawn)  # no noise is used twice
    parts = [tested[i] for i in (0, 3, 6, 9, 10, 11, 12, 13, 14)]
    for test, (params, _, _, draft_temperature) in zip(report.tests, parts, strict=True):
        assert {name: getattr(params, name) for name in test.setting.options} == test.setting.options
        assert (test.drafter, test.acceptance) == (params.drafter, params.acceptance)
        assert (test.tokens, params.ignore_eos) == (params.max_new_tokens, True)
        assert test.draft_temperature == draft_temperature
        assert test.full == (test.samples == 300)
    for first in (0, 3, 6):
        assert tuple(test.setting for test in report.tests[first : first + 3]) == SETTINGS
    assert [test.draft_temperature != 1 for test in report.tests] == [False, False, True] + [False] * 6
    assert len({test.prompt for test in report.tests}) > 1


def test_seeded_texts_have_seeds_of_their_own(noted: Noted) -> None:
    seeded = [call for call in noted.calls if isinstance(call[0], list) and not call[0][0].greedy]
    seeds: dict[int | None, set[tuple[tuple[int, ...], float]]] = {}
    for params, prompts, *_ in seeded:
        for own, prompt in zip(params, prompts, strict=True):
            assert own.rule == own.acceptance == "coupled"
            seeds.setdefault(own.seed, set()).add((tuple(prompt), own.temperature))
    assert len(seeds) == 2 * len(PROMPTS)
    assert all(len(uses) == 1 for uses in seeds.values())
    assert {len(prompts) for _, prompts, *_ in seeded} == {1, len(PROMPTS)}  # alone and in a batch
    kinds = [(i.acceptance, i.setting.penalised) for i in noted.report.identities]
    assert kinds == [(rule, penalised) for rule in (None, "coupled") for penalised in (False, True)]
    assert all(i.setting.temperature > 0 for i in noted.report.identities if i.acceptance)


@pytest.mark.heavy
@pytest.mark.parametrize("rule", ["speculative", "block", "coupled"])
def test_one_acceptance_rule_can_be_tested_alone(llm: LLM, rule: str) -> None:
    only = verify(llm, PROMPTS[:2], replace(FEW, acceptance=rule))
    assert [(test.acceptance, test.full) for test in only.tests] == [(rule, True)] * 3 + [(rule, False)] * 3
    assert [each.acceptance for each in only.identities] == [None] * 2 + ["coupled"] * 2 * (rule == "coupled")
    assert [bool(test.positions) for test in only.tests] == [rule == "speculative"] * 3 + [False] * 3


def test_a_draft_temperature_changes_q_alone_if_coupled(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused and single draft steps divide the logits alike, and a text depends on its seed alone."""
    params = SamplingParams(max_new_tokens=12, seed=4, ignore_eos=True, acceptance="coupled")

    def traced(temperature: float) -> tuple[list[int], list[list[int]], list[float]]:
        monkeypatch.setattr(engine_of(llm), "draft_temperature", temperature)
        [output] = llm.generate([PROMPTS[3]], params, trace=True)
        assert output.trace is not None
        drafts = [each.draft for each in output.trace]
        return output.token_ids, drafts, [q for each in output.trace for q in each.q]

    tokens, drafts, q = traced(1.0)
    sharper_tokens, sharper_drafts, sharper_q = traced(0.5)
    assert tokens == sharper_tokens and drafts != sharper_drafts
    assert np.mean(sharper_q) > np.mean(q) + 0.1
    monkeypatch.setattr(DraftModel, "fused_draft", lambda *args: None)
    _, single_drafts, single_q = traced(0.5)
    assert single_drafts == sharper_drafts
    assert single_q == pytest.approx(sharper_q, rel=1e-4)


# --- the default policy -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def auto(folders: tuple[Path, Path]) -> LLM:
    """All drafters at hand under policy auto, as programs load them by default."""
    return loaded(folders, policy="auto", plan="skip:mlp=0")


@pytest.mark.heavy
def test_under_auto_the_drafters_at_hand_draft_in_turns(auto: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `auto` decides is a matter of costs: here no draft pays, and all the same each drafter is tested."""
    policy: Any = engine_of(auto).policy
    policy.use(CostTable({1: {1: 1.0, 8: 100.0}}, {}))
    generate, drafters = LLM.generate, dict[tuple[bool, bool], set[str]]()

    def noting(self: LLM, prompts: Any, params: Any, *, n: int = 1, **more: Any) -> list[Output]:
        outputs = generate(self, prompts, params, n=n, **more)
        own = (params if isinstance(params, list) else [params])[0]
        if own.drafter == "auto":
            always = isinstance(engine_of(self).policy, DraftsAlways)
            names = {name for output in outputs for name in output.stats.drafts}
            drafters.setdefault((n > 1, always), set()).update(names)
        return outputs

    monkeypatch.setattr(LLM, "generate", noting)
    report = verify(auto, PROMPTS, replace(QUICK, samples=64))
    assert report.verdict != "failed"
    assert report.about["drafters"] == ["lookup", "draft-model", "layer-skip"]
    every = set(report.about["drafters"])
    assert drafters == {(False, False): set(), (False, True): every, (True, True): every}
    own = [TextRun("auto", batched, always) for always in (False, True) for batched in (False, True)]
    for identity in report.identities:
        assert set(identity.runs) == {*own, TextRun("none", True)}
    assert {test.drafter for test in report.tests} - {TARGET} == {"auto", "none"}
    assert engine_of(auto).policy is policy and TARGET not in engine_of(auto).drafters


@pytest.mark.heavy
@pytest.mark.parametrize("name", PLANTED)
def test_the_self_test_finds_each_planted_defect_under_auto(auto: LLM, name: str) -> None:
    assert verify(auto, PROMPTS, replace(QUICK, self_test=name)).found_planted


def test_under_auto_a_drafter_without_probabilities_has_a_stand_in(folders: tuple[Path, Path]) -> None:
    llm = loaded(folders, policy="auto", draft=None, drafter="lookup")
    report = verify(llm, PROMPTS, FEW)
    assert report.verdict != "failed" and report.about["drafters"] == ["lookup"]
    assert [test.drafter for test in report.tests[:3]] == ["lookup", "lookup", TARGET]


# --- defects are found ------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("name", PLANTED)
def test_the_self_test_finds_each_planted_defect(report_of: Reports, name: str) -> None:
    report = report_of(replace(QUICK, self_test=name))
    assert report.planted == name
    assert (report.found_planted, report.verdict) == (True, "failed")
    assert report.identities[0].passed  # no greedy test without penalties detects it


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["residual", "position", "coin"])
@pytest.mark.parametrize("options", [{"drafter": "lookup"}, {"draft": "target"}], ids=["lookup", "perfect"])
def test_a_stand_in_shows_defects(folders: tuple[Path, Path], name: str, options: dict[str, Any]) -> None:
    """The target rejects no token of a draft model that is the target itself, and nearly all of a poor one."""
    given = {"draft": folders[0]} if "draft" in options else options
    assert verify(loaded(folders, **given), PROMPTS, replace(QUICK, self_test=name)).found_planted


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["position", "coin"])
def test_a_defect_past_the_first_position_fails_its_positions_tests(report_of: Reports, name: str) -> None:
    report = report_of(replace(QUICK, self_test=name))
    positions = [each for test in report.tests for each in test.positions if not each.bonus]
    failing = {each.position for each in positions if not each.passed}
    assert 1 in failing and 0 not in failing


@pytest.mark.heavy
def test_noise_keyed_by_the_round_changes_seeded_texts_of_the_drafter_only(report_of: Reports) -> None:
    report = report_of(replace(QUICK, self_test="round-noise"))
    for identity in report.identities:
        assert identity.any_diverged(control=False) == (identity.acceptance == "coupled")
        assert not identity.any_diverged(control=True)
    assert all(test.passed for test in report.tests)  # the distribution is right
    found = [each for identity in report.identities for each in identity.divergences]
    assert all(each.seed is not None for each in found)


@pytest.mark.heavy
def test_penalties_that_do_not_follow_the_draft_change_penalised_texts(report_of: Reports) -> None:
    report = report_of(replace(QUICK, self_test="penalties"))
    for identity in report.identities:
        assert identity.setting.penalised or identity.passed
    assert report.identities[1].any_diverged(control=False)
    assert {test.setting.penalised for test in report.tests if not test.passed} == {True}


@pytest.mark.parametrize("name", PLANTED)
def test_the_defect_is_of_one_engine_and_removed(llm: LLM, folders: tuple[Path, Path], name: str) -> None:
    other = loaded(folders)

    def points() -> list[object]:
        engine = engine_of(llm)
        return [engine.accept, engine.noise, engine.round_inputs, sorted(engine.drafters)]

    sound = points()
    with planted(engine_of(llm), name):
        assert points() != sound
        params = SamplingParams(**PENALISED.options, seed=3, acceptance="coupled", max_new_tokens=20)
        drafted, plain = (
            other.generate(PROMPTS, params.replace(drafter=drafter)) for drafter in ("draft-model", "none")
        )
        assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert points() == sound
    with pytest.raises(RequestError):
        verify(llm, [[VOCABULARY]], replace(QUICK, self_test=name))
    assert points() == sound and engine_of(llm).draft_temperature == 1


@pytest.mark.heavy
def test_a_failed_request_does_not_count_as_finding_the_defect(report_of: Reports) -> None:
    report = report_of(replace(QUICK, self_test="residual"))
    first, *others = report.tests
    failing = replace(report, tests=(replace(first, errors=("out of memory",)), *others))
    assert (failing.found_planted, failing.verdict) == (False, "inconclusive")


def test_a_check_that_the_defect_cannot_break_does_not_count_as_finding_it(report_of: Reports) -> None:
    report = report_of(replace(QUICK, self_test="round-noise"))
    assert report.found_planted
    greedy, *others = report.identities
    broken = replace(greedy, divergences=report.identities[2].divergences[:1])
    assert not replace(report, identities=(broken, *others)).found_planted


def test_the_self_test_is_inconclusive_without_evidence_as_its_json_says(report_of: Reports) -> None:
    report = report_of(replace(FEW, self_test="residual"))
    assert (report.found_planted, report.verdict) == (False, "inconclusive")
    document = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert document["verdict"] == report.verdict
    first = {"drafter": "draft-model", "batched": False, "always": False}
    assert document["identities"][0]["runs"][0] == first
    assert [test["passed"] for test in document["tests"]] == [test.passed for test in report.tests]
    assert (document["planted"], document["found_planted"]) == ("residual", report.found_planted)


def sharpened_q(token: Tensor, q: Distribution, drawable: Tensor, finite: Tensor) -> Distribution:
    return replace(q, probs=None if q.probs is None else q.probs**3)


def fused_q_sharpened(fused_draft: Callable[..., Any]) -> Callable[..., Any]:
    def mutated(*args: Any) -> Any:
        fused = fused_draft(*args)
        return fused and replace(fused, probs=None if fused.probs is None else fused.probs**3)

    return mutated


def drawn_from_power_of_weights(power: int) -> Mutation:
    return lambda race: lambda ops, weights, keys: race(ops, weights.pow(power), keys)


EPSILON: Edit = (TorchVocabOps.residual, residual_with_epsilon(1e-3))
# (edit, the tests that must fail)
DEFECTS: dict[str, tuple[Edit, set[tuple[str, str]]]] = {
    "epsilon in the residual": (EPSILON, SPECULATIVE),
    "every draft accepted": ((accept._keeps, lambda _: lambda u, q, p: p >= 0), SPECULATIVE),
    "the token is not drawn from q": ((step_draws._token, drawn_from_power_of_q(3)), SPECULATIVE),
    "the q that is kept is not the q of the draw": ((_Steps.add, added(q=sharpened_q)), SPECULATIVE),
    "the q of a fused draft is not of the draw": ((DraftModel.fused_draft, fused_q_sharpened), SPECULATIVE),
    "coupled keeps all": ((TorchVocabOps.match_prefix, matches_differing), {("draft-model", "coupled")}),
    "plain sampling is wrong too": ((TorchVocabOps.gumbel_argmax, drawn_from_power_of_weights(4)), ALL),
    "top-p ignored in p and q": (
        (SamplingTable.of, lambda of: lambda *args, **more: replace(of(*args, **more), top_p=None)),
        set(),  # the expected distribution shares the transforms, which have tests of their own
    ),
}
SINGLE_STEPS = step_draws._token, _Steps.add  # a fused draft calls none of these


@pytest.mark.heavy
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_fails_just_the_affected_tests(llm: LLM, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    edit, affected = DEFECTS[name]
    plant(monkeypatch, edit)
    if edit[0] in SINGLE_STEPS:
        monkeypatch.setattr(DraftModel, "fused_draft", lambda *args: None)
    report = verify(llm, PROMPTS, MORE if affected == ALL else QUICK)  # controls are sampled less
    assert failed(report) == affected
    assert (report.verdict == "failed") == bool(affected)
    if edit is EPSILON:  # one sample of probability zero is enough
        truncated = [t for t in report.tests if t.setting.top_k and not t.passed]
        assert [(test.impossible > 0, test.p_value) for test in truncated] == [(True, 0.0)]


@pytest.mark.heavy
def test_a_self_test_with_failing_controls_is_inconclusive(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, (TorchVocabOps.gumbel_argmax, drawn_from_power_of_weights(8)))
    report = verify(llm, PROMPTS, replace(MORE, self_test="residual"))
    assert not report.found_planted


@pytest.fixture
def altered(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    """Changes the last prompt's output at temperature 0, given the parameters and the number of prompts."""

    def alter(change: Change) -> None:
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
def test_a_divergence_is_reported_with_a_margin(llm: LLM, altered: Any, drafter: str, batched: bool) -> None:
    ids = llm.generate([PROMPTS[-1]], SamplingParams(temperature=0, max_new_tokens=10, drafter="none"))
    [right] = [output.token_ids for output in ids]

    def change(params: SamplingParams, count: int, output: Output) -> Output:
        if (params.drafter, count > 1) != (drafter, batched):
            return output
        wrong = [*output.token_ids[:4], (output.token_ids[4] + 1) % VOCABULARY, *output.token_ids[5:]]
        return replace(output, token_ids=wrong)

    altered(change)
    report = verify(llm, PROMPTS, FEW)
    [found] = report.identities[0].divergences
    assert (found.prompt, found.run, found.position) == (4, TextRun(drafter, batched), 4)
    assert (found.expected, found.found) == (right[4], (right[4] + 1) % VOCABULARY)
    logits = PlainTarget(llm.loaded, 60).logits(PROMPTS[-1], right[:4])
    assert found.best == tuple(logits.argsort(descending=True)[:2].tolist())
    assert found.best[0] == right[4]
    assert found.logits == tuple(logits[list(found.best)].tolist())
    assert found.margin == found.logits[0] - found.logits[1] > 0
    assert report.doubts and report.verdict == "failed", "a failure outweighs weak evidence"
    assert report.identities[0].diverged(TextRun(drafter, batched)) == 1


def test_an_output_that_ends_early_diverges_at_its_end_and_a_tie_names_the_smallest_ids(
    llm: LLM, altered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered(lambda params, count, found: replace(found, token_ids=found.token_ids[: 3 if count > 1 else 9]))
    tied = torch.ones(VOCABULARY).index_fill(0, torch.tensor([0]), 0.0)
    monkeypatch.setattr(PlainTarget, "logits", lambda *given: tied)
    found = verify(llm, PROMPTS, FEW).identities[0].divergences
    assert [(d.position, d.found, d.expected is None) for d in found] == [(3, None, False)] * 2
    assert [(d.best, d.logits, d.margin) for d in found] == [((1, 2), (1.0, 1.0), 0.0)] * 2


def test_a_failed_request_fails_the_verification(llm: LLM, altered: Any) -> None:
    altered(lambda params, count, output: replace(output, error="no room" if count > 1 else None))
    report = verify(llm, PROMPTS, FEW)
    assert report.identities[0].errors == ("prompt 4, none: no room", "prompt 4, draft-model: no room")
    assert report.verdict == "failed"


def test_a_failed_sample_fails_its_test(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = LLM.generate

    def failing(self: LLM, prompts: Any, params: Any, *, n: int = 1, **more: Any) -> list[Output]:
        outputs = generate(self, prompts, params, n=n, **more)
        return (
            [replace(o, error="no room") for o in outputs] if n > 1 and params.rule == "coupled" else outputs
        )

    monkeypatch.setattr(LLM, "generate", failing)
    report = verify(llm, PROMPTS, replace(QUICK, samples=64))
    assert failed(report) == {("draft-model", "coupled")}
    assert {test.errors for test in report.tests if not test.passed} == {("no room",)}


@pytest.mark.heavy
def test_a_wrong_position_after_a_draft_diverges(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_off(engine: Any, inputs: RoundInputs, draft: Any, starts: list[int], options: Any) -> None:
        for row, sequence in enumerate(inputs.sequences):
            starts[row] += bool(sequence.rounds and sequence.rounds[-1].drafted)

    plant(monkeypatch, (Engine._verify, verified(one_off)))
    report = verify(llm, PROMPTS, FEW)
    greedy = report.identities[0]
    assert greedy.diverged(TextRun("draft-model", False)) and not greedy.diverged(TextRun("none", True))


# --- weak evidence ----------------------------------------------------------------------------------


@pytest.mark.heavy
def test_positions_without_tokens_are_inconclusive(report_of: Reports) -> None:
    """The joint tests reach what is asked for, but a position of which no test saw enough is no pass."""
    report = report_of(MORE)
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


@pytest.mark.heavy
def test_corrections_that_no_test_counts_are_no_evidence(report_of: Reports) -> None:
    report = report_of(MORE)
    tests = tuple(
        replace(test, positions=tuple(replace(each, corrections=0) for each in test.positions))
        for test in report.tests
    )
    doubt = replace(report, tests=tests).doubts[-1]
    assert doubt.startswith("hardly any draft was corrected at position 1 and 2 and 3;")
    assert replace(report, tests=tests).best_by_position == []


@pytest.mark.heavy
def test_no_drafts_are_inconclusive(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lookup, "propose", lambda self, requests: [[] for _ in requests])
    report = verify(loaded(folders, drafter="lookup"), PROMPTS, MORE)
    assert report.verdict == "inconclusive"
    assert [doubt.split(";")[0] for doubt in report.doubts] == [
        "nothing was drafted at temperature 0",
        "nothing was drafted in 5 of the chi-square tests",
    ]


def chosen(llm: LLM, monkeypatch: pytest.MonkeyPatch, drafts: dict[int, str]) -> list[int]:
    """Return the prompts in the order of choice, given the token that is drafted for some: its likelihood."""
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
    cases = choose_cases(Sampler(llm, 5), plain, PROMPTS, params, 5, lambda done, total: None)
    return [case.number for case in cases]


def test_prompts_of_mixed_acceptance_and_entropy_lead(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
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


# --- options and records ----------------------------------------------------------------------------


def test_a_lossy_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="acceptance is 'bild', which is not lossless"):
        VerifySettings(acceptance="bild")  # type: ignore[arg-type]


def test_wrong_prompts_are_refused(llm: LLM) -> None:
    for empty in ([], [[]], [[1], []]):
        with pytest.raises(ConfigError, match="a prompt is empty, or there are none"):
            verify(llm, empty, QUICK)
    with pytest.raises(RequestError, match="outside the model's vocabulary"):
        verify(llm, [[VOCABULARY]], QUICK)


def test_long_prompts_are_truncated_on_request(llm: LLM) -> None:
    report = verify(llm, [[1, *[4, 5] * 40], *PROMPTS], FEW, truncate="left")
    assert report.identities[0].passed and report.identities[0].prompts == 6


@pytest.mark.heavy
def test_progress_reaches_the_end_of_every_stage(llm: LLM) -> None:
    seen: dict[str, tuple[int, int]] = {}
    few = FEW
    verify(llm, PROMPTS, few, progress=lambda stage, done, total: seen.update({stage: (done, total)}))
    assert list(seen) == [
        *(f"Texts {i} of 4" for i in range(1, 5)),
        "Choosing prompts",
        *(f"Chi-square test {i} of 9" for i in range(1, 10)),
    ]
    assert all(done == total for done, total in seen.values())
