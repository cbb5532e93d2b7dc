"""The drafts of a block drafter on given texts, without decoding: as `teacher_forced` has them.

The contexts of the whole text are written once. A slot's bias comes of the text's own token before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.doctor.teacher_forced import ReadText
from foredraft.drafters.block_drafter import Block, Chain
from foredraft.drafters.heads.block_head import BlockHead
from foredraft.drafters.heads.words import map_of
from foredraft.model.cache import KVCache
from foredraft.model.forward_context import rope_tables

__all__ = ["block_drafts"]

PIECE = 128  # contexts that one pass writes


@torch.inference_mode()
def block_drafts(head: BlockHead, text: ReadText, length: int, most: int) -> dict[int, Tensor]:
    """Return a head's logits [K, V] of a draft after each anchor.

    Args:
        head: The head; `text.states` has the boundaries that it reads.
        text: The text.
        length: K, tokens of a draft; as many as a block has at most.
        most: Drafts at most.
    """
    record, decoder, count = head.record, head.target, len(text.tokens)
    cache = KVCache(record.spec, 1, count + record.block, device=decoder.device, dtype=decoder.dtype)
    tables = rope_tables(record.spec, cache.stored, decoder.device, decoder.dtype)
    words = map_of(head.words, decoder)
    contexts = head.contexts(torch.cat([text.states[tap] for tap in record.taps or ()], -1))
    for start in range(0, count, PIECE):
        head.inject(cache, tables, [contexts[start : start + PIECE]], [start])
    tokens = torch.tensor(text.tokens, device=decoder.device)
    drafts: dict[int, Tensor] = {}
    for anchor in text.anchors(length, most):  # the last one first: a block overwrites what lies behind
        before = tokens[anchor : anchor + 1]
        hidden = head.run(cache, tables, before, [anchor], [True])
        chain = Chain(head, Block.of(head, hidden, length), before)
        logits = torch.cat(
            [chain.next(tokens[place : place + 1]) for place in range(anchor, anchor + length)]
        )
        drafts[anchor] = logits if words is None else words.columns(logits)
    return drafts
