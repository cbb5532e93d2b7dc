"""Small pure parts of the loop: stats, policies, sequences, rows, scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Fixed, Heuristic
from foredraft.decode.rows import Rows
from foredraft.decode.scheduler import Scheduler
from foredraft.decode.sequence import Finish, Origin, Sequence, State
from foredraft.decode.stats import Round, Stats
from foredraft.model.runner import next_chunk

rounds = st.lists(
    st.integers(0, 6).flatmap(
        lambda drafted: st.integers(0, drafted).map(lambda accepted: Round(drafted, accepted, accepted + 1))
    ),
    max_size=12,
)


def sequence(prompt: tuple[int, ...] = (1, 2, 3), number: int = 0, **more: Any) -> Sequence:
    options = {name: more.pop(name) for name in ("max_new_tokens", "ignore_eos") if name in more}
    return Sequence(number, list(prompt), SamplingParams(**options), 0, **more)


# --- stats ------------------------------------------------------------------------------------------


@given(rounds)
def test_figures_follow_the_glossary(found: list[Round]) -> None:
    stats = Stats.of(found, 2.0)
    drafted, accepted = sum(r.drafted for r in found), sum(r.accepted for r in found)
    rejections = sum(r.accepted < r.drafted for r in found)
    emitted = sum(r.emitted for r in found)
    assert stats.acceptance_rate == (accepted / drafted if drafted else None)
    assert stats.alpha == (accepted / (accepted + rejections) if accepted + rejections else None)
    assert stats.mean_accepted_length == (emitted / len(found) if found else None)
    assert stats.tokens_per_second == emitted / 2
    for j, share in enumerate(stats.acceptance_by_position):
        reached = [r for r in found if r.drafted > j]
        assert share == pytest.approx(sum(r.accepted > j for r in reached) / len(reached))
    assert len(stats.acceptance_by_position) == max((r.drafted for r in found), default=0)


@given(rounds, rounds)
def test_merged_stats_equal_the_stats_of_all_rounds(one: list[Round], other: list[Round]) -> None:
    assert Stats.merge([Stats.of(one, 1), Stats.of(other, 2)]) == Stats.of(one + other, 3)
    assert Stats.merge([Stats.of(one, 1), Stats.of(other, 2)], seconds=2).seconds == 2


def test_nothing_divides_by_zero() -> None:
    stats = Stats.of([])
    assert stats.as_dict()["acceptance_rate"] is None
    assert stats.tokens_per_second == 0
    plain = Stats.of([Round(0, 0, 1)] * 3, 1)
    assert (plain.alpha, plain.mean_accepted_length, plain.rejections) == (None, 1.0, 0)


def test_alpha_finds_the_rate_of_a_constant_drafter() -> None:
    """Two of three tokens kept on average: alpha shows it at any draft length, the acceptance rate does not."""
    found = [Round(2, 2, 3)] * 4 + [Round(2, 1, 2)] * 2 + [Round(2, 0, 1)] * 3
    stats = Stats.of(found)
    assert stats.alpha == pytest.approx(2 / 3)
    assert stats.acceptance_rate == pytest.approx(10 / 18)


# --- policies ---------------------------------------------------------------------------------------


def test_the_heuristic_grows_and_shrinks() -> None:
    policy = Heuristic(6, first=5)
    one = SimpleNamespace(policy_state=policy.start())
    seen = []
    for accepted, drafted in ((5, 5), (6, 6), (2, 6), (0, 5), (0, 0), (4, 4), (0, 6)):
        policy.learn(one, Round(drafted, accepted, accepted + 1), None)  # type: ignore[arg-type]
        seen.append(policy.budget(one))  # type: ignore[arg-type]
    assert seen == [6, 6, 5, 4, 4, 6, 5]
    for _ in range(9):
        policy.learn(one, Round(3, 0, 1), None)  # type: ignore[arg-type]
    assert policy.budget(one) == 1  # type: ignore[arg-type]
    assert Heuristic(3).start() == [3]


def test_states_are_not_shared() -> None:
    policy = Heuristic(6)
    assert policy.start() is not policy.start()
    assert Fixed(4).budget(sequence()) == 4
    assert Fixed(4).go_on([], 0, None, None) is None  # type: ignore[arg-type]


# --- sequences --------------------------------------------------------------------------------------


def test_new_tokens_are_cut_at_the_first_end() -> None:
    for place, count in ((0, 1), (2, 3), (3, 4)):
        one = sequence(eos=frozenset({9}))
        run = [5, 5, 5, 5]
        run[place] = 9
        assert one.extend(run, [Origin.DRAFTER] * 4) == count
        assert one.new_ids == run[:count]
        assert one.finish is Finish.EOS
    one = sequence(max_new_tokens=3, eos=frozenset({9}))
    assert one.extend([1, 1], [Origin.TARGET] * 2) == 2
    assert one.finish is None
    assert one.remaining == 1
    assert one.extend([9, 1], [Origin.TARGET] * 2) == 1
    assert one.finish is Finish.EOS, "in the last place it is still the reason"
    one = sequence(max_new_tokens=2, eos=frozenset({9}), ignore_eos=True)
    one.extend([9, 9, 9], [Origin.TARGET] * 3)
    assert (one.new_ids, one.finish) == ([9, 9], Finish.LENGTH)


def test_a_prompt_may_contain_eos() -> None:
    one = sequence((9, 9), eos=frozenset({9}))
    assert one.extend([1], [Origin.TARGET]) == 1
    assert one.finish is None
    assert one.prompt == [9, 9]


# --- rows and scheduler -----------------------------------------------------------------------------


class Log:
    """A cache that records its calls."""

    def __init__(self, rows: int) -> None:
        self.rows, self.lengths = rows, [0] * rows
        self.done: list[tuple[Any, ...]] = []

    def copy_row(self, source: int, target: int, length: int) -> None:
        self.done.append(("copy", source, target, length))
        self.lengths[target] = length

    def zero_row(self, row: int) -> None:
        self.done.append(("zero", row))
        self.lengths[row] = 0


def test_rows_are_a_prefix_and_the_last_one_moves() -> None:
    caches = [Log(3), Log(4)]
    rows = Rows([*caches, caches[0]])  # type: ignore[list-item]
    assert rows.capacity == 3
    assert len(rows.caches) == 2
    several = [sequence(number=i) for i in range(3)]
    for one in several:
        rows.add(one)
        one.cache_finite = True
    for cache in caches:
        cache.lengths[:3] = [2, 3, 4]
    rows.remove(several[0])
    assert [s.row for s in several] == [-1, 1, 0]
    assert rows.sequences == [several[2], several[1]]
    for cache in caches:
        assert cache.done == [("copy", 2, 0, 4)]
        assert cache.lengths[:3] == [4, 3, 0]
    rows.remove(several[1])
    assert caches[0].lengths == [4, 0, 0]
    assert len(caches[0].done) == 1


@pytest.mark.parametrize(("leaver", "mover"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_row_that_may_hold_nonfinite_values_is_zeroed(leaver: bool, mover: bool) -> None:
    cache = Log(3)
    rows = Rows([cache])  # type: ignore[list-item]
    several = [sequence(number=i) for i in range(3)]
    for one in several:
        rows.add(one)
    cache.lengths = [2, 3, 4]
    several[0].cache_finite, several[2].cache_finite = leaver, mover
    rows.remove(several[0])
    zeroed = [("zero", 0)] * (not leaver), [("zero", 2)] * (not mover)
    assert cache.done == [*zeroed[0], ("copy", 2, 0, 4), *zeroed[1]]
    assert cache.lengths == [4, 3, 0]


def test_a_sibling_gets_the_rows_of_the_prompt_only() -> None:
    target, draft = Log(3), Log(3)
    rows = Rows([target, draft])  # type: ignore[list-item]
    donor, copy, heir = (sequence(number=i, group=1) for i in range(3))
    rows.add(donor)
    target.lengths[0], draft.lengths[0] = 7, 1
    rows.add(copy, donor)
    assert target.done == [("copy", 0, 1, 2)]
    assert draft.done == [("copy", 0, 1, 1)], "a drafter that is behind stays behind"
    rows.succeed(donor, heir)
    assert (heir.row, donor.row) == (0, -1)
    assert (target.lengths[0], draft.lengths[0]) == (2, 1)


def scheduler(rows: int) -> Scheduler:
    return Scheduler(Rows([Log(rows)]))  # type: ignore[list-item]


def test_requests_are_served_in_order() -> None:
    plan = scheduler(2)
    several = [sequence((i,) * length, i) for i, length in enumerate((1, 3, 1, 1))]
    for one in several:
        plan.submit(one)
    assert plan.admit() == [several[0]]
    assert [s.state for s in several] == [State.RUNNING, State.PREFILLING, State.WAITING, State.WAITING]
    assert plan.prefilling is several[1]
    plan.leave(several[0], Finish.LENGTH)
    assert plan.admit() == [several[2]]
    assert plan.running
    assert not plan.idle
    for one in several:
        plan.leave(one, Finish.CANCELLED)
    assert plan.idle
    assert [s.finish for s in several] == [Finish.LENGTH, *[Finish.CANCELLED] * 3]


def test_prefill_chunks_depend_on_the_position_alone() -> None:
    assert [next_chunk(position, 11, 4) for position in (0, 1, 3, 4, 7, 8, 10)] == [4, 4, 4, 8, 8, 11, 11]


def test_siblings_wait_for_the_prompt() -> None:
    plan = scheduler(3)
    first, second, third, other = (sequence(number=i, group=7 if i < 3 else None) for i in range(4))
    for one in (first, second, third, other):
        plan.submit(one)
    assert plan.admit() == []
    assert [s.state for s in (first, second)] == [State.PREFILLING, State.WAITING]
    first.state, first.cache_finite = State.RUNNING, True
    assert plan.admit() == [second, third]
    assert plan.leave(first, Finish.EOS) is None, "the next in line is no sibling"
    assert plan.admit() == []
    assert other.state is State.PREFILLING


def test_a_sibling_takes_over_unless_the_row_is_broken() -> None:
    for finish, heir in ((Finish.EOS, True), (Finish.CANCELLED, True), (Finish.CANCELLED, False)):
        plan = scheduler(1)
        first, second = (sequence(number=i, group=7) for i in range(2))
        plan.submit(first)
        plan.submit(second)
        plan.admit()
        first.state, first.cache_finite = State.RUNNING, heir
        assert plan.leave(first, finish) is (second if heir else None)
        assert second.state is (State.RUNNING if heir else State.WAITING)
    plan = scheduler(1)
    first, second = (sequence(number=i, group=7) for i in range(2))
    plan.submit(first)
    plan.submit(second)
    plan.admit()
    assert plan.leave(first, Finish.CANCELLED) is None, "half a prompt is no inheritance"
    plan.admit()
    assert second.state is State.PREFILLING
