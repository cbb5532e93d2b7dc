"""Whole benchmarks of the demo pair and of tiny checkpoints: the report, and early ends."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft import ConfigError, RequestError, SamplingParams, load
from foredraft.bench import machine_record as machine
from foredraft.bench.bench_records import BenchReport, Cost, ForwardCosts, Spread, TurnCount
from foredraft.bench.bench_run import bench
from foredraft.bench.contender import ForedraftContender, Timing
from foredraft.bench.figures import ceiling
from foredraft.bench.hugging_face import Generate
from foredraft.bench.measurement import CostMeter
from foredraft.bench.settings import BenchSettings
from foredraft.bench.workload import Workload
from foredraft.decode.engine import Engine
from foredraft.decode.stats import Stats
from foredraft.drafters.plan_files import write_plan
from foredraft.profiling.others import Load, read_counters
from tests.support import checkpoints
from tests.support.plans import plan_of

FOREDRAFT = ("plain", "lookup", "draft-model")
TEXTS = Workload("texts", ("def accept", "Viktor", "the target checks all"))


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "BYTES", 2**20)
    monkeypatch.setattr(machine, "TRIES", 2)
    monkeypatch.setattr("foredraft.bench.measurement.REPEATS", 2)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = checkpoints.save_pair(tmp_path_factory.mktemp("models"))
    return {"model": str(folder / "big"), "draft": str(folder / "small"), "device": "cpu"}


@pytest.mark.heavy
def test_the_report_is_complete(pair: dict[str, Any]) -> None:
    """The target drafts for itself, so that drafts are accepted."""
    seen: list[tuple[str, int, int]] = []
    report = bench(
        [Workload("code", TEXTS.prompts[:2])],
        BenchSettings(methods=(*FOREDRAFT, "transformers"), new_tokens=8, repeats=2, batch=(2, 1)),
        **pair | {"draft": pair["model"]},
        dtype="bfloat16",
        policy="fixed",
        max_draft=3,
        progress=lambda *at: seen.append(at),
    )
    assert report.finished and not report.notes
    assert [(row.batch, row.contender) for row in report.rows] == [
        (batch, name) for batch in (1, 2) for name in (*FOREDRAFT, "transformers")
    ]
    for row in report.rows:
        assert row.exactness is not None and row.exactness.prompts == row.prompts == 2
        assert row.exactness.holds or row.peer  # another program may round differently
        assert row.tokens_per_second is not None and row.speedup is not None
        assert row.tokens_per_second.count == row.speedup.count == row.counted // row.batch
        assert row.peak_memory is not None
        assert (row.over_single is None) == (row.batch == 1)
        assert (row.round_time is None) == row.peer == (row.overhead is None)
        assert (row.drafting is None) == (row.contender not in ("lookup", "draft-model"))
    drafted = report.rows[2].drafting
    assert drafted is not None and 0 < drafted.mean_draft_length <= 3 and drafted.mean_accepted_length > 1
    time = report.rows[2].round_time
    assert time is not None and min(time.draft, time.verify, time.rest) > 0
    assert report.options["max_draft"] == 3 and report.options["workloads"] == {"code": 2}
    assert {model.role: model.dtype for model in report.models} == {"target": "bfloat16", "draft": "bfloat16"}
    assert [made.batch for made in report.costs] == [1, 2]
    assert set(report.costs[0].drafting) == {"lookup", "prediction", "draft-model"}
    assert report.machine["transformers"]
    assert again(report) == report
    assert seen[-1] == ("code, batch 2", 2, 2)
    assert "prefill" not in {stage for stage, _, _ in seen}  # drawing within a run would slow it down


def again(report: BenchReport) -> BenchReport:
    return BenchReport.from_dict(json.loads(json.dumps(report.as_dict(), allow_nan=False)))


def test_contenders_take_turns_in_both_orders(pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    other_programs(monkeypatch, 0.0)
    order: list[tuple[str, int, int]] = []
    run = ForedraftContender.run

    def recording(self: ForedraftContender, prompts: list[list[int]], new_tokens: int) -> Timing:
        order.append((self.name, len(prompts), prompts[0][1]))
        return run(self, prompts, new_tokens)

    monkeypatch.setattr(ForedraftContender, "run", recording)
    bench([TEXTS], BenchSettings(methods=("lookup",), new_tokens=2, repeats=3), **pair)
    texts, warm, runs, parts = order[:3], order[3:5], order[5:23], order[23:]
    assert [name for name, _, _ in texts] == ["plain"] * 3
    assert [name for name, _, _ in warm] == ["plain", "lookup"]
    alternating = ["plain", "lookup", "lookup", "plain", "plain", "lookup"]
    assert [name for name, _, _ in runs] == alternating * 3
    assert [first for _, _, first in runs] == [first for _, _, first in texts for _ in range(6)]
    assert [name for name, _, _ in parts] == ["plain"] * 3 + ["lookup"] * 3


def other_programs(monkeypatch: pytest.MonkeyPatch, *others: float | None) -> None:
    """Let other programs use so many CPUs during the timed runs, in order; the last number goes on."""
    loads = list(others)

    class Pretended:
        def load(self) -> Load | None:
            used = loads.pop(0) if len(loads) > 1 else loads[0]
            return None if used is None else Load(10.0, used)

    monkeypatch.setattr("foredraft.bench.measurement.Watch", Pretended)


class Wrong:
    """Alters the third token of every text of lookup in chosen runs, counted from 1; the first one warms up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, runs: range) -> None:
        run, self.count = ForedraftContender.run, 0

        def altering(contender: ForedraftContender, prompts: list[list[int]], new_tokens: int) -> Timing:
            timing = run(contender, prompts, new_tokens)
            self.count += contender.name == "lookup"
            if contender.name == "plain" or self.count not in runs:
                return timing
            return replace(timing, tokens=tuple((*ids[:2], ids[2] ^ 1, *ids[3:]) for ids in timing.tokens))

        monkeypatch.setattr(ForedraftContender, "run", altering)


