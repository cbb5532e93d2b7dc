"""MTP: the layer with which a model was trained to predict further tokens drafts (arXiv:2412.19437).

It reads pairs: a state of the target after the final norm, and the embedding of the token after it. Both are
normed, and `fc` joins them; a layer of the target's form, a norm, and the target's head follow. The normed
output is the state of the next pair, so that EAGLE's drafter runs it (`eagle3.py`).

Its tensors lie among the target's, or in a folder of their own:

    mtp.*                   Qwen 3.5 and later, Qwen3-Next; GGUF files, where they are blk.L.nextn.*
    model.layers.L.*        DeepSeek-V3, GLM: a layer behind the target's L
    model.mtp_layers.0.*    MiMo, whose `fc` has the state before the embedding
    mtp_layers.0.*          speculators
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from foredraft.drafters.eagle3 import Eagle3, Eagle3Head
from foredraft.drafters.head_kinds import head_kind
from foredraft.drafters.heads.layers import PairNorm, packed_product
from foredraft.drafters.heads.record import HeadRecord
from foredraft.drafters.heads.tensors import HeadFiles
from foredraft.errors import CheckpointError
from foredraft.model.checkpoint import Checkpoint, CheckpointTensors, Shapes, weight_headers
from foredraft.model.decoder import Decoder
from foredraft.model.gguf.source import GGUFHead
from foredraft.model.layers import Product, RMSNorm
from foredraft.model.locate import source_at
from foredraft.model.quantisation.codes import Codes
from foredraft.model.quantisation.scheme import Quantisation
from foredraft.model.runner import Runner
from foredraft.model.runner.native.products import NativeCodes
from foredraft.model.source import ModelSource
from foredraft.model.spec import ModelSpec
from foredraft.model.tensor_names import AS_STORED, HEAD, LAST_NORM, LAYERS, Naming
from foredraft.model.weights import JOIN, STATE_NORM, TOKEN_NORM, FurtherLayer, build_further, further_shapes

OWN_LAYER = f"{LAYERS}.0."


@dataclass(frozen=True, slots=True)
class Spelling:
    """The names of such a head's tensors among a checkpoint's."""

    prefix: str  # of all of them, where L stands for the target's layers
    names: Mapping[str, str]  # of what is no part of the layer, by those of `build_further`
    layer: str = ""  # behind the prefix, before the layer's own names
    states_first: bool = False  # `fc` has the state before the embedding

    def stored(self, name: str, layers: int) -> str:
        """Return the stored name of a tensor, for a target with so many layers."""
        prefix, (module, _, kind) = self.prefix.replace("L", str(layers)), name.rpartition(".")
        if name.startswith(OWN_LAYER):
            return f"{prefix}{self.layer}{name.removeprefix(OWN_LAYER)}"
        return f"{prefix}{self.names[module]}.{kind}"


def _spelling(prefix: str, names: str, layer: str = "", **more: bool) -> Spelling:
    ours = JOIN, TOKEN_NORM, STATE_NORM, LAST_NORM, HEAD
    return Spelling(prefix, dict(zip(ours, names.split(), strict=True)), layer, **more)


MIMO = "input_proj token_layernorm hidden_layernorm final_layernorm lm_head"
SPELLINGS = {
    "Qwen": _spelling("mtp.", "fc pre_fc_norm_embedding pre_fc_norm_hidden norm lm_head", "layers.0."),
    "DeepSeek": _spelling("model.layers.L.", "eh_proj enorm hnorm shared_head.norm shared_head.head"),
    "MiMo": _spelling("model.mtp_layers.0.", MIMO, states_first=True),
    "speculators": _spelling("mtp_layers.0.", MIMO),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPRecord(HeadRecord):
    states_first: bool = False  # `fc` has the state before the embedding
    folded_norms: bool = False  # weights of norms are stored with the 1 added that the family adds

    @property
    def misread(self) -> tuple[str, ...]:
        folded = ("folded_norms",) if self.spec.norm_offset else ()
        return ("final_norm", "norm_output", "states_first", *folded)


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPFiles(HeadFiles[MTPRecord]):
    place: ModelSource  # holds it
    quantisation: Quantisation | None  # of its weights
    naming: Naming  # of the checkpoint's tensors
    names: Mapping[str, str]  # of a tensor -> its name there
    bits: int | None  # of the codes that weights become; None leaves them as they are


class _Tensors(CheckpointTensors):
    """The tensors of a head by the names of `build_further`."""

    def __init__(self, files: MTPFiles, stack: ExitStack, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(files.place, stack, device, dtype, files.quantisation, files.naming)
        self.names = files.names

    def load(self, shapes: Shapes) -> Tensor:
        return super().load(self._stored(shapes))

    def load_temporary(self, shapes: Shapes) -> Tensor:
        return super().load_temporary(self._stored(shapes))

    def codes(self, shapes: Shapes) -> Iterator[Codes] | None:
        return super().codes(self._stored(shapes))

    def _stored(self, shapes: Shapes) -> Shapes:
        return {self.names[name]: shape for name, shape in shapes.items()}


def files_in(source: ModelSource, target: Checkpoint) -> MTPFiles | None:
    """Return the head among the tensors of a source; None where it has none."""
    own = source == target.source
    spec = target.spec if own else _spec_of(source)
    naming = AS_STORED if spec is None else spec.naming
    headers, layers = weight_headers(source, naming), target.spec.layers
    found = _found(headers, layers)
    if found is None:
        return None
    format, spelling = found
    layer = further_spec(target.spec, None if spec is None else spec.quantisation)
    needed = further_shapes(layer)
    names = {name: spelling.stored(name, layers) for name in needed}
    record = MTPRecord(
        spec=layer, format=format, layer="layers.0", aux_layers=None, target_size=layer.hidden_size,
        draft_vocab_size=layer.vocab_size, pair_fc=True, final_norm=True, norm_output=True, own_head=False,
        states_first=spelling.states_first,
    )  # fmt: skip
    return MTPFiles(
        source.path, record, needed, place=source, quantisation=layer.quantisation, naming=naming,
        names=names, bits=target.bits,
    )  # fmt: skip


def files_at(place: Path, target: Checkpoint) -> MTPFiles:
    """Return the head in a place, which may be the target's own."""
    source = target.source.base if place == target.source.path else _source_at(place)
    files = files_in(source, target)
    if files is None:
        problem = f"{place} has no tensors that predict further tokens of this model"
        raise CheckpointError(problem, remedy="give a head of this model")
    return files


