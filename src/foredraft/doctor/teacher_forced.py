"""Acceptance by position of the draft, on given texts, without decoding.

At an anchor, target and drafter both read the text up to there, and then the text's own tokens in place of
the draft's: so every position is measured at every anchor. A token is accepted with probability Σ min(p, q)
at temperature 1, and at temperature 0 if both have the same argmax. Drafts go from the last anchor to the
first, since a draft overwrites what lies behind its anchor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.drafters.block_drafter import BlockHead, Chain
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.eagle3 import Eagle3Head
from foredraft.drafters.heads.layers import HeadCache
from foredraft.drafters.heads.record import map_of
from foredraft.drafters.medusa import MedusaHeads
from foredraft.drafters.p_eagle import PEagleHead
from foredraft.model.cache import KVCache
from foredraft.model.runner import Runner, next_chunk


@dataclass(frozen=True, slots=True)
class DraftAcceptance:
    """The acceptance of every draft."""

    sampled: Tensor  # probability that the token at a position is accepted at temperature 1, [drafts, K]
    greedy: Tensor  # the same at temperature 0: 0 or 1

    @classmethod
    def joined(cls, several: Iterable[DraftAcceptance]) -> DraftAcceptance:
        """Return the drafts of all."""
        return cls(*map(torch.cat, zip(*((each.sampled, each.greedy) for each in several), strict=True)))

    @property
    def rounds(self) -> Tensor:
        """The tokens of a round after each anchor at temperature 1, [drafts]."""
        return 1 + self.sampled.cumprod(1).sum(1)

    @property
    def by_position(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """α by position, at temperature 1 and 0: of the drafts of which all before was accepted."""
        return _given_all_before(self.sampled), _given_all_before(self.greedy)


def _given_all_before(accepted: Tensor) -> tuple[float, ...]:
    surviving = accepted.cumprod(1).mean(0)  # [K]
    before = torch.cat([torch.ones(1), surviving[:-1]])
    return tuple((surviving / before).nan_to_num(0.0).tolist())


@dataclass(frozen=True, slots=True)
class ReadText:
    """A text as the target read it."""

    tokens: list[int]  # its ids
    logits: Tensor  # of the token after each one, [n, V] float32
    states: dict[int, Tensor]  # of each auxiliary layer, [n, D]

    def anchors(self, length: int, most: int) -> list[int]:
        """Return the positions of the pending tokens of at most `most` drafts, the last one first."""
        last, first = len(self.tokens) - length - 1, min(8, len(self.tokens) // 2)
        step = max(1, (last - first) // most + 1)
        return list(range(last, first - 1, -step))


@torch.inference_mode()
def read_text(runner: Runner, tokens: list[int], aux_layers: Sequence[int]) -> ReadText:
    """Run the target over a text once, chunk by chunk."""
    cache, start = runner.new_cache(1, len(tokens)), 0
    logits: list[Tensor] = []
    states: dict[int, list[Tensor]] = {layer: [] for layer in aux_layers}
    while start < len(tokens):
        end = next_chunk(start, len(tokens), runner.chunk)
        forward = runner.prefill(cache, 0, tokens[start:end], start, aux_layers=tuple(aux_layers))
        logits.append(runner.head(forward.hidden)[0, : end - start].float())
        for layer in aux_layers:
            states[layer].append(forward.aux_states[layer][0, : end - start])
        start = end
    return ReadText(tokens, torch.cat(logits), {layer: torch.cat(parts) for layer, parts in states.items()})


def acceptance_of(drafts: Mapping[int, Tensor], text: ReadText) -> DraftAcceptance:
    """Return the acceptance of drafts by their anchors, [K, V] each."""
    found = [_accepted(text.logits[anchor : anchor + len(own)], own) for anchor, own in drafts.items()]
    return DraftAcceptance(*map(torch.stack, zip(*found, strict=True)))


@torch.inference_mode()
def head_drafts(head: Eagle3Head, text: ReadText, length: int, most: int) -> dict[int, Tensor]:
    """Return a head's logits [K, V] of a draft after each anchor."""
    tokens, own_cache, left = _read_pairs(head, text, length)
    draft_vocab = map_of(head.draft_vocab, head.target)
    drafts: dict[int, Tensor] = {}
    for anchor in text.anchors(length, most):
        own, chain = left[anchor][None], list[Tensor]()
        for place in range(anchor, anchor + length):
            logits = head.logits(own)
            chain.append(logits if draft_vocab is None else draft_vocab.columns(logits))
            if place + 1 < anchor + length:
                recurring = head.recurring(own)[None]
                own = head.run(own_cache, tokens[:, place + 1 : place + 2], recurring, [place + 1], [1])[0]
        drafts[anchor] = torch.cat(chain)
    return drafts


