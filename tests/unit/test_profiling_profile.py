"""Profiles and timers of an engine, on a machine whose clock is scripted: only its forwards and `accept` take time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import user_cache
from foredraft.decode import engine as engine_module
from foredraft.decode.drafter import AutoregressiveDrafter, Drafter, DraftPass, ModelFreeDrafter
from foredraft.decode.engine import Engine
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Fixed, Policy
from foredraft.decode.policy.auto import Auto
from foredraft.decode.policy.cost_table import CostTable
from foredraft.decode.sequence import Sequence
from foredraft.drafters.heads.layers import TimedPass
from foredraft.model.runner import DraftInputs, Forward
from foredraft.profiling import host, profile, timing
from foredraft.profiling.profile import Samples, agreed, load_profile, measure_profile
from foredraft.profiling.timing import DecodingTimer, RoundTimer, observed
from tests.support.mutation import Mutation, assert_caught, defect, replaced
from tests.support.mutations import argument, during

Function = Callable[..., Any]

CPU = torch.device("cpu")
VOCABULARY = 8
LONGEST = 5
PASS, PASS_MS = ("target", 1, 3), 2.2 + 0.5 + 0.2  # a pass over three columns, with its host work


class Machine:
    """A clock in seconds that moves only where work is done.

    Attributes:
        disturbed: Work, and how often it ran before -> how many times longer it takes.
        ran: How often each work ran.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: Counter[object] = Counter()
        self.disturbed: Callable[[Any, int], float] = lambda work, count: 1.0

    def spend(self, ms: float, work: object) -> None:
        self.now += ms / 1e3 * self.disturbed(work, self.ran[work])
        self.ran[work] += 1

    def slow(self, slowed: object, factor: Callable[[int], float] = lambda count: 1.3**count) -> None:
        """Disturb one work alone; by default no two samples of it agree."""
        self.disturbed = lambda work, count: factor(count) if work == slowed else 1.0


class FakeCache:
    device, dtype, recurrent = CPU, torch.float32, None

    def __init__(self, rows: int, positions: int) -> None:
        self.rows, self.positions, self.lengths = rows, positions, [0] * rows

    def copy_row(self, source: int, target: int, length: int) -> None:
        self.lengths[target] = length

    def zero_row(self, row: int) -> None:
        self.lengths[row] = 0

    def wipe(self, row: int, length: int) -> None:
        """Forget what lies past the length."""


class FakeRunner:
    """A forward over n columns takes `first` + `column` (n - 1) ms; a whole draft 0.1 ms and `first` a step."""

    chunk, max_queries, by_kernels, takes_leaves, choices = 4, 16, False, False, ""

    def __init__(self, machine: Machine, name: str, first: float, column: float) -> None:
        self.decoder = SimpleNamespace(spec=name)
        self.machine, self.name, self.first, self.column = machine, name, first, column

    def new_cache(self, rows: int, positions: int) -> Any:
        return FakeCache(rows, positions)

    def forward(self, cache: Any, tokens: Tensor, starts: list[int], **more: Any) -> Forward:
        rows, width = tokens.shape
        assert max(starts) + width <= cache.positions + self.max_queries, "the cache has slack"
        self.machine.spend(self.first + self.column * (rows * width - 1), (self.name, rows, width))
        return Forward(torch.zeros(rows, width, VOCABULARY), torch.zeros(rows, width, 1), {})

    def prefill(self, cache: Any, row: int, tokens: list[int], start: int, **more: Any) -> Any:
        self.machine.spend(self.first + self.column * (len(tokens) - 1), (self.name, "prefill", len(tokens)))
        return SimpleNamespace(aux_states={})

    def draft(self, cache: Any, inputs: DraftInputs, **more: Any) -> Any:
        longest = max(inputs.lengths)
        self.machine.spend(0.1 + self.first * longest, (self.name, "draft", longest))
        return object()


class Small(Drafter):
    name = "small"

    def __init__(self, runner: Any) -> None:
        self.draft_pass = DraftPass(runner)


class Steps(AutoregressiveDrafter):
    name = "steps"


