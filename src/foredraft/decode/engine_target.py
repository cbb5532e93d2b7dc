"""What the engine does beside rounds: what it asks of the target, how a prompt is read, and how faults are
contained.

Prefill reads a prompt chunk by chunk, all but its last token, and scores it: a token's distribution is the
one that it would have been drawn from if the prompt had ended before it. What a rollback leaves behind a
prompt is read again where recurrent layers need it, by passes like those that read it first. Non-finite
values harm their own request alone, and only if plain decoding meets them too. A round that runs out of a
GPU's memory has committed nothing: one request ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from foredraft.decode.drafter import AutoregressiveDrafter, Drafter
from foredraft.decode.sampling import PenaltyContext, SamplingTable, distribution_of
from foredraft.decode.scores import Score, score, scores_in
from foredraft.decode.sequence import Sequence
from foredraft.decode.vocab_ops import VocabOps
from foredraft.model.cache import KVCache
from foredraft.model.memory import upload
from foredraft.model.runner import Runner, next_chunk

logger = logging.getLogger(__name__)


# A step is one call of `Engine.step`; the other phases lie within it.
Phase: TypeAlias = Literal["step", "prefill", "round", "draft", "verify"]

_NOTHING: Final = nullcontext()


class Observer:
    """Base class of observers; it observes nothing. The engine enters the returned context for a phase."""

    def phase(self, phase: Phase) -> AbstractContextManager[object]:
        return _NOTHING

    def drafter_reads(self, sequence: Sequence, start: int, stop: int) -> AbstractContextManager[object]:
        """Return the context in which a drafter reads tokens [start, stop) that it missed, within "draft"."""
        return _NOTHING


SILENT: Final = Observer()


def reset_drafter(sequence: Sequence, drafter: Drafter, target: KVCache) -> None:
    """Empty what the drafter alone wrote, not the text in the target's cache; drop it at its second fault."""
    for cache in drafter.caches:
        if cache is target:
            cache.wipe(sequence.row, len(sequence.tokens) - 1)
        else:
            cache.zero_row(sequence.row)
    sequence.drafter_faults += 1
    if sequence.drafter_faults > 1:
        logger.warning(
            "request %d continues without %s: its logits are not finite", sequence.id, drafter.name
        )
        drafter.leave(sequence)
        sequence.drafters = tuple(name for name in sequence.drafters if name != drafter.name)


def nonfinite_message(sequence: Sequence, dtype: torch.dtype) -> str:
    """Return the error of a request that plain decoding in a dtype cannot continue."""
    where = len(sequence.tokens)
    if sequence.constraint is not None:
        return f"the model gives no allowed token at position {where} a finite logit"
    remedy = "; its states may exceed float16: load it in bfloat16" if dtype == torch.float16 else ""
    return f"the model's logits at position {where} are not finite{remedy}"


def abandon_round(sequences: Iterable[Sequence], drafters: Mapping[str, Drafter]) -> None:
    """Leave sequences and drafters as they were before a round that broke off before its commit."""
    for drafter in drafters.values():
        if isinstance(drafter, AutoregressiveDrafter):
            drafter.resume()  # its draft ends
    for sequence in sequences:
        if sequence.constraint is not None:
            sequence.constraint.rewind(len(sequence.new_ids))
        for name in sequence.drafters:
            drafters[name].rewind(sequence)


def memory_message(error: BaseException) -> str:
    """Return the error of a request for whose pass a GPU has too little memory."""
    reason = str(error).splitlines()[0] if str(error) else "out of memory"
    return f"the GPU has too little memory left ({reason}); lower max_batch or max_length"


COLUMNS = 32  # at a time: a whole chunk's logits over a large vocabulary would take hundreds of MB


def score_chunk(
    head: Callable[[Tensor], Tensor], hidden: Tensor, sequence: Sequence, start: int, vocab_ops: VocabOps
) -> list[Score] | None:
    """Return the scores of the tokens after those of a chunk; None where a logit is not finite."""
    table = SamplingTable.of([sequence.params], hidden.device, vocab_ops=vocab_ops).of_prompt()
    top = sequence.params.prompt_logprobs or 0
    tokens = sequence.prompt[start + 1 : start + 1 + hidden.shape[1]]
    ahead = upload(tokens, hidden.device)  # [n]
    penalty_context = None
    if sequence.params.penalised:
        penalty_context = PenaltyContext.after(sequence.prompt[: start + 1], [], hidden.device)
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


def prefill_chunk(
    sequence: Sequence,
    target: Runner,
    cache: KVCache,
    drafters: Seq[Drafter],
    *,
    early: int,
    drafters_read: bool,
    vocab_ops: VocabOps,
) -> bool:
    """Run the next chunk of a text through the target, and score a prompt where the request asks for it.

    A chunk of a prompt also ends at position `early`.
    """
    row, start, stop = sequence.row, cache.lengths[sequence.row], len(sequence.tokens) - 1
    aux_layers = tuple(depth for drafter in drafters for depth in drafter.aux_layers)
    if is_prompt := start < len(sequence.prompt) - 1:
        stop = len(sequence.prompt) - 1
        end = next_chunk(start, early if start < early else stop, target.chunk)
        forward = target.prefill(cache, row, sequence.prompt[start:end], start, aux_layers=aux_layers)
    else:
        end = min(start + target.max_queries, stop)
        again = upload([sequence.tokens[start:end]], cache.device)
        forward = target.forward(
            cache, again, [start], first_row=row, aux_layers=aux_layers, want_logits=False
        )
    cache.lengths[row] = end
    if is_prompt and sequence.params.prompt_logprobs is not None:
        scores = score_chunk(target.head, forward.hidden, sequence, start, vocab_ops)
        if scores is None:
            return False
        # another choice may have read so far: they share one list
        sequence.prompt_scores += scores[len(sequence.prompt_scores) - (start + 1) :]
    for drafter in drafters:
        if drafter.aux_layers:
            states = {d: forward.aux_states[d][0, : end - start] for d in drafter.aux_layers}
            drafter.observe(sequence, start, states)
        fits = drafter.max_length is None or stop <= drafter.max_length  # else it can never draft here
        if drafters_read and fits and isinstance(drafter, AutoregressiveDrafter):
            drafter.read(sequence, drafter.length(sequence), end)
    return True
