"""Combined: several constraints of one sequence at once, and the shortest length that it may have."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from foredraft.decode.constraint import Constraint

__all__ = ["Combined"]


class Combined(Constraint):
    """Allows what all its parts allow.

    Args:
        parts: By the option that asks for each; one or more. A dead end is left by the first one that can.
        ends: Ids that end a text, which are forbidden before `least` new tokens.
        least: Shortest length.
    """

    def __init__(
        self, parts: Mapping[str, Constraint], ends: frozenset[int] = frozenset(), least: int = 0
    ) -> None:
        self.parts = tuple(parts.values())
        self.option = " and ".join([*parts, *(["min_new_tokens"] if least else [])])
        self._ends, self._least = list(ends), least
        self._note_narrow()

    def _note_narrow(self) -> None:
        self.narrow = any(part.narrow for part in self.parts)

    @property
    def length(self) -> int:
        return self.parts[0].length

    def mask(self) -> Tensor | None:
        masks = [mask for part in self.parts if (mask := part.mask()) is not None]
        if not masks:
            return None  # min_new_tokens bars the ends by itself
        early = self._ends and self.length < self._least
        if len(masks) == 1 and not early:
            return masks[0]
        mask = masks[0].clone()
        for other in masks[1:]:
            mask &= other
        if early:
            mask[self._ends] = False
        return mask

    def advance(self, token: int) -> int:
        kept = min([part.advance(token) for part in self.parts])
        self._note_narrow()
        return kept

    def rewind(self, length: int) -> None:
        for part in self.parts:
            part.rewind(length)
        self._note_narrow()

    def roll_back(self, length: int) -> None:
        for part in self.parts:
            part.roll_back(length)
            self.ended_by = self.ended_by or part.ended_by
        self._note_narrow()

    def retreat(self) -> int | None:
        blocked = [part for part in self.parts if part.at_dead_end]
        for part in blocked or self.parts:
            kept = part.retreat()
            if kept is not None:
                return kept
        self.ended_by = blocked[0].ended_by if blocked else f"{self.option} allow no token together"
        return None

    def settled(self) -> int:
        return min(part.settled() for part in self.parts)

    def may_be_cut(self) -> int:
        return min(part.may_be_cut() for part in self.parts)

    def forced(self, most: int) -> list[int]:
        return max((part.forced(most) for part in self.parts), key=len)
