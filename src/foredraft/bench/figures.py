"""The figures of a row, from timed runs. Pure functions: no clock, no model.

A prompt's speed-up is the median of the ratios of tokens/s within its repeats, so that a machine that slows
down affects both sides alike. A row's speed-up is the median over its prompts. Prompts that are decoded as
one batch count as one prompt here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from foredraft.bench.predicted_speedup import ceiling, forward_cost, predicted_speedup
from foredraft.decode.stats import Stats
from foredraft.ngrams import repeated

__all__ = ["Group", "Runs", "Series", "divergence", "make_row"]

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts that are decoded as one batch.

    Attributes:
        prompts: Their indices in the workload.
        counted: Plain decoding repeats few 4-grams on each of them.
    """

    prompts: tuple[int, ...]
    counted: bool


@dataclass(frozen=True, slots=True)
class Runs:
    """The timings of one group.

    Attributes:
        group: The group.
        timings: One per repeat, by contender's name.
        discarded: Of each turn that was repeated, by contender's name; only their tokens count.
    """

    group: Group
    timings: dict[str, list[Timing]]
    discarded: tuple[dict[str, Timing], ...] = ()

    def outputs(self, contender: str) -> list[tuple[tuple[int, ...], ...]]:
        """Return the tokens of every run."""
        every = [*self.timings[contender], *(turn[contender] for turn in self.discarded)]
        return [timing.tokens for timing in every]

    def tokens_per_second(self, contender: str) -> float:
        """Return the median over the repeats."""
        return median(timing.tokens_per_second for timing in self.timings[contender])

    def prefill_seconds(self, contender: str) -> float:
        """Return the median over the repeats."""
        return median(timing.prefill_seconds for timing in self.timings[contender])

    def ratio(self, contender: str, other: str) -> float:
        """Return the median, over the repeats, of one contender's tokens/s over another's."""
        pairs = zip(self.timings[contender], self.timings[other], strict=True)
        return median(own.tokens_per_second / their.tokens_per_second for own, their in pairs)

    def stats(self, contender: str) -> Stats:
        """Return the statistics of all repeats, merged; only Foredraft's contenders have any."""
        return Stats.merge(timing.stats for timing in self.timings[contender] if timing.stats is not None)


@dataclass(frozen=True, slots=True)
class Series:
    """All runs of one workload at one batch size.

    Attributes:
        workload: Name of the workload.
        batch: Prompts decoded as one batch.
        runs: The timings, by group.
        expected: Plain decoding's tokens of each prompt of the workload.
        costs: Costs of bare forwards at this batch size.
        weight_read_seconds: Time to read the weights of one step at the machine's memory bandwidth; None
            where the bandwidth is unknown.
    """

    workload: str
    batch: int
    runs: tuple[Runs, ...]
    expected: tuple[tuple[int, ...], ...]
    costs: ForwardCosts
    weight_read_seconds: float | None

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
    """Return a contender's row, without `round_time` and `peak_memory`, which need runs of their own.

    Args:
        series: The runs of the workload.
        contender: The contender; its timings are in `series`.
        peers: Names of the other programs to compare it with.
        comparable: Whether its tokens must equal plain decoding's.
        at_batch_1: Its tokens/s on this workload at batch size 1.
    """
    name, counted = contender.name, series.counted
    speed = _spread(counted, lambda runs: runs.tokens_per_second(name))
    over_peers = {peer: _spread(counted, partial(Runs.ratio, contender=name, other=peer)) for peer in peers}
    row = Row(
        workload=series.workload,
        batch=series.batch,
        contender=contender.method,
        policy=contender.policy_name,
        peer=contender.peer,
        lossless=contender.lossless,
        tokens_per_second=speed,
        speedup=_spread(counted, lambda runs: runs.ratio(name, PLAIN)),
        over_peers={peer: spread for peer, spread in over_peers.items() if spread is not None},
        over_single=None if speed is None or at_batch_1 is None else speed.median / at_batch_1.median,
        speedup_all=_spread(series.runs, lambda runs: runs.ratio(name, PLAIN)),
        prefill_seconds=_spread(counted, lambda runs: runs.prefill_seconds(name)),
        others=Spread.of(
            timing.load.others for runs in counted for timing in runs.timings[name] if timing.load is not None
        ),
        overhead=None
        if contender.peer
        else _spread(counted, lambda runs: _overhead(series.costs, runs, name)),
        repeated=Spread.of(_repeated(name, counted)),
        counted=len({prompt for runs in counted for prompt in runs.group.prompts}),
        prompts=len(series.expected),
        exactness=_exactness(series, name, comparable=comparable),
        bandwidth_share=_bandwidth_share(series, name),
    )
    drafts = not contender.peer and contender.method != PLAIN
    return _with_drafting(row, series, name) if drafts else row


