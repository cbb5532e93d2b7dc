"""Calibration texts, and teacher forcing: acceptance probabilities of a plan's drafts on them, and its τ.

The target writes the texts once. Every sample has a fixed seed, so texts are a function of the model, the
prompts and the temperature, and are kept in the user's cache folder. A text is cut before more than
`MAX_REPEATED` of its 4-grams are repetitions, because loops are easy to draft.

Given that the text continues with x, a drafted token x is accepted with probability min(1, q(x) / p(x))
(Leviathan et al. 2023, arXiv:2211.17192); at temperature 0 it is 1 or 0. Given the text, the starts of rounds
are a Markov chain over its positions. τ is the mean over the starts *that decoding visits*: a plain mean over
evenly spaced starts is too high, because rounds begin at hard tokens more often.

Every column attends to what it would attend to in decoding: the target's keys and values before the first
column of its draft, and the draft's own from there on. The texts are cut into drafts of K columns, and passes
go from the last draft of a text to its first, so that no pass reads what a draft wrote; `restore` copies the
target's keys and values back before the next trial. The states of recurrent layers go forwards alone. There,
passes begin with the first draft, and the target reads its columns again before the next one, as in decoding.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import foredraft
from foredraft import user_cache
from foredraft.bench.bench_records import MAX_REPEATED
from foredraft.bench.settings import Progress, Steps, silent
from foredraft.decode.params import SamplingParams
from foredraft.decode.sampling import SamplingTable, distribution_of
from foredraft.decode.vocab_ops import vocab_ops_of
from foredraft.drafters.lookup import repeated
from foredraft.errors import ConfigError, Option, RequestError
from foredraft.llm import LLM
from foredraft.llm.loaded import Loaded
from foredraft.loading.machine_limits import free_memory
from foredraft.model.cache import KVCache, Span
from foredraft.model.memory import upload
from foredraft.model.recurrent import recurrent_bytes
from foredraft.model.runner import Runner, next_chunk
from foredraft.model.source import ModelSource
from foredraft.model.spec import Plan

HELD_OUT_EVERY = 4  # one prompt in four is held out
MIN_HELD_OUT = 6  # prompts, or half of all: with fewer, no speed-up is significant
MIN_NEW_TOKENS, MAX_NEW_TOKENS = 64, 256  # bounds of the new tokens asked of one prompt
MIN_TEXT_TOKENS = 16  # shorter texts are dropped: they hold few whole drafts
MIN_TOKENS = 512  # that a search needs: on fewer, chance decides between plans
MAX_SAMPLES = 8  # samples of one prompt at a temperature above 0


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """A prompt and its continuation by the target."""

    ids: tuple[int, ...]  # token ids of the prompt and of the new tokens after it
    prompt_length: int  # tokens of the prompt

    @property
    def new_tokens(self) -> int:
        return len(self.ids) - self.prompt_length


@dataclass(frozen=True, slots=True)
class CalibrationTexts:
    """All texts of one search, and the temperature at which the target wrote them."""

    texts: tuple[CalibrationText, ...]
    temperature: float

    @property
    def tokens(self) -> int:
        """New tokens of all texts."""
        return sum(text.new_tokens for text in self.texts)

    @property
    def digest(self) -> str:
        """SHA-256 of the token ids and of the prompts' lengths."""
        document = json.dumps([[text.ids, text.prompt_length] for text in self.texts])
        return hashlib.sha256(document.encode()).hexdigest()


