"""The frozen target on packed documents: several texts as one run of columns, passes over it, and kept
states.

Layers run as in decoding. Only attention differs: there is no cache, and a column sees its own document
alone. A target with recurrent layers reads one document after the other, as it reads prompts.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.files import replacing
from foredraft.model.attention import rope_tables
from foredraft.model.decoder import Layer, finish, project
from foredraft.model.layers import soft_cap
from foredraft.model.rope import Rope
from foredraft.model.runner import Runner, unserved_because
from foredraft.model.safetensors_file import SafetensorsFile, write_tensors
from foredraft.model.source import ModelSource, source_of
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder, parameter_count


@dataclass(frozen=True, slots=True)
class Document:
    """One text to learn from."""

    ids: tuple[int, ...]  # token ids
    counts: tuple[bool, ...]  # whether the prediction of each token counts; that of the first never does

    @property
    def counted(self) -> int:
        """The tokens whose prediction counts."""
        return sum(self.counts[1:])


@dataclass(frozen=True, slots=True)
class Packed:
    """Documents as one run of N columns."""

    tokens: Tensor  # [N] int64
    lengths: tuple[int, ...]  # tokens of each document, in order
    predicting: Tensor  # the columns whose next token counts, [M] int64, ascending

    @classmethod
    def of(cls, documents: Sequence[Document], device: torch.device) -> Packed:
        """Return the documents, one after the other."""
        tokens = [id for document in documents for id in document.ids]
        # A column predicts the next token of its document; the last one predicts nothing.
        counts = [n for document in documents for n in (*document.counts[1:], False)]
        return cls(
            torch.tensor(tokens, device=device),
            tuple(len(document.ids) for document in documents),
            torch.tensor(counts, device=device).nonzero()[:, 0],
        )

    @property
    def positions(self) -> Tensor:
        """The position of every column in its document, [N]."""
        return torch.cat([torch.arange(length) for length in self.lengths]).to(self.tokens.device)

    def groups(self) -> Iterator[tuple[int, int, slice]]:
        """Yield documents of one length that attend in one call: how many, their length, their columns."""
        start = 0
        for length, group in groupby(self.lengths):
            count = len(list(group))
            yield count, length, slice(start, start := start + count * length)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [N, H, D] with their first channels rotated; cos and sin [N, 1, R]."""
    channels = cos.shape[-1]
    first, rest = x[..., :channels], x[..., channels:]
    first = first * cos + first.roll(channels // 2, -1) * sin
    return first if not rest.shape[-1] else torch.cat([first, rest], -1)


class PackedPass:
    """What all layers of a pass over packed documents share."""

    def __init__(
        self,
        spec: ModelSpec,  # the model
        packed: Packed,  # the documents
        dtype: torch.dtype,  # of the rotary tables
        inputs: Tensor | None = None,  # what layers take of the tokens themselves, [N, layers, I]
        *,
        shift: int = 0,  # added to the position of every column
    ) -> None:
        self.spec, self.packed, self.inputs = spec, packed, inputs
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values of layers that others read
        device, longest = packed.tokens.device, max(packed.lengths) + shift
        tables: Mapping[Rope, Tensor] = rope_tables(spec, longest, device, dtype)
        positions = packed.positions + shift
        self._rotations = {rope: table[positions].chunk(2, 1) for rope, table in tables.items()}

    def run(self, layers: Sequence[Layer], x: Tensor, first: int = 0) -> Tensor:
        """Run layers `first` and on, over states [N, hidden]."""
        for index, layer in enumerate(layers, first):
            qkv = project(self.spec, layer.attending, x, None)
            given = () if layer.input is None or self.inputs is None else (self.inputs[:, index],)
            x = finish(self.spec, layer, x, self._attend(index, qkv), True, None, *given)
        return x

    def _attend(self, index: int, qkv: Tensor) -> Tensor:
        """Return the output of all heads, [N, H * D], of what `project` returned."""
        spec, window = self.spec, self.spec.windows[index]
        heads, kv_heads, dim = spec.heads, spec.kv_heads_of(window), spec.head_dim_of(window)
        rope, rotates = spec.rope_of(window), index not in spec.unrotated
        q, k, v, gates = torch.tensor_split(qkv, (heads, heads + kv_heads, heads + 2 * kv_heads), 1)
        q = self.rotated(q, spec.query_rope or rope) if rotates else q
        if spec.stores(index):
            k = self.rotated(k, rope) if rotates else k
        else:
            k, v = self._held[spec.source_of(index)]
        if index in spec.producers:
            self._held[index] = k, v
        parts = q, k, v
        outputs = []
        for count, length, columns in self.packed.groups():
            q, k, v = (part[columns].view(count, length, -1, dim).transpose(1, 2) for part in parts)
            out = self._attention(q, k, v, window)  # [documents, H, T, D]
            outputs.append(out.transpose(1, 2).reshape(count * length, heads * dim))
        out = torch.cat(outputs)
        return out * torch.sigmoid(gates).flatten(1) if spec.gated_attention else out

    def rotated(self, x: Tensor, rope: Rope) -> Tensor:
        """Return heads [N, H, D] with their first channels rotated."""
        return rotated(x, *self._rotations[rope])

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        spec, length, groups = self.spec, q.shape[2], q.shape[1] // k.shape[1]
        reach = None if window is None or window >= length else window
        seen: Tensor | None = None
        if reach is not None or spec.attention_softcap is not None:
            keys = torch.arange(length, device=q.device)
            seen = keys <= keys[:, None]
            if reach is not None:
                seen &= keys > keys[:, None] - reach
        if seen is None or spec.attention_softcap is None:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, is_causal=seen is None, scale=spec.attention_scale,
                enable_gqa=groups > 1,
            )  # fmt: skip
        k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
        scores = soft_cap(q @ k.transpose(2, 3), spec.attention_softcap, spec.attention_scale)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1, dtype=torch.float32)
        return weights.to(v.dtype) @ v