class Free(ModelFreeDrafter):
    name = "free"

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [[0] * budget for _, budget in requests]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Return the machine. `accept` takes 0.5 ms, 0.1 ms for each drafted token and sibling, and 0.3 ms with siblings.

    It takes twice that where rows draw.
    """
    machine = Machine()
    for module in (timing, profile, host):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: machine.now))
    accept = engine_module.accept

    def slow(draft: Any, p: Any, *given: Any) -> Any:
        ms = 0.5 + 0.1 * draft.tokens.shape[1]
        if draft.siblings is not None:
            ms += 0.3 + 0.1 * draft.siblings.tokens.shape[1]
        machine.spend(ms * (1 if p.all_one_hot else 2), "accept")
        return accept(draft, p, *given)

    monkeypatch.setattr(engine_module, "accept", slow)
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    return machine


def engine_of(
    machine: Machine, policy: Policy | None = None, *drafters: Drafter, positions: int = 300
) -> Engine:
    target: Any = FakeRunner(machine, "target", 2.0, 0.1)
    drafters = drafters or (Small(FakeRunner(machine, "small", 0.3, 0.01)), Free())
    named, cache = {each.name: each for each in drafters}, target.new_cache(4, positions)
    return Engine(target, cache, policy or Fixed(3), named, vocabulary=VOCABULARY)


def measured(machine: Machine) -> profile.Profile:
    return measure_profile(engine_of(machine), LONGEST)


def kept(engine: Engine) -> profile.Profile:
    return load_profile(engine, LONGEST, lambda done, total: None)


def test_a_profile_holds_passes_host_work_drafts_and_reads(machine: Machine) -> None:
    engine, progress = engine_of(machine), list[tuple[int, int]]()
    found = measure_profile(engine, LONGEST, lambda done, total: progress.append((done, total)))
    assert found.doubt is None and found.seconds == machine.now
    assert progress == [(0, 2), (1, 2), (2, 2)]
    for table, factor in ((found.greedy, 1), (found.sampled, 2)):
        columns_of = {batch: [n for n, _ in points] for batch, points in table.passes.items()}
        assert columns_of == {1: [1, 2, 3, 5, 6], 4: [4, 8, 12, 20, 24]}
        for batch, columns in ((1, 1), (1, 6), (4, 4), (4, 24)):
            cost = 2.0 + 0.1 * (columns - 1) + factor * (0.5 + 0.1 * (columns // batch - 1))
            assert table.verify(batch, columns) == pytest.approx(cost)
        for batch in (1, 4):  # a whole draft takes 0.1 + 0.3 k ms
            assert table.drafts["small"][batch] == pytest.approx((0.4, 0.3))
            assert table.drafts["free"][batch] == (0.0, 0.0)
        assert table.reads == pytest.approx({"small": 0.01})


def test_costs_of_other_heads_are_kept_apart(machine: Machine) -> None:
    """Their draft passes run on the target's runner, which says nothing of the head."""
    engine, keys = engine_of(machine), []
    for name in ("a head of 1 layer", "a head of 4 layers"):
        step = TimedPass(engine.target, name=name, step=lambda *_: torch.zeros(1, 8))  # type: ignore[arg-type]
        engine.drafters["small"].draft_pass = step
        keys.append(profile._key(engine, LONGEST))
    assert keys[0] != keys[1]


def test_a_profile_holds_what_siblings_cost_the_host(machine: Machine) -> None:
    """Where a drafter has further choices, and the passes of the target take them."""
    engine = engine_of(machine, None, Steps())
    assert not measure_profile(engine, LONGEST).greedy.trees
    target: Any = engine.target
    target.takes_leaves = True
    found = measure_profile(engine, LONGEST)
    assert found.doubt is None
    for table, factor in ((found.greedy, 1), (found.sampled, 2)):
        assert dict(table.trees) == pytest.approx({1: 0.3 * factor, 4: 0.3 * factor})
    assert not measure_profile(engine_of(machine, None, Free()), LONGEST).greedy.trees
    target.max_queries = LONGEST + 1
    assert not measure_profile(engine, LONGEST).greedy.trees, "no room for siblings"


