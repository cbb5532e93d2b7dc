"""The race: every contender on every prompt, in turns, and the rows that come of it.

Contract: every contender is warmed up before its runs count; then, group by group of prompts, all take turns
(`schedule`), and the bare forwards that explain them (`costs`) take theirs in between. What memory a run adds
is seen at the warm-up, and a round is taken apart in runs of its own, so that looking does not change what is
seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

from foredraft.bench import costs
from foredraft.bench.contender import BenchContext, Contender, Timing
from foredraft.bench.figures import Group, Runs, Series, row_of
from foredraft.bench.lineup import LineUp
from foredraft.bench.machine import Memory
from foredraft.bench.options import MAX_REPEATED, Options
from foredraft.bench.records import PLAIN, Costs, RoundTime, Row, Spread
from foredraft.bench.schedule import groups_of, turns
from foredraft.bench.timing import parted
from foredraft.ngrams import repeated

__all__ = ["Measurement", "Progress"]

LOOKED_INTO = 3  # groups of a workload whose rounds are taken apart

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What stays the same from row to row.

    longest: of all drafts. read_seconds: of a step's weights at the machine's bandwidth. progress: (stage,
    done, total).
    """

    setting: BenchContext
    field: LineUp
    options: Options
    memory: Memory
    longest: int
    read_seconds: float | None
    progress: Progress

    def rows(self, workload: str, prompts: list[list[int]]) -> Iterator[tuple[Costs, list[Row]]]:
        """Those of each batch size, as soon as they are there, and what forwards cost between their runs."""
        expected = self._plain_texts(workload, prompts)
        counted = [repeated(tokens) < MAX_REPEATED for tokens in expected]
        single: dict[str, Spread | None] = {}
        for batch in sorted(set(self.options.batch)):  # 1 comes first, and others are held against it
            groups = groups_of(counted, batch)
            added = self._warm_up(batch, _of(prompts, groups[0]))
            racing = [contender for contender in self.field.contenders if contender.name in added]
            meter = self._meter(prompts, batch)
            runs = tuple(self._race(f"{workload}, batch {batch}", prompts, groups, racing, meter))
            met = meter.costs(self.read_seconds, workload)
            series = Series(workload, batch, runs, tuple(expected), met, self.read_seconds)
            rows: list[Row] = []
            for contender in self.field.contenders:
                name = contender.name
                if name not in added:
                    note = f"takes {' or '.join(map(str, contender.batches or ()))} prompt at a time"
                    rows.append(
                        Row(workload, batch, contender.method, contender.peer, contender.lossless, note)
                    )
                    continue
                made = row_of(
                    series,
                    contender,
                    [other.name for other in racing if other.peer and other is not contender],
                    comparable=self._comparable(contender),
                    single=single.get(name),
                    round_time=self._round_time(series, prompts, contender),
                    peak_memory=self.field.loaded[name] + added[name] if self.memory.known else None,
                )
                rows.append(made)
            if batch == 1:
                pairs = zip(self.field.contenders, rows, strict=True)
                single = {contender.name: row.tokens_per_second for contender, row in pairs}
            yield met, rows

    def _plain_texts(self, workload: str, prompts: list[list[int]]) -> list[tuple[int, ...]]:
        """What plain decoding makes of each prompt alone: what counts, and what others are compared with."""
        plain = next(contender for contender in self.field.contenders if contender.name == PLAIN)
        texts = []
        for done, ids in enumerate(prompts, start=1):
            texts.append(plain.run([ids], self.options.new_tokens).tokens[0])
            self.progress(f"{workload}, plain texts", done, len(prompts))
        return texts

    def _warm_up(self, batch: int, prompts: list[list[int]]) -> dict[str, int]:
        """Run once each contender that takes so many; the bytes that it added, by name. A peer that fails is
        left out from now on, unless it was asked for by name."""
        added: dict[str, int] = {}
        for contender in list(self.field.contenders):
            if contender.batches is not None and batch not in contender.batches:
                continue
            try:
                with self.memory.peak() as peak:
                    contender.run(prompts, self.options.new_tokens)
            except Exception as error:
                if not contender.peer or contender.method in (self.options.methods or ()):
                    raise
                self.field.leave(contender, f"{type(error).__name__}: {error}")
                continue
            added[contender.name] = peak[0]
        return added

    def _meter(self, prompts: list[list[int]], batch: int) -> costs.Meter:
        """At the context of a median prompt half way through its new tokens."""
        context = int(median(map(len, prompts))) + self.options.new_tokens // 2
        return costs.Meter(self.setting.llm, batch, context, self.longest)

    def _race(
        self,
        stage: str,
        prompts: list[list[int]],
        groups: Sequence[Group],
        contenders: list[Contender],
        meter: costs.Meter,
    ) -> Iterator[Runs]:
        """Each group's runs: in every repeat, the contenders take turns, and then the meter."""
        repeats, done = self.options.repeats, 0
        looks = ceil(costs.REPEATS / (len(groups) * repeats))
        for group in groups:
            timings: dict[str, list[Timing]] = {contender.name: [] for contender in contenders}
            for repeat in range(repeats):
                for contender in turns(contenders, repeat):
                    timing = contender.run(_of(prompts, group), self.options.new_tokens)
                    timings[contender.name].append(timing)
                for _ in range(looks):
                    meter.turn()
                done += 1
                self.progress(stage, done, len(groups) * repeats)
            yield Runs(group, timings)

    def _comparable(self, contender: Contender) -> bool:
        """Whether its tokens must be plain decoding's."""
        if not contender.lossless:
            return False
        return self.options.temperature == 0 or (self.options.coupled and not contender.peer)

    def _round_time(self, series: Series, prompts: list[list[int]], contender: Contender) -> RoundTime | None:
        if contender.peer:
            return None
        seconds, rounds = 0.0, 0
        with parted(self.setting.llm.engine) as parts:
            for runs in series.counted[:LOOKED_INTO]:
                timing = contender.run(_of(prompts, runs.group), self.options.new_tokens)
                seconds += timing.decode_seconds
                rounds += timing.passes or 0
        if not rounds:
            return None
        rest = seconds - parts.draft - parts.verify
        return RoundTime(parts.draft / rounds, parts.verify / rounds, rest / rounds, rounds)


def _of(prompts: list[list[int]], group: Group) -> list[list[int]]:
    return [prompts[index] for index in group.prompts]
