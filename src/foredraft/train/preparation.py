"""Preparation: from a model and files of data to documents, self-generated if asked for, a target and a
folder.

The texts are kept in the run's folder as they come: a run that is continued writes the rest alone.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from foredraft import demo
from foredraft.decode.params import SamplingParams
from foredraft.drafters.heads.settings import read_settings
from foredraft.drafters.kangaroo import target_hash
from foredraft.errors import ConfigError, Option, RequestError, Text
from foredraft.files import TEMPORARY, errors_named, is_no_file, replacing
from foredraft.loading import load_for, options_for
from foredraft.loading.checkpoints import find_target
from foredraft.loading.machine_limits import use_threads
from foredraft.loading.runners import check_dtype, find_device
from foredraft.model.checkpoint import Checkpoint
from foredraft.model.tokenizer import GIVE_TOKENIZER
from foredraft.train.loop import OnProgress, Prepared
from foredraft.train.target import Batches, Document, FrozenTarget, hold_out
from foredraft.train.texts import DocumentReader
from foredraft.train.training_checkpoints import MAKE_ROOM, Processes, broken_line, whole_lines
from foredraft.train.training_options import TrainOptions
from foredraft.user_cache import cache_folder, make_folder

FILE = "self_generated.jsonl"
ROWS = 32  # sequences of a batch
KEY = "key.json"  # in the folder of a run
LENGTH = 1024  # tokens of a document at most, unless the user says otherwise
HELD_OUT, MAX_HELD_OUT = 0.05, 64  # share of the documents, and their number, that are held out
GROUP_TOKENS = 4096  # of one pass, unless the user says otherwise
# Options that do not make it another run; of files, the content does.
NOT_OF_THE_RUN = ("data", "validation", "work", "fresh", "out", "kept_states")
MAX_LOGITS = 2**26  # float32 logits of one pass of the target or the student: 256 MiB


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user asks for."""

    options: Any  # a `TrainOptions`
    model: str | None  # the target; None for the demo model
    load: Mapping[str, Any]  # options of `load`
    processes: Processes  # those that train together
    report: OnProgress  # told how far the run is


