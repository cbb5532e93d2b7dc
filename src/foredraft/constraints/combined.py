"""Combined: several constraints of one sequence at once; constraints that begin behind the thinking.

In the thinking every token is allowed, but for the ends of a text. Where thinking is optional, what begins
the opening marker is allowed beside what begins the content. Markers are looked for in bytes, so that no
other tokenisation of one slips through. A token that completes the closing marker may add line breaks, and
nothing else: the content begins with a token of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.constraints.shared_cache import caching
from foredraft.decode.constraint import Constraint

LINE_BREAK = b"\n"
LINE_BREAKS = 2  # between the closing marker and the content, at most, as chat templates write them


class Phase(Enum):
    """Where a text stands; what `ThinkingPlace.read` counts in each phase."""

    OPENING = "bytes of the opening marker"
    THINKING = "last bytes that begin the closing marker"
    BREAK = "line breaks behind the closing marker"
    CONTENT = "nothing"


class ThinkingPlace(NamedTuple):
    phase: Phase
    read: int = 0


CONTENT = ThinkingPlace(Phase.CONTENT)


class ThinkingTokens:
    """The tokens of a vocabulary, seen from the markers of thinking; sequences share it."""

    def __init__(self, texts: Sequence[bytes], opens: str, closes: str, ends: Collection[int]) -> None:
        self._texts, self._ends = texts, list(ends)
        self._opens, self._closes = opens.encode(), closes.encode()
        # the tokens that may follow before the content, [V] bool; the caller does not write to it
        self.mask = caching(self._made)

    def after(self, place: ThinkingPlace, token: int) -> ThinkingPlace | None:
        """Return where a text stands after a token; one of no marker and no thinking begins the content."""
        (phase, read), text = place, self._texts[token]
        if phase is Phase.THINKING:
            return self._thought(read, text)
        if phase is Phase.OPENING:
            rest = self._opens[read:]
            if text.startswith(rest):
                return self._thought(0, text.removeprefix(rest))
            goes_on = bool(text) and rest.startswith(text)
            return ThinkingPlace(Phase.OPENING, read + len(text)) if goes_on else CONTENT
        return (_breaks(text, read) if phase is Phase.BREAK and text else None) or CONTENT

    def _thought(self, read: int, text: bytes) -> ThinkingPlace | None:
        """Return where a text stands after further bytes of thinking."""
        before, marker, rest = (self._closes[:read] + text).partition(self._closes)
        if marker:
            return _breaks(rest)
        begun = range(len(self._closes) - 1, 0, -1)
        read = next((count for count in begun if before.endswith(self._closes[:count])), 0)
        return ThinkingPlace(Phase.THINKING, read)

    def _made(self, place: ThinkingPlace) -> Tensor:
        thinks = place.phase is Phase.THINKING
        mask, texts = torch.full((len(self._texts),), thinks), enumerate(self._texts)
        if thinks:  # a token that ends it wrongly has the marker's last byte
            last = self._closes[-1]
            mask[[id for id, text in texts if last in text and self.after(place, id) is None]] = False
        else:
            first = self._opens[place.read :][:1] if place.phase is Phase.OPENING else LINE_BREAK
            starting = [id for id, text in texts if text.startswith(first)]
            mask[[id for id in starting if self.after(place, id) not in (None, CONTENT)]] = True
        mask[self._ends] = False
        return mask


def _breaks(text: bytes, before: int = 0) -> ThinkingPlace | None:
    """Return where a text stands after line breaks; None for other text, or for more than may come."""
    breaks = before + len(text)
    return None if text.strip(LINE_BREAK) or breaks > LINE_BREAKS else ThinkingPlace(Phase.BREAK, breaks)


class _ThinkingStep(NamedTuple):
    """Where a text stands after some tokens."""

    place: ThinkingPlace  # in its thinking
    begin: int | None  # the token with which the content begins, if it has begun or may begin now


class AfterThinking(Constraint):
    """Leaves the thinking free and holds the content to another constraint."""

    def __init__(self, table: ThinkingTokens, begun: bool, content: Constraint) -> None:
        super().__init__()
        self._table, self._content = table, content
        self.option, self.takes_back = content.option, content.takes_back
        phase, begin = (Phase.THINKING, None) if begun else (Phase.OPENING, 0)
        self._steps = [_ThinkingStep(ThinkingPlace(phase), begin)]  # after n new tokens
        self._origin = 0  # the token with which the content began for `content`

    @property
    def narrow(self) -> bool:  # type: ignore[override]
        return self._steps[-1].place.phase is not Phase.THINKING

    def mask(self) -> Tensor | None:
        place, begin = self._steps[-1]
        if begin is None:
            return self._table.mask(place)
        mask = self._content.mask()
        if place.phase is Phase.CONTENT or mask is None:
            return mask
        return mask | self._table.mask(place)

    def advance(self, token: int) -> int:
        place, begin = self._steps[-1]
        after = self._table.after(place, token) or CONTENT
        if after.phase is Phase.BREAK:
            begin = self.length + 1
        elif after.phase is Phase.THINKING:
            begin = None
        elif after.phase is Phase.OPENING and begin is not None:  # it may turn out to be content
            mask = self._content.mask()
            begin = begin if mask is None or bool(mask[token]) else None
        self.tokens.append(token)
        self._steps.append(_ThinkingStep(after, begin))
        self._follow()
        return self.length

    def rewind(self, length: int) -> None:
        del self.tokens[length:], self._steps[length + 1 :]
        self._content.rewind(max(0, min(self._content.length, length - self._origin)))
        self._follow()

    def _follow(self) -> None:
        """Let the content's constraint read what it has not read of the content so far."""
        begin = self._steps[-1].begin
        if begin is None:
            return
        if begin != self._origin:
            self._content.rewind(0)
            self._origin = begin
        for token in self.tokens[begin + self._content.length :]:
            self._content.advance(token)

    def retreat(self) -> int | None:
        if self._steps[-1].begin is None:
            return super().retreat()
        self._content.retreat()
        self.ended_by = self._content.ended_by
        return None

    def forced(self, most: int) -> list[int]:
        return self._content.forced(most) if self._steps[-1].place.phase is Phase.CONTENT else []


class Combined(Constraint):
    """Allows what all its parts allow."""

    def __init__(
        self, parts: Mapping[str, Constraint], ends: frozenset[int] = frozenset(), least: int = 0
    ) -> None:
        # by the option that asks for each; one or more. A dead end is left by the first one that can
        self.parts = tuple(parts.values())
        self.option = " and ".join([*parts, *(["min_new_tokens"] if least else [])])
        self._ends, self._least = list(ends), least

    @property
    def narrow(self) -> bool:  # type: ignore[override]
        return any(part.narrow for part in self.parts)

    @property
    def takes_back(self) -> bool:  # type: ignore[override]
        return any(part.takes_back for part in self.parts)

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
        return min([part.advance(token) for part in self.parts])

    def rewind(self, length: int) -> None:
        for part in self.parts:
            part.rewind(length)

    def roll_back(self, length: int) -> None:
        for part in self.parts:
            part.roll_back(length)
            self.ended_by = self.ended_by or part.ended_by

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
