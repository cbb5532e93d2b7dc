"""Profiles and clocks of an engine, on a machine whose clock is scripted: only its forwards and `accept` take time."""

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
from foredraft.decode.drafter import Drafter, DraftPass, Guesser, Stepper
from foredraft.decode.engine import Engine
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Auto, Fixed, Policy
from foredraft.decode.sequence import Sequence
from foredraft.model.runner import DraftInputs, Forward
from foredraft.profiling import host, phases, profile, samples, timing
from foredraft.profiling import measured_samples as measuring
from foredraft.profiling.phases import DecodingClock, RoundClock, observed
from foredraft.profiling.profile import load_profile, measure_profile
from foredraft.profiling.samples import Samples, agreed
from tests.support.planting import Spoiler, assert_caught, defect, replaced
from tests.support.spoilers import during

Function = Callable[..., Any]

CPU = torch.device("cpu")
VOCABULARY = 8
LONGEST = 5


class Machine:
    """A clock in seconds that moves only where work is done.

    Attributes:
        disturbed: Work, and how often it ran before -> how many times longer it takes.
        ran: How often each work ran.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: Counter[object] = Counter()
        self.disturbed: Callable[[object, int], float] = lambda work, count: 1.0

    def spend(self, ms: float, work: object) -> None:
        self.now += ms / 1e3 * self.disturbed(work, self.ran[work])
        self.ran[work] += 1


class FakeCache:
    device = CPU

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
        return SimpleNamespace(taps={})

    def draft(self, cache: Any, inputs: DraftInputs, **more: Any) -> Any:
        longest = max(inputs.lengths)
        self.machine.spend(0.1 + self.first * longest, (self.name, "draft", longest))
        return object()


class Small(Drafter):
    name = "small"

    def __init__(self, runner: Any) -> None:
        self.draft_pass = DraftPass(runner)


class Steps(Stepper):
    name = "steps"


class Free(Guesser):
    name = "free"

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [[0] * budget for _, budget in requests]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Return the machine. `accept` takes 0.5 ms, 0.1 ms for each drafted token and sibling, and 0.3 ms with siblings.

    It takes twice that where rows draw.
    """
    machine = Machine()
    for module in (timing, phases, measuring, profile, host):
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
    return Engine(
        target, target.new_cache(4, positions), policy or Fixed(3), {each.name: each for each in drafters},
        vocabulary=VOCABULARY, device=CPU,
    )  # fmt: skip


def kept(engine: Engine) -> profile.Profile:
    return load_profile(engine, LONGEST, lambda done, total: None)


# --- profiles -------------------------------------------------------------------------------------------


def test_a_profile_holds_passes_host_work_drafts_and_reads(machine: Machine) -> None:
    engine, progress = engine_of(machine), list[tuple[int, int]]()
    found = measure_profile(engine, LONGEST, lambda done, total: progress.append((done, total)))
    assert found.believed and found.seconds == machine.now
    assert progress == [(0, 2), (1, 2), (2, 2)]
    for table, factor in ((found.greedy, 1), (found.sampled, 2)):
        assert {batch: [n for n, _ in points] for batch, points in table.passes.items()} == {
            1: [1, 2, 3, 5, 6],
            4: [4, 8, 12, 20, 24],
        }
        for batch, columns in ((1, 1), (1, 6), (4, 4), (4, 24)):
            drafted = columns // batch - 1
            cost = 2.0 + 0.1 * (columns - 1) + factor * (0.5 + 0.1 * drafted)
            assert table.verify(batch, columns) == pytest.approx(cost)
        for batch in (1, 4):
            assert table.drafts["small"][batch] == pytest.approx((0.4, 0.3)), (
                "a whole draft takes 0.1 + 0.3 k ms"
            )
            assert table.drafts["free"][batch] == (0.0, 0.0)
        assert table.reads == pytest.approx({"small": 0.01})


