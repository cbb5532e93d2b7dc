"""Workloads: files with one JSON object per line and a "prompt" in each; the shipped ones have names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from foredraft.errors import ConfigError, Option
from foredraft.model.config import parse_json

__all__ = ["ALL", "Workload", "load_workloads", "prompt_of", "shipped"]

ALL = "all"
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
    """Load workloads by name or by file.

    Args:
        names: Names of shipped workloads, paths of files, or "all" for every shipped workload.
        prompts: Prompts to take from each, evenly spread over it; None for all.

    Raises:
        ConfigError: A name is neither a workload nor a file, or a line of a file is invalid.
    """
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
    return [Workload(name, _evenly_spread(_read(path), prompts)) for name, path in paths.items()]


def prompt_of(line: str, where: str) -> str:
    """Return the "prompt" of a line of JSON.

    Args:
        line: The line.
        where: Names the line in the error message.

    Raises:
        ConfigError: The line is not JSON, or has no prompt.
    """
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
        text = path.read_text(encoding="utf-8")
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


def _evenly_spread(prompts: list[str], count: int | None) -> tuple[str, ...]:
    if count is None or count >= len(prompts):
        return tuple(prompts)
    return tuple(prompts[index * len(prompts) // count] for index in range(count))
