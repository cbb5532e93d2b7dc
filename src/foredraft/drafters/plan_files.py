"""Plans: the sub-layers that the target leaves out when it drafts for itself, their notation, their files.

A draft skips any attention and MLP sub-layers (Draft & Verify, Zhang et al. 2023, arXiv:2309.08168), or all
layers from one on (early exit; LayerSkip, Elhoushi et al. 2024, arXiv:2404.16710):

    skip:attn=3,5-7/mlp=4    skips the attention of layers 3, 5, 6 and 7, and the MLP of layer 4
    skip:none                skips nothing: the target drafts for itself, which is never faster; for tests
    exit:8                   runs layers 0 to 7, then the final norm and the head

A file holds the measured speed-up, too. It is written whole or not at all, and read strictly
(`strict_records`). It is for one model, identified by `model_hash`; another model refuses it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from foredraft.drafters.asset import AssetSearch, any_kept, hash_of_base, say_made_for_base
from foredraft.drafters.strict_records import ABOVE_0, MEASURED, Bound, Count, StrictRecord
from foredraft.errors import ConfigError, shortened
from foredraft.files import TEMPORARY, write_whole
from foredraft.model.checkpoint import identity
from foredraft.model.memory import dtype_name
from foredraft.model.source import ModelSource
from foredraft.model.spec import Plan
from foredraft.user_cache import cache_folder, check_folder, make_folder, read_private, shut, sweep

logger = logging.getLogger(__name__)


SKIP, EXIT, NONE = "skip:", "exit:", "none"
KINDS = {"attn": "attention", "mlp": "mlp"}
SYNTAX = "give exit:LAYER, or skip:attn=LAYERS/mlp=LAYERS with layers as in 3,5-7"
MAX_RANGE = 10**5  # layers in one range; far above any model, so that a typing error costs no memory


def is_skips(text: str) -> bool:
    """Return whether a text is in the notation of skips, and so is not the name of a file."""
    return text.startswith((SKIP, EXIT))


@dataclass(frozen=True, slots=True)
class Skips:
    """The sub-layers that a draft leaves out.

    Examples:
        >>> Skips.parse("skip:attn=3,5-7/mlp=4")
        Skips(attention=(3, 5, 6, 7), mlp=(4,), exit=None)
    """

    attention: tuple[int, ...] = ()  # layers whose attention is skipped, in ascending order
    mlp: tuple[int, ...] = ()  # layers whose MLP is skipped, in ascending order
    exit: int | None = None  # first layer that an early exit leaves out; None: the draft runs to the end

    def check(self, layers: int, producers: Collection[int] = ()) -> None:
        """Raise ConfigError if a model cannot leave these sub-layers out."""
        if (mistake := self.mistake(layers)) is not None:
            problem, remedy = mistake
            raise ConfigError(problem, option="plan", remedy=remedy)
        if (read := next(filter(producers.__contains__, self.attention), None)) is not None:
            problem = f"skips the attention of layer {read}, whose keys and values other layers read"
            raise ConfigError(problem, option="plan", remedy="leave that layer out of the plan")

    def mistake(self, layers: int) -> tuple[str, str] | None:
        """Return what a model of this many layers cannot skip, and the remedy; None if it can skip all."""
        last = f"{layers - 1}: the model has {layers} layers"
        if self.exit is not None:
            if self.attention or self.mlp:
                return "has both an exit and layers to skip", "give one of the two"
            if not 1 <= self.exit < layers:
                return f"exits before layer {self.exit}", f"give 1 to {last}"
        for name, skipped in (("attention", self.attention), ("MLP", self.mlp)):
            for layer in skipped:
                if not 0 <= layer < layers:
                    return f"skips the {name} of layer {layer}", f"give 0 to {last}"
            if len(set(skipped)) < len(skipped):
                return f"skips the {name} of a layer twice", "give each layer once"
        return None

    def plan(self, layers: int) -> Plan:
        """Return the sub-layers that a draft runs; a skipped one adds nothing to the residual stream."""
        left_out = range(self.exit or 0, layers)
        attention, mlp = (self.attention, self.mlp) if self.exit is None else (left_out, left_out)
        return Plan.full(layers).without(attention, mlp)

    def as_exit(self, layers: int) -> Skips | None:
        """Return the early exit that runs the same sub-layers, or None if there is none."""
        last = tuple(range(layers - len(self.attention), layers))
        alike = self.attention == self.mlp == last and 0 < len(last) < layers
        return Skips(exit=last[0]) if alike else None

    @classmethod
    def parse(cls, text: str) -> Skips:
        if text.startswith(EXIT):
            return cls(exit=_parse_number(text.removeprefix(EXIT), text))
        words = text.removeprefix(SKIP)
        if words == NONE:
            return cls()
        skipped: dict[str, tuple[int, ...]] = {}
        for part in words.split("/"):
            kind, equals, layers = part.partition("=")
            if not equals or kind not in KINDS or KINDS[kind] in skipped:
                raise _syntax_error(text)
            skipped[KINDS[kind]] = tuple(sorted(_parse_layers(layers, text)))
        return cls(skipped.get("attention", ()), skipped.get("mlp", ()))

    def __str__(self) -> str:
        if self.exit is not None:
            return f"{EXIT}{self.exit}"
        parts = []
        for kind, name in KINDS.items():
            layers = sorted(getattr(self, name))
            cuts = [0, *(at + 1 for at, (a, b) in enumerate(pairwise(layers)) if b > a + 1), len(layers)]
            runs = [layers[start:stop] for start, stop in pairwise(cuts)]  # "3,5-7" for (3, 5, 6, 7)
            ranges = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs if run]
            parts += [f"{kind}={','.join(ranges)}"] if layers else []
        return SKIP + ("/".join(parts) or NONE)


def _parse_layers(words: str, text: str) -> Iterable[int]:
    for word in words.split(","):
        first, dash, last = word.partition("-")
        start = _parse_number(first, text)
        stop = _parse_number(last, text) if dash else start
        if not start <= stop < start + MAX_RANGE:
            raise _syntax_error(text)
        yield from range(start, stop + 1)


def _parse_number(word: str, text: str) -> int:
    if not (word.isascii() and word.isdecimal() and len(word) < len(str(MAX_RANGE))):
        raise _syntax_error(text)
    return int(word)


def _syntax_error(text: str) -> ConfigError:
    return ConfigError(option="plan", value=text[:80], remedy=SYNTAX)


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
