"""Prefill: the target, and drafters that want it, read a prompt chunk by chunk, all but its last token."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from foredraft.decode.drafter import Drafter, Stepper
from foredraft.decode.engine_target import Target
from foredraft.decode.prompt_scores import score_chunk
from foredraft.decode.sequence import Sequence
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
    drafters_read: bool,
    vocab_ops: VocabOps,
) -> bool:
    """Run the next chunk of a prompt through the target, and score it where the request asks for it.

    Args:
        sequence: Its prompt is read up to `cache.lengths` of its row.
        target: Runs the pass.
        cache: The target's.
        drafters: The sequence's own.
        drafters_read: Steppers read the chunk too; otherwise they read once the policy chooses them.
        vocab_ops: Scores the chunk.

    Returns:
        False where a logit of a scored chunk is not finite.
    """
    start, stop = cache.lengths[sequence.row], len(sequence.prompt) - 1
    end = next_chunk(start, stop, target.chunk)
    taps = tuple(depth for drafter in drafters for depth in drafter.taps)
    forward = target.prefill(cache, sequence.row, sequence.prompt[start:end], start, taps=taps)
    cache.lengths[sequence.row] = end
    if sequence.params.prompt_logprobs is not None:
        scores = score_chunk(target.head, forward.hidden, sequence, start, vocab_ops)
        if scores is None:
            return False
        # A sibling reads the prompt again where its first reader was cancelled: its scores replace the old
        # ones.
        del sequence.prompt_scores[start + 1 :]
        sequence.prompt_scores += scores
    for drafter in drafters:
        if drafter.taps:
            drafter.observe(sequence, start, {d: forward.taps[d][0, : end - start] for d in drafter.taps})
        fits = drafter.max_length is None or stop <= drafter.max_length  # else it can never draft here
        if drafters_read and fits and isinstance(drafter, Stepper):
            drafter.read(sequence, start, end)
    return True
