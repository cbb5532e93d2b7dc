"""The whole search: texts, costs, trials, the best plans in real decoding, the plan file of the winner."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal

import foredraft
from foredraft import demo
from foredraft.bench.machine import machine
from foredraft.bench.timing import wrapped
from foredraft.drafters.plans import PlanFile, keep_plan, model_hash, replaced, write_plan
from foredraft.drafters.skips import Skips
from foredraft.errors import ConfigError
from foredraft.llm import LLM
from foredraft.model.hub import resolve
from foredraft.model.runner import Runner
from foredraft.tune.calibration import Calibration, calibrate, hold_out, new_tokens, written
from foredraft.tune.costs import measure_plan_costs
from foredraft.tune.kept import TextPlace
from foredraft.tune.options import Options
from foredraft.tune.progress import Progress, silent
from foredraft.tune.race import race
from foredraft.tune.records import Finalist, Report
from foredraft.tune.search import Deadline, Search, best_of
from foredraft.tune.study import StudyPlace
from foredraft.tune.teacher import Teacher

__all__ = ["tune"]

ROWS = 8  # texts that are written side by side
FORMAT = 3  # of what a study holds; no other's is gone on with


def tune(
    prompts: Sequence[str],
    options: Options,
    *,
    model: str | None = None,
    out: Path | None = None,
    truncate: Literal["left"] | None = None,
    progress: Progress = silent,
    **loading: Any,
) -> Report:
    """Search for the sub-layers that drafts of this model leave out, and keep the plan if it wins.

    model, loading: as `foredraft.load` takes them. out: a file for the plan, beside the one that is kept for
    `find_plan`. truncate: "left" drops the oldest tokens of a prompt that is too long. Raises what `load` and
    `LLM.encode` raise, and ConfigError of a storage that cannot be used, prompts that are too few, texts that
    do not fit into memory, or a timeout in which no trial ended. A KeyboardInterrupt ends the search early:
    the study keeps its trials, and the report says which they are; it is raised where there are none.
    """
    stages = _Stages()
    deadline = Deadline.after(options.timeout)
    place = StudyPlace(options.storage)
    revision = loading.pop("revision", None)
    if revision is not None and model is None:
        raise ConfigError(f"revision is {revision!r}, but no hub id is given that has it; leave it out")
    folder = demo.target_path() if model is None else resolve(model, revision)
    hash = model_hash(folder)
    with stages("load"):
        llm = _load(folder, prompts, options, loading, progress)
    runner = llm.engine.target
    assert isinstance(runner, Runner)
    longest = min(options.max_draft, runner.max_queries - 1)
    ids = [llm.fitting(own, _room(options, prompts), truncate) for own in llm.encode(list(prompts))]
    kept, held_out = hold_out(ids)
    with stages("calibrate"):
        texts = TextPlace(folder, hash, llm, kept, options.tokens, options.temperature)
        calibration = texts.read_or(
            lambda: calibrate(llm, kept, options.tokens, options.temperature, progress)
        )
        teacher = Teacher(runner, calibration, longest, deadline.check, progress)
    with stages("costs"):
        context = int(median(text.start + text.new // 2 for text in calibration.texts))
        name = _study_name(hash, llm, calibration, longest)
        search = Search(
            place, name, options, teacher,
            lambda: measure_plan_costs(llm, context, longest, options.temperature, progress), deadline,
        )  # fmt: skip
    finished, finalists = True, tuple[Finalist, ...]()
    try:
        finalists = _finalists(llm, search, held_out, options, stages, progress)
    except KeyboardInterrupt:
        if not search.trials():
            raise
        finished = False
    winner = _winner(finalists)
    notes = [] if winner is None else [note for note in [replaced(hash)] if note is not None]
    files = (
        []
        if winner is None
        else _keep(_plan_file(finalists[winner], model or "demo", hash, llm, options.temperature), out)
    )
    return Report(
        model=model or "demo",
        model_hash=hash,
        layers=llm.spec.layers,
        study=name,
        storage=place.shown,
        options=asdict(options) | {"storage": place.shown, "dtype": _dtype(llm)},
        machine=machine(llm.engine.device),
        tokens=calibration.tokens,
        costs=search.costs,
        trials=tuple(search.trials()),
        importance=search.importance(),
        finalists=finalists,
        winner=winner,
        plan_files=tuple(files),
        seconds=stages.seconds,
        finished=finished,
        notes=tuple(notes),
    )


def _load(
    folder: Path, prompts: Sequence[str], options: Options, loading: dict[str, Any], progress: Progress
) -> LLM:
    def needs(tokenizer: Any, defaults: Any) -> tuple[int, int]:
        if tokenizer is None:
            raise ConfigError("prompts are text, but this model's folder has no tokenizer.json; add one")
        longest = max(len(tokenizer.encode(prompt)) for prompt in prompts)
        return min(ROWS, len(prompts)), longest + _room(options, prompts)

    def loading_only(stage: str, done: int, total: int) -> None:
        if stage != "prefill":
            progress(stage, done, total)

    return foredraft.load(folder, drafter="none", needs=needs, progress=loading_only, **loading)


def _room(options: Options, prompts: Sequence[str]) -> int:
    """New tokens of a prompt at most, whatever it is for."""
    return max(options.new_tokens, new_tokens(options.tokens, written(len(set(prompts)))))


def _finalists(
    llm: LLM,
    search: Search,
    held_out: Sequence[list[int]],
    options: Options,
    stages: _Stages,
    progress: Progress,
) -> tuple[Finalist, ...]:
    """The best plans of the search, in real decoding."""
    with _unrecorded(search.teacher.runner):
        with stages("rank"):
            search.begin(progress)
        with stages("search"):
            search.run(progress)
    with stages("decode"):
        return tuple(race(llm, best_of(search.trials(), options.finalists), held_out, options, progress))


def _study_name(hash: str, llm: LLM, calibration: Calibration, longest: int) -> str:
    """Trials of one study are held against the same texts, by one model at one temperature."""
    draws = f"T={calibration.temperature:g} K={longest}"
    return f"{FORMAT}. {hash[:16]} {_dtype(llm)} {draws} {calibration.digest[:16]}"


def _dtype(llm: LLM) -> str:
    return str(llm.engine.cache.dtype).removeprefix("torch.")


def _winner(finalists: Sequence[Finalist]) -> int | None:
    """The fastest that nothing speaks against."""
    sound = [place for place, one in enumerate(finalists) if one.objection is None]
    return max(sound, key=lambda place: finalists[place].speedup.median, default=None)


def _plan_file(won: Finalist, model: str, hash: str, llm: LLM, temperature: float) -> PlanFile:
    skips = Skips.spelled(won.skips)
    return PlanFile(
        model=model,
        model_hash=hash,
        layers=llm.spec.layers,
        skip_attention=skips.attention,
        skip_mlp=skips.mlp,
        exit=skips.exit,
        device=llm.engine.device.type,
        dtype=_dtype(llm),
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


def _keep(plan: PlanFile, out: Path | None) -> list[str]:
    """Where it went."""
    files = []
    if out is not None:
        write_plan(plan, out, "out")
        files.append(str(out))
    kept = keep_plan(plan)
    if kept is not None:
        files.append(str(kept))
    return files


def _unrecorded(runner: Runner) -> AbstractContextManager[None]:
    """Every trial's passes would be recorded, and met no more."""
    return nullcontext() if runner.graphs is None else wrapped(runner, "graphs", None)


class _Stages:
    """Seconds of each stage, by its name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = time.perf_counter() - start
