"""The target alone, decoded plainly: the prompt in prefill chunks, then one token per pass.

The logits are those of plain decoding over the same tokens, bit for bit where the runner's shapes are exact.
`PlainTarget` has a cache of its own, and no drafter, acceptance rule or batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.decode.params import SamplingParams
from foredraft.decode.penalty_context import PenaltyContext
from foredraft.decode.sampling import SamplingTable, distribution_of
from foredraft.errors import RequestError
from foredraft.llm.loaded import Loaded
from foredraft.model.runner import next_chunk
from foredraft.verify.cells import NextToken

__all__ = ["PlainTarget"]


class PlainTarget:
    """Computes the target's logits after a prompt and a continuation.

    Args:
        loaded: The model.
        positions: Maximum number of tokens, prompt and continuation together.
    """

    def __init__(self, loaded: Loaded, positions: int) -> None:
        self.runner = loaded.runner
        self.cache = loaded.runner.new_cache(1, positions)
        self._prompt: list[int] = []
        self._cached: list[int] = []  # the tokens whose keys and values the cache holds

    def logits(self, prompt: list[int], new: list[int]) -> Tensor:
        """Return the logits of the token after prompt + new, [V] float32."""
        if prompt != self._prompt:
            self._prefill(prompt)
        tokens = [*prompt, *new]
        start = len(prompt) - 1  # `_prefill` leaves the prompt's last token pending
        while start < min(len(self._cached), len(tokens) - 1) and self._cached[start] == tokens[start]:
            start += 1
        logits = None
        for position in range(start, len(tokens)):
            token = torch.tensor([[tokens[position]]])
            logits = self.runner.forward(self.cache, token, [position]).logits
        self._cached = tokens
        assert logits is not None
        return logits[0, 0]

    def next_token(self, prompt: list[int], params: SamplingParams) -> NextToken:
        """Return a function from a prefix of the output to the exact distribution of the next token.

        The distribution passes through the same sampling transforms as in decoding.

        Args:
            prompt: Token ids of the prompt.
            params: Sampling parameters.

        Returns:
            A function that raises RequestError if the target's logits are not finite.
        """

        def distribution(prefix: tuple[int, ...]) -> Tensor:
            logits = self.logits(prompt, list(prefix))
            # As plain decoding has it: the output so far is committed, and there is no draft.
            context = PenaltyContext.after(prompt, list(prefix), logits.device) if params.penalised else None
            transformed, finite = distribution_of(
                logits[None, None], SamplingTable.of([params], logits.device), None, context
            )
            if not finite.item():
                raise RequestError(
                    "the target's logits are not finite, so there is no distribution to sample from",
                    remedy="give another model or dtype",
                )
            weights = transformed.dense(logits.shape[0])[0, 0].to("cpu", torch.float64)
            return weights / weights.sum()

        return distribution

    def _prefill(self, prompt: list[int]) -> None:
        start, stop = 0, len(prompt) - 1
        while start < stop:
            end = next_chunk(start, stop, self.runner.chunk)
            self.runner.prefill(self.cache, 0, prompt[start:end], start)
            start = end
        self._prompt, self._cached = prompt, prompt[:-1]
