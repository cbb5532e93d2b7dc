"""Calibration texts: texts that the target writes once, on which every trial is scored; and held-out prompts.

The texts are a function of the model, the prompts and the temperature, because every sample has a fixed
seed. A text is cut before more than `MAX_REPEATED` of its 4-grams are repetitions: loops are easy to draft,
and a plan that was found on loops is good at nothing else.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from foredraft.bench.bench_settings import MAX_REPEATED
from foredraft.decode.params import SamplingParams
from foredraft.errors import ConfigError, Option, RequestError
from foredraft.llm import LLM
from foredraft.ngrams import repeated

__all__ = [
    "MIN_TOKENS",
    "CalibrationText",
    "CalibrationTexts",
    "calibration_prompt_count",
    "hold_out",
    "new_tokens_per_prompt",
    "write_calibration_texts",
]

HELD_OUT_EVERY = 4  # one prompt in four is held out
# Prompts held out at least, or half of all prompts: with fewer, no speed-up is significant
# (`Finalist.objection`).
MIN_HELD_OUT = 6
MIN_NEW_TOKENS, MAX_NEW_TOKENS = 64, 256  # bounds of the new tokens asked of one prompt
MIN_TEXT_TOKENS = 16  # shorter texts are dropped: they hold few whole drafts
# Tokens that a search needs at least: on fewer, chance decides between plans of nearly the same speed.
MIN_TOKENS = 512
MAX_SAMPLES = 8  # samples of one prompt at a temperature above 0


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """A prompt and its continuation by the target.

    Attributes:
        ids: Token ids of the prompt and of the new tokens after it.
        prompt_length: Tokens of the prompt.
    """

    ids: tuple[int, ...]
    prompt_length: int

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
    """Split prompts, in a fixed random order, into those for calibration and those held out.

    Equal prompts count once, so that none is on both sides.

    Args:
        prompts: Token ids of each prompt.

    Returns:
        The prompts that calibration texts continue, and the held-out prompts.

    Raises:
        ConfigError: Fewer than two prompts differ.
    """
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
    """Let the target write texts with `tokens` new tokens or more in total, or as many as the prompts give.

    Raises:
        ConfigError: The prompts give fewer than `MIN_TOKENS` new tokens, and than `tokens`.
        RequestError: The generation of a text failed.
    """
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
