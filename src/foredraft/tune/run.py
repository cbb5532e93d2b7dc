"""A whole search: calibration texts, costs, trials, finalists in real decoding, the winner's plan file."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeAlias

from foredraft import demo
from foredraft.bench.machine_record import LoadWatch, machine
from foredraft.bench.settings import Progress, TuneSettings, silent, without_prefill
from foredraft.bench.workload import AS_IT_IS, PromptForm
from foredraft.drafters.layer_skip import LowBit
from foredraft.drafters.plan_files import model_hash, plan_place
from foredraft.errors import ConfigError, Option, RequestError
from foredraft.llm import LLM
from foredraft.llm.loaded import Loaded
from foredraft.loading import load_for
from foredraft.loading.checkpoints import longest_draft
from foredraft.model.locate import resolve, with_loras
from foredraft.model.memory import dtype_name
from foredraft.model.runner import Runner
from foredraft.model.source import ModelSource
from foredraft.model.spec import ModelSpec
from foredraft.tune.finals import (
    check_writable,
    decode_finalists,
    earlier_plan_note,
    make_plan_file,
    save_plan,
)
from foredraft.tune.search import Deadline, Search, best_trials
from foredraft.tune.study import StudyStorage
from foredraft.tune.teacher_forced import (
    CalibrationTexts,
    TeacherForced,
    cached_texts,
    calibration_prompt_count,
    hold_out,
    new_tokens_per_prompt,
    texts_key,
    write_calibration_texts,
)
from foredraft.tune.tune_records import Finalist, TuneReport, measure_plan_costs

Prompts: TypeAlias = Sequence[str] | Sequence[list[int]]  # texts, or the token ids of chats
CALIBRATION_BATCH = 8  # calibration texts generated in one batch
STUDY_FORMAT = 3  # version of what a study holds; a study of another version is not resumed


def tune(
    prompts: Sequence[str],
    options: TuneSettings,
    *,
    model: str | None = None,
    plan_out: Path | None = None,
    truncate: Literal["left"] | None = None,
    form: PromptForm = AS_IT_IS,
    progress: Progress = silent,
    **loading: Any,
) -> TuneReport:
    """Search for the sub-layers that drafts of a model skip, and save the plan if it wins.

    Ctrl-C ends the search early: the study keeps its trials, and the report holds them.
    """
    stages, watch = dict[str, float](), LoadWatch(progress)
    deadline = Deadline(options.timeout)
    storage = StudyStorage(options.storage)
    if (plan := plan_place("any")) is not None:
        check_writable(plan.parent)
    revision = loading.pop("revision", None)
    if model is None and revision is not None:
        remedy = "give the hub id of a model, or leave it out"
        problem = "but the demo model has no revisions"
        raise ConfigError(problem, option="revision", value=revision, remedy=remedy)
    found = demo.target_path() if model is None else resolve(model, revision)
    source = with_loras(found, loading.get("lora", ()))
    hash = model_hash(source)
    with _stage(stages, "load"):
        llm = _load(source.path, prompts, form, options, loading, watch)
    _check_layers(llm.loaded.spec)
    run = _Run(model or "demo", source, hash, llm, options, form, storage, stages, watch)
    max_draft = longest_draft(options.max_draft, options.max_draft, run.runner)
    ids, held_out = hold_out(_encode(llm, form.applied(llm.tokenizer, prompts), options, truncate))
    with _stage(stages, "calibrate"):
        calibration = run.calibrate(ids)
        teacher_forced = TeacherForced(
            run.runner, calibration, max_draft, deadline.check, watch, run.drafting
        )
    report = run.search(calibration, teacher_forced, deadline)
    return run.save(run.decode(report, held_out), plan_out)


def _check_layers(spec: ModelSpec) -> None:
    """Raise ConfigError where the layers of a model cannot be skipped one by one."""
    if spec.producers or spec.layer_input_size:
        what = "read the keys and values of others" if spec.producers else "take inputs besides their states"
        problem = f"cannot search for sub-layers to skip in a {spec.architecture} whose layers {what}"
        raise ConfigError(problem, remedy=("load it with ", Option("plan", "exit:LAYER")))


@dataclass(frozen=True, slots=True)
class _Run:
    """The stages of one search after the model is loaded."""

    name: str  # the model's name, for display
    source: ModelSource  # its files
    hash: str  # its hash (`plan_files.model_hash`)
    llm: LLM  # the model itself
    options: TuneSettings
    form: PromptForm
    storage: StudyStorage
    stages: dict[str, float]  # the seconds of each, by its name
    progress: LoadWatch

    @property
    def runner(self) -> Runner:
        return self.llm.loaded.runner

    @property
    def drafting(self) -> Runner | None:
        """Runs the drafts: the copy in few bits, if one was asked for; None: the target does."""
        copy = self.llm.loaded.engine.drafters.get(LowBit.name)
        return None if copy is None or copy.draft_pass is None else copy.draft_pass.runner

    def calibrate(self, prompts: list[list[int]]) -> CalibrationTexts:
        """Return the calibration texts after these prompts, from the cache folder or newly written."""
        llm, tokens, temperature = self.llm, self.options.tokens, self.options.temperature
        key = texts_key(self.source, self.hash, llm.loaded, prompts, tokens, temperature)
        return cached_texts(
            key,
            llm.loaded.spec.vocab_size,
            lambda: write_calibration_texts(llm, prompts, tokens, temperature, self.progress),
        )

    def search(
        self, calibration: CalibrationTexts, teacher_forced: TeacherForced, deadline: Deadline
    ) -> TuneReport:
        """Run the trials of the study, with its storage guarded against loss; report them."""
        loaded, options, notes = self.llm.loaded, self.options, list[str]()
        max_draft = teacher_forced.max_draft
        context = int(median(text.prompt_length + text.new_tokens // 2 for text in calibration.texts))
        study = _study_name(self.hash, loaded, calibration, max_draft, options.draft_weights)
        with self.storage.loss_reported():
            with _stage(self.stages, "costs"):
                search = Search(
                    self.storage, study, options, teacher_forced,
                    lambda: measure_plan_costs(
                        loaded, context, max_draft, options.temperature, self.progress,
                        drafting=self.drafting,
                    ),
                    deadline,
                )  # fmt: skip
            finished = self._run_trials(search)
            trials, importance = tuple(search.trials()), search.importance()
            if search.exhausted and len(trials) < options.trials:
                notes.append(
                    f"All {search.plan_count} plans of this model were tried, so the search ended early."
                )
        if calibration.tokens < options.tokens:
            notes.append(
                f"The prompts give {calibration.tokens:,} calibration tokens without repetition, of the"
                f" {options.tokens:,} asked for; more prompts make the predictions better."
            )
        shown = {"storage": self.storage.shown, "dtype": dtype_name(loaded.engine.cache.dtype)} | asdict(
            self.form
        )
        return TuneReport(
            model=self.name, model_hash=self.hash, layers=loaded.spec.layers, study=study,
            storage=self.storage.shown, options=asdict(options) | shown, machine={},
            tokens=calibration.tokens, costs=search.costs, trials=trials, importance=importance,
            seconds=self.stages, finished=finished, notes=tuple(notes),
        )  # fmt: skip

    def _run_trials(self, search: Search) -> bool:
        """Run the trials; return False if Ctrl-C ended them, and raise it if no trial is complete."""
        try:
            with self.runner.uncaptured():
                with _stage(self.stages, "rank"):
                    search.find_seed_plans(self.progress)
                with _stage(self.stages, "search"):
                    search.run_trials(self.progress)
        except KeyboardInterrupt:
            if not search.trials():
                raise
            return False
        return True

    def decode(self, report: TuneReport, held_out: list[list[int]]) -> TuneReport:
        """Add the finalists; the report is unfinished if Ctrl-C ended the search before they were decoded."""
        options = self.options
        if not report.finished:
            return report
        try:
            with _stage(self.stages, "decode"):
                best = best_trials(
                    report.trials, options.finalists, of_copy=options.draft_weights is not None
                )
                if not best:  # the empty plan alone was tried
                    return report
                found = decode_finalists(self.llm, best, held_out, options, self.progress, self.drafting)
                return replace(report, finalists=tuple(found))
        except KeyboardInterrupt:
            return replace(report, finished=False)

    def save(self, report: TuneReport, plan_out: Path | None) -> TuneReport:
        """Save the winner's plan, if a finalist wins, and say so in the report."""
        loaded, weights, finalists = self.llm.loaded, self.options.draft_weights, report.finalists
        winner, files, unwritten = _winner(finalists), list[str](), list[str]()
        note = earlier_plan_note(self.hash, finalists, weights, replaced=winner is not None)
        if winner is not None:
            plan = make_plan_file(finalists[winner], self.name, self.hash, loaded, self.options)
            files, unwritten = save_plan(plan, plan_out)
        return replace(
            report,
            machine=machine(loaded.engine.device) | {"highest_load": self.progress.highest},
            winner=winner,
            plan_files=tuple(files),
            notes=(*report.notes, *filter(None, [note])),
            unwritten=tuple(unwritten),
        )


