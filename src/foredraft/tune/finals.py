"""The finals: the best plans in real decoding of held-out prompts, in turns with plain decoding, and the
winner's file.

A speed-up is the median of the ratios within a prompt's repeats, and then over the prompts. At a temperature
above 0 the decoded rounds of a text scatter around the expected ones, which gives the standard error of τ; a
plan then decodes on, untimed, until its τ is accurate enough. A plan that cannot be written is reported in
words, so that the rest of the report is not lost.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from math import sqrt
from pathlib import Path
from statistics import median
from typing import NamedTuple

import foredraft
from foredraft.bench.bench_records import MAX_REPEATED, Spread
from foredraft.bench.contender import ForedraftContender, Timing
from foredraft.bench.figures import Runs
from foredraft.bench.measurement import measure_costs
from foredraft.bench.settings import Progress, TuneSettings
from foredraft.bench.workload import Group, turns
from foredraft.decode.policy import Fixed
from foredraft.decode.stats import Stats
from foredraft.drafters.layer_skip import LayerSkip, LowBit
from foredraft.drafters.lookup import repeated
from foredraft.drafters.plan_files import PlanFile, Skips, find_plan, keep_plan, plan_place, write_plan
from foredraft.errors import ConfigError, shortened
from foredraft.files import TEMPORARY, probe
from foredraft.llm import LLM
from foredraft.llm.loaded import Loaded
from foredraft.model.memory import dtype_name
from foredraft.model.runner import Runner
from foredraft.profiling.timing import replaced
from foredraft.tune.teacher_forced import CalibrationText, CalibrationTexts, TeacherForced
from foredraft.tune.tune_records import TAU_TOLERANCE, Finalist, Trial
from foredraft.user_cache import PRIVATE_CACHE, NotPrivateError, check_folder, make_folder


class Agreement(NamedTuple):
    """How well decoded and expected rounds of one plan agree."""

    tau: float  # of decoding
    predicted_tau: float  # by teacher forcing
    relative_error: float  # standard error of `tau` ÷ `tau`


def check_writable(folder: Path) -> None:
    """Raise ConfigError unless this user alone can write a subfolder of the cache folder; it is not made."""
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


def make_plan_file(
    winner: Finalist, model: str, hash: str, loaded: Loaded, options: TuneSettings
) -> PlanFile:
    """Return the plan file of a finalist, dated today."""
    skips = Skips.parse(winner.skips)
    return PlanFile(
        model=model,
        model_hash=hash,
        layers=loaded.spec.layers,
        skip_attention=skips.attention,
        skip_mlp=skips.mlp,
        exit=skips.exit,
        device=loaded.engine.device.type,
        dtype=dtype_name(loaded.engine.cache.dtype),
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
    """Write a plan to `plan_out`, if given, and to the cache folder."""
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


def earlier_plan_note(
    hash: str, finalists: Sequence[Finalist], draft_weights: str | None, *, replaced: bool
) -> str | None:
    """Return a note on the cached plan, which a winner has replaced or which stays; None if there is none."""
    try:
        plan = find_plan(hash, draft_weights)
    except ConfigError as error:
        return None if replaced else f"An earlier plan cannot be used: {error}."
    if plan is None:
        return None
    if replaced:
        return f"The winner replaces the earlier plan {plan}."
    skips = str(plan.skips)
    speedups = [finalist.speedup.median for finalist in finalists if finalist.skips == skips]
    result = f"ran at {speedups[0]:.2f} x plain decoding" if speedups else "was not timed"
    return (
        f"The earlier plan {skips} in {plan_place(hash, draft_weights)} stays in use; in this search it"
        f" {result}. Delete the file to stop using the plan."
    )


MAX_PROMPTS = 16  # held-out prompts to decode; at 16, 13 wins are significant (`records.sign_test`)
MAX_TURNS = 24  # runs over all prompts until τ must be accurate enough
PLAIN = "none"


def decode_finalists(
    llm: LLM,
    trials: Sequence[Trial],
    prompts: Sequence[list[int]],
    options: TuneSettings,
    progress: Progress,
    drafting: Runner | None = None,  # of drafts; None: the target
) -> list[Finalist]:
    """Decode held-out prompts with each plan, and return what was measured, in the order of `trials`."""

    def contender(name: str, draft_length: int) -> ForedraftContender:
        policy = Fixed(draft_length)
        return ForedraftContender(name, llm, name, temperature=options.temperature, policy=policy)

    runner, engine, plain = llm.loaded.runner, llm.loaded.engine, contender(PLAIN, 0)
    # those after which plain decoding repeats itself little; all if there are none
    loops = [repeated(plain.run([each], options.new_tokens).tokens[0]) >= MAX_REPEATED for each in prompts]
    varied = [prompt for prompt, looping in zip(prompts, loops, strict=True) if not looping]
    prompts = (varied or list(prompts))[:MAX_PROMPTS]
    names = {f"{place}. {trial.skips}": trial for place, trial in enumerate(trials, start=1)}
    kind = LayerSkip if drafting is None else LowBit
    added = {
        name: kind(drafting or runner, engine.cache, Skips.parse(trial.skips))
        for name, trial in names.items()
    }
    finalists = []
    with replaced(engine, "drafters", engine.drafters | added):
        contenders = {name: contender(name, trial.draft) for name, trial in names.items()}
        runs = _run_in_turns(prompts, options, [plain, *contenders.values()], progress)
        context = int(median(map(len, prompts))) + options.new_tokens // 2
        costs = measure_costs(llm.loaded, 1, context, max(trial.draft for trial in trials)).drafting
        for name, trial in names.items():
            agreement = _agreement(trial, prompts, options, contenders[name], runs, drafting)
            c = costs[name].of(trial.draft) / trial.draft
            finalists.append(_finalist(name, trial, runs, c, agreement, options.temperature))
    return finalists


def _run_in_turns(
    prompts: Sequence[list[int]],
    options: TuneSettings,
    contenders: Sequence[ForedraftContender],
    progress: Progress,
) -> list[Runs]:
    """Time all contenders on every prompt, by turns within each repeat."""
    found: list[Runs] = []
    for done, prompt in enumerate(prompts):
        timings: dict[str, list[Timing]] = {contender.name: [] for contender in contenders}
        for repeat in range(-1 if done == 0 else 0, options.repeats):  # the first turn warms up
            for contender in turns(contenders, repeat):
                timing = contender.run([prompt], options.new_tokens)
                if repeat >= 0:
                    timings[contender.name].append(timing)
        found.append(Runs(Group((done,), True), timings))
        progress("decode", done + 1, len(prompts))
    return found


def _agreement(
    trial: Trial,
    prompts: Sequence[list[int]],
    options: TuneSettings,
    contender: ForedraftContender,
    runs: Sequence[Runs],
    drafting: Runner | None,
) -> Agreement:
    """Compare decoded and predicted τ over the timed runs, and over more runs until τ is accurate enough."""
    runner, tokens = contender.llm.loaded.runner, 0
    plan = Skips.parse(trial.skips).plan(runner.decoder.spec.layers)
    decoded, expected = list[int](), list[float]()  # rounds of each text; its end may cut the last one
    error = 0.0
    for turn in range(MAX_TURNS):
        if turn < options.repeats:
            timings = [each.timings[contender.name][turn] for each in runs]
        else:
            timings = [contender.run([prompt], options.new_tokens) for prompt in prompts]
        pairs = [
            (CalibrationText((*prompt, *timing.tokens[0]), len(prompt)), timing.stats.rounds)
            for prompt, timing in zip(prompts, timings, strict=True)
            if timing.stats is not None
        ]
        pairs.sort(key=lambda pair: -pair[0].new_tokens)  # the order that TeacherForced uses
        calibration = CalibrationTexts(tuple(text for text, _ in pairs), options.temperature)
        teacher_forced = TeacherForced(runner, calibration, trial.draft, drafting=drafting)
        starts = teacher_forced.rounds(plan, every_start=True).starts[trial.draft - 1]  # [R, N]
        expected += map(float, starts.sum(1))
        decoded += [rounds for _, rounds in pairs]
        tokens += teacher_forced.tokens
        if options.temperature > 0:
            squares = sum((own - other) ** 2 for own, other in zip(decoded, expected, strict=True))
            error = sqrt(squares) / sum(decoded)
        if error <= TAU_TOLERANCE / 2:
            break
    return Agreement(tokens / sum(decoded), tokens / sum(expected), error)


def _finalist(
    name: str, trial: Trial, runs: Sequence[Runs], c: float, agreement: Agreement, temperature: float
) -> Finalist:
    """Summarise the runs of a plan beside plain decoding; `c` is the cost of a draft token."""
    ratios = [each.ratio(name, PLAIN) for each in runs]
    tokens = ([[timing.tokens for timing in each.timings[key]] for key in (name, PLAIN)] for each in runs)
    speedup = Spread.of(ratios)
    repetition = Spread.of(repeated(each.timings[name][0].tokens[0]) for each in runs)
    assert speedup is not None and repetition is not None
    return Finalist(
        skips=trial.skips,
        draft=trial.draft,
        predicted=trial.predicted,
        predicted_tau=agreement.predicted_tau,
        tau=agreement.tau,
        alpha=Stats.merge(each.stats(name) for each in runs).alpha or 0.0,
        c=c,
        speedup=speedup,
        identical=all(own == plain for own, plain in tokens) if temperature == 0 else None,
        prompts=len(runs),
        repeated=repetition,
        faster=sum(ratio > 1 for ratio in ratios),
        trial_tau=trial.taus[trial.draft - 1],
        tau_error=agreement.relative_error,
    )
