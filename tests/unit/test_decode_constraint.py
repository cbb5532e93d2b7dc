"""Constraints that walk along the drafts of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.decode.constraint import Constraint, Walks

CPU = torch.device("cpu")


class NoRepeats(Constraint):
    """Allows none of three tokens twice in a row; 2 would be taken back."""

    def __init__(self, *said: int) -> None:
        self.said = list(said)

    @property
    def length(self) -> int:
        return len(self.said)

    def mask(self) -> Tensor | None:
        return torch.arange(3) != self.said[-1] if self.said else None

    def advance(self, token: int) -> int:
        self.said.append(token)
        return len(self.said) - (token == 2)

    def rewind(self, length: int) -> None:
        del self.said[length:]

    def roll_back(self, length: int) -> None:
        raise AssertionError("a walk only asks")

    def settled(self) -> int:
        return 0


def test_walks_follow_the_drafts_and_are_undone() -> None:
    rows = [NoRepeats(0), None, NoRepeats(), NoRepeats(1)]
    walks = Walks(rows, 3, CPU)
    assert walks.masks()[:, 0].int().tolist() == [[0, 1, 1], [1, 1, 1], [1, 1, 1], [1, 0, 1]]
    on = walks.advance(torch.tensor([[1], [1], [0], [2]]), torch.tensor([True, True, False, True]))
    assert on == [True, True, False, False], "rows that draft no more, and what would be taken back"
    assert walks.masks()[:, 0].int().tolist() == [[1, 0, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0]]
    walks.undo()
    assert [row and row.said for row in rows] == [[0], None, [], [1]]
