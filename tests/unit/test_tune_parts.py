"""Parts of a search: calibration texts and their cache, ranked plans, costs, and the page."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import foredraft
from foredraft import LLM, SamplingParams, user_cache
from foredraft.bench.bench_records import MAX_REPEATED, Spread
from foredraft.bench.settings import silent
from foredraft.cli.bench import tune_lines
from foredraft.drafters.lookup import repeated
from foredraft.drafters.plan_files import Skips, model_hash
from foredraft.drafters.strict_records import as_record
from foredraft.errors import ConfigError
from foredraft.model.runner import DraftInputs
from foredraft.model.source import ModelSource
from foredraft.model.spec import Plan
from foredraft.pages.report_page import CROSS
from foredraft.pages.training import tuning_page as page
from foredraft.tune import teacher_forced as calibration
from foredraft.tune import tune_records
from foredraft.tune.search import clasp, greedy, seed_plans, skips_of
from foredraft.tune.teacher_forced import (
    MIN_TOKENS,
    CalibrationTexts,
    TeacherForced,
    cached_texts,
    calibration_prompt_count,
    hold_out,
    new_tokens_per_prompt,
    texts_key,
    write_calibration_texts,
)
from foredraft.tune.tune_records import (
    ExitCosts,
    Finalist,
    PlanCosts,
    Trial,
    TuneReport,
    measure_exit_costs,
    measure_plan_costs,
)
from tests.support.checkpoints import save_checkpoint

# Sub-layers whose weights are set to zero, so that they add nothing, by their layer.
IDLE = {"self_attn.o_proj": 1, "mlp.down_proj": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("idle"), eos_token_id=None, initializer_range=0.12)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, layer in IDLE.items():
        weights[f"model.layers.{layer}.{name}.weight"].zero_()
    save_file(weights, file, {"format": "pt"})
    return folder


def loaded(folder: Path, **options: Any) -> LLM:
    return foredraft.load(folder, drafter="none", max_batch=4, max_length=300, **options)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return loaded(folder)


PROMPTS = [[(5 * number + 7 * i) % 90 + 5 for i in range(8 + number)] for number in range(12)]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_calibration_texts_are_the_models_own_and_reproducible(llm: LLM, temperature: float) -> None:
    found = write_calibration_texts(llm, PROMPTS, 200, temperature, silent)
    assert found.tokens >= 200
    assert found.tokens == sum(len(text.ids) - text.prompt_length for text in found.texts)
    assert found == write_calibration_texts(llm, PROMPTS, 200, temperature, silent)
    for text in found.texts:
        prompt, new = text.ids[: text.prompt_length], text.ids[text.prompt_length :]
        assert [*prompt] in PROMPTS and repeated(new) <= MAX_REPEATED
        if temperature == 0:
            [output] = llm.generate([*prompt], SamplingParams(temperature=0, max_new_tokens=text.new_tokens))
            assert tuple(output.token_ids) == new


def test_samples_of_one_prompt_differ(llm: LLM) -> None:
    found = write_calibration_texts(llm, PROMPTS[:2], 700, 1.0, silent)
    assert len(found.texts) > 2 and len({text.ids for text in found.texts}) == len(found.texts)


@pytest.mark.heavy
def test_a_search_works_with_the_tokens_that_the_prompts_give(llm: LLM) -> None:
    few = write_calibration_texts(llm, PROMPTS, 99_999, 0.9, silent)
    assert MIN_TOKENS <= few.tokens < 99_999
    said = "tokens is 9999, but the prompts give .* without repetition; give more prompts"
    with pytest.raises(ConfigError, match=said):
        write_calibration_texts(llm, PROMPTS[:1], 9999, 0.0, silent)


def test_calibration_texts_are_cut_before_they_loop(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = llm.generate

    def looping(prompts: list[list[int]], params: list[SamplingParams]) -> list[foredraft.Output]:
        made = generate(prompts, params)
        return [replace(one, token_ids=[*range(20), *[3, 4, 5, 6] * 11]) for one in made]

    monkeypatch.setattr(llm, "generate", looping)
    for text in write_calibration_texts(llm, PROMPTS, 100, 0.0, silent).texts:
        assert 20 < text.new_tokens < 64 and repeated(text.ids[text.prompt_length :]) <= MAX_REPEATED


def test_held_out_prompts_are_not_used_for_calibration() -> None:
    calibration, held_out = hold_out(PROMPTS)
    assert sorted(calibration + held_out) == sorted(PROMPTS) and len(held_out) == 6
    assert hold_out(PROMPTS) == (calibration, held_out)
    for count in range(2, len(PROMPTS)):
        assert len(hold_out(PROMPTS[:count])[0]) == calibration_prompt_count(count)
    sizes = [len(hold_out([[number] for number in range(count)])[1]) for count in range(2, 34)]
    assert sizes[:11] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6] and sizes[11:22] == [6] * 11
    assert sizes[22:] == [6, 6, 7, 7, 7, 7, 8, 8, 8, 8]
    assert [new_tokens_per_prompt(4096, count) for count in (1, 40, 1000)] == [256, 205, 64]


@pytest.mark.parametrize("numbers", [[1, 1, 1, 2, 2, 2, 3, 3], [5, 4] * 4, [*range(9), 7, 7, 7, 8]], ids=str)
def test_equal_prompts_are_not_on_both_sides(numbers: list[int]) -> None:
    calibration, held_out = hold_out([[number] for number in numbers])
    assert sorted(calibration + held_out) == [[number] for number in sorted(set(numbers))]
    assert len(calibration) == calibration_prompt_count(len(set(numbers)))


@pytest.fixture(scope="module")
def teacher_forced(llm: LLM) -> TeacherForced:
    runner = llm.loaded.runner
    return TeacherForced(runner, write_calibration_texts(llm, PROMPTS, 200, 0.0, silent), 4)


def test_rankings_begin_with_sub_layers_that_add_nothing(teacher_forced: TeacherForced) -> None:
    idle = [2 * 1, 2 * 2 + 1]
    ranked = greedy(teacher_forced)
    assert sorted(ranked) == list(range(6)) and sorted(ranked[:2]) == idle
    programmed = clasp(teacher_forced, 5)
    assert list(map(len, programmed)) == list(range(6))
    assert list(programmed[2]) == idle and skips_of(programmed[1]) in (Skips((1,)), Skips((), (2,)))
    assert all(list(chosen) == sorted(set(chosen)) for chosen in programmed)


def test_numbers_of_sub_layers_convert_to_skips() -> None:
    assert skips_of([5, 0, 3, 2]) == Skips((0, 1), (1, 2))


Seconds = Callable[[Plan], float]
V = {2: 1.1, 3: 1.2, 4: 1.3}
START = 0.07


def fake_turns(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[dict[Any, Any]], Any]) -> None:
    """Let works take these seconds in turns, instead of running them."""

    class Turns:
        def __init__(self, works: dict[Any, Any], *_: object, **__: object) -> None:
            self.seconds = seconds(works)

        def take(self, **_: object) -> None:
            return None

    monkeypatch.setattr(tune_records, "TimedTurns", Turns)


def fake_timings(monkeypatch: pytest.MonkeyPatch, seconds: Seconds, v: dict[int, float] = V) -> None:
    """Fake a machine whose plain step takes 2 s and 3 s by turns, with all else in proportion.

    In plain steps, a draft takes START, and `seconds(plan)` for each of its steps."""

    def timed(works: dict[Any, Any]) -> dict[Any, list[float]]:
        found = {}
        for key in works:
            plan, length = key if key != "step" else (key, 0)
            draft = START + length * seconds(plan) if isinstance(plan, Plan) else 0.0
            rows = length + 1 if isinstance(plan, Plan) else length
            own = 1.0 if key == "step" else draft + v[rows]
            found[key] = [2 * own, 3 * own, 2 * own, 3 * own]
        return found

    fake_turns(monkeypatch, timed)
    monkeypatch.setattr(tune_records, "measure_exit_costs", lambda *_: None)


def test_costs_are_attributed_to_their_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "gemma2", "gemma2", eos_token_id=None)
    llm = foredraft.load(folder, drafter="none", max_batch=1, max_length=64)
    windows = llm.loaded.spec.windows
    assert len(set(windows)) == 2

    def seconds(plan: Plan) -> float:
        attention = sum(
            (0.2 if window is None else 0.1) * runs
            for window, runs in zip(windows, plan.attention, strict=True)
        )
        return 0.03 + attention + 0.15 * sum(plan.mlp)

    fake_timings(monkeypatch, seconds)
    found = measure_plan_costs(llm.loaded, 20, 3, 0.0)
    assert found.step_seconds == 2.5 and found.verifying == pytest.approx((1.1, 1.2, 1.3))
    assert (found.start, found.fixed, found.together) == pytest.approx((START, 0.03, 0.0))
    for skips_text in ("skip:none", "skip:attn=0-1/mlp=3", "skip:attn=0-3/mlp=0-3", "skip:attn=2"):
        skips = Skips.parse(skips_text)
        c = seconds(skips.plan(4))
        assert found.step(skips.plan(4)) == pytest.approx(c)
        want = [tau / (START + k * c + V[k + 1]) for k, tau in enumerate((1.8, 2.5, 3.0), start=1)]
        assert found.speedups(skips, np.array([1.8, 2.5, 3.0])) == pytest.approx(want)


@pytest.mark.parametrize("mlp_cost", [1.0, 1.5])
def test_together_they_may_cost_more(llm: LLM, monkeypatch: pytest.MonkeyPatch, mlp_cost: float) -> None:
    """Exact if nothing or everything runs, and close in between; mlp_cost: of an MLP, in attentions."""

    def seconds(plan: Plan) -> float:
        share = (sum(plan.attention) + mlp_cost * sum(plan.mlp)) / (3 + 3 * mlp_cost)
        return 0.03 + 0.6 * share + 0.36 * share**2

    fake_timings(monkeypatch, seconds)
    found = measure_plan_costs(llm.loaded, 20, 3, 0.0)
    assert found.fixed == pytest.approx(0.03) and found.together == pytest.approx(0.36, rel=0.03)
    for skips_text, error in (
        ("skip:none", 1e-9),
        ("skip:attn=0-2/mlp=0-2", 1e-9),
        ("skip:attn=0-1/mlp=0-1", 0.03),
        ("skip:attn=0,2/mlp=1", 0.03),
        ("skip:mlp=1", 0.03),
    ):
        plan = Skips.parse(skips_text).plan(3)
        assert found.step(plan) == pytest.approx(seconds(plan), rel=error), skips_text


def test_costs_stay_plausible_under_noise(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_timings(monkeypatch, lambda plan: 0.1, {2: 0.9, 3: 2.0, 4: 1.5, 5: 2.5})
    found = measure_plan_costs(llm.loaded, 20, 4, 0.0)
    assert found.verifying == (1.0, 1.5, 1.5, 2.5), "v(n) is at least 1 and never falls"
    assert found.fixed == pytest.approx(0.1) and found.step(Plan.full(3)) == pytest.approx(0.1)
    assert tune_records._line(0.9, 0.6, 3) == pytest.approx((0.3, 0.1)), "at most half is fixed"
    fake_timings(monkeypatch, lambda plan: -1.0 if any(plan.mlp) else 0.2)
    found = measure_plan_costs(llm.loaded, 20, 3, 0.0)
    assert min(found.mlp, *found.attention, found.together, found.start) >= 0 and found.fixed > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_costs_of_real_passes_survive_json(llm: LLM, temperature: float) -> None:
    found = measure_plan_costs(llm.loaded, 20, 3, temperature, repeats=2)
    assert found.step_seconds > 0 and len(found.verifying) == 3 and len(found.attention) == 3
    assert found.step(Plan.full(3)) >= 0  # a disturbed machine can hide a draft of a tiny model
    assert found.exit is not None and len(found.exit.verifying) == 3
    assert as_record(PlanCosts, json.loads(json.dumps(asdict(found)))) == found


def test_measuring_costs_reports_every_turn(llm: LLM) -> None:
    calls: list[tuple[Any, ...]] = []
    measure_plan_costs(llm.loaded, 20, 3, 0.0, lambda *given: calls.append(given[:3]), 2)
    turns = 3 + 2  # forwards and plans, then exits; one turn of each warms up
    assert calls == [("costs", done, turns) for done in range(turns + 1)]


def test_seed_plans_report_their_work(teacher_forced: TeacherForced, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, sub_layers = list[tuple[Any, ...]](), 2 * 3
    forward, layers = teacher_forced.runner.forward, []

    def watched(*given: Any, **named: Any) -> Any:
        layers.append(named["stop"] - named["resume"].depth)
        return forward(*given, **named)

    monkeypatch.setattr(teacher_forced.runner, "forward", watched)
    seed_plans(teacher_forced, lambda *given: calls.append(given[:3]))
    # a pass through a single layer runs one of its sub-layers
    ran = sum(2 * count if count == 3 else 1 for count in layers)
    steps = [done for _, done, _ in calls]
    assert {(stage, total) for stage, _, total in calls} == {("rank", ran)}
    assert steps[0] == 0 and steps[-1] == ran and steps == sorted(set(steps))
    assert len(steps) == 1 + (1 + sub_layers) + sub_layers


def test_the_cost_of_an_exit_is_linear_in_its_layer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def c(exit: int) -> float:
        return 0.2 + 0.2 * exit

    def v(exit: int, rows: int) -> float:
        return 1 + 0.1 * rows - 0.02 * exit * rows

    def timed(works: dict[Any, Any]) -> dict[Any, list[float]]:
        verify = {("verify", exit, rows): [2 * v(exit, rows)] * 3 for exit in (1, 2) for rows in (2, 3, 4)}
        rounds = {("round", exit): [2 * (3 * c(exit) + v(exit, 4))] * 3 for exit in (1, 2)}
        assert works.keys() == {"step", *verify, *rounds}
        return {"step": [2.0] * 3, **verify, **rounds}

    fake_turns(monkeypatch, timed)
    found = measure_exit_costs(llm.loaded, 20, 3, 3, int)
    for exit in (1, 2, 5):
        step, verifying = found.at(exit)
        assert step == pytest.approx(c(exit))
        assert verifying == pytest.approx([v(exit, rows) for rows in (2, 3, 4)])
    costs = PlanCosts(1.0, 0.05, (0.1,) * 3, 0.13, (1.2, 1.3, 1.4), found)
    taus = np.array([1.8, 2.5, 3.0])

    def speedups(step: float, verifying: Sequence[float]) -> Any:
        return pytest.approx([tau / (k * step + verifying[k - 1]) for k, tau in enumerate(taus, start=1)])

    assert costs.speedups(Skips(exit=2), taus) == speedups(c(2), [v(2, rows) for rows in (2, 3, 4)])
    cheap = replace(costs, exit=ExitCosts((0.0, 0.0), ((0.1, 0.0),) * 3))
    own = 0.05 + 0.46
    assert cheap.speedups(Skips(exit=2), taus) == speedups(own, (1, 1, 1)), "no cheaper than a call"
    assert costs.speedups(Skips((2,), (2,)), taus) == speedups(own, costs.verifying)


@pytest.mark.parametrize("exit", [1, 2])
def test_an_exit_is_timed_as_the_engine_runs_it(llm: LLM, exit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps run the layers below the exit, in one call of the kernels or each at a batch-invariant shape; the verifying
    pass resumes there and knows the states of all columns but the last."""
    runner = llm.loaded.runner
    forward, calls = runner.forward, []

    def seen(cache: Any, tokens: Any, starts: Any, *, resume: Any = None, **options: Any) -> Any:
        known = None if resume is None else (resume.depth, resume.known, resume.hidden.shape[1])
        calls.append((tokens.shape[1], known, options.get("plan"), options.get("invariant", True)))
        return forward(cache, tokens, starts, resume=resume, **options)

    monkeypatch.setattr(runner, "forward", seen)
    works: dict[Any, Any] = {}
    fake_turns(monkeypatch, lambda given: works.update(given) or {key: [1.0] for key in given})
    measure_exit_costs(llm.loaded, 20, 2, 1, int)
    verifying = (3, (exit, [2], 3), None, True)
    if runner.by_kernels:
        drafts: list[Any] = []
        draft = runner.draft
        monkeypatch.setattr(runner, "draft", lambda *a, **more: drafts.append(more) or draft(*a, **more))
        works["round", exit]()
        assert calls == [verifying] and [more["exit"] for more in drafts] == [exit]
        calls.clear()
    monkeypatch.setattr(runner, "draft", lambda *_, **__: None)
    works["round", exit]()
    plan = Skips(exit=exit).plan(3)
    assert calls == [(1, None, plan, True), (1, None, plan, True), verifying]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fused", [True, False])
