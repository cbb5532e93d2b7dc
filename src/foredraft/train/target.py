"""The frozen target: its states and its logits on packed documents, in one forward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.model.weights import load_decoder
from foredraft.train.packed_documents import Packed, PackedPass

__all__ = ["FrozenTarget", "States"]


class States(NamedTuple):
    """The target's states on packed documents.

    Attributes:
        tapped: Those that enter the tapped layer, [N, hidden]; None where none is tapped.
        last: Those that leave the last layer, of the predicting columns alone, [M, hidden].
    """

    tapped: Tensor | None
    last: Tensor


class FrozenTarget:
    """The model whose next token a student learns.

    Args:
        folder: Its checkpoint.
        device: Where it is.
        dtype: Of its weights and states.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.decoder = load_decoder(folder, device, dtype)
        self.spec = self.decoder.spec

    def autocast(self) -> AbstractContextManager[object]:
        """Return the block in which students, whose weights are float32, compute as the target does."""
        half = self.decoder.dtype != torch.float32
        return torch.autocast(self.decoder.device.type, torch.bfloat16, enabled=half)

    @property
    def head_weight(self) -> Tensor:
        """The weight of the head, [V, hidden]."""
        embedding = self.decoder.embedding
        if self.spec.tied and isinstance(embedding, Tensor):
            return embedding
        return self.decoder.output.dense()

    @torch.no_grad()
    def states(self, packed: Packed, depth: int | None) -> States:
        """Return the states of one forward; the layers below `depth` run once for both."""
        layers, cut = self.decoder.layers, depth or 0
        pass_ = PackedPass(self.spec, packed, self.decoder.dtype)
        x = pass_.run(layers[:cut], self.decoder.embed(packed.tokens))
        tapped = None if depth is None else x
        return States(tapped, pass_.run(layers[cut:], x, cut)[packed.predicting])

    @torch.no_grad()
    def log_probs(self, last: Tensor) -> Tensor:
        """Return log p, [M, V] float32, of the states that leave the last layer."""
        return self.decoder.head(last).log_softmax(-1)
