"""Grammar: text of a regular expression, a JSON schema or a context-free grammar, by the library llguidance.

https://github.com/guidance-ai/llguidance (MIT). The library never sees a token that its mask forbids, which
would break its matcher for good, nor an end-of-text token: those are allowed where the text so far is whole.

The library answers an error of its own, such as a limit that is exceeded, with a mask of nothing but an end.
So each call looks for an error, and raises it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from foredraft.constraints.compiling import DEAD_ENDS, SIMPLER
from foredraft.constraints.pace import Pace
from foredraft.decode.constraint import Constraint, ConstraintError

__all__ = ["Grammar"]

KEPT = 64  # latest lengths whose masks are kept, for drafts that are rewound; V bytes each
UNSAID = "<non-verbose/>"  # stands in the library's messages where they do not show its state

T = TypeVar("T")


class Grammar(Constraint):
    """Allows the tokens with which the text can still become one of the grammar.

    Args:
        matcher: At the beginning of a text; this sequence's own.
        ends: Ids that end a text.
        end: The id that ends a text for the library, which needs one; perhaps none of `ends`.
        vocabulary: Size V.
        option: The option that asked for it, for `ended_by`.
        pace: Of the request.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        ends: frozenset[int],
        end: int,
        vocabulary: int,
        option: str,
        pace: Pace,
    ) -> None:
        self._matcher, self._ends, self._end, self._pace = matcher, ends, end, pace
        self._vocabulary, self.option = vocabulary, option
        self._tokens: list[int] = []  # read now and, behind `_length`, on the way that was last rewound
        self._length = 0
        self._ended_at: int | None = None  # the length with the first end; a draft may go on behind it
        self._masks: dict[int, Tensor] = {}  # length -> mask along `_tokens`

    @property
    def length(self) -> int:
        return self._length

    @property
    def _ended(self) -> bool:
        return self._ended_at is not None

    def mask(self) -> Tensor | None:
        if self._ended:
            return None
        mask = self._masks.get(self._length)
        if mask is None:
            mask = self._compute_mask()
            self._masks = {at: kept for at, kept in self._masks.items() if at > self._length - KEPT}
            self._masks[self._length] = mask
        return mask

    def _compute_mask(self) -> Tensor:
        packed = np.frombuffer(self._ask(lambda: self._pace.mask(self._matcher)), dtype=np.uint8)
        mask = np.unpackbits(packed, bitorder="little")[: self._vocabulary].astype(bool)
        mask[self._end] = False
        mask[list(self._ends)] = self._matcher.is_accepting()
        return torch.from_numpy(mask)

    def _ask(self, ask: Callable[[], T]) -> T:
        """Return the library's answer; an error of it, or too much of its time, is raised."""
        began = time.thread_time()
        try:
            answer = ask()
            self._pace.count(time.thread_time() - began)
        except TimeoutError as error:
            raise ConstraintError(f"{self.option} {error}; {SIMPLER}") from error
        if self._matcher.is_error() and self._matcher.stop_reason() not in DEAD_ENDS:
            message = " ".join(self._matcher.get_error().replace(UNSAID, "").split())
            raise ConstraintError(f"{self.option} failed: {message}; {SIMPLER}")
        return answer

    def advance(self, token: int) -> int:
        if not self._ended and token in self._ends:
            self._ended_at = self._length + 1
        elif not self._ended:
            read = self._ask(lambda: self._matcher.try_consume_tokens([token]))
            assert read == 1, f"the grammar forbids token {token}"
        if self._tokens[self._length : self._length + 1] != [token]:  # another way than the last one
            del self._tokens[self._length :]
            self._tokens.append(token)
            self._masks = {at: mask for at, mask in self._masks.items() if at <= self._length}
        self._length += 1
        return self._length

    def rewind(self, length: int) -> None:
        read = self._length if self._ended_at is None else self._ended_at - 1  # by the library
        if read > length:
            self._ask(lambda: self._matcher.rollback(read - length))
        if self._ended_at is not None and length < self._ended_at:
            self._ended_at = None
        self._length = length

    def retreat(self) -> int | None:
        whole = self._matcher.is_accepting()
        self.ended_by = f"{self.option}: " + (
            "the text is complete, and no end-of-text token is allowed"
            if whole
            else "no token can continue it"
        )
        return None

    def forced(self, most: int) -> list[int]:
        if self._ended or self._matcher.is_stopped():
            return []
        return self._ask(self._matcher.compute_ff_tokens)[:most]
