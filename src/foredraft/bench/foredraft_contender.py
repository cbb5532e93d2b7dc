"""Foredraft's own contenders: one loaded `LLM`, plain or with one of its drafters, under any policy.

The engine has a contender's policy only while that contender runs. The decoding phase lasts from the start of
the first round to the end of the last one. Prompt reading within that span counts as prefill; it occurs where
the sequences of a batch start one after the other, or where a drafter reads a prompt only once it is chosen.
"""

from __future__ import annotations

import zlib
from copy import copy
from typing import Final

from foredraft.bench.contender import Timing
from foredraft.decode.params import RuleName, SamplingParams
from foredraft.decode.policy import Policy
from foredraft.decode.stats import Stats
from foredraft.errors import RequestError
from foredraft.kinds import DRAFTERS, RULES
from foredraft.llm import LLM
from foredraft.profiling.phases import DecodingClock, observed
from foredraft.profiling.timing import replaced

__all__ = ["BigLittle", "ForedraftContender"]


class ForedraftContender:
    """Plain or speculative decoding by the loaded engine.

    Under the coupled rule a prompt's seed is a function of the prompt, so that all runs of a prompt use the
    same noise. Otherwise every run draws fresh noise.

    Args:
        name: The contender's name, which is also its method.
        llm: The loaded engine.
        drafter: Name of the drafter, or "none" for plain decoding.
        temperature: Sampling temperature; 0 is greedy.
        acceptance: The acceptance rule; a lossless one.
        policy: The policy to run under; None for the loaded one.
    """

    peer = False
    batch_sizes: tuple[int, ...] | None = None

    def __init__(
        self,
        name: str,
        llm: LLM,
        drafter: str,
        *,
        temperature: float = 0.0,
        acceptance: RuleName = "speculative",
        policy: Policy | None = None,
    ) -> None:
        self.name, self.method, self.llm, self.drafter = name, name, llm, drafter
        self.temperature, self.acceptance = temperature, acceptance
        self.policy: Policy = policy or llm.loaded.engine.policy
        self.lossless = drafter not in DRAFTERS or DRAFTERS[drafter].lossless

    @property
    def policy_name(self) -> str | None:
        return None if self.drafter == "none" else self.policy.name

    def with_policy(self, policy: Policy) -> ForedraftContender:
        """Return a copy of this contender that runs under another policy."""
        other = copy(self)
        other.name, other.policy = f"{self.method}, {policy.name}", policy
        return other

    def run(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        """Decode the prompts as one batch.

        Raises:
            RequestError: A request failed.
        """
        engine = self.llm.loaded.engine
        clock = DecodingClock(engine)
        with replaced(engine, "policy", self.policy), observed(engine, clock):
            outputs = self.llm.generate(prompts, [self._params(ids, new_tokens) for ids in prompts])
        for output in outputs:
            if output.error is not None:
                raise RequestError(f"{self.name} failed: {output.error}")
        tokens = tuple(tuple(output.token_ids) for output in outputs)
        seconds = clock.ended - clock.began - clock.reading_since
        return Timing(
            tokens=tokens,
            prefill_seconds=clock.reading,
            decode_seconds=seconds,
            decoded_tokens=sum(map(len, tokens)),
            passes=clock.rounds,
            stats=Stats.merge((output.stats for output in outputs), seconds),
        )

    def close(self) -> None:
        return None  # all of Foredraft's contenders share the engine, which the benchmark's caller owns

    def _params(self, prompt: list[int], new_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            max_new_tokens=new_tokens,
            ignore_eos=True,
            drafter=self.drafter,
            seed=zlib.crc32(str(prompt).encode()) if self.acceptance == "coupled" else None,
            acceptance=self.acceptance,
        )


class BigLittle(ForedraftContender):
    """Big Little Decoder (Kim et al. 2023, arXiv:2302.07863): the draft model under the lossy `bild` rule.

    Args:
        llm: The loaded engine.
        policy: The published method has the fallback policy.
        temperature: Sampling temperature; 0 is greedy.
    """

    RULE: Final = "bild"

    def __init__(self, llm: LLM, policy: Policy, *, temperature: float = 0.0) -> None:
        super().__init__("bild", llm, "draft-model", temperature=temperature, policy=policy)
        self.lossless = RULES[self.RULE].lossless

    def _params(self, prompt: list[int], new_tokens: int) -> SamplingParams:
        return super()._params(prompt, new_tokens).replace(acceptance=self.RULE)
