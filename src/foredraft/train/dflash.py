"""Train a DFlash head, and write it in z-lab's spelling, which `--draft` and other programs read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from foredraft.drafters.heads.block_files import MOST_SLOTS, is_dflash, layers_of
from foredraft.drafters.heads.block_record import BlockRecord, spread_taps
from foredraft.drafters.heads.block_writing import qwen3_body, z_lab_config
from foredraft.errors import ConfigError
from foredraft.model.spec import ModelSpec
from foredraft.train.block_student import BlockStudent
from foredraft.train.frequent_words import frequent_words
from foredraft.train.head_run import train_head
from foredraft.train.loop import OnProgress
from foredraft.train.preparation import Prepared, check_out, checked_taps, prepare
from foredraft.train.processes import Processes, joined
from foredraft.train.result import Result
from foredraft.train.target import step_weights
from foredraft.train.training_options import DFlashOptions
from foredraft.train.written_drafter import holds_a_head

__all__ = ["train_dflash"]


def train_dflash(
    options: DFlashOptions,
    model: str | None = None,
    *,
    report: OnProgress = lambda stage, done, total, note: None,
    **load: Any,
) -> Result:
    """Train a DFlash head, or continue its training.

    Arguments, result and errors as `adapter.train_adapter`.
    """
    with joined(load.get("device")) as processes:
        return _trained(options, model, processes, report, load)


def _trained(
    options: DFlashOptions,
    model: str | None,
    processes: Processes,
    report: OnProgress,
    load: Mapping[str, Any],
) -> Result:
    place = options.out
    prepared = prepare(
        model, options, load, processes, report, lambda target, hash: _check(place, target.spec, options)
    )
    spec, documents = prepared.target.spec, prepared.batches.documents
    words = frequent_words(documents, options.draft_vocabulary, spec)
    longest = max(len(document.ids) for document in documents)
    body = qwen3_body(spec, options.layers, longest)
    record = BlockRecord(
        spec=layers_of(body), spelling="z-lab's", layer="layers.0", taps=_taps(spec, options),
        target_size=spec.hidden_size, words=spec.vocab_size if words is None else len(words),
        own_head=False, block=options.block, mask_token=_mask_token(spec, options),
    )  # fmt: skip
    student = BlockStudent(
        record,
        prepared.target.decoder,
        prepared.target.head_weight,
        vocabulary=words,
        decay=options.decay,
        seed=options.seed,
    )
    config = z_lab_config(body, record, spec, prepared.checkpoint.dtype)
    return train_head(student, config, _cost(prepared, student), options, prepared, processes, report)


def _check(place: Path, target: ModelSpec, options: DFlashOptions) -> None:
    """Refuse a folder that holds anything but a head, too large a block, and what the target lacks.

    Raises:
        ConfigError: So it is.
    """
    check_out(place, partial(holds_a_head, is_dflash))
    if options.block > MOST_SLOTS:
        raise ConfigError(option="block", value=options.block, remedy=f"give {MOST_SLOTS} or less")
    _taps(target, options)
    _mask_token(target, options)


def _taps(target: ModelSpec, options: DFlashOptions) -> tuple[int, ...]:
    """Return the boundaries that the head reads.

    Raises:
        ConfigError: The target lacks one of them, or is too shallow for the usual ones.
    """
    taps = options.taps or spread_taps(target.layers, options.layers)
    # not the last: readers take the state after it for the normed one
    return checked_taps(taps, target, range(1, target.layers), "but not after the last")


def _mask_token(target: ModelSpec, options: DFlashOptions) -> int:
    """Return the token id that stands in the slots.

    Raises:
        ConfigError: The target lacks it.
    """
    token = options.mask_token
    if token is None:
        return target.eos_token_ids[0] if target.eos_token_ids else 0
    if not 0 <= token < target.vocab_size:
        raise ConfigError(
            f"but the model has {target.vocab_size} tokens", option="mask_token", value=token,
            remedy="give the id of a token that texts hardly hold",
        )  # fmt: skip
    return token


def _cost(prepared: Prepared, student: BlockStudent) -> float:
    """Return c, by the weights that a draft and a plain step read: a token's share of a whole draft."""
    own = sum(value.numel() for name, value in student.own.by_name.items() if not name.startswith("fc"))
    head = student.record.words * student.record.spec.hidden_size
    return (own + head) / student.steps / step_weights(prepared.target.spec)
