"""Any order of arrivals, rounds and cancellations: every request gets its own text in every batch."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings, stateful
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from foredraft.decode.policy import Fixed, Heuristic, Policy
from foredraft.decode.sequence import Finish, Sequence, State
from tests.support.harness import DRAFTERS, CheckedEngine, make_engine, request, run
from tests.support.parts import Fickle, LateBan, NoRepeat, RandomBudgets, StopUnsure
from tests.support.tabular import Table, Tabular

V, FATAL, PATIENCE = 5, 4, 9
TARGET, DRAFT = Table(V, 51), Table(V, 52)
POLICIES: list[Policy] = [Fixed(0), Fixed(3), Heuristic(5), StopUnsure(4), RandomBudgets(5), Fickle(3)]
BANS = [(1, 0), (2, 0, 3)]
CONSTRAINTS: list[Any] = [
    lambda: None,
    lambda: NoRepeat(V),
    *(lambda ban=ban: LateBan(V, ban) for ban in BANS),
]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"acceptance": "coupled"},
    {"acceptance": "coupled", "top_k": 2},
    {"acceptance": "coupled", "temperature": 1.5, "top_p": 0.8},
]
_known: dict[Any, list[int]] = {}


def expected(sequence: Sequence, constraint: int) -> list[int]:
    key = (tuple(sequence.prompt), sequence.params, sequence.seed, sequence.sample, sequence.eos, constraint)
    if key not in _known:
        alone = Sequence(
            0, sequence.prompt, sequence.params, sequence.seed, sequence.sample, sequence.eos,
            constraint=CONSTRAINTS[constraint](),
        )  # fmt: skip
        [_known[key]] = run(make_engine(TARGET, rows=1), [alone])
    return _known[key]


class Schedule(RuleBasedStateMachine):
    """Texts are functions of the request here: temperature 0, or coupled with a seed."""

    engine: CheckedEngine

    @initialize(rows=st.integers(1, 4), policy=st.sampled_from(POLICIES), greedy=st.booleans())
    def begin(self, rows: int, policy: Policy, greedy: bool) -> None:
        target = Tabular(TARGET, chunk=3, fatal=FATAL, patience=PATIENCE)
        self.engine = make_engine(target, DRAFT, policy, rows=rows, positions=32, greedy_drafts=greedy)
        self.constraints: dict[int, int] = {}
        self.sequences: list[Sequence] = []

    @rule(
        prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=8),
        drafter=st.sampled_from(DRAFTERS),
        sampling=st.sampled_from(SAMPLING),
        samples=st.integers(1, 4),
        constraint=st.integers(0, len(CONSTRAINTS) - 1),
        eos=st.sampled_from([(), (3,)]),
        max_new_tokens=st.integers(1, 14),
        seed=st.integers(0, 3),
        client=st.sampled_from("aab"),
    )
    def arrive(
        self, prompt: Any, drafter: Any, sampling: Any, samples: int, constraint: int, eos: Any, **more: Any
    ) -> None:
        group = len(self.sequences) if samples > 1 else None
        for sample in range(samples):
            own = {"sample": sample, "group": group, "constraint": CONSTRAINTS[constraint]()}
            sequence = request(prompt, drafter, eos=frozenset(eos), **own, **more, **sampling)
            self.constraints[sequence.id] = constraint
            self.sequences.append(sequence)
            self.engine.submit(sequence)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        over = sequence.finish
        self.engine.cancel(sequence)
        assert sequence.state is State.FINISHED
        assert sequence.finish is (over or Finish.CANCELLED)

    @invariant()
    def everyone_is_somewhere(self) -> None:
        if not hasattr(self, "engine"):
            return
        rows, waiting = self.engine.rows.sequences, self.engine.scheduler.waiting
        here = {State.WAITING: waiting, State.PREFILLING: rows, State.RUNNING: rows, State.FINISHED: []}
        for sequence in self.sequences:
            assert (sequence in rows or sequence in waiting) == (sequence.state is not State.FINISHED)
            assert sequence.state is State.FINISHED or sequence in here[sequence.state]
            assert (sequence.finish is None) == (sequence.state is not State.FINISHED)
            said = sequence.new_ids
            if said and self.constraints[sequence.id] < 2:
                assert expected(sequence, self.constraints[sequence.id])[: len(said)] == said

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        steps = 0
        while not self.engine.scheduler.idle:
            self.engine.step()
            steps += 1
            assert steps < 2000, "it never ends"
        for sequence in self.sequences:
            want = expected(sequence, self.constraints[sequence.id])
            if sequence.finish is Finish.ERROR:
                assert sequence.prompt[0] == FATAL
            elif sequence.finish is not Finish.CANCELLED:
                assert sequence.new_ids == want
                assert sequence.finish is (Finish.EOS if want[-1] in sequence.eos else Finish.LENGTH)
                assert sum(turn.emitted for turn in sequence.rounds) == len(want)
        assert not any(cache.lengths[row] for cache in self.engine.rows.caches for row in range(cache.rows))
        for drafter in self.engine.drafters.values():  # no state is left of finished sequences
            for table in ("lengths", "joined", "indices", "_stepped", "_starts", "_seats"):
                assert not getattr(drafter, table, ()), f"{drafter.name} keeps {table}"


TestSchedule = Schedule.TestCase
TestSchedule.settings = settings(
    max_examples=40,
    stateful_step_count=15,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # add Phase.shrink to look into a failure
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_schedules() -> None:
    stateful.run_state_machine_as_test(Schedule, settings=settings(max_examples=1500, stateful_step_count=50))
