"""The figures of a benchmark's rows, computed from made-up runs, and the order of the runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from foredraft.bench.bench_records import (
    Bandwidth,
    BenchReport,
    Ceiling,
    Cost,
    DraftCost,
    Exactness,
    FirstDifference,
    ForwardCosts,
    ModelRecord,
    RoundTime,
    Row,
    Spread,
)
from foredraft.bench.contender import Timing
from foredraft.bench.figures import (
    Group,
    Runs,
    Series,
    ceiling,
    divergence,
    forward_cost,
    make_row,
    mean_accepted_length,
    predicted_speedup,
    verifying_cost,
)
from foredraft.bench.workload import groups_of
from foredraft.decode.stats import Round, Stats
from foredraft.drafters.lookup import repeated

STEP = 0.01
V = (1.0, 1.1, 1.3, 1.6)
TEXT = tuple(range(10, 20))
OTHER = (*TEXT[:4], 99, *TEXT[5:])


def named(name: str, *, peer: bool = False, policy: str | None = None) -> Any:
    return SimpleNamespace(
        name=name, method=name.split(",")[0], peer=peer, lossless=True, batch_sizes=None, policy_name=policy
    )


def costs() -> ForwardCosts:
    verifying = [Cost(rows, v, Spread(v * STEP, v * STEP, v * STEP, 5)) for rows, v in enumerate(V, start=1)]
    return ForwardCosts(
        1, 256, tuple(verifying), {"draft-model": DraftCost(0.35, 0.15), "lookup": DraftCost(0.0, 0.0)}, 0.5
    )


def plain(seconds: float, tokens: tuple[int, ...] = TEXT) -> Timing:
    rounds = [Round(0, 0, 1)] * len(tokens)
    return Timing((tokens,), 0.1, seconds, len(tokens), len(tokens), Stats.of(rounds))


def drafted(seconds: float, tokens: tuple[int, ...] = TEXT) -> Timing:
    rounds = [Round(2, kept, kept + 1, drafter="draft-model") for kept in (2, 1, 2, 1)]
    return Timing((tokens,), 0.1, seconds, len(tokens), len(rounds), Stats.of(rounds))


def peer(seconds: float, tokens: tuple[int, ...] = TEXT) -> Timing:
    return Timing((tokens,), 0.2, seconds, len(tokens) - 1)


def series(*runs: Runs, prompts: int = 1) -> Series:
    return Series("tables", 1, runs, (TEXT,) * prompts, costs(), weight_read_seconds=0.004)


def row_of(timings: dict[str, list[Timing]], name: str, others: Sequence[str] = (), **more: Any) -> Row:
    """Return the row of a contender whose one prompt counts; more: what `named` takes."""
    return make_row(series(Runs(Group((0,), True), timings)), named(name, **more), others, comparable=True)


def test_a_spread_lies_within_its_data() -> None:
    assert Spread.of([]) is None
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 1)
    assert Spread.of([1.0, 2.0]) == Spread(1.5, 1.25, 1.75, 2)
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(3.0, 2.0, 4.0, 5)


def test_speedup_is_the_median_of_the_ratios_within_repeats() -> None:
    """The machine becomes five times slower; the ratio of the medians would be 2."""
    own, drafting = (1.0, 2.0, 5.0), (0.4, 1.0, 2.0)
    slow = {"plain": [plain(seconds) for seconds in own], "draft-model": [drafted(each) for each in drafting]}
    row = row_of(slow, "draft-model")
    assert row.speedup == Spread(2.5, 2.5, 2.5, 1)
    assert row.tokens_per_second == Spread(10.0, 10.0, 10.0, 1)
    assert row.speedup_all == row.speedup


def test_tokens_of_a_peers_prefill_pass_are_not_counted_as_decoding() -> None:
    timings = {"plain": [plain(1.0)], "other": [peer(1.8)]}
    row = row_of(timings, "other", peer=True)
    assert row.tokens_per_second is not None and row.tokens_per_second.median == pytest.approx(9 / 1.8)
    assert row.speedup is not None and row.speedup.median == pytest.approx(0.5)
    assert row.prefill_seconds == Spread(0.2, 0.2, 0.2, 1)
    assert row.drafting is row.predicted is row.overhead is row.bandwidth_share is None
    own = row_of(timings, "plain", ["other"])
    assert own.over_peers is not None and own.over_peers["other"].median == pytest.approx(2.0)


def test_predicted_speedup_sums_the_costs_of_the_actual_rounds() -> None:
    """Costs are not linear: v(4) - 1 is more than twice v(2) - 1, and a draft's first step costs more."""
    known = costs()

    def of(*rounds: Round, drafter: str | None = None) -> Stats:
        named = [each if drafter is None else replace(each, drafter=drafter) for each in rounds]
        return Stats.merge([Stats.of(named[:1]), Stats.of(named[1:])])

    even, uneven = (Round(2, 1, 2), Round(2, 2, 3)), (Round(1, 1, 2), Round(3, 2, 3))
    assert predicted_speedup(known, of(*even, drafter="draft-model")) == pytest.approx(2.5 / (0.5 + 1.3))
    assert predicted_speedup(known, of(*even, drafter="lookup")) == pytest.approx(2.5 / 1.3)
    two_drafters = of(*(replace(one, drafter=name) for one, name in zip(even, known.drafting, strict=True)))
    assert predicted_speedup(known, two_drafters) == pytest.approx(2.5 / (0.5 / 2 + 1.3))
    of_uneven = predicted_speedup(known, of(*uneven, drafter="draft-model"))
    assert of_uneven == pytest.approx(2.5 / (0.5 + (1.1 + 1.6) / 2))
    idle = of(Round(0, 0, 1), Round(3, 3, 4, drafter="draft-model"))
    assert predicted_speedup(known, idle) == pytest.approx(2.5 / (0.65 / 2 + (1.0 + 1.6) / 2))
    # the drafter took a step but proposed no token in its last position
    stopped = of(Round(1, 1, 2, undrawn=1), Round(0, 0, 1, undrawn=1), drafter="draft-model")
    assert predicted_speedup(known, stopped) == pytest.approx(1.5 / ((0.35 + 0.5) / 2 + (1.1 + 1.0) / 2))
    assert forward_cost(known, of(Round(0, 0, 1), Round(0, 0, 1))) == 1


