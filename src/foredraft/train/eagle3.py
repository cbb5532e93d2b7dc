"""Train an EAGLE-3 head, and write it in the spelling that `--draft` and other programs read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from foredraft.drafters.heads.eagle3_files import is_eagle3
from foredraft.drafters.heads.eagle3_writing import llama_body, specforge_config
from foredraft.drafters.heads.record import HeadRecord, default_taps
from foredraft.errors import ConfigError
from foredraft.model.spec import ModelSpec
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
        model, options, load, processes, report, lambda target, hash: _check(place, target.spec, options)
    )
    spec, documents = prepared.target.spec, prepared.batches.documents
    words = frequent_words(documents, options.draft_vocabulary, spec)
    longest = max(len(document.ids) for document in documents)
    body = llama_body(spec, longest)
    record = HeadRecord(
        spec=ModelSpec.from_hf(body), spelling="SafeAILab or SpecForge", layer="midlayer",
        taps=_taps(spec, options), target_size=spec.hidden_size,
        words=spec.vocab_size if words is None else len(words),
    )  # fmt: skip
    student = Eagle3Student(
        record, prepared.target.decoder, prepared.target.head_weight, vocabulary=words,
        steps=options.draft_length, decay=options.decay, seed=options.seed,
    )  # fmt: skip
    config = specforge_config(body, record, spec.eos_token_ids, prepared.checkpoint.dtype)
    return train_head(student, config, _cost(prepared, student), options, prepared, processes, report)


def _check(place: Path, target: ModelSpec, options: Eagle3Options) -> None:
    """Refuse a folder that holds anything but a head, and taps that the target lacks.

    Raises:
        ConfigError: So it is.
    """
    check_out(place, partial(holds_a_head, is_eagle3))
    _taps(target, options)


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
