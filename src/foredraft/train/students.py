"""Students: what is trained. One class for each kind of drafter; the loop knows none of them.

A student reads packed documents, and the target's states where it asks for them, and gives the logits of its
predictions. It starts from weights of the target, and is written under the names of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from foredraft.drafters.adapter import adapter_spec
from foredraft.drafters.adapter_files import VOCABULARY
from foredraft.model.decoder import Decoder
from foredraft.model.layers import Linear
from foredraft.model.spec import ModelSpec
from foredraft.model.tensor_layouts import EMBEDDING, HEAD, POSITIONS
from foredraft.train.chunks import Compare, Rows, by_chunks
from foredraft.train.packed_documents import Packed, PackedPass
from foredraft.train.parameters import Parameters, TrainedLayer, TrainedNorm

__all__ = ["Accept", "AdapterStudent", "DraftStudent", "Student"]

# (logits of predictions, which ones) -> [n, 2]: the probability of acceptance, and whether both argmax agree
Accept = Callable[[Tensor, Rows], Tensor]


class Student(nn.Module):
    """Base class of what is trained.

    Attributes:
        taps: The depths at which it reads the target's states; none: it reads tokens alone.
        vocabulary: The token ids that it has logits for, [n] int64; None is all.
        steps: Tokens of a draft that are learned at every position.
    """

    taps: tuple[int, ...] = ()
    steps: int = 1
    vocabulary: Tensor | None = None

    def forward(
        self,
        packed: Packed,
        states: Tensor | None,
        compare: Compare | None = None,
        accept: Accept | None = None,
    ) -> Tensor:
        """Return the logits of the predictions, or what comparing them gives.

        Args:
            packed: The documents.
            states: The target's states at the taps side by side, [N, taps * hidden].
            compare: Compares the logits of some predictions with the target's.
            accept: Says how they would be accepted; without `compare`.

        Returns:
            The logits [M, V] float32, of the columns `packed.predicting`; or the sums of `compare`, [2]; or
            what `accept` says of each token of a draft from each prediction on, [M, K, 2], where K is 1 for a
            student whose logits do not depend on where a draft began.
        """
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Return what is written, by the names of a checkpoint, in float32."""
        raise NotImplementedError

    def shards(self) -> list[nn.Module]:
        """Return the parts that `fully_shard` gathers one at a time."""
        raise NotImplementedError