def test_prediction_overhead_and_bandwidth_use_the_runs_own_rounds() -> None:
    timings = {"plain": [plain(0.11), plain(0.11)], "draft-model": [drafted(0.08), drafted(0.1)]}
    row = row_of(timings, "draft-model")
    assert row.drafting is not None
    assert row.drafting.mean_accepted_length == 2.5 and row.drafting.mean_draft_length == 2
    assert row.drafting.alpha == pytest.approx(6 / 8) and row.drafting.acceptance_rate == pytest.approx(6 / 8)
    assert row.drafting.acceptance_by_position == (1.0, 0.5)
    expected = 2.5 / (0.5 + 1.3)
    measured = (0.11 / 0.08 + 0.11 / 0.1) / 2
    assert row.predicted is not None and row.predicted.median == pytest.approx(expected)
    assert row.measured_over_predicted is not None
    assert row.measured_over_predicted.median == pytest.approx(measured / expected)
    assert row.overhead is not None and row.overhead.median == pytest.approx((0.02 + 0.025) / 2 / STEP - 1.8)
    assert row.bandwidth_share == pytest.approx((4 / 0.08 + 4 / 0.1) / 2 * 0.004)
    own = row_of(timings, "plain")
    # 11 ms per step, of which forwards take 10
    assert own.overhead is not None and own.overhead.median == pytest.approx(0.1)
    assert own.drafting is None and own.predicted is None
    assert own.speedup is not None and own.speedup.median == 1


def test_verifying_cost_is_interpolated_between_measured_rows() -> None:
    cost = costs().verifying
    wide = replace(costs(), verifying=(*cost, Cost(8, 3.2, Spread(3.2, 3.2, 3.2, 5))))
    rows = (1, 2, 4, 5, 8, 9)
    assert [verifying_cost(wide, n) for n in rows] == pytest.approx([1, 1.1, 1.6, 2.0, 3.2, 3.6])
    assert verifying_cost(replace(wide, verifying=cost[:1]), 1) == 1


def test_siblings_are_verified_too() -> None:
    tree, chain = Round(1, 0, 3, "draft-model", siblings=1, sibling=True), Round(1, 0, 1, "draft-model")
    cost = [forward_cost(costs(), Stats.of([each])) for each in (tree, chain)]
    assert cost[0] - cost[1] == pytest.approx(0.2)
    stats = Stats.merge([Stats.of([tree]), Stats.of([chain])])
    assert (stats.widths, stats.siblings) == ({3: 1, 2: 1}, 1)


def test_mean_accepted_length_matches_the_closed_form() -> None:
    found = [mean_accepted_length(*given) for given in ((0.5, 2), (1.0, 4), (0.0, 3))]
    assert found == [1.75, 5, 1]
    assert mean_accepted_length(0.8, 6) == pytest.approx((1 - 0.8**7) / (1 - 0.8))


