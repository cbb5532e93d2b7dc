"""Foredraft's own contenders: one loaded `LLM`, plain and with each drafter, under any policy.

The policy is the engine's while a contender runs, and only then. Decoding lasts from the beginning of the
first round to the end of the last one; what prompts are read in between counts as prefill, where several
sequences start one after the other, or where a drafter reads a prompt only once it is chosen.
"""

from __future__ import annotations

import zlib
from copy import copy

from foredraft.bench.contender import Timing
from foredraft.bench.timing import watched, wrapped
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Policy
from foredraft.decode.stats import Stats
from foredraft.errors import RequestError
from foredraft.kinds import RULES
from foredraft.llm import LLM

__all__ = ["BigLittle", "ForedraftContender"]


class ForedraftContender:
    """speculation: the drafter's name, or "none". decides: the policy; None is the one that was loaded. Under
    the coupled rule a prompt's seed is a function of the prompt, so that every run of it has the same noise;
    otherwise every run has fresh noise."""

    peer = False
    batches: tuple[int, ...] | None = None

    def __init__(
        self,
        name: str,
        llm: LLM,
        drafter: str,
        *,
        lossless: bool = True,
        temperature: float = 0.0,
        coupled: bool = False,
        decides: Policy | None = None,
    ) -> None:
        self.name, self.method, self.llm, self.drafter = name, name, llm, drafter
        self.lossless, self.temperature, self.coupled = lossless, temperature, coupled
        self.decides: Policy = decides or llm.engine.policy

    @property
    def policy(self) -> str | None:
        return None if self.drafter == "none" else self.decides.name

    def under(self, policy: Policy) -> ForedraftContender:
        """The same under another policy."""
        other = copy(self)
        other.name, other.decides = f"{self.method}, {policy.name}", policy
        return other

    def run(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        engine = self.llm.engine
        with wrapped(engine, "policy", self.decides), watched(engine) as clock:
            outputs = self.llm.generate(prompts, [self._params(ids, new_tokens) for ids in prompts])
        for output in outputs:
            if output.error is not None:
                raise RequestError(f"{self.name}: {output.error}")
        tokens = tuple(tuple(output.token_ids) for output in outputs)
        seconds = clock.ended - clock.began - clock.reading_since
        return Timing(
            tokens,
            clock.reading,
            seconds,
            sum(map(len, tokens)),
            clock.rounds,
            Stats.merge((output.stats for output in outputs), seconds),
        )

    def close(self) -> None:
        return None  # the model is shared, and goes with its last contender

    def _params(self, prompt: list[int], new_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            max_new_tokens=new_tokens,
            ignore_eos=True,
            drafter=self.drafter,
            seed=zlib.crc32(str(prompt).encode()) if self.coupled else None,
            acceptance="coupled" if self.coupled else "speculative",
        )


class BigLittle(ForedraftContender):
    """Big Little Decoder: a draft model and the lossy rule by its defaults. decides: as published, the
    fallback policy."""

    RULE = "bild"

    def __init__(self, llm: LLM, decides: Policy, *, temperature: float = 0.0) -> None:
        lossless = RULES[self.RULE].lossless
        super().__init__(
            "bild", llm, "draft-model", lossless=lossless, temperature=temperature, decides=decides
        )

    def _params(self, prompt: list[int], new_tokens: int) -> SamplingParams:
        return super()._params(prompt, new_tokens).replace(acceptance=self.RULE)
