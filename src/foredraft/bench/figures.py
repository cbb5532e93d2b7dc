"""The figures of a row from timed runs, and predictions from costs. Pure functions: no clock, no model.

A prompt's speed-up is the median of the ratios of tokens/s within its repeats, so that a machine that slows
down affects both sides alike. A row's is the median over its prompts; a batch of prompts counts as one.

S = tau / (c_1 + ... + c_s + v(k + 1)), with k drafted tokens and s drafter steps per round, is theorem 3.8 of
Leviathan et al. 2023 (arXiv:2211.17192), but verifying passes and first draft steps may cost more, and draft
lengths vary. Host work is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from foredraft.bench.bench_records import (
    Ceiling,
    DraftFigures,
    Exactness,
    FirstDifference,
    ForwardCosts,
    Row,
    Spread,
)
from foredraft.bench.contender import Contender, Timing
from foredraft.bench.contenders import PLAIN
from foredraft.bench.workload import Group
from foredraft.decode.policy.cost_table import on_line
from foredraft.decode.stats import Stats
from foredraft.drafters.lookup import repeated


def mean_accepted_length(alpha: float, length: int) -> float:
    """Return tau of drafts of `length` tokens: (1 - alpha^(length + 1)) / (1 - alpha)."""
    return sum(alpha**accepted for accepted in range(length + 1))


def verifying_cost(costs: ForwardCosts, rows: float) -> float:
    """Return v(rows) in plain steps, on the lines between the measured row counts and beyond the largest."""
    assert rows >= 1
    return on_line([(cost.rows, cost.v) for cost in costs.verifying], rows)


def forward_cost(costs: ForwardCosts, stats: Stats) -> float:
    """Return the mean cost of a round's forwards in plain steps, drafting and verifying, for all drafters."""
    steps = stats.steps
    drafting = sum(costs.drafting[name].of(steps[name], drafts) for name, drafts in stats.drafts.items())
    verifying = sum(count * verifying_cost(costs, columns) for columns, count in stats.widths.items())
    return (drafting + verifying) / stats.rounds


def predicted_speedup(costs: ForwardCosts, stats: Stats) -> float:
    """Return S of a run's own rounds: its speed-up over plain decoding if only forwards took time."""
    return stats.tokens / stats.rounds / forward_cost(costs, stats)


def ceiling(costs: ForwardCosts, drafter: str, alpha: float) -> Ceiling:
    """Return the largest S over fixed draft lengths, from 1 to the widest measured pass less one."""

    def speedup(k: int) -> float:
        cost = costs.drafting[drafter].of(k) + verifying_cost(costs, k + 1)
        return mean_accepted_length(alpha, k) / cost

    length = max(range(1, costs.verifying[-1].rows), key=speedup)
    return Ceiling(alpha, length, speedup(length))


Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Runs:
    """The timings of one group."""

    group: Group  # the group
    timings: dict[str, list[Timing]]  # one per repeat, by contender's name
    discarded: tuple[dict[str, Timing], ...] = ()  # of repeated turns; only their tokens count

    def median(self, contender: str, figure: str) -> float:
        """Return the median of a figure of the timings over the repeats."""
        found: float = median(getattr(timing, figure) for timing in self.timings[contender])
        return found

    def ratio(self, contender: str, other: str) -> float:
        """Return the median, over the repeats, of one contender's tokens/s over another's."""
        pairs = zip(self.timings[contender], self.timings[other], strict=True)
        return median(own.tokens_per_second / their.tokens_per_second for own, their in pairs)

    def stats(self, contender: str) -> Stats:
        """Return the statistics of all repeats, merged; only Foredraft's contenders have any."""
        return Stats.merge(timing.stats for timing in self.timings[contender] if timing.stats is not None)


@dataclass(frozen=True, slots=True)
class Series:
    """All runs of one workload at one batch size."""

    workload: str  # name of the workload
    batch: int  # prompts decoded as one batch
    runs: tuple[Runs, ...]  # the timings, by group
    expected: tuple[tuple[int, ...], ...]  # plain decoding's tokens of each prompt of the workload
    costs: ForwardCosts  # costs of bare forwards at this batch size
    weight_read_seconds: float | None  # of one step's weights at the memory bandwidth; None where unknown

    @property
    def counted(self) -> tuple[Runs, ...]:
        """The runs of the groups that count."""
        return tuple(runs for runs in self.runs if runs.group.counted)