def test_ceiling_is_the_best_speedup_over_all_draft_lengths() -> None:
    known = costs()  # c 0.35 and 0.15, v 1.1, 1.3, 1.6
    one, two, three = (1.5 / 1.45, 1.75 / 1.8, 1.875 / 2.25)
    assert one > two > three
    assert ceiling(known, "draft-model", 0.5) == Ceiling(0.5, 1, pytest.approx(one))  # type: ignore[arg-type]
    assert ceiling(known, "draft-model", 1.0) == Ceiling(1.0, 3, pytest.approx(4 / 2.25))  # type: ignore[arg-type]
    assert ceiling(known, "lookup", 0.9).speedup == pytest.approx(mean_accepted_length(0.9, 3) / 1.6)
    never = replace(known, drafting={"draft-model": DraftCost(2.0, 2.0)})  # drafting cannot pay here
    assert ceiling(never, "draft-model", 0.9).speedup == pytest.approx(1.9 / 3.1)


@pytest.mark.parametrize(
    ("c", "alpha", "length", "speedup"),
    [
        (0.05, 0.8, 8, 3.09),
        (0.1, 0.6, 3, 1.67),
        (0.2, 0.9, 7, 2.37),
        (0.5, 0.7, 1, 1.13),
        (0.634, 0.9, 2, 1.19),
        (0.515, 0.95, 5, 1.48),
    ],
)
def test_ceiling_where_verifying_is_free(c: float, alpha: float, length: int, speedup: float) -> None:
    """The walltime formula where a pass costs one step; the last two cases are Draft & Verify's plans."""
    free = tuple(Cost(rows, 1.0, Spread(STEP, STEP, STEP, 5)) for rows in (1, 2, 32))
    best = ceiling(replace(costs(), verifying=free, drafting={"x": DraftCost(c, c)}), "x", alpha)
    assert best.speedup == pytest.approx(speedup, abs=0.006)
    assert best.draft_length == length


def test_a_row_has_its_drafters_ceilings_under_any_policy() -> None:
    timings = {"plain": [plain(0.11)], "draft-model, fixed": [drafted(0.08)], "auto": [drafted(0.08)]}
    row = row_of(timings, "draft-model, fixed", policy="fixed")
    assert (row.contender, row.policy) == ("draft-model", "fixed")
    assert row.ceiling == ceiling(costs(), "draft-model", 0.75)
    assert row.perfect == ceiling(costs(), "draft-model", 1.0)
    assert row.predicted is not None and row.predicted.median == pytest.approx(2.5 / 1.8)
    assert row.speedup is not None and row.speedup.median == pytest.approx(11 / 8)
    for other in ("plain", "auto"):  # plain has no drafter, auto has several
        row = row_of(timings, other)
        assert row.ceiling is row.perfect is row.policy is None
        assert (row.predicted is None) == (other == "plain")


def test_policies_lists_drafting_rows_if_policies_were_asked_for() -> None:
    def row(contender: str, policy: str | None, workload: str = "a", batch: int = 1) -> Row:
        return Row(workload, batch, contender, peer=False, policy=policy)

    rows = (
        row("plain", None),
        row("lookup", "auto"),
        row("draft-model", "auto"),
        row("draft-model", "fixed"),
        row("draft-model", "heuristic"),
        row("bild", "fallback"),
        row("lookup", "auto", "b"),
        row("draft-model", "auto", "a", 2),
    )
    made = replace(report(), rows=rows)
    assert made.methods == (*rows[:3], *rows[5:])
    assert made.policies == () == report().policies
    assert report().methods == report().rows
    asked = replace(made, options={"policies": ["auto"]})  # a single policy suffices
    assert asked.policies == rows[1:]
    assert replace(asked, rows=rows[:3]).policies == rows[1:3]


def test_only_prompts_with_little_repetition_count() -> None:
    def runs(prompt: int, counted: bool, seconds: float) -> Runs:
        return Runs(Group((prompt,), counted), {"plain": [plain(1.0)], "lookup": [drafted(seconds)]})

    both = series(runs(0, True, 0.5), runs(1, False, 0.1), prompts=2)
    row = make_row(both, named("lookup"), [], comparable=True)
    assert (row.counted, row.prompts) == (1, 2)
    assert row.speedup is not None and row.speedup.median == pytest.approx(2)
    assert row.speedup_all is not None and row.speedup_all.median == pytest.approx(6)
    assert row.exactness == Exactness(True, 2, 2)
    none = make_row(series(runs(0, False, 0.5)), named("lookup"), [], comparable=True)
    assert none.counted == 0 and none.prompts == 1
    assert none.speedup is none.predicted is none.drafting is none.overhead is none.bandwidth_share is None
    assert none.speedup_all is not None


