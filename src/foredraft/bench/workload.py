"""Workloads: files of prompts, a JSON object a line with a "prompt" in it; the shipped ones have names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from foredraft.errors import ConfigError

__all__ = ["Workload", "load_workloads", "prompt_of", "shipped"]

ALL = "all"
SUFFIX = ".jsonl"


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    prompts: tuple[str, ...]


def shipped() -> dict[str, Path]:
    """The files that come with Foredraft, by name: beside this one, or in a checkout's benchmarks."""
    here = Path(__file__).parent / "workloads"
    folder = here if here.is_dir() else Path(__file__).parents[3] / "benchmarks" / "workloads"
    return {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def load_workloads(names: tuple[str, ...], prompts: int | None = None) -> list[Workload]:
    """Workloads by name or file; "all": every shipped one. prompts: so many of each, evenly spread over it.

    Raises ConfigError that names what is not there, or a file's line and what is wrong with it.
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
                raise ConfigError(f"workload is {name!r}; give a file, or one of {choices}")
            stem = Path(name).stem
            paths[name if stem in paths or stem in known else stem] = Path(name)
    if not paths:
        raise ConfigError("no workloads come with this copy of Foredraft; give workload='FILE'")
    return [Workload(name, _some(_read(path), prompts)) for name, path in paths.items()]


def prompt_of(line: str, where: str) -> str:
    """The "prompt" of a line of JSON. Raises ConfigError that begins with `where`."""
    remedy = 'give lines like {"prompt": "Once upon a time"}'
    try:
        found = json.loads(line)
    except ValueError as error:
        problem = (
            f"character {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else error
        )
        raise ConfigError(f"{where} is not JSON ({problem}); {remedy}") from None
    prompt = found.get("prompt") if isinstance(found, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f'{where} has no "prompt"; {remedy}')
    return prompt


def _read(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give another workload") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from error
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f'{path} holds no prompts; give lines like {{"prompt": "Once upon a time"}}')
    return [prompt_of(line, f"line {number} of {path}") for number, line in numbered]


def _some(prompts: list[str], count: int | None) -> tuple[str, ...]:
    if count is None or count >= len(prompts):
        return tuple(prompts)
    return tuple(prompts[index * len(prompts) // count] for index in range(count))
