"""Scores of a prompt's own tokens, made as it is read, chunk by chunk.

The law that a prompt's token is held against is what would have been drawn from had the prompt ended before
it; what counts or bars new tokens only (presence and frequency penalties, min_new_tokens) has no part in it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foredraft.decode.past import Past
from foredraft.decode.sampling import SamplingTable, law_of
from foredraft.decode.scores import Score, score, scores_in
from foredraft.decode.sequence import Sequence
from foredraft.model.device import upload

__all__ = ["score_chunk"]

COLUMNS = 32  # at a time: a whole chunk's logits over a large vocabulary would take hundreds of MB


def score_chunk(
    head: Callable[[Tensor], Tensor], hidden: Tensor, sequence: Sequence, start: int
) -> list[Score] | None:
    """Scores of the tokens after those of a chunk that begins at `start`, hidden [1, n, D]; None where a
    logit is not finite."""
    device = hidden.device
    table = SamplingTable.of([sequence.params], device).of_prompt()
    top = sequence.params.prompt_logprobs or 0
    prompt = upload(sequence.prompt, device)
    scores: list[Score] = []
    for states in torch.split(hidden, COLUMNS, 1):
        count = states.shape[1]
        read = prompt[: start + 1]
        ahead = prompt[start + 1 : start + 1 + count]
        logits = head(states)
        past = Past.of_prompt(read, ahead) if sequence.params.penalised else None
        law, finite = law_of(logits, table, past=past)
        figures = score(logits, law, ahead[None], top)[0]
        if not bool(torch.all(finite)):
            return None
        tokens = sequence.prompt[start + 1 : start + 1 + count]
        scores += scores_in(figures.cpu().numpy(), tokens, top, top)
        start += count
    return scores
