"""Quality: how far the predictions of a quantised model are from those of the original.

Over the tokens of held-out text: the KL divergence of the quantised model's distribution from the original's,
in nats, its mean and the value that one token in a thousand exceeds; how often both find the same token
likeliest; and the ratio of their perplexities. The embedding's share is measured by itself: the divergence of
the original with nothing but the quantised embedding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foredraft.model.decoder import Decoder
from foredraft.train.batches import Batches
from foredraft.train.packed_documents import Document, Packed
from foredraft.train.target import FrozenTarget

__all__ = ["Quality", "measure_quality"]

GROUP_TOKENS = 2048  # of one pass


@dataclass(frozen=True, slots=True)
class Quality:
    """What quantising changed.

    Attributes:
        tokens: That were predicted.
        kl: Mean KL divergence, in nats.
        kl_999: Its 99.9 % quantile, in nats.
        same_top: Share of the tokens at which both models' likeliest token is the same.
        perplexity_ratio: The quantised model's perplexity over the original's.
        embedding_kl: Mean KL divergence where the embedding alone is quantised, in nats.
    """

    tokens: int
    kl: float
    kl_999: float
    same_top: float
    perplexity_ratio: float
    embedding_kl: float


@torch.no_grad()
def measure_quality(
    original: Path, quantised: Path, dtype: torch.dtype, documents: Sequence[Document]
) -> Quality:
    """Compare two checkpoints on documents."""
    device = torch.device("cpu")
    targets = [FrozenTarget(folder, device, dtype) for folder in (original, quantised)]
    targets.append(_with_embedding(*targets))
    batches = Batches(documents, GROUP_TOKENS, 0)
    divergences, of_embedding = list[Tensor](), list[Tensor]()
    same = total = 0
    gap = 0.0  # of the summed log-probabilities of the text
    for group in range(len(batches)):
        packed = Packed.of(batches.documents_of(group), device)
        p, q, half = (target.log_probs(target.states(packed, ()).last) for target in targets)
        divergences.append(_kl(p, q))
        of_embedding.append(_kl(p, half))
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        said = packed.tokens[packed.predicting + 1][:, None]
        gap += float((p.gather(1, said) - q.gather(1, said)).double().sum())
        total += len(said)
    kl = torch.cat(divergences).double()
    return Quality(
        tokens=total,
        kl=float(kl.mean()),
        kl_999=float(kl.sort().values[math.ceil(0.999 * len(kl)) - 1]),
        same_top=same / total,
        perplexity_ratio=math.exp(gap / total),
        embedding_kl=float(torch.cat(of_embedding).double().mean()),
    )


def _with_embedding(original: FrozenTarget, quantised: FrozenTarget) -> FrozenTarget:
    """Return the original with the quantised embedding, which shares all other weights."""
    found, own = copy(original), original.decoder
    embedding, parts = quantised.decoder.embedding, (own.learned_positions, own.inputs)
    found.decoder = Decoder(own.spec, embedding, own.layers, own.norm, own.output, *parts)
    return found


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return the KL divergence of q from p, [M], of log-probabilities [M, V]."""
    return (p.exp() * (p - q)).sum(-1)