class Batches:
    """Groups of documents of at most `tokens` tokens, the same in every epoch, each time in another order."""

    def __init__(self, documents: Sequence[Document], tokens: int, seed: int) -> None:
        self.documents, self.tokens, self._seed = documents, tokens, seed
        self.groups: list[list[int]] = []
        self._epoch, self._order = -1, np.empty(0, np.int64)
        room = 0
        for index in np.random.default_rng(seed).permutation(len(documents)).tolist():
            length = len(documents[index].ids)
            if length > room or not self.groups:
                self.groups.append([])
                room = tokens
            self.groups[-1].append(index)
            room -= length
        # Documents of one length attend in one call (`packed`).
        for group in self.groups:
            group.sort(key=lambda index: len(documents[index].ids))

    def __len__(self) -> int:
        return len(self.groups)

    def group_at(self, place: int) -> int:
        """Return which group comes at a place, counted over all epochs."""
        epoch, within = divmod(place, len(self.groups))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self.groups))
        return int(self._order[within])

    def documents_of(self, group: int) -> list[Document]:
        """Return the documents of a group."""
        return [self.documents[index] for index in self.groups[group]]


def hold_out(
    documents: Sequence[Document], share: float, most: int, seed: int
) -> tuple[list[Document], list[Document]]:
    """Split documents into those to learn from and a share that is held out, from 1 to `most`."""
    order = np.random.default_rng([seed, len(documents)]).permutation(len(documents)).tolist()
    count = min(most, max(1, round(share * len(documents))), len(documents) - 1)
    learned, held_out = sorted(order[count:]), order[:count]
    return [documents[index] for index in learned], [documents[index] for index in held_out]


class States(NamedTuple):
    """The target's states on packed documents."""

    aux_states: Tensor | None  # those of the auxiliary layers side by side, [N, layers * hidden]
    last: Tensor  # those that leave the last layer, of the predicting columns alone, [M, hidden]


