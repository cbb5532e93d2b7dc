"""Stream: an iterator over the pieces of one sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from foredraft.decode.sequence import Sequence
from foredraft.llm.driver import Driver, Request
from foredraft.llm.interrupts import Interrupts
from foredraft.llm.output import Output, Piece
from foredraft.llm.pieces import Pieces

__all__ = ["Stream"]


class Stream(Iterator[Piece]):
    """An iterator over the pieces of one sample, one after every round; `LLM.stream` makes one.

    The request starts with the first `next`. `close` cancels it, and so does whatever `next` raises, an
    interrupt (Ctrl-C) too. A stream that is dropped before its end is cancelled before the model computes
    anything else. One thread at a time calls `next`.

    It is a class and not a generator, because an interrupt may end a generator before its `finally`.

    Examples:
        >>> stream = llm.stream("def add(a, b):", SamplingParams(max_new_tokens=64, ignore_eos=True))
        >>> len(next(stream).token_ids) > 0
        True
        >>> stream.close()
        >>> list(stream)
        []
    """

    def __init__(self, driver: Driver, sequence: Sequence, output: Callable[[Sequence], Output]) -> None:
        self._driver = driver
        self._pieces = Pieces(sequence, output)
        self._request = Request([sequence])
        self._over = False

    def __next__(self) -> Piece:
        if self._over:
            raise StopIteration
        try:
            piece = self._driver.run(self._request, self._pieces.next, owner=self)
            self._over = piece.output is not None
            return piece
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel the request, without waiting for the step that runs; the iterator has no more pieces."""
        try:
            self._end()
        except BaseException:
            self._end()  # an interrupt came before it could be deferred
            raise

    def _end(self) -> None:
        with Interrupts():
            self._over = True
            self._driver.cancel(self._request)
