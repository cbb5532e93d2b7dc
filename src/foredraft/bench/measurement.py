"""The measurement: every contender on every prompt, in alternating order, and the rows of the report.

Contract: every contender runs once as a warm-up before its runs count. Then, for each group of prompts, the
contenders take turns (`schedule`), interleaved with the bare forwards that explain the speed-ups
(`forward_costs`).
Peak memory is taken at the warm-up, and the parts of a round are timed in separate runs, so that observing
does not change the figures. What other programs took is noted for every run, and a turn that they disturbed
is taken again (`profiling.others`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from statistics import median

from foredraft.bench import forward_costs
from foredraft.bench.bench_records import ForwardCosts, RoundTime, Row, Spread, TurnCount
from foredraft.bench.bench_settings import MAX_REPEATED, BenchSettings
from foredraft.bench.contender import BenchContext, Contender, Timing
from foredraft.bench.contenders import CONTENDERS, PLAIN
from foredraft.bench.figures import Group, Runs, Series, make_row
from foredraft.bench.lineup import LineUp
from foredraft.bench.machine_record import Memory
from foredraft.bench.schedule import groups_of, turns
from foredraft.bench.text_score import mean_log_probability
from foredraft.ngrams import repeated
from foredraft.profiling.others import Load, QuietTurns, Watch, worst
from foredraft.profiling.phases import RoundClock, observed

__all__ = ["Measurement", "Progress"]

# Groups of prompts per workload on which the parts of a round are timed: a mean round needs no more, and
# these runs count for nothing else.
PROFILED_GROUPS = 3

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurement of all workloads.

    Attributes:
        context: The settings that all contenders share.
        lineup: The contenders.
        options: The benchmark's options.
        memory: Measures the peak memory of a run.
        longest_draft: Tokens of the longest draft of any contender.
        weight_read_seconds: Time to read the weights of one step at the machine's memory bandwidth; None
            where the bandwidth is unknown.
        progress: Called with (stage, done, total).
    """

    context: BenchContext
    lineup: LineUp
    options: BenchSettings
    memory: Memory
    longest_draft: int
    weight_read_seconds: float | None
    progress: Progress

    def measure(
        self, workload: str, prompts: list[list[int]]
    ) -> Iterator[tuple[ForwardCosts, list[Row], TurnCount]]:
        """Yield the costs of bare forwards, the rows and the turns of a workload, one batch size at a time.

        Args:
            workload: The workload's name.
            prompts: Token ids of each prompt.
        """
        expected = self._plain_outputs(workload, prompts)
        counted = [repeated(tokens) < MAX_REPEATED for tokens in expected]
        at_batch_1: dict[str, Spread | None] = {}  # tokens/s by contender
        for batch in sorted(set(self.options.batch)):  # 1 comes first, for `over_single` of the others
            groups = groups_of(counted, batch)
            stage = f"{workload}, batch {batch}"
            added_bytes = self._warm_up(stage, batch, _select(prompts, groups[0]))
            running = [contender for contender in self.lineup.contenders if contender.name in added_bytes]
            meter = self._meter(prompts, batch)
            quiet = QuietTurns(len(groups) * self.options.repeats)
            runs = tuple(self._timed_runs(stage, prompts, groups, running, meter, quiet))
            found = meter.costs(self.weight_read_seconds, workload)
            series = Series(workload, batch, runs, tuple(expected), found, self.weight_read_seconds)
            rows = []
            for contender in self.lineup.contenders:
                if contender.name not in added_bytes:
                    rows.append(_skipped_row(workload, batch, contender))
                    continue
                row = self._row(series, prompts, contender, running, at_batch_1.get(contender.name))
                added = self.lineup.loaded_bytes[contender.name] + added_bytes[contender.name]
                rows.append(replace(row, peak_memory=added if self.memory.measurable else None))
            if batch == 1:
                pairs = zip(self.lineup.contenders, rows, strict=True)
                at_batch_1 = {contender.name: row.tokens_per_second for contender, row in pairs}
            yield found, rows, TurnCount(workload, batch, quiet.kept, quiet.repeated, quiet.disturbed)

    def _plain_outputs(self, workload: str, prompts: list[list[int]]) -> list[tuple[int, ...]]:
        """Decode each prompt alone and plainly: the reference for exactness and for which prompts count."""
        plain = next(contender for contender in self.lineup.contenders if contender.name == PLAIN)
        outputs = []
        stage = f"{workload}, plain outputs"
        self.progress(stage, 0, len(prompts))
        for done, ids in enumerate(prompts, start=1):
            outputs.append(plain.run([ids], self.options.new_tokens).tokens[0])
            self.progress(stage, done, len(prompts))
        return outputs

    def _warm_up(self, stage: str, batch: int, prompts: list[list[int]]) -> dict[str, int]:
        """Run each contender that takes this batch size once.

        A program that fails is dropped from the line-up unless the user named it.

        Returns:
            Peak memory that the run added, in bytes, by contender's name.
        """
        added: dict[str, int] = {}
        contenders = list(self.lineup.contenders)
        for done, contender in enumerate(contenders):
            self.progress(f"{stage}, warm-up", done, len(contenders))
            if contender.batch_sizes is not None and batch not in contender.batch_sizes:
                continue
            try:
                with self.memory.peak() as peak:
                    contender.run(prompts, self.options.new_tokens)
            except Exception as error:
                if not contender.peer or contender.method in (self.options.methods or ()):
                    raise
                self.lineup.drop(contender, f"{type(error).__name__}: {error}")
                continue
            added[contender.name] = peak[0]
        self.progress(f"{stage}, warm-up", len(contenders), len(contenders))
        return added

    def _meter(self, prompts: list[list[int]], batch: int) -> forward_costs.CostMeter:
        """Return a meter at the context length of the median prompt, half way through its new tokens."""
        context = int(median(map(len, prompts))) + self.options.new_tokens // 2
        return forward_costs.CostMeter(self.context.llm.loaded, batch, context, self.longest_draft)

    def _timed_runs(
        self,
        stage: str,
        prompts: list[list[int]],
        groups: Sequence[Group],
        contenders: list[Contender],
        meter: forward_costs.CostMeter,
        quiet: QuietTurns,
    ) -> Iterator[Runs]:
        """Yield each group's timings: in every repeat the contenders take turns, then the meter runs."""
        repeats, done = self.options.repeats, 0
        self.progress(stage, 0, len(groups) * repeats)
        meter_turns = ceil(forward_costs.REPEATS / (len(groups) * repeats))
        for group in groups:
            timings: dict[str, list[Timing]] = {contender.name: [] for contender in contenders}
            discarded: list[dict[str, Timing]] = []
            for repeat in range(repeats):
                order, chosen = turns(contenders, repeat), _select(prompts, group)
                taken, repeated = quiet.take(partial(self._turn, order, chosen))
                for name, timing in taken.items():
                    timings[name].append(timing)
                discarded += repeated
                for _ in range(meter_turns):
                    meter.turn()
                done += 1
                self.progress(stage, done, len(groups) * repeats)
            yield Runs(group, timings, tuple(discarded))

    def _turn(
        self, contenders: Sequence[Contender], prompts: list[list[int]]
    ) -> tuple[dict[str, Timing], Load | None]:
        """Run each contender once; return the timings by name, and the load that disturbed a run most."""
        timings: dict[str, Timing] = {}
        for contender in contenders:
            watch = Watch()
            timing = contender.run(prompts, self.options.new_tokens)
            timings[contender.name] = replace(timing, load=watch.load())
        return timings, worst(timing.load for timing in timings.values())

    def _row(
        self,
        series: Series,
        prompts: list[list[int]],
        contender: Contender,
        running: list[Contender],
        at_batch_1: Spread | None,
    ) -> Row:
        peers = [other.name for other in running if other.peer and other is not contender]
        row = make_row(
            series, contender, peers, comparable=self._comparable(contender), at_batch_1=at_batch_1
        )
        scored = any(CONTENDERS[other.method].scored for other in running)
        return replace(
            row,
            round_time=self._round_time(series, prompts, contender),
            log_probability=self._log_probability(series, prompts, contender) if scored else None,
        )

    def _log_probability(
        self, series: Series, prompts: list[list[int]], contender: Contender
    ) -> Spread | None:
        """Return the target's mean log-probability of a new token, over the counted texts of a first run."""
        runner = self.context.llm.loaded.runner
        return Spread.of(
            mean_log_probability(runner, prompts[prompt], tokens)
            for runs in series.counted
            for prompt, tokens in zip(runs.group.prompts, runs.timings[contender.name][0].tokens, strict=True)
        )

    def _comparable(self, contender: Contender) -> bool:
        """Return whether the contender's tokens must equal plain decoding's."""
        if not contender.lossless:
            return False
        return self.options.temperature == 0 or (self.options.acceptance == "coupled" and not contender.peer)

    def _round_time(self, series: Series, prompts: list[list[int]], contender: Contender) -> RoundTime | None:
        """Time the parts of a mean round in runs of their own; None for other programs."""
        if contender.peer:
            return None
        seconds, rounds = 0.0, 0
        engine = self.context.llm.loaded.engine
        parts = RoundClock(engine)
        with observed(engine, parts):
            for runs in series.counted[:PROFILED_GROUPS]:
                timing = contender.run(_select(prompts, runs.group), self.options.new_tokens)
                seconds += timing.decode_seconds
                rounds += timing.passes or 0
        if not rounds:
            return None
        draft, verify = parts.seconds["draft"], parts.seconds["verify"]
        return RoundTime(draft / rounds, verify / rounds, (seconds - draft - verify) / rounds, rounds)


def _skipped_row(workload: str, batch: int, contender: Contender) -> Row:
    """Return the row, without figures, of a contender that does not take this batch size."""
    sizes = " or ".join(map(str, contender.batch_sizes or ()))
    note = f"decodes at batch size {sizes} only"
    return Row(workload, batch, contender.method, contender.peer, contender.lossless, note)


def _select(prompts: list[list[int]], group: Group) -> list[list[int]]:
    return [prompts[index] for index in group.prompts]
