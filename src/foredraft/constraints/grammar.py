"""Grammar: text of a regular expression, a JSON schema or a context-free grammar, by the library llguidance.

https://github.com/guidance-ai/llguidance (MIT). The library never sees a token that its mask forbids, which
would break its matcher for good, nor an end-of-text token: those are allowed where the text so far is whole.
"""

from __future__ import annotations

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from foredraft.decode.constraint import Constraint

__all__ = ["Grammar"]


class Grammar(Constraint):
    """Allows the tokens with which the text can still become one of the grammar.

    Args:
        matcher: At the beginning of a text; this sequence's own.
        ends: Ids that end a text.
        vocabulary: Size V.
        option: The option that asked for it, for `ended_by`.
    """

    def __init__(self, matcher: LLMatcher, ends: frozenset[int], vocabulary: int, option: str) -> None:
        self._matcher, self._ends, self._vocabulary, self._option = matcher, ends, vocabulary, option
        self._tokens: list[int] = []  # read now and, behind `_length`, on the way that was last rewound
        self._length = 0
        self._masks: dict[int, Tensor] = {}  # length -> mask along `_tokens`

    @property
    def length(self) -> int:
        return self._length

    @property
    def _ended(self) -> bool:
        return self._length > 0 and self._tokens[self._length - 1] in self._ends

    def mask(self) -> Tensor | None:
        if self._ended:
            return None
        mask = self._masks.get(self._length)
        if mask is None:
            mask = self._masks[self._length] = self._compute_mask()
        return mask

    def _compute_mask(self) -> Tensor:
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(packed, bitorder="little")[: self._vocabulary].astype(bool)
        mask[list(self._ends)] = self._matcher.is_accepting()
        return torch.from_numpy(mask)

    def advance(self, token: int) -> int:
        if not self._ended and token not in self._ends:
            read = self._matcher.try_consume_tokens([token])
            assert read == 1, f"the grammar forbids token {token}"
        if self._tokens[self._length : self._length + 1] != [token]:  # another way than the last one
            del self._tokens[self._length :]
            self._tokens.append(token)
            self._masks = {at: mask for at, mask in self._masks.items() if at <= self._length}
        self._length += 1
        return self._length

    def rewind(self, length: int) -> None:
        undone = self._tokens[length : self._length]
        ended = next((at for at, token in enumerate(undone) if token in self._ends), len(undone))
        if any(token in self._ends for token in self._tokens[:length]):
            ended = 0
        if ended:
            self._matcher.rollback(ended)
        self._length = length

    def retreat(self) -> int | None:
        whole = self._matcher.is_accepting()
        self.ended_by = f"{self._option}: " + (
            "the text is complete, and no end-of-text token is allowed"
            if whole
            else "no token can continue it"
        )
        return None

    def forced(self, most: int) -> list[int]:
        if self._ended or self._matcher.is_stopped():
            return []
        return list(self._matcher.compute_ff_tokens())[:most]
