"""Workloads: files with one JSON object per line and a "prompt" in each, the order in which contenders run
them, and the form of prompts: as they are, or as messages of a chat.

An instruct model is used through its chat template: a plan or a figure that was found on raw prompts says
little.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from foredraft.bench.contenders import ALL
from foredraft.errors import ConfigError, Option, invalid_at
from foredraft.files import TEXT
from foredraft.model.config import parse_json

if TYPE_CHECKING:
    from foredraft.model.tokenizer import Tokenizer


SUFFIX = ".jsonl"
EXAMPLE = 'give lines like {"prompt": "Once upon a time"}'


@dataclass(frozen=True, slots=True)
class Workload:
    """A named list of prompts, as text."""

    name: str
    prompts: tuple[str, ...]


def shipped() -> dict[str, Path]:
    """Return the shipped files by name: from the package, or in a checkout from its benchmarks folder."""
    here = Path(__file__).parent / "workloads"
    folder = here if here.is_dir() else Path(__file__).parents[3] / "benchmarks" / "workloads"
    return {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def load_workloads(names: tuple[str, ...], prompts: int | None = None) -> list[Workload]:
    """Load workloads by name or by file."""
    known = shipped()
    paths: dict[str, Path] = {}
    for name in names:
        if name == ALL:
            paths |= known
        elif name in known:
            paths[name] = known[name]
        else:
            if not Path(name).is_file():
                choices = ", ".join([ALL, *known])
                raise ConfigError(option="workload", value=name, remedy=f"give a file, or one of {choices}")
            stem = Path(name).stem
            paths[name if stem in paths or stem in known else stem] = Path(name)
    if not paths:
        raise ConfigError(
            "no workloads come with this copy of Foredraft", remedy=("give ", Option("workload", "FILE"))
        )
    found = {name: _read(path) for name, path in paths.items()}
    most = sys.maxsize if prompts is None else prompts
    counts = {name: min(most, len(texts)) for name, texts in found.items()}
    return [  # evenly spread
        Workload(name, tuple(texts[at * len(texts) // counts[name]] for at in range(counts[name])))
        for name, texts in found.items()
    ]


def prompt_of(line: str, where: str) -> str:
    """Return the "prompt" of a line of JSON."""
    try:
        found = parse_json(line)
    except ValueError as error:
        problem = (
            f"character {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else error
        )
        raise ConfigError(f"{where} is not JSON ({problem})", remedy=EXAMPLE) from None
    prompt = found.get("prompt") if isinstance(found, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f'{where} has no "prompt"', remedy=EXAMPLE)
    return prompt


def _read(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding=TEXT)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror})", remedy=("give another ", Option("workload"))
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {error.start})", remedy="convert it first"
        ) from error
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"{path} holds no prompts", remedy=EXAMPLE)
    return [prompt_of(line, f"line {number} of {path}") for number, line in numbered]


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts that are decoded as one batch."""

    prompts: tuple[int, ...]  # their indices in the workload
    counted: bool  # plain decoding repeats few 4-grams on each of them


def groups_of(counted: Sequence[bool], batch: int) -> list[Group]:
    """Divide the prompts into groups of `batch`, each of prompts that count or of prompts that do not.

    The last group of each kind is filled up with the kind's first prompts: a smaller batch would be another
    measurement.
    """
    groups: list[Group] = []
    for kind in (True, False):
        prompts = [index for index, counts in enumerate(counted) if counts is kind]
        for start in range(0, len(prompts), batch):
            members = [prompts[(start + i) % len(prompts)] for i in range(batch)]
            groups.append(Group(tuple(members), kind))
    return groups


def turns(contenders: Sequence[T], repeat: int) -> Sequence[T]:
    """Return the contenders, backwards in odd repeats, so that none always follows the same other."""
    return contenders[:: -1 if repeat % 2 else 1]


def chat_ids(tokenizer: Tokenizer | None, messages: list[Mapping[str, str]]) -> list[int]:
    if tokenizer is None:
        problem = "needs a tokenizer, but the model's folder has no tokenizer.json"
        raise ConfigError(problem, option="chat", remedy="add the file, or leave the option out")
    if tokenizer.chat is None:
        problem = "needs a chat template, but the model has none"
        remedy = ("leave it out, or give ", Option("model"), " a model trained for chat")
        raise ConfigError(problem, option="chat", remedy=remedy)
    return tokenizer.encode_chat(messages)


@dataclass(frozen=True, slots=True)
class PromptForm:
    chat: bool = False  # each prompt is a user message in the model's chat template
    system: str | None = None  # the system message before it; None for none

    def __post_init__(self) -> None:
        if self.system is None:
            return
        if not self.chat:
            problem = ("has no effect without ", Option("chat"))
            raise ConfigError(problem, option="system", remedy=("add ", Option("chat"), ", or leave it out"))
        if (at := invalid_at(self.system)) is not None:
            fault = f"the system message is not UTF-8 text (character {at})"
            raise ConfigError(fault, remedy="convert it first")

    def applied(self, tokenizer: Tokenizer | None, prompts: Sequence[str]) -> Sequence[str] | list[list[int]]:
        """Return the prompts as requests take them: the token ids of chats, or the texts as they are."""
        if not self.chat:
            return prompts
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [chat_ids(tokenizer, [*before, {"role": "user", "content": text}]) for text in prompts]

    def longest(self, tokenizer: Tokenizer, prompts: Sequence[str]) -> int:
        applied = self.applied(tokenizer, prompts)
        return max(len(tokenizer.encode(each) if isinstance(each, str) else each) for each in applied)


AS_IT_IS = PromptForm()
