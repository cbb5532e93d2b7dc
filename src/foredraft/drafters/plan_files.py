"""Plan files: the sub-layers that a model's drafts skip, and the speed-up that was measured with them.

A file is written whole or not at all. It is read strictly: every field must be present and of its type, and
no other field may be there. A plan is for one model, identified by `model_hash`; another model refuses it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any

from foredraft.drafters.skips import Skips
from foredraft.errors import ConfigError, shortened
from foredraft.files import TEMPORARY, write_whole
from foredraft.model.config import MAX_FLOAT, parse_json, read_json
from foredraft.model.weights import weight_headers
from foredraft.ownership import NotPrivateError, check_folder, make_folder, read_private
from foredraft.user_cache import PRIVATE_CACHE, cache_folder, sweep

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
    """A plan and how it was measured.

    Attributes:
        model: Name of the model, for display.
        model_hash: Hash of the model.
        layers: Number of layers of the model.
        skip_attention: Layers whose attention is skipped.
        skip_mlp: Layers whose MLP is skipped.
        exit: First layer that an early exit leaves out; then no layers are skipped one by one.
        device: Device type of the measurement.
        dtype: Dtype of the measurement.
        max_draft: Best draft length.
        alpha: α on held-out prompts (docs/architecture.md, "Words").
        c: Cost of a draft token, in plain steps.
        tau: τ on held-out prompts.
        speedup: Measured speed-up over plain decoding, on held-out prompts.
        predicted: Speed-up that the search predicted.
        date: Date of the measurement, YYYY-MM-DD.
        foredraft: Version of Foredraft that wrote the file.
        temperature: Temperature of the search and the measurement. None: the file does not say, as old files.
        format: Version of the file format.
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
        """Return the plan and its measurement, for display."""
        temperature = "" if self.temperature is None else f" at temperature {self.temperature:g}"
        return f"{self.skips}, measured{temperature} at {self.speedup:.2f} x plain decoding on {self.date}"

    def doubt(self, device: str, dtype: str) -> str | None:
        """Return a warning if the plan runs on another device or in another dtype than it was measured on."""
        if (self.device, self.dtype) == (device, dtype):
            return None
        return (
            f"the plan of {shortened(self.model)} was measured on {self.device} in {self.dtype}, but runs on"
            f" {device} in {dtype}: the output stays exact, but another plan or draft length may be faster;"
            " run `foredraft tune` here"
        )

    def check(self, hash: str, model: str) -> None:
        """Raise ConfigError if the plan is for another model than the one with this hash and name."""
        if self.model_hash != hash:
            raise ConfigError(
                f"is for {shortened(self.model)}, which is another model than {model}",
                option="plan",
                remedy="make one with `foredraft tune`",
            )


def read_plan(file: Path, *, read: Callable[[Path], bytes] = Path.read_bytes) -> PlanFile:
    """Read a plan file.

    Args:
        file: The file.
        read: Returns the content of a file.

    Raises:
        ConfigError: The file cannot be read, or is not a valid plan.
    """
    try:
        found = parse_json(read(file).decode())
    except NotPrivateError as error:
        problem = f"which is not used, because {error.filename} {error.strerror}"
        raise _refused(file, problem, PRIVATE_CACHE) from error
    except OSError as error:
        raise _refused(file, f"which cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise _refused(file, f"which is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise _refused(file, "which holds no JSON object")
    if found.get("format") != FORMAT:
        raise _refused(
            file,
            f"whose format is {shortened(found.get('format'))}, but this version reads format {FORMAT}",
            "make a new plan with `foredraft tune`",
        )
    found.setdefault("temperature", None)
    for name, type_ in _TYPES.items():
        if name not in found or not _is(found[name], type_):
            value = shortened(found[name]) if name in found else "missing"
            raise _refused(file, f"whose {name} is {value}, not {_WORDS[type_]}")
    if unknown := sorted(found.keys() - _TYPES.keys()):
        raise _refused(file, f"which has the unknown field {shortened(unknown[0])}")
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
    }
    plan = PlanFile(**given)
    for name, (fits, words) in _BOUNDS.items():
        if not fits(getattr(plan, name)):
            raise _refused(file, f"whose {name} is {shortened(found[name])}, not {words}")
    if (mistake := plan.skips.mistake(plan.layers)) is not None:
        problem, remedy = mistake
        raise _refused(file, f"which {problem}", remedy)
    return plan


