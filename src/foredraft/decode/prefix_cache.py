"""PrefixCache: keys and values of the beginnings of prompts, so that requests that share one read it once.

Prompts are read in chunks that lie between fixed positions, whatever the load, so a chunk's keys and values
are a function of the tokens up to its end, to the bit. Only whole chunks are kept, under a digest of all the
tokens up to there.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from foredraft.model.cache import KVCache, Span

__all__ = ["PrefixCache"]


class PrefixCache:
    """Keeps chunks of prompts, the latest used ones.

    Args:
        most_bytes: Memory of all chunks at most.

    Attributes:
        bytes: Memory of all chunks now.
        hits: Tokens that were not read again.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.bytes, self.hits = most_bytes, 0, 0
        self._chunks: OrderedDict[bytes, dict[KVCache, Span]] = OrderedDict()

    def restore(self, tokens: list[int], caches: Iterable[KVCache], row: int, chunk: int) -> int:
        """Copy what is kept of the beginning of a prompt into a row that holds nothing.

        Args:
            tokens: Of the prompt, but for its last one.
            caches: The target's, then those of drafters that may have the beginning, too.
            row: The row of all caches.
            chunk: Tokens of a chunk.

        Returns:
            The positions that the target's row holds now.
        """
        going = list(caches)
        target = going[0]
        for digest, end in _digests(tokens, chunk):
            kept = self._chunks.get(digest)
            if kept is None:
                break
            self._chunks.move_to_end(digest)
            going = [cache for cache in going if cache in kept]
            for cache in going:
                cache.put_back(replace(kept[cache], row=row))
                cache.lengths[row] = end
        self.hits += target.lengths[row]
        return target.lengths[row]

    def keep(self, tokens: list[int], caches: Iterable[KVCache], row: int, chunk: int) -> None:
        """Keep the last chunk of a row whose length is a multiple of the chunk's.

        Args:
            tokens: Those that the target's row holds.
            caches: As in `restore`; those that hold fewer tokens are left out.
            row: The row of all caches.
            chunk: Tokens of a chunk.
        """
        *_, (digest, end) = _digests(tokens, chunk)
        if digest in self._chunks:
            self._chunks.move_to_end(digest)
            return
        spans = {cache: cache.take(row, end - chunk, end) for cache in caches if cache.lengths[row] >= end}
        self._chunks[digest] = spans
        self.bytes += _bytes(spans)
        while self.bytes > self.most_bytes:
            _, oldest = self._chunks.popitem(last=False)
            self.bytes -= _bytes(oldest)


def _digests(tokens: list[int], chunk: int) -> Iterator[tuple[bytes, int]]:
    """Yield a digest of all tokens up to the end of each whole chunk, and that end."""
    digest = b""
    for start in range(0, len(tokens) - chunk + 1, chunk):
        end = start + chunk
        digest = hashlib.sha256(digest + array("q", tokens[start:end]).tobytes()).digest()
        yield digest, end


def _bytes(spans: dict[KVCache, Span]) -> int:
    return sum(span.bytes for span in spans.values())