def _load(
    model: Path,
    prompts: Sequence[str],
    form: PromptForm,
    options: TuneSettings,
    loading: dict[str, Any],
    progress: Progress,
) -> LLM:
    def needs(tokenizer: Any, defaults: Any) -> tuple[int, int]:
        """Return the rows and positions that the search needs."""
        if tokenizer is None:
            raise ConfigError(
                "the model has no tokenizer.json, which text prompts need", remedy="add the file"
            )
        longest = form.longest(tokenizer, prompts)
        return min(CALIBRATION_BATCH, len(prompts)), longest + _new_tokens(options, prompts)

    given = {**loading, "draft_weights": options.draft_weights}
    return load_for(needs, model, drafter="none", progress=without_prefill(progress), **given)


def _encode(
    llm: LLM, prompts: Prompts, options: TuneSettings, truncate: Literal["left"] | None
) -> list[list[int]]:
    """Return the prompts' token ids, with room left for the new tokens of all stages."""
    room = _new_tokens(options, prompts)
    encoded = []
    for ids in llm.encode(prompts):
        try:
            encoded.append(llm.requests.truncated(ids, room, truncate))
        except RequestError as error:
            raise _too_long(llm, len(ids), options, prompts, truncate) from error
    return encoded


def _new_tokens(options: TuneSettings, prompts: Prompts) -> int:
    """Return the most new tokens that any stage asks of a prompt."""
    return max(options.new_tokens, _calibration_tokens(options, prompts))