def _source_at(place: Path) -> ModelSource:
    if place.is_file() and head_kind(place) == MTP.name:
        return GGUFHead(place)
    return source_at(place)


def _found(names: Collection[str], layers: int) -> tuple[str, Spelling] | None:
    """Return how a checkpoint spells the head that it has; norms are there in any format of weights."""
    norm = f"{STATE_NORM}.weight"
    return next((each for each in SPELLINGS.items() if each[1].stored(norm, layers) in names), None)


def _spec_of(source: ModelSource) -> ModelSpec | None:
    """Return the spec of a source beside the target; None where it has no config of a model that runs."""
    try:
        return source.spec
    except CheckpointError:
        return None


def further_spec(target: ModelSpec, quantisation: Quantisation | None) -> ModelSpec:
    """Return the form of the layer that predicts further tokens: a whole one of the target that attends."""
    return replace(
        target.plain_layer(), gated_attention=target.gated_attention, gates_apart=target.gates_apart,
        quantisation=quantisation,
    )  # fmt: skip


def load_mtp(files: MTPFiles, target: Runner) -> Eagle3Head:
    """Read the weights of a head, in the target's dtype."""
    decoder, record = target.decoder, files.record
    spec = replace(
        record.spec, norm_offset=record.spec.norm_offset and not record.folded_norms,
        norm_float32=record.spec.norm_float32 or record.folded_norms,
    )  # fmt: skip
    with ExitStack() as stack:
        tensors = _Tensors(files, stack, decoder.device, decoder.dtype)
        parts = build_further(spec, tensors, target.by_kernels, files.bits)
    if record.states_first:
        parts = replace(parts, join=_turned(parts.join, target))
    head = head_of(record, decoder, parts, decoder.output)
    return head.by_kernels() if target.by_kernels else head


def head_of(record: MTPRecord, target: Decoder, parts: FurtherLayer, output: Product) -> Eagle3Head:
    """Return the head of these parts, which EAGLE's drafter runs."""
    token_norm, state_norm, norm = (
        cast(RMSNorm, norm) for norm in (parts.token_norm, parts.state_norm, parts.norm)
    )
    return Eagle3Head(
        record=record, target=target, aux_norms=(), fc=parts.join, layers=(parts.layer,), norm=norm,
        output=output, draft_vocab=None, embedding=None, pair_norm=PairNorm(token_norm, state_norm),
    )  # fmt: skip


def read_values(files: MTPFiles) -> dict[str, Tensor]:
    """Return the weights as a Qwen has them, by the names of `build_further`, in float32."""
    record = files.record
    with ExitStack() as stack:
        tensors = _Tensors(files, stack, torch.device("cpu"), torch.float32)
        found = {name: tensors.load({name: shape}) for name, shape in files.shapes.items()}
    if record.states_first:
        found[f"{JOIN}.weight"] = found[f"{JOIN}.weight"].roll(record.spec.hidden_size, 1)
    return {
        name: value - 1 if record.folded_norms and value.dim() == 1 else value
        for name, value in found.items()
    }


def stored_values(
    values: Mapping[str, Tensor], dtype: torch.dtype, format: str = "Qwen", layers: int = 0
) -> dict[str, Tensor]:
    """Return weights that `read_values` gave, or that were trained, as a format has them."""
    spelling, join = SPELLINGS[format], f"{JOIN}.weight"
    if spelling.states_first:
        values = {**values, join: values[join].roll(values[join].shape[1] // 2, 1)}
    return {spelling.stored(name, layers): value.to(dtype) for name, value in values.items()}


def _turned(join: Product, target: Runner) -> Product:
    """Return `fc` for an embedding before the state, of one for a state before the embedding."""
    half = join.shape[1] // 2
    if isinstance(join, NativeCodes):
        columns = torch.arange(2 * half, dtype=torch.int32) if join.order is None else join.order
        return replace(join, order=(columns + half) % (2 * half))
    return packed_product(target, join.dense().roll(half, 1))


class MTP(Eagle3):
    """An autoregressive drafter over the layer with which the target predicts further tokens."""

    name = "mtp"
    load: Any = staticmethod(load_mtp)

    @classmethod
    def files_for(cls, place: Path, target: Checkpoint) -> HeadFiles[Any]:
        return files_at(place, target)