def prepare(asked: Asked, check: Callable[[Any, Checkpoint, str], object]) -> Prepared:
    """Read the data and load the target, which `check` may refuse, given the options and its hash."""
    options: TrainOptions = asked.options
    options.check()
    draftless = {"draft": None} if asked.model is not None else {}
    given = options_for(asked.model or demo.target_path(), **draftless, **asked.load)
    use_threads(given.threads)
    device = find_device(given.device)
    checkpoint = find_target(given)
    check_dtype(device, checkpoint.dtype)
    if checkpoint.tokenizer is None:
        problem = f"{checkpoint.source} has no tokenizer, so no text can be read"
        raise ConfigError(problem, remedy=GIVE_TOKENIZER)
    hash = target_hash(checkpoint.source)
    check(options, checkpoint, hash)
    key = RunKey.of(options, hash)
    folder = _work(options, key, asked.processes)
    length = min(options.length or LENGTH, checkpoint.spec.max_positions)
    documents, held_out, skipped = _documents(asked, checkpoint, length, folder)
    most = max(length, MAX_LOGITS // checkpoint.spec.vocab_size)
    tokens = options.group_tokens or min(GROUP_TOKENS, most, options.step_tokens)
    asked.report("load", 0, 1, "")
    # a student computes in bfloat16 beside 16 bits of any kind, and reads the target's states
    dtype = torch.bfloat16 if checkpoint.dtype == torch.float16 else checkpoint.dtype
    target = FrozenTarget(checkpoint.source, device, dtype)
    asked.report("load", 1, 1, "")
    return Prepared(
        checkpoint, hash, asked.model or "demo", target, Batches(documents, tokens, options.seed), held_out,
        skipped, folder, key.digest, asked.processes,
    )  # fmt: skip


def _documents(
    asked: Asked, checkpoint: Checkpoint, length: int, folder: Path
) -> tuple[list[Document], list[Document], int]:
    """Return the documents to learn from, those that are held out, and how many bad lines were left out."""
    options: TrainOptions = asked.options
    assert checkpoint.tokenizer is not None
    eos = next(iter(checkpoint.spec.eos_token_ids), None)
    read = partial(DocumentReader, checkpoint.tokenizer, eos, length, skip_bad_lines=options.skip_bad_lines)
    reader = read()
    if options.self_generate:
        prompts = reader.prompts(options.data)
        documents = self_generated(asked, checkpoint.spec.vocab_size, prompts, length, folder)
    else:
        documents = reader.corpus(options.data)
    if options.validation:
        held_out = read(option="validation").corpus(options.validation)[:MAX_HELD_OUT]
        return documents, held_out, reader.skipped
    if len(documents) < 2:
        raise ConfigError(
            "holds a single document, and none can be held out", option="data",
            remedy=("give more data, or ", Option("validation")),
        )  # fmt: skip
    return *hold_out(documents, HELD_OUT, MAX_HELD_OUT, options.seed), reader.skipped


def self_generated(
    asked: Asked, vocabulary: int, prompts: Sequence[list[int]], length: int, folder: Path
) -> list[Document]:
    """Return each prompt with what the target writes after it, of which that alone counts."""
    new_tokens, file = min(asked.options.self_generate, length - 1), folder / FILE
    prompts = [prompt[-(length - new_tokens) :] for prompt in prompts]
    if asked.processes.first:
        with errors_named(folder, "work", MAKE_ROOM, f"in which {FILE} cannot be written"):
            done = _written(file, len(prompts), vocabulary)
            if len(done) < len(prompts):
                file.write_text("".join(f"{json.dumps(ids)}\n" for ids in done))  # without half a line
                _write(asked, file, prompts, len(done), new_tokens)
    asked.processes.wait()
    documents = []
    for prompt, written in zip(prompts, _written(file, len(prompts), vocabulary), strict=True):
        if written:
            counts = (False,) * len(prompt) + (True,) * len(written)
            documents.append(Document((*prompt, *written), counts))
    if not documents:
        problem = "holds no prompt that the target continues"
        raise ConfigError(problem, option="data", remedy="give other prompts")
    return documents


def _written(file: Path, most: int, vocabulary: int) -> list[list[int]]:
    """Return the texts that are kept: the whole lines of the file."""
    lines = whole_lines(file)
    for number, ids in enumerate(lines, 1):
        if not isinstance(ids, list) or not all(type(id) is int and 0 <= id < vocabulary for id in ids):
            raise broken_line(file, number, "is no list of the model's token ids")
        if number > most:
            raise broken_line(file, number, f"follows the texts of all {most} prompts")
    return lines


def _write(asked: Asked, file: Path, prompts: Sequence[list[int]], done: int, new_tokens: int) -> None:
    """Add what the target writes after the prompts behind the first ones, which are done."""
    longest, options = max(map(len, prompts)) + new_tokens, asked.options
    llm = load_for(lambda *_: (ROWS, longest), asked.model, **asked.load)
    params = SamplingParams(temperature=options.self_temperature, max_new_tokens=new_tokens)
    with file.open("a") as kept:
        for first in range(done, len(prompts), ROWS):
            batch = list(prompts[first : first + ROWS])
            each = [params.replace(seed=options.seed + first + n) for n in range(len(batch))]
            for output in llm.generate(batch, each):
                if output.error is not None:
                    raise RequestError(f"the target could not continue a prompt: {output.error}")
                kept.write(json.dumps(output.token_ids) + "\n")
            kept.flush()
            asked.report("self-generate", min(first + ROWS, len(prompts)), len(prompts), "")


class RunKey(NamedTuple):
    """What makes a run itself: the target, its files' content, and the options that decide its figures."""

    text: str  # all of it as JSON, which no other run has
    digest: str  # of what checkpoints of one run share: all but where it is to end

    @classmethod
    def of(cls, options: TrainOptions, target: str) -> RunKey:
        files = {str(file): _digest(file, "data") for file in options.data}
        files |= {str(file): _digest(file, "validation") for file in options.validation}
        settings = {name: value for name, value in asdict(options).items() if name not in NOT_OF_THE_RUN}
        if (head := getattr(options, "from_head", None)) is not None:
            parts = [file for file in sorted(head.glob("*.*")) if file.suffix in (".json", ".safetensors")]
            files |= {str(file): _digest(file, "from_head") for file in parts}
            settings["head_settings"] = read_settings(head).given  # they may lie elsewhere
        lasting = {name: value for name, value in settings.items() if name != "steps"}
        text, same = (
            json.dumps([target, files, each], sort_keys=True, default=str) for each in (settings, lasting)
        )
        return cls(text, hashlib.sha256(same.encode()).hexdigest())


def _work(options: TrainOptions, key: RunKey, processes: Processes) -> Path:
    """Return the folder of the run, with its key, after making it the run's own or checking that it is."""
    folder, text = options.work, key.text
    if folder is None:
        kept = cache_folder("training")
        if kept is None:
            problem = "there is no cache folder for the run's checkpoints"
            raise ConfigError(problem, remedy=("give ", Option("work")))
        folder = kept / hashlib.sha256(text.encode()).hexdigest()[:32]
    if processes.first:
        with errors_named(folder, "work", "give a folder that can be"):
            _claim(folder, text, fresh=options.fresh)
    processes.wait()
    return folder


def _claim(folder: Path, key: str, *, fresh: bool) -> None:
    file = folder / KEY
    remedy: Text = "give a new folder"
    if fresh and file.is_file():
        shutil.rmtree(folder)
    if file.is_file():
        if file.read_bytes() == key.encode():
            return
        problem = "which holds a run of another target, other data or other options"
        remedy = ("give a new folder, or ", Option("fresh"))
    else:
        make_folder(folder)
        named = (KEY,) if file.is_file() else ()  # another process may claim the same run at this moment
        if all(each.name in named or each.name.startswith(TEMPORARY) for each in folder.iterdir()):
            with replacing(file) as new:
                new.write_text(key, encoding="utf-8")
            return
        problem = "which holds other files"
    raise ConfigError(problem, option="work", value=str(folder), remedy=remedy)


def check_out(place: Path, is_ours: Callable[[Path], bool]) -> None:
    """Check that a folder may be replaced: it is not there, empty, or holds what a former run wrote."""
    with errors_named(place, "out", "give another folder", "which cannot be read"):
        if not place.exists() or (place.is_dir() and (not any(place.iterdir()) or is_ours(place))):
            return
    problem = "which holds other files" if place.is_dir() else "which is no folder"
    raise ConfigError(problem, option="out", value=str(place), remedy="give a new folder")


def _digest(file: Path, option: str) -> str:
    if is_no_file(file):
        raise ConfigError("which is no file", option=option, value=str(file), remedy="give a file")
    with errors_named(file, option, "give a file", "which cannot be read"), file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