def divergence(found: Tokens, expected: Tokens) -> int | None:
    """Return the first position at which two token sequences differ, or None if they are equal.

    A sequence that ends early differs at the position where it ends.
    """
    shorter = min(len(found), len(expected))
    position = next((i for i in range(shorter) if found[i] != expected[i]), shorter)
    return None if len(found) == len(expected) == position else position


def _spread(runs: Sequence[Runs], figure: Callable[[Runs], float]) -> Spread | None:
    return Spread.of(map(figure, runs))


def _with_drafting(row: Row, series: Series, name: str) -> Row:
    """Add the figures of a contender that drafts: its drafts, its ceilings and the predicted speed-up."""
    costs, counted = series.costs, series.counted
    drafting = _drafting(name, counted)

    def predicted(runs: Runs) -> float:
        return predicted_speedup(costs, runs.stats(name))

    def ceiling_at(alpha: float | None) -> Ceiling | None:
        if alpha is None or row.contender not in costs.drafting:  # "auto" has no single drafter's costs
            return None
        return ceiling(costs, row.contender, alpha)

    return replace(
        row,
        drafting=drafting,
        ceiling=ceiling_at(None if drafting is None else drafting.alpha),
        perfect=ceiling_at(1.0),
        predicted=_spread(counted, predicted),
        measured_over_predicted=_spread(counted, lambda runs: runs.ratio(name, PLAIN) / predicted(runs)),
    )


def _drafting(name: str, counted: Sequence[Runs]) -> DraftFigures | None:
    if not counted:
        return None
    stats = Stats.merge(runs.stats(name) for runs in counted)
    return DraftFigures(
        alpha=stats.alpha,
        acceptance_rate=stats.acceptance_rate,
        acceptance_by_position=tuple(stats.acceptance_by_position),
        mean_accepted_length=stats.tokens / stats.rounds,
        mean_draft_length=stats.drafted / stats.rounds,
    )


def _overhead(costs: ForwardCosts, runs: Runs, name: str) -> float:
    """Return o: the median time of a round less the cost of its forwards, in plain steps."""
    rounds = (timing.decode_seconds / timing.passes for timing in runs.timings[name] if timing.passes)
    return median(rounds) / costs.step_seconds - forward_cost(costs, runs.stats(name))


def _bandwidth_share(series: Series, name: str) -> float | None:
    """Return the median share of the decoding time that reading the target's weights alone would take."""
    timings = [timing for runs in series.counted for timing in runs.timings[name]]
    passes_per_second = [
        timing.passes / timing.decode_seconds for timing in timings if timing.passes is not None
    ]
    if series.weight_read_seconds is None or not passes_per_second:
        return None
    return median(passes_per_second) * series.weight_read_seconds


def _repeated(name: str, counted: Sequence[Runs]) -> list[float]:
    return [
        repeated(tokens) for runs in counted for timing in runs.timings[name][:1] for tokens in timing.tokens
    ]


def _exactness(series: Series, name: str, *, comparable: bool) -> Exactness:
    """Compare the tokens of every run with plain decoding's."""
    if not comparable:
        return Exactness(False, 0, len(series.expected))
    diverged: dict[int, int] = {}  # prompt -> the earliest position at which any of its runs diverged
    for runs in series.runs:
        for outputs in runs.outputs(name):
            for prompt, tokens in zip(runs.group.prompts, outputs, strict=True):
                position = divergence(tokens, series.expected[prompt])
                if position is not None:
                    diverged[prompt] = min(position, diverged.get(prompt, position))
    found = [FirstDifference(prompt, position) for prompt, position in sorted(diverged.items())]
    total = len(series.expected)
    return Exactness(True, total - len(found), total, found[0] if found else None)
