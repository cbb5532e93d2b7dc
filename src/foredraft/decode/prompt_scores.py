"""Scores of a prompt's own tokens, made chunk by chunk in prefill.

A token's distribution is the one that would have been drawn from if the prompt had ended before it.
Transforms that depend on new tokens (presence and frequency penalties, min_new_tokens) have no part in it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foredraft.decode.penalty_context import PenaltyContext
from foredraft.decode.sampling import SamplingTable, distribution_of
from foredraft.decode.scores import Score, score, scores_in
from foredraft.decode.sequence import Sequence
from foredraft.decode.vocab_ops import VocabOps
from foredraft.model.transfers import upload

__all__ = ["score_chunk"]

COLUMNS = 32  # at a time: a whole chunk's logits over a large vocabulary would take hundreds of MB


def score_chunk(
    head: Callable[[Tensor], Tensor], hidden: Tensor, sequence: Sequence, start: int, vocab_ops: VocabOps
) -> list[Score] | None:
    """Return the scores of the tokens after those of a chunk; None where a logit is not finite.

    Args:
        head: Turns hidden states into logits.
        hidden: [1, n, D], states of the chunk's tokens.
        sequence: Its prompt and parameters.
        start: Position of the chunk's first token.
        vocab_ops: Turns logits into distributions.
    """
    table = SamplingTable.of([sequence.params], hidden.device, vocab_ops=vocab_ops).of_prompt()
    top = sequence.params.prompt_logprobs or 0
    tokens = sequence.prompt[start + 1 : start + 1 + hidden.shape[1]]
    ahead = upload(tokens, hidden.device)  # [n]
    penalised = sequence.params.penalised
    penalty_context = PenaltyContext.of_prompt(sequence.prompt[: start + 1], ahead) if penalised else None
    figures: list[Tensor] = []
    sound: list[Tensor] = []
    for first in range(0, len(tokens), COLUMNS):
        part = slice(first, first + COLUMNS)
        logits = head(hidden[:, part])
        distribution, finite = distribution_of(
            logits, table, penalty_context=penalty_context and penalty_context.along(ahead[None], first)
        )
        figures.append(score(logits, distribution, ahead[None, part], top)[0])
        sound.append(finite.all())
    read = torch.cat([torch.stack(sound).all().view(1).long(), *(x.view(-1) for x in figures)]).cpu().numpy()
    if not read[0]:
        return None
    return scores_in(read[1:].reshape(len(tokens), -1), tokens, top, top)
