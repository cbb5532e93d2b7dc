"""The measurement: every contender on every prompt, in alternating order, the costs of bare forwards, and the
rows.

Every contender runs once as a warm-up, at which peak memory is taken. Then, for each group of prompts, the
contenders take turns, interleaved with the bare forwards that explain the speed-ups: costs on a shared
machine change within minutes. The parts of a round are timed in runs of their own. A turn that other programs
disturbed is taken again (`profiling.others`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from statistics import median

import torch

from foredraft.bench.bench_records import (
    MAX_REPEATED,
    Cost,
    DraftCost,
    ForwardCosts,
    RoundTime,
    Row,
    Spread,
    TurnCount,
)
from foredraft.bench.contender import BenchContext, Contender, LineUp, Timing
from foredraft.bench.contenders import CONTENDERS, PLAIN
from foredraft.bench.figures import Runs, Series, make_row
from foredraft.bench.machine_record import Memory
from foredraft.bench.settings import BenchSettings, Progress
from foredraft.bench.workload import Group, groups_of, turns
from foredraft.doctor.teacher_forced import read_text
from foredraft.drafters.lookup import repeated
from foredraft.llm.loaded import Loaded
from foredraft.model.runner import Runner
from foredraft.profiling.others import Load, QuietTurns, Watch, worst
from foredraft.profiling.timing import RoundTimer, draft_seconds, forward_turns, observed

WIDE = (8, 16, 32)  # columns beyond the longest draft that are measured for one sequence
REPEATS = 30  # turns of a cost that is measured by itself


class CostMeter:
    """Measures the costs of `batch` sequences of `context` tokens, with drafts of up to `longest`."""

    def __init__(self, loaded: Loaded, batch: int, context: int, longest: int) -> None:
        runner, drafters = loaded.runner, loaded.engine.drafters
        self.batch, self.context, self.longest = batch, context, longest
        widths = [*range(1, longest + 2)]
        if batch == 1:
            widths += [wide for wide in WIDE if longest + 1 < wide <= runner.max_queries]
        self._drafters = tuple(drafters)
        self._turns = forward_turns(runner, drafters, batch, context, widths=widths, lengths={1, longest})
        self._turns.take(counts=False)
        self._loads: list[Load] = []

    def turn(self) -> None:
        """Time each forward and each round once."""
        watch = Watch()
        self._turns.take()
        if (load := watch.load()) is not None:
            self._loads.append(load)

    def costs(self, read_seconds: float | None, workload: str | None) -> ForwardCosts:
        """Return the costs of all turns so far, one at least."""
        seconds = self._turns.seconds
        step = median(seconds[1])
        verifying = []
        for rows in (key for key in seconds if isinstance(key, int)):
            spread = Spread.of(seconds[rows])
            assert spread is not None
            verifying.append(Cost(rows, spread.median / step, spread))
        drafting = {name: self._draft_cost(name, step) for name in self._drafters}
        share = None if read_seconds is None else read_seconds / step
        others = Spread.of(load.others for load in self._loads)
        return ForwardCosts(self.batch, self.context, tuple(verifying), drafting, share, workload, others)

    def _draft_cost(self, name: str, step: float) -> DraftCost:
        seconds, longest = self._turns.seconds, self.longest
        if (name, 1) not in seconds:
            return DraftCost(0.0, 0.0)
        first, whole = (
            draft_seconds(seconds[name, length], seconds[length + 1]) / step for length in (1, longest)
        )
        return DraftCost(first, max(0.0, whole - first) / max(1, longest - 1))


def measure_costs(
    loaded: Loaded, batch: int, context: int, longest: int, *, repeats: int = REPEATS
) -> ForwardCosts:
    """Measure the costs in one go."""
    meter = CostMeter(loaded, batch, context, longest)
    for _ in range(repeats):
        meter.turn()
    return meter.costs(None, None)


def mean_log_probability(runner: Runner, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """Return the mean of log p of new tokens after a prompt, at temperature 1, in nats."""
    read = read_text(runner, [*prompt, *tokens[:-1]], ())
    log_p = read.logits[len(prompt) - 1 :].log_softmax(-1)  # [len(tokens), V]
    places = torch.tensor(list(tokens), device=log_p.device)[:, None]
    return float(log_p.gather(1, places).mean())


PROFILED_GROUPS = 3  # of prompts, on which the parts of a round are timed: a mean round needs no more


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurement of all workloads."""

    context: BenchContext  # the settings that all contenders share
    lineup: LineUp  # the contenders
    options: BenchSettings  # the benchmark's options
    memory: Memory  # measures the peak memory of a run
    longest_draft: int  # tokens of the longest draft of any contender
    weight_read_seconds: float | None  # of one step's weights at the memory bandwidth; None: unknown
    progress: Progress  # called with (stage, done, total)

    def measure(
        self, workload: str, prompts: list[list[int]]
    ) -> Iterator[tuple[ForwardCosts, list[Row], TurnCount]]:
        """Yield the costs of bare forwards, rows and turns of a workload, one batch size at a time."""
        # each prompt alone and plainly: the reference for exactness and for which prompts count
        plain = next(contender for contender in self.lineup.contenders if contender.name == PLAIN)
        expected, stage = list[tuple[int, ...]](), f"{workload}, plain outputs"
        self.progress(stage, 0, len(prompts))
        for done, ids in enumerate(prompts, start=1):
            expected.append(plain.run([ids], self.options.new_tokens).tokens[0])
            self.progress(stage, done, len(prompts))
        counted = [repeated(tokens) < MAX_REPEATED for tokens in expected]
        at_batch_1: dict[str, Spread | None] = {}  # tokens/s by contender
        for batch in sorted(set(self.options.batch)):  # 1 comes first, for `over_single` of the others
            groups = groups_of(counted, batch)
            stage = f"{workload}, batch {batch}"
            added_bytes = self._warm_up(stage, batch, _select(prompts, groups[0]))
            running = [contender for contender in self.lineup.contenders if contender.name in added_bytes]
            # the context of the median prompt, half way through its new tokens
            context = int(median(map(len, prompts))) + self.options.new_tokens // 2
            meter = CostMeter(self.context.llm.loaded, batch, context, self.longest_draft)
            quiet = QuietTurns(len(groups) * self.options.repeats)
            runs = tuple(self._timed_runs(stage, prompts, groups, running, meter, quiet))
            found = meter.costs(self.weight_read_seconds, workload)
            series = Series(workload, batch, runs, tuple(expected), found, self.weight_read_seconds)
            rows = []
            for contender in self.lineup.contenders:
                if contender.name not in added_bytes:  # it does not take this batch size
                    sizes = " or ".join(map(str, contender.batch_sizes or ()))
                    note = f"decodes at batch size {sizes} only"
                    rows.append(
                        Row(workload, batch, contender.method, contender.peer, contender.lossless, note)
                    )
                    continue
                row = self._row(series, prompts, contender, running, at_batch_1.get(contender.name))
                added = self.lineup.loaded_bytes[contender.name] + added_bytes[contender.name]
                rows.append(replace(row, peak_memory=added if self.memory.measurable else None))
            if batch == 1:
                pairs = zip(self.lineup.contenders, rows, strict=True)
                at_batch_1 = {contender.name: row.tokens_per_second for contender, row in pairs}
            yield found, rows, TurnCount(workload, batch, quiet.kept, quiet.repeated, quiet.disturbed)

    def _warm_up(self, stage: str, batch: int, prompts: list[list[int]]) -> dict[str, int]:
        """Run each contender once; one that fails is dropped unless the user named it."""
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

    def _timed_runs(
        self,
        stage: str,
        prompts: list[list[int]],
        groups: Sequence[Group],
        contenders: list[Contender],
        meter: CostMeter,
        quiet: QuietTurns,
    ) -> Iterator[Runs]:
        """Yield each group's timings: in every repeat the contenders take turns, then the meter runs."""
        repeats, done = self.options.repeats, 0
        self.progress(stage, 0, len(groups) * repeats)
        meter_turns = ceil(REPEATS / (len(groups) * repeats))
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
        options = self.options
        peers = [other.name for other in running if other.peer and other is not contender]
        # whether its tokens must equal plain decoding's
        seeded = options.acceptance == "coupled" and not contender.peer
        comparable = contender.lossless and (options.temperature == 0 or seeded)
        row = make_row(series, contender, peers, comparable=comparable, at_batch_1=at_batch_1)
        likelihood = None
        if any(CONTENDERS[other.method].scored for other in running):  # of the counted texts of a first run
            likelihood = Spread.of(
                mean_log_probability(self.context.llm.loaded.runner, prompts[prompt], tokens)
                for runs in series.counted
                for prompt, tokens in zip(
                    runs.group.prompts, runs.timings[contender.name][0].tokens, strict=True
                )
            )
        round_time = self._round_time(series, prompts, contender)
        return replace(row, round_time=round_time, log_probability=likelihood)

    def _round_time(self, series: Series, prompts: list[list[int]], contender: Contender) -> RoundTime | None:
        """Time the parts of a mean round in runs of their own; None for other programs."""
        if contender.peer:
            return None
        seconds, rounds = 0.0, 0
        engine = self.context.llm.loaded.engine
        parts = RoundTimer(engine)
        with observed(engine, parts):
            for runs in series.counted[:PROFILED_GROUPS]:
                timing = contender.run(_select(prompts, runs.group), self.options.new_tokens)
                seconds += timing.decode_seconds
                rounds += timing.passes or 0
        if not rounds:
            return None
        draft, verify = parts.seconds["draft"], parts.seconds["verify"]
        return RoundTime(draft / rounds, verify / rounds, (seconds - draft - verify) / rounds, rounds)


def _select(prompts: list[list[int]], group: Group) -> list[list[int]]:
    return [prompts[index] for index in group.prompts]