def test_a_profile_holds_what_siblings_cost_the_host(machine: Machine) -> None:
    """Where a drafter has further choices, and the passes of the target take them."""
    engine = engine_of(machine, None, Steps())
    assert not measure_profile(engine, LONGEST).greedy.combs
    target: Any = engine.target
    target.takes_leaves = True
    found = measure_profile(engine, LONGEST)
    assert found.believed
    for table, factor in ((found.greedy, 1), (found.sampled, 2)):
        assert dict(table.combs) == pytest.approx({1: 0.3 * factor, 4: 0.3 * factor})
    assert not measure_profile(engine_of(machine, None, Free()), LONGEST).greedy.combs
    target.max_queries = LONGEST + 1
    assert not measure_profile(engine, LONGEST).greedy.combs, "no room for siblings"


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
    machine.disturbed = lambda work, count: 3.0 if work == ("target", 1, 3) and count // 2 % 4 else 1.0
    found = measure_profile(engine_of(machine), LONGEST)
    assert found.believed
    assert found.greedy.verify(1, 3) == pytest.approx(2.2 + 0.5 + 0.2)
    assert (machine.ran["target", 1, 3], machine.ran["target", 4, 3]) == (2 * (1 + 8), 2 * (1 + 6))


def test_a_cost_whose_samples_never_agree_is_not_believed(machine: Machine) -> None:
    machine.disturbed = lambda work, count: 1.08**count if work == ("target", 1, 3) else 1.0
    found = measure_profile(engine_of(machine), LONGEST)
    assert not found.believed
    assert [n for n, _ in found.greedy.passes[1]] == [1, 2, 3, 5, 6]
    assert 2.2 + 0.5 + 0.2 < found.greedy.verify(1, 3) <= found.greedy.verify(1, 5), "the least sample"
    assert machine.ran["target", 1, 3] == 2 * (1 + measuring.TURNS[1])


def test_columns_never_seem_free_where_no_width_is_believed(machine: Machine) -> None:
    machine.disturbed = lambda work, count: 1.2**count if work[0] == "target" and work[-1] > 1 else 1.0  # type: ignore[index]
    found = measure_profile(engine_of(machine), LONGEST)
    assert not found.believed
    assert found.greedy.verify(1, 1 + LONGEST) >= found.greedy.plain(1) + 0.1 * LONGEST


def test_a_disturbed_machine_does_not_forbid_drafts(machine: Machine) -> None:
    """Two samples of a pass agree at ten times its cost while another pass never agrees."""
    disturbed = {("target", 1, 3): lambda count: 1.3**count, ("target", 1, 1 + LONGEST): lambda count: 10.0}
    machine.disturbed = lambda work, count: disturbed.get(work, lambda count: 1.0)(count)  # type: ignore[call-overload]
    found = measure_profile(engine_of(machine), LONGEST)
    assert not found.believed
    assert found.greedy.verify(1, 1 + LONGEST) == pytest.approx(2 * 2.0 + 0.5 + 0.1 * LONGEST)


def test_passes_of_many_rows_are_not_thought_as_cheap_as_those_of_one(machine: Machine) -> None:
    machine.disturbed = lambda work, count: 1.3**count if work == ("target", 1, 3) else 1.0
    engine = engine_of(machine)
    engine.target.column = 0.35  # type: ignore[attr-defined]
    found = measure_profile(engine, LONGEST)
    width = 1 + LONGEST
    assert not found.believed
    assert found.greedy.verify(4, 4 * width) == pytest.approx(
        2 + 0.35 * (4 * width - 1) + 0.5 + 0.1 * LONGEST
    )


def test_measuring_ends_when_time_is_up(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "LIMIT_SECONDS", 0.0)
    machine.disturbed = lambda work, count: 1.3**count if work == ("target", 1, 3) else 1.0
    assert not measure_profile(engine_of(machine), LONGEST).believed
    assert machine.ran["target", 1, 3] == 2 * (1 + 2), "60 plain steps of 2 ms hold two turns"


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
    found = measure_profile(engine_of(machine), LONGEST)
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
    believed_however_late(machine)


def believed_however_late(machine: Machine) -> None:
    seconds = measure_profile(engine_of(machine), LONGEST).seconds
    with replaced(profile, "BUDGET_SECONDS", seconds - 1e-4):  # the last work ends a little later
        assert measure_profile(engine_of(machine), LONGEST).believed


