"""The sampler: draws continuations of one prompt, with a seed of its own for every call to the model.

For the samples of a stand-in, the engine gets one drafter more: the target itself. At a draft temperature its
drafts are as often right and wrong as a test needs them, whatever drafter the user has.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from foredraft.decode.drafter import Stepper
from foredraft.decode.params import SamplingParams
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.drafters.skips import Skips
from foredraft.llm import LLM, Output
from foredraft.llm.loaded import Loaded
from foredraft.model.freed import release_freed

__all__ = ["BATCH", "TARGET", "TREE_WIDTHS", "WIDTHS", "Sampler", "SamplingCase"]

# Separate tokens at each position of a sample (`cells`). More cells need more samples: these widths make 9
# cells; two tokens at each position make 31, and need 1.5 times the samples for the same distance. Four
# tokens leave room for drafts of three, and so for corrections at a second and a third position.
WIDTHS = (2, 1, 1, 1)
# The same for tests by draft position, which compare tokens given the text before them. They tell more texts
# apart, so that more of the tokens at later positions count.
TREE_WIDTHS = (3, 2, 1, 1)
TARGET = "target"  # name of the target as its own drafter
# Samples per `generate` call. Progress is reported, and the seed changes, between calls. What a call holds of
# its samples is freed at its end; more calls would read the prompt more often.
BATCH = 128


@dataclass(frozen=True, slots=True)
class SamplingCase:
    """The samples of one test: a prompt, sampling parameters, and how the drafter is changed.

    Attributes:
        number: Number of the prompt.
        prompt: Token ids of the prompt.
        params: Sampling parameters, drafter and acceptance rule included.
        draft_temperature: Divides the drafter's logits; 1 leaves the drafter as it is, and less sharpens q.
    """

    number: int
    prompt: list[int]
    params: SamplingParams
    draft_temperature: float = 1.0


@contextmanager
def _changed(loaded: Loaded, case: SamplingCase) -> Iterator[None]:
    """Change the drafter as a case has it within the context."""
    engine = loaded.engine
    engine.draft_temperature = case.draft_temperature
    if case.params.drafter == TARGET:  # only then: "auto" stands for all drafters that the engine has
        engine.drafters[TARGET] = LayerSkip(loaded.runner, engine.cache, Skips())
    try:
        yield
    finally:
        engine.drafters.pop(TARGET, None)
        engine.draft_temperature = 1.0


class Sampler:
    """Draws continuations of `len(WIDTHS)` tokens.

    Args:
        llm: The loaded models.
        seed: The first seed; later calls take the next ones.
    """

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm = llm
        self._seeds: Iterator[int] = itertools.count(seed)
        self._drawn, self._seconds = 0, 0.0

    @property
    def seconds_per_sample(self) -> float:
        """Mean time of the samples that were drawn so far."""
        return self._seconds / max(1, self._drawn)

    def next_seed(self) -> int:
        """Return a seed that no other call takes."""
        return next(self._seeds)

    def draws(self, params: SamplingParams) -> bool:
        """Return whether a drafter of these samples draws from a q, which a draft temperature changes."""
        engine = self.llm.loaded.engine
        if engine.greedy_drafts:
            return False
        if params.drafter == TARGET:
            return True
        return any(isinstance(engine.drafters[name], Stepper) for name in self.llm.requests.drafters(params))

    def draw(self, case: SamplingCase, count: int, *, trace: bool = False) -> Iterator[list[Output]]:
        """Yield `count` samples, up to `BATCH` at a time; `trace` records their rounds."""
        while count > 0:
            size = min(count, BATCH)
            params = replace(case.params, max_new_tokens=len(WIDTHS), seed=self.next_seed(), ignore_eos=True)
            start = time.perf_counter()
            with _changed(self.llm.loaded, case):
                outputs = self.llm.generate([case.prompt], params, n=size, trace=trace)
            self._drawn, self._seconds = self._drawn + size, self._seconds + time.perf_counter() - start
            yield outputs
            release_freed()
            count -= size
