"""Examine a drafter of a loaded model: measure it, try other settings, and say what would be better.

A setting counts as better only if its gain is beyond chance: more than twice its standard error over the same
drafts, and more than LEAST of a round. Better settings are joined, the best first, as long as they gain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.decode.drafter import Drafter
from foredraft.doctor.block_forced import block_drafts
from foredraft.doctor.diagnosis import Diagnosis, Trial
from foredraft.doctor.head_trials import changes, merged, possible, reread, taps_of
from foredraft.doctor.model_notes import model_notes
from foredraft.doctor.sample import SAMPLE
from foredraft.doctor.teacher_forced import (
    Acceptance,
    ReadText,
    acceptance_of,
    head_drafts,
    medusa_acceptance,
    model_acceptance,
    read_text,
)
from foredraft.drafters.block_drafter import BlockDrafter
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.eagle3 import Eagle3
from foredraft.drafters.heads.block_head import load_block
from foredraft.drafters.heads.eagle3_head import load_eagle3
from foredraft.drafters.heads.settings import HeadSettings, write_settings
from foredraft.drafters.medusa import Medusa
from foredraft.errors import ConfigError, Option
from foredraft.llm.loaded import Loaded
from foredraft.model.hub import resolve

__all__ = ["diagnose"]

LENGTH = 4  # tokens of a draft: few heads are accepted further
MOST = 32  # drafts of a text: more change little, and take as much longer
TOKENS = 512  # of a text that are read
FEWEST = 24  # tokens of a text: fewer leave no room for drafts
LEAST = 0.02  # of a round's tokens: a smaller gain is not worth a file
ERRORS = 2.0  # standard errors that a gain has to be


@dataclass(frozen=True, slots=True)
class HeadKind:
    """How the heads of some drafters are examined.

    Attributes:
        drafter: The class of the drafters.
        load: Reads the weights, beside a target.
        drafts: Gives the logits of drafts on a text.
    """

    drafter: type[Any]
    load: Callable[[Any, Any], Any]
    drafts: Callable[[Any, ReadText, int, int], dict[int, Tensor]]


HEADS = (
    HeadKind(Eagle3, load_eagle3, head_drafts),
    HeadKind(BlockDrafter, load_block, block_drafts),
)
Progress = Callable[[str, int, int], None]


def _silent(stage: str, done: int, total: int) -> None:
    return None


def diagnose(
    loaded: Loaded,
    draft: Path,
    texts: Sequence[str | list[int]] = SAMPLE,
    *,
    write: bool = True,
    progress: Progress = _silent,
) -> Diagnosis:
    """Examine the drafter that was loaded from a folder.

    Args:
        loaded: The model, with the drafter.
        draft: The drafter's folder.
        texts: The sample, as texts or token ids.
        write: Write the best setting of a head beside it, for `load` to honour.
        progress: Called as (stage, done, total).

    Raises:
        ConfigError: No such drafter is loaded, or the texts are too short.
    """
    drafters: dict[str, Any] = dict(loaded.engine.drafters)
    ids = _ids(loaded, texts)
    for kind in HEADS:
        head = next((each for each in drafters.values() if isinstance(each, kind.drafter)), None)
        if head is not None:
            return _examine_head(loaded, draft, head, kind, ids, write, progress)
    if isinstance(medusa := drafters.get(Medusa.name), Medusa):
        length = min(LENGTH, len(medusa.head.heads))
        return _measured(
            loaded, draft, medusa, ids, lambda text: medusa_acceptance(medusa.head, text, length, MOST)
        )
    if isinstance(model := drafters.get(DraftModel.name), DraftModel):
        runner, vocabulary = model.draft_pass.runner, model.vocabulary
        notes = model_notes(loaded, runner.decoder.spec, resolve(draft))
        return _measured(
            loaded, draft, model, ids,
            lambda text: model_acceptance(runner, vocabulary, text, LENGTH, MOST), notes,
        )  # fmt: skip
    raise ConfigError(
        "which the doctor cannot examine", option="draft", value=str(draft),
        remedy="give a head of the model, or a draft model with the target's tokenizer",
    )  # fmt: skip


def _ids(loaded: Loaded, texts: Sequence[str | list[int]]) -> list[list[int]]:
    """Return the tokens of each text that is long enough."""
    found: list[list[int]] = []
    for text in texts:
        if isinstance(text, str):
            if loaded.tokenizer is None:
                raise ConfigError(
                    "has no tokenizer, so the sample cannot be encoded", option="model", value=loaded.model,
                    remedy=("give ", Option("tokenizer"), ", the folder of a checkpoint"),
                )  # fmt: skip
            text = loaded.tokenizer.encode(text)
        most = min(TOKENS, loaded.spec.max_positions)
        if len(text) >= FEWEST:
            found.append(text[:most])
    if not found:
        raise ConfigError(f"no text of the sample has {FEWEST} tokens", remedy="give longer texts")
    return found


def _examine_head(
    loaded: Loaded, draft: Path, drafter: Any, kind: HeadKind, ids: list[list[int]], write: bool,
    progress: Progress,
) -> Diagnosis:  # fmt: skip
    target = loaded.spec
    files = drafter.read_files(draft)
    files = replace(files, record=files.record.for_target(target, str(draft)))
    record = files.record
    texts = [read_text(loaded.runner, tokens, taps_of(record, target)) for tokens in ids]
    bench = _HeadBench(loaded, kind, files, texts, min(LENGTH, record.tried_length or LENGTH))
    own = bench.measure(HeadSettings())
    assert own is not None
    tried = list(changes(record, target, max(map(len, ids))))
    best, best_settings, trials = own, HeadSettings(), list[Trial]()
    found: list[tuple[HeadSettings, Acceptance]] = []
    for done, settings in enumerate(tried):
        progress("examine", done, len(tried))
        accepted = bench.measure(settings)
        if accepted is not None:
            found.append((settings, accepted))
            trials.append(_trial(settings, accepted, own))
    while found:
        settings, accepted = max(found, key=lambda each: float(each[1].rounds.mean()))
        if not _is_better(accepted, best):
            break
        best, best_settings = accepted, settings
        rest = [merged(settings, each) for each in tried if not each.given.keys() & settings.given.keys()]
        measured = [(each, bench.measure(each)) for each in rest]
        found = [(each, accepted) for each, accepted in measured if accepted is not None]
    progress("examine", len(tried), len(tried))
    first = _trial(HeadSettings(), own, own)
    written, notes = None, list[str]()
    if write:
        try:
            file = write_settings(draft, best_settings)
            written = str(file) if best is not own else None
        except OSError as error:
            notes.append(f"the setting cannot be written beside the head ({error.strerror})")
    if record.spec.max_positions < loaded.spec.max_positions:
        notes.append(
            f"the head was made for {record.spec.max_positions:,} positions and the target for"
            f" {loaded.spec.max_positions:,}: expect it to draft worse in longer texts"
        )
    return Diagnosis(
        drafter=drafter.name, name=str(draft), drafts=len(own.rounds), own=first, trials=tuple(trials),
        best=first if best is own else _trial(best_settings, best, own), written=written, notes=tuple(notes),
    )  # fmt: skip


class _HeadBench:
    """Measures a head under any setting, over the same drafts."""

    def __init__(
        self, loaded: Loaded, kind: HeadKind, files: Any, texts: list[ReadText], length: int
    ) -> None:
        self.loaded, self.kind, self.files, self.texts, self.length = loaded, kind, files, texts, length
        self.head = kind.load(files, loaded.runner)

    def measure(self, settings: HeadSettings) -> Acceptance | None:
        """Return the acceptance; None where the settings are not possible."""
        record = possible(settings, self.files.record, self.loaded.spec)
        if record is None:
            return None
        head = self.head.read_as(record)
        if reread(self.files.record, record):
            head = self.kind.load(replace(self.files, record=record), self.loaded.runner)
        found = [acceptance_of(self.kind.drafts(head, text, self.length, MOST), text) for text in self.texts]
        joined = found[0]
        for each in found[1:]:
            joined = joined.joined(each)
        return joined


def _measured(
    loaded: Loaded,
    draft: Path,
    drafter: Drafter,
    ids: list[list[int]],
    accepted: Callable[[ReadText], Acceptance],
    notes: tuple[str, ...] = (),
) -> Diagnosis:
    """Return the diagnosis of a drafter that has no other setting."""
    joined: Acceptance | None = None
    for tokens in ids:
        found = accepted(read_text(loaded.runner, tokens, drafter.taps))
        joined = found if joined is None else joined.joined(found)
    assert joined is not None
    own = _trial(HeadSettings(), joined, joined)
    return Diagnosis(
        drafter=drafter.name, name=str(draft), drafts=len(joined.rounds), own=own, best=own, notes=notes
    )


def _trial(settings: HeadSettings, accepted: Acceptance, own: Acceptance) -> Trial:
    gain, doubt = _gain(accepted, own)
    sampled, greedy = accepted.by_position
    return Trial(
        settings=settings.given, sampled=sampled, greedy=greedy, tau=float(accepted.rounds.mean()),
        gain=gain, doubt=doubt,
    )  # fmt: skip


def _gain(one: Acceptance, other: Acceptance) -> tuple[float, float]:
    """Return by how many tokens the rounds of one are longer, and the standard error over the drafts."""
    differences = one.rounds - other.rounds
    error = float(differences.std()) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return float(differences.mean()), error


def _is_better(one: Acceptance, other: Acceptance) -> bool:
    gain, doubt = _gain(one, other)
    return gain > max(ERRORS * doubt, LEAST * float(torch.mean(other.rounds)))
