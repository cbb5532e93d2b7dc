"""Inspection: what `load` would make of a model here, found out without loading its weights.

What `load` refuses is refused here by the same code. Of a hub id only the small files are downloaded, or the
GGUF file; tensors are checked where the weights are here. Too little memory is part of the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foredraft.drafters.draft_model import same_vocabulary
from foredraft.errors import ConfigError, Option, join_text, python_spelling
from foredraft.kernels.compilation import describe_level
from foredraft.kinds.load_options import Progress
from foredraft.kinds.tables import DRAFTERS
from foredraft.loading import options_for
from foredraft.loading.capacity import CacheLimits, Capacity, weight_memory
from foredraft.loading.checkpoints import ChosenDrafting, choose_drafting, find_target
from foredraft.loading.machine_limits import choose_threads, free_memory
from foredraft.loading.runners import check_dtype, describe_operators, find_device
from foredraft.model.cache import KVCache
from foredraft.model.checkpoint import Checkpoint
from foredraft.model.memory import dtype_name
from foredraft.model.quantisation.codes import BITS
from foredraft.model.recurrent import recurrent_bytes, snapshot_bytes
from foredraft.model.runner import unserved_because
from foredraft.model.source import weights_to_come
from foredraft.model.weights import expanded_bytes, load_decoder, parameter_count

CACHED_TOKENS = 1000  # tokens that the figures of the KV cache are for


@dataclass(frozen=True, slots=True)
class LoraInfo:
    name: str  # its folder or hub id as given
    ranks: tuple[int, ...]  # the ranks of its changes, from the least
    alphas: tuple[float, ...]  # their α, from the least
    scaled_by: str  # what α is divided by: "r" or "sqrt(r)"
    modules: Mapping[str, int]  # how many modules it changes, by the last part of their names
    replaced: int  # how many tensors it replaces
    base: str | None  # the model that it was trained for, as it says; None where it does not


@dataclass(frozen=True, slots=True)
class ModelInfo:
    role: str  # "target" or "draft"
    name: str | None  # the folder or hub id as given; None for a demo model
    folder: str  # its local folder or GGUF file
    architecture: str  # its architecture, as config.json names it
    parameters: int  # number of weights; a tied head counts once
    layers: int
    hidden_size: int
    vocab_size: int  # number of token ids
    max_positions: int  # the model's own limit on the tokens of a sequence
    dtype: str  # the dtype that it would run in
    quantisation: str | None  # how its weights are stored; None if they are not quantised
    tokenizer: bool  # it has a tokenizer
    weights_checked: bool  # its tensors; False for a hub id whose weights are not downloaded
    # bits of a weight -> bytes of all weights on this device, with the copies that the products need. Of a
    # quantised model, 32 and 16 are the bits of the dtype. Of a target that is not quantised, 8 and 4 are
    # there where option weights saves memory
    weight_bytes: Mapping[int, int]
    larger_bytes: Mapping[int, int]  # the same for the bits with which it would save none
    expanded_bytes: Mapping[str, int]  # of formats whose weights are expanded to the dtype
    cache_bytes: int  # bytes of the keys and values of `CACHED_TOKENS` tokens
    state_bytes: int  # bytes of the states and logs of recurrent layers, for each text of any length
    snapshot_bytes: int  # bytes of a copy of the states, from which later texts or samples go on
    loras: tuple[LoraInfo, ...] = ()  # the LoRAs that are merged into it


@dataclass(frozen=True, slots=True)
class PairInfo:
    drafter: str  # the drafter that uses it
    same_tokenizer: bool  # both models have one tokenizer; vocabularies may still differ in size
    parameter_ratio: float  # parameters of the target ÷ those of the draft model


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    name: str
    at_hand: bool  # `load` would make it
    note: str | None = None  # the asset that it uses, or what it lacks; None where neither applies


@dataclass(frozen=True, slots=True)
class Context:
    """How long sequences may be in the memory that is free now."""

    longest: int | None  # positions of the longest single sequence; None where the weights do not fit
    rows: int | None = None  # of the default batch of `load`; None where it would refuse
    positions: int | None = None  # positions of each of them
    refusal: str | None = None  # why `load` would refuse; None where it would not


@dataclass(frozen=True, slots=True)
class ThreadsInfo:
    number: int  # of CPU threads that would compute
    why: str  # in one line


@dataclass(frozen=True, slots=True)
class Inspection:
    """What `load` would make of the models."""

    device: str  # the device that they would run on
    free_bytes: int  # its free memory
    models: tuple[ModelInfo, ...]  # the target and, where there is one, the draft model
    pair: PairInfo | None  # how they fit together; None without a draft model
    drafters: tuple[DrafterInfo, ...]  # every drafter
    context: Context  # how long sequences may be
    threads: ThreadsInfo  # how many CPU threads would compute
    kernels: str | None  # which level of the kernels would run the target, or why none would; None on a GPU

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return asdict(self)


def inspect_models(
    path: str | Path | None = None,
    *,
    progress: Progress | None = None,
    spelling: Callable[[Option], str] = python_spelling,
    **options: Any,
) -> Inspection:
    """Return what `load` would make of a model, without loading its weights."""
    given = options_for(path, **options, progress=progress)
    threads = choose_threads(given.threads)
    device = find_device(given.device)
    target = find_target(given, weights=False)
    weights_here = _check(target, device)
    drafting = choose_drafting(given, target, device, fetch=False, weights_here=weights_here)
    checked = [weights_here, *(_check(model, device) for model in drafting.models)]
    names = (path, options.get("draft"))
    models = tuple(
        _model_info(role, name, checkpoint, device, is_checked)
        for role, name, checkpoint, is_checked in zip(
            ("target", "draft"), names, (target, *drafting.models), checked, strict=False
        )
    )
    return Inspection(
        device=str(device),
        free_bytes=free_memory(device),
        models=models,
        pair=None
        if not drafting.models
        else PairInfo(
            drafter=next(name for name, found in drafting.found.items() if found.models),
            same_tokenizer=same_vocabulary(target, drafting.models[0]),
            parameter_ratio=models[0].parameters / models[1].parameters,
        ),
        drafters=tuple(
            DrafterInfo(name, name in drafting.found, _note(name, drafting, spelling))
            for name, kind in DRAFTERS.items()
            if kind.asset is not None
        ),
        context=_context(Capacity(target, drafting.found.values(), device, given.allows_kernels), spelling),
        threads=ThreadsInfo(threads.number, threads.describe(spelling)),
        kernels=_kernels(target, device, spelling) if device.type == "cpu" else None,
    )


def _kernels(target: Checkpoint, device: torch.device, spelling: Callable[[Option], str]) -> str:
    if unserved_because(target.spec, device, target.dtype) is None:
        return f"kernels: {describe_level()}"
    return f"no kernels: {join_text(describe_operators(target.spec, device, target.dtype), spelling)}"


def _check(checkpoint: Checkpoint, device: torch.device) -> bool:
    """Check dtype, and the names and shapes of the tensors where they are there; return whether they are."""
    check_dtype(device, checkpoint.dtype)
    if weights_to_come(checkpoint.source.path):
        return False
    load_decoder(checkpoint.source, "meta", checkpoint.dtype)
    return True


def _model_info(
    role: str, name: str | Path | None, checkpoint: Checkpoint, device: torch.device, checked: bool
) -> ModelInfo:
    spec, dtype = checkpoint.spec, checkpoint.dtype
    served = unserved_because(spec, device, dtype) is None
    half = torch.float16 if dtype == torch.float16 else torch.bfloat16
    sizes = {
        8 * each.itemsize: weight_memory(replace(checkpoint, dtype=each), device)
        for each in (torch.float32, half)
    }
    larger: dict[int, int] = {}
    if role == "target" and spec.quantisation is None:
        fewer = {bits: weight_memory(replace(checkpoint, bits=bits), device) for bits in BITS.values()}
        whole = sizes[8 * dtype.itemsize]
        larger = {bits: size for bits, size in fewer.items() if size >= whole}
        sizes |= {bits: size for bits, size in fewer.items() if bits not in larger}
    return ModelInfo(
        role=role,
        name=None if name is None else str(name),
        folder=str(checkpoint.source),
        architecture=spec.wrapper or spec.architecture,
        parameters=parameter_count(spec),
        layers=spec.layers,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        max_positions=spec.max_positions,
        dtype=dtype_name(dtype),
        quantisation=None if spec.quantisation is None else spec.quantisation.described,
        tokenizer=checkpoint.tokenizer is not None,
        weights_checked=checked,
        weight_bytes=sizes,
        larger_bytes=larger,
        expanded_bytes={}
        if spec.quantisation is None
        else expanded_bytes(spec, device, dtype, native=served),
        cache_bytes=KVCache.bytes_of(spec, CACHED_TOKENS, dtype),
        state_bytes=recurrent_bytes(spec, dtype),
        snapshot_bytes=snapshot_bytes(spec, dtype),
        loras=tuple(_lora_info(name, folder) for name, folder in checkpoint.source.loras),
    )


def _lora_info(name: str, folder: Path) -> LoraInfo:
    from foredraft.model.lora.adapter import open_lora

    with ExitStack() as stack:
        lora = open_lora(name, folder, stack)
    config, changed = lora.config, {each.module for each in lora.changes if not each.replaces}
    return LoraInfo(
        name=name,
        ranks=tuple(sorted(set(map(config.rank_of, changed)))),
        alphas=tuple(sorted(set(map(config.alpha_of, changed)))),
        scaled_by="sqrt(r)" if config.root else "r",
        modules=dict(sorted(Counter(module.rpartition(".")[2] for module in changed).items())),
        replaced=sum(change.replaces for change in lora.changes),
        base=config.base,
    )


def _note(name: str, drafting: ChosenDrafting, spelling: Callable[[Option], str]) -> str | None:
    """Return what a drafter's asset is, or what it lacks, with every option spelled by `spelling`."""
    found = drafting.found.get(name)
    return drafting.missing[name].note(name, spelling) if found is None else found.about


def _context(capacity: Capacity, spelling: Callable[[Option], str]) -> Context:
    longest = None
    try:
        longest = capacity.longest_sequence()
        size = capacity.cache_size(CacheLimits())
    except ConfigError as error:
        return Context(longest, refusal=error.describe(spelling))
    return Context(longest, size.rows, size.positions)
