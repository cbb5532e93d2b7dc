"""What trials are held against: texts that the target wrote itself, once, and prompts kept for the end.

Contract: the texts are a function of the model, the prompts and the temperature; every draw has its seed. A
text ends before more than `MAX_REPEATED` of its 4-grams are repetitions, since drafting a loop is easy, and a
plan that was found on loops would be good at nothing else.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from foredraft.bench.options import MAX_REPEATED
from foredraft.decode.params import SamplingParams
from foredraft.errors import ConfigError, RequestError
from foredraft.llm import LLM
from foredraft.ngrams import repeated

__all__ = ["CalibrationTexts", "Text", "calibrate", "hold_out", "new_tokens", "written"]

HELD_OUT = 4  # one prompt of so many is kept for the end
FEWEST = 6  # but so many, or half: fewer tell no speed from chance (`Finalist.objection`)
SHORTEST, LONGEST = 64, 256  # new tokens that are asked of a prompt
LEAST = 16  # new tokens of a text that is any use
SAMPLES = 8  # of a prompt at most, where they differ


@dataclass(frozen=True, slots=True)
class Text:
    """ids: of the prompt, `start` of them, and what the target wrote after it."""

    ids: tuple[int, ...]
    start: int

    @property
    def new(self) -> int:
        return len(self.ids) - self.start


@dataclass(frozen=True, slots=True)
class CalibrationTexts:
    texts: tuple[Text, ...]
    temperature: float

    @property
    def tokens(self) -> int:
        """New ones."""
        return sum(text.new for text in self.texts)

    @property
    def digest(self) -> str:
        """Which texts these are."""
        told = json.dumps([[text.ids, text.start] for text in self.texts])
        return hashlib.sha256(told.encode()).hexdigest()


def hold_out(prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Those to write texts after, in an order of no meaning, and those kept for the end. Equal ones count
    once, so that none is on both sides.

    Raises ConfigError where there are too few.
    """
    different = [list(ids) for ids in dict.fromkeys(map(tuple, prompts))]
    if len(different) < 2:
        given = "a single prompt is given" if len(prompts) < 2 else f"all {len(prompts)} prompts are the same"
        raise ConfigError(f"{given}; give prompts= of two or more that differ, since some are held out")
    random.Random(0).shuffle(different)
    count = written(len(different))
    held_out = different[1::HELD_OUT]
    kept = [prompt for index, prompt in enumerate(different) if index % HELD_OUT != 1]
    return kept[:count], held_out + kept[count:]


def written(prompts: int) -> int:
    """After how many of so many different prompts texts are written."""
    quarter = len(range(1, prompts, HELD_OUT))
    return max(1, prompts - max(quarter, min(FEWEST, prompts // 2)))


def new_tokens(tokens: int, prompts: int) -> int:
    """To ask of each prompt, so that `tokens` are left after some were cut."""
    return min(max(-(-2 * tokens // prompts), SHORTEST), LONGEST)


def calibrate(
    llm: LLM,
    prompts: Sequence[list[int]],
    tokens: int,
    temperature: float,
    progress: Callable[[str, int, int], None],
) -> CalibrationTexts:
    """Texts of `tokens` new tokens or more. Raises ConfigError where the prompts do not give so many."""
    texts: list[Text] = []
    done = 0
    room = llm.max_length - max(map(len, prompts))  # prompts that were cut alike are fewer than were given
    for text in _texts(llm, prompts, min(new_tokens(tokens, len(prompts)), room), temperature):
        texts.append(text)
        done += text.new
        progress("calibrate", min(done, tokens), tokens)
        if done >= tokens:
            return CalibrationTexts(tuple(texts), temperature)
    raise ConfigError(
        f"tokens is {tokens}, but these prompts give {done} new ones that do not repeat themselves; give"
        " more prompts, or fewer tokens"
    )


def _texts(llm: LLM, prompts: Sequence[list[int]], new: int, temperature: float) -> Iterator[Text]:
    """In batches, so that no more are written than are wanted."""
    rows = llm.engine.cache.rows
    for sample in range(SAMPLES if temperature > 0 else 1):
        params = SamplingParams(temperature=temperature, max_new_tokens=new, seed=sample, drafter="none")
        for first in range(0, len(prompts), rows):
            batch = list(prompts[first : first + rows])
            each = [params.replace(seed=sample * len(prompts) + first + index) for index in range(len(batch))]
            for prompt, output in zip(batch, llm.generate(batch, each), strict=True):
                if output.error is not None:
                    raise RequestError(f"a text for the search failed: {output.error}")
                new_ids = _varied(output.token_ids)
                if len(new_ids) >= min(LEAST, new):
                    yield Text((*prompt, *new_ids), len(prompt))


def _varied(ids: list[int]) -> list[int]:
    """The longest beginning that repeats no more than is allowed."""
    length = len(ids)
    while length and repeated(ids[:length]) > MAX_REPEATED:
        length -= 1
    return ids[:length]
