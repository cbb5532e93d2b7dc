"""Drafters for which a text begins later than it does: any text but its last tokens is left unread."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from foredraft.decode.policy import Candidates, Decision, Policy
from foredraft.decode.sequence import Sequence
from foredraft.drafters.draft_model import DraftModel
from tests.exactness.test_identity import DRAFT, PROMPTS, TARGET, V, greedy, reference
from tests.support.harness import CheckedEngine, make_engine, run
from tests.support.parts import LateBan

LATECOMERS = ("draft-model", "looping", "mapped")


class Late(Policy):
    """Take `plain` plain steps, then repeat: three drafts of three tokens and seven plain steps.

    A drafter to which the text is new reads the last `context` tokens of it.
    """

    name = "late"
    uses_costs = True

    def __init__(self, plain: int, context: int | None) -> None:
        self.plain, self.context = plain, context
        self.late: list[tuple[int, set[str]]] = []  # each request, and the drafters to which its text was new

    def decide(self, rows: Seq[Candidates]) -> list[Decision]:
        self.late += [(row.sequence.id, row.late) for row in rows]
        return [Decision(next(iter(row.limits), None), self._budget(row), self.context) for row in rows]

    def _budget(self, row: Candidates) -> int:
        since = row.sequence.round_count - self.plain
        return 3 if since >= 0 and since % 10 < 3 else 0


def context_start(engine: CheckedEngine, sequence: Sequence) -> int:
    return engine.drafters[sequence.drafters[0]].context_start(sequence)


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize(
    ("plain", "context"), [(0, 0), (0, 1), (0, 3), (0, 6), (0, 99), (4, 0), (4, 2), (4, 7), (4, 99)]
)
def test_tokens_are_those_of_plain_decoding(rows: int, plain: int, context: int) -> None:
    """And a drafter's cache holds the text from where it began, which the engine checks around every round."""
    sequences = [greedy(prompt, drafter) for prompt in PROMPTS for drafter in LATECOMERS]
    engine = make_engine(TARGET, DRAFT, Late(plain, context), rows=rows)
    starts: dict[int, int] = {}
    leave = engine._leave

    def seen(sequence: Sequence, *rest: Any) -> None:
        starts[sequence.id] = context_start(engine, sequence)
        leave(sequence, *rest)

    engine._leave = seen  # type: ignore[method-assign]
    assert run(engine, sequences) == [reference(s.prompt) for s in sequences]
    assert any(turn.accepted > 0 for s in sequences for turn in s.rounds)
    for s in sequences:
        read = len(s.prompt) - 1 + sum(turn.emitted for turn in s.rounds[:plain])
        assert starts[s.id] == max(0, read - context)
        assert context_start(engine, s) == 0, "the next text of this drafter begins where it begins"


@pytest.mark.parametrize("drafter", LATECOMERS)
def test_a_ban_takes_back_the_start_of_a_late_context(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    free = reference((0,), 12)
    ban = LateBan(V, tuple(free[2:7]))
    sequence = greedy((0,), drafter, constraint=ban, max_new_tokens=12)
    engine = make_engine(TARGET, DRAFT, Late(6, 1))
    begun: list[int] = []
    start_context = DraftModel.start_context

    def noted(self: DraftModel, sequence: Sequence, start: int) -> None:
        begun.append(start)
        start_context(self, sequence, start)

    monkeypatch.setattr(DraftModel, "start_context", noted)
    engine.submit(sequence)
    lengths = []
    while not engine.scheduler.idle:
        engine.step()
        lengths.append(len(sequence.tokens))
    assert sequence.new_ids == reference((0,), 12, constraint=LateBan(V, ban.run))
    assert ban.rollbacks and min(turn.emitted for turn in sequence.rounds) < 0
    assert begun[0] == 5 and min(lengths[6:]) <= 5, "what it began with is gone"


@pytest.mark.parametrize("drafter", LATECOMERS)
def test_the_room_for_drafts_counts_from_the_start_of_the_context(drafter: str) -> None:
    most = len(PROMPTS[-1]) + 3  # positions that it can read, all but three of which the prompt would take
    spans = []
    for context in (None, 2):
        sequence = greedy(PROMPTS[-1], drafter)
        engine = make_engine(TARGET, DRAFT, Late(0, context))
        engine.drafters[drafter].max_length = most
        assert run(engine, [sequence]) == [reference(sequence.prompt)]
        ends = itertools.accumulate((turn.emitted for turn in sequence.rounds), initial=len(sequence.prompt))
        turns = zip(ends, sequence.rounds, strict=False)
        spans.append(max(end + turn.drafted for end, turn in turns if turn.drafted))
    assert spans == [most, most + len(PROMPTS[-1]) - 3]


def test_choices_share_the_whole_text() -> None:
    """Copied prompt rows hold the prompt from its beginning; a drafter may begin late in texts of no group, once each."""
    policy = Late(0, 1)
    several = [greedy(PROMPTS[-1], "draft-model", group=1) for _ in range(5)]
    alone = [greedy(PROMPTS[-1], "draft-model") for _ in range(2)]
    engine = make_engine(TARGET, DRAFT, policy, rows=3)
    assert run(engine, several + alone) == [reference(PROMPTS[-1])] * 7
    grouped = {s.id for s in several}
    assert not any(names for id, names in policy.late if id in grouped)
    assert [names for id, names in policy.late if id not in grouped and names] == [{"draft-model"}] * 2