def test_one_differing_run_makes_a_prompt_differ() -> None:
    timings = {"plain": [plain(1.0)] * 2, "lookup": [drafted(1.0), drafted(1.0, OTHER)]}
    two = series(Runs(Group((0,), True), timings), Runs(Group((1,), False), timings), prompts=2)
    found = make_row(two, named("lookup"), [], comparable=True).exactness
    assert found == Exactness(True, 0, 2, FirstDifference(0, 4)) and found.holds is False
    assert make_row(two, named("plain"), [], comparable=True).exactness == Exactness(True, 2, 2)
    uncompared = make_row(two, named("lookup"), [], comparable=False).exactness
    assert uncompared is not None and uncompared.holds is None


def test_a_shorter_text_diverges_where_it_ends() -> None:
    assert divergence(TEXT, TEXT) is None
    assert divergence(TEXT[:-1], TEXT) == divergence(TEXT, TEXT[:-1]) == 9
    assert divergence(OTHER, TEXT) == 4
    assert divergence((), ()) is None


def test_rounds_of_a_batch_are_counted_once() -> None:
    both = Timing((TEXT, TEXT), 0.1, 0.132, 20, 11, Stats.of([Round(0, 0, 1)] * 20))
    runs = series(Runs(Group((0, 1), True), {"plain": [both]}), prompts=2)
    row = make_row(runs, named("plain"), [], comparable=True)
    assert row.tokens_per_second is not None and row.tokens_per_second.median == pytest.approx(20 / 0.132)
    # 12 ms per round, of which forwards take 10
    assert row.overhead is not None and row.overhead.median == pytest.approx(0.2)
    assert row.counted == row.prompts == 2


def test_over_single_compares_with_batch_1() -> None:
    runs = series(Runs(Group((0,), True), {"plain": [plain(0.5)]}))
    row = make_row(runs, named("plain"), [], comparable=True, at_batch_1=Spread(5.0, 5.0, 5.0, 1))
    assert row.over_single == pytest.approx(4)


def test_repetition_is_measured_on_the_contenders_own_output() -> None:
    again = (1, 2, 3, 4) * 3
    row = row_of({"plain": [plain(1.0)], "other": [peer(1.0, again)]}, "other", peer=True)
    assert row.repeated is not None and row.repeated.median == pytest.approx(repeated(again)) == 5 / 9
    assert repeated([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repeated(range(50)) == repeated([1, 2]) == 0


def test_groups_are_full_and_do_not_mix_counted_prompts() -> None:
    counted = [True, False, True, True, False, True, True]
    assert [group.prompts for group in groups_of(counted, 1)] == [(0,), (2,), (3,), (5,), (6,), (1,), (4,)]
    two = groups_of(counted, 2)
    assert [(group.prompts, group.counted) for group in two] == [
        ((0, 2), True),
        ((3, 5), True),
        ((6, 0), True),  # filled up with the first prompt
        ((1, 4), False),
    ]
    assert [group.prompts for group in groups_of([True, True], 5)] == [(0, 1, 0, 1, 0)]
    assert groups_of([], 4) == []


def report() -> BenchReport:
    timings = {"plain": [plain(0.11)], "draft-model": [drafted(0.08)], "other": [peer(0.2, OTHER)]}
    rows = [row_of(timings, name, ["other"]) for name in ("plain", "draft-model")]
    rows[1] = replace(rows[1], round_time=RoundTime(0.005, 0.013, 0.002, 4), peak_memory=2**20)
    rows.append(row_of(timings, "other", peer=True))
    rows.append(Row("tables", 8, "other", peer=True, note="decodes at batch size 1 only"))
    return BenchReport(
        options={"batch": [1, 8], "model": "demo"},
        machine={"threads": 2},
        models=(ModelRecord("target", "demo", 1000, 1800, "bfloat16"),),
        bandwidth=Bandwidth(2e10, "read"),
        costs=(costs(),),
        rows=tuple(rows),
        notes=("left out: llama.cpp",),
    )


def test_a_report_survives_json() -> None:
    made = report()
    assert BenchReport.from_dict(json.loads(json.dumps(made.as_dict(), allow_nan=False))) == made
    assert made.rows[2].exactness == Exactness(True, 0, 1, FirstDifference(0, 4))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda document: document["rows"][0].update(speed=1), "which has the unknown field 'speed'"),
        (lambda document: document["rows"][0].update(batch="8"), "whose batch is '8', not a whole number"),
        (lambda document: document.pop("machine"), "whose machine is missing, not an object"),
    ],
)
def test_a_document_with_wrong_keys_is_refused(change: Callable[[Any], object], says: str) -> None:
    document = report().as_dict()
    change(document)
    with pytest.raises(TypeError, match=says):
        BenchReport.from_dict(document)
