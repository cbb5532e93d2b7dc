"""A trial without decoding: one forward of the draft over texts that the target wrote.

Contract: `chances` are what real drafts of the same plan have on the same text, since what a column sees is
what it sees in decoding: the target's keys and values before the draft's first column, and the draft's own
from there on. Where the runner's passes are exact at any shape, they are equal bit for bit.

The texts are cut into drafts of K columns, which lie at different places in different texts, and a pass
computes one draft of each of several texts. Passes go from the last draft of a text to its first, because a
draft leaves its own keys where the target's were, and nobody who comes later looks there; before the next
trial they are put back from a copy, of the new tokens alone: no draft writes to a prompt but to its last
token. So the caches' layout, the kernels and the masks are those of decoding, and nothing here knows them.
Several plans may take turns within a pass: each writes its own keys before it looks at them, and layers in
which plans begin alike are computed once (`branches`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.decode.params import SamplingParams
from foredraft.decode.sampling import SamplingTable, distribution_of
from foredraft.decode.vocab_ops import vocab_ops_of
from foredraft.errors import ConfigError
from foredraft.loading.memory import free_memory
from foredraft.model.cache import KVCache
from foredraft.model.decoder import Plan
from foredraft.model.device import upload
from foredraft.model.runner import Resume, Runner, next_chunk
from foredraft.tune.calibration import CalibrationTexts, Text
from foredraft.tune.expected_rounds import Floats, Rounds
from foredraft.tune.plan_trie import Branch, branches
from foredraft.tune.progress import Progress, Steps, silent

__all__ = ["Block", "TeacherForced"]

COLUMNS = 512  # of a pass, at most
LOGITS = 2**24  # float32 values of logits that are held at once: 64 MiB

Block = tuple[int, int, int]  # (row, position of the first column, how many)


class TeacherForced:
    """longest: K, of the drafts. between: called before every pass; what it raises ends the trial. progress:
    told of the tokens of the texts as they are read, once.

    Raises ConfigError where the keys and values of the texts do not fit into memory.
    """

    def __init__(
        self,
        runner: Runner,
        calibration: CalibrationTexts,
        longest: int,
        between: Callable[[], None] = lambda: None,
        progress: Progress = silent,
    ) -> None:
        self.runner, self.longest, self.between = runner, longest, between
        self.texts = sorted(calibration.texts, key=lambda text: -text.new)  # so that passes are full
        self.lengths: NDArray[np.int64] = np.array([text.new for text in self.texts])
        self.tokens = calibration.tokens
        device = runner.decoder.device
        params = SamplingParams(temperature=calibration.temperature)
        self._greedy, self._table = (
            params.greedy,
            SamplingTable.of([params], device, vocab_ops=vocab_ops_of(runner)),
        )
        rows, positions = len(self.texts), max(len(text.ids) for text in self.texts) + longest
        _check_memory(runner, self.texts, positions)
        self.cache: KVCache = runner.new_cache(rows, positions)  # of the target, and of drafts over it
        width = max(self.lengths) + longest
        self._p = torch.ones(rows, int(width), device=device)  # of each new token, under the target's law
        read = Steps(progress, "read", sum(len(text.ids) for text in self.texts))
        for row, text in enumerate(self.texts):
            self._read(row, text)
            read(len(text.ids))
        self.targets = tuple(self.cache.take(row, *_overwritten(text)) for row, text in enumerate(self.texts))

    def rounds(self, plan: Plan, *, every_start: bool = False) -> Rounds:
        """What drafts of this plan make of the texts.

        A trial takes a token's chance at whatever place in a draft it has there. `every_start` looks at each
        draft that could begin anywhere, which takes K trials' time.
        """
        return Rounds.of(self.chances(plan, every_start=every_start), self.lengths)

    def rounds_of(self, plans: Sequence[Plan]) -> Iterator[Rounds]:
        """As `rounds` of each, in less time."""
        for flat in self._flat(plans):
            yield Rounds.of(self._from_any_place(flat), self.lengths)

    def chances(self, plan: Plan, *, every_start: bool = False) -> Floats:
        """As `Rounds.of` takes them, [R, N, K]."""
        rows, longest = len(self.texts), self.longest
        if not every_start:
            [flat] = self._flat([plan])
            return self._from_any_place(flat)
        chances = np.ones((rows, int(self.lengths[0]), longest))
        for offset in range(longest):
            for _, (row, first, count), own in self._drafted([plan], [offset] * rows):
                if (first - offset) % longest == 0:  # what lies before the first whole draft comes again
                    chances[row, first, :count] = own
        return chances

    def _flat(self, plans: Sequence[Plan]) -> Floats:
        """A token's chance under each plan, at the one place in a draft that it has -> [P, R, N + K]."""
        rows = len(self.texts)
        flat = np.ones((len(plans), rows, int(self.lengths[0]) + self.longest))
        offsets = [row % self.longest for row in range(rows)]
        for those, (row, first, count), own in self._drafted(plans, offsets):
            flat[list(those), row, first : first + count] = own
        return flat

    def _from_any_place(self, flat: Floats) -> Floats:
        """[R, N + K] -> [R, N, K], as if a token had this chance at whatever place."""
        return np.lib.stride_tricks.sliding_window_view(flat, self.longest, 1)[:, : int(self.lengths[0])]

    def blocks(self, offsets: list[int]) -> list[list[Block]]:
        """The drafts of each text, the last one first; `first` counts new tokens."""
        found: list[list[Block]] = []
        for row, (text, offset) in enumerate(zip(self.texts, offsets, strict=True)):
            cuts = [0, *range(offset or self.longest, text.new, self.longest), text.new]
            found.append([(row, a, b - a) for a, b in pairwise(cuts)][::-1])
        return found

    def restore(self) -> None:
        """Put the target's keys and values back wherever a draft was and another one looks."""
        for span in self.targets:
            self.cache.put_back(span)

    def passes(self, blocks: list[list[Block]]) -> Iterator[list[Block]]:
        """Which drafts a pass computes: of neighbouring rows, one each; of no columns where a row is done."""
        group = max(1, COLUMNS // self.longest)
        for first in range(0, len(blocks), group):
            own = blocks[first : first + group]
            for turn in range(max(map(len, own))):
                yield [several[turn] if turn < len(several) else (several[0][0], 0, 0) for several in own]

    def inputs(self, blocks: list[Block]) -> tuple[Tensor, list[int]]:
        """The columns that the drafts of a pass read [B, T], and the positions of the first ones."""
        width = max(count for _, _, count in blocks)
        tokens, starts = [], []
        for row, first, count in blocks:
            at = self.texts[row].start - 1 + first  # a draft reads the token before its own first one
            tokens.append([*self.texts[row].ids[at : at + count], *[0] * (width - count)])
            starts.append(at)
        return upload(tokens, self.runner.decoder.device, torch.int64), starts

    @torch.inference_mode()
    def _drafted(
        self, plans: Sequence[Plan], offsets: list[int]
    ) -> Iterator[tuple[tuple[int, ...], Block, NDArray[np.float32]]]:
        """The chances of each draft's tokens, with the numbers of the plans under which they have them."""
        tree = branches(plans)
        self.restore()
        for blocks in self.passes(self.blocks(offsets)):
            self.between()
            tokens, starts = self.inputs(blocks)
            counts = [count for _, _, count in blocks]
            device = tokens.device
            real = torch.arange(tokens.shape[1], device=device) < upload(counts, device)[:, None]
            next_tokens = upload(
                [t for row, first, count in blocks for t in self._new(row)[first : first + count]], device
            )
            p = torch.cat([self._p[row, first : first + count] for row, first, count in blocks])
            ends = np.cumsum(counts)
            for those, hidden in self._states(tree, blocks, tokens, starts):
                chances = (self._at(hidden[real], next_tokens) / p).clamp_max(1).cpu().numpy()
                for block, end in zip(blocks, ends, strict=True):
                    yield those, block, chances[end - block[2] : end]

    def _states(
        self,
        branch: Branch,
        blocks: list[Block],
        tokens: Tensor,
        starts: list[int],
        below: Tensor | None = None,
    ) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """A pass by each plan of a branch, from the states `below` it; None: from the tokens -> which plans,
        and what enters their norm before the head [B, T, D]."""
        counts = [count for _, _, count in blocks]
        known = [tokens.shape[1]] * len(blocks)
        hidden = self.runner.forward(
            self.cache, tokens, starts, first_row=blocks[0][0], idle=[not count for count in counts],
            counts=counts, plan=branch.plan, stop=branch.stop, want_logits=False, exact=False,
            resume=None if below is None else Resume(branch.start, below, known),
        ).hidden  # fmt: skip
        if not branch.forks:
            yield branch.plans, hidden
        for fork in branch.forks:
            yield from self._states(fork, blocks, tokens, starts, hidden)

    def _new(self, row: int) -> tuple[int, ...]:
        return self.texts[row].ids[self.texts[row].start :]

    def _at(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Probabilities [N] of tokens [N] under the laws of states [N, D], their logits held in pieces."""
        step = max(1, LOGITS // self.runner.decoder.spec.vocab_size)
        found = []
        for first in range(0, len(tokens), step):
            logits = self.runner.head(hidden[None, first : first + step])
            law, finite = distribution_of(logits, self._table)
            found.append((law.at(tokens[None, first : first + step]) * finite)[0])
        return torch.cat(found)

    @torch.inference_mode()
    def _read(self, row: int, text: Text) -> None:
        """The target's own pass over a text, and what it thought of its new tokens."""
        start, stop = 0, len(text.ids)
        while start < stop:
            end = next_chunk(start, stop, self.runner.chunk)
            hidden = self.runner.prefill(self.cache, row, list(text.ids[start:end]), start).hidden[0]
            first, last = max(start, text.start - 1), min(end, stop - 1)
            if first < last and not self._greedy:  # a greedy text has each of its tokens for certain
                tokens = upload(list(text.ids[first + 1 : last + 1]), hidden.device)
                own = self._at(hidden[first - start : last - start], tokens)
                self._p[row, first + 1 - text.start : last + 1 - text.start] = own
            start = end


def _overwritten(text: Text) -> tuple[int, int]:
    """The positions of the tokens that drafts read, and so write keys of: each is before a new one. What the
    padding of a pass writes after them is never looked at."""
    return text.start - 1, len(text.ids) - 1


def _check_memory(runner: Runner, texts: Sequence[Text], positions: int) -> None:
    """A row of so many positions for each text, and the copies."""
    decoder = runner.decoder
    copied = sum(stop - start for start, stop in map(_overwritten, texts))
    need = len(texts) * KVCache.bytes_per_row(decoder.spec, positions, decoder.dtype)
    need += KVCache.bytes_of(decoder.spec, copied, decoder.dtype)
    free = free_memory(decoder.device)
    if need > free:
        raise ConfigError(
            f"a trial's texts need {need / 2**30:.3g} GiB of keys and values, but {free / 2**30:.3g} GiB are"
            f" free on {decoder.device}; give fewer tokens, or shorter prompts"
        )
