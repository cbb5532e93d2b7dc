"""Inspection: what `load` would make of a model here, found out without loading its weights.

Contract: a model that `load` refuses is refused here by the same code, so with the same error. Of a hub id
only the small files are downloaded, or the GGUF file, because its own header says what the model is. Names,
shapes and dtypes of tensors are checked where the weights are in the cache already. Those of a local folder
are always checked. Too little memory is no refusal but part of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foredraft.errors import ConfigError, Option, python_spelling
from foredraft.kinds.compatibility import available_drafters, missing_part
from foredraft.kinds.offered_copy import OFFER
from foredraft.kinds.tables import DRAFTERS
from foredraft.loading import options_for
from foredraft.loading.adapters import ChosenAdapter
from foredraft.loading.capacity import (
    CacheLimits,
    cache_size,
    expanded_memory,
    longest_sequence,
    weight_memory,
)
from foredraft.loading.checkpoints import Checkpoint, Checkpoints, find_checkpoints
from foredraft.loading.device import check_dtype, find_device
from foredraft.loading.drafting import ChosenDrafting, choose_drafting, models_given
from foredraft.loading.low_bit import unfit_because
from foredraft.loading.memory import as_gib, free_memory
from foredraft.loading.options import LoadOptions, Progress
from foredraft.loading.threads import choose_threads
from foredraft.model.cache import KVCache
from foredraft.model.device import dtype_name
from foredraft.model.hub import weights_to_come
from foredraft.model.quantisation import BITS
from foredraft.model.weights import load_decoder, parameter_count

__all__ = [
    "CACHED_TOKENS",
    "Context",
    "DrafterInfo",
    "Inspection",
    "ModelInfo",
    "PairInfo",
    "ThreadsInfo",
    "inspect_models",
]

CACHED_TOKENS = 1000  # tokens that the figures of the KV cache are for


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
        **options: Of the other arguments of `load`: draft, revision, draft_revision, tokenizer, dtype,
                device, threads.

    Raises:
        ConfigError: As of `load`, except where memory is too small.
        CheckpointError: As of `load`.
    """
    given = options_for(path, **options, progress=progress)
    threads = choose_threads(given.threads)
    device = find_device(given.device)
    checkpoints = find_checkpoints(given, weights=False)
    names = (path, options.get("draft"))
    checked = [_check(checkpoint, device) for checkpoint in checkpoints.all]
    models = tuple(
        _model_info(role, name, checkpoint, device, is_checked)
        for role, name, checkpoint, is_checked in zip(
            ("target", "draft"), names, checkpoints.all, checked, strict=False
        )
    )
    if checked[0]:
        drafting = choose_drafting(given, checkpoints, device)
        no_copy = unfit_because(given, checkpoints.target, device)
    else:  # what is kept for a model is known by its weights
        drafting = ChosenDrafting("auto", available_drafters(models_given(checkpoints, None, None)), None)
        no_copy = None
    return Inspection(
        device=str(device),
        free_bytes=free_memory(device),
        models=models,
        pair=None if checkpoints.draft is None else _pair_info(checkpoints, drafting, *models),
        drafters=tuple(
            DrafterInfo(
                name, name in drafting.available, _note(name, drafting, checked[0], no_copy, spelling)
            )
            for name, kind in DRAFTERS.items()
            if kind.make is not None
        ),
        context=_context(given, checkpoints, drafting, device, spelling),
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
        architecture=spec.architecture,
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
    )


def _pair_info(
    checkpoints: Checkpoints, drafting: ChosenDrafting, target: ModelInfo, draft: ModelInfo
) -> PairInfo:
    return PairInfo(
        drafter=next(name for name, kind in drafting.available.items() if kind.needs_draft),
        same_tokenizer=not checkpoints.other_tokenizer,
        parameter_ratio=target.parameters / draft.parameters,
    )


def _note(
    name: str,
    drafting: ChosenDrafting,
    checked: bool,
    no_copy: str | None,
    spelling: Callable[[Option], str],
) -> str | None:
    """Return the note on a drafter.

    Args:
        name: Its name.
        drafting: The drafters at hand.
        checked: As `ModelInfo.weights_checked` of the target.
        no_copy: Why the target can have no copy in few bits; None where it can.
        spelling: How an option is spelled.
    """
    if DRAFTERS[name].needs_plan and drafting.plan is not None:
        return f"the kept plan {drafting.plan.skips}"
    if DRAFTERS[name].needs_adapter and (adapter := drafting.adapter or drafting.reserved) is not None:
        return _of_adapter(adapter, spelling)
    if (DRAFTERS[name].needs_plan or DRAFTERS[name].needs_adapter) and not checked:
        part = "plan" if DRAFTERS[name].needs_plan else "adapter"
        return f"{name} has a kept {part} or none: the weights that tell are not downloaded"
    if DRAFTERS[name].needs_copy and drafting.copy is not None:
        return f"a copy of {as_gib(drafting.copy.bytes)}: {OFFER}"
    if DRAFTERS[name].needs_copy and no_copy is not None:
        return f"{name} has no copy of this model: {no_copy}"
    return None if name in drafting.available else missing_part(name).describe(spelling)


def _of_adapter(adapter: ChosenAdapter, spelling: Callable[[Option], str]) -> str:
    note = f"the kept adapter: {adapter.config}, predicted {adapter.config.predicted:.2f} x"
    return note if adapter.pays else f"{note}, so only {spelling(Option('drafter', 'kangaroo'))} uses it"


def _context(
    options: LoadOptions,
    checkpoints: Checkpoints,
    drafting: ChosenDrafting,
    device: torch.device,
    spelling: Callable[[Option], str],
) -> Context:
    arguments: dict[str, Any] = {
        "stretch": drafting.stretch,
        "kernels": options.allows_kernels,
        "adapter": drafting.adapter,
        "beside": drafting.beside,
    }
    try:
        longest = longest_sequence(checkpoints.all, device, **arguments)
    except ConfigError as error:
        return Context(None, refusal=error.describe(spelling))
    try:
        size = cache_size(checkpoints.all, device, CacheLimits(), **arguments)
    except ConfigError as error:
        return Context(longest, refusal=error.describe(spelling))
    return Context(longest, size.rows, size.positions)
