"""PrefixCache: keys, values and states of the beginnings of texts, so that a request reads only what is new.

Texts are cut at fixed positions, so a chunk's keys and values are a function of the tokens up to its end, to
the bit. They are kept under a digest of these tokens and of salts: how soon a prompt is read tells a client
nothing of the prompts of clients with other salts. States of recurrent layers weigh as much as keys and
values of thousands of tokens, so they are kept at a few ends alone, and a text resumes at the last of them.
Where passes of any shape give the same bits, texts are kept to their very ends, and found to any token.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from foredraft.decode.prefix_folder import PrefixFolder
from foredraft.model.cache import KVCache, Span

STATES = 2048  # tokens of a prompt from states that are kept to the next ones


class Prefix(NamedTuple):
    """The beginning of a text: its tokens' number, and the digest of its salts and tokens."""

    end: int = 0
    digest: bytes = b""
    departs: int = 0  # where it leaves what is kept, as others may: states are worth keeping there

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


class Part(NamedTuple):
    """A part of a text that is kept, of a chunk at most."""

    key: bytes
    before: Prefix
    tokens: list[int]
    kind: str  # "values" are keys and values, "states" those at its end
    spans: dict[KVCache, Span]

    def shared(self, tokens: list[int]) -> int:
        """Return how far this text goes along with one that has the same tokens before the part."""
        rest = tokens[self.before.end : self.before.end + len(self.tokens)]
        same = takewhile(lambda pair: pair[0] == pair[1], zip(self.tokens, rest, strict=False))
        return self.before.end + sum(1 for _ in same)


class Place(NamedTuple):
    """Positions at which a row may end, by what is kept."""

    first: int
    last: int
    states: Part | None = None  # which it needs for that


