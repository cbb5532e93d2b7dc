"""Suffix: drafts copied from what earlier requests wrote, within a bound of memory; the file of these texts.

SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975): agents ask for nearly the same again and again. The
drafter looks for the longest suffix of the text that occurred before, in the request's text and in
`RecentTexts`, and proposes what most occurrences went on with. A draft ends where too few of them agree.

A search sees the texts of one *scope* alone: a server gives each API key its own, because how soon an
accepted draft is there tells that its text was known.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from foredraft.decode.drafter import Peek
from foredraft.decode.sequence import Finish, Sequence
from foredraft.drafters.lookup import LONGEST_MATCH, IndexedDrafter, Matches, TextIndex, at_match
from foredraft.errors import ConfigError
from foredraft.files import check_place, is_no_file, write_whole
from foredraft.model.checkpoint import Checkpoint

RUNS = (8, 3)  # tokens of the runs that have tables; one token or two say little about another text
# Memory, measured as its upper bound: of a token, whose runs each have an entry of a dictionary with two
# numbers; of a text; and of a scope, whose tables start with some room.
BYTES_PER_TOKEN, BYTES_PER_TEXT, BYTES_PER_SCOPE = 512, 256, 4096
FEWEST = 4  # tokens: in a shorter text no run of a table is followed by a token


class RecentText(NamedTuple):
    scope: bytes
    tokens: list[int]


class RecentTexts:
    """The latest texts of all scopes. One thread searches and adds at a time; another may read `all`."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self._indices: dict[bytes, TextIndex] = {}
        self._order: deque[tuple[bytes, int]] = deque()  # scope and tokens of each text, the oldest first
        self._texts: Counter[bytes] = Counter()  # scope -> its texts
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._order)

    def add(self, scope: bytes, tokens: Seq[int]) -> None:
        """Add a text, and drop the oldest ones until it fits; of a text that never fits, the end is kept."""
        most = (self.most_bytes - BYTES_PER_SCOPE - _bytes(0)) // BYTES_PER_TOKEN
        kept = tokens[max(0, len(tokens) - max(0, most)) :]
        if len(kept) < FEWEST:
            return
        size = _bytes(len(kept))
        with self._lock:
            while self.bytes + size + BYTES_PER_SCOPE > self.most_bytes:
                self._drop_oldest()
            if (index := self._indices.get(scope)) is None:
                index = self._indices[scope] = TextIndex(RUNS)
                self.bytes += BYTES_PER_SCOPE
            index.begin_text()
            index.extend(kept)
            self._order.append((scope, len(kept)))
            self._texts[scope] += 1
            self.bytes += size

    def _drop_oldest(self) -> None:
        scope, count = self._order.popleft()
        self._indices[scope].drop_oldest(count)
        self.bytes -= _bytes(count)
        self._texts[scope] -= 1
        if not self._texts[scope]:
            del self._texts[scope], self._indices[scope]
            self.bytes -= BYTES_PER_SCOPE

    def search(self, scope: bytes, tail: Seq[int], most: int) -> Matches:
        """Find where the end of a text occurred in the texts of a scope; arguments as `TextIndex.search`."""
        index = self._indices.get(scope)
        return Matches(0, []) if index is None else index.search(tail, most)

    def all(self) -> list[RecentText]:
        """Return all texts, the oldest first. Any thread may call this."""
        with self._lock:
            counts: dict[bytes, list[int]] = {}
            for scope, count in self._order:
                counts.setdefault(scope, []).append(count)
            texts = {scope: iter(self._indices[scope].oldest(own)) for scope, own in counts.items()}
            return [RecentText(scope, next(texts[scope])) for scope, _ in self._order]


def _bytes(tokens: int) -> int:
    """Return the memory of a text of so many tokens, with the boundary before it."""
    return BYTES_PER_TEXT + BYTES_PER_TOKEN * (tokens + 1)


FORMAT = b"foredraft texts 1 "  # with which the first line begins
OPTION = "texts_file"  # whose value the file is
IDS = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class TextsFile:
    """Where texts are kept between runs."""

    path: Path | None  # the file; None for none
    tokenizer: str | None  # digest of the tokenizer; None without one
    size: int  # ids of the vocabulary

    @classmethod
    def of(cls, target: Checkpoint, path: Path | None) -> TextsFile:
        tokenizer = None if target.tokenizer is None else target.tokenizer.digest
        return cls(path, tokenizer, target.spec.vocab_size)

    def read(self) -> list[RecentText]:
        """Return the texts of the file, the oldest first; none where there is no file yet."""
        if self.path is None:
            return []
        check_place(self.path, OPTION)
        if not self.path.exists():
            return []
        if is_no_file(self.path):
            raise self._refused("which is no file", "give another one")
        try:
            head, _, rest = self.path.read_bytes().partition(b"\n")
        except OSError as error:
            raise self._refused(f"which cannot be read ({error.strerror})", "give another one") from error
        if not head.startswith(FORMAT):
            raise self._refused("which is no file of texts", "give another one, or remove it")
        if head != FORMAT + hashlib.sha256(rest).hexdigest().encode():
            raise self._refused("which is damaged", "remove it, or give another one")
        line, _, body = rest.partition(b"\n")
        about = json.loads(line)
        if (about["tokenizer"], about["vocabulary"]) != (self.tokenizer, self.size):
            raise self._refused("whose texts are of another tokenizer", "give another one, or remove it")
        counts = [count for _, count in about["texts"]]
        parts = np.split(np.frombuffer(body, IDS), np.cumsum(counts, dtype=np.int64))
        scopes = [bytes.fromhex(scope) for scope, _ in about["texts"]]
        return [RecentText(scope, part.tolist()) for scope, part in zip(scopes, parts, strict=False)]

    def write(self, texts: Seq[RecentText], path: Path | None = None) -> None:
        """Write texts to the file, or to another one, in place of what it has."""
        file = path or self.path
        if file is None:
            raise ConfigError("the texts have no file", remedy=f"give one here, or to load as {OPTION}")
        listed = [[text.scope.hex(), len(text.tokens)] for text in texts]
        about = {"tokenizer": self.tokenizer, "vocabulary": self.size, "texts": listed}
        body = b"".join(np.array(text.tokens, dtype=IDS).tobytes() for text in texts)
        rest = json.dumps(about).encode() + b"\n" + body
        head = FORMAT + hashlib.sha256(rest).hexdigest().encode()
        write_whole(file, head + b"\n" + rest, OPTION, private=True)

    def _refused(self, problem: str, remedy: str) -> ConfigError:
        return ConfigError(problem, option=OPTION, value=str(self.path), remedy=remedy)


