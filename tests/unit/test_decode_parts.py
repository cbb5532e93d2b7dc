"""Small pure parts of the loop: stats, a policy, sequences, rows, the scheduler, constraints along drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from foredraft.decode.constraint import Walks
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Heuristic
from foredraft.decode.scheduler import Rows, Scheduler
from foredraft.decode.sequence import Finish, Sequence, State, TokenOrigin
from foredraft.decode.stats import Round, Stats
from foredraft.model.runner import next_chunk
from tests.support.parts import NoRepeat

rounds = st.lists(
    st.integers(0, 6).flatmap(
        lambda drafted: st.integers(0, drafted).map(lambda accepted: Round(drafted, accepted, accepted + 1))
    ),
    max_size=12,
)


def sequence(number: int = 0, prompt: tuple[int, ...] = (1, 2, 3), **more: Any) -> Sequence:
    return Sequence(number, list(prompt), SamplingParams(), 0, **more)


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
    assert Stats.of(one).tokens_per_second == 0, "no time was taken"


def test_the_heuristic_grows_and_shrinks() -> None:
    policy = Heuristic(6, first=5)
    one: Any = SimpleNamespace(policy_state=policy.start())
    seen = []
    for accepted, drafted in ((5, 5), (6, 6), (2, 6), (0, 5), (0, 0), (4, 4), (0, 6), *[(0, 3)] * 9):
        policy.learn(one, Round(drafted, accepted, accepted + 1), None)
        seen.append(policy.budget(one))
    assert seen == [6, 6, 5, 4, 4, 6, 5, 4, 3, 2, *[1] * 6]
    assert Heuristic(3).start() == [3]


def test_a_prompt_may_contain_eos() -> None:
    one = sequence(prompt=(9, 9), eos=frozenset({9}))
    assert one.extend([1], [TokenOrigin.TARGET]) == 1
    assert (one.finish, one.prompt) == (None, [9, 9])


class Log:
    recurrent = None

    def __init__(self, rows: int) -> None:
        self.rows, self.lengths = rows, [0] * rows
        self.done: list[tuple[Any, ...]] = []

    def copy_row(self, source: int, target: int, length: int) -> None:
        self.done.append(("copy", source, target, length))
        self.lengths[target] = length

    def zero_row(self, row: int) -> None:
        self.done.append(("zero", row))
        self.lengths[row] = 0


@pytest.mark.parametrize(("leaver", "mover"), [(True, True), (True, False), (False, True), (False, False)])
def test_rows_are_a_prefix_and_the_last_one_moves(leaver: bool, mover: bool) -> None:
    """A row that may hold values that are not finite is zeroed."""
    caches = [Log(3), Log(4)]
    rows = Rows([*caches, caches[0]])  # type: ignore[list-item]
    assert (rows.capacity, len(rows.caches)) == (3, 2)
    several = [sequence(i) for i in range(3)]
    for one in several:
        rows.add(one)
    several[0].cache_finite, several[2].cache_finite = leaver, mover
    for cache in caches:
        cache.lengths[:3] = [2, 3, 4]
    rows.remove(several[0])
    assert [s.row for s in several] == [-1, 1, 0]
    assert rows.sequences == [several[2], several[1]]
    done = [*[("zero", 0)] * (not leaver), ("copy", 2, 0, 4), *[("zero", 2)] * (not mover)]
    for cache in caches:
        assert cache.done == done and cache.lengths[:3] == [4, 3, 0]
    several[1].cache_finite = True
    rows.remove(several[1])
    assert caches[0].lengths == [4, 0, 0] and caches[0].done == done


def test_prefill_chunks_depend_on_the_position_alone() -> None:
    assert [next_chunk(position, 11, 4) for position in (0, 1, 3, 4, 7, 8, 10)] == [4, 4, 4, 8, 8, 11, 11]


@pytest.mark.parametrize(
    ("finish", "begun", "heir"),
    [
        (Finish.EOS, State.RUNNING, State.RUNNING),
        (Finish.CANCELLED, State.RUNNING, State.RUNNING),
        (Finish.CANCELLED, None, State.WAITING),  # its row is broken
        (Finish.CANCELLED, State.PREFILLING, State.WAITING),  # half a prompt is no inheritance
    ],
)
def test_another_choice_takes_over_no_broken_row(finish: Finish, begun: State | None, heir: State) -> None:
    plan = Scheduler(Rows([Log(1)]))  # type: ignore[list-item]
    first, second = (sequence(i, group=7) for i in range(2))
    plan.submit(first)
    plan.submit(second)
    plan.admit()
    first.state, first.cache_finite = begun or State.RUNNING, begun is State.RUNNING
    assert plan.leave(first, finish) is (second if heir is State.RUNNING else None)
    assert second.state is heir
    plan.admit()
    assert second.state is (State.RUNNING if heir is State.RUNNING else State.PREFILLING)


class TakesBack(NoRepeat):
    """Allows none of three tokens twice in a row; 2 would be taken back."""

    def __init__(self, *said: int) -> None:
        super().__init__(3)
        self.tokens = list(said)

    def advance(self, token: int) -> int:
        return super().advance(token) - (token == 2)


def test_walks_follow_the_drafts_and_are_undone() -> None:
    rows = [TakesBack(0), None, TakesBack(), TakesBack(1)]
    walks = Walks(rows, 3, torch.device("cpu"))
    assert walks.masks()[:, 0].int().tolist() == [[0, 1, 1], [1, 1, 1], [1, 1, 1], [1, 0, 1]]
    on = walks.advance(torch.tensor([[1], [1], [0], [2]]), torch.tensor([True, True, False, True]))
    assert on == [True, True, False, False], "rows that draft no more, and what would be taken back"
    assert walks.masks()[:, 0].int().tolist() == [[1, 0, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0]]
    walks.undo()
    assert [row and row.tokens for row in rows] == [[0], None, [], [1]]