class TestOtherPrograms:
    """Two contenders on three prompts, once each: three turns of two runs."""

    OPTIONS = BenchSettings(methods=("lookup",), new_tokens=4, repeats=1)

    @pytest.fixture(autouse=True)
    def _pair(self, pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.pair, self.patch = pair, monkeypatch

    def run(self, *others: float | None) -> BenchReport:
        other_programs(self.patch, *others)
        return bench([TEXTS], self.OPTIONS, **self.pair)

    def test_a_disturbed_turn_is_repeated_whole(self) -> None:
        report = self.run(0.1, 0.3, 0.1, 0.2, 0.05)  # the second run of the first turn is disturbed
        assert report.turns == (TurnCount("texts", 1, kept=3, repeated=1, disturbed=0),)
        plain, lookup = (row.others for row in report.rows)
        assert plain is not None and lookup is not None
        assert plain.count == lookup.count == report.rows[0].counted
        assert plain.upper <= 0.1 and lookup.upper <= 0.2
        assert not any("every attempt" in doubt for doubt in report.doubts)
        assert report.turns_remark is not None
        assert "Beside the 3 turns that count, 1 had" in report.turns_remark
        assert again(report) == report

    def test_a_machine_that_is_never_quiet_ends_in_a_doubt(self) -> None:
        report = self.run(1.5)
        assert report.turns == (TurnCount("texts", 1, kept=3, repeated=3, disturbed=3),)
        assert all(row.others == Spread(1.5, 1.5, 1.5, row.counted) for row in report.rows)
        [doubt] = [doubt for doubt in report.doubts if "every attempt" in doubt]
        assert doubt.startswith("Other programs used more than 0.25 CPUs in 3 of 3 turns")

    def test_tokens_of_a_turn_that_is_repeated_count_for_exactness(self) -> None:
        Wrong(self.patch, range(2, 3))
        report = self.run(0.1, 0.9, 0.1)
        assert report.turns[0].repeated == 1
        exact = report.rows[1].exactness
        assert exact is not None and exact.holds is False and exact.identical == 2

    def test_the_costs_carry_what_the_counters_say(self) -> None:
        report = bench([TEXTS], self.OPTIONS, **self.pair)
        for found in (report.costs[0].others, *(row.others for row in report.rows)):
            assert (found is None) == (read_counters() is None)
            # of processes that run beside there may be any number
            assert found is None or (found.count > 0 and 0 <= found.lower <= found.median <= found.upper)

    def test_a_wrong_token_is_reported_with_its_position(self) -> None:
        Wrong(self.patch, range(1, 99))
        plain, lookup = (row.exactness for row in self.run(0.0).rows)
        assert plain is not None and plain.holds is True
        assert lookup is not None and lookup.holds is False and lookup.identical == 0
        assert lookup.first is not None and (lookup.first.prompt, lookup.first.position) == (0, 2)


@pytest.mark.heavy
def test_a_drafter_has_a_row_for_each_policy(pair: dict[str, Any]) -> None:
    options = BenchSettings(("lookup", "draft-model"), ("heuristic", "auto"), new_tokens=6, repeats=2)
    report = bench([TEXTS], options, policy="heuristic", max_draft=4, **pair)
    assert [(row.contender, row.policy) for row in report.rows] == [
        ("plain", None),
        *((name, policy) for name in ("lookup", "draft-model") for policy in ("heuristic", "auto")),
    ]
    assert report.methods == tuple(row for row in report.rows if row.policy != "auto")
    assert report.policies == report.rows[1:]
    for row in report.rows[1:]:
        assert row.exactness is not None and row.exactness.holds
        assert row.speedup is not None and row.drafting is not None and row.perfect is not None
        assert row.round_time is not None and row.predicted is not None
        assert row.perfect == ceiling(report.costs[0], row.contender, 1.0)
        alpha = row.drafting.alpha
        assert row.ceiling == (None if alpha is None else ceiling(report.costs[0], row.contender, alpha))
    assert report.options["policies"] == ["heuristic", "auto"] and report.options["policy"] == "heuristic"


@pytest.mark.heavy
def test_contenders_draft_as_far_as_generate_would(pair: dict[str, Any], tmp_path: Path) -> None:
    """A plan's draft length applies to layer-skip only, under every policy that does not weigh costs."""
    model, plan = Path(pair["model"]), tmp_path / "plan.json"
    write_plan(plan_of(model, max_draft=9), plan)
    given: dict[str, Any] = {"model": str(model), "device": "cpu", "policy": "fixed"}
    params = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
    expected = {}
    for drafter, more in (("lookup", {}), ("layer-skip", {"plan": str(plan)})):
        outputs = load(**given, **more, drafter=drafter).generate(list(TEXTS.prompts), [params] * 3)
        stats = Stats.merge(output.stats for output in outputs)
        expected[drafter] = stats.drafted / stats.rounds
    assert expected["lookup"] <= 5 < expected["layer-skip"]
    for policy in ("fixed", "auto"):
        options = BenchSettings(("lookup", "layer-skip"), ("fixed",), new_tokens=24, repeats=1)
        report = bench([TEXTS], options, model=str(model), plan=str(plan), device="cpu", policy=policy)
        found = {row.contender: row.drafting for row in report.policies if row.policy == "fixed"}
        counted = {name: drafting and drafting.mean_draft_length for name, drafting in found.items()}
        assert counted == pytest.approx(expected), policy
        assert report.costs[0].verifying[9].rows == 10  # the plan's 9 drafted tokens and one more


def test_the_report_has_the_runs_highest_load(pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([0.5, 7.25])
    monkeypatch.setattr(os, "getloadavg", lambda: (next(loads, 1.0), 99.0, 99.0))
    report = bench([TEXTS], BenchSettings(methods=("plain",), new_tokens=2, repeats=1), **pair)
    assert report.machine["highest_load"] == 7.25 and report.machine["load_average"] == 1.0


@pytest.mark.heavy
def test_costs_are_measured_beside_their_runs(pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The meter runs after every repeat of every group, at the context of each workload's own prompts."""
    happened: list[str] = []
    turn = CostMeter.turn

    def watch(stage: str, done: int, total: int) -> None:
        if "batch" in stage and "warm-up" not in stage and done:
            happened.append("repeat")

    monkeypatch.setattr(CostMeter, "turn", lambda meter: (happened.append("meter"), turn(meter))[1])
    long = Workload("long", ("the target checks all of them, and keeps what it would have written",) * 2)
    report = bench([TEXTS, long], BenchSettings(FOREDRAFT, new_tokens=4, repeats=2), progress=watch, **pair)
    assert happened == ["meter", "repeat"] * (2 * (3 + 2))
    counts = [(made.workload, made.verifying[0].seconds.count) for made in report.costs]
    assert counts == [("texts", 2 * 3), ("long", 2 * 2)]
    assert report.costs[0].context < report.costs[1].context
    for row in report.rows:
        if row.perfect is not None:
            costs = next(made for made in report.costs if made.workload == row.workload)
            assert row.perfect == ceiling(costs, row.contender, 1.0)


def test_typical_costs_have_the_median_step() -> None:
    def costs(batch: int, step: float) -> ForwardCosts:
        return ForwardCosts(batch, 10, (Cost(1, 1.0, Spread(step, step, step, 1)),), {}, None, f"of {step}")

    report = BenchReport({}, {}, (), None, (costs(1, 3.0), costs(2, 9.0), costs(1, 1.0), costs(1, 2.0)), ())
    assert [(made.batch, made.workload) for made in report.typical_costs] == [(1, "of 2.0"), (2, "of 9.0")]


def test_costs_cover_the_longest_draft_of_any_policy(pair: dict[str, Any]) -> None:
    made = BenchSettings(("draft-model",), ("adaptive-exit",), new_tokens=2, repeats=1, batch=(2,))
    (costs,) = bench([TEXTS], made, policy="fixed", **pair).costs
    assert [cost.rows for cost in costs.verifying] == list(range(1, 14))  # drafts of 12, not of 5


@pytest.mark.heavy
@pytest.mark.parametrize(("rule", "holds"), [("coupled", True), ("speculative", None), ("block", None)])
def test_sampled_texts_are_compared_if_coupled(pair: dict[str, Any], rule: str, holds: bool | None) -> None:
    options = BenchSettings(methods=FOREDRAFT, new_tokens=4, repeats=1, temperature=1.0, acceptance=rule)
    rows = bench([Workload("texts", TEXTS.prompts[:1])], options, **pair).rows
    assert [row.exactness and row.exactness.holds for row in rows] == [holds] * 3


@pytest.mark.heavy
def test_a_failing_program_fails_if_named(pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Generate, prompts: list[list[int]], new_tokens: int) -> Timing:
        raise ValueError("no such cache")

    monkeypatch.setattr(Generate, "run", broken)
    report = bench([TEXTS], BenchSettings(methods=("all",), new_tokens=2, repeats=1), **pair)
    assert [row.contender for row in report.rows if row.contender != "llama.cpp"] == [*FOREDRAFT, "auto"]
    assert "left out: transformers failed (ValueError: no such cache)" in report.notes
    with pytest.raises(ValueError, match="no such cache"):
        bench([TEXTS], BenchSettings(methods=("transformers",), new_tokens=2, repeats=1), **pair)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    left: list[int] = []
    run = ForedraftContender.run

    def interrupting(self: ForedraftContender, prompts: list[list[int]], new_tokens: int) -> Timing:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return run(self, prompts, new_tokens)

    monkeypatch.setattr(ForedraftContender, "run", interrupting)
    return left


@pytest.mark.heavy
def test_an_interrupt_keeps_the_finished_rows(pair: dict[str, Any], interrupted: list[int]) -> None:
    options = BenchSettings(methods=("plain",), new_tokens=2, repeats=1)
    runs = 3 + 1 + 3 + 3  # plain outputs, warm-up, timed runs, parts of a round
    interrupted.append(runs + 5)
    report = bench([TEXTS, Workload("more", TEXTS.prompts)], options, **pair)
    assert not report.finished
    assert [(row.workload, row.contender) for row in report.rows] == [("texts", "plain")]
    interrupted[0] = runs - 1
    with pytest.raises(KeyboardInterrupt):
        bench([TEXTS], options, **pair)


def test_a_batch_is_decoded_side_by_side(pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    round = Engine.round

    def counting(engine: Engine) -> Any:
        seen.append(len(engine.rows.sequences))
        return round(engine)

    monkeypatch.setattr(Engine, "round", counting)
    report = bench([TEXTS], BenchSettings(methods=("plain",), new_tokens=16, repeats=1, batch=(12,)), **pair)
    assert max(seen) == 12 and report.rows[0].batch == 12


def test_prompts_that_do_not_fit_are_refused(pair: dict[str, Any], tmp_path: Path) -> None:
    options = BenchSettings(methods=("plain",), new_tokens=2, repeats=1)
    with pytest.raises(RequestError, match="truncate='left'"):
        bench([TEXTS], options, max_length=4, **pair)
    short = bench([TEXTS], options, max_length=4, truncate="left", **pair)
    assert short.costs[0].context == 2 + 1
    mute = checkpoints.save_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="is text, but this model's folder has no tokenizer.json"):
        bench([TEXTS], options, model=str(mute), device="cpu")