def hold_out(prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Split different prompts, in a fixed random order, into those for calibration and those held out."""
    different = [list(ids) for ids in dict.fromkeys(map(tuple, prompts))]
    if len(different) < 2:
        problem = "holds a single prompt" if len(prompts) < 2 else f"holds {len(prompts)} equal prompts"
        remedy = "give two or more different prompts, since some are held out"
        raise ConfigError(problem, option="prompts", remedy=remedy)
    random.Random(0).shuffle(different)
    count = calibration_prompt_count(len(different))
    held_out = different[1::HELD_OUT_EVERY]
    others = [prompt for index, prompt in enumerate(different) if index % HELD_OUT_EVERY != 1]
    return others[:count], held_out + others[count:]


def calibration_prompt_count(prompts: int) -> int:
    """Return how many of this many different prompts are left for calibration texts."""
    quarter = len(range(1, prompts, HELD_OUT_EVERY))
    return max(1, prompts - max(quarter, min(MIN_HELD_OUT, prompts // 2)))


def new_tokens_per_prompt(tokens: int, prompts: int) -> int:
    """Return the new tokens to ask of each prompt: twice its share, since texts that repeat are cut."""
    return min(max(-(-2 * tokens // prompts), MIN_NEW_TOKENS), MAX_NEW_TOKENS)


def write_calibration_texts(
    llm: LLM,
    prompts: Sequence[list[int]],
    tokens: int,
    temperature: float,
    progress: Callable[[str, int, int], None],
) -> CalibrationTexts:
    """Let the target write texts with `tokens` new tokens or more in total, or what the prompts give."""
    texts: list[CalibrationText] = []
    done = 0
    room = llm.max_length - max(map(len, prompts))  # truncation may have made prompts equal: fewer are left
    new_tokens = min(new_tokens_per_prompt(tokens, len(prompts)), room)
    for text in _generate_texts(llm, prompts, new_tokens, temperature):
        texts.append(text)
        done += text.new_tokens
        progress("calibrate", min(done, tokens), tokens)
        if done >= tokens:
            break
    if done >= min(tokens, MIN_TOKENS):
        progress("calibrate", done, done)  # the prompts give no more
        return CalibrationTexts(tuple(texts), temperature)
    problem = f"but the prompts give {done} new tokens without repetition"
    remedy = ("give more prompts or lower ", Option("tokens"))
    raise ConfigError(problem, option="tokens", value=tokens, remedy=remedy)


def _generate_texts(
    llm: LLM, prompts: Sequence[list[int]], new_tokens: int, temperature: float
) -> Iterator[CalibrationText]:
    """Generate one batch at a time, so that no batch is generated after the last one needed."""
    rows = llm.loaded.engine.cache.rows
    for sample in range(MAX_SAMPLES if temperature > 0 else 1):
        params = SamplingParams(temperature=temperature, max_new_tokens=new_tokens, drafter="none")
        for first in range(0, len(prompts), rows):
            batch = list(prompts[first : first + rows])
            seeds = range(sample * len(prompts) + first, sample * len(prompts) + first + len(batch))
            each = [params.replace(seed=seed) for seed in seeds]
            for prompt, output in zip(batch, llm.generate(batch, each), strict=True):
                if output.error is not None:
                    raise RequestError(f"writing a calibration text failed: {output.error}")
                ids = output.token_ids
                while ids and repeated(ids) > MAX_REPEATED:
                    ids = ids[:-1]
                if len(ids) >= min(MIN_TEXT_TOKENS, new_tokens):
                    yield CalibrationText((*prompt, *ids), len(prompt))


KIND = "texts"  # of the user's cache
FORMAT = 1


def texts_key(
    source: ModelSource,
    hash: str,
    loaded: Loaded,
    prompts: Sequence[list[int]],
    tokens: int,
    temperature: float,
) -> dict[str, Any]:
    """Return everything that calibration texts depend on; the hash of the model covers no values."""
    ends = (".safetensors", ".gguf", "config.json")
    files = sorted(file for file in source.base.files if file.name.endswith(ends))  # but LoRAs
    about = [[file.name, (stat := file.stat()).st_size, stat.st_mtime_ns] for file in files]
    runner, engine = loaded.runner, loaded.engine
    how = [runner.by_kernels, runner.compiled, loaded.deterministic]
    return {
        "format": FORMAT,
        "foredraft": foredraft.__version__,
        "model": hash,
        "files": [str(source.path.resolve()), *about],
        # what determines the arithmetic
        "passes": [engine.device.type, str(engine.cache.dtype), how, torch.__version__],
        "prompts": list(prompts),
        "tokens": tokens,
        "temperature": temperature,
    }


def cached_texts(
    key: dict[str, Any], vocabulary: int, write: Callable[[], CalibrationTexts]
) -> CalibrationTexts:
    """Return the cached texts, or call `write` and cache what it returns."""
    prompts = set(map(tuple, key["prompts"]))

    def sound(text: CalibrationText) -> bool:
        ids = all(type(id) is int and 0 <= id < vocabulary for id in text.ids)
        start = type(text.prompt_length) is int and 0 < text.prompt_length < len(text.ids)
        return ids and start and text.ids[: text.prompt_length] in prompts

    if (kept := user_cache.read(KIND, key)) is not None:
        with suppress(ValueError, LookupError, TypeError):  # not what is written here
            texts = tuple(CalibrationText(tuple(ids), start) for ids, start in kept["texts"])
            found = CalibrationTexts(texts, key["temperature"])
            if all(map(sound, texts)) and found.tokens >= min(key["tokens"], MIN_TOKENS):
                return found
    found = write()
    user_cache.write(KIND, key, {"texts": [[text.ids, text.prompt_length] for text in found.texts]})
    return found


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
        self.recurs = self.cache.recurrent is not None
        self.drafting.reserve_positions(self.cache.stored)
        width = max(self.lengths) + max_draft
        self._p = torch.ones(rows, int(width), device=device)  # target's probability of each new token
        read = Steps(progress, "read", sum(len(text.ids) for text in self.texts))
        self.copies = list[Span]()
        for row, text in enumerate(self.texts):
            self._read(row, text)
            read(len(text.ids))

    def rounds(self, plan: Plan, *, every_start: bool = False) -> ExpectedRounds:
        """Return the expected rounds of a plan's drafts."""
        return ExpectedRounds.from_acceptance(self.acceptance(plan, every_start=every_start), self.lengths)

    def acceptance(self, plan: Plan, *, every_start: bool = False) -> Floats:
        """Return acceptance probabilities [R, N, K], as `ExpectedRounds.from_acceptance` takes them."""
        rows, longest, max_draft = len(self.texts), int(self.lengths[0]), self.max_draft
        if not every_start:  # each token is in one draft, whose probability serves for all its places
            flat = np.ones((rows, longest + max_draft))
            for (row, first, columns), own in self._score(plan, [row % max_draft for row in range(rows)]):
                flat[row, first : first + columns] = own
            return np.lib.stride_tricks.sliding_window_view(flat, max_draft, 1)[:, :longest]
        acceptance = np.ones((rows, longest, max_draft))
        for offset in range(max_draft):
            for (row, first, columns), own in self._score(plan, [offset] * rows):
                if (first - offset) % max_draft == 0:  # else a partial draft, which another offset has whole
                    acceptance[row, first, :columns] = own
        return acceptance

    def blocks(self, offsets: list[int]) -> list[list[DraftSpan]]:
        """Cut each text into drafts, the first of them `offset` tokens long, in the order of passes."""
        found: list[list[DraftSpan]] = []
        for row, (text, offset) in enumerate(zip(self.texts, offsets, strict=True)):
            cuts = [0, *range(offset or self.max_draft, text.new_tokens, self.max_draft), text.new_tokens]
            spans = [DraftSpan(row, start, stop - start) for start, stop in pairwise(cuts)]
            found.append(spans if self.recurs else spans[::-1])
        return found

    def restore(self) -> None:
        """Copy back what drafts overwrite: the target's keys and values, or its states before them."""
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
    def _score(self, plan: Plan, offsets: list[int]) -> Iterator[tuple[DraftSpan, NDArray[np.float32]]]:
        """Yield each draft and the acceptance probabilities of its tokens under a plan."""
        self.restore()
        for blocks in self.passes(self.blocks(offsets)):
            self.before_pass()
            tokens, starts = self.inputs(blocks)
            counts, first = [block.columns for block in blocks], blocks[0].row
            run = partial(
                Runner.forward, cache=self.cache, tokens=tokens, starts=starts, first_row=first,
                counts=counts, idle=[not count for count in counts], want_logits=False, invariant=False,
            )  # fmt: skip
            self.cache.lengths[first : first + len(starts)] = starts
            hidden = run(self.drafting, plan=plan).hidden
            if self.recurs:
                run(self.runner)
            device = tokens.device
            real = torch.arange(tokens.shape[1], device=device) < upload(counts, device)[:, None]
            drafted = [
                token
                for row, first, columns in blocks
                for token in self.texts[row].ids[self.texts[row].prompt_length :][first : first + columns]
            ]
            p = torch.cat([self._p[row, first : first + columns] for row, first, columns in blocks])
            q = self._probabilities(self.drafting, hidden[real], upload(drafted, device))
            acceptance = (q / p).clamp_max(1).cpu().numpy()
            for block, stop in zip(blocks, np.cumsum(counts), strict=True):
                yield block, acceptance[stop - block.columns : stop]

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
        """Prefill a text with the target; keep its probabilities of new tokens, and what drafts overwrite."""
        (copied, to), start, stop = _overwritten(text), 0, len(text.ids)
        while start < stop:
            if self.recurs and start == copied:
                self.cache.lengths[row] = start  # where its states are
                self.copies.append(self.cache.take(row, start, start))
            end = next_chunk(start, copied if self.recurs and start < copied else stop, self.runner.chunk)
            hidden = self.runner.prefill(self.cache, row, list(text.ids[start:end]), start).hidden[0]
            first, last = max(start, text.prompt_length - 1), min(end, stop - 1)
            if first < last and not self._greedy:  # a greedy text has each of its tokens with probability 1
                tokens = upload(list(text.ids[first + 1 : last + 1]), hidden.device)
                own = self._probabilities(self.runner, hidden[first - start : last - start], tokens)
                self._p[row, first + 1 - text.prompt_length : last + 1 - text.prompt_length] = own
            start = end
        if not self.recurs:
            self.copies.append(self.cache.take(row, copied, to))


def _overwritten(text: CalibrationText) -> tuple[int, int]:
    """Return the first and the stop position of what drafts overwrite: each token before a new token."""
    return text.prompt_length - 1, len(text.ids) - 1


def _check_memory(runner: Runner, texts: Sequence[CalibrationText], positions: int) -> None:
    """Raise ConfigError if a cache row of this many positions per text, and the copies, do not fit."""
    decoder = runner.decoder
    copied = sum(stop - start for start, stop in map(_overwritten, texts))
    need = len(texts) * KVCache.bytes_per_row(decoder.spec, positions, decoder.dtype)
    states = len(texts) * recurrent_bytes(decoder.spec, decoder.dtype)
    need += states or KVCache.bytes_of(decoder.spec, copied, decoder.dtype)
    free = free_memory(decoder.device)
    if need > free:
        raise ConfigError(
            f"the calibration texts need {need / 2**30:.3g} GiB of keys and values, but {decoder.device} has"
            f" {free / 2**30:.3g} GiB free",
            remedy=("lower ", Option("tokens"), " or give shorter prompts"),
        )
