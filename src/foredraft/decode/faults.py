"""Faults: what is done about values that are not finite.

They harm their own request alone, and only if plain decoding met them too: a row whose draft led there is
wiped past its text and takes its next step without a draft (`Engine._commit`); a drafter that gives such
logits starts anew, and the second time the request goes on without it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from foredraft.decode.draft import Drafter
from foredraft.decode.sequence import Sequence
from foredraft.model.cache import KVCache

__all__ = ["cure", "not_finite"]

logger = logging.getLogger(__name__)


def cure(sequence: Sequence, drafters: Mapping[str, Drafter], target: KVCache) -> None:
    """After logits of its drafter that are not finite: empty what only the drafter wrote, or give up. target:
    the target's cache, in which the text stays."""
    assert sequence.drafter is not None
    drafter = drafters[sequence.drafter]
    for cache in drafter.caches:
        if cache is target:
            cache.wipe(sequence.row, len(sequence.tokens) - 1)
        else:
            cache.zero_row(sequence.row)
    sequence.drafter_faults += 1
    if sequence.drafter_faults > 1:
        logger.warning("request %d goes on without %s: its logits are not finite", sequence.id, drafter.name)
        drafter.leave(sequence)
        sequence.drafters = tuple(name for name in sequence.drafters if name != drafter.name)
        sequence.drafter = None


def not_finite(sequence: Sequence) -> str:
    """What is said of a request that plain decoding could not go on with."""
    where = len(sequence.tokens)
    if sequence.constraint is not None:
        return f"the model gives no allowed token at position {where} a finite logit"
    return f"the model's logits at position {where} are not finite"
