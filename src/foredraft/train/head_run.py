"""Train an EAGLE-3 or a DFlash head, from a new or a trained one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from foredraft.drafters.heads.block_files import MOST_SLOTS, is_dflash, layers_of
from foredraft.drafters.heads.eagle3_files import FIRST_LAYERS, OTHERS, SPECULATORS, is_eagle3, read_eagle3
from foredraft.drafters.heads.head_asset import with_settings
from foredraft.drafters.heads.record import BlockRecord, HeadRecord, default_aux_layers, spread_aux_layers
from foredraft.drafters.heads.writing import (
    head_config,
    llama_body,
    qwen3_body,
    read_stored_head,
    specforge_lacks,
    speculators_names,
    write_head,
    z_lab_config,
)
from foredraft.errors import ConfigError
from foredraft.model.checkpoint import Checkpoint
from foredraft.model.spec import ModelSpec
from foredraft.train.block_student import BlockStudent
from foredraft.train.eagle3_student import Eagle3Student
from foredraft.train.loop import OnProgress
from foredraft.train.preparation import Prepared, check_out, checked_layers
from foredraft.train.processes import Processes, holds_a_head
from foredraft.train.students import Student
from foredraft.train.target import Document, step_weights
from foredraft.train.texts import frequent_tokens
from foredraft.train.trainers import Result, Trainee, no_report, trained
from foredraft.train.training_options import DFlashOptions, Eagle3Options


@dataclass(frozen=True, slots=True)
class StartingHead:
    """A head before its training."""

    record: HeadRecord  # what it is, in the format in which it will be written
    body: Mapping[str, Any]  # the config of its layer
    draft_vocab: Sequence[int] | None = None  # the ids that it has logits for; None for all
    tensors: Mapping[str, Tensor] | None = None  # its weights; None draws them


def check_start(target: Checkpoint, options: Eagle3Options) -> None:
    """Refuse layers that the target lacks, and a head that cannot go on, without reading weights."""
    folder = options.from_head
    if folder is None:
        _layers(target.spec, options)
        return
    if not is_eagle3(folder):
        raise ConfigError(
            "which holds no EAGLE-3 head", option="from_head", value=str(folder),
            remedy="give the folder of one",
        )  # fmt: skip
    files, _ = with_settings(read_eagle3(folder), target.spec)
    spec, size = files.record.spec, target.spec.hidden_size
    for feature, present in {
        f"{spec.layers} layers": spec.layers != 1,
        f"a hidden size of {spec.hidden_size} beside the target's {size}": spec.hidden_size != size,
        "a window in its attention": spec.windows[0] is not None,
    }.items():
        if present:
            raise ConfigError(
                f"which has {feature}", option="from_head", value=str(folder), remedy="give another head"
            )
    if options.out.exists() and options.out.samefile(folder):
        raise ConfigError(
            "which holds the head to start from", option="out", value=str(options.out),
            remedy="give another folder",
        )  # fmt: skip


def new_head(spec: ModelSpec, documents: Sequence[Document], options: Eagle3Options) -> StartingHead:
    """Return a head of the usual form for a target of this form."""
    ids = frequent_tokens(documents, options.draft_vocabulary, spec)
    body = llama_body(spec, max(len(document.ids) for document in documents))
    record = HeadRecord(
        spec=ModelSpec.from_hf(body), target_size=spec.hidden_size, format=OTHERS, layer=FIRST_LAYERS[OTHERS],
        draft_vocab_size=spec.vocab_size if ids is None else len(ids), aux_layers=_layers(spec, options),
    )  # fmt: skip
    return StartingHead(record, body, ids)


def read_start(folder: Path, target: Checkpoint) -> StartingHead:
    """Return a head that `check_start` let pass. It embeds with the target's embedding from now on."""
    head = read_stored_head(folder, target, "from_head")
    format, tensors, ids = OTHERS, head.tensors, head.draft_vocab
    if specforge_lacks(head.record) is not None:
        format, tensors = SPECULATORS, speculators_names(tensors)
    record = replace(head.record, format=format, layer=FIRST_LAYERS[format], own_embedding=False)
    return StartingHead(record, head.body, None if ids is None else ids.tolist(), tensors)


def _layers(target: ModelSpec, options: Eagle3Options) -> tuple[int, ...]:
    """Return the auxiliary layers that a new head reads."""
    aux_layers = options.taps or default_aux_layers(target.layers)
    # not 1: readers take a first number of 1 for a layer whose output is read, which is one layer further
    return checked_layers(aux_layers, target, range(2, target.layers + 1), "the second at the earliest")