class AdapterStudent(Student):
    """An adapter over the target's first layers (`drafters.adapter`).

    It starts as a layer of the target and the target's last norm.

    Args:
        target: The target; its head is used, frozen.
        head: The head's weight, [V, hidden].
        start: Their tensors, by the adapter's names.
        depth: Layers of the target below the adapter.
        mlp: The adapter has an MLP.
        vocabulary: The token ids of a reduced head, ascending; None keeps all.
        bias: The head's bias, [V]; None if it has none.
    """

    def __init__(
        self,
        target: ModelSpec,
        head: Tensor,
        start: dict[str, Tensor],
        depth: int,
        *,
        mlp: bool,
        vocabulary: Sequence[int] | None = None,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.depth, self.taps, self.spec = depth, (depth,), adapter_spec(target)
        device = head.device
        self.layer = TrainedLayer(self.spec, device, mlp=mlp)
        self.norm = TrainedNorm(self.spec, device)
        if vocabulary is not None:
            self.vocabulary = torch.tensor(vocabulary, device=device)
            head = head[self.vocabulary]
            bias = None if bias is None else bias[self.vocabulary]
        self.head, self.bias = head, bias
        for part in (self.layer, self.norm):
            part.fill(start)

    def forward(
        self,
        packed: Packed,
        states: Tensor | None,
        compare: Compare | None = None,
        accept: Accept | None = None,
    ) -> Tensor:
        assert states is not None
        x = self.layer(states, PackedPass(self.spec, packed, states.dtype))
        logits = _head(self.spec, self.norm, self.head, self.bias)
        return _predicted(logits, x[packed.predicting], compare, accept)

    def tensors(self) -> dict[str, Tensor]:
        own = {} if self.vocabulary is None else {VOCABULARY: self.vocabulary}
        return {**self.layer.by_name, **self.norm.by_name, **own}

    def shards(self) -> list[nn.Module]:
        return [self.layer]


class DraftStudent(Student):
    """A small model with the target's tokenizer.

    Args:
        spec: The small model.
        device: Where it is.
        start: Tensors to start from, by their names in the small model; None draws them from `seed`.
        seed: Of the first weights.
        checkpointed: Recompute each layer's activations in the backward pass, to save memory.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        start: dict[str, Tensor] | None,
        *,
        seed: int = 0,
        checkpointed: bool = False,
    ) -> None:
        super().__init__()
        self.spec, self.checkpointed = spec, checkpointed
        size = (spec.vocab_size, spec.hidden_size)
        names: dict[str, tuple[int, ...]] = {f"{EMBEDDING}.weight": size}
        names |= {} if spec.tied else {f"{HEAD}.weight": size}
        names |= {f"{HEAD}.bias": size[:1]} if spec.head_bias else {}
        if spec.learned_positions:
            names[f"{POSITIONS}.weight"] = (spec.learned_positions, spec.hidden_size)
        self.ends = Parameters(names, device)
        self.layers = nn.ModuleList(TrainedLayer(spec, device, index=index) for index in range(spec.layers))
        self.norm = TrainedNorm(spec, device)
        random = torch.Generator().manual_seed(seed)
        for part in self._parts():
            part.draw(random, norm=0.0 if spec.norm_offset else 1.0)
            if start is not None:
                part.fill(start)

    def forward(
        self,
        packed: Packed,
        states: Tensor | None,
        compare: Compare | None = None,
        accept: Accept | None = None,
    ) -> Tensor:
        ends = self.ends.by_name
        embedding = ends[f"{EMBEDDING}.weight"]
        x = nn.functional.embedding(packed.tokens, embedding)
        if self.spec.embedding_scale is not None:
            x = x * self.spec.embedding_scale
        if self.spec.learned_positions:
            rows = packed.positions + self.spec.position_offset
            x = x + nn.functional.embedding(rows, ends[f"{POSITIONS}.weight"])
        pass_ = PackedPass(self.spec, packed, x.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, pass_, use_reentrant=False) if self.checkpointed else layer(x, pass_)
        head = ends.get(f"{HEAD}.weight", embedding)
        bias = ends.get(f"{HEAD}.bias")
        return _predicted(_head(self.spec, self.norm, head, bias), x[packed.predicting], compare, accept)

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for part in self._parts() for name, value in part.by_name.items()}

    def shards(self) -> list[nn.Module]:
        return list(self.layers)

    def _parts(self) -> list[Parameters]:
        layers = [layer for layer in self.layers if isinstance(layer, Parameters)]
        return [self.ends, *layers, self.norm]


@dataclass(frozen=True, slots=True)
class _Head:
    """The norm and the head of a student, with the parameters among their weights."""

    logits: Callable[[Tensor], Tensor]
    parameters: list[Tensor]


def _head(spec: ModelSpec, norm: TrainedNorm, head: Tensor, bias: Tensor | None) -> _Head:
    decoder = Decoder(spec, head, (), norm.norm(), Linear(head, bias))
    return _Head(decoder.head, [*norm.parameters(), head, *([] if bias is None else [bias])])


def _predicted(head: _Head, x: Tensor, compare: Compare | None, accept: Accept | None) -> Tensor:
    """Return what `Student.forward` does, of states [M, hidden] that leave the last layer."""
    if compare is not None:
        return by_chunks(lambda part, rows: compare(head.logits(part), rows), x, head.parameters)
    logits = head.logits(x)
    return logits if accept is None else accept(logits, slice(None))[:, None]
