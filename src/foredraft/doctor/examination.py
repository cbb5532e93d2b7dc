"""Examine a drafter of a loaded model: measure it, try other settings, and say what would be better.

A setting counts as better only if its gain is beyond chance: more than twice its standard error over the same
drafts, and more than LEAST of a round. Better settings are joined, the best first, as long as they gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.decode.drafter import Drafter
from foredraft.doctor.teacher_forced import (
    DraftAcceptance,
    ReadText,
    acceptance_of,
    block_drafts,
    head_drafts,
    medusa_drafts,
    model_drafts,
    p_eagle_drafts,
    read_text,
)
from foredraft.drafters.block_drafter import BlockDrafter, load_block
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.eagle3 import Eagle3, load_eagle3
from foredraft.drafters.heads.record import HeadRecord
from foredraft.drafters.heads.settings import HeadSettings, write_settings
from foredraft.drafters.medusa import Medusa
from foredraft.drafters.mtp import MTP, load_mtp
from foredraft.drafters.p_eagle import PEagle, load_p_eagle
from foredraft.errors import CheckpointError, ConfigError, ForedraftError, Option
from foredraft.llm.loaded import Loaded
from foredraft.model.locate import resolve
from foredraft.model.source import ModelSource
from foredraft.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingTrial:
    """The acceptance under one setting."""

    settings: Mapping[str, Any]  # what differs from the drafter's own files, by name
    sampled: tuple[float, ...]  # by position, given all before, at temperature 1
    greedy: tuple[float, ...]  # the same at temperature 0
    tau: float  # tokens of a round at temperature 1, the target's own included
    gain: float = 0.0  # of `tau` over the drafter as its files say, in tokens
    doubt: float = 0.0  # standard error of `gain`


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What the doctor found."""

    drafter: str  # its kind
    name: str  # the drafter's folder or hub id
    drafts: int  # drafts that were measured
    own: SettingTrial  # the acceptance with the settings of the drafter's own files
    trials: tuple[SettingTrial, ...] = ()  # the acceptance under each other setting
    best: SettingTrial  # the best setting; `own` where no other is better by more than chance
    written: str | None = None  # the file that holds the best setting from now on; None: nothing was written
    notes: tuple[str, ...] = ()  # what else lowers the acceptance, or will

    @property
    def improved(self) -> bool:
        """Whether another setting is better than that of the drafter's files."""
        return self.best is not self.own

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain JSON values."""
        return asdict(self) | {"improved": self.improved}


SAMPLE = (
    "The harbour was quiet in the early morning. A few boats lay at the pier, and the gulls sat on the"
    " posts and waited. When the first light came over the hills, the men began to load the nets. They spoke"
    " little, because each of them knew what he had to do. By the time the sun had risen, the boats"
    " had left the bay, and only the smell of tar and salt was left behind. The children came down to the"
    " beach and looked for shells, as they did every day in summer.",
    "def mean(values):\n    \"\"\"Return the mean of a list of numbers.\"\"\"\n    if not values:\n"
    "        raise ValueError(\"the list is empty\")\n    total = 0.0\n    for value in values:\n"
    "        total += value\n    return total / len(values)\n\n\ndef variance(values):\n"
    "    \"\"\"Return the variance of a list of numbers.\"\"\"\n    center = mean(values)\n"
    "    return mean([(value - center) ** 2 for value in values])\n",
    "Question: How many days does a leap year have, and when is a year a leap year?\nAnswer: A leap year has"
    " 366 days. A year is a leap year if it can be divided by 4, unless it can be divided by 100. A"
    " year that can be divided by 400 is a leap year, too. So 2000 was a leap year, but 1900 was not.\n"
    "Question: How many hours does a week have?\nAnswer: A week has 7 days of 24 hours each, so"
    " it has 168 hours.",
    "| city | country | river |\n|---|---|---|\n| Paris | France | Seine |\n| London | England | Thames |\n"
    "| Vienna | Austria | Danube |\n| Budapest | Hungary | Danube |\n| Rome | Italy | Tiber |\n"
    "| Cairo | Egypt | Nile |\n| Hamburg | Germany | Elbe |\n| Lisbon | Portugal | Tagus |\n",
)  # fmt: skip


THETA = 10_000.0  # with which SafeAILab's program trains, whatever the config says
SHIFTS = (-1, 1)


def changes(record: HeadRecord, target: ModelSpec, longest: int) -> Iterator[HeadSettings]:
    """Yield each setting that differs from the record in one thing."""
    for shift in SHIFTS:
        yield HeadSettings(tap_shift=shift)
    for theta in dict.fromkeys((THETA, target.rope.theta)):
        if theta != record.spec.rope.theta:
            yield HeadSettings(rope_theta=theta)
    for flag in record.misread:
        yield HeadSettings(**{flag: not getattr(record, flag)})
    if record.own_head:
        yield HeadSettings(own_head=False)
    if record.own_embedding:
        yield HeadSettings(own_embedding=False)
    trained = record.spec.max_positions
    for window in dict.fromkeys((trained, trained // 2)):
        if 0 < window < longest:
            yield HeadSettings(window=window)


def model_notes(loaded: Loaded, draft: ModelSpec, source: ModelSource) -> tuple[str, ...]:
    """Return one sentence for each mismatch of a draft model with the target."""
    notes: list[str] = []
    if draft.max_positions < loaded.spec.max_positions:
        notes.append(
            f"the draft model was made for {draft.max_positions:,} positions and the target for"
            f" {loaded.spec.max_positions:,}: it drafts nothing beyond its own length"
        )
    try:
        tokenizer = source.tokenizer(draft.vocab_size)
    except ForedraftError as error:
        return (*notes, f"the draft model's tokenizer cannot be read: {error}")
    target = loaded.tokenizer
    if target is None or tokenizer is None:
        return tuple(notes)
    own, template = target.chat, tokenizer.chat
    if own is not None and template is None:
        notes.append(
            "the target has a chat template and the draft model has none: a base model drafts for a tuned"
            " target, which costs acceptance in conversations; give its tuned version"
        )
    elif own is not None and template is not None and own.templates != template.templates:
        notes.append(
            "the chat templates of target and draft model differ: the draft model was tuned on prompts of"
            " another form than the target's"
        )
    if not target.has_ids_of(tokenizer):
        notes.append(
            "the tokenizers give some tokens different ids, or one has tokens that the other lacks: those are"
            " never drafted"
        )
    return tuple(notes)


LENGTH = 4  # tokens of a draft: few heads are accepted further
MOST = 32  # drafts of a text: more change little, and take as much longer
TOKENS = 512  # of a text that are read
FEWEST = 24  # tokens of a text: fewer leave no room for drafts
LEAST = 0.02  # of a round's tokens: a smaller gain is not worth a file
OF_WEIGHTS = ("own_head", "own_embedding", "states_first", "folded_norms")  # settings that change weights
ERRORS = 2.0  # standard errors that a gain has to be


@dataclass(frozen=True, slots=True)
class HeadKind:
    """How the heads of some drafters are examined."""

    drafter: type[Any]  # the class of the drafters
    load: Callable[[Any, Any], Any]  # reads the weights, beside a target
    drafts: Callable[[Any, ReadText, int, int], dict[int, Tensor]]  # gives the logits of drafts on a text


HEADS = (
    HeadKind(MTP, load_mtp, head_drafts),
    HeadKind(PEagle, load_p_eagle, p_eagle_drafts),
    HeadKind(Eagle3, load_eagle3, head_drafts),
    HeadKind(BlockDrafter, load_block, block_drafts),
)


def diagnose(
    loaded: Loaded,
    draft: Path,
    texts: Sequence[str | list[int]] = SAMPLE,
    *,
    write: bool = True,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Diagnosis:
    """Examine the drafter that was loaded from a folder."""
    drafters: dict[str, Any] = dict(loaded.engine.drafters)
    ids = _ids(loaded, texts)
    for kind in HEADS:
        head = next((each for each in drafters.values() if isinstance(each, kind.drafter)), None)
        if head is not None:
            return _examine_head(loaded, draft, head, kind, ids, write, progress)
    if isinstance(medusa := drafters.get(Medusa.name), Medusa):
        length = min(LENGTH, len(medusa.head.heads))
        return _measured(
            loaded, draft, medusa, ids, lambda text: medusa_drafts(medusa.head, text, length, MOST)
        )
    if isinstance(model := drafters.get(DraftModel.name), DraftModel):
        found = _measured(loaded, draft, model, ids, lambda text: model_drafts(model, text, LENGTH, MOST))
        spec = model.draft_pass.runner.decoder.spec
        return replace(found, notes=model_notes(loaded, spec, resolve(draft)))
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
    progress: Callable[[str, int, int], None],
) -> Diagnosis:  # fmt: skip
    target, files = loaded.spec, drafter.files
    record = files.record.for_target(target, str(draft))
    near = {layer + shift for layer in record.aux_layers or () for shift in (0, *SHIFTS)}  # any setting's
    aux_layers = sorted(near.intersection(range(target.layers + 1)))
    texts = [read_text(loaded.runner, tokens, aux_layers) for tokens in ids]
    files, length = replace(files, record=record), min(LENGTH, record.tried_length or LENGTH)
    bench = _HeadBench(loaded, kind, files, kind.load(files, loaded.runner), texts, length)
    own = bench.measure(HeadSettings())
    assert own is not None
    tried = list(changes(record, target, max(map(len, ids))))
    found: list[tuple[HeadSettings, DraftAcceptance]] = []
    for done, settings in enumerate(tried):
        progress("examine", done, len(tried))
        if (accepted := bench.measure(settings)) is not None:
            found.append((settings, accepted))
    trials = tuple(_trial(settings, accepted, own) for settings, accepted in found)
    best, best_settings = own, HeadSettings()
    while found:
        settings, accepted = max(found, key=lambda each: float(each[1].rounds.mean()))
        if not _is_better(accepted, best):
            break
        best, best_settings = accepted, settings
        rest = [
            HeadSettings(**{**asdict(settings), **each.given})
            for each in tried
            if not each.given.keys() & settings.given.keys()
        ]
        found = [(each, accepted) for each in rest if (accepted := bench.measure(each)) is not None]
    progress("examine", len(tried), len(tried))
    written, notes = None, list[str]()
    if write:
        try:
            file = write_settings(draft, best_settings)
            written = str(file) if best is not own else None
        except OSError as error:
            notes.append(f"the setting cannot be written beside the head ({error.strerror})")
    if record.spec.max_positions < target.max_positions:
        notes.append(
            f"the head was made for {record.spec.max_positions:,} positions and the target for"
            f" {target.max_positions:,}: expect it to draft worse in longer texts"
        )
    first = _trial(HeadSettings(), own, own)
    return Diagnosis(
        drafter=drafter.name, name=str(draft), drafts=len(own.rounds), own=first, trials=trials,
        best=first if best is own else _trial(best_settings, best, own), written=written, notes=tuple(notes),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _HeadBench:
    """Measures a head under any setting, over the same drafts."""

    loaded: Loaded
    kind: HeadKind
    files: Any
    head: Any  # with the weights of these files
    texts: list[ReadText]
    length: int

    def measure(self, settings: HeadSettings) -> DraftAcceptance | None:
        """Return the acceptance; None where the head or the target does not allow the settings."""
        before = self.files.record
        try:
            after = settings.applied(before, self.loaded.spec)
        except CheckpointError:
            return None
        head = self.head.read_as(after)
        if any(getattr(before, flag, None) != getattr(after, flag, None) for flag in OF_WEIGHTS):
            head = self.kind.load(replace(self.files, record=after), self.loaded.runner)
        return DraftAcceptance.joined(
            acceptance_of(self.kind.drafts(head, text, self.length, MOST), text) for text in self.texts
        )


def _measured(
    loaded: Loaded,
    draft: Path,
    drafter: Drafter,
    ids: list[list[int]],
    drafts: Callable[[ReadText], dict[int, Tensor]],
) -> Diagnosis:
    """Return the diagnosis of a drafter that has no other setting."""
    texts = (read_text(loaded.runner, tokens, drafter.aux_layers) for tokens in ids)
    joined = DraftAcceptance.joined(acceptance_of(drafts(text), text) for text in texts)
    own = _trial(HeadSettings(), joined, joined)
    return Diagnosis(drafter=drafter.name, name=str(draft), drafts=len(joined.rounds), own=own, best=own)


def _trial(settings: HeadSettings, accepted: DraftAcceptance, own: DraftAcceptance) -> SettingTrial:
    gain, doubt = _gain(accepted, own)
    sampled, greedy = accepted.by_position
    return SettingTrial(
        settings=settings.given, sampled=sampled, greedy=greedy, tau=float(accepted.rounds.mean()),
        gain=gain, doubt=doubt,
    )  # fmt: skip


def _gain(one: DraftAcceptance, other: DraftAcceptance) -> tuple[float, float]:
    """Return by how many tokens the rounds of one are longer, and the standard error over the drafts."""
    differences = one.rounds - other.rounds
    error = float(differences.std()) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return float(differences.mean()), error


def _is_better(one: DraftAcceptance, other: DraftAcceptance) -> bool:
    gain, doubt = _gain(one, other)
    return gain > max(ERRORS * doubt, LEAST * float(torch.mean(other.rounds)))
