"""Students: what is trained. One class for each kind of drafter; the loop knows none of them.

A student reads packed documents, and the target's states where it asks for them, and gives the logits of its
predictions. It starts from weights of the target, and is written under the names of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from foredraft.drafters.adapter import adapter_spec
from foredraft.drafters.adapter_files import VOCABULARY
from foredraft.model.checkpoint import EMBEDDING, HEAD
from foredraft.model.decoder import Decoder
from foredraft.model.layers import Linear
from foredraft.model.spec import ModelSpec
from foredraft.train.chunks import Compare, by_chunks
from foredraft.train.packed_documents import Packed, PackedPass
from foredraft.train.parameters import Parameters, TrainedLayer, TrainedNorm

__all__ = ["AdapterStudent", "DraftStudent", "Student"]


class Student(nn.Module):
    """Base class of what is trained.

    Attributes:
        depth: The depth at which it reads the target's states; None: it reads tokens alone.
        vocabulary: The token ids that it has logits for, [n] int64; None is all.
    """

    depth: int | None = None
    vocabulary: Tensor | None = None

    def forward(self, packed: Packed, states: Tensor | None, compare: Compare | None = None) -> Tensor:
        """Return the logits of the predictions, or what comparing them gives.

        Args:
            packed: The documents.
            states: The target's states that enter layer `depth`, [N, hidden].
            compare: Compares the logits of some predictions; None returns the logits of all.

        Returns:
            The logits [M, V] float32, of the columns `packed.predicting`; or the sums of `compare`, [2].
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
    """

    depth: int

    def __init__(
        self,
        target: ModelSpec,
        head: Tensor,
        start: dict[str, Tensor],
        depth: int,
        *,
        mlp: bool,
        vocabulary: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.depth, self.spec = depth, adapter_spec(target)
        device = head.device
        self.layer = TrainedLayer(self.spec, device, mlp=mlp)
        self.norm = TrainedNorm(self.spec, device)
        if vocabulary is not None:
            self.vocabulary = torch.tensor(vocabulary, device=device)
            head = head[self.vocabulary]
        self.head = head
        for part in (self.layer, self.norm):
            part.fill(start)

    def forward(self, packed: Packed, states: Tensor | None, compare: Compare | None = None) -> Tensor:
        assert states is not None
        x = self.layer(states, PackedPass(self.spec, packed, states.dtype))
        return _predicted(self.spec, self.norm, self.head, x[packed.predicting], compare)

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
        names = {f"{EMBEDDING}.weight": size} | ({} if spec.tied else {f"{HEAD}.weight": size})
        self.ends = Parameters(names, device)
        self.layers = nn.ModuleList(TrainedLayer(spec, device, index=index) for index in range(spec.layers))
        self.norm = TrainedNorm(spec, device)
        random = torch.Generator().manual_seed(seed)
        for part in self._parts():
            part.draw(random, norm=0.0 if spec.norm_offset else 1.0)
            if start is not None:
                part.fill(start)

    def forward(self, packed: Packed, states: Tensor | None, compare: Compare | None = None) -> Tensor:
        ends = self.ends.by_name
        embedding = ends[f"{EMBEDDING}.weight"]
        x = nn.functional.embedding(packed.tokens, embedding)
        if self.spec.embedding_scale is not None:
            x = x * self.spec.embedding_scale
        pass_ = PackedPass(self.spec, packed, x.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, pass_, use_reentrant=False) if self.checkpointed else layer(x, pass_)
        head = ends.get(f"{HEAD}.weight", embedding)
        return _predicted(self.spec, self.norm, head, x[packed.predicting], compare)

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for part in self._parts() for name, value in part.by_name.items()}

    def shards(self) -> list[nn.Module]:
        return list(self.layers)

    def _parts(self) -> list[Parameters]:
        layers = [layer for layer in self.layers if isinstance(layer, Parameters)]
        return [self.ends, *layers, self.norm]


def _predicted(
    spec: ModelSpec, norm: TrainedNorm, head: Tensor, x: Tensor, compare: Compare | None
) -> Tensor:
    """Return what `Student.forward` does, of states [M, hidden] that leave the last layer."""

    def logits(x: Tensor) -> Tensor:
        return Decoder(spec, head, (), norm.norm(), Linear(head)).head(x)

    if compare is None:
        return logits(x)
    return by_chunks(lambda part, rows: compare(logits(part), rows), x, [*norm.parameters(), head])
