"""Plan files: the sub-layers that a model's drafts skip, with the measured speed-up, and which plan a drafter
uses.

A file is written whole or not at all, and read strictly (`strict_records`). A plan is for one model,
identified by `model_hash`; another model refuses it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from foredraft.drafters.asset import AssetSearch, any_kept, hash_of_base, say_made_for_base
from foredraft.drafters.skips import Skips, is_skips
from foredraft.drafters.strict_records import ABOVE_0, MEASURED, Bound, Count, StrictRecord
from foredraft.errors import ConfigError, shortened
from foredraft.files import TEMPORARY, write_whole
from foredraft.model.checkpoint import identity
from foredraft.model.memory import dtype_name
from foredraft.model.source import ModelSource
from foredraft.user_cache import cache_folder, check_folder, make_folder, read_private, shut, sweep

logger = logging.getLogger(__name__)


FORMAT = 1
REMEDY = "give a file that `foredraft tune` wrote"
MAKE_ONE = "make one with `foredraft tune`"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A plan and how it was measured."""

    model: str  # name of the model, for display
    model_hash: str  # hash of the model
    layers: Count  # number of layers of the model
    skip_attention: tuple[int, ...] = ()  # layers whose attention is skipped
    skip_mlp: tuple[int, ...] = ()  # layers whose MLP is skipped
    exit: int | None = None  # first layer that an early exit leaves out; then no others are skipped
    device: str  # device type of the measurement
    dtype: str  # dtype of the measurement
    max_draft: Count  # best draft length
    alpha: float  # α on held-out prompts (docs/architecture.md, "Words")
    c: float  # cost of a draft token, in plain steps
    tau: float  # τ on held-out prompts
    speedup: float  # measured speed-up over plain decoding, on held-out prompts
    predicted: float  # speed-up that the search predicted
    date: str  # date of the measurement, YYYY-MM-DD
    foredraft: str  # version of Foredraft that wrote the file
    temperature: float | None = None  # of the search and the measurement; None in old files
    draft_weights: str | None = None  # of the copy whose sub-layers are skipped, as "int4"; None: the model's
    format: Count = FORMAT  # version of the file format

    @property
    def skips(self) -> Skips:
        return Skips(self.skip_attention, self.skip_mlp, self.exit)

    def __str__(self) -> str:
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
            problem = f"is for {shortened(self.model)}, which is another model than {model}"
            raise ConfigError(problem, option="plan", remedy=MAKE_ONE)


def read_plan(file: Path, *, read: Callable[[Path], bytes] = Path.read_bytes) -> PlanFile:
    absent = {"temperature": None, "draft_weights": None}
    record = StrictRecord("plan", REMEDY, "make a new plan with `foredraft tune`", BOUNDS, absent)
    plan = record.read(PlanFile, file, read)
    if (mistake := plan.skips.mistake(plan.layers)) is not None:
        problem, remedy = mistake
        raise record.refused(file, f"which {problem}", remedy)
    return plan


def write_plan(plan: PlanFile, file: Path, option: str = "plan") -> None:
    """Write a plan file; `option` is the option whose value the file is."""
    plan.skips.check(plan.layers)
    write_whole(file, json.dumps(asdict(plan), indent=1, allow_nan=False) + "\n", option)


def plan_place(hash: str, draft_weights: str | None = None) -> Path | None:
    """Return the file of a model's plan in the cache folder, there or not yet; None without a cache."""
    folder = cache_folder("plans")
    name = hash if draft_weights is None else f"{hash}-{draft_weights}"
    return None if folder is None else folder / f"{name}.json"


def keep_plan(plan: PlanFile) -> Path | None:
    """Write a plan to the cache folder, where `find_plan` finds it."""
    place = plan_place(plan.model_hash, plan.draft_weights)
    if place is not None:
        with suppress(OSError):  # the write below reports the error
            make_folder(place.parent)
            sweep(place.parent, TEMPORARY)
        write_plan(plan, place)
        with suppress(OSError):  # the reader of a plan that stays open refuses it
            shut(place)
    return place


def find_plan(hash: str, draft_weights: str | None = None) -> PlanFile | None:
    """Return the plan in the cache folder for the model with this hash, or None if there is none."""
    place = plan_place(hash, draft_weights)
    if place is None or not os.path.lexists(place):
        return None
    plan = read_plan(place, read=lambda file: read_private(check_folder(file.parent) / file.name))
    plan.check(hash, f"the one of {place}")
    if plan.draft_weights != draft_weights:
        weights = plan.draft_weights or "the model itself"
        raise ConfigError(f"{place} is a plan of other weights ({weights})", remedy="remove it")
    return plan


def model_hash(place: ModelSource | Path) -> str:
    """Return the SHA-256 hash of a model's config.json, tensors' names, dtypes and shapes, and LoRAs."""
    return hashlib.sha256(json.dumps(identity(place), sort_keys=True).encode()).hexdigest()


BOUNDS: dict[str, Bound] = MEASURED | {"c": (lambda c: c >= 0, "0 or more"), "speedup": ABOVE_0}


@dataclass(frozen=True, slots=True)
class ChosenPlan:
    skips: Skips  # sub-layers that a draft skips
    max_draft: int | None = None  # draft length that it was tuned for, in tokens, if known


def given_plan(search: AssetSearch) -> PlanFile | Skips | None:
    """Return the plan that the user gives, in any form; None without one."""
    plan, target = search.options["plan"], search.target
    if plan is None or isinstance(plan, Skips):
        return plan
    if isinstance(plan, str) and is_skips(plan):
        return Skips.parse(plan)
    if not isinstance(plan, PlanFile | str | Path):
        remedy = "give the file of a plan, its content, or a text such as exit:8"
        raise ConfigError(option="plan", value=plan, remedy=remedy)
    found = plan if isinstance(plan, PlanFile) else read_plan(Path(plan))
    if found.model_hash == hash_of_base(target.source, model_hash):
        say_made_for_base(f"the plan of {shortened(found.model)}")
    else:
        found.check(model_hash(target.source), target.source.shown)
    return found


def kept_plan(search: AssetSearch, draft_weights: str | None = None) -> ChosenPlan | None:
    """Return the plan kept for the target, if any; an unusable one is left out with a warning."""
    needed, source = search.needed and draft_weights is None, search.target.source
    if not any_kept("plans"):
        return None
    try:
        found = find_plan(model_hash(source), draft_weights)
        if found is None and (hash := hash_of_base(source, model_hash)) is not None:
            found = find_plan(hash, draft_weights)
            if found is not None:
                say_made_for_base("the kept plan")
    except ConfigError as error:
        if needed:
            raise
        logger.warning("%s", error)
        return None
    return None if found is None else fitting_plan(found, search, warn=needed)


def fitting_plan(plan: PlanFile | Skips, search: AssetSearch, *, warn: bool) -> ChosenPlan:
    """Check a plan against the model; `warn` where it was measured on another device or in another dtype."""
    layers, producers = search.target.spec.layers, search.target.spec.producers
    if isinstance(plan, Skips):
        plan.check(layers, producers)
        return ChosenPlan(plan)
    plan.skips.check(layers, producers)
    if plan.layers != layers:
        problem = f"is for a model of {plan.layers} layers, but this one has {layers}"
        raise ConfigError(problem, option="plan", remedy=MAKE_ONE)
    doubt = plan.doubt(search.device.type, dtype_name(search.target.dtype))
    if doubt is not None and warn:
        logger.warning("%s", doubt)
    return ChosenPlan(plan.skips, plan.max_draft)
