"""The whole search: texts, costs, trials, the best plans in real decoding, the plan file of the winner."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import foredraft
from foredraft import demo
from foredraft.bench.machine import machine
from foredraft.bench.timing import wrapped
from foredraft.drafters.plan_files import model_hash, plan_place
from foredraft.errors import ConfigError, RequestError
from foredraft.llm import LLM
from foredraft.loading.policies import longest_draft
from foredraft.model.hub import resolve
from foredraft.model.runner import Runner
from foredraft.tune.calibration import CalibrationTexts, calibrate, hold_out, new_tokens, written
from foredraft.tune.calibration_cache import CalibrationCache
from foredraft.tune.costs import measure_plan_costs
from foredraft.tune.finals import finals
from foredraft.tune.options import Options
from foredraft.tune.plan_output import check_kept, dtype_of, keep, kept_before, plan_file, replaced
from foredraft.tune.progress import Progress, silent
from foredraft.tune.records import Finalist, Report
from foredraft.tune.search import Deadline, Search, best_of
from foredraft.tune.study import StudyPlace
from foredraft.tune.teacher_forced import TeacherForced

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
    A plan that could not be written at last is told by the report, too.
    """
    stages = _Stages()
    deadline = Deadline(options.timeout)
    place = StudyPlace(options.storage)
    if (plan := plan_place("any")) is not None:
        check_kept(plan.parent)
    revision = loading.pop("revision", None)
    if revision is not None and model is None:
        raise ConfigError(f"revision is {revision!r}, but no hub id is given that has it; leave it out")
    folder = demo.target_path() if model is None else resolve(model, revision)
    hash = model_hash(folder)
    with stages("load"):
        llm = _load(folder, prompts, options, loading, progress)
    runner = llm.engine.target
    assert isinstance(runner, Runner)
    longest = longest_draft(options.max_draft, options.max_draft, runner)
    room = _room(options, prompts)
    ids = [_fitting(llm, own, room, options, prompts, truncate) for own in llm.encode(list(prompts))]
    kept, held_out = hold_out(ids)
    with stages("calibrate"):
        texts = CalibrationCache(folder, hash, llm, kept, options.tokens, options.temperature)
        calibration = texts.read_or(
            lambda: calibrate(llm, kept, options.tokens, options.temperature, progress)
        )
        teacher = TeacherForced(runner, calibration, longest, deadline.check, progress)
    with place.watched():
        with stages("costs"):
            context = int(median(text.start + text.new // 2 for text in calibration.texts))
            name = _study_name(hash, llm, calibration, longest)
            search = Search(
                place, name, options, teacher,
                lambda: measure_plan_costs(llm, context, longest, options.temperature, progress), deadline,
            )  # fmt: skip
        finished = _searched(search, stages, progress)
        # from here on the storage is not needed
        trials, importance = tuple(search.trials()), search.importance()
        exhausted = search.exhausted and len(trials) < options.trials
    finalists: tuple[Finalist, ...] = ()
    if finished:
        try:
            with stages("decode"):
                best = best_of(trials, options.finalists)
                finalists = tuple(finals(llm, best, held_out, options, progress))
        except KeyboardInterrupt:
            finished = False
    winner = _winner(finalists)
    notes, files, unwritten = [], list[str](), list[str]()
    if exhausted:
        notes.append(f"All {search.plans} plans of this model were tried, so the search ended there.")
    if winner is not None:
        notes += [note for note in [replaced(hash)] if note is not None]
        won = plan_file(finalists[winner], model or "demo", hash, llm, options.temperature)
        files, unwritten = keep(won, out)
    elif (note := kept_before(hash, finalists)) is not None:
        notes.append(note)
    return Report(
        model=model or "demo",
        model_hash=hash,
        layers=llm.spec.layers,
        study=name,
        storage=place.shown,
        options=asdict(options) | {"storage": place.shown, "dtype": dtype_of(llm)},
        machine=machine(llm.engine.device),
        tokens=calibration.tokens,
        costs=search.costs,
        trials=trials,
        importance=importance,
        finalists=finalists,
        winner=winner,
        plan_files=tuple(files),
        seconds=stages.seconds,
        finished=finished,
        notes=tuple(notes),
        unwritten=tuple(unwritten),
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
    return max(options.new_tokens, _of_a_text(options, prompts))


def _of_a_text(options: Options, prompts: Sequence[str]) -> int:
    """New tokens that are asked of a prompt for the texts of the search."""
    return new_tokens(options.tokens, written(len(set(prompts))))


def _fitting(
    llm: LLM,
    ids: list[int],
    room: int,
    options: Options,
    prompts: Sequence[str],
    truncate: Literal["left"] | None,
) -> list[int]:
    """A prompt with room for what follows it, in the words of a search where there is none."""
    try:
        return llm.fitting(ids, room, truncate)
    except RequestError as error:
        ways = []
        if options.new_tokens == room:
            ways.append("lower new_tokens")
        elif _of_a_text(replace(options, tokens=1), prompts) < room:
            ways.append("lower tokens=")
        if room < llm.max_length:
            ways += ["shorten the prompt", *(["truncate='left'"] if truncate is None else [])]
        if llm.max_length < llm.spec.max_positions:
            ways.append(f"raise max_length up to the model's {llm.spec.max_positions}")
        remedy = ", or ".join(ways) or "take a model that has more"
        raise RequestError(
            f"a prompt of {len(ids)} tokens and the {room} new ones that the search needs after it exceed the"
            f" {llm.max_length} positions there is room for; {remedy}"
        ) from error


def _searched(search: Search, stages: _Stages, progress: Progress) -> bool:
    """Have the trials made; False where that was interrupted."""
    try:
        with _unrecorded(search.teacher.runner):
            with stages("rank"):
                search.begin(progress)
            with stages("search"):
                search.run(progress)
    except KeyboardInterrupt:
        if not search.trials():
            raise
        return False
    return True


def _study_name(hash: str, llm: LLM, calibration: CalibrationTexts, longest: int) -> str:
    """Trials of one study are held against the same texts, by one model at one temperature; and against the
    same costs, so machines share it that are of a kind and run the passes alike."""
    draws = f"T={calibration.temperature:g} K={longest}"
    about = machine(llm.engine.device)
    device = about.get("device") or f"{about['cpu']}, {about['threads']} threads"
    runner = llm.engine.target
    assert isinstance(runner, Runner)
    passes = {
        "kernels": runner.by_kernels,
        "compiled": runner.compiled,
        "deterministic": llm.deterministic,
    }
    ways = "+".join(way for way, so in passes.items() if so) or "plain"
    return f"{FORMAT}. {hash[:16]} {dtype_of(llm)} {draws} {calibration.digest[:16]} {ways} on {device}"


def _winner(finalists: Sequence[Finalist]) -> int | None:
    """The fastest that nothing speaks against."""
    sound = [place for place, one in enumerate(finalists) if one.objection is None]
    return max(sound, key=lambda place: finalists[place].speedup.median, default=None)


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
