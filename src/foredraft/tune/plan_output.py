"""The winner of a search: what is kept of it, where, and what stays in force where there is none.

Contract: that the cache folder can be written is found before hours are spent; what cannot be written after
all is told in words, never by an error that would take the rest of the report with it.
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
from foredraft.errors import ConfigError
from foredraft.llm import LLM
from foredraft.model.device import dtype_name
from foredraft.tune.records import Finalist

__all__ = ["check_kept", "dtype_of", "keep", "kept_before", "plan_file", "replaced"]


def check_kept(folder: Path) -> None:
    """Refuse a folder in the cache folder that cannot be written. It need not be there, and is not made."""
    cache = folder.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        probe = (folder if folder.exists() else cache) / f".{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"the cache folder is {str(cache)!r}, where no {folder.name} can be kept ({error.strerror}); set"
            " FOREDRAFT_CACHE to a folder that can be written, or to nothing, and nothing is kept"
        ) from error


def dtype_of(llm: LLM) -> str:
    return dtype_name(llm.engine.cache.dtype)


def plan_file(won: Finalist, model: str, hash: str, llm: LLM, temperature: float) -> PlanFile:
    skips = Skips.spelled(won.skips)
    return PlanFile(
        model=model,
        model_hash=hash,
        layers=llm.spec.layers,
        skip_attention=skips.attention,
        skip_mlp=skips.mlp,
        exit=skips.exit,
        device=llm.engine.device.type,
        dtype=dtype_of(llm),
        max_draft=won.draft,
        alpha=won.alpha,
        c=won.c,
        tau=won.tau,
        speedup=won.speedup.median,
        predicted=won.predicted,
        date=datetime.now(UTC).date().isoformat(),
        foredraft=foredraft.__version__,
        temperature=temperature,
    )


def keep(plan: PlanFile, out: Path | None) -> tuple[list[str], list[str]]:
    """Where it went, and what is to be said where it could not be written: hours were spent on all else that
    a report says."""
    files, unwritten = [], []
    try:
        if out is not None:
            write_plan(plan, out, "out")
            files.append(str(out))
    except ConfigError as error:
        unwritten.append(str(error))
    try:
        if (kept := keep_plan(plan)) is not None:
            files.append(str(kept))
    except ConfigError as error:
        reason = getattr(error.__cause__, "strerror", None) or "it is no place for a file"
        unwritten.append(
            f"the plan could not be kept in {plan_place(plan.model_hash)} ({reason}); set FOREDRAFT_CACHE to"
            " a folder that can be written, and the same command goes on with the study"
        )
    return files, unwritten


def replaced(hash: str) -> str | None:
    """What is to be said before another plan takes the place of the one that is kept; None where nothing is,
    or nothing that could be used."""
    with suppress(ConfigError):
        if (plan := find_plan(hash)) is not None:
            return f"It takes the place of the plan that was kept before: {plan}."
    return None


def kept_before(hash: str, finalists: Sequence[Finalist]) -> str | None:
    """What is to be said of the plan that stays in force where none won."""
    place = plan_place(hash)
    try:
        plan = find_plan(hash)
    except ConfigError as error:
        return f"An older plan cannot be used: {error}."
    if plan is None:
        return None
    skips = str(plan.skips)
    speedups = [f"at {one.speedup.median:.2f} x plain decoding" for one in finalists if one.skips == skips]
    measured = f"ran {speedups[0]} now" if speedups else "was not among those timed now"
    return (
        f"A plan that was kept earlier stays in force: {skips} in {place}, which {measured}; delete the file"
        " to draft without it."
    )
