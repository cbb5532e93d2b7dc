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
from dataclasses import asdict, dataclass
from pathlib import Path

from foredraft.drafters.skips import Skips
from foredraft.drafters.strict_records import Bound, Count, StrictRecord, is_date
from foredraft.errors import ConfigError, shortened
from foredraft.files import TEMPORARY, write_whole
from foredraft.model.identity import identity
from foredraft.user_cache import cache_folder, check_folder, make_folder, read_private, shut, sweep

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
        draft_weights: The weights of the copy whose sub-layers are skipped, as in "int4"; None: the model's.
        format: Version of the file format.
    """

    model: str
    model_hash: str
    layers: Count
    skip_attention: tuple[int, ...] = ()
    skip_mlp: tuple[int, ...] = ()
    exit: int | None = None
    device: str
    dtype: str
    max_draft: Count
    alpha: float
    c: float
    tau: float
    speedup: float
    predicted: float
    date: str
    foredraft: str
    temperature: float | None = None
    draft_weights: str | None = None
    format: Count = FORMAT

    @property
    def skips(self) -> Skips:
        return Skips(self.skip_attention, self.skip_mlp, self.exit)

    def __str__(self) -> str:
        """Return the plan and its measurement, for display."""
        temperature = "" if self.temperature is None else f" at temperature {self.temperature:g}"
        copy = "" if self.draft_weights is None else f" of a copy in {self.draft_weights}"
        return (
            f"{self.skips}{copy}, measured{temperature} at {self.speedup:.2f} x plain decoding on {self.date}"
        )

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
    record = StrictRecord(
        "plan",
        REMEDY,
        "make a new plan with `foredraft tune`",
        BOUNDS,
        {"temperature": None, "draft_weights": None},
    )
    plan = record.read(PlanFile, file, read)
    if (mistake := plan.skips.mistake(plan.layers)) is not None:
        problem, remedy = mistake
        raise record.refused(file, f"which {problem}", remedy)
    return plan


def write_plan(plan: PlanFile, file: Path, option: str = "plan") -> None:
    """Write a plan file; `option` is the option whose value the file is.

    Raises:
        ConfigError: The file cannot be written.
    """
    plan.skips.check(plan.layers)
    write_whole(file, json.dumps(asdict(plan), indent=1, allow_nan=False) + "\n", option)


def plan_place(hash: str, draft_weights: str | None = None) -> Path | None:
    """Return the file of a model's plan in the cache folder, or None if there is no cache folder.

    A plan of the model's copy in few bits lies beside that of the model. The folder of the file may not exist
    yet.
    """
    folder = cache_folder("plans")
    name = hash if draft_weights is None else f"{hash}-{draft_weights}"
    return None if folder is None else folder / f"{name}.json"


def keep_plan(plan: PlanFile, option: str = "plan") -> Path | None:
    """Write a plan to the cache folder, where `find_plan` finds it.

    Returns:
        The file, or None if there is no cache folder.

    Raises:
        ConfigError: The file cannot be written.
    """
    place = plan_place(plan.model_hash, plan.draft_weights)
    if place is not None:
        with suppress(OSError):  # the write below reports the error
            make_folder(place.parent)
            sweep(place.parent, TEMPORARY)
        write_plan(plan, place, option)
        with suppress(OSError):  # the reader of a plan that stays open refuses it
            shut(place)
    return place


def plans_kept() -> bool:
    """Return whether the cache folder holds a plan of any model."""
    folder = cache_folder("plans")
    try:
        return folder is not None and any(folder.glob("[!.]*.json"))
    except OSError:  # no folder, or one that cannot be read
        return False


def find_plan(hash: str, draft_weights: str | None = None) -> PlanFile | None:
    """Return the plan in the cache folder for the model with this hash, or None if there is none.

    Args:
        hash: Of the model.
        draft_weights: The weights of the copy that the plan is to be of; None: the model's own.

    Raises:
        ConfigError: The plan cannot be used, or another user could have written it.
    """
    place = plan_place(hash, draft_weights)
    if place is None or not os.path.lexists(place):
        return None
    plan = read_plan(place, read=lambda file: read_private(check_folder(file.parent) / file.name))
    plan.check(hash, f"the one of {place}")
    if plan.draft_weights != draft_weights:
        raise ConfigError(
            f"{place} is a plan of other weights ({plan.draft_weights or 'the model itself'})",
            remedy="remove it",
        )
    return plan


def model_hash(folder: Path) -> str:
    """Return the SHA-256 hash of a model's config.json and of the names, dtypes and shapes of its tensors.

    The values of the weights are not read, and their distribution over files does not matter. Of a model with
    LoRAs, their files count besides.

    Raises:
        CheckpointError: The folder holds no model.
    """
    return hashlib.sha256(json.dumps(identity(folder), sort_keys=True).encode()).hexdigest()


MAX_LAYERS, MAX_DRAFT = 10_000, 1_000  # upper bounds, far above any model and any draft that pays
ABOVE_0: Bound = (lambda value: value > 0, "above 0")
BOUNDS: dict[str, Bound] = {
    "layers": (lambda layers: layers <= MAX_LAYERS, f"{MAX_LAYERS} or less"),
    "max_draft": (lambda draft: draft <= MAX_DRAFT, f"{MAX_DRAFT} or less"),
    "alpha": (lambda alpha: 0 <= alpha <= 1, "from 0 to 1"),
    "c": (lambda c: c >= 0, "0 or more"),
    "tau": (lambda tau: tau >= 1, "1 or more"),
    "speedup": ABOVE_0,
    "predicted": ABOVE_0,
    "date": (is_date, "a date as YYYY-MM-DD"),
    "temperature": (lambda temperature: temperature is None or temperature >= 0, "0 or more"),
}