def _trainee(student: Student, own_weights: float, prepared: Prepared, place: Path, config: Any) -> Trainee:
    """Return a head before its first step; c is the weights of a draft step over those of a plain step."""
    cost = own_weights / step_weights(prepared.target.spec)
    return Trainee(student, cost, place, lambda _, __, tensors: write_head(place, config, tensors))


def train_eagle3(
    options: Eagle3Options, model: str | None = None, *, report: OnProgress = no_report, **load: Any
) -> Result:
    """Train an EAGLE-3 head, or continue its training."""

    def check_place(target: Checkpoint, hash: str) -> None:
        check_out(options.out, partial(holds_a_head, is_eagle3))
        check_start(target, options)

    def begin(prepared: Prepared, processes: Processes) -> Trainee:
        target, checkpoint = prepared.target, prepared.checkpoint
        start = (
            new_head(target.spec, prepared.batches.documents, options)
            if options.from_head is None
            else read_start(options.from_head, checkpoint)
        )
        student = Eagle3Student(
            start.record, target.decoder, target.head_weight, vocabulary=start.draft_vocab,
            steps=options.draft_length, decay=options.decay, seed=options.seed, start=start.tensors,
        )  # fmt: skip
        config = head_config(start.body, start.record, checkpoint, checkpoint.dtype)
        return _trainee(student, _weights(student), prepared, options.out, config)

    return trained(options, model, report, load, check_place, begin)


def _weights(student: Eagle3Student | BlockStudent) -> int:
    """Return the weights that each step of a draft reads: all but those that join the target's states."""
    return sum(value.numel() for name, value in student.own.by_name.items() if not name.startswith("fc"))


def train_dflash(
    options: DFlashOptions, model: str | None = None, *, report: OnProgress = no_report, **load: Any
) -> Result:
    """Train a DFlash head, or continue its training."""

    def check_place(target: Checkpoint, hash: str) -> None:
        check_out(options.out, partial(holds_a_head, is_dflash))
        if options.block > MOST_SLOTS:
            raise ConfigError(option="block", value=options.block, remedy=f"give {MOST_SLOTS} or less")
        _dflash_layers(target.spec, options)
        _mask_token(target.spec, options)

    def begin(prepared: Prepared, processes: Processes) -> Trainee:
        target, spec, documents = prepared.target, prepared.target.spec, prepared.batches.documents
        ids = frequent_tokens(documents, options.draft_vocabulary, spec)
        body = qwen3_body(spec, options.layers, max(len(document.ids) for document in documents))
        record = BlockRecord(
            spec=layers_of(body), format="z-lab's", layer="layers.0", target_size=spec.hidden_size,
            draft_vocab_size=spec.vocab_size if ids is None else len(ids), block=options.block,
            aux_layers=_dflash_layers(spec, options), own_head=False, mask_token=_mask_token(spec, options),
        )  # fmt: skip
        student = BlockStudent(
            record, target.decoder, target.head_weight, vocabulary=ids, decay=options.decay,
            seed=options.seed,
        )  # fmt: skip
        config = z_lab_config(body, record, spec, prepared.checkpoint.dtype)
        # a token's share of a whole draft, the head's product included
        own = (_weights(student) + record.draft_vocab_size * record.spec.hidden_size) / student.steps
        return _trainee(student, own, prepared, options.out, config)

    return trained(options, model, report, load, check_place, begin)


def _dflash_layers(target: ModelSpec, options: DFlashOptions) -> tuple[int, ...]:
    """Return the auxiliary layers that the head reads."""
    aux_layers = options.taps or spread_aux_layers(target.layers, options.layers)
    # not the last: readers take the state after it for the normed one
    return checked_layers(aux_layers, target, range(1, target.layers), "but not after the last")


def _mask_token(target: ModelSpec, options: DFlashOptions) -> int:
    """Return the token id that stands in the slots."""
    token = options.mask_token
    if token is None:
        return target.eos_token_ids[0] if target.eos_token_ids else 0
    if not 0 <= token < target.vocab_size:
        raise ConfigError(
            f"but the model has {target.vocab_size} tokens", option="mask_token", value=token,
            remedy="give the id of a token that texts hardly hold",
        )  # fmt: skip
    return token
