"""Kangaroo: the target's first layers and a trained adapter draft (Liu et al. 2024, arXiv:2404.18911).

An adapter turns the states that enter layer `depth` into the next token: one layer of the form of the
target's family, with or without an MLP, then a norm, then the target's head. A reduced head has rows for some
tokens alone; q is 0 for the others. An adapter is for one target, identified by `target_hash`.

A draft step runs the target's layers below `depth` on the target's own cache, then the adapter's layer on a
cache of its own, then norm and head. The states that enter layer `depth` are those of the verifying pass, to
the bit, so it resumes from them. The adapter reads committed positions from the target's own states: the
first layers never run on them again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from foredraft.decode.drafter import DraftPass
from foredraft.decode.sequence import Sequence
from foredraft.drafters.asset import ADAPTER_KINDS, WITH_MLP, Found, any_kept, hash_of_base, say_made_for_base
from foredraft.drafters.heads.record import map_of, target_rows
from foredraft.drafters.states import KnownStates, WaitingReader, WaitingStates, by_row
from foredraft.drafters.strict_records import MEASURED, Bound, Count, StrictRecord
from foredraft.errors import CheckpointError, ConfigError, shortened
from foredraft.files import replacing_folder
from foredraft.model.cache import KVCache
from foredraft.model.checkpoint import Checkpoint, first_values, identity
from foredraft.model.config import DOWNLOAD_AGAIN
from foredraft.model.decoder import Decoder, Layer
from foredraft.model.layers import Norm, Product
from foredraft.model.runner import DraftInputs, DraftVocab, FusedDraft, Resume, Runner
from foredraft.model.runner.compiled import pack
from foredraft.model.runner.native.products import pack_native
from foredraft.model.safetensors_file import SafetensorsFile
from foredraft.model.source import ModelSource, source_of
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import layer_parameters, load_layer
from foredraft.user_cache import cache_folder, check_file, check_folder, read_private, shut

FORMAT = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
VOCABULARY = "draft_vocabulary"  # the tensor of the ids that a reduced head has a row for, [n] int64
REMEDY = "give a folder that `foredraft train adapter` wrote"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What an adapter is, and how it was trained."""

    model: str  # name of the target, for display
    target_hash: str  # hash of the target
    layers: Count  # layers of the target
    depth: Count  # layers of the target that run below the adapter
    kind: str  # one of `ADAPTER_KINDS`
    draft_vocabulary: int | None = None  # token ids that it can draft; None is all
    max_draft: Count  # draft length that was best in the validation
    alpha: float  # α in the validation (docs/architecture.md, "Words")
    tau: float  # τ in the validation, at `max_draft`
    predicted: float  # speed-up that the validation predicts
    temperature: float  # temperature of these figures
    loss: str  # the loss
    steps: Count  # steps of training
    tokens: Count  # tokens that were trained on, each as often as it was
    date: str  # date, YYYY-MM-DD
    foredraft: str  # version of Foredraft that wrote the file
    format: Count = FORMAT  # version of the file format

    def __str__(self) -> str:
        head = "" if self.draft_vocabulary is None else f" and {self.draft_vocabulary} tokens"
        return f"{self.kind} after layer {self.depth}{head}, trained on {self.date}"


def check_made_for(config: AdapterConfig, target: Checkpoint) -> None:
    """Raise ConfigError if an adapter is neither for a target nor for that one without its LoRAs."""
    if config.target_hash == hash_of_base(target.source, target_hash):
        say_made_for_base(f"the adapter of {shortened(config.model)}")
    elif config.target_hash != target_hash(target.source):
        raise ConfigError(
            f"was trained for {shortened(config.model)}, which has other weights than {target.source.shown}",
            option="adapter", remedy="train one with `foredraft train adapter`",
        )  # fmt: skip


MAX_STEPS = 10**12  # far above any that is of use
BOUNDS: dict[str, Bound] = MEASURED | {
    "kind": (ADAPTER_KINDS.__contains__, " or ".join(ADAPTER_KINDS)),
    "draft_vocabulary": (lambda size: size is None or size >= 1, "1 or more, or null"),
    "steps": (lambda steps: steps <= MAX_STEPS, f"{MAX_STEPS} or less"),
}


def read_adapter(folder: Path, *, read: Callable[[Path], bytes] = Path.read_bytes) -> AdapterConfig:
    record = StrictRecord("adapter", REMEDY, "train a new one with `foredraft train adapter`", BOUNDS)
    found = record.read(AdapterConfig, folder / CONFIG, read)
    if found.depth >= found.layers:
        problem = f"whose depth is {found.depth}, but its target has {found.layers} layers"
        raise record.refused(folder / CONFIG, problem)
    return found


