"""Teacher forcing: acceptance probabilities of a plan's drafts from one forward over the calibration texts,
and its τ.

Given that the text continues with x, a drafted token x is accepted with probability min(1, q(x) / p(x))
(Leviathan et al. 2023, arXiv:2211.17192); at temperature 0 it is 1 or 0. Given the text, the starts of rounds
are a Markov chain over its positions. τ is the mean over the starts *that decoding visits*: a plain mean over
evenly spaced starts is too high, because rounds begin at hard tokens more often.

Every column attends to what it would attend to in decoding: the target's keys and values before the first
column of its draft, and the draft's own from there on. The texts are cut into drafts of K columns, and passes
go from the last draft of a text to its first, so that no pass reads what a draft wrote; `restore` copies the
target's keys and values back before the next trial. Layers that several plans share are computed once: every
plan is one path through a trie of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from foredraft.loading.machine_limits import free_memory
from foredraft.model.cache import KVCache
from foredraft.model.memory import upload
from foredraft.model.runner import Resume, Runner, next_chunk
from foredraft.model.spec import Plan
from foredraft.tune.calibration import CalibrationText, CalibrationTexts
from foredraft.tune.tune_settings import Progress, Steps, silent


@dataclass(frozen=True, slots=True)
class TrieNode:
    """Layers `start` to `stop` - 1, which all plans of the node run alike."""

    start: int  # first layer of the node
    stop: int  # layer after the last one of the node
    plan: Plan  # one of the node's plans
    indices: tuple[int, ...]  # indices of the node's plans in the list that the trie was built from
    children: tuple[TrieNode, ...]  # nodes that begin at layer `stop`; a leaf has none


def build_trie(plans: Sequence[Plan]) -> TrieNode:
    """Return the root of the trie of one or more plans of the same model."""
    return _node(plans, range(len(plans)), 0)


def _node(plans: Sequence[Plan], members: Iterable[int], start: int) -> TrieNode:
    """Return the node at layer `start` of plans that agree below it and, unless it is layer 0, in it."""
    indices = tuple(members)
    layers, stop = len(plans[indices[0]].attention), start
    while stop < layers and len(_group_by_layer(plans, indices, stop)) == 1:
        stop += 1
    groups = _group_by_layer(plans, indices, stop).values() if stop < layers else ()
    children = tuple(_node(plans, group, stop) for group in groups)
    return TrieNode(start, stop, plans[indices[0]], indices, children)


def _group_by_layer(
    plans: Sequence[Plan], indices: Iterable[int], layer: int
) -> dict[tuple[bool, bool], list[int]]:
    """Group plan indices by the sub-layers (attention, MLP) that the plans run in one layer."""
    groups: dict[tuple[bool, bool], list[int]] = {}
    for index in indices:
        groups.setdefault((plans[index].attention[layer], plans[index].mlp[layer]), []).append(index)
    return groups


Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExpectedRounds:
    """Expected rounds over R texts of up to N new tokens, at draft lengths 1 to K."""

    starts: Floats  # expected number (0 to 1) of rounds that begin with a text's new token n, [K, R, N]
    emitted: Floats  # expected tokens of such a round if the text did not end, [K, R, N]
    lengths: NDArray[np.int64]  # new tokens of each text, [R]

    @classmethod
    def from_acceptance(cls, acceptance: Floats, lengths: NDArray[np.int64]) -> ExpectedRounds:
        """Compute expected rounds from acceptance probabilities [R, N, K] and lengths [R]."""
        texts, positions, max_draft = acceptance.shape
        survival = np.cumprod(acceptance, 2)
        before = np.concatenate([np.ones((texts, positions, 1)), survival[:, :, :-1]], 2)
        # [K, R, N, K + 1]: at each draft length, the probability that a round emits 1, ..., K + 1 tokens
        emits = np.zeros((max_draft, texts, positions, max_draft + 1))
        for index in range(max_draft):
            emits[index, :, :, : index + 1] = (before - survival)[:, :, : index + 1]  # ends with a correction
            emits[index, :, :, index + 1] = survival[:, :, index]  # ends with a bonus token
        starts = np.zeros((max_draft, texts, positions + max_draft + 1))
        starts[:, :, 0] = 1.0
        within = np.arange(positions) < lengths[:, None]  # [R, N]
        for position in range(positions):
            starts[:, :, position] *= within[:, position]
            ahead = slice(position + 1, position + max_draft + 2)
            starts[:, :, ahead] += starts[:, :, position, None] * emits[:, :, position]
        emitted = 1 + np.moveaxis(np.cumsum(survival, 2), 2, 0)
        return cls(starts[:, :, :positions], emitted, lengths)

    @property
    def counts(self) -> Floats:
        """Rounds that decoding takes for all texts [K]; the last round of a text may be cut by its end."""
        counts: Floats = self.starts.sum((1, 2))
        return counts

    @property
    def taus(self) -> Floats:
        """τ at each draft length [K], over rounds that no end of a text cuts; over all if each is cut."""
        max_draft, _, positions = self.starts.shape
        stops = np.arange(positions) + np.arange(2, max_draft + 2)[:, None]  # [K, N], if all is accepted
        whole = self.starts * (stops[:, None] <= self.lengths[:, None])
        count = whole.sum((1, 2))
        with np.errstate(invalid="ignore"):
            means = (whole * self.emitted).sum((1, 2)) / count
        taus: Floats = np.where(count > 0, means, self.lengths.sum() / self.counts)
        return taus


MAX_COLUMNS = 512  # columns of one pass; bounds the memory of its activations
MAX_LOGITS = 2**24  # float32 logits held at once: 64 MiB


class DraftSpan(NamedTuple):
    """One draft on a calibration text: its row, its first new token (from 0), and its number of columns."""

    row: int
    first: int
    columns: int


class TeacherForced:
    """Scores plans on calibration texts."""

    def __init__(
        self,
        runner: Runner,  # the target
        calibration: CalibrationTexts,  # the texts
        max_draft: int,  # K, the longest draft, in tokens
        before_pass: Callable[[], None] = lambda: None,  # what it raises ends the trial
        progress: Progress = silent,  # reports the tokens of the texts as the target reads them
        drafting: Runner | None = None,
    ) -> None:
        # runs the drafts on the target's cache: a copy of the target; None is the target itself
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
        """Return the expected rounds of a plan's drafts."""
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

    def blocks(self, offsets: list[int]) -> list[list[DraftSpan]]:
        """Cut each text into drafts, the first of them `offset` tokens long, and list the last one first."""
        found: list[list[DraftSpan]] = []
        for row, (text, offset) in enumerate(zip(self.texts, offsets, strict=True)):
            cuts = [0, *range(offset or self.max_draft, text.new_tokens, self.max_draft), text.new_tokens]
            found.append([DraftSpan(row, start, stop - start) for start, stop in pairwise(cuts)][::-1])
        return found

    def restore(self) -> None:
        """Copy the target's keys and values back to all positions that drafts overwrite."""
        for span in self.copies:
            self.cache.put_back(span)

    def passes(self, blocks: list[list[DraftSpan]]) -> Iterator[list[DraftSpan]]:
        """Yield the drafts of each pass: one per row in a group of rows, empty once a row is done."""
        group = max(1, MAX_COLUMNS // self.max_draft)
        for first in range(0, len(blocks), group):
            own = blocks[first : first + group]
            for turn in range(max(map(len, own))):
                yield [row[turn] if turn < len(row) else DraftSpan(row[0].row, 0, 0) for row in own]

    def inputs(self, blocks: list[DraftSpan]) -> tuple[Tensor, list[int]]:
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
    ) -> Iterator[tuple[tuple[int, ...], DraftSpan, NDArray[np.float32]]]:
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
        blocks: list[DraftSpan],
        tokens: Tensor,
        starts: list[int],
        entering: Tensor | None = None,
    ) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Run the plans below a node of the trie on tokens [B, T], from states [B, T, D] that enter it."""
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
    """Return the first and the stop position of what drafts overwrite: each token before a new token."""
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
