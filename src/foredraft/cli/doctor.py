"""`foredraft doctor`: how well a drafter is accepted, and the setting under which it is accepted more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from foredraft.cli.layout import table
from foredraft.cli.options import (
    NONE,
    OUTPUT,
    DocumentOptions,
    DraftModelOptions,
    Flag,
    TargetOptions,
    common,
    load_options,
)
from foredraft.cli.output_files import check_places, write_report
from foredraft.cli.progress import started
from foredraft.errors import ConfigError, Option

if TYPE_CHECKING:
    from foredraft.doctor import Diagnosis, Trial

__all__ = ["doctor"]


def doctor(
    *texts: str,
    target: TargetOptions = NONE,
    drafting: DraftModelOptions = NONE,
    dry_run: Annotated[Flag, common(OUTPUT)] = False,
    output: DocumentOptions = DocumentOptions(),
) -> int:
    """Measure how well a head or a draft model is accepted, and find the setting that it was trained with.

    Nothing is decoded: target and drafter read a short sample, and their distributions are compared. Of an
    EAGLE, DFlash or DSpark head the doctor tries the usual ways in which one is misread, and writes the
    best setting beside the head, where loading finds it. A setting changes the speed, never the text.

    Parameters
    ----------
    texts
        The sample; without any, one that ships with Foredraft. Texts of the kind that you generate tell more.
    dry_run
        Write nothing.
    """
    if "draft" not in drafting:
        raise ConfigError("no drafter to examine", remedy=("give ", Option("draft"), ", its folder"))
    check_places(out=output.out)
    bars = started()
    try:
        found = examine(texts, target, drafting, write=not dry_run, progress=bars.show)
    finally:
        bars.clear()
    write_report(found.as_dict(), lambda width: lines(found, width), output)
    return 0


def examine(
    texts: tuple[str, ...],
    target: TargetOptions,
    drafting: DraftModelOptions,
    *,
    write: bool,
    progress: object,
) -> Diagnosis:
    """Load the target and the drafter, and examine it."""
    from foredraft.doctor import diagnose
    from foredraft.doctor.sample import SAMPLE
    from foredraft.loading import load_for, options_for
    from foredraft.loading.checkpoints import find_draft

    options = load_options(target, drafting)
    folder = find_draft(options_for(target.get("model"), **options))
    assert folder is not None, "a drafter is given"
    llm = load_for(lambda tokenizer, defaults: (1, 64), target.get("model"), policy="fixed", **options)
    return diagnose(llm.loaded, folder, texts or SAMPLE, write=write, progress=progress)  # type: ignore[arg-type]


def lines(found: Diagnosis, width: int | None = None) -> list[str]:
    """Return the diagnosis as tables, at most `width` characters wide, and sentences."""
    shown = [f"{found.drafter} {found.name}, {found.drafts} drafts on the sample", ""]
    positions = range(1, len(found.own.sampled) + 1)
    rows = [("", *(f"token {n}" for n in positions))]
    rows.append(("accepted at temperature 1", *map(_percent, found.own.sampled)))
    rows.append(("accepted at temperature 0", *map(_percent, found.own.greedy)))
    shown += table(rows, width)
    if found.trials:
        shown += ["", *table([("setting", "tokens a round", "gain"), *_trials(found)], width)]
    shown += ["", verdict(found)]
    return shown + [f"Note: {note}." for note in found.notes]


def _trials(found: Diagnosis) -> list[tuple[str, str, str]]:
    ranked = sorted(found.trials, key=lambda trial: -trial.tau)
    rows = [("as its files say", f"{found.own.tau:.2f}", "")]
    rows += [(described(each), f"{each.tau:.2f}", f"{each.gain:+.2f} ± {each.doubt:.2f}") for each in ranked]
    return rows


def described(trial: Trial) -> str:
    """Return the setting of a trial, as in "tap_shift = 1"."""
    return ", ".join(f"{name} = {str(value).lower()}" for name, value in trial.settings.items())


def verdict(found: Diagnosis) -> str:
    """Return the advice in one sentence."""
    if not found.improved:
        return f"This is as good as it gets here: {found.own.tau:.2f} tokens a round."
    kept = "" if found.written is None else f" It is written to {found.written}, and loading honours it."
    return (
        f"Better: {described(found.best)}, {found.own.tau:.2f} -> {found.best.tau:.2f} tokens a round.{kept}"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
