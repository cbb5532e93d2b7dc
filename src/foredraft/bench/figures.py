"""The figures of a row, out of the runs that were timed. Pure: no clock, no model.

A prompt's speed-up is the median of the ratios of tokens/s within its repeats, so that a machine that slows
down burdens both sides alike; a row's is the median over its prompts. Prompts that are decoded side by side
are one here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from foredraft.bench.contender import Contender, Timing
from foredraft.bench.prediction import ceiling, forwards_cost, predicted
from foredraft.bench.records import (
    PLAIN,
    Ceiling,
    Costs,
    Divergence,
    Drafting,
    Exactness,
    RoundTime,
    Row,
    Spread,
)
from foredraft.decode.stats import Stats
from foredraft.ngrams import repeated

__all__ = ["Group", "Runs", "Series", "divergence", "row_of"]

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts that are decoded side by side, by their place in the workload. counted: plain decoding repeats
    few 4-grams on any of them."""

    prompts: tuple[int, ...]
    counted: bool


@dataclass(frozen=True, slots=True)
class Runs:
    """Of a group: each contender's timings, by its name, one a repeat."""

    group: Group
    timings: dict[str, list[Timing]]

    def ratio(self, contender: str, other: str) -> float:
        pairs = zip(self.timings[contender], self.timings[other], strict=True)
        return median(own.tokens_per_second / their.tokens_per_second for own, their in pairs)

    def stats(self, contender: str) -> Stats:
        """Of all repeats; ours only."""
        return Stats.merge(timing.stats for timing in self.timings[contender] if timing.stats is not None)


@dataclass(frozen=True, slots=True)
class Series:
    """All that was run of a workload at one batch size.

    runs: by group. expected: plain decoding's tokens of each prompt of the workload. costs: of this batch
    size. read_seconds: of a step's weights at the machine's bandwidth; None where that is not known.
    """

    workload: str
    batch: int
    runs: tuple[Runs, ...]
    expected: tuple[tuple[int, ...], ...]
    costs: Costs
    read_seconds: float | None

    @property
    def counted(self) -> tuple[Runs, ...]:
        return tuple(runs for runs in self.runs if runs.group.counted)


def row_of(
    series: Series,
    contender: Contender,
    peers: Iterable[str],
    *,
    comparable: bool,
    single: Spread | None = None,
    round_time: RoundTime | None = None,
    peak_memory: int | None = None,
) -> Row:
    """peers: names of those to hold it against. comparable: whether its tokens must be plain decoding's.
    single: its tokens/s at batch 1."""
    name, method, counted = contender.name, contender.method, series.counted

    def over(figure: Callable[[Runs], float | None], runs: Sequence[Runs] = counted) -> Spread | None:
        return Spread.of(found for found in map(figure, runs) if found is not None)

    def speed(runs: Runs) -> float:
        return median(timing.tokens_per_second for timing in runs.timings[name])

    speeds = over(speed)
    peers_of = {other: over(lambda runs, other=other: runs.ratio(name, other)) for other in peers}  # type: ignore[misc]
    drafts = not contender.peer and method != PLAIN
    alone = method if method in series.costs.drafting else None  # not where drafters take turns
    drafting = _drafting(name, counted) if drafts else None

    def foretold(runs: Runs) -> float:
        return predicted(series.costs, runs.stats(name))

    return Row(
        workload=series.workload,
        batch=series.batch,
        contender=method,
        policy=contender.policy,
        peer=contender.peer,
        lossless=contender.lossless,
        tokens_per_second=speeds,
        speedup=over(lambda runs: runs.ratio(name, PLAIN)),
        over_peers={other: spread for other, spread in peers_of.items() if spread is not None},
        over_single=speeds.median / single.median if speeds is not None and single is not None else None,
        speedup_all=over(lambda runs: runs.ratio(name, PLAIN), series.runs),
        prefill_seconds=over(lambda runs: median(timing.prefill_seconds for timing in runs.timings[name])),
        drafting=drafting,
        ceiling=_ceiling(series.costs, alone, drafting.alpha if drafting is not None else None),
        perfect=_ceiling(series.costs, alone, 1.0),
        predicted=over(foretold) if drafts else None,
        measured_over_predicted=over(lambda runs: runs.ratio(name, PLAIN) / foretold(runs))
        if drafts
        else None,
        overhead=None if contender.peer else over(lambda runs: _overhead(series.costs, runs, name)),
        round_time=round_time,
        repeated=Spread.of(_repeated(name, counted)),
        counted=len({prompt for runs in counted for prompt in runs.group.prompts}),
        prompts=len(series.expected),
        exactness=_exactness(series, name, comparable=comparable),
        bandwidth_share=_bandwidth_share(series, name),
        peak_memory=peak_memory,
    )


def divergence(found: Tokens, expected: Tokens) -> int | None:
    """The first position at which two texts differ, of which one may only be shorter; None: they do not."""
    shorter = min(len(found), len(expected))
    at = next((i for i in range(shorter) if found[i] != expected[i]), shorter)
    return None if len(found) == len(expected) == at else at


def _drafting(name: str, counted: Sequence[Runs]) -> Drafting | None:
    if not counted:
        return None
    stats = Stats.merge(runs.stats(name) for runs in counted)
    return Drafting(
        alpha=stats.alpha,
        acceptance_rate=stats.acceptance_rate,
        acceptance_by_position=tuple(stats.acceptance_by_position),
        mean_accepted_length=stats.tokens / stats.rounds,
        mean_draft_length=stats.drafted / stats.rounds,
    )


def _ceiling(costs: Costs, drafter: str | None, alpha: float | None) -> Ceiling | None:
    return None if drafter is None or alpha is None else ceiling(costs, drafter, alpha)


def _overhead(costs: Costs, runs: Runs, name: str) -> float:
    """o: a round's time in plain steps, less what its forwards cost."""
    rounds = (timing.decode_seconds / timing.passes for timing in runs.timings[name] if timing.passes)
    return median(rounds) / costs.step_seconds - forwards_cost(costs, runs.stats(name))


def _bandwidth_share(series: Series, name: str) -> float | None:
    """The median of what reading the target's weights in every pass would take, by what decoding took."""
    timings = [timing for runs in series.counted for timing in runs.timings[name]]
    shares = [timing.passes / timing.decode_seconds for timing in timings if timing.passes is not None]
    if series.read_seconds is None or not shares:
        return None
    return median(shares) * series.read_seconds


def _repeated(name: str, counted: Sequence[Runs]) -> list[float]:
    return [
        repeated(tokens) for runs in counted for timing in runs.timings[name][:1] for tokens in timing.tokens
    ]


def _exactness(series: Series, name: str, *, comparable: bool) -> Exactness:
    if not comparable:
        return Exactness(False, 0, len(series.expected))
    first: dict[int, int] = {}  # prompt -> where a run of it diverged first
    for runs in series.runs:
        for timing in runs.timings[name]:
            for prompt, tokens in zip(runs.group.prompts, timing.tokens, strict=True):
                at = divergence(tokens, series.expected[prompt])
                if at is not None:
                    first[prompt] = min(at, first.get(prompt, at))
    found = [Divergence(prompt, at) for prompt, at in sorted(first.items())]
    total = len(series.expected)
    return Exactness(True, total - len(found), total, found[0] if found else None)