def write_adapter(folder: Path, config: AdapterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write an adapter's folder; an existing one is replaced, and kept where writing fails."""
    with replacing_folder(folder) as new:
        (new / WEIGHTS).write_bytes(save(dict(tensors)))  # save_file writes for this user alone
        (new / CONFIG).write_text(json.dumps(asdict(config), indent=1, allow_nan=False) + "\n")
        if folder.parent == cache_folder("adapters"):
            shut(new)


def adapter_place(hash: str) -> Path | None:
    """Return the folder of a target's adapter in the cache folder, there or not yet; None without a cache."""
    folder = cache_folder("adapters")
    return None if folder is None else folder / hash


def kept_adapter(source: ModelSource) -> Path | None:
    """Return the adapter that is kept for a target, or for that one without its LoRAs, if any."""
    if not any_kept("adapters"):
        return None
    found = find_adapter(target_hash(source))
    if found is None and (base := hash_of_base(source, target_hash)) is not None:
        found = find_adapter(base)
    return found


def find_adapter(hash: str) -> Path | None:
    """Return the adapter's folder in the cache folder for the target with this hash; None without one."""
    place = adapter_place(hash)
    if place is None or not os.path.lexists(place):
        return None

    def read(config: Path) -> bytes:
        """Return the content of its `config.json`, after both files were checked."""
        folder = check_folder(config.parent)
        if (folder / WEIGHTS).exists():  # else the reader of the weights reports what is missing
            check_file(folder / WEIGHTS)
        return read_private(folder / config.name)

    read_adapter(place, read=read)
    return place


def target_hash(place: ModelSource | Path) -> str:
    """Return the hash of a model's config.json, LoRAs and tensors, whose first rows tuning moves."""
    digest = hashlib.sha256(json.dumps(identity(place), sort_keys=True).encode())
    for name, values in first_values(source_of(place).base):
        digest.update(name.encode() + values)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Adapter:
    depth: int  # layers of the target that run below it
    layer: Layer  # its layer
    norm: Norm  # the norm after it
    vocabulary: Tensor | None = None  # ids of a reduced head, ascending, [n]; None: the target's head
    planned: int | None = None  # draft length that was best in the validation, if known

    def over(self, target: Runner) -> Runner:
        """Return a runner of the target's first `depth` layers with the adapter on top."""
        whole = target.decoder
        below, depth = whole.spec.first(self.depth), self.depth
        sources = (*below.sources, depth) if below.sources else ()
        spec = replace(below, layers=depth + 1, windows=(*below.windows, None), sources=sources)
        head: Product = whole.output
        if self.vocabulary is not None:
            spec = replace(spec, vocab_size=len(self.vocabulary))
            bias = None if head.bias is None else head.bias[self.vocabulary]
            rows = target_rows(whole, self.vocabulary)
            head = pack_native(rows, bias) if target.by_kernels else pack(rows, bias)
        layers = (*whole.layers[: self.depth], self.layer)
        parts = whole.learned_positions, whole.inputs
        decoder = Decoder(spec, whole.embedding, layers, self.norm, head, *parts)
        return Runner(decoder, shapes=target.shapes, compile=target.compiled)


def adapter_spec(target: ModelSpec) -> ModelSpec:
    """Return the spec of an adapter's layer alone: the target's, with full attention and unquantised."""
    return replace(target.plain_layer(), gated_attention=target.gated_attention, quantisation=None)


def load_adapter(folder: Path, config: AdapterConfig, target: Runner) -> Adapter:
    decoder = target.decoder
    layer, norm = load_layer(
        folder, adapter_spec(decoder.spec), decoder.device, decoder.dtype,
        mlp=config.kind == WITH_MLP, native=target.by_kernels,
        besides=() if config.draft_vocabulary is None else (VOCABULARY,),
    )  # fmt: skip
    count, vocabulary, file = config.draft_vocabulary, None, folder / WEIGHTS
    if count is not None:
        size = decoder.spec.vocab_size
        with SafetensorsFile(file) as opened:
            if VOCABULARY not in opened.tensors:
                raise CheckpointError(f"{file} lacks {VOCABULARY}", remedy=DOWNLOAD_AGAIN)
            ids = opened.get_tensor(VOCABULARY)
        listed = ids.tolist() if ids.dtype == torch.int64 and ids.dim() == 1 else []
        rising = len(listed) == count and listed == sorted(set(listed))
        if not rising or not 0 <= min(listed) <= max(listed) < size:
            ascending = f"{count} different token ids below {size} in ascending order"
            problem = f"{file}: {VOCABULARY} does not hold {ascending}"
            raise CheckpointError(problem, remedy=DOWNLOAD_AGAIN)
        vocabulary = ids.to(decoder.device, copy=True)
    return Adapter(config.depth, layer, norm, vocabulary, config.max_draft)


class Kangaroo(WaitingReader):
    name = "kangaroo"

    def __init__(self, target: Runner, cache: KVCache, adapter: Adapter) -> None:
        depth = adapter.depth
        super().__init__((depth,))
        self.adapter, self.planned = adapter, adapter.planned
        runner = adapter.over(target)
        runner.reserve_positions(cache.stored)
        self.cache = cache.aligned(adapter_spec(target.decoder.spec), blocked=cache.blocked)
        self.caches, self.own = (cache, self.cache), (self.cache,)
        self.draft_pass = DraftPass(runner, exit=depth)
        ids, size = adapter.vocabulary, target.decoder.spec.vocab_size
        self.vocabulary = map_of(ids, target.decoder)
        self.draft_vocab = None if ids is None else DraftVocab(ids, size)
        self._layers = cache.joined(depth, self.cache)
        self._known = KnownStates(depth)
        self._stepped: dict[int, int] = {}  # row -> positions in the adapter's cache after this round's steps

    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        self.read_waiting(lambda sequence: not idle[sequence.row])
        forward = self.draft_pass(self._layers, tokens, starts, idle=idle)
        self._known.add(forward.aux_states[self.adapter.depth], [not each for each in idle])
        self._stepped |= {row: start + 1 for row, start in enumerate(starts) if not idle[row]}
        assert forward.logits is not None
        return self.over_target(forward.logits[:, 0])

    def fused_draft(self, inputs: DraftInputs) -> FusedDraft | None:
        lengths, inputs = inputs.lengths, replace(inputs, draft_vocab=self.draft_vocab)
        self.read_waiting(lambda sequence: bool(lengths[sequence.row]))
        draft = self.draft_pass.fused(self._layers, inputs)
        if draft is not None:
            self._known.add_fused(draft, lengths)
            steps = enumerate(zip(inputs.starts, lengths, strict=True))
            self._stepped |= {row: start + length for row, (start, length) in steps if length}
        return draft

    def resume(self) -> Resume | None:
        return self._known.take()

    def observe(self, sequence: Sequence, start: int, states: Mapping[int, Tensor]) -> None:
        """Note what the adapter lacks of the committed positions: its steps have read some of them."""
        new = states[self.adapter.depth]
        stop = start + len(new)
        read = min(self._stepped.pop(sequence.row, start), stop)
        if read > start:
            self.cache.lengths[sequence.row] = read
        if read < stop:
            super().observe(sequence, read, {self.adapter.depth: new[read - start :]})

    def end_draft(self) -> None:
        self._known.forget()

    def rewind(self, sequence: Sequence) -> None:
        super().rewind(sequence)
        self._stepped.pop(sequence.row, None)

    def leave(self, sequence: Sequence) -> None:
        super().leave(sequence)
        self._stepped.pop(sequence.row, None)

    def read_states(self, waiting: list[WaitingStates]) -> None:
        """Run the adapter's layer on waiting states, for its keys and values: one pass for all rows."""
        first, rows = by_row(waiting)
        counts = [0 if each is None else len(each.states) for each in rows]
        like, width = waiting[0].states, max(counts)
        hidden = like.new_zeros(len(rows), width, like.shape[1])
        for at, each in enumerate(rows):
            if each is not None:
                hidden[at, : counts[at]] = each.states
        self.draft_pass.runner.forward(
            self._layers, torch.zeros(len(rows), width, dtype=torch.int64, device=like.device),
            [0 if each is None else each.start for each in rows], first_row=first,
            idle=[each is None for each in rows], counts=counts,
            resume=Resume(self.adapter.depth, hidden, counts), want_logits=False, invariant=False,
        )  # fmt: skip
        for each in waiting:
            self.cache.lengths[each.sequence.row] = each.stop


def found(folder: Path, config: AdapterConfig, target: Checkpoint, about: str) -> Found:
    """Return an adapter that was found for a target."""
    head = 0 if config.draft_vocabulary is None else config.draft_vocabulary * target.spec.hidden_size
    weights = layer_parameters(adapter_spec(target.spec), mlp=config.kind == WITH_MLP) + head
    return Found(
        bytes=weights * target.dtype.itemsize, planned=config.max_draft, about=about,
        specs=(adapter_spec(target.spec),), dtype=target.dtype,
        build=lambda parts: Kangaroo(
            parts.target, parts.cache, load_adapter(folder, config, parts.target)
        ),
    )  # fmt: skip