def make_row(
    series: Series,
    contender: Contender,
    peers: Iterable[str],
    *,
    comparable: bool,
    at_batch_1: Spread | None = None,
) -> Row:
    """Return a contender's row, without `round_time` and `peak_memory`, which need runs of their own."""
    name, counted = contender.name, series.counted
    speed = Spread.of(runs.median(name, "tokens_per_second") for runs in counted)

    def overhead(runs: Runs) -> float:
        """Return o: the median time of a round less the cost of its forwards, in plain steps."""
        rounds = (timing.decode_seconds / timing.passes for timing in runs.timings[name] if timing.passes)
        return median(rounds) / series.costs.step_seconds - forward_cost(series.costs, runs.stats(name))

    over_peers = {peer: Spread.of(runs.ratio(name, peer) for runs in counted) for peer in peers}
    row = Row(
        workload=series.workload,
        batch=series.batch,
        contender=contender.method,
        policy=contender.policy_name,
        peer=contender.peer,
        lossless=contender.lossless,
        tokens_per_second=speed,
        speedup=Spread.of(runs.ratio(name, PLAIN) for runs in counted),
        over_peers={peer: spread for peer, spread in over_peers.items() if spread is not None},
        over_single=None if speed is None or at_batch_1 is None else speed.median / at_batch_1.median,
        speedup_all=Spread.of(runs.ratio(name, PLAIN) for runs in series.runs),
        prefill_seconds=Spread.of(runs.median(name, "prefill_seconds") for runs in counted),
        others=Spread.of(
            timing.load.others for runs in counted for timing in runs.timings[name] if timing.load is not None
        ),
        overhead=None if contender.peer else Spread.of(map(overhead, counted)),
        repeated=Spread.of(
            repeated(tokens)
            for runs in counted
            for timing in runs.timings[name][:1]
            for tokens in timing.tokens
        ),
        counted=len({prompt for runs in counted for prompt in runs.group.prompts}),
        prompts=len(series.expected),
        exactness=_exactness(series, name, comparable=comparable),
        bandwidth_share=_bandwidth_share(series, name),
    )
    drafts = not contender.peer and contender.method != PLAIN
    return _with_drafting(row, series, name) if drafts else row


def divergence(found: Tokens, expected: Tokens) -> int | None:
    """Return the first position at which two token sequences differ, or one ends; None if they are equal."""
    shorter = min(len(found), len(expected))
    position = next((i for i in range(shorter) if found[i] != expected[i]), shorter)
    return None if len(found) == len(expected) == position else position


def _with_drafting(row: Row, series: Series, name: str) -> Row:
    """Add the figures of a contender that drafts: its drafts, its ceilings and the predicted speed-up."""
    costs, counted = series.costs, series.counted
    stats = Stats.merge(runs.stats(name) for runs in counted)

    def predicted(runs: Runs) -> float:
        return predicted_speedup(costs, runs.stats(name))

    def ceiling_at(alpha: float | None) -> Ceiling | None:
        if alpha is None or row.contender not in costs.drafting:  # "auto" has no single drafter's costs
            return None
        return ceiling(costs, row.contender, alpha)

    return replace(
        row,
        drafting=DraftFigures(
            alpha=stats.alpha,
            acceptance_rate=stats.acceptance_rate,
            acceptance_by_position=tuple(stats.acceptance_by_position),
            mean_accepted_length=stats.tokens / stats.rounds,
            mean_draft_length=stats.drafted / stats.rounds,
        )
        if counted
        else None,
        ceiling=ceiling_at(stats.alpha) if counted else None,
        perfect=ceiling_at(1.0),
        predicted=Spread.of(map(predicted, counted)),
        measured_over_predicted=Spread.of(runs.ratio(name, PLAIN) / predicted(runs) for runs in counted),
    )


def _bandwidth_share(series: Series, name: str) -> float | None:
    """Return the median share of the decoding time that reading the target's weights alone would take."""
    timings = (timing for runs in series.counted for timing in runs.timings[name])
    rates = [each.passes / each.decode_seconds for each in timings if each.passes is not None]
    read = series.weight_read_seconds  # passes a second, times the seconds of reading once
    return median(rates) * read if rates and read is not None else None


def _exactness(series: Series, name: str, *, comparable: bool) -> Exactness:
    """Compare the tokens of every run with plain decoding's."""
    if not comparable:
        return Exactness(False, 0, len(series.expected))
    diverged: dict[int, int] = {}  # prompt -> the earliest position at which any of its runs diverged
    for runs in series.runs:
        for timing in (*runs.timings[name], *(turn[name] for turn in runs.discarded)):
            for prompt, tokens in zip(runs.group.prompts, timing.tokens, strict=True):
                position = divergence(tokens, series.expected[prompt])
                if position is not None:
                    diverged[prompt] = min(position, diverged.get(prompt, position))
    found = [FirstDifference(prompt, position) for prompt, position in sorted(diverged.items())]
    total = len(series.expected)
    return Exactness(True, total - len(found), total, found[0] if found else None)
