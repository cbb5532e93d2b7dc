"""AfterThinking: a constraint of the content alone, which waits until the thinking of the text has ended.

In the thinking every token is allowed, but for the ends of a text. Where the text may begin with thinking and
need not, the model chooses: what begins the opening marker is allowed beside what begins the content.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from foredraft.constraints.thinking_tokens import Phase, Place, ThinkingTokens
from foredraft.decode.constraint import Constraint

__all__ = ["AfterThinking"]


class _Step(NamedTuple):
    """Where a text stands after some tokens.

    Attributes:
        place: In its thinking.
        begin: The token with which the content begins, if it has begun or may begin now; None otherwise.
    """

    place: Place
    begin: int | None


class AfterThinking(Constraint):
    """Leaves the thinking free and holds the content to another constraint.

    Args:
        tokens: Of the vocabulary.
        begun: The prompt has opened the thinking.
        content: At the beginning of a text; this sequence's own. It takes no token back.
    """

    def __init__(self, tokens: ThinkingTokens, begun: bool, content: Constraint) -> None:
        self._tokens, self._content, self.option = tokens, content, content.option
        first = _Step(Place(Phase.THINKING), None) if begun else _Step(Place(Phase.OPENING), 0)
        self._new: list[int] = []
        self._steps = [first]  # after n new tokens
        self._origin = 0  # the token with which the content began for `content`
        self._note_narrow()

    def _note_narrow(self) -> None:
        self.narrow = self._steps[-1].place.phase is not Phase.THINKING

    @property
    def length(self) -> int:
        return len(self._new)

    def mask(self) -> Tensor | None:
        place, begin = self._steps[-1]
        if begin is None:
            return self._tokens.mask(place)
        mask = self._content.mask()
        if place.phase is Phase.CONTENT or mask is None:
            return mask
        return mask | self._tokens.mask(place)

    def advance(self, token: int) -> int:
        place, begin = self._steps[-1]
        after = self._tokens.after(place, token) or Place(Phase.CONTENT)
        if after.phase is Phase.BREAK:
            begin = self.length + 1
        elif after.phase is Phase.THINKING:
            begin = None
        elif after.phase is Phase.OPENING and begin is not None:  # it may turn out to be content
            mask = self._content.mask()
            begin = begin if mask is None or bool(mask[token]) else None
        self._new.append(token)
        self._steps.append(_Step(after, begin))
        self._follow()
        return self.length

    def rewind(self, length: int) -> None:
        del self._new[length:]
        del self._steps[length + 1 :]
        self._content.rewind(max(0, min(self._content.length, length - self._origin)))
        self._follow()

    def _follow(self) -> None:
        """Let the content's constraint read what it has not read of the content so far."""
        begin = self._steps[-1].begin
        self._note_narrow()
        if begin is None:
            return
        if begin != self._origin:
            self._content.rewind(0)
            self._origin = begin
        for token in self._new[begin + self._content.length :]:
            self._content.advance(token)

    def retreat(self) -> int | None:
        if self._steps[-1].begin is None:
            return super().retreat()
        self._content.retreat()
        self.ended_by = self._content.ended_by
        return None

    def forced(self, most: int) -> list[int]:
        return self._content.forced(most) if self._steps[-1].place.phase is Phase.CONTENT else []
