"""The winner of a search: its plan file, where it is written, and remarks on the plan that it replaces.

The search checks that the cache folder can be written before it begins. A plan that cannot be written after
all is reported in words, not by an error, so that the rest of the report is not lost.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import foredraft
from foredraft.drafters.plan_files import PlanFile, find_plan, keep_plan, plan_place, write_plan
from foredraft.drafters.skips import Skips
from foredraft.errors import ConfigError, shortened
from foredraft.files import TEMPORARY, probe
from foredraft.llm.loaded import Loaded
from foredraft.model.transfers import dtype_name
from foredraft.tune.tune_records import Finalist
from foredraft.tune.tune_settings import TuneSettings
from foredraft.user_cache import PRIVATE_CACHE, NotPrivateError, check_folder, make_folder

__all__ = [
    "check_writable",
    "dtype_of",
    "make_plan_file",
    "remaining_plan_note",
    "replaced_plan_note",
    "save_plan",
]


def check_writable(folder: Path) -> None:
    """Raise ConfigError unless this user, and no other, can write a subfolder of the cache folder.

    The subfolder is not created.
    """
    cache = folder.parent
    refused = f"no {folder.name} can be written to the cache folder {shortened(str(cache))}"
    try:
        make_folder(cache)
        existing = check_folder(folder if folder.exists() else cache)
        probe(existing / f"{TEMPORARY}{os.getpid()}")
    except NotPrivateError as error:
        raise ConfigError(
            f"{refused}, because {error.filename} {error.strerror}", remedy=PRIVATE_CACHE
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{refused} ({error.strerror})",
            remedy="set FOREDRAFT_CACHE to a writable folder, or to an empty value to store nothing",
        ) from error


def dtype_of(loaded: Loaded) -> str:
    """Return the name of the dtype in which the model computes."""
    return dtype_name(loaded.engine.cache.dtype)


def make_plan_file(
    winner: Finalist, model: str, hash: str, loaded: Loaded, options: TuneSettings
) -> PlanFile:
    """Return the plan file of a finalist, dated today.

    Args:
        winner: The finalist.
        model: Name of the model, for display.
        hash: Hash of the model (`plan_files.model_hash`).
        loaded: The model.
        options: Of the search.
    """
    skips = Skips.parse(winner.skips)
    return PlanFile(
        model=model,
        model_hash=hash,
        layers=loaded.spec.layers,
        skip_attention=skips.attention,
        skip_mlp=skips.mlp,
        exit=skips.exit,
        device=loaded.engine.device.type,
        dtype=dtype_of(loaded),
        max_draft=winner.draft,
        alpha=winner.alpha,
        c=winner.c,
        tau=winner.tau,
        speedup=winner.speedup.median,
        predicted=winner.predicted,
        date=datetime.now(UTC).date().isoformat(),
        foredraft=foredraft.__version__,
        temperature=options.temperature,
        draft_weights=options.draft_weights,
    )


def save_plan(plan: PlanFile, plan_out: Path | None) -> tuple[list[str], list[str]]:
    """Write a plan to `plan_out`, if given, and to the cache folder.

    Returns:
        The files that were written, and a message for each file that was not.
    """
    files, unwritten = [], []
    try:
        if plan_out is not None:
            write_plan(plan, plan_out, "plan_out")
            files.append(str(plan_out))
    except ConfigError as error:
        unwritten.append(f"the plan was not written to {plan_out} ({_reason(error)})")
    try:
        if (cached := keep_plan(plan)) is not None:
            files.append(str(cached))
    except ConfigError as error:
        unwritten.append(
            f"the plan was not written to {plan_place(plan.model_hash, plan.draft_weights)}"
            f" ({_reason(error)}); set"
            " FOREDRAFT_CACHE to a writable folder and run the same command again to continue the study"
        )
    return files, unwritten


def _reason(error: ConfigError) -> str:
    return getattr(error.__cause__, "strerror", None) or "not a place for a file"


def replaced_plan_note(hash: str, draft_weights: str | None = None) -> str | None:
    """Return a note on the cached plan that a winner replaces, or None if there is none that can be used."""
    with suppress(ConfigError):
        if (plan := find_plan(hash, draft_weights)) is not None:
            return f"The winner replaces the earlier plan {plan}."
    return None


def remaining_plan_note(
    hash: str, finalists: Sequence[Finalist], draft_weights: str | None = None
) -> str | None:
    """Return a note on the cached plan that stays in use because no finalist won; None if there is none."""
    file = plan_place(hash, draft_weights)
    try:
        plan = find_plan(hash, draft_weights)
    except ConfigError as error:
        return f"An earlier plan cannot be used: {error}."
    if plan is None:
        return None
    skips = str(plan.skips)
    speedups = [finalist.speedup.median for finalist in finalists if finalist.skips == skips]
    result = f"ran at {speedups[0]:.2f} x plain decoding" if speedups else "was not timed"
    return (
        f"The earlier plan {skips} in {file} stays in use; in this search it {result}. Delete the file to"
        " stop using the plan."
    )
