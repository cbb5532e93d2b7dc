"""PrefixCache: keys and values of the beginnings of prompts, so that requests that share one read it once.

Prompts are cut at fixed positions, so a chunk's keys and values are a function of the tokens up to its end,
to the bit. A chunk is kept under a digest of these tokens and of salts: how soon a prompt is read tells a
client nothing of the prompts of clients with other salts.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

from foredraft.model.cache import KVCache, Span


class Prefix(NamedTuple):
    """The beginning of a prompt: its tokens' number, and the digest of its salts and tokens."""

    end: int = 0
    digest: bytes = b""

    @classmethod
    def salted(cls, *salts: str) -> Prefix:
        """Return the beginning before the first token; other salts, or another order, give another one.

        Examples:
            >>> Prefix.salted("a", "bc") == Prefix.salted("ab", "c")
            False
        """
        digest = b""
        for salt in salts if any(salts) else ():
            of_salt = hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()
            digest = hashlib.sha256(digest + of_salt).digest()
        return cls(0, digest)


NOTHING = Prefix()


class PrefixCache:
    """Keeps chunks of prompts, the latest used ones."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.bytes, self.hits = most_bytes, 0, 0
        self._chunks: OrderedDict[bytes, dict[KVCache, Span]] = OrderedDict()

    def restore(
        self,
        prefix: Prefix,
        tokens: list[int],
        caches: Iterable[KVCache],
        row: int,
        chunk: int,
        needed: Collection[KVCache],
    ) -> Prefix:
        """Copy what is kept of the beginning of a prompt into a row that holds nothing."""
        going = list(caches)
        while prefix.end + chunk <= len(tokens):
            longer = _longer(prefix, tokens[prefix.end : prefix.end + chunk])
            kept = self._chunks.get(longer.digest)
            if kept is None or any(cache not in kept for cache in needed):
                break
            prefix = longer
            self._chunks.move_to_end(prefix.digest)
            going = [cache for cache in going if cache in kept]
            for cache in going:
                cache.put_back(replace(kept[cache], row=row))
                cache.lengths[row] = prefix.end
        self.hits += prefix.end
        return prefix

    def keep(self, before: Prefix, chunk: list[int], caches: Iterable[KVCache], row: int) -> Prefix:
        prefix = _longer(before, chunk)
        end, kept = prefix.end, self._chunks.setdefault(prefix.digest, {})
        self._chunks.move_to_end(prefix.digest)
        complete = [cache for cache in caches if cache.lengths[row] >= end and cache not in kept]
        spans = {cache: cache.take(row, before.end, end) for cache in complete}
        kept |= spans
        self.bytes += _bytes(spans)
        while self.bytes > self.most_bytes:
            _, oldest = self._chunks.popitem(last=False)
            self.bytes -= _bytes(oldest)
        return prefix


def _longer(before: Prefix, chunk: list[int]) -> Prefix:
    """Return a prefix with the chunk after it. Its digest depends on all tokens and reads the chunk alone."""
    digest = hashlib.sha256(before.digest + array("q", chunk).tobytes()).digest()
    return Prefix(before.end + len(chunk), digest)


def _bytes(spans: dict[KVCache, Span]) -> int:
    return sum(span.bytes for span in spans.values())