class PrefixCache:
    """Keeps parts of texts, the latest used ones, and all of them in a folder, where there is one."""

    def __init__(self, most_bytes: int, folder: PrefixFolder | None = None) -> None:
        self.most_bytes, self.bytes, self.hits, self.folder = most_bytes, 0, 0, folder
        self._parts: OrderedDict[bytes, Part] = OrderedDict()
        self._after: dict[bytes, dict[bytes, Part]] = {}  # by digest of what comes before, and by key

    def restore(
        self,
        prefix: Prefix,
        tokens: list[int],
        caches: Collection[KVCache],
        row: int,
        chunk: int,
        needed: Collection[KVCache],
        *,
        anywhere: bool,
    ) -> Prefix:
        """Copy what is kept of the beginning of a prompt into a row that holds nothing.

        The needed caches end at one position, others at most there; anywhere: not only at the ends of chunks.
        """
        ends, path = [prefix], list[Part]()
        while prefix.end + chunk <= len(tokens):
            whole = self._find(prefix, tokens[prefix.end : prefix.end + chunk], "values", caches)
            prefix = _longer(prefix, tokens[prefix.end : prefix.end + chunk])
            if not whole.spans.keys() >= {*needed}:
                break
            ends.append(prefix)
            path.append(whole)
        for cache in caches:
            self._fetch(ends[-1:], tokens, "values", cache)
            if cache.recurrent is not None:
                self._fetch(ends[::-1], tokens, "states", cache)
        if anywhere:
            tails = [part for part in self._parts_after(ends[-1], "values") if part.spans.keys() >= {*needed}]
            path += sorted(tails, key=lambda tail: tail.shared(tokens))[-1:]
        states = [part for end in ends for part in self._parts_after(end, "states")]
        places = {cache: list(_places(cache, path, states, tokens)) for cache in caches}

        def fits(position: int) -> bool:
            own = (places[cache] for cache in needed)
            return all(any(place.first <= position <= place.last for place in each) for each in own)

        stop = max(filter(fits, (place.last for cache in needed for place in places[cache])), default=0)
        for cache, own in places.items():
            reached = (place for place in own if place.first <= stop)
            best = max(reached, key=lambda place: min(stop, place.last))
            cache.lengths[row] = min(stop, best.last)
            used = [part for part in path if part.before.end < cache.lengths[row]]
            for part in [*used, *([] if best.states is None else [best.states])]:
                cache.put_back(replace(part.spans[cache], row=row))
            self._touch(best.states)
        self._touch(path[-1] if path else None)
        self._shrink()
        self.hits += stop
        return ends[stop // chunk]._replace(departs=ends[-1].end)

    def keep(
        self, prefix: Prefix, tokens: list[int], caches: Collection[KVCache], row: int, chunk: int, last: int,
        early: int | None,
    ) -> Prefix:  # fmt: skip
        """Keep what a row holds of a text whose prompt goes to `last`.

        The row ends there, at `early` before it, behind a reply or after a chunk; without `early` only so.
        """
        while prefix.end + chunk <= len(tokens):
            part = tokens[prefix.end : prefix.end + chunk]
            self._add(prefix, part, "values", caches, row)
            prefix = _longer(prefix, part)
        rest, stop = tokens[prefix.end :], len(tokens)
        ends = early is not None and (stop == early or stop >= last)
        chosen = not rest and (stop % STATES == 0 or stop == prefix.departs)
        border = not rest and stop > last - chunk
        if ends and rest:
            self._add(prefix, rest, "values", caches, row)
        # on disk, states near those of another end are not worth their bytes
        lasting = stop != last and (ends or chosen or early is None)
        if ends or chosen or border:
            recurrent = [cache for cache in caches if cache.recurrent is not None]
            self._add(prefix, rest, "states", recurrent, row, lasting=lasting)
        return prefix

    def _add(
        self,
        before: Prefix,
        tokens: list[int],
        kind: str,
        caches: Iterable[KVCache],
        row: int,
        *,
        lasting: bool = True,
    ) -> None:
        """Keep of a text what the part of these tokens lacks."""
        part, of_states = self._part(before, tokens, kind), kind == "states"
        for cache in caches:
            stop = min(before.end + len(tokens), cache.lengths[row])
            start, old = stop if of_states else before.end, part.spans.get(cache)
            if stop <= (0 if old is None else old.stop) or start > stop:
                continue
            span = cache.take(row, start, stop, states=of_states)
            if bool(span.states) == of_states:
                self._hold(part, cache, span)
                if self.folder is not None and lasting:
                    self.folder.write(cache, before.digest, kind, len(tokens), part.key, span)
        self._shrink()

    def close(self) -> None:
        """Wait until everything is in the folder."""
        if self.folder is not None:
            self.folder.close()

    def _part(self, before: Prefix, tokens: list[int], kind: str) -> Part:
        """Return what is kept of a part in memory, perhaps nothing."""
        end = _longer(before, tokens)
        key = end.digest if kind == "values" else _longer(end, []).digest
        return self._parts.get(key) or Part(key, before, tokens, kind, {})

    def _hold(self, part: Part, cache: KVCache, span: Span) -> None:
        old = part.spans.get(cache)
        self.bytes += span.bytes - (0 if old is None else old.bytes)
        part.spans[cache] = span
        self._parts[part.key] = self._after.setdefault(part.before.digest, {})[part.key] = part
        self._touch(part)

    def _shrink(self) -> None:
        while self.bytes > self.most_bytes:
            _, oldest = self._parts.popitem(last=False)
            self.bytes -= sum(span.bytes for span in oldest.spans.values())
            others = self._after[oldest.before.digest]
            del others[oldest.key]
            if not others:
                del self._after[oldest.before.digest]

    def _parts_after(self, prefix: Prefix, kind: str) -> list[Part]:
        return [part for part in self._after.get(prefix.digest, {}).values() if part.kind == kind]

    def _find(self, before: Prefix, tokens: list[int], kind: str, caches: Iterable[KVCache]) -> Part:
        """Return what is kept of a part, in memory or else in the folder."""
        part = self._part(before, tokens, kind)
        if self.folder is not None:
            for cache in [cache for cache in caches if cache not in part.spans]:
                span = self.folder.read(cache, before.digest, kind, len(tokens), part.key)
                if span is not None:
                    self._hold(part, cache, span)
        return part

    def _fetch(self, ends: Iterable[Prefix], tokens: list[int], kind: str, cache: KVCache) -> None:
        """Take from the folder the longest part of a text that follows the first of these ends with any."""
        for end in ends:
            for count in () if self.folder is None else self.folder.counts(cache, end.digest, kind):
                part = tokens[end.end : end.end + count]
                if len(part) == count and cache in self._find(end, part, kind, [cache]).spans:
                    return

    def _touch(self, part: Part | None) -> None:
        """Let a part be the latest used one, before it those without which it is not found."""
        while part is not None:
            self._parts.move_to_end(part.key)
            part = self._parts.get(part.before.digest)


def _places(
    cache: KVCache, path: Iterable[Part], states: Iterable[Part], tokens: list[int]
) -> Iterable[Place]:
    reach = 0
    for part in path:
        if cache in part.spans and reach == part.before.end:
            reach = min(part.spans[cache].stop, part.shared(tokens))
    yield Place(0, 0 if cache.recurrent else reach)
    for part in states if cache.recurrent else ():
        if cache in part.spans:
            span = part.spans[cache]
            last = min(span.stop, part.shared(tokens), reach)
            if span.base <= last:
                yield Place(span.base, last, part)


def _longer(before: Prefix, tokens: list[int]) -> Prefix:
    """Return a prefix with tokens after it. Its digest depends on all tokens and reads these alone."""
    digest = hashlib.sha256(before.digest + array("q", tokens).tobytes()).digest()
    return before._replace(end=before.end + len(tokens), digest=digest)
