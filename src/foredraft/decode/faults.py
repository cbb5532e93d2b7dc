"""Faults: how non-finite values and a lack of memory are contained.

Non-finite values harm their own request alone, and only if plain decoding meets them too. A row whose draft
led to non-finite logits of the target is wiped past its text and takes its next step without a draft
(`Engine._append`). A drafter that gives non-finite logits starts anew; the second time the request goes on
without it.

A round that runs out of a GPU's memory before its commit has committed nothing. It is abandoned, one request
ends, and the next round needs less. Within a commit only a row's drafters allocate, for their states of that
row, so that request ends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from foredraft.decode.drafter import Drafter, Stepper
from foredraft.decode.sequence import Sequence
from foredraft.model.cache import KVCache

__all__ = ["abandon_round", "memory_message", "nonfinite_message", "reset_drafter"]

logger = logging.getLogger(__name__)


def reset_drafter(sequence: Sequence, drafter: Drafter, target: KVCache) -> None:
    """Empty what only the drafter wrote, or drop the drafter at its second fault.

    target: The target's cache, in which the text stays.
    """
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


def nonfinite_message(sequence: Sequence) -> str:
    """Return the error of a request that plain decoding cannot continue."""
    where = len(sequence.tokens)
    if sequence.constraint is not None:
        return f"the model gives no allowed token at position {where} a finite logit"
    return f"the model's logits at position {where} are not finite"


def abandon_round(sequences: Iterable[Sequence], drafters: Mapping[str, Drafter]) -> None:
    """Leave sequences and drafters as they were before a round that broke off before its commit."""
    for drafter in drafters.values():
        if isinstance(drafter, Stepper):
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