def test_a_draft_is_timed_as_the_engine_makes_it(
    llm: LLM, temperature: float, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is one fused call where the runner has it, and else one step per token."""
    runner = llm.loaded.runner
    calls, steps, forward = list[tuple[list[int], bool]](), list[int](), runner.forward

    def draft(cache: Any, inputs: DraftInputs, **more: Any) -> Any:
        calls.append((inputs.lengths, inputs.sampling is not None))
        return object() if fused else None

    def stepped(*given: Any, invariant: bool = True, **options: Any) -> Any:
        steps.extend([] if invariant else [1])
        return forward(*given, invariant=invariant, **options)

    monkeypatch.setattr(runner, "draft", draft)
    monkeypatch.setattr(runner, "forward", stepped)
    monkeypatch.setattr(tune_records, "measure_exit_costs", lambda *_: None)
    measure_plan_costs(llm.loaded, 20, 3, temperature, repeats=2)
    assert {most for [most], _ in calls} == {1, 3} and {drawn for _, drawn in calls} == {temperature > 0}
    assert len(steps) == (0 if fused else sum(most for [most], _ in calls))


def report(**changes: object) -> TuneReport:
    spread = Spread(1.3, 1.2, 1.4, 8)
    trials = [Trial(n, f"skip:attn={n % 3}", 1 + n / 10, 2, (1.5, 2.0), None) for n in range(6)]
    trials[0] = replace(trials[0], origin="nothing")
    finalist = Finalist(
        "skip:attn=0,2/mlp=1", 2, 1.5, 2.5, 2.51, 0.8, 0.4, spread, True, 8, Spread(0.1, 0, 0.2, 8), 8, 2.63
    )
    made = TuneReport(
        "some/model", "ab" * 32, 3, "a study", "memory", {"trials": 6, "dtype": "float32", "timeout": None},
        {"cpu": "a cpu"}, 4097, PlanCosts(1e-3, 0.05, (0.1,) * 3, 0.12, (1.0, 1.1)), tuple(trials),
        {"attention.0": 0.7, "mlp.1": 0.3}, (finalist,), 0, ("plan.json",), {"search": 12.0},
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def test_the_page_shows_the_records_and_loads_nothing() -> None:
    made = page(report())
    assert made == page(report())
    assert "skip:attn=0,2/mlp=1 runs at 1.30 × plain decoding" in made
    assert "every token equals plain decoding&#39;s" in made
    assert "<td>1.30<small>1.20–1.40, 8 of 8 faster</small></td>" in made and "✓ same in every run" in made
    heads = re.findall(r'<th scope="col">(.*?)</th>', made)
    cells = re.findall(r"<td[^>]*>([^<]*)", made)
    row = dict(zip(heads[1:], cells, strict=False))  # the first column is the plan
    assert (row["τ"], row["predicted τ"], row["trial&#39;s τ"]) == ("2.51", "2.50", "2.63")
    assert re.findall(r'<h2 id="(\w+)"', made) == ["history", "layers", "importance"]
    assert "<script" not in made and not re.search(r'(?:src|href)="(?!#)', made)


def test_a_report_doubts_the_speeds_of_a_loaded_machine() -> None:
    quiet, busy = (report(machine={"cores": 2, "highest_load": load}) for load in (2.4, 2.6))
    assert quiet.doubts == () and tune_lines(quiet)[0].startswith("some/model")
    [doubt] = busy.doubts
    assert "load rose to 2.6 on 2 cores" in doubt
    assert tune_lines(busy)[0] == f"WARNING: {doubt}" and doubt in page(busy) and doubt not in page(quiet)


def test_the_page_says_why_no_plan_was_kept() -> None:
    slow = replace(report().finalists[0], speedup=Spread(0.9, 0.8, 1.0, 8))
    html = page(report(winner=None, finalists=(slow,)))
    assert "No plan was kept. skip:attn=0,2/mlp=1: it is not faster than plain decoding." in html
    none = page(report(winner=None, finalists=(), importance={}, finished=False))
    assert "No plan was timed." in none and "Interrupted" in none
    assert re.findall(r'<h2 id="(\w+)"', none) == ["history", "layers"]
    wrong = replace(report().finalists[0], identical=False)
    assert '<td class="bad">✗ differ</td>' in page(report(winner=None, finalists=(wrong,)))


def test_the_plot_of_layers_has_a_cross_for_each_skipped_sub_layer() -> None:
    shown = replace(report().finalists[0], skips="skip:attn=0,2")
    plot = re.search(r'id="layers".*?</figure>', page(report(finalists=(shown,))), re.DOTALL)
    assert plot is not None and ". skip:attn=0,2." in plot[0]
    assert plot[0].count(CROSS) == 2 and plot[0].count("<rect") == 6


# --- cached calibration texts: when they are reused, and when replaced ----------------------------


TOKENS, FEW = 100, PROMPTS[:4]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Searches:
    def __init__(self, folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.llm, self.calls = folder, llm, 0
        self.given: dict[str, Any] = {"prompts": FEW, "tokens": TOKENS, "temperature": 0.0}
        generate = llm.generate

        def counted(*given: Any, **named: Any) -> Any:
            self.calls += 1
            return generate(*given, **named)

        monkeypatch.setattr(llm, "generate", counted)

    def key(self, **changes: Any) -> dict[str, Any]:
        return texts_key(
            ModelSource(self.folder), model_hash(self.folder), self.llm.loaded, **self.given | changes
        )

    def file(self) -> Path:
        path = user_cache.keyed_path(calibration.KIND, self.key())
        assert path is not None
        return path

    def texts(self, **changes: Any) -> tuple[CalibrationTexts, bool]:
        before, given = self.calls, self.given | changes
        found = cached_texts(
            self.key(**changes),
            self.llm.loaded.spec.vocab_size,
            lambda: write_calibration_texts(self.llm, **given, progress=lambda *_: None),
        )
        return found, self.calls > before


@pytest.fixture
def searches(folder: Path, llm: LLM, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Searches:
    return Searches(folder, llm, monkeypatch)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_written_once(searches: Searches, temperature: float, cache: Path) -> None:
    first, was_written = searches.texts(temperature=temperature)
    assert was_written and len(list((cache / "texts").iterdir())) == 1, "there is no temporary file"
    assert searches.texts(temperature=temperature) == (first, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.5},
        {"prompts": FEW[:3]},
        {"prompts": FEW[::-1]},
        {"prompts": [[*FEW[0], 9], *FEW[1:]]},
        {"tokens": TOKENS - 1},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_other_arguments_have_texts_of_their_own(searches: Searches, changes: dict[str, Any]) -> None:
    searches.texts()
    assert searches.texts(**changes)[1] and not searches.texts()[1] and not searches.texts(**changes)[1]


@pytest.mark.heavy
def test_texts_depend_on_the_version_the_dtype_and_the_weights(
    searches: Searches, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches.texts()
    with monkeypatch.context() as patch:
        patch.setattr(foredraft, "__version__", "0.0.1")
        assert searches.texts()[1]
    for options in ({"dtype": "bfloat16"}, {"kernels": False}):
        assert Searches(folder, loaded(folder, **options), monkeypatch).texts()[1], options
    weights = folder / "model.safetensors"
    times = weights.stat()
    # as if the weights were trained further: the same shapes and sizes
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert searches.texts()[1]
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not searches.texts()[1]


def change_file(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    def changed(text: str) -> str:
        content = json.loads(text)
        change(content["document"])
        content["digest"] = user_cache._digest_of(content["document"])
        return json.dumps(content)

    return changed


BROKEN: dict[str, Callable[[str], str]] = {
    "of other circumstances": lambda text: text.replace('"foredraft": "', '"foredraft": "9'),
    "no texts": change_file(lambda kept: kept.pop("texts") and kept.update(texts=[])),
    "too few tokens": change_file(lambda kept: kept["texts"].pop()),
    "a text of no new token": change_file(lambda kept: kept["texts"].append([FEW[0], len(FEW[0])])),
    "an unknown token": change_file(lambda kept: kept["texts"][0][0].append(10**6)),
    "a negative token": change_file(lambda kept: kept["texts"][0][0].append(-1)),
    "no token": change_file(lambda kept: kept["texts"][0][0].append(2.5)),
    "another prompt": change_file(lambda kept: kept["texts"][0][0].insert(0, 3)),
    "a start from the end": change_file(lambda kept: kept["texts"].append([[*FEW[0], 3, 4], -2])),
    "no start": change_file(lambda kept: kept["texts"][0].__setitem__(1, None)),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_an_invalid_file_is_replaced(searches: Searches, broken: str) -> None:
    first, _ = searches.texts()
    file = searches.file()
    whole = file.read_text()
    assert change_file(lambda content: None)(whole) == whole.strip(), "without a change it stays the same"
    file.write_text(BROKEN[broken](whole))
    assert searches.texts() == (first, True)
    assert file.read_text() == whole
    assert searches.texts() == (first, False)


def test_incomplete_texts_are_not_cached(searches: Searches, cache: Path) -> None:
    def interrupted() -> CalibrationTexts:
        write_calibration_texts(searches.llm, **searches.given, progress=lambda *_: None)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_texts(searches.key(), searches.llm.loaded.spec.vocab_size, interrupted)
    assert not (cache / "texts").exists()
    assert searches.texts()[1]