class FrozenTarget:
    """The model whose next token a student learns."""

    def __init__(self, place: ModelSource | Path, device: torch.device, dtype: torch.dtype) -> None:
        spec = source_of(place).spec
        recurs = bool(spec.recurrent_layers)
        native = recurs and unserved_because(spec, device, dtype) is None
        self.decoder = load_decoder(place, device, dtype, native=native)
        self.spec = self.decoder.spec
        self.reader = Runner(self.decoder, deterministic=False) if recurs else None

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
    def states(self, packed: Packed, aux_layers: Sequence[int]) -> States:
        """Return the states of one forward, in which every layer runs once."""
        if self.reader is not None:
            return self._read(self.reader, packed, aux_layers)
        layers, done = self.decoder.layers, 0
        inputs = self.decoder.layer_inputs(packed.tokens)
        pass_ = PackedPass(self.spec, packed, self.decoder.dtype, inputs)
        x = self.decoder.embed(packed.tokens, packed.positions)
        found: dict[int, Tensor] = {}
        for cut in sorted(set(aux_layers)):
            x = found[cut] = pass_.run(layers[done:cut], x, done)
            done = cut
        aux_states = torch.cat([found[cut] for cut in aux_layers], -1) if aux_layers else None
        return States(aux_states, pass_.run(layers[done:], x, done)[packed.predicting])

    def _read(self, reader: Runner, packed: Packed, aux_layers: Sequence[int]) -> States:
        """Return the states of documents that are read as prompts are."""
        cache, depths = reader.new_cache(1, max(packed.lengths)), (*aux_layers, self.spec.layers)
        aux, last = list[Tensor](), list[Tensor]()
        for document in torch.split(packed.tokens, list(packed.lengths)):
            for start in range(0, len(document), reader.chunk):
                tokens = document[start : start + reader.chunk].tolist()
                found = reader.prefill(cache, 0, tokens, start, aux_layers=depths).aux_states
                *own, leaving = (found[depth][0] for depth in depths)
                aux += [torch.cat(own, -1)] if own else []
                last.append(leaving)
        return States(torch.cat(aux) if aux else None, torch.cat(last)[packed.predicting])

    @torch.no_grad()
    def log_probs(self, last: Tensor) -> Tensor:
        """Return log p, [M, V] float32, of the states that leave the last layer."""
        return self.decoder.head(last).log_softmax(-1)


def step_weights(spec: ModelSpec) -> int:
    """Return the weights that a step of a model reads: all but an embedding that is not the head, too."""
    once = spec.tied or spec.head_copies
    return parameter_count(spec) - (0 if once else spec.vocab_size * spec.hidden_size)


AUX, LAST = "tapped", "last"
SPARE = 2**30  # bytes of the disk that are left to others


class KeptStates:
    """The target's states of groups, kept up to so many bytes; damaged files are computed again."""

    def __init__(self, target: FrozenTarget, layers: tuple[int, ...], folder: Path, most_bytes: int) -> None:
        self.target, self.aux_layers, self.folder, self.most_bytes = target, layers, folder, most_bytes
        if most_bytes:
            folder.mkdir(parents=True, exist_ok=True)
        self.bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if most_bytes else 0
        self.computed = 0  # groups

    def states(self, group: int, packed: Packed) -> States:
        """Return the states of a group."""
        file = self.folder / f"{group}.safetensors"
        if self.most_bytes and file.is_file():
            with suppress(CheckpointError, KeyError), SafetensorsFile(file) as kept:
                device = packed.tokens.device
                found = {name: kept.get_tensor(name).to(device) for name in kept.keys()}  # noqa: SIM118
                aux = found[AUX] if self.aux_layers else None
                fits = aux is None or self._are_states(aux, len(packed.tokens), len(self.aux_layers))
                if fits and self._are_states(found[LAST], len(packed.predicting), 1):
                    return States(aux, found[LAST])
        states = self.target.states(packed, self.aux_layers)
        self.computed += 1
        tensors = {LAST: states.last} | ({} if states.aux_states is None else {AUX: states.aux_states})
        size = sum(tensor.nbytes for tensor in tensors.values())
        room = self.most_bytes and self.bytes + size <= self.most_bytes
        if room and shutil.disk_usage(self.folder).free >= size + SPARE:
            with suppress(OSError), replacing(file) as new:
                write_tensors(new, tensors, {})
                self.bytes += size
        return states

    def _are_states(self, values: Tensor, count: int, layers: int) -> bool:
        """Return whether values of a file can be states of this target, of so many columns and layers."""
        decoder = self.target.decoder
        fits = values.shape == (count, layers * decoder.spec.hidden_size) and values.dtype == decoder.dtype
        return fits and bool(torch.isfinite(values).all())
