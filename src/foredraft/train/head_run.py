"""Train an EAGLE-3, a DFlash or an MTP head, from a new or a trained one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.head_kinds import head_kind
from foredraft.drafters.heads.block_configs import MOST_SLOTS, layers_of
from foredraft.drafters.heads.configs import FIRST_LAYERS, OTHERS, SPECULATORS, read_eagle3
from foredraft.drafters.heads.record import BlockRecord, HeadRecord, default_aux_layers, spread_aux_layers
from foredraft.drafters.heads.settings import SETTINGS, with_settings
from foredraft.drafters.heads.writing import (
    StoredHead,
    head_config,
    llama_body,
    qwen3_body,
    read_stored_head,
    specforge_lacks,
    speculators_names,
    write_head,
    z_lab_config,
)
from foredraft.drafters.mtp import files_at, read_values, stored_values
from foredraft.errors import ConfigError
from foredraft.model.checkpoint import Checkpoint
from foredraft.model.safetensors_file import SINGLE
from foredraft.model.spec import CONFIG, ModelSpec
from foredraft.train.head_students import BlockStudent, Eagle3Student, MTPStudent
from foredraft.train.loop import Prepared, Trainee
from foredraft.train.preparation import check_out
from foredraft.train.students import Student
from foredraft.train.target import step_weights
from foredraft.train.texts import frequent_tokens
from foredraft.train.training_options import DFlashOptions, Eagle3Options, MTPOptions


def check_eagle3(options: Eagle3Options, target: Checkpoint, hash: str) -> None:
    """Refuse layers that the target lacks, and a head that cannot go on, without reading weights."""
    check_out(options.out, partial(_holds_a_head, "eagle3"))
    folder = options.from_head
    if folder is None:
        _layers(target.spec, options)
        return
    refused = partial(ConfigError, option="from_head", value=str(folder))
    if head_kind(folder) != "eagle3":
        raise refused("which holds no EAGLE-3 head", remedy="give the folder of one")
    files, _ = with_settings(read_eagle3(folder), target.spec)
    spec, size = files.record.spec, target.spec.hidden_size
    for feature, present in {
        f"{spec.layers} layers": spec.layers != 1,
        f"a hidden size of {spec.hidden_size} beside the target's {size}": spec.hidden_size != size,
        "a window in its attention": spec.windows[0] is not None,
    }.items():
        if present:
            raise refused(f"which has {feature}", remedy="give another head")
    if options.out.exists() and options.out.samefile(folder):
        raise ConfigError(
            "which holds the head to start from", option="out", value=str(options.out),
            remedy="give another folder",
        )  # fmt: skip


def begin_eagle3(options: Eagle3Options, prepared: Prepared) -> Trainee:
    target, checkpoint = prepared.target, prepared.checkpoint
    start = _published(options.from_head, checkpoint) if options.from_head else _new(prepared, options)
    student = Eagle3Student(
        start.record, target.decoder, target.head_weight,
        vocabulary=None if start.draft_vocab is None else start.draft_vocab.tolist(),
        steps=options.draft_length, decay=options.decay, seed=options.seed, start=start.tensors or None,
    )  # fmt: skip
    config = head_config(start.body, start.record, checkpoint, checkpoint.dtype)
    return _trainee(student, _weights(student), prepared, options.out, config)


def _new(prepared: Prepared, options: Eagle3Options) -> StoredHead:
    """Return a head of the usual form for the target, without weights."""
    spec, documents = prepared.target.spec, prepared.batches.documents
    ids = frequent_tokens(documents, options.draft_vocabulary, spec)
    body = llama_body(spec, max(len(document.ids) for document in documents))
    record = HeadRecord(
        spec=ModelSpec.from_hf(body), target_size=spec.hidden_size, format=OTHERS, layer=FIRST_LAYERS[OTHERS],
        draft_vocab_size=spec.vocab_size if ids is None else len(ids), aux_layers=_layers(spec, options),
    )  # fmt: skip
    return StoredHead(record, body, {}, None if ids is None else torch.tensor(ids))


def _published(folder: Path, target: Checkpoint) -> StoredHead:
    """Return a head that was checked. It embeds with the target's embedding from now on."""
    head = read_stored_head(folder, target, "from_head")
    format, tensors = OTHERS, head.tensors
    if specforge_lacks(head.record) is not None:
        format, tensors = SPECULATORS, speculators_names(tensors)
    record = replace(head.record, format=format, layer=FIRST_LAYERS[format], own_embedding=False)
    return replace(head, record=record, tensors=tensors)


