"""BanList: what the requests with one list of banned phrases share."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cached_property
from typing import NamedTuple

from foredraft.constraints.phrases import BOUNDARY, PhraseAutomaton, Symbols
from foredraft.constraints.token_automaton import TokenAutomaton
from foredraft.constraints.token_masks import TokenMasks
from foredraft.constraints.token_table import TokenTable

__all__ = ["BanList", "Phrases"]


class Phrases(NamedTuple):
    """Banned phrases, how they are compared, and strings at which a text may be cut off."""

    phrases: tuple[str, ...]
    ignore_case: bool
    whole_words: bool
    endings: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of all strings."""
        return sum(len(text.encode()) for texts in (self.phrases, self.endings) for text in texts)


class BanList:
    """A list of banned phrases over a vocabulary.

    Args:
        ban: The phrases.
        table: The vocabulary.
    """

    def __init__(self, ban: Phrases, table: TokenTable) -> None:
        symbols = Symbols(ignore_case=ban.ignore_case, whole_words=ban.whole_words)
        self._phrases = PhraseAutomaton(ban.phrases, symbols, ban.endings)
        self._table = table

    @cached_property
    def automaton(self) -> TokenAutomaton:
        return TokenAutomaton(self._phrases, self._table)

    @cached_property
    def masks(self) -> TokenMasks:
        return TokenMasks(self._phrases, self._table)

    def has_safe_token(self, *, ends_are_barred: bool) -> bool:
        """Return whether some token can never be forbidden by a rollback: it begins no phrase."""
        return bool(self._table.ends and not ends_are_barred) or self._speaks_safely

    @cached_property
    def _speaks_safely(self) -> bool:
        phrases, table = self._phrases, self._table
        first = _first_symbols(phrases.patterns)
        for id in table.speaks.nonzero()[:, 0].tolist():
            symbols, pending = phrases.decoded(b"", table.texts[id])
            if not pending and not first.intersection(symbols):
                return True
        return False


def _first_symbols(patterns: Seq[str]) -> set[str]:
    return {pattern.lstrip(BOUNDARY)[0] for pattern in patterns}
