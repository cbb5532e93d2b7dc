"""The target, read plainly: prompt in chunks, then one token a pass, as plain decoding does it.

Contract: the logits are those of plain decoding over the same text, bit for bit where the runner's shapes
are exact. It has a cache of its own and meets no drafter, no acceptance rule and no batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.decode.params import SamplingParams
from foredraft.decode.sampling import SamplingTable, distribution_of
from foredraft.errors import RequestError
from foredraft.llm import LLM
from foredraft.model.runner import Runner, next_chunk
from foredraft.verify.cells import Chances

__all__ = ["PlainTarget"]


class PlainTarget:
    """`positions`: of the longest text that will be read."""

    def __init__(self, llm: LLM, positions: int) -> None:
        runner = llm.engine.target
        assert isinstance(runner, Runner)
        self.runner = runner
        self.cache = runner.new_cache(1, positions)
        self._prompt: list[int] = []
        self._read: list[int] = []  # the tokens whose keys and values the cache holds

    def logits(self, prompt: list[int], new: list[int]) -> Tensor:
        """Of the token after prompt + new -> [V] float32."""
        if prompt != self._prompt:
            self._prefill(prompt)
        text = [*prompt, *new]
        start = len(prompt) - 1  # nothing before it is ever read again
        while start < min(len(self._read), len(text) - 1) and self._read[start] == text[start]:
            start += 1
        logits = None
        for position in range(start, len(text)):
            token = torch.tensor([[text[position]]])
            logits = self.runner.forward(self.cache, token, [position]).logits
        self._read = text
        assert logits is not None
        return logits[0, 0]

    def chances(self, prompt: list[int], params: SamplingParams) -> Chances:
        """The exact law of the next token after prompt + prefix, by the transforms that decoding uses.
        Raises RequestError where its logits are not finite."""

        def after(prefix: tuple[int, ...]) -> Tensor:
            logits = self.logits(prompt, list(prefix))
            law, finite = distribution_of(logits[None, None], SamplingTable.of([params], logits.device))
            if not finite.item():
                raise RequestError("the target's logits are not finite; there is no law to sample from")
            weights = law.dense(logits.shape[0])[0, 0].to("cpu", torch.float64)
            return weights / weights.sum()

        return after

    def _prefill(self, prompt: list[int]) -> None:
        start, stop = 0, len(prompt) - 1
        while start < stop:
            end = next_chunk(start, stop, self.runner.chunk)
            self.runner.prefill(self.cache, 0, prompt[start:end], start)
            start = end
        self._prompt, self._read = prompt, prompt[:-1]