def test_a_busy_machine_is_told_why_nothing_is_kept(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.disturbed = lambda work, count: 1.3**count if work == ("target", 1, 3) else 1.0
    assert not kept(engine_of(machine)).believed
    [line] = [record.getMessage() for record in caplog.records]
    assert "because only 22 of 23 costs were steady" in line
    caplog.clear()
    machine.disturbed = lambda work, count: 1.0
    assert kept(engine_of(machine)).believed and not caplog.records


def test_two_least_samples_agree_within_ten_percent() -> None:
    assert agreed([3.0, 1.0, 1.09]) == 1.0
    assert agreed([3.0, 1.0, 1.11, 1.12]) is None


def test_a_drafter_whose_samples_scatter_has_the_least_of_them(machine: Machine) -> None:
    machine.disturbed = lambda work, count: (
        1.11**count if work == ("small", "draft", measuring.DRAFT) else 1.0
    )
    found = measure_profile(engine_of(machine), LONGEST)
    assert not found.believed
    first, further = found.greedy.drafts["small"][1]
    assert 0.3 <= further <= first < 0.5


def test_steps_that_seem_free_are_left_to_the_assumption(machine: Machine) -> None:
    machine.disturbed = lambda work, count: 0.0 if work[0] == "small" else 1.0  # type: ignore[index]
    assert set(measure_profile(engine_of(machine), LONGEST).greedy.drafts) == {"free"}


def test_a_profile_without_the_cost_of_reading_is_not_believed(machine: Machine) -> None:
    machine.disturbed = lambda work, count: (
        1.3**count if work == ("small", "prefill", measuring.READ) else 1.0
    )
    found = measure_profile(engine_of(machine), LONGEST)
    assert not found.believed and not found.greedy.reads


def test_a_draft_model_that_reads_slowly_has_a_profile_that_is_kept(machine: Machine) -> None:
    """Reading 64 tokens takes 0.32 s, so that few samples fit into a second."""
    small = Small(FakeRunner(machine, "small", 0.3, 5.0))
    found = measure_profile(engine_of(machine, None, small), LONGEST)
    assert found.believed and found.greedy.reads["small"] == pytest.approx(5.0)


def test_the_first_draft_step_is_never_cheaper_than_the_next(machine: Machine) -> None:
    """A draft of one token seems to take 0.04 ms of 0.4 ms: both steps are then the mean of the whole draft."""
    machine.disturbed = lambda work, count: 0.1 if work == ("small", "draft", 1) else 1.0
    found = measure_profile(engine_of(machine), LONGEST)
    assert found.greedy.drafts["small"][1] == pytest.approx((1.3 / 4, 1.3 / 4))


# --- models whose logits are not finite on the texts that are timed -------------------------------------


class Unsound(FakeRunner):
    """Gives NaN to every row that reads one of `bad`; the FakeRunner's logits make every row repeat token 0."""

    bad: frozenset[int] = frozenset()

    def forward(self, cache: Any, tokens: Tensor, starts: list[int], **more: Any) -> Forward:
        made = super().forward(cache, tokens, starts, **more)
        assert made.logits is not None
        for row in range(len(tokens)):
            if self.bad & set(tokens[row].tolist()):
                made.logits[row] = torch.nan
        return made


def unsound(machine: Machine, bad: Iterable[int], policy: Policy | None = None) -> Engine:
    runner: Any = Unsound(machine, "target", 2.0, 0.1)
    engine = engine_of(machine, policy)
    engine.target, runner.bad = runner, frozenset(bad)
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

    engine = unsound(machine, bad)
    with replaced(engine_module, "accept", by_rows):
        assert host.host_ms(engine, 4, length, draws=False) == pytest.approx(4.0 + 0.5 + 0.1 * length)
    assert not engine.rows.sequences and engine.cache.lengths == [0] * 4


def test_host_work_is_measured_on_another_text_where_only_drafts_are_not_finite(machine: Machine) -> None:
    """Rounds that discard their draft are no rounds to time."""
    engine = unsound(machine, ())
    sound = engine.target.forward
    discarded = Counter[int]()

    def forward(cache: Any, tokens: Tensor, *more: Any, **named: Any) -> Forward:
        made = sound(cache, tokens, *more, **named)
        if tokens.shape[1] > 1 and (tokens[:, 1] == 0).any() and made.logits is not None:
            discarded[len(tokens)] += 1
            made.logits[tokens[:, 1] == 0] = torch.nan
        return made

    engine.target.forward = forward  # type: ignore[method-assign]
    assert host.host_ms(engine, 1, LONGEST, draws=False) == pytest.approx(0.5 + 0.1 * LONGEST)
    assert discarded[1]


def test_host_work_that_could_not_be_measured_is_not_kept(machine: Machine) -> None:
    engine = unsound(machine, range(VOCABULARY))
    found = kept(engine)
    assert not found.believed
    assert found.greedy.plain(1) == pytest.approx(2.0), "host work counts as free"
    assert not [cost for cost in user_cache.read("profiles", profile._key(engine, LONGEST)) if "host" in cost]
    assert not engine.rows.sequences and engine.scheduler.idle


def test_a_request_decodes_where_measuring_fails(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails once, and not again with every call."""
    engine, tried = engine_of(machine, Auto(LONGEST)), list[Engine]()

    def broken(engine: Engine, *rest: Any, **more: Any) -> Any:
        tried.append(engine)
        raise IndexError("list index out of range")

    monkeypatch.setattr(measuring, "host_ms", broken)
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


# --- profiles that are kept -----------------------------------------------------------------------------


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
    disturbed, undisturbed = ("target", 1, 3), ("target", 1, 5)
    machine.disturbed = lambda work, count: 1.3**count if work == disturbed else 1.0
    first = kept(engine_of(machine))
    assert not first.believed
    ran = {work: machine.ran[work] for work in (disturbed, undisturbed)}
    machine.disturbed = lambda work, count: 1.0
    second = kept(engine_of(machine))
    assert second.believed and 0 < second.seconds < first.seconds / 2
    assert machine.ran[disturbed] > ran[disturbed] and machine.ran[undisturbed] == ran[undisturbed]
    assert second.greedy.verify(1, 3) == pytest.approx(2.2 + 0.5 + 0.2)
    assert kept(engine_of(machine)).seconds == 0.0


def test_samples_of_two_processes_agree(machine: Machine) -> None:
    """Each process has one good sample of a pass, which another confirms."""
    pass_of_three = ("target", 1, 3)
    machine.disturbed = lambda work, count: 1.3**count if work == pass_of_three and count != 5 else 1.0
    found = []
    for _ in range(2):
        machine.ran.clear()
        found.append(kept(engine_of(machine)))
    assert not found[0].believed and found[1].believed
    assert found[1].greedy.verify(1, 3) == pytest.approx(2.2 + 0.5 + 0.2)


@pytest.mark.parametrize(
    "kept_before",
    [None, [], "x", {"pass of 1 x 3": [2.0, "x"]}, {"pass of 1 x 3": [1e400]}, {"pass of 1 x 3": 2.0}],
)
def test_what_is_no_sample_is_measured_again(machine: Machine, kept_before: Any) -> None:
    user_cache.write("profiles", profile._key(engine_of(machine), LONGEST), kept_before)
    found = kept(engine_of(machine))
    assert found.believed and found.greedy.verify(1, 3) == pytest.approx(2.2 + 0.5 + 0.2)


EMPTY = {"passes": {}, "drafts": {}, "reads": {}}
NO_PASSES = {"greedy": EMPTY, "sampled": EMPTY}


@pytest.mark.parametrize(
    "document", [3, [], {}, {"greedy": {}}, {"greedy": {"passes": 3}, "sampled": None}, NO_PASSES]
)
def test_a_broken_profile_is_measured_again(machine: Machine, document: Any) -> None:
    user_cache.write("profiles", profile._key(engine_of(machine), LONGEST), document)
    assert kept(engine_of(machine)).seconds > 0
    assert kept(engine_of(machine)).seconds == 0.0


# --- clocks ---------------------------------------------------------------------------------------------


class Reader(Stepper):
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
    """Drafters read a text once they are chosen."""

    uses_costs = True


def submit(engine: Engine, id: int, prompt: int, tokens: int, *drafters: str) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=tokens, ignore_eos=True)
    engine.submit(Sequence(id, [1] * prompt, params, 0, drafters=drafters))


def test_the_decoding_clock_separates_prompts_from_decoding(machine: Machine) -> None:
    """A chunk of 4 tokens takes 2.3 ms, a plain round 2.0 + 0.5 ms; the second request comes in the midst."""
    engine = engine_of(machine)
    clock = DecodingClock(engine)
    with observed(engine, clock):
        submit(engine, 0, 9, 6)
        for _ in range(4):
            engine.step()
        submit(engine, 1, 9, 2)
        while not engine.scheduler.idle:
            engine.step()
    assert clock.rounds == 6
    assert clock.reading == pytest.approx(4 * 2.3e-3)
    assert clock.reading_since == pytest.approx(2 * 2.3e-3)
    assert clock.began == pytest.approx(2 * 2.3e-3)
    assert clock.ended == machine.now
    rounds = machine.now - clock.reading
    assert clock.ended - clock.began - clock.reading_since == pytest.approx(rounds)
    assert rounds == pytest.approx(6 * 2.5e-3 + machine.ran["target", 2, 1] * 0.1e-3)


def test_the_decoding_clock_counts_prompts_that_a_drafter_reads_late(machine: Machine) -> None:
    """The reader reads 8 tokens of the prompt at first, later what plain steps missed of the text."""
    reader = Reader(machine)
    engine = engine_of(machine, Late(3), reader)
    clock = DecodingClock(engine)
    with observed(engine, clock):
        submit(engine, 0, 9, 20, "reader")
        engine.step(), engine.step(), engine.step()
        prefill = 2 * 2.3e-3
        assert machine.ran["read"] == 1
        assert (clock.reading, clock.reading_since) == pytest.approx((prefill + 8e-3, 8e-3))
        reader.known[0] = 7  # two tokens of the prompt and all that follows are read again
        engine.step()
        assert machine.ran["read"] == 2
        assert clock.reading_since == pytest.approx(8e-3 + 2e-3), "later tokens are no prompt"


def test_the_parts_of_the_round_clock_add_up(machine: Machine) -> None:
    """A round drafts 3 tokens at 0.2 ms, verifies 4 columns in 2.3 ms, and accepts them in 0.8 ms."""
    engine = engine_of(machine, Fixed(3), Reader(machine))
    submit(engine, 0, 1, 16, "reader")
    clock = RoundClock(engine)
    with observed(engine, clock):
        while not engine.scheduler.idle:
            engine.step()
    assert engine.observer is not clock
    assert clock.rounds == 4
    assert clock.seconds["draft"] == pytest.approx(4 * 0.6e-3)
    assert clock.seconds["verify"] == pytest.approx(4 * 2.3e-3)
    assert clock.host == pytest.approx(4 * 0.8e-3)
    assert clock.seconds["round"] == pytest.approx(machine.now)


# --- planted defects ------------------------------------------------------------------------------------


def without(known: Samples, costs: Iterable[str]) -> Samples:
    for cost in costs:
        known.least.pop(cost, None)
    return known


def first_step_not_corrected(cost: Function) -> Function:
    def spoilt(ms: dict[Any, float], name: str, drafter: Drafter, longest: int) -> Any:
        found = cost(ms, name, drafter, longest)
        if found is None or drafter.draft_pass is None:
            return found
        first, all_steps = ms[name, 1] - ms[2], found[0] + found[1] * (longest - 1)
        return first, (all_steps - first) / (longest - 1)

    return spoilt


def host_spoilt(change: Callable[[list[float]], list[float]]) -> Spoiler:
    """Change the host's ms of each batch: of a plain round and of one that drafts."""

    def spoiler(with_host: Function) -> Function:
        return lambda passes, ms, longest: with_host(
            passes, {batch: change(each) for batch, each in ms.items()}, longest
        )

    return spoiler


def rounds_count_as_reading(watch: Function) -> Function:
    @contextmanager
    def spoilt(clock: DecodingClock) -> Iterator[None]:
        with watch(clock):
            yield
        clock._in_round = 0.0

    return spoilt


def every_phase_is_a_round(watch: Function) -> Function:
    @contextmanager
    def spoilt(clock: RoundClock, phase: str) -> Iterator[None]:
        with watch(clock, phase):
            yield
        clock.rounds += phase != "round"

    return spoilt


def observer_stays(watch: Function) -> Function:
    @contextmanager
    def spoilt(engine: Engine, observer: Any) -> Iterator[None]:
        with watch(engine, observer):
            yield
            watching = engine.observer
        engine.observer = watching

    return spoilt


# (name, seam, spoiler, check)
DEFECTS: list[tuple[str, Any, Spoiler, Callable[[Machine], object]]] = [
    ("any two samples agree", agreed, during(samples, "AGREEMENT", inf), test_a_cost_is_the_least_sample_where_two_agree),
    ("the second least sample", agreed, lambda sound: lambda samples: sound(samples) and sorted(samples)[1], lambda machine: test_two_least_samples_agree_within_ten_percent()),
    ("turns end before the samples agree", measuring._take_turns, during(measuring, "agreed", lambda samples: 0.0), test_a_cost_is_the_least_sample_where_two_agree),
    ("every profile is believed", measure_profile, lambda measure: lambda *args: replace(measure(*args), doubt=None), test_the_next_process_measures_what_was_not_steady),
    ("all costs are measured again", measuring.Forwards.measure, lambda measure: lambda own, samples, *rest: measure(own, without(samples, own.costs.values()), *rest), test_the_next_process_measures_what_was_not_steady),
    ("measuring has no budget", measure_profile, during(profile, "BUDGET_SECONDS", inf), test_a_slow_model_goes_on_with_the_costs_of_one_row),
    ("host work ignores the budget", host._Rounds._least_ms_of, lambda sound: lambda own, ids: sound(replace(own, until=inf), ids), test_host_work_takes_no_further_round_once_time_is_up),
    ("a late profile is never believed", profile._doubt, lambda doubt: lambda seconds, budget, steady, sound: doubt(seconds, budget, [*steady, seconds < budget], sound), lambda machine: believed_however_late(machine)),
    ("a kept profile is not read", load_profile, during(user_cache, "read", lambda kind, key: None), test_a_kept_profile_is_read_back_without_measuring),
    ("greedy host work for all rounds", host.host_ms, lambda sound: lambda *args, draws, **more: sound(*args, draws=False, **more), test_a_profile_holds_passes_host_work_drafts_and_reads),
    ("host work does not grow with the columns", profile._with_host, host_spoilt(lambda ms: [ms[0], ms[0]]), test_a_profile_holds_passes_host_work_drafts_and_reads),
    ("no host work in a plain round", profile._with_host, host_spoilt(lambda ms: [0.0, ms[1] - ms[0]]), test_a_profile_holds_passes_host_work_drafts_and_reads),
    ("a first draft step that holds its verifying pass", profile._draft_cost, lambda cost: lambda ms, *rest: cost(ms | {2: 0.0}, *rest), test_a_profile_holds_passes_host_work_drafts_and_reads),
    ("a first draft step cheaper than the next", profile._draft_cost, first_step_not_corrected, test_the_first_draft_step_is_never_cheaper_than_the_next),
    ("reading time spread over a token too many", measuring.Reading.ms, lambda reads: lambda *args: {name: ms * (measuring.READ - 1) / measuring.READ for name, ms in reads(*args).items()}, test_a_profile_holds_passes_host_work_drafts_and_reads),
    ("measured sequences keep their rows", host.host_ms, during(Engine, "cancel", lambda engine, sequence: None), lambda machine: test_measuring_leaves_the_engine_empty(machine, 300)),
    ("all reading since the first round", DecodingClock._count, lambda count: lambda clock, seconds, decoding: count(clock, seconds, True), test_the_decoding_clock_separates_prompts_from_decoding),
    ("rounds count as reading", DecodingClock._round, rounds_count_as_reading, test_the_decoding_clock_separates_prompts_from_decoding),
    ("all that a drafter reads is prompt", DecodingClock.drafter_reads, lambda reads: lambda clock, sequence, start, stop: reads(clock, SimpleNamespace(prompt=[0] * stop), start, stop), test_the_decoding_clock_counts_prompts_that_a_drafter_reads_late),
    ("every phase is a round", RoundClock._timed, every_phase_is_a_round, test_the_parts_of_the_round_clock_add_up),
    ("an observer stays", observed, observer_stays, test_the_parts_of_the_round_clock_add_up),
]  # fmt: skip


@pytest.mark.parametrize("row", DEFECTS, ids=lambda row: str(row[0]))
def test_defects_are_caught(
    row: tuple[str, Any, Spoiler, Callable[[Machine], object]],
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, seam, spoiler, check = row
    assert_caught(defect(name, seam, spoiler, lambda: check(machine)), monkeypatch)