def _calibration_tokens(options: TuneSettings, prompts: Prompts) -> int:
    """Return the new tokens that are asked of a prompt for a calibration text."""
    different = len(set(map(tuple, prompts)))
    return new_tokens_per_prompt(options.tokens, calibration_prompt_count(different))


def _too_long(
    llm: LLM, length: int, options: TuneSettings, prompts: Prompts, truncate: Literal["left"] | None
) -> RequestError:
    """Return the error for a prompt of `length` tokens, with the remedies that help."""
    room = _new_tokens(options, prompts)
    remedies: list[tuple[str | Option, ...]] = []
    if options.new_tokens == room:
        remedies.append(("lower ", Option("new_tokens")))
    elif _calibration_tokens(replace(options, tokens=1), prompts) < room:
        remedies.append(("lower ", Option("tokens")))
    if room < llm.max_length:
        remedies.append(("shorten the prompt",))
        if truncate is None:
            remedies.append(("give ", Option("truncate", "left")))
    most = llm.loaded.spec.max_positions
    if llm.max_length < most:
        remedies.append(("raise ", Option("max_length"), f" up to the model's {most}"))
    if not remedies:
        remedies.append(("use a model with more positions",))
    joined = [part for remedy in remedies for part in (", or ", *remedy)][1:]
    return RequestError(
        f"a prompt of {length} tokens and the {room} new tokens that the search needs exceed the"
        f" {llm.max_length} positions available",
        remedy=tuple(joined),
    )


def _study_name(
    hash: str, loaded: Loaded, calibration: CalibrationTexts, max_draft: int, draft_weights: str | None
) -> str:
    """Return the name of the study in which all trials are comparable.

    They have one model, texts, temperature, draft length and costs, so machines share it only if they are of
    one kind and run the passes in the same way.
    """
    sampling = f"T={calibration.temperature:g} K={max_draft}"
    if draft_weights is not None:
        sampling += f" drafts in {draft_weights}"
    about = machine(loaded.engine.device)
    device = about.get("device") or f"{about['cpu']}, {about['threads']} threads"
    runner = loaded.runner
    modes = {"kernels": runner.by_kernels, "compiled": runner.compiled, "deterministic": loaded.deterministic}
    mode = "+".join(name for name, enabled in modes.items() if enabled) or "plain"
    texts, dtype = calibration.digest[:16], dtype_name(loaded.engine.cache.dtype)
    return f"{STUDY_FORMAT}. {hash[:16]} {dtype} {sampling} {texts} {mode} on {device}"


def _winner(finalists: Sequence[Finalist]) -> int | None:
    """Return the index of the fastest finalist without an objection."""
    eligible = [index for index, finalist in enumerate(finalists) if finalist.objection is None]
    return max(eligible, key=lambda index: finalists[index].speedup.median, default=None)


@contextmanager
def _stage(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Measure the seconds of a stage."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = time.perf_counter() - start