OWN_RUNS = (8, 3, 1)  # tokens of the runs of the request's own text that have tables
LONGEST_DRAFT = 24  # tokens: a pass over as many columns costs far less than a plain step for each
DRAFT_PER_MATCH = 4  # tokens of a draft at most for each one of the match
LEAST_CHANCE = 0.25  # by the counts, that a draft is right up to a token: it ends before a less likely one
CONTEXT = 8  # tokens of the prompt that are kept before an output, so that its first tokens have a match
# Matching tokens -> P(the next one matches too) where all occurrences agree: a policy begins with these.
SUFFIX_CONFIDENCE = {1: 0.35, 2: 0.45, 3: 0.6, 5: 0.85, 12: 0.95}
LEVELS = (0.2, *SUFFIX_CONFIDENCE.values())  # a confidence is one of these
ENDED = {Finish.EOS, Finish.STOP, Finish.LENGTH, Finish.CONSTRAINT}  # of requests whose texts are kept


class SuffixDraft(NamedTuple):
    """A draft, and rough probability that each of its tokens is accepted."""

    tokens: list[int]
    confidence: float


class Suffix(IndexedDrafter):
    """A model-free drafter that costs no forward, over an index per sequence and one of recent texts."""

    name = "suffix"
    planned = longest_draft = LONGEST_DRAFT

    def __init__(self, texts: RecentTexts, file: TextsFile) -> None:
        super().__init__(OWN_RUNS)
        self.texts, self.file = texts, file

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._draft(sequence).tokens[:budget] for sequence, budget in requests]

    def peek(self, sequence: Sequence, limit: int) -> Peek:
        draft = self._draft(sequence)
        return Peek(min(limit, len(draft.tokens)), draft.confidence)

    def leave(self, sequence: Sequence) -> None:
        self.found.pop(sequence.id, None)
        if self.indices.pop(sequence.id, None) is not None and sequence.finish in ENDED:
            begin = max(0, len(sequence.prompt) - CONTEXT)
            self.texts.add(sequence.text_scope, sequence.tokens[begin:])

    def save(self, path: Path | None = None) -> int:
        """Write the texts to their file, or to another one, and return how many; any thread may call this."""
        texts = self.texts.all()
        self.file.write(texts, path)
        return len(texts)

    def _draft(self, sequence: Sequence) -> SuffixDraft:
        """Return the draft by what followed each occurrence of the longest match."""
        known: SuffixDraft | None = self.found.get(sequence.id)
        if known is not None:
            return known
        tail = sequence.tokens[-LONGEST_MATCH:]
        found = [
            self.indices[sequence.id].search(tail, LONGEST_DRAFT),
            self.texts.search(sequence.text_scope, tail, LONGEST_DRAFT),
        ]
        length = max(matches.length for matches in found)
        longest = [each for m in found if m.length == length for each in m.continuations]
        tokens, share = agreed(longest, min(DRAFT_PER_MATCH * length, LONGEST_DRAFT))
        chance = share * at_match(SUFFIX_CONFIDENCE, length) if tokens else 0.0
        confidence = max((level for level in LEVELS if level <= chance), default=LEVELS[0])
        draft = self.found[sequence.id] = SuffixDraft(tokens, confidence)
        return draft


def agreed(continuations: list[list[int]], most: int) -> tuple[list[int], float]:
    """Return the tokens with which most continuations go on, and the share of them that have the first one.

    The tokens end where the product of the shares falls below LEAST_CHANCE.

    Examples:
        >>> agreed([[1, 2, 3], [1, 2, 4], [1, 5]], most=9)
        ([1, 2, 3], 1.0)
    """
    tokens: list[int] = []
    chance, first = 1.0, 1.0
    going = dict(Counter(map(tuple, continuations)))  # how often each occurred: most are the same ones
    for at in range(most):
        if len(going) == 1:
            [only] = going
            return [*tokens, *only[at:most]], first
        counts: dict[int, int] = {}
        for each, times in going.items():
            if len(each) > at:
                counts[each[at]] = counts.get(each[at], 0) + times
        if not counts:
            break
        token = max(counts, key=counts.__getitem__)
        chance *= counts[token] / sum(counts.values())
        if chance < LEAST_CHANCE:
            break
        first = first if tokens else chance
        tokens.append(token)
        going = {each: times for each, times in going.items() if len(each) > at and each[at] == token}
    return tokens, first
