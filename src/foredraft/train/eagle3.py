"""Train an EAGLE-3 head, and write it in the spelling that `--draft` and other programs read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from foredraft.drafters.heads.eagle3_files import is_eagle3
from foredraft.drafters.heads.eagle3_writing import llama_body, specforge_config
from foredraft.drafters.heads.record import HeadRecord, default_taps
from foredraft.drafters.heads.stored_head import read_stored_head
from foredraft.errors import ConfigError
from foredraft.model.spec import ModelSpec
from foredraft.model.unread import Checkpoint
from foredraft.train.eagle3_student import Eagle3Student
from foredraft.train.frequent_words import frequent_words
from foredraft.train.head_run import train_head
from foredraft.train.loop import OnProgress
from foredraft.train.preparation import Prepared, check_out, prepare
from foredraft.train.processes import Processes, joined
from foredraft.train.result import Result
from foredraft.train.target import step_weights
from foredraft.train.training_options import Eagle3Options
from foredraft.train.written_drafter import holds_a_head

__all__ = ["train_eagle3"]

SPELLING, LAYER = "SafeAILab or SpecForge", "midlayer"  # of what is written


def train_eagle3(
    options: Eagle3Options,
    model: str | None = None,
    *,
    report: OnProgress = lambda stage, done, total, note: None,
    **load: Any,
) -> Result:
    """Train an EAGLE-3 head, or continue its training.

    Arguments, result and errors as `adapter.train_adapter`.
    """
    with joined(load.get("device")) as processes:
        return _trained(options, model, processes, report, load)


def _trained(
    options: Eagle3Options,
    model: str | None,
    processes: Processes,
    report: OnProgress,
    load: Mapping[str, Any],
) -> Result:
    place = options.out
    prepared = prepare(
        model, options, load, processes, report, lambda target, hash: _check(place, target, options)
    )
    target = prepared.target
    start = _new(prepared, options) if options.from_head is None else _start(prepared.checkpoint, options)
    student = Eagle3Student(
        start.record, target.decoder, target.head_weight, vocabulary=start.words, steps=options.draft_length,
        decay=options.decay, seed=options.seed, start=start.tensors,
    )  # fmt: skip
    config = specforge_config(start.body, start.record, target.spec.eos_token_ids, prepared.checkpoint.dtype)
    return train_head(student, config, _cost(prepared, student), options, prepared, processes, report)


def _check(place: Path, target: Checkpoint, options: Eagle3Options) -> None:
    """Refuse a folder that holds anything but a head, taps that the target lacks, and a head of another one.

    Raises:
        ConfigError: So it is.
        CheckpointError: The head to start from is broken, or for another target.
    """
    check_out(place, partial(holds_a_head, is_eagle3))
    if options.from_head is None:
        _taps(target.spec, options)
    else:
        _start(target, options)


class Start(NamedTuple):
    """What a training starts from.

    Attributes:
        record: The head.
        body: The config of its layer.
        words: The ids that it has logits for, ascending; None for all.
        tensors: Its weights; None draws them.
    """

    record: HeadRecord
    body: Mapping[str, Any]
    words: Sequence[int] | None
    tensors: Mapping[str, Tensor] | None


def _new(prepared: Prepared, options: Eagle3Options) -> Start:
    """Return a head without weights, of the usual form."""
    spec, documents = prepared.target.spec, prepared.batches.documents
    words = frequent_words(documents, options.draft_vocabulary, spec)
    body = llama_body(spec, max(len(document.ids) for document in documents))
    record = HeadRecord(
        spec=ModelSpec.from_hf(body), spelling=SPELLING, layer=LAYER, taps=_taps(spec, options),
        target_size=spec.hidden_size, words=spec.vocab_size if words is None else len(words),
    )  # fmt: skip
    return Start(record, body, words, None)


def _start(target: Checkpoint, options: Eagle3Options) -> Start:
    """Return the head to start from. It embeds with the target's embedding from now on.

    Raises:
        ConfigError: The folder holds no EAGLE-3 head, or one of a form that is not trained.
        CheckpointError: The head is broken, or for another target.
    """
    folder = options.from_head
    assert folder is not None
    if not is_eagle3(folder):
        raise ConfigError(
            "which holds no EAGLE-3 head",
            option="from_head",
            value=str(folder),
            remedy="give the folder of one",
        )
    head = read_stored_head(folder, target, "from_head")
    spec, taps = head.record.spec, head.record.taps or ()
    for feature, present in {
        f"{spec.layers} layers": spec.layers != 1,
        f"a hidden size of {spec.hidden_size} beside the target's {target.spec.hidden_size}": (
            spec.hidden_size != target.spec.hidden_size
        ),
        "a tap after layer 1, which readers of what is written take for another": taps[0] == 1,
    }.items():
        if present:
            raise ConfigError(
                f"which has {feature}", option="from_head", value=str(folder), remedy="give another head"
            )
    record = replace(head.record, spelling=SPELLING, layer=LAYER, own_embedding=False)
    words = None if head.words is None else head.words.tolist()
    return Start(record, head.body, words, head.tensors)


def _taps(target: ModelSpec, options: Eagle3Options) -> tuple[int, ...]:
    """Return the boundaries that the head reads.

    Raises:
        ConfigError: The target lacks one of them, or is too shallow for the usual ones.
    """
    taps = options.taps or default_taps(target.layers)
    if list(taps) != sorted(set(taps)) or not 2 <= taps[0] <= taps[-1] <= target.layers:
        # 1 first: readers take such numbers for those of layers, whose outputs lie one boundary further
        raise ConfigError(
            f"but the target has {target.layers} layers, and a head reads after some of them in ascending"
            " order, the second at the earliest",
            option="taps", value=",".join(map(str, taps)), remedy="give others, such as 2,4,6",
        )  # fmt: skip
    return taps


def _cost(prepared: Prepared, student: Eagle3Student) -> float:
    """Return c, by the weights that a draft step and a plain step read."""
    own = sum(value.numel() for name, value in student.own.by_name.items() if not name.startswith("fc"))
    return own / step_weights(prepared.target.spec)