def _refused(file: Path, problem: str, remedy: str = REMEDY) -> ConfigError:
    return ConfigError(problem, option="plan", value=str(file), remedy=remedy)


def write_plan(plan: PlanFile, file: Path, option: str = "plan") -> None:
    """Write a plan file; `option` is the option whose value the file is.

    Raises:
        ConfigError: The file cannot be written.
    """
    plan.skips.check(plan.layers)
    write_whole(file, json.dumps(asdict(plan), indent=1, allow_nan=False) + "\n", option)


def plan_place(hash: str) -> Path | None:
    """Return the file of a model's plan in the cache folder, or None if there is no cache folder.

    The folder of the file may not exist yet.
    """
    folder = cache_folder("plans")
    return None if folder is None else folder / f"{hash}.json"


def keep_plan(plan: PlanFile, option: str = "plan") -> Path | None:
    """Write a plan to the cache folder, where `find_plan` finds it.

    Returns:
        The file, or None if there is no cache folder.

    Raises:
        ConfigError: The file cannot be written.
    """
    place = plan_place(plan.model_hash)
    if place is not None:
        with suppress(OSError):  # the write below reports the error
            make_folder(place.parent)
            sweep(place.parent, TEMPORARY)
        write_plan(plan, place, option)
    return place


def plans_kept() -> bool:
    """Return whether the cache folder holds a plan of any model."""
    folder = cache_folder("plans")
    try:
        return folder is not None and any(folder.glob("[!.]*.json"))
    except OSError:  # no folder, or one that cannot be read
        return False


def find_plan(hash: str) -> PlanFile | None:
    """Return the plan in the cache folder for the model with this hash, or None if there is none.

    Raises:
        ConfigError: The plan cannot be used, or another user could have written it.
    """
    place = plan_place(hash)
    if place is None or not os.path.lexists(place):
        return None
    plan = read_plan(place, read=lambda file: read_private(check_folder(file.parent) / file.name))
    plan.check(hash, f"the one of {place}")
    return plan


def model_hash(folder: Path) -> str:
    """Return the SHA-256 hash of a model's config.json and of the names, dtypes and shapes of its tensors.

    The values of the weights are not read, and their distribution over files does not matter.

    Raises:
        CheckpointError: The folder holds no model.
    """
    known = {"config": read_json(folder / "config.json"), "tensors": weight_headers(folder)}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


# Annotation of a field -> the JSON values that it accepts, for messages.
_WORDS = {
    "str": "a string",
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
            return type(value) in (int, float) and -MAX_FLOAT <= value <= MAX_FLOAT
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


MAX_LAYERS, MAX_DRAFT = 10_000, 1_000  # upper bounds, far above any model and any draft that pays
_ABOVE_0: tuple[Callable[[Any], bool], str] = (lambda value: value > 0, "above 0")
# Field -> test of its value, and the accepted values, for messages.
_BOUNDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "layers": (lambda layers: layers <= MAX_LAYERS, f"{MAX_LAYERS} or less"),
    "max_draft": (lambda draft: draft <= MAX_DRAFT, f"{MAX_DRAFT} or less"),
    "alpha": (lambda alpha: 0 <= alpha <= 1, "from 0 to 1"),
    "c": (lambda c: c >= 0, "0 or more"),
    "tau": (lambda tau: tau >= 1, "1 or more"),
    "speedup": _ABOVE_0,
    "predicted": _ABOVE_0,
    "date": (_is_date, "a date as YYYY-MM-DD"),
    "temperature": (lambda temperature: temperature is None or temperature >= 0, "0 or more"),
}
