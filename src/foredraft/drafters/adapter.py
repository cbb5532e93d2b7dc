"""Adapter: a trained layer that turns the target's states at a depth into its next token.

Kangaroo (Liu et al. 2024, arXiv:2404.18911). The states that enter layer `depth` of the target go through one
layer of attention, with or without an MLP, then through a norm of the adapter's own, then through the
target's frozen head. The layer has the form of the target's family: its norms, biases, soft-caps, rotation.

A reduced head has rows for some tokens alone, because the head is most of what a draft costs. q is zero for
the others, which stays lossless (EAGLE-3, Li et al. 2025, arXiv:2503.01840, drafts so).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from foredraft.drafters.adapter_files import VOCABULARY, WEIGHTS, AdapterConfig
from foredraft.drafters.adapter_kinds import WITH_MLP
from foredraft.errors import CheckpointError
from foredraft.model.config import DOWNLOAD_AGAIN
from foredraft.model.decoder import Decoder, Layer
from foredraft.model.layers import Norm, Product
from foredraft.model.runner import Runner
from foredraft.model.runner.native import is_native, pack_native
from foredraft.model.runner.packed import pack
from foredraft.model.safetensors_file import SafetensorsFile
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import layer_parameters, load_layer

__all__ = ["Adapter", "adapter_bytes", "adapter_spec", "load_adapter"]


@dataclass(frozen=True, slots=True)
class Adapter:
    """The weights of an adapter.

    Attributes:
        depth: Layers of the target that run below it.
        layer: Its layer.
        norm: The norm after it.
        vocabulary: The token ids of a reduced head, ascending; None: the head is the target's.
        planned: Draft length that was best in the validation, in tokens; None where it is not known.
    """

    depth: int
    layer: Layer
    norm: Norm
    vocabulary: tuple[int, ...] | None = None
    planned: int | None = None

    def over(self, target: Runner) -> Runner:
        """Return a runner of the target's first `depth` layers with the adapter on top.

        It shares the target's weights and shapes.
        """
        whole, native = target.decoder, target.by_kernels
        below, depth = whole.spec.first(self.depth), self.depth
        sources = (*below.sources, depth) if below.sources else ()
        spec = replace(below, layers=depth + 1, windows=(*below.windows, None), sources=sources)
        head: Product = whole.output
        if self.vocabulary is not None:
            spec = replace(spec, vocab_size=len(self.vocabulary))
            ids = torch.tensor(self.vocabulary, device=whole.device)
            if is_native(head):
                rows = head.rows(ids)
            elif spec.tied:  # a head that oneDNN packs is copied to be read
                rows = whole.embedding_rows(ids)
            else:
                rows = head.dense()[ids]
            bias = None if head.bias is None else head.bias[ids]
            head = pack_native(rows, bias) if native else pack(rows, bias)
        layers = (*whole.layers[: self.depth], self.layer)
        parts = whole.learned_positions, whole.inputs
        decoder = Decoder(spec, whole.embedding, layers, self.norm, head, *parts)
        return Runner(decoder, shapes=target.shapes, compile=target.compiled)


def adapter_spec(target: ModelSpec) -> ModelSpec:
    """Return the spec of an adapter's layer alone: full attention, rotated, and otherwise the target's form.

    An adapter's own weights are never quantised.
    """
    return replace(target.plain_layer(), quantisation=None)


def adapter_bytes(config: AdapterConfig, target: ModelSpec, dtype: torch.dtype) -> int:
    """Return the memory of an adapter's weights, those of a reduced head included."""
    head = 0 if config.draft_vocabulary is None else config.draft_vocabulary * target.hidden_size
    return (layer_parameters(adapter_spec(target), mlp=config.kind == WITH_MLP) + head) * dtype.itemsize


def load_adapter(folder: Path, config: AdapterConfig, target: Runner) -> Adapter:
    """Load an adapter that `config` describes, in the target's dtype.

    Raises:
        CheckpointError: The weights are broken, or are not those of the config.
    """
    decoder = target.decoder
    layer, norm = load_layer(
        folder, adapter_spec(decoder.spec), decoder.device, decoder.dtype,
        mlp=config.kind == WITH_MLP, native=target.by_kernels,
        besides=() if config.draft_vocabulary is None else (VOCABULARY,),
    )  # fmt: skip
    vocabulary = None
    if config.draft_vocabulary is not None:
        vocabulary = _vocabulary(folder / WEIGHTS, config.draft_vocabulary, decoder.spec.vocab_size)
    return Adapter(config.depth, layer, norm, vocabulary, config.max_draft)


def _vocabulary(file: Path, count: int, size: int) -> tuple[int, ...]:
    """Return the ids of a reduced head.

    Args:
        file: Holds them.
        count: How many there have to be.
        size: Of the target's vocabulary.
    """
    with SafetensorsFile(file) as opened:
        if VOCABULARY not in opened.tensors:
            raise CheckpointError(f"{file} lacks {VOCABULARY}", remedy=DOWNLOAD_AGAIN)
        ids = opened.get_tensor(VOCABULARY)
    listed = ids.tolist() if ids.dtype == torch.int64 and ids.dim() == 1 else []
    if len(listed) != count or listed != sorted(set(listed)) or not 0 <= min(listed) <= max(listed) < size:
        raise CheckpointError(
            f"{file}: {VOCABULARY} does not hold {count} different token ids below {size} in ascending order",
            remedy=DOWNLOAD_AGAIN,
        )
    return tuple(listed)
