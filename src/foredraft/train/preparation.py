"""Preparation: from a model and files of data to documents, a frozen target and the folder of a run."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from foredraft import demo
from foredraft.drafters.adapter_files import target_hash
from foredraft.drafters.heads.settings import read_settings
from foredraft.errors import ConfigError, Option
from foredraft.files import TEMPORARY, is_no_file, replacing
from foredraft.loading import options_for
from foredraft.loading.checkpoints import find_target
from foredraft.loading.device import check_dtype, find_device
from foredraft.loading.threads import use_threads
from foredraft.model.spec import ModelSpec
from foredraft.model.tokenizer import GIVE_TOKENIZER
from foredraft.model.unread import Checkpoint
from foredraft.train.batches import Batches, hold_out
from foredraft.train.loop import OnProgress
from foredraft.train.packed_documents import Document
from foredraft.train.processes import Processes
from foredraft.train.self_generation import self_generated
from foredraft.train.target import FrozenTarget
from foredraft.train.texts import Reader
from foredraft.train.training_options import TrainOptions
from foredraft.user_cache import cache_folder, make_folder

__all__ = ["Prepared", "check_out", "checked_taps", "prepare"]

KEY = "key.json"  # in the folder of a run
LENGTH = 1024  # tokens of a document at most, unless the user says otherwise
HELD_OUT, MAX_HELD_OUT = 0.05, 64  # share of the documents, and their number, that are held out
GROUP_TOKENS = 4096  # of one pass, unless the user says otherwise
# Options that do not make it another run; of files, the content does.
NOT_OF_THE_RUN = ("data", "validation", "work", "fresh", "out", "kept_states")
MAX_LOGITS = 2**26  # float32 logits of one pass of the target or the student: 256 MiB


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a run starts from.

    Attributes:
        checkpoint: The target's, not loaded.
        hash: The target's hash.
        name: The target's name, for display.
        target: The target.
        batches: The data.
        held_out: Documents of the validation.
        skipped: Bad lines that were left out.
        folder: Of checkpoints and logs.
        digest: Of what makes it the same run.
    """

    checkpoint: Checkpoint
    hash: str
    name: str
    target: FrozenTarget
    batches: Batches
    held_out: list[Document]
    skipped: int
    folder: Path
    digest: str


def prepare(
    model: str | None,
    options: TrainOptions,
    load: Mapping[str, Any],
    processes: Processes,
    report: OnProgress,
    check_place: Callable[[Checkpoint, str], object],
) -> Prepared:
    """Read the data and load the target.

    Args:
        model: A folder or a hub id; None is the demo target.
        options: Of the training.
        load: Of the arguments of `foredraft.load`: revision, dtype, device, threads.
        processes: Those that train together.
        report: Told how far it is.
        check_place: Given the target and its hash, refuses the folder to write, before anything is computed.

    Raises:
        ConfigError: An option or a file of data cannot be used.
        CheckpointError: The target cannot be loaded.
    """
    options.check()
    draftless = {"draft": None} if model is not None else {}
    given = options_for(model or demo.target_path(), **draftless, **load)
    use_threads(given.threads)
    device = find_device(given.device)
    checkpoint = find_target(given)
    check_dtype(device, checkpoint.dtype)
    if checkpoint.tokenizer is None:
        raise ConfigError(
            f"{checkpoint.source} has no tokenizer, so no text can be read",
            remedy=GIVE_TOKENIZER,
        )
    hash = target_hash(checkpoint.folder)
    check_place(checkpoint, hash)
    key = RunKey.of(options, hash)
    folder = _work(options, key, processes)
    length = min(options.length or LENGTH, checkpoint.spec.max_positions)
    eos = next(iter(checkpoint.spec.eos_token_ids), None)
    reader = Reader(checkpoint.tokenizer, eos, length, skip_bad_lines=options.skip_bad_lines)
    if options.self_generate:
        prompts = reader.prompts(options.data)
        documents = self_generated(
            model, load, prompts, options, length, checkpoint.spec.vocab_size, folder, processes, report
        )
    else:
        documents = reader.corpus(options.data).documents
    skipped = reader.skipped
    if options.validation:
        held_out = (
            Reader(
                checkpoint.tokenizer, eos, length, skip_bad_lines=options.skip_bad_lines, option="validation"
            )
            .corpus(options.validation)
            .documents[:MAX_HELD_OUT]
        )
    elif len(documents) < 2:
        raise ConfigError(
            "holds a single document, and none can be held out", option="data",
            remedy=("give more data, or ", Option("validation")),
        )  # fmt: skip
    else:
        documents, held_out = hold_out(documents, HELD_OUT, MAX_HELD_OUT, options.seed)
    most = max(length, MAX_LOGITS // checkpoint.spec.vocab_size)
    tokens = options.group_tokens or min(GROUP_TOKENS, most, options.step_tokens)
    report("load", 0, 1, "")
    # a student computes in bfloat16 beside 16 bits of any kind, and reads the target's states
    dtype = torch.bfloat16 if checkpoint.dtype == torch.float16 else checkpoint.dtype
    target = FrozenTarget(checkpoint.folder, device, dtype)
    report("load", 1, 1, "")
    return Prepared(
        checkpoint,
        hash,
        model or "demo",
        target,
        Batches(documents, tokens, options.seed),
        held_out,
        skipped,
        folder,
        key.digest,
    )


@dataclass(frozen=True, slots=True)
class RunKey:
    """What makes a run itself: the target, the content of the files, and the options that decide its figures.

    Attributes:
        target: The target's hash.
        files: The digest of each file.
        settings: The options by name.
    """

    target: str
    files: Mapping[str, str]
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, options: TrainOptions, target: str) -> RunKey:
        """Return the key of a run.

        Raises:
            ConfigError: A file cannot be read.
        """
        files = {str(file): _digest(file, "data") for file in options.data}
        files |= {str(file): _digest(file, "validation") for file in options.validation}
        settings = {name: value for name, value in asdict(options).items() if name not in NOT_OF_THE_RUN}
        if (head := options.starting_head) is not None:
            parts = [file for file in sorted(head.glob("*.*")) if file.suffix in (".json", ".safetensors")]
            files |= {str(file): _digest(file, "from_head") for file in parts}
            settings["head_settings"] = read_settings(head).given  # they may lie elsewhere
        return cls(target, files, settings)

    @property
    def text(self) -> str:
        """All of it as JSON, which no other run has."""
        return self._as_json(self.settings)

    @property
    def digest(self) -> str:
        """The digest of what checkpoints of one run share: all but where it is to end."""
        lasting = {name: value for name, value in self.settings.items() if name != "steps"}
        return hashlib.sha256(self._as_json(lasting).encode()).hexdigest()

    def _as_json(self, settings: Mapping[str, Any]) -> str:
        return json.dumps([self.target, self.files, settings], sort_keys=True, default=str)


