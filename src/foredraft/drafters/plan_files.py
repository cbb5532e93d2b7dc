"""Plan files: which sub-layers a draft leaves out, of which model, and what that was found to gain.

Contract: a file is whole or absent, and read strictly: every field is there, of its type, and nothing else.
A plan belongs to one model, told by its `model_hash`; where it is used with another, it is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any

from foredraft.drafters.skips import Skips
from foredraft.errors import ConfigError
from foredraft.files import write_whole
from foredraft.kernels.machine import cache_folder
from foredraft.model.config import read_json, shortened
from foredraft.model.weights import weight_headers

__all__ = [
    "PlanFile",
    "find_plan",
    "keep_plan",
    "model_hash",
    "plan_place",
    "plans_kept",
    "read_plan",
    "write_plan",
]

FORMAT = 1
REMEDY = "give a file that `foredraft tune` wrote"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A plan and where it comes from.

    model: its name, for people. max_draft: the draft length it is best at. alpha, c, tau, speedup: measured
    on held-out prompts (docs/architecture.md, "Words"); predicted: the speed-up that was expected of it.
    device, dtype: it was measured on. date: of the measurement, as YYYY-MM-DD. foredraft: the version that
    wrote it. temperature: that it was searched and measured at; None where an old file does not say.
    Either `skip_attention` and `skip_mlp` name what is left out, or `exit` does (`Skips`).
    """

    model: str
    model_hash: str
    layers: int
    skip_attention: tuple[int, ...] = ()
    skip_mlp: tuple[int, ...] = ()
    exit: int | None = None
    device: str
    dtype: str
    max_draft: int
    alpha: float
    c: float
    tau: float
    speedup: float
    predicted: float
    date: str
    foredraft: str
    temperature: float | None = None
    format: int = FORMAT

    @property
    def skips(self) -> Skips:
        return Skips(self.skip_attention, self.skip_mlp, self.exit)

    def __str__(self) -> str:
        """In one line, for people."""
        drawn = "" if self.temperature is None else f" at temperature {self.temperature:g}"
        return f"{self.skips}, measured{drawn} at {self.speedup:.2f} x plain decoding on {self.date}"

    def doubt(self, device: str, dtype: str) -> str | None:
        """What is to be said where it serves on a device, in a dtype, that it was not measured on."""
        if (self.device, self.dtype) == (device, dtype):
            return None
        return (
            f"the plan of {shortened(self.model)} was measured on {self.device} in {self.dtype}, and serves"
            f" on {device} in {dtype}: the output stays exact, but its draft length and speed-up may be"
            " others; `foredraft tune` finds them"
        )

    def check(self, hash: str, model: str) -> None:
        """Raises ConfigError where it is of another model than the one of this hash, which people call so."""
        if self.model_hash != hash:
            raise ConfigError(
                f"plan is one of {shortened(self.model)}, which is another model than {model}; make one with"
                " `foredraft tune`"
            )


def read_plan(file: Path) -> PlanFile:
    """Raises ConfigError that names what is wrong with it."""
    where = f"plan is {str(file)!r}"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where}, which cannot be read ({error.strerror}); {REMEDY}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}, which is not JSON ({error}); {REMEDY}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where}, which holds no JSON object; {REMEDY}")
    if found.get("format") != FORMAT:
        raise ConfigError(
            f"{where}, whose format is {shortened(found.get('format'))}, and this version reads {FORMAT};"
            " make the plan anew with `foredraft tune`"
        )
    found.setdefault("temperature", None)
    for name, type_ in _TYPES.items():
        if name not in found or not _is(found[name], type_):
            value = shortened(found[name]) if name in found else "missing"
            raise ConfigError(f"{where}, whose {name} is {value}, not {_WORDS[type_]}; {REMEDY}")
    if unknown := sorted(found.keys() - _TYPES.keys()):
        raise ConfigError(f"{where}, which holds {shortened(unknown[0])}, unknown to this version; {REMEDY}")
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
    }
    plan = PlanFile(**given)
    for name, (fits, words) in _BOUNDS.items():
        if not fits(getattr(plan, name)):
            raise ConfigError(f"{where}, whose {name} is {shortened(found[name])}, not {words}; {REMEDY}")
    if (mistake := plan.skips.mistake(plan.layers)) is not None:
        problem, remedy = mistake
        raise ConfigError(f"which {problem}", option="plan", value=str(file), remedy=remedy)
    return plan