@pytest.mark.parametrize("positions", [8, 300])
def test_measuring_leaves_the_engine_empty(machine: Machine, positions: int) -> None:
    """Also where the cache has hardly room for one draft."""
    engine = engine_of(machine, positions=positions)
    observer, policy = engine.observer, engine.policy
    measure_profile(engine, LONGEST)
    assert not engine.rows.sequences and engine.scheduler.idle
    assert engine.cache.lengths == [0] * 4
    assert (engine.observer, engine.policy) == (observer, policy)
    engine.submit(Sequence(0, [1, 2], SamplingParams(temperature=0, max_new_tokens=2, ignore_eos=True), 0))
    while not engine.scheduler.idle:
        engine.step()


def test_a_cost_is_the_least_sample_where_two_agree(machine: Machine) -> None:
    """Three of four samples take three times as long: turns 4 and 8 agree. Every timed run follows a warm one."""
    assert agreed([3.0, 1.0, 1.09]) == 1.0 and agreed([3.0, 1.0, 1.11, 1.12]) is None
    machine.slow(PASS, lambda count: 3.0 if count // 2 % 4 else 1.0)
    found = measured(machine)
    assert found.doubt is None
    assert found.greedy.verify(1, 3) == pytest.approx(PASS_MS)
    assert (machine.ran[PASS], machine.ran["target", 4, 3]) == (2 * (1 + 8), 2 * (1 + 6))


def test_columns_neither_seem_free_nor_forbid_drafts_on_a_disturbed_machine(machine: Machine) -> None:
    """No width is believed; or two samples of a pass agree at ten times its cost while another never agrees."""
    machine.disturbed = lambda work, count: 1.2**count if work[0] == "target" and work[-1] > 1 else 1.0
    found = measured(machine)
    assert found.doubt is not None
    assert found.greedy.verify(1, 1 + LONGEST) >= found.greedy.plain(1) + 0.1 * LONGEST
    machine.ran.clear()
    longest = "target", 1, 1 + LONGEST
    machine.disturbed = lambda work, count: {PASS: 1.3**count, longest: 10.0}.get(work, 1.0)
    found = measured(machine)
    assert found.doubt is not None
    assert found.greedy.verify(1, 1 + LONGEST) == pytest.approx(2 * 2.0 + 0.5 + 0.1 * LONGEST)


def test_passes_of_many_rows_are_not_thought_as_cheap_as_those_of_one(machine: Machine) -> None:
    machine.slow(PASS)
    engine, columns = engine_of(machine), 4 * (1 + LONGEST)
    engine.target.column = 0.35  # type: ignore[attr-defined]
    found = measure_profile(engine, LONGEST)
    assert found.doubt is not None
    cost = 2 + 0.35 * (columns - 1) + 0.5 + 0.1 * LONGEST
    assert found.greedy.verify(4, columns) == pytest.approx(cost)


def test_measuring_ends_when_time_is_up(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "LIMIT_SECONDS", 0.0)
    machine.slow(PASS)
    assert measured(machine).doubt is not None
    assert machine.ran[PASS] == 2 * (1 + 2), "60 plain steps of 2 ms hold two turns"


def test_measuring_ends_after_its_budget(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """No two samples agree. Without the budget all turns would be taken, for one row and for four."""
    machine.disturbed = lambda work, count: 3.0 * 1.2 ** (-count % 24) if work != "accept" else 1.0
    engine = engine_of(machine, Auto(LONGEST))
    longest_work = 3 * 1.2**23 * 2.5e-3
    assert profile.use_profile(engine) <= profile.BUDGET_SECONDS + longest_work
    assert machine.now <= profile.BUDGET_SECONDS + longest_work
    [line] = [record.getMessage() for record in caplog.records]
    assert "are known, because measuring was cut short after 3 s, when " in line
    assert "goes on with those that were measured, assumes the rest" in line


def test_a_slow_model_goes_on_with_the_costs_of_one_row(machine: Machine) -> None:
    """Passes of 0.2 s and more: the budget holds each of one row once or twice, and none of four rows."""
    machine.disturbed = lambda work, count: 100.0 if work != "accept" else 1.0
    found = measured(machine)
    assert found.doubt is not None and "cut short" in found.doubt
    assert set(found.greedy.passes) == {1} and not found.greedy.reads
    assert found.greedy.verify(1, 3) == pytest.approx(220.0), "host work counts as free"
    assert found.greedy.verify(4, 4) == found.greedy.plain(1) == pytest.approx(200.0)
    assert machine.now <= profile.BUDGET_SECONDS + 2 * 0.45


def test_host_work_takes_no_further_round_once_time_is_up(machine: Machine) -> None:
    engine = engine_of(machine)
    host.host_ms(engine, 4, 0, draws=False)
    in_time = machine.ran["accept"]
    assert host.host_ms(engine, 4, 0, draws=False, until=0.0) == pytest.approx(0.5)
    assert machine.ran["accept"] - in_time == in_time - (host.ROUNDS + 2) + 1


def test_costs_that_were_steady_in_time_are_believed_however_late_it_is(machine: Machine) -> None:
    seconds = measured(machine).seconds
    with replaced(profile, "BUDGET_SECONDS", seconds - 1e-4):  # the last work ends a little later
        assert measured(machine).doubt is None


# work whose samples never agree -> what its least sample makes of the table
UNSTEADY: dict[Any, Callable[[CostTable], bool]] = {
    PASS: lambda table: PASS_MS < table.verify(1, 3) <= table.verify(1, 5),
    ("small", "draft", profile.DRAFT): lambda table: 0.3 <= table.drafts["small"][1][1] < 0.5,
    ("small", "prefill", profile.READ): lambda table: not table.reads,
}


@pytest.mark.parametrize("work", UNSTEADY)
def test_a_busy_machine_is_told_why(machine: Machine, caplog: pytest.LogCaptureFixture, work: Any) -> None:
    machine.slow(work, lambda count: 1.11**count)
    found = kept(engine_of(machine))
    assert found.doubt is not None and UNSTEADY[work](found.greedy)
    assert [n for n, _ in found.greedy.passes[1]] == [1, 2, 3, 5, 6]
    [line] = [record.getMessage() for record in caplog.records]
    assert "because only 22 of 23 costs were steady" in line
    if work == PASS:
        assert machine.ran[PASS] == 2 * (1 + profile.TURNS[1])
    caplog.clear()
    machine.slow(None)
    assert kept(engine_of(machine)).doubt is None and not caplog.records


def test_steps_that_seem_free_are_left_to_the_assumption(machine: Machine) -> None:
    machine.disturbed = lambda work, count: 0.0 if work[0] == "small" else 1.0
    assert set(measured(machine).greedy.drafts) == {"free"}


def test_a_draft_model_that_reads_slowly_has_a_profile_that_is_kept(machine: Machine) -> None:
    """Reading 64 tokens takes 0.32 s, so that few samples fit into a second."""
    small = Small(FakeRunner(machine, "small", 0.3, 5.0))
    found = measure_profile(engine_of(machine, None, small), LONGEST)
    assert found.doubt is None and found.greedy.reads["small"] == pytest.approx(5.0)


def test_the_first_draft_step_is_never_cheaper_than_the_next(machine: Machine) -> None:
    """A draft of one token seems to take 0.04 ms of 0.4 ms: both steps are then the mean of the whole draft."""
    machine.slow(("small", "draft", 1), lambda count: 0.1)
    assert measured(machine).greedy.drafts["small"][1] == pytest.approx((1.3 / 4, 1.3 / 4))


def unsound(machine: Machine, breaks: Callable[[list[int]], bool]) -> Engine:
    """Return an engine that gives NaN to rows that read such tokens; otherwise every row repeats token 0."""
    engine = engine_of(machine)
    sound: Callable[..., Forward] = engine.target.forward

    def forward(cache: Any, tokens: Tensor, *given: Any, **more: Any) -> Forward:
        made = sound(cache, tokens, *given, **more)
        assert made.logits is not None
        for row, read in enumerate(tokens.tolist()):
            if breaks(read):
                machine.ran["broken", len(tokens)] += 1
                made.logits[row] = torch.nan
        return made

    engine.target.forward = forward  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize("length", [0, LONGEST])
@pytest.mark.parametrize("bad", [{1}, {3}, {1, 2}])
def test_host_work_is_measured_on_another_text_where_a_row_is_not_finite(
    machine: Machine, bad: set[int], length: int
) -> None:
    """Four rows read the tokens 0 to 3, else 2 to 5, 4 to 7 or 6 to 1. The work of fewer rows counts as less."""
    accept = engine_module.accept

    def by_rows(draft: Any, p: Any, *given: Any) -> Any:
        machine.spend(1.0 * len(draft.tokens), "row")
        return accept(draft, p, *given)

    engine = unsound(machine, lambda read: bool(bad & {*read}))
    with replaced(engine_module, "accept", by_rows):
        assert host.host_ms(engine, 4, length, draws=False) == pytest.approx(4.0 + 0.5 + 0.1 * length)
    assert not engine.rows.sequences and engine.cache.lengths == [0] * 4
    # a round that discards its draft is none to time
    engine = unsound(machine, lambda read: read[1:2] == [0])
    assert host.host_ms(engine, 1, LONGEST, draws=False) == pytest.approx(0.5 + 0.1 * LONGEST)
    assert machine.ran["broken", 1]


def test_host_work_that_could_not_be_measured_is_not_kept(machine: Machine) -> None:
    engine = unsound(machine, lambda read: True)
    found = kept(engine)
    assert found.doubt is not None
    assert found.greedy.plain(1) == pytest.approx(2.0), "host work counts as free"
    assert not [
        cost for cost in user_cache.read("profiles", profile._key(engine, LONGEST))["least"] if "host" in cost
    ]
    assert not engine.rows.sequences and engine.scheduler.idle


def test_a_request_decodes_where_measuring_fails(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, tried = engine_of(machine, Auto(LONGEST)), list[Engine]()

    def broken(engine: Engine, *rest: Any, **more: Any) -> Any:
        tried.append(engine)
        raise IndexError("list index out of range")

    monkeypatch.setattr(profile, "host_ms", broken)
    assert profile.use_profile(engine) == profile.use_profile(engine) == 0.0
    assert len(tried) == 1 and "could not be measured" in caplog.text
    submit(engine, 0, 3, 4, "free")
    while not engine.scheduler.idle:
        engine.step()
    assert user_cache.read("profiles", profile._key(engine, LONGEST)) is None


def test_rows_that_measuring_left_in_the_midst_are_emptied(machine: Machine) -> None:
    engine, wiped = engine_of(machine), list[int]()
    engine.cache.zero_row = wiped.append  # type: ignore[method-assign]
    machine.disturbed = lambda work, count: 1 / 0 if work == "accept" and count == 3 else 1.0
    with pytest.raises(ZeroDivisionError):
        host.host_ms(engine, 4, 0, draws=False)
    assert {*wiped} == {0, 1, 2, 3} and engine.cache.lengths == [0] * 4


def test_a_kept_profile_is_read_back_without_measuring(machine: Machine) -> None:
    first = kept(engine_of(machine))
    ran = machine.ran.total()
    again = kept(engine_of(machine))
    assert machine.ran.total() == ran and again.seconds == 0.0
    for one, other in ((first.greedy, again.greedy), (first.sampled, again.sampled)):
        assert (one.passes, one.drafts, one.reads) == (other.passes, other.drafts, other.reads)
    assert first.greedy.plain(1) < first.sampled.plain(1)
    load_profile(engine_of(machine, None, Free()), LONGEST, lambda done, total: None)
    assert machine.ran.total() > ran, "other drafters"


def test_the_next_process_measures_what_was_not_steady(machine: Machine) -> None:
    steady = "target", 1, 5
    machine.slow(PASS)
    first = kept(engine_of(machine))
    assert first.doubt is not None
    ran = machine.ran.copy()
    machine.slow(None)
    second = kept(engine_of(machine))
    assert second.doubt is None and 0 < second.seconds < first.seconds / 2
    assert machine.ran[PASS] > ran[PASS] and machine.ran[steady] == ran[steady]
    assert second.greedy.verify(1, 3) == pytest.approx(PASS_MS)
    assert kept(engine_of(machine)).seconds == 0.0


def test_a_machine_that_is_always_busy_is_told_of_it_once(machine: Machine) -> None:
    """Samples that never agree are taken by the next three processes, too, and then no more."""
    machine.slow(PASS, lambda count: 1.11**count)
    took, told = [], list[Any]()
    for _ in range(1 + 3 + 2):
        with replaced(profile.logger, "warning", lambda *given: told.append(given)):
            found = kept(engine_of(machine))
        took.append(found.seconds > 0)
        assert found.doubt is not None and PASS_MS < found.greedy.verify(1, 3) <= found.greedy.verify(1, 5)
    assert took == [True] * 4 + [False] * 2
    assert len(told) == 1


def test_samples_of_two_processes_agree(machine: Machine) -> None:
    """Each process has one good sample of a pass, which another confirms."""
    machine.slow(PASS, lambda count: 1.3**count if count != 5 else 1.0)
    found = []
    for _ in range(2):
        machine.ran.clear()
        found.append(kept(engine_of(machine)))
    assert found[0].doubt is not None and found[1].doubt is None
    assert found[1].greedy.verify(1, 3) == pytest.approx(PASS_MS)


@pytest.mark.parametrize(
    "content",
    [
        *[None, [], "x", 3, {}, {"greedy": {}, "sampled": None}],
        *[
            {"least": {"pass of 1 x 3": samples}, "repeats": None}
            for samples in ([2.0, "x"], [1e400], [10**400], [-1.0], [float("nan")], 2.0)
        ],
    ],
)
def test_what_is_no_sample_is_measured_again(machine: Machine, content: Any) -> None:
    user_cache.write("profiles", profile._key(engine_of(machine), LONGEST), content)
    found = kept(engine_of(machine))
    assert found.doubt is None and found.seconds > 0
    assert found.greedy.verify(1, 3) == pytest.approx(PASS_MS)
    assert kept(engine_of(machine)).seconds == 0.0


class Reader(AutoregressiveDrafter):
    """Reads a text once it is chosen, at 1 ms a token, and drafts at 0.2 ms a step."""

    name = "reader"

    def __init__(self, machine: Machine) -> None:
        self.machine, self.known = machine, dict[int, int]()

    def length(self, sequence: Sequence) -> int:
        return min(self.known.get(sequence.id, 0), len(sequence.tokens) - 1)

    def read(self, sequence: Sequence, start: int, stop: int) -> None:
        self.machine.spend(1.0 * (stop - start), "read")
        self.known[sequence.id] = 10**6

    def rewind(self, sequence: Sequence) -> None:
        self.known[sequence.id] = 10**6

    def step(self, tokens: Tensor, *given: Any) -> Tensor:
        self.machine.spend(0.2, "step")
        return torch.zeros(len(tokens), VOCABULARY)


class Late(Fixed):
    uses_costs = True  # drafters read a text once they are chosen


def submit(engine: Engine, id: int, prompt: int, tokens: int, *drafters: str) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=tokens, ignore_eos=True)
    engine.submit(Sequence(id, [1] * prompt, params, 0, drafters=drafters))


def test_the_decoding_timer_separates_prompts_from_decoding(machine: Machine) -> None:
    """A chunk of 4 tokens takes 2.3 ms, a plain round 2.0 + 0.5 ms; the second request comes in the midst."""
    engine = engine_of(machine)
    timer = DecodingTimer(engine)
    with observed(engine, timer):
        submit(engine, 0, 9, 6)
        for _ in range(4):
            engine.step()
        submit(engine, 1, 9, 2)
        while not engine.scheduler.idle:
            engine.step()
    assert timer.rounds == 6
    assert timer.reading == pytest.approx(4 * 2.3e-3)
    assert timer.reading_since == pytest.approx(2 * 2.3e-3)
    assert timer.began == pytest.approx(2 * 2.3e-3)
    assert timer.ended == machine.now
    rounds = machine.now - timer.reading
    assert timer.ended - timer.began - timer.reading_since == pytest.approx(rounds)
    assert rounds == pytest.approx(6 * 2.5e-3 + machine.ran["target", 2, 1] * 0.1e-3)


def test_the_decoding_timer_counts_prompts_that_a_drafter_reads_late(machine: Machine) -> None:
    """The reader reads 8 tokens of the prompt at first, later what plain steps missed of the text."""
    reader = Reader(machine)
    engine = engine_of(machine, Late(3), reader)
    timer = DecodingTimer(engine)
    with observed(engine, timer):
        submit(engine, 0, 9, 20, "reader")
        engine.step(), engine.step(), engine.step()
        prefill = 2 * 2.3e-3
        assert machine.ran["read"] == 1
        assert (timer.reading, timer.reading_since) == pytest.approx((prefill + 8e-3, 8e-3))
        reader.known[0] = 7  # two tokens of the prompt and all that follows are read again
        engine.step()
        assert machine.ran["read"] == 2
        assert timer.reading_since == pytest.approx(8e-3 + 2e-3), "later tokens are no prompt"


def test_the_parts_of_the_round_timer_add_up(machine: Machine) -> None:
    """A round drafts 3 tokens at 0.2 ms, verifies 4 columns in 2.3 ms, and accepts them in 0.8 ms."""
    engine = engine_of(machine, Fixed(3), Reader(machine))
    submit(engine, 0, 1, 16, "reader")
    timer = RoundTimer(engine)
    with observed(engine, timer):
        while not engine.scheduler.idle:
            engine.step()
    assert engine.observer is not timer
    assert timer.seconds["draft"] == pytest.approx(4 * 0.6e-3)
    assert timer.seconds["verify"] == pytest.approx(4 * 2.3e-3)
    assert timer.host == pytest.approx(4 * 0.8e-3)
    assert timer.seconds["round"] == pytest.approx(machine.now)


def without(known: Samples, costs: Iterable[str]) -> Samples:
    for cost in costs:
        known.least.pop(cost, None)
    return known


def first_step_not_corrected(cost: Function) -> Function:
    def mutated(ms: dict[Any, float], name: str, drafter: Drafter, longest: int) -> Any:
        found = cost(ms, name, drafter, longest)
        if found is None or drafter.draft_pass is None:
            return found
        first, all_steps = ms[name, 1] - ms[2], found[0] + found[1] * (longest - 1)
        return first, (all_steps - first) / (longest - 1)

    return mutated


def host_mutated(change: Callable[[list[float]], list[float]]) -> Mutation:
    """Change the host's ms of each batch: of a plain round and of one that drafts."""
    return argument(1, lambda ms: {batch: change(each) for batch, each in ms.items()})


def leaving(change: Callable[..., object]) -> Mutation:
    """Let a context manager do its work, and then change what it was given."""

    def mutation(watch: Function) -> Function:
        @contextmanager
        def mutated(*given: Any) -> Iterator[None]:
            with watch(*given):
                yield
            change(*given)

        return mutated

    return mutation


rounds_count_as_reading = leaving(lambda timer: setattr(timer, "_in_round", 0.0))
observer_stays = leaving(lambda engine, observer: setattr(engine, "observer", observer))


# (name, point, mutation, check)
DEFECTS: list[tuple[str, Any, Mutation, Callable[[Machine], object]]] = [
    ("any two samples agree", agreed, during(profile, "AGREEMENT", inf), test_a_cost_is_the_least_sample_where_two_agree),
    ("the second least sample", agreed, lambda sound: lambda samples: sound(samples) and sorted(samples)[1], test_a_cost_is_the_least_sample_where_two_agree),
    ("turns end before the samples agree", profile._take_turns, during(profile, "agreed", lambda samples: 0.0), test_a_cost_is_the_least_sample_where_two_agree),
    ("told at every start", profile.Samples.from_json, lambda _: lambda own, values: own(None, values["repeats"] if values else 0), test_a_machine_that_is_always_busy_is_told_of_it_once),
    ("measured at every start", measure_profile, during(profile, "REPEATS", inf), test_a_machine_that_is_always_busy_is_told_of_it_once),
    ("every profile is believed", measure_profile, lambda measure: lambda *args: replace(measure(*args), doubt=None), test_the_next_process_measures_what_was_not_steady),
    ("all costs are measured again", profile.Forwards.measure, lambda measure: lambda own, samples, *rest: measure(own, without(samples, own.costs.values()), *rest), test_the_next_process_measures_what_was_not_steady),
    ("measuring has no budget", measure_profile, during(profile, "BUDGET_SECONDS", inf), test_a_slow_model_goes_on_with_the_costs_of_one_row),
    ("host work ignores the budget", host._Rounds._least_ms_of, lambda sound: lambda own, ids: sound(replace(own, until=inf), ids), test_host_work_takes_no_further_round_once_time_is_up),
    ("a late profile is never believed", profile._doubt, lambda doubt: lambda seconds, budget, steady, sound: doubt(seconds, budget, [*steady, seconds < budget], sound), test_costs_that_were_steady_in_time_are_believed_however_late_it_is),
    ("a kept profile is not read", load_profile, during(user_cache, "read", lambda kind, key: None), test_a_kept_profile_is_read_back_without_measuring),
    ("greedy host work for all rounds", host.host_ms, lambda sound: lambda *args, draws, **more: sound(*args, draws=False, **more), test_a_profile_holds_passes_host_work_drafts_and_reads),
    ("host work does not grow with the columns", profile._with_host, host_mutated(lambda ms: [ms[0], ms[0]]), test_a_profile_holds_passes_host_work_drafts_and_reads),
    ("no host work in a plain round", profile._with_host, host_mutated(lambda ms: [0.0, ms[1] - ms[0]]), test_a_profile_holds_passes_host_work_drafts_and_reads),
    ("a first draft step that holds its verifying pass", profile._draft_cost, lambda cost: lambda ms, *rest: cost(ms | {2: 0.0}, *rest), test_a_profile_holds_passes_host_work_drafts_and_reads),
    ("a first draft step cheaper than the next", profile._draft_cost, first_step_not_corrected, test_the_first_draft_step_is_never_cheaper_than_the_next),
    ("reading time spread over a token too many", profile.Reading.ms, lambda reads: lambda *args: {name: ms * (profile.READ - 1) / profile.READ for name, ms in reads(*args).items()}, test_a_profile_holds_passes_host_work_drafts_and_reads),
    ("measured sequences keep their rows", host.host_ms, during(Engine, "cancel", lambda engine, sequence: None), lambda machine: test_measuring_leaves_the_engine_empty(machine, 300)),
    ("all reading since the first round", DecodingTimer._count, lambda count: lambda timer, seconds, decoding: count(timer, seconds, True), test_the_decoding_timer_separates_prompts_from_decoding),
    ("rounds count as reading", DecodingTimer._round, rounds_count_as_reading, test_the_decoding_timer_separates_prompts_from_decoding),
    ("all that a drafter reads is prompt", DecodingTimer.drafter_reads, lambda reads: lambda timer, sequence, start, stop: reads(timer, SimpleNamespace(prompt=[0] * stop), start, stop), test_the_decoding_timer_counts_prompts_that_a_drafter_reads_late),
    ("an observer stays", observed, observer_stays, test_the_parts_of_the_round_timer_add_up),
]  # fmt: skip


@pytest.mark.parametrize("row", DEFECTS, ids=lambda row: str(row[0]))
def test_defects_are_caught(
    row: tuple[str, Any, Mutation, Callable[[Machine], object]],
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, point, mutation, check = row
    assert_caught(defect(name, point, mutation, lambda: check(machine)), monkeypatch)