def _work(options: TrainOptions, key: RunKey, processes: Processes) -> Path:
    """Return the folder of the run, with its key."""
    folder = options.work
    if folder is None:
        kept = cache_folder("training")
        if kept is None:
            raise ConfigError(
                "there is no cache folder for the run's checkpoints", remedy=("give ", Option("work"))
            )
        folder = kept / hashlib.sha256(key.text.encode()).hexdigest()[:32]
    if processes.first:
        _claim(folder, key.text, options)
    processes.wait()
    return folder


def _claim(folder: Path, key: str, options: TrainOptions) -> None:
    """Make the folder a run's own, or check that it is."""
    file = folder / KEY
    try:
        if options.fresh and file.is_file():
            shutil.rmtree(folder)
        if not file.is_file():
            make_folder(folder)
            named = (KEY,) if file.is_file() else ()  # another process may claim the same run at this moment
            if any(
                each.name not in named and not each.name.startswith(TEMPORARY) for each in folder.iterdir()
            ):
                raise ConfigError(
                    "which holds other files", option="work", value=str(folder), remedy="give a new folder"
                )
            with replacing(file) as new:
                new.write_text(key, encoding="utf-8")
        elif file.read_bytes() != key.encode():
            raise ConfigError(
                "which holds a run of another target, other data or other options", option="work",
                value=str(folder), remedy=("give a new folder, or ", Option("fresh")),
            )  # fmt: skip
    except OSError as error:
        raise ConfigError(
            f"which cannot be written ({error.strerror})", option="work", value=str(folder),
            remedy="give a folder that can be",
        ) from error  # fmt: skip


def check_out(place: Path, is_ours: Callable[[Path], bool]) -> None:
    """Check that a folder may be replaced: it is not there, empty, or holds what a former run wrote.

    Raises:
        ConfigError: It holds anything else, which would be lost.
    """
    try:
        if not place.exists() or (place.is_dir() and (not any(place.iterdir()) or is_ours(place))):
            return
    except OSError as error:
        raise ConfigError(
            f"which cannot be read ({error.strerror})", option="out", value=str(place),
            remedy="give another folder",
        ) from error  # fmt: skip
    problem = "which holds other files" if place.is_dir() else "which is no folder"
    raise ConfigError(problem, option="out", value=str(place), remedy="give a new folder")


def checked_taps(taps: tuple[int, ...], target: ModelSpec, allowed: range, where: str) -> tuple[int, ...]:
    """Return the boundaries that a head reads.

    Args:
        taps: The boundaries.
        target: The target.
        allowed: Those that there are.
        where: Says which these are, for the message.

    Raises:
        ConfigError: The target lacks one of them, or they do not ascend.
    """
    if list(taps) != sorted(set(taps)) or not set(taps) <= set(allowed):
        raise ConfigError(
            f"but the target has {target.layers} layers, and a head reads after some of them in ascending"
            f" order, {where}",
            option="taps", value=",".join(map(str, taps)), remedy="give others, such as 2,4,6",
        )  # fmt: skip
    return taps


def _digest(file: Path, option: str) -> str:
    if is_no_file(file):
        raise ConfigError("which is no file", option=option, value=str(file), remedy="give a file")
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(
            f"which cannot be read ({error.strerror})", option=option, value=str(file), remedy="give a file"
        ) from error