def write_plan(plan: PlanFile, file: Path, option: str = "plan") -> None:
    """Raises ConfigError, by the option whose value the file is, where it cannot be written."""
    plan.skips.check(plan.layers)
    write_whole(file, json.dumps(asdict(plan), indent=1, allow_nan=False) + "\n", option)


def plan_place(hash: str) -> Path | None:
    """Where the plan of a model is looked for; its folder may not be there yet. None: nothing is kept."""
    folder = cache_folder()
    return None if folder is None else folder / "plans" / f"{hash}.json"


def keep_plan(plan: PlanFile, option: str = "plan") -> Path | None:
    """Write it where `find_plan` finds it; None: nothing is kept."""
    place = plan_place(plan.model_hash)
    if place is not None:
        with suppress(OSError):  # writing tells
            place.parent.mkdir(parents=True, exist_ok=True)
        write_plan(plan, place, option)
    return place


def plans_kept() -> bool:
    """Whether there is a plan of any model."""
    place = plan_place("any")
    return place is not None and place.parent.is_dir() and any(place.parent.iterdir())


def find_plan(hash: str) -> PlanFile | None:
    """The plan kept for the model of this hash. Raises ConfigError where it is there and cannot be used."""
    place = plan_place(hash)
    if place is None or not (place.exists() or place.is_symlink()):
        return None
    plan = read_plan(place)
    plan.check(hash, f"the one that {place} is for")
    return plan


def model_hash(folder: Path) -> str:
    """Which model a folder holds, told by its config.json and by its tensors' names, dtypes and shapes: their
    values are not read, and how they are spread over files does not count.

    Raises CheckpointError.
    """
    known = {"config": read_json(folder / "config.json"), "tensors": weight_headers(folder)}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


# By the annotation, what JSON may hold there.
_WORDS = {
    "str": "a text",
    "int": "a whole number of 1 or more",
    "float": "a finite number",
    "int | None": "a whole number or null",
    "float | None": "a finite number or null",
    "tuple[int, ...]": "a list of whole numbers",
}
_TYPES = {field.name: str(field.type) for field in fields(PlanFile)}


def _is(value: Any, type_: str) -> bool:
    match type_:
        case "str":
            return isinstance(value, str)
        case "int":
            return type(value) is int and value >= 1
        case "float":
            return type(value) in (int, float) and math.isfinite(value)
        case "float | None":
            return value is None or _is(value, "float")
        case "int | None":
            return value is None or type(value) is int
        case _:
            return isinstance(value, list) and all(type(each) is int for each in value)


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


LAYERS, DRAFT = 10_000, 1_000  # at most, far beyond any model and any draft that pays
_ABOVE_0: tuple[Callable[[Any], bool], str] = (lambda value: value > 0, "above 0")
# What a field of the right type may hold.
_BOUNDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "layers": (lambda layers: layers <= LAYERS, f"{LAYERS} or less"),
    "max_draft": (lambda draft: draft <= DRAFT, f"{DRAFT} or less"),
    "alpha": (lambda alpha: 0 <= alpha <= 1, "from 0 to 1"),
    "c": (lambda c: c >= 0, "0 or more"),
    "tau": (lambda tau: tau >= 1, "1 or more"),
    "speedup": _ABOVE_0,
    "predicted": _ABOVE_0,
    "date": (_is_date, "a date as YYYY-MM-DD"),
    "temperature": (lambda temperature: temperature is None or temperature >= 0, "0 or more"),
}
