"""The frozen target: its states and its logits on packed documents, in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder, parameter_count
from foredraft.train.packed_documents import Packed, PackedPass

__all__ = ["FrozenTarget", "States", "step_weights"]


class States(NamedTuple):
    """The target's states on packed documents.

    Attributes:
        tapped: Those after each tapped number of layers side by side, [N, taps * hidden]; None where none is
            tapped.
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

    @property
    def head_bias(self) -> Tensor | None:
        """The bias of the head, [V]; None if it has none."""
        bias = self.decoder.output.bias
        return None if bias is None else bias[: self.spec.vocab_size]

    @torch.no_grad()
    def states(self, packed: Packed, taps: Sequence[int]) -> States:
        """Return the states of one forward, in which every layer runs once."""
        layers, done = self.decoder.layers, 0
        inputs = self.decoder.layer_inputs(packed.tokens)
        pass_ = PackedPass(self.spec, packed, self.decoder.dtype, inputs)
        x = self.decoder.embed(packed.tokens, packed.positions)
        found: dict[int, Tensor] = {}
        for cut in sorted(set(taps)):
            x = found[cut] = pass_.run(layers[done:cut], x, done)
            done = cut
        tapped = torch.cat([found[tap] for tap in taps], -1) if taps else None
        return States(tapped, pass_.run(layers[done:], x, done)[packed.predicting])

    @torch.no_grad()
    def log_probs(self, last: Tensor) -> Tensor:
        """Return log p, [M, V] float32, of the states that leave the last layer."""
        return self.decoder.head(last).log_softmax(-1)


def step_weights(spec: ModelSpec) -> int:
    """Return the weights that a step of a model reads: all but an embedding that is not the head, too."""
    once = spec.tied or spec.head_copies
    return parameter_count(spec) - (0 if once else spec.vocab_size * spec.hidden_size)
