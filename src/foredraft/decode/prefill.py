"""Prompts: read chunk by chunk, all but the last token, by the target and by the drafters that want them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from foredraft.decode.draft import Drafter, as_stepper
from foredraft.decode.prompt_scores import score_chunk
from foredraft.decode.sequence import Sequence
from foredraft.decode.target import Target
from foredraft.decode.vocab_ops import VocabOps
from foredraft.model.cache import KVCache
from foredraft.model.runner import next_chunk

__all__ = ["prefill_chunk"]


def prefill_chunk(
    sequence: Sequence,
    target: Target,
    cache: KVCache,
    drafters: Seq[Drafter],
    *,
    ahead: bool,
    vocab_ops: VocabOps,
) -> bool:
    """The next chunk of a prompt; scored, where that was asked for. False where a logit of it is not finite.
    drafters: the sequence's own. ahead: those that have to read a text read it now, and not once they are
    chosen."""
    start, stop = cache.lengths[sequence.row], len(sequence.prompt) - 1
    end = next_chunk(start, stop, target.chunk)
    taps = tuple(depth for drafter in drafters for depth in drafter.taps)
    forward = target.prefill(cache, sequence.row, sequence.prompt[start:end], start, taps=taps)
    cache.lengths[sequence.row] = end
    if sequence.params.prompt_logprobs is not None:
        scores = score_chunk(target.head, forward.hidden, sequence, start, vocab_ops)
        if scores is None:
            return False
        # whoever reads the prompt anew, because its first reader was cancelled, scores it anew
        del sequence.prompt_scores[start + 1 :]
        sequence.prompt_scores += scores
    for drafter in drafters:
        if drafter.taps:
            drafter.observe(sequence, start, {d: forward.taps[d][0, : end - start] for d in drafter.taps})
        fits = drafter.max_length is None or stop <= drafter.max_length
        # one that can never draft need not read, nor one that may never be chosen
        stepper = as_stepper(drafter)
        if stepper is not None and fits and ahead:
            stepper.read(sequence, start, end)
    return True
