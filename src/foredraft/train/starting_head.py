"""The EAGLE-3 head that a training starts from: a new one, or one that was trained before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from foredraft.drafters.heads.eagle3_files import FIRST_LAYERS, OTHERS, SPECULATORS, is_eagle3, read_eagle3
from foredraft.drafters.heads.eagle3_writing import llama_body, specforge_lacks, speculators_names
from foredraft.drafters.heads.record import HeadRecord, default_taps
from foredraft.drafters.heads.settings import with_settings
from foredraft.drafters.heads.stored_head import read_stored_head
from foredraft.errors import ConfigError
from foredraft.model.spec import ModelSpec
from foredraft.model.unread import Checkpoint
from foredraft.train.frequent_words import frequent_words
from foredraft.train.packed_documents import Document
from foredraft.train.preparation import checked_taps
from foredraft.train.training_options import Eagle3Options

__all__ = ["StartingHead", "check_start", "new_head", "read_start"]


@dataclass(frozen=True, slots=True)
class StartingHead:
    """A head before its training.

    Attributes:
        record: What it is, in the spelling in which it will be written.
        body: The config of its layer.
        words: The ids that it has logits for; None for all.
        tensors: Its weights; None draws them.
    """

    record: HeadRecord
    body: Mapping[str, Any]
    words: Sequence[int] | None = None
    tensors: Mapping[str, Tensor] | None = None


def check_start(target: Checkpoint, options: Eagle3Options) -> None:
    """Refuse taps that the target lacks, and a head that cannot go on, without reading weights.

    Raises:
        ConfigError: So are the taps; or the folder holds no EAGLE-3 head, or one that is not trained.
        CheckpointError: The head is broken, or for another target.
    """
    folder = options.from_head
    if folder is None:
        _taps(target.spec, options)
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
    words = frequent_words(documents, options.draft_vocabulary, spec)
    body = llama_body(spec, max(len(document.ids) for document in documents))
    record = HeadRecord(
        spec=ModelSpec.from_hf(body), spelling=OTHERS, layer=FIRST_LAYERS[OTHERS], taps=_taps(spec, options),
        target_size=spec.hidden_size, words=spec.vocab_size if words is None else len(words),
    )  # fmt: skip
    return StartingHead(record, body, words)


def read_start(folder: Path, target: Checkpoint) -> StartingHead:
    """Return a head that `check_start` let pass. It embeds with the target's embedding from now on.

    Raises:
        ConfigError: It has a setting that its files cannot have.
        CheckpointError: It is broken.
    """
    head = read_stored_head(folder, target, "from_head")
    spelling, tensors = OTHERS, head.tensors
    if specforge_lacks(head.record) is not None:
        spelling, tensors = SPECULATORS, speculators_names(tensors)
    record = replace(head.record, spelling=spelling, layer=FIRST_LAYERS[spelling], own_embedding=False)
    return StartingHead(record, head.body, None if head.words is None else head.words.tolist(), tensors)


def _taps(target: ModelSpec, options: Eagle3Options) -> tuple[int, ...]:
    """Return the boundaries that a new head reads.

    Raises:
        ConfigError: The target lacks one of them, or is too shallow for the usual ones.
    """
    taps = options.taps or default_taps(target.layers)
    # not 1: readers take a first number of 1 for that of a layer, whose output lies one boundary further
    return checked_taps(taps, target, range(2, target.layers + 1), "the second at the earliest")