def _trainee(student: Student, own_weights: float, prepared: Prepared, place: Path, config: Any) -> Trainee:
    """Return a head before its first step; c is the weights of a draft step over those of a plain step."""
    cost = own_weights / step_weights(prepared.target.spec)
    return Trainee(student, cost, place, lambda _, __, tensors: write_head(place, config, tensors))


def check_mtp(options: MTPOptions, target: Checkpoint, hash: str) -> None:
    check_out(options.out, partial(_holds_a_head, "mtp"))
    files_at(options.from_head or target.source.path, target)


def begin_mtp(options: MTPOptions, prepared: Prepared) -> Trainee:
    target, checkpoint = prepared.target, prepared.checkpoint
    files, _ = with_settings(files_at(options.from_head or checkpoint.source.path, checkpoint), target.spec)
    spec = replace(files.record.spec, quantisation=None)
    record = replace(files.record, spec=spec, states_first=False, folded_norms=False)
    student = MTPStudent(
        record, target.decoder, target.head_weight, steps=options.draft_length, decay=options.decay,
        start=read_values(files),
    )  # fmt: skip
    cost = (_weights(student) + target.head_weight.numel()) / step_weights(target.spec)

    def write(_: object, __: object, tensors: Mapping[str, Tensor]) -> None:
        write_head(options.out, {"model_type": "mtp"}, stored_values(tensors, checkpoint.dtype))

    return Trainee(student, cost, options.out, write)


def _weights(student: Eagle3Student | BlockStudent) -> int:
    """Return the weights that each step of a draft reads: all but those that join the target's states."""
    return sum(value.numel() for name, value in student.own.by_name.items() if not name.startswith("fc"))


def check_dflash(options: DFlashOptions, target: Checkpoint, hash: str) -> None:
    check_out(options.out, partial(_holds_a_head, "dflash"))
    if options.block > MOST_SLOTS:
        raise ConfigError(option="block", value=options.block, remedy=f"give {MOST_SLOTS} or less")
    _layers(target.spec, options)
    token, size = options.mask_token, target.spec.vocab_size
    if token is not None and not 0 <= token < size:
        raise ConfigError(
            f"but the model has {size} tokens", option="mask_token", value=token,
            remedy="give the id of a token that texts hardly hold",
        )  # fmt: skip


def begin_dflash(options: DFlashOptions, prepared: Prepared) -> Trainee:
    target, spec, documents = prepared.target, prepared.target.spec, prepared.batches.documents
    ids, mask = frequent_tokens(documents, options.draft_vocabulary, spec), options.mask_token
    body = qwen3_body(spec, options.layers, max(len(document.ids) for document in documents))
    record = BlockRecord(
        spec=layers_of(body), format="z-lab's", layer="layers.0", target_size=spec.hidden_size,
        draft_vocab_size=spec.vocab_size if ids is None else len(ids), block=options.block,
        aux_layers=_layers(spec, options), own_head=False,
        mask_token=next(iter(spec.eos_token_ids), 0) if mask is None else mask,
    )  # fmt: skip
    weights = target.decoder, target.head_weight
    student = BlockStudent(record, *weights, vocabulary=ids, decay=options.decay, seed=options.seed)
    config = z_lab_config(body, record, spec, prepared.checkpoint.dtype)
    # a token's share of a whole draft, the head's product included
    own = (_weights(student) + record.draft_vocab_size * record.spec.hidden_size) / student.steps
    return _trainee(student, own, prepared, options.out, config)


def _layers(target: ModelSpec, options: Eagle3Options | DFlashOptions) -> tuple[int, ...]:
    """Return the auxiliary layers that a new head reads."""
    count = target.layers
    if isinstance(options, Eagle3Options):
        layers, where = options.taps or default_aux_layers(count), "the second at the earliest"
        allowed = range(2, count + 1)  # readers take a first 1 for a layer whose output is read: one further
    else:
        layers, where = options.taps or spread_aux_layers(count, options.layers), "but not after the last"
        allowed = range(1, count)  # readers take the state after the last for the normed one
    if list(layers) != sorted(set(layers)) or not set(layers) <= set(allowed):
        raise ConfigError(
            f"but the target has {count} layers, and a head reads after some of them in ascending order,"
            f" {where}",
            option="taps", value=",".join(map(str, layers)), remedy="give others, such as 2,4,6",
        )  # fmt: skip
    return layers


def _holds_a_head(kind: str, folder: Path) -> bool:
    """Return whether a folder holds a head of a kind, and nothing besides."""
    names = {file.name for file in folder.iterdir()}
    return head_kind(folder) == kind and names <= {CONFIG, SINGLE, SETTINGS}
