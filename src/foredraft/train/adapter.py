"""Train an adapter for drafter kangaroo, and write it where `load` finds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

import foredraft
from foredraft.drafters.adapter_files import (
    CONFIG,
    WEIGHTS,
    AdapterConfig,
    adapter_place,
    read_adapter,
    write_adapter,
)
from foredraft.drafters.adapter_kinds import WITH_MLP
from foredraft.errors import ConfigError, Option
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import layer_parameters, layer_tensors
from foredraft.train.batches import Batches
from foredraft.train.frequent_words import frequent_words
from foredraft.train.loop import OnProgress, TrainingRun
from foredraft.train.losses import overlap
from foredraft.train.packed_documents import Packed
from foredraft.train.preparation import Prepared, check_out, prepare
from foredraft.train.processes import Processes, joined
from foredraft.train.result import Result
from foredraft.train.students import AdapterStudent
from foredraft.train.training_checkpoints import TrainingProgress
from foredraft.train.training_options import AdapterOptions
from foredraft.train.validation import Validation
from foredraft.train.written_drafter import write_drafter
from foredraft.user_cache import make_folder

__all__ = ["train_adapter"]


def train_adapter(
    options: AdapterOptions,
    model: str | None = None,
    *,
    report: OnProgress = lambda stage, done, total, note: None,
    **load: Any,
) -> Result:
    """Train an adapter, or continue its training.

    Args:
        options: Of the training.
        model: The target's folder or hub id; None is the demo target.
        report: Called as (stage, done, total, note).
        **load: Of the arguments of `foredraft.load`: revision, dtype, device, threads.

    Returns:
        What was trained; the same in every process that `torchrun` started.

    Raises:
        ConfigError: An option or a file of data cannot be used, or a file cannot be written.
        CheckpointError: The target cannot be loaded.
    """
    with joined(load.get("device")) as processes:
        return _trained(options, model, processes, report, load)


def _trained(
    options: AdapterOptions,
    model: str | None,
    processes: Processes,
    report: OnProgress,
    load: Mapping[str, Any],
) -> Result:
    torch.manual_seed(options.seed)
    prepared = prepare(
        model, options, load, processes, report, lambda target, hash: _place(options.out, hash)
    )
    place = _place(options.out, prepared.hash)
    student = _student(prepared, options, processes)

    def keep(validation: Validation, progress: TrainingProgress) -> None:
        config = _config(prepared, options, student, validation, progress)
        write = partial(_write, place, config)
        write_drafter(student, processes, prepared.checkpoint.dtype, place, write)

    run = TrainingRun(
        student, prepared.target, prepared.batches, prepared.held_out, _cost(prepared, student), options,
        prepared.folder, prepared.digest, processes, keep, place.exists, report,
    )  # fmt: skip
    progress = run.train()
    return Result.of(place, progress, prepared)


def _place(out: Path | None, hash: str) -> Path:
    place = adapter_place(hash) if out is None else out
    if place is None:
        raise ConfigError("there is no cache folder to write the adapter to", remedy=("give ", Option("out")))
    check_out(place, _is_adapter)
    return place


def _is_adapter(folder: Path) -> bool:
    try:
        read_adapter(folder)
    except ConfigError:
        return False
    return {file.name for file in folder.iterdir()} <= {CONFIG, WEIGHTS}


def _student(prepared: Prepared, options: AdapterOptions, processes: Processes) -> AdapterStudent:
    """Return an adapter that starts as the layer of the target which, alone above `depth`, drafts best."""
    spec = prepared.target.spec
    depth = options.depth or min(3, max(1, spec.layers // 8))
    if depth >= spec.layers:
        raise ConfigError(
            f"but the target has {spec.layers} layers", option="depth", value=depth, remedy="give fewer"
        )
    vocabulary = frequent_words(prepared.batches.documents, options.draft_vocabulary, spec)

    def started(layer: int) -> AdapterStudent:
        start = layer_tensors(prepared.checkpoint.folder, layer)
        return AdapterStudent(
            spec, prepared.target.head_weight, start, depth, mlp=options.kind == WITH_MLP,
            vocabulary=vocabulary, bias=prepared.target.head_bias,
        )  # fmt: skip

    layers = [layer for layer in _alike(spec) if layer >= depth] or _alike(spec)
    shares = torch.tensor(
        _shares(map(started, layers), prepared, depth), device=prepared.target.decoder.device
    )
    return started(layers[int(processes.sum(shares).argmax())])  # the sum, so that all processes choose alike


def _alike(spec: ModelSpec) -> list[int]:
    """Return the layers whose weights have the shapes of an adapter's."""
    own = spec.kv_heads_of(None), spec.head_dim_of(None)
    return [
        layer
        for layer, window in enumerate(spec.windows)
        if spec.stores(layer) and (spec.kv_heads_of(window), spec.head_dim_of(window)) == own
    ]


@torch.no_grad()
def _shares(students: Iterable[AdapterStudent], prepared: Prepared, depth: int) -> list[float]:
    """Return the mean of Σ min(p, q) that each student has on held-out documents, in one pass over them."""
    target = prepared.target
    held_out = Batches(prepared.held_out, prepared.batches.tokens, 0)
    packed = Packed.of(held_out.documents_of(0), target.decoder.device)
    states = target.states(packed, (depth,))
    log_p = target.log_probs(states.last)
    shares = []
    for student in students:
        known = log_p
        if student.vocabulary is not None:
            known = log_p[:, student.vocabulary]
        with target.autocast():
            log_q = student(packed, states.tapped).float().log_softmax(-1)
        shares.append(float(overlap(known, log_q).mean()))
    return shares


def _cost(prepared: Prepared, student: AdapterStudent) -> float:
    """Return c, by the weights that a draft step and a plain step read."""
    spec = prepared.target.spec
    layer = layer_parameters(spec, mlp=True)
    own = sum(value.numel() for value in student.parameters())
    reads = student.depth * layer + own + student.head.numel()
    return reads / (spec.layers * layer + spec.vocab_size * spec.hidden_size)


def _config(
    prepared: Prepared,
    options: AdapterOptions,
    student: AdapterStudent,
    validation: Validation,
    progress: TrainingProgress,
) -> AdapterConfig:
    vocabulary = student.vocabulary
    return AdapterConfig(
        model=prepared.name,
        target_hash=prepared.hash,
        layers=prepared.target.spec.layers,
        depth=student.depth,
        kind=options.kind,
        draft_vocabulary=None if vocabulary is None else len(vocabulary),
        max_draft=validation.max_draft,
        alpha=validation.alpha,
        tau=validation.tau,
        predicted=validation.predicted,
        temperature=options.temperature,
        loss=options.loss,
        steps=progress.step,
        tokens=progress.tokens,
        date=datetime.now(UTC).date().isoformat(),
        foredraft=foredraft.__version__,
    )


def _write(place: Path, config: AdapterConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    make_folder(place.absolute().parent)
    write_adapter(place, config, tensors)
