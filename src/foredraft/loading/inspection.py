"""Inspection: what `load` would make of a model here, found out without loading its weights.

Contract: a model that `load` refuses is refused here by the same code, so with the same error. Of a hub id
only the small files are downloaded, or the GGUF file, because its own header says what the model is. Names,
shapes and dtypes of tensors are checked where the weights are in the cache already. Those of a local folder
are always checked. Too little memory is no refusal but part of the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foredraft.drafters.draft_checkpoint import same_vocabulary
from foredraft.errors import ConfigError, Option, python_spelling
from foredraft.kinds.load_options import LoadOptions, Progress
from foredraft.kinds.tables import DRAFTERS
from foredraft.loading import options_for
from foredraft.loading.capacity import (
    CacheLimits,
    cache_size,
    expanded_memory,
    longest_sequence,
    weight_memory,
)
from foredraft.loading.checkpoints import find_target
from foredraft.loading.device import check_dtype, find_device
from foredraft.loading.drafting import ChosenDrafting, choose_drafting
from foredraft.loading.free_memory import free_memory
from foredraft.loading.threads import choose_threads
from foredraft.model.cache import KVCache
from foredraft.model.hub import weights_to_come
from foredraft.model.lora.lora_tensors import Replacement
from foredraft.model.lora.opening import open_lora
from foredraft.model.lora.record import loras_of
from foredraft.model.quantisation import BITS
from foredraft.model.transfers import dtype_name
from foredraft.model.unread import Checkpoint
from foredraft.model.weights import load_decoder, parameter_count

__all__ = [
    "CACHED_TOKENS",
    "Context",
    "DrafterInfo",
    "Inspection",
    "LoraInfo",
    "ModelInfo",
    "PairInfo",
    "ThreadsInfo",
    "inspect_models",
]

CACHED_TOKENS = 1000  # tokens that the figures of the KV cache are for


@dataclass(frozen=True, slots=True)
class LoraInfo:
    """A LoRA that is merged into the target.

    Attributes:
        name: Its folder or hub id as given.
        ranks: The ranks of its changes, from the least.
        alphas: Their α, from the least.
        scaled_by: What α is divided by: "r" or "sqrt(r)".
        modules: How many modules it changes, by the last part of their names.
        replaced: How many tensors it replaces.
        base: The model that it was trained for, as it says; None where it does not.
    """

    name: str
    ranks: tuple[int, ...]
    alphas: tuple[float, ...]
    scaled_by: str
    modules: Mapping[str, int]
    replaced: int
    base: str | None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One model.

    Attributes:
        role: "target" or "draft".
        name: The folder or hub id as given; None for a demo model.
        folder: Its local folder or GGUF file.
        architecture: Its architecture, as config.json names it.
        parameters: Number of weights; a tied head counts once.
        layers: Number of layers.
        hidden_size: Size of a hidden state.
        vocab_size: Number of token ids.
        max_positions: The model's own limit on the tokens of a sequence.
        dtype: The dtype that it would run in.
        quantisation: How its weights are stored: method, bits and groups; None if they are not quantised.
        tokenizer: It has a tokenizer.
        weights_checked: Names, shapes and dtypes of its tensors were checked; False for a hub id whose
            weights are not downloaded.
        weight_bytes: Bits of a weight -> bytes of all weights on this device, with the copies that the
            products need. Of a quantised model, 32 and 16 are the bits of the dtype. Of a target that is not
            quantised, 8 and 4 are there where option weights saves memory.
        larger_bytes: The same for the bits with which it would save none.
        expanded_bytes: Format -> bytes of its weights, of formats whose weights are expanded to the dtype.
        cache_bytes: Bytes of the keys and values of `CACHED_TOKENS` tokens.
        loras: The LoRAs that are merged into it.
    """

    role: str
    name: str | None
    folder: str
    architecture: str
    parameters: int
    layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    dtype: str
    quantisation: str | None
    tokenizer: bool
    weights_checked: bool
    weight_bytes: Mapping[int, int]
    larger_bytes: Mapping[int, int]
    expanded_bytes: Mapping[str, int]
    cache_bytes: int
    loras: tuple[LoraInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class PairInfo:
    """How a draft model fits its target.

    Attributes:
        drafter: The drafter that uses it.
        same_tokenizer: Both models have one tokenizer; vocabularies may still differ in size.
        parameter_ratio: Parameters of the target ÷ those of the draft model.
    """

    drafter: str
    same_tokenizer: bool
    parameter_ratio: float


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """A drafter, and whether it is at hand.

    Attributes:
        name: Its name.
        at_hand: `load` would make it.
        note: The plan, adapter or copy that it uses, or what it lacks; None where neither applies.
    """

    name: str
    at_hand: bool
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """How long sequences may be in the memory that is free now.

    Attributes:
        longest: Positions of the longest single sequence; None where the weights do not fit.
        rows: Sequences of a batch that `load` makes room for by default; None where it would refuse.
        positions: Positions of each of them.
        refusal: Why `load` would refuse; None where it would not.
    """

    longest: int | None
    rows: int | None = None
    positions: int | None = None
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class ThreadsInfo:
    """How many CPU threads would compute, and why in one line."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """What `load` would make of the models.

    Attributes:
        device: The device that they would run on.
        free_bytes: Its free memory.
        models: The target and, where there is one, the draft model.
        pair: How they fit together; None without a draft model.
        drafters: Every drafter.
        context: How long sequences may be.
        threads: How many CPU threads would compute.
    """

    device: str
    free_bytes: int
    models: tuple[ModelInfo, ...]
    pair: PairInfo | None
    drafters: tuple[DrafterInfo, ...]
    context: Context
    threads: ThreadsInfo

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
    """Return what `load` would make of a model, without loading its weights.

    Args:
        path: As `load` takes it.
        progress: As `load` takes it.
        spelling: How a note spells an option; by default as the Python API does.
        **options: Of the other arguments of `load`: draft, revision, lora, draft_revision, tokenizer, dtype,
                device, threads.

    Raises:
        ConfigError: As of `load`, except where memory is too small.
        CheckpointError: As of `load`.
    """
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
        pair=_pair_info(target, drafting, models) if drafting.models else None,
        drafters=tuple(
            DrafterInfo(name, name in drafting.found, _note(name, drafting, spelling))
            for name, kind in DRAFTERS.items()
            if kind.asset is not None
        ),
        context=_context(given, target, drafting, device, spelling),
        threads=ThreadsInfo(threads.number, threads.describe(spelling)),
    )


def _check(checkpoint: Checkpoint, device: torch.device) -> bool:
    """Check dtype, and the names and shapes of the tensors where they are there; return whether they are."""
    check_dtype(device, checkpoint.dtype)
    if weights_to_come(checkpoint.folder):
        return False
    load_decoder(checkpoint.folder, "meta", checkpoint.dtype)
    return True


def _model_info(
    role: str, name: str | Path | None, checkpoint: Checkpoint, device: torch.device, checked: bool
) -> ModelInfo:
    spec, parameters = checkpoint.spec, parameter_count(checkpoint.spec)
    half = torch.float16 if checkpoint.dtype == torch.float16 else torch.bfloat16
    sizes = {
        8 * dtype.itemsize: weight_memory(replace(checkpoint, dtype=dtype), device)
        for dtype in (torch.float32, half)
    }
    larger: dict[int, int] = {}
    if role == "target" and spec.quantisation is None:
        fewer = {bits: weight_memory(replace(checkpoint, bits=bits), device) for bits in BITS.values()}
        whole = sizes[8 * checkpoint.dtype.itemsize]
        larger = {bits: size for bits, size in fewer.items() if size >= whole}
        sizes |= {bits: size for bits, size in fewer.items() if bits not in larger}
    return ModelInfo(
        role=role,
        name=None if name is None else str(name),
        folder=str(checkpoint.source),
        architecture=spec.wrapper or spec.architecture,
        parameters=parameters,
        layers=spec.layers,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        max_positions=spec.max_positions,
        dtype=dtype_name(checkpoint.dtype),
        quantisation=None if spec.quantisation is None else spec.quantisation.described,
        tokenizer=checkpoint.tokenizer is not None,
        weights_checked=checked,
        weight_bytes=sizes,
        larger_bytes=larger,
        expanded_bytes=expanded_memory(checkpoint, device),
        cache_bytes=KVCache.bytes_of(spec, CACHED_TOKENS, checkpoint.dtype),
        loras=tuple(_lora_info(name, folder) for name, folder in loras_of(checkpoint.folder)),
    )


def _lora_info(name: str, folder: Path) -> LoraInfo:
    with ExitStack() as stack:
        lora = open_lora(name, folder, stack)
    config, changed = lora.config, {c.module for c in lora.changes if not isinstance(c.what, Replacement)}
    return LoraInfo(
        name=name,
        ranks=tuple(sorted(set(map(config.rank_of, changed)))),
        alphas=tuple(sorted(set(map(config.alpha_of, changed)))),
        scaled_by="sqrt(r)" if config.root else "r",
        modules=dict(sorted(Counter(module.rpartition(".")[2] for module in changed).items())),
        replaced=sum(isinstance(change.what, Replacement) for change in lora.changes),
        base=config.base,
    )


def _pair_info(target: Checkpoint, drafting: ChosenDrafting, models: Sequence[ModelInfo]) -> PairInfo:
    return PairInfo(
        drafter=next(name for name, found in drafting.found.items() if found.models),
        same_tokenizer=same_vocabulary(target, drafting.models[0]),
        parameter_ratio=models[0].parameters / models[1].parameters,
    )


def _note(name: str, drafting: ChosenDrafting, spelling: Callable[[Option], str]) -> str | None:
    """Return what a drafter's asset is, or what it lacks, with every option spelled by `spelling`."""
    found = drafting.found.get(name)
    return drafting.missing[name].note(name, spelling) if found is None else found.about


def _context(
    options: LoadOptions,
    target: Checkpoint,
    drafting: ChosenDrafting,
    device: torch.device,
    spelling: Callable[[Option], str],
) -> Context:
    assets, kernels = drafting.found.values(), options.allows_kernels
    try:
        longest = longest_sequence(target, assets, device, kernels=kernels)
    except ConfigError as error:
        return Context(None, refusal=error.describe(spelling))
    try:
        size = cache_size(target, assets, device, CacheLimits(), kernels=kernels)
    except ConfigError as error:
        return Context(longest, refusal=error.describe(spelling))
    return Context(longest, size.rows, size.positions)