def _read_pairs(head: Eagle3Head, text: ReadText, length: int) -> tuple[Tensor, HeadCache, Tensor]:
    """Read all pairs of a text; return its tokens [1, n], the cache, and what the pairs left, [n, d]."""
    record, decoder = head.record, head.target
    count, spec = len(text.tokens), record.spec
    cache = KVCache(
        spec, 1, count + length, device=decoder.device, dtype=decoder.dtype, blocked=head.kernels is not None
    )
    own_cache = HeadCache.of(spec, cache)
    states = head.joined(torch.cat([text.states[layer] for layer in record.aux_layers or ()], -1))  # [n, d]
    tokens = torch.tensor([text.tokens], device=decoder.device)
    left = torch.zeros_like(states)
    for start in range(1, count, 128):
        stop = min(count, start + 128)
        columns = head.run(
            own_cache, tokens[:, start:stop], states[None, start - 1 : stop - 1], [start], [stop - start]
        )
        left[start:stop] = columns[0]
    return tokens, own_cache, left


@torch.inference_mode()
def p_eagle_drafts(head: PEagleHead, text: ReadText, length: int, most: int) -> dict[int, Tensor]:
    """Return a head's logits [K, V] of a draft after each anchor."""
    _, own_cache, left = _read_pairs(head, text, length)
    draft_vocab, masked = map_of(head.draft_vocab, head.target), head.masked(length - 1)
    drafts: dict[int, Tensor] = {}
    for anchor in text.anchors(length, most):
        slots = left[anchor][None]
        if masked.count:
            tokens = torch.full((1, masked.count), masked.token, device=left.device)
            states = masked.state.expand(1, masked.count, -1)
            found = head.run(own_cache, tokens, states, [anchor + 1], [masked.count])
            slots = torch.cat([slots, found[0]])
        logits = head.logits(slots)
        drafts[anchor] = logits if draft_vocab is None else draft_vocab.columns(logits)
    return drafts


@torch.inference_mode()
def medusa_drafts(head: MedusaHeads, text: ReadText, length: int, most: int) -> dict[int, Tensor]:
    """Return the logits [K, V] of Medusa heads after each anchor."""
    decoder, draft_vocab = head.target, map_of(head.draft_vocab, head.target)
    drafts: dict[int, Tensor] = {}
    for anchor in text.anchors(length, most):
        reads = head.entering(text.states[decoder.spec.layers][anchor - 1 : anchor])
        logits = torch.cat([slot(reads) for slot in head.heads[:length]])
        drafts[anchor] = logits if draft_vocab is None else draft_vocab.columns(logits)
    return drafts


@torch.inference_mode()
def model_drafts(model: DraftModel, text: ReadText, length: int, most: int) -> dict[int, Tensor]:
    """Return a draft model's logits [K, V] after each anchor."""
    vocabulary = model.vocabulary
    ids = text.tokens if vocabulary is None else [vocabulary.draft_ids[token] for token in text.tokens]
    logits = read_text(model.draft_pass.runner, ids, ()).logits
    if vocabulary is not None:
        logits = vocabulary.columns(logits)
    return {anchor: logits[anchor : anchor + length] for anchor in text.anchors(length, most)}


def _accepted(target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities of acceptance at temperature 1 and 0, [n] each, for logits [n, V]."""
    p, q = target.softmax(-1), draft.softmax(-1)
    sampled = torch.minimum(p, q).sum(-1).clamp(max=1.0).cpu()
    return sampled, (target.argmax(-1) == draft.argmax(-1)).float().cpu()


PIECE = 128  # contexts that one pass writes


@torch.inference_mode()
def block_drafts(head: BlockHead, text: ReadText, length: int, most: int) -> dict[int, Tensor]:
    """Return a head's logits [K, V] of a draft after each anchor."""
    record, decoder, count = head.record, head.target, len(text.tokens)
    cache = KVCache(record.spec, 1, count + record.block, device=decoder.device, dtype=decoder.dtype)
    own_cache = HeadCache.of(record.spec, cache)
    draft_vocab = map_of(head.draft_vocab, decoder)
    contexts = head.contexts(torch.cat([text.states[layer] for layer in record.aux_layers or ()], -1))
    for start in range(0, count, PIECE):
        head.inject(own_cache, [contexts[start : start + PIECE]], [start])
    tokens = torch.tensor(text.tokens, device=decoder.device)
    drafts: dict[int, Tensor] = {}
    for anchor in text.anchors(length, most):  # the last one first: a block overwrites what lies behind
        before = tokens[anchor : anchor + 1]
        hidden = head.run(own_cache, before, [anchor], [True])
        chain = Chain(head, hidden, length, before)
        logits = torch.cat(
            [chain.next(tokens[place : place + 1]) for place in range(anchor, anchor + length)]
        )
        drafts[anchor] = logits if draft_vocab is None else draft_vocab.columns(logits)
    return drafts
