"""Calibration texts, which the target writes once and on which every trial is scored; and held-out prompts.

Every sample has a fixed seed, so texts are a function of the model, the prompts and the temperature, and are
kept in the user's cache folder: a large model writes for minutes. A text is cut before more than
`MAX_REPEATED` of its 4-grams are repetitions, because loops are easy to draft.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import foredraft
from foredraft import user_cache
from foredraft.bench.bench_records import MAX_REPEATED
from foredraft.decode.params import SamplingParams
from foredraft.drafters.lookup import repeated
from foredraft.errors import ConfigError, Option, RequestError
from foredraft.llm import LLM
from foredraft.llm.loaded import Loaded
from foredraft.model.source import ModelSource

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
        raise ConfigError(
            "holds a single prompt" if len(prompts) < 2 else f"holds {len(prompts)} equal prompts",
            option="prompts",
            remedy="give two or more different prompts, since some are held out",
        )
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
    raise ConfigError(
        f"but the prompts give {done} new tokens without repetition",
        option="tokens",
        value=tokens,
        remedy=("give more prompts or lower ", Option("tokens")),
    )


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
                ids = _cut_repetition(output.token_ids)
                if len(ids) >= min(MIN_TEXT_TOKENS, new_tokens):
                    yield CalibrationText((*prompt, *ids), len(prompt))


def _cut_repetition(ids: list[int]) -> list[int]:
    """Return the longest beginning in which at most `MAX_REPEATED` of the 4-grams are repetitions."""
    length = len(ids)
    while length and repeated(ids[:length]) > MAX_REPEATED:
        length -= 1
    return ids[:length]


KIND = "texts"  # of the user's cache
FORMAT = 1


class CalibrationCache:
    """The cached texts of one search."""

    def __init__(
        self,
        source: ModelSource,  # its path and its files' times count, as the hash covers no values
        hash: str,  # hash of the model (`plan_files.model_hash`)
        loaded: Loaded,  # the model
        prompts: Sequence[list[int]],
        tokens: int,  # new tokens of all texts, at least, unless the prompts give fewer
        temperature: float,  # temperature of the texts
    ) -> None:
        # token ids of the prompts that the texts continue
        self.prompts = {tuple(prompt) for prompt in prompts}
        self.vocabulary, self.tokens, self.temperature = loaded.spec.vocab_size, tokens, temperature
        self.key = {
            "format": FORMAT,
            "foredraft": foredraft.__version__,
            "model": hash,
            "files": _files(source),
            "passes": _passes(loaded),
            "prompts": list(prompts),
            "tokens": tokens,
            "temperature": temperature,
        }

    def read_or(self, write: Callable[[], CalibrationTexts]) -> CalibrationTexts:
        """Return the cached texts, or call `write` and cache what it returns."""
        found = self._read()
        if found is None:
            found = write()
            self._keep(found)
        return found

    def _read(self) -> CalibrationTexts | None:
        kept = user_cache.read(KIND, self.key)
        if kept is None:
            return None
        try:
            texts = tuple(CalibrationText(tuple(ids), start) for ids, start in kept["texts"])
            found = CalibrationTexts(texts, self.temperature)
            sound = all(map(self._sound, texts))
        except (ValueError, LookupError, TypeError):  # not what `_keep` writes
            return None
        return found if sound and found.tokens >= min(self.tokens, MIN_TOKENS) else None

    def _sound(self, text: CalibrationText) -> bool:
        ids = all(type(id) is int and 0 <= id < self.vocabulary for id in text.ids)
        start = type(text.prompt_length) is int and 0 < text.prompt_length < len(text.ids)
        return ids and start and text.ids[: text.prompt_length] in self.prompts

    def _keep(self, found: CalibrationTexts) -> None:
        texts = [[text.ids, text.prompt_length] for text in found.texts]
        user_cache.write(KIND, self.key, {"texts": texts})


def _files(source: ModelSource) -> list[Any]:
    """Return the path of the model, and the name, size and time of its weights and configuration files."""
    files = source.base.files  # its LoRAs are in the hash whole
    read = sorted(file for file in files if file.name.endswith((".safetensors", ".gguf", "config.json")))
    about = ((file.name, file.stat()) for file in read)
    return [str(source.path.resolve()), *([name, found.st_size, found.st_mtime_ns] for name, found in about)]


def _passes(loaded: Loaded) -> list[Any]:
    """Return what determines the arithmetic: device, dtype, kind of passes, version of PyTorch."""
    runner, engine = loaded.runner, loaded.engine
    device, dtype = engine.device.type, str(engine.cache.dtype)
    how = [runner.by_kernels, runner.compiled, loaded.deterministic]
    return [device, dtype, how, torch.__version__]
