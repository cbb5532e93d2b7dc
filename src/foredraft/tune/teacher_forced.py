"""Teacher forcing: acceptance probabilities of a plan's drafts from one forward over the calibration texts.

The probabilities equal those of real drafts on the same texts, because every column attends to what it
would attend to in decoding: the target's keys and values before the first column of its draft, and the
draft's own from there on. Where the runner's passes are batch-invariant at any shape, they are equal bit for
bit.

The texts are cut into drafts of K columns, at a different offset in each text, and a pass computes one
draft of each of several texts. A draft overwrites the target's keys and values. Therefore passes go from
the last draft of a text to its first, so that no later pass reads what a draft wrote, and `restore` copies
the target's keys and values back before the next trial. The copy holds the new tokens only: a draft writes
to no position of the prompt but the last. The layout of the cache, the kernels and the masks are those of
decoding.

`rounds_of` scores several plans at once: within a pass each plan writes its own keys and values before it
reads them, and layers that several plans share are computed once (`plan_trie`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.decode.params import SamplingParams
from foredraft.decode.sampling import SamplingTable, distribution_of
from foredraft.decode.vocab_ops import vocab_ops_of
from foredraft.errors import ConfigError, Option
from foredraft.loading.free_memory import free_memory
from foredraft.model.cache import KVCache
from foredraft.model.plan import Plan
from foredraft.model.runner import Resume, Runner, next_chunk
from foredraft.model.transfers import upload
from foredraft.tune.calibration import CalibrationText, CalibrationTexts
from foredraft.tune.expected_rounds import ExpectedRounds, Floats
from foredraft.tune.plan_trie import TrieNode, build_trie
from foredraft.tune.progress import Progress, Steps, silent

__all__ = ["Block", "TeacherForced"]

MAX_COLUMNS = 512  # columns of one pass; bounds the memory of its activations
MAX_LOGITS = 2**24  # float32 logits held at once: 64 MiB


class Block(NamedTuple):
    """One draft on a calibration text: its row, its first new token (from 0), and its number of columns."""

    row: int
    first: int
    columns: int


class TeacherForced:
    """Scores plans on calibration texts.

    Args:
        runner: The target.
        calibration: The texts.
        max_draft: K, the longest draft, in tokens.
        before_pass: Called before every pass; an exception that it raises ends the trial.
        progress: Reports the tokens of the texts as the target reads them.
        drafting: Runs the drafts on the target's cache: a copy of the target; None is the target itself.

    Raises:
        ConfigError: The keys and values of the texts do not fit into memory.
    """

    def __init__(
        self,
        runner: Runner,
        calibration: CalibrationTexts,
        max_draft: int,
        before_pass: Callable[[], None] = lambda: None,
        progress: Progress = silent,
        drafting: Runner | None = None,
    ) -> None:
        self.drafting = drafting or runner
        self.runner, self.max_draft, self.before_pass = runner, max_draft, before_pass
        # From the longest to the shortest, so that neighbours in a pass have about as many drafts.
        self.texts = sorted(calibration.texts, key=lambda text: -text.new_tokens)
        self.lengths: NDArray[np.int64] = np.array([text.new_tokens for text in self.texts])
        self.tokens = calibration.tokens
        device = runner.decoder.device
        params = SamplingParams(temperature=calibration.temperature)
        self._greedy = params.greedy
        self._table = SamplingTable.of([params], device, vocab_ops=vocab_ops_of(runner))
        rows, positions = len(self.texts), max(len(text.ids) for text in self.texts) + max_draft
        _check_memory(runner, self.texts, positions)
        self.cache: KVCache = runner.new_cache(rows, positions)  # the target's; drafts overwrite it
        self.drafting.reserve_positions(self.cache.stored)
        width = max(self.lengths) + max_draft
        self._p = torch.ones(rows, int(width), device=device)  # target's probability of each new token
        read = Steps(progress, "read", sum(len(text.ids) for text in self.texts))
        for row, text in enumerate(self.texts):
            self._read(row, text)
            read(len(text.ids))
        self.copies = tuple(self.cache.take(row, *_overwritten(text)) for row, text in enumerate(self.texts))

    def rounds(self, plan: Plan, *, every_start: bool = False) -> ExpectedRounds:
        """Return the expected rounds of a plan's drafts.

        Args:
            plan: The sub-layers that the draft runs.
            every_start: Compute a draft from every position, which takes K times as long. By default every
                token is in one draft, and its acceptance probability there stands for all its places in a
                draft.
        """
        acceptance = self.acceptance(plan, every_start=every_start)
        return ExpectedRounds.from_acceptance(acceptance, self.lengths)

    def rounds_of(self, plans: Sequence[Plan]) -> Iterator[ExpectedRounds]:
        """Yield `rounds` of each plan, in less time than one call for each."""
        for flat in self._flat_acceptance(plans):
            yield ExpectedRounds.from_acceptance(self._at_any_place(flat), self.lengths)

    def acceptance(self, plan: Plan, *, every_start: bool = False) -> Floats:
        """Return acceptance probabilities [R, N, K], as `ExpectedRounds.from_acceptance` takes them."""
        rows, max_draft = len(self.texts), self.max_draft
        if not every_start:
            [flat] = self._flat_acceptance([plan])
            return self._at_any_place(flat)
        acceptance = np.ones((rows, int(self.lengths[0]), max_draft))
        for offset in range(max_draft):
            for _, (row, first, columns), own in self._score([plan], [offset] * rows):
                if (first - offset) % max_draft == 0:  # else a partial draft, which another offset has whole
                    acceptance[row, first, :columns] = own
        return acceptance

    def _flat_acceptance(self, plans: Sequence[Plan]) -> Floats:
        """Return the acceptance probability of each token in the one draft that holds it, [P, R, N + K]."""
        rows = len(self.texts)
        flat = np.ones((len(plans), rows, int(self.lengths[0]) + self.max_draft))
        offsets = [row % self.max_draft for row in range(rows)]
        for indices, (row, first, columns), own in self._score(plans, offsets):
            flat[list(indices), row, first : first + columns] = own
        return flat

    def _at_any_place(self, flat: Floats) -> Floats:
        """Use a token's probability for all its places in a draft: [R, N + K] -> [R, N, K]."""
        windows = np.lib.stride_tricks.sliding_window_view(flat, self.max_draft, 1)
        return windows[:, : int(self.lengths[0])]

    def blocks(self, offsets: list[int]) -> list[list[Block]]:
        """Cut each text into drafts, the first of them `offset` tokens long, and list the last one first."""
        found: list[list[Block]] = []
        for row, (text, offset) in enumerate(zip(self.texts, offsets, strict=True)):
            cuts = [0, *range(offset or self.max_draft, text.new_tokens, self.max_draft), text.new_tokens]
            found.append([Block(row, start, stop - start) for start, stop in pairwise(cuts)][::-1])
        return found

    def restore(self) -> None:
        """Copy the target's keys and values back to all positions that drafts overwrite."""
        for span in self.copies:
            self.cache.put_back(span)

    def passes(self, blocks: list[list[Block]]) -> Iterator[list[Block]]:
        """Yield the drafts of each pass: one per row in a group of rows, empty once a row is done."""
        group = max(1, MAX_COLUMNS // self.max_draft)
        for first in range(0, len(blocks), group):
            own = blocks[first : first + group]
            for turn in range(max(map(len, own))):
                yield [row[turn] if turn < len(row) else Block(row[0].row, 0, 0) for row in own]

    def inputs(self, blocks: list[Block]) -> tuple[Tensor, list[int]]:
        """Return the tokens that the drafts of a pass read [B, T], and their first positions [B]."""
        width = max(block.columns for block in blocks)
        tokens, starts = [], []
        for row, first, columns in blocks:
            at = (
                self.texts[row].prompt_length - 1 + first
            )  # a column reads the token before the one it drafts
            tokens.append([*self.texts[row].ids[at : at + columns], *[0] * (width - columns)])
            starts.append(at)
        return upload(tokens, self.runner.decoder.device, torch.int64), starts

    @torch.inference_mode()
    def _score(
        self, plans: Sequence[Plan], offsets: list[int]
    ) -> Iterator[tuple[tuple[int, ...], Block, NDArray[np.float32]]]:
        """Yield plan indices, a draft, and the acceptance probabilities of its tokens under these plans."""
        trie = build_trie(plans)
        self.restore()
        for blocks in self.passes(self.blocks(offsets)):
            self.before_pass()
            tokens, starts = self.inputs(blocks)
            counts = [block.columns for block in blocks]
            device = tokens.device
            real = torch.arange(tokens.shape[1], device=device) < upload(counts, device)[:, None]
            next_tokens = upload(
                [t for row, first, columns in blocks for t in self._new_ids(row)[first : first + columns]],
                device,
            )
            p = torch.cat([self._p[row, first : first + columns] for row, first, columns in blocks])
            stops = np.cumsum(counts)
            for indices, hidden in self._forward(trie, blocks, tokens, starts):
                q = self._probabilities(self.drafting, hidden[real], next_tokens)
                acceptance = (q / p).clamp_max(1).cpu().numpy()
                for block, stop in zip(blocks, stops, strict=True):
                    yield indices, block, acceptance[stop - block.columns : stop]

    def _forward(
        self,
        node: TrieNode,
        blocks: list[Block],
        tokens: Tensor,
        starts: list[int],
        entering: Tensor | None = None,
    ) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Run the plans below a node of the trie.

        Args:
            node: The node.
            blocks: The drafts of the pass.
            tokens: Their tokens [B, T].
            starts: Their first positions [B].
            entering: States that enter the node's first layer [B, T, D]. None: embed the tokens.

        Yields:
            Indices of plans, and the states before their final norm and head [B, T, D].
        """
        counts = [block.columns for block in blocks]
        known = [tokens.shape[1]] * len(blocks)
        hidden = self.drafting.forward(
            self.cache, tokens, starts, first_row=blocks[0].row, idle=[not count for count in counts],
            counts=counts, plan=node.plan, stop=node.stop, want_logits=False, invariant=False,
            resume=None if entering is None else Resume(node.start, entering, known),
        ).hidden  # fmt: skip
        if not node.children:
            yield node.indices, hidden
        for child in node.children:
            yield from self._forward(child, blocks, tokens, starts, hidden)

    def _new_ids(self, row: int) -> tuple[int, ...]:
        return self.texts[row].ids[self.texts[row].prompt_length :]

    def _probabilities(self, runner: Runner, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the probability of each token [N] after a runner's states [N, D], a few at a time."""
        step = max(1, MAX_LOGITS // self.runner.decoder.spec.vocab_size)
        found = []
        for first in range(0, len(tokens), step):
            logits = runner.head(hidden[None, first : first + step])
            distribution, finite = distribution_of(logits, self._table)
            found.append((distribution.at(tokens[None, first : first + step]) * finite)[0])
        return torch.cat(found)

    @torch.inference_mode()
    def _read(self, row: int, text: CalibrationText) -> None:
        """Prefill a text with the target, and keep the target's probabilities of its new tokens."""
        start, stop = 0, len(text.ids)
        while start < stop:
            end = next_chunk(start, stop, self.runner.chunk)
            hidden = self.runner.prefill(self.cache, row, list(text.ids[start:end]), start).hidden[0]
            first, last = max(start, text.prompt_length - 1), min(end, stop - 1)
            if first < last and not self._greedy:  # a greedy text has each of its tokens with probability 1
                tokens = upload(list(text.ids[first + 1 : last + 1]), hidden.device)
                own = self._probabilities(self.runner, hidden[first - start : last - start], tokens)
                self._p[row, first + 1 - text.prompt_length : last + 1 - text.prompt_length] = own
            start = end


def _overwritten(text: CalibrationText) -> tuple[int, int]:
    """Return the first and the stop position of what drafts overwrite: each token before a new token.

    The padding of a pass writes past that, where no pass reads.
    """
    return text.prompt_length - 1, len(text.ids) - 1


def _check_memory(runner: Runner, texts: Sequence[CalibrationText], positions: int) -> None:
    """Raise ConfigError if a cache row of this many positions per text, and the copies, do not fit."""
    decoder = runner.decoder
    copied = sum(stop - start for start, stop in map(_overwritten, texts))
    need = len(texts) * KVCache.bytes_per_row(decoder.spec, positions, decoder.dtype)
    need += KVCache.bytes_of(decoder.spec, copied, decoder.dtype)
    free = free_memory(decoder.device)
    if need > free:
        raise ConfigError(
            f"the calibration texts need {need / 2**30:.3g} GiB of keys and values, but {decoder.device} has"
            f" {free / 2**30:.3g} GiB free",
            remedy=("lower ", Option("tokens"), " or give shorter prompts"),
        )
