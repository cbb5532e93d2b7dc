"""The whole benchmark: load the contenders, measure them, and return the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from foredraft import demo
from foredraft.bench.bench_records import (
    MAX_REPEATED,
    BenchReport,
    ForwardCosts,
    ModelRecord,
    Row,
    TurnCount,
)
from foredraft.bench.bench_settings import BenchSettings
from foredraft.bench.contender import BenchContext, ForedraftContender, LineUp
from foredraft.bench.contenders import CONTENDERS, PROGRAMS, check_policy, resolve_methods, resolve_policies
from foredraft.bench.machine_record import LoadWatch, Memory, bandwidth, machine, model_record
from foredraft.bench.measurement import Measurement, Progress
from foredraft.bench.workload import AS_IT_IS, PromptForm, Workload
from foredraft.decode.policy import Policy
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.errors import ConfigError, Option, python_spelling
from foredraft.kinds.tables import DRAFTERS
from foredraft.llm import LLM
from foredraft.llm.loaded import Loaded
from foredraft.loading import load_for
from foredraft.loading.checkpoints import check_settings
from foredraft.model.gguf.tensors import source_of
from foredraft.model.hub import resolve
from foredraft.model.lora.folder import with_loras
from foredraft.model.lora.lora_config import loras_of

Prompts = Mapping[str, list[list[int]]]  # token ids of each prompt, by workload


def bench(
    workloads: Sequence[Workload],
    options: BenchSettings,
    *,
    model: str | None = None,
    truncate: Literal["left"] | None = None,
    form: PromptForm = AS_IT_IS,
    progress: Progress = lambda stage, done, total: None,
    spelling: Callable[[Option], str] = python_spelling,
    **loading: Any,
) -> BenchReport:
    """Time every contender on every workload."""
    check_policy(options.methods, loading.get("policy"), loading.get("max_draft"))
    for kind in (DRAFTERS[name] for name in options.methods or () if name in DRAFTERS):
        loading |= {option: loading.get(option) or value for option, value in kind.wanted_by.items()}
    llm, loaded_bytes = _load(workloads, form, options, {"model": model} | loading, progress)
    prompts = {w.name: _encoded(llm, w, form, options.new_tokens, truncate) for w in workloads}
    folders = _folders(llm, model, loading)
    context = _context(llm, folders, prompts, options, loading)
    models = _models(llm.loaded, folders)
    lineup = LineUp(spelling)
    try:
        memory = Memory(context.device)
        methods = resolve_methods(options.methods)
        lineup.load(context, methods, memory, loaded_bytes, required=options.methods or (), progress=progress)
        lineup.add_policies(context, resolve_policies(options.policies))
        lineup.notes += _fixed_policy_notes(lineup, loading.get("policy"))
        progress("bandwidth", 0, 1)
        speed = bandwidth(context.device)
        progress("bandwidth", 1, 1)
        watch = LoadWatch(progress)
        measurement = Measurement(
            context=context,
            lineup=lineup,
            options=options,
            memory=memory,
            longest_draft=_longest_draft(llm.loaded.engine.policy, lineup),
            weight_read_seconds=None if speed is None else models[0].step_bytes / speed.bytes_per_second,
            progress=watch,
        )
        costs, rows, counts, finished = _measure(measurement, prompts)
        return BenchReport(
            options=_effective_options(llm, prompts, options, model, loading) | asdict(form),
            machine=machine(context.device) | {"highest_load": watch.highest} | _versions(lineup),
            models=models,
            bandwidth=speed,
            costs=tuple(costs),
            rows=tuple(rows),
            notes=tuple(lineup.notes),
            finished=finished,
            turns=tuple(counts),
        )
    finally:
        lineup.close()


def _measure(
    measurement: Measurement, prompts: Prompts
) -> tuple[list[ForwardCosts], list[Row], list[TurnCount], bool]:
    """Return the costs, the rows, the turns, and whether the measurement finished."""
    costs: list[ForwardCosts] = []
    rows: list[Row] = []
    counts: list[TurnCount] = []
    try:
        for workload, ids in prompts.items():
            for found, more, count in measurement.measure(workload, ids):
                costs.append(found)
                rows += more
                counts.append(count)
    except KeyboardInterrupt:
        if not rows:
            raise
        return costs, rows, counts, False
    return costs, rows, counts, True


def _fixed_policy_notes(lineup: LineUp, policy: str | None) -> list[str]:
    """Return a note for each method that keeps its own policy although another one was asked for."""
    if policy is None:
        return []
    own = {one.method: one.policy_name for one in reversed(lineup.contenders) if one.policy_name is not None}
    return [f"{method} keeps to policy {name}" for method, name in own.items() if name != policy]


def _longest_draft(loaded: Policy, lineup: LineUp) -> int:
    """Return the longest draft of the policies whose speed is predicted from costs."""
    policies = [loaded]
    for contender in lineup.contenders:
        if isinstance(contender, ForedraftContender) and contender.method in DRAFTERS:
            policies.append(contender.policy)
    return max(policy.max_draft for policy in policies)


def _versions(lineup: LineUp) -> dict[str, str | None]:
    """Return the versions of the other programs that take part."""
    programs = {CONTENDERS[contender.method].program for contender in lineup.contenders}
    return {name: PROGRAMS[name].version for name in sorted(programs - {"foredraft"})}


def _effective_options(
    llm: LLM, prompts: Prompts, options: BenchSettings, model: str | None, loading: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all options with the values in effect, as plain values for JSON."""
    engine = llm.loaded.engine
    plans = [str(drafter.skips) for drafter in engine.drafters.values() if isinstance(drafter, LayerSkip)]
    names = {"model": model or "demo", "draft": loading.get("draft") or (None if model else "demo")}
    effective = {
        **loading,
        **names,
        **asdict(options),
        "policy": engine.policy.name,
        "max_draft": engine.policy.max_draft,
        "deterministic": llm.deterministic,
        "max_repeated": MAX_REPEATED,
        "plan": next(iter(plans), None),
        "workloads": {name: len(ids) for name, ids in prompts.items()},
    }
    return {name: list(value) if isinstance(value, tuple) else value for name, value in effective.items()}


def _context(
    llm: LLM,
    folders: tuple[Path, Path | None],
    prompts: Prompts,
    options: BenchSettings,
    loading: Mapping[str, Any],
) -> BenchContext:
    engine, cache = llm.loaded.engine, llm.loaded.engine.cache
    target, draft = folders
    longest = max(len(ids) for several in prompts.values() for ids in several)
    return BenchContext(
        llm=llm,
        target=target,
        draft=draft,
        dtype=cache.dtype,
        device=cache.device,
        positions=longest + options.new_tokens,
        temperature=options.temperature,
        acceptance=options.acceptance,
        max_draft=loading.get("max_draft"),
        policy_options=check_settings(engine.policy.name, loading.get("policy_options") or {}),
    )


def _load(
    workloads: Sequence[Workload],
    form: PromptForm,
    options: BenchSettings,
    loading: dict[str, Any],
    progress: Progress,
) -> tuple[LLM, int]:
    """Load the models for the longest prompt and the largest batch; return also the bytes that they added."""
    largest = max(options.batch)
    max_batch = loading.get("max_batch") or largest  # the default on a CPU may be fewer rows, and others wait
    if max_batch < largest:
        raise ConfigError(
            ("but ", Option("batch"), f" asks for {largest}"),
            option="max_batch",
            value=max_batch,
            remedy="leave it out",
        )

    def needs(tokenizer: Any, defaults: Any) -> tuple[int, int]:
        if tokenizer is None:
            raise ConfigError(
                "a workload is text, but this model's folder has no tokenizer.json", remedy="add one"
            )
        texts = [text for workload in workloads for text in workload.prompts]
        return largest, form.longest(tokenizer, texts) + options.new_tokens

    def show(stage: str, done: int, total: int) -> None:
        if stage != "prefill":  # drawing a progress bar within a timed run would slow that run down
            progress(stage, done, total)

    before = Memory(torch.device("cpu")).held_after_release()
    llm = load_for(needs, progress=show, **loading | {"max_batch": max_batch})
    memory = Memory(llm.loaded.engine.device)
    return llm, memory.held_after_release() - (before if memory.device.type == "cpu" else 0)


def _encoded(
    llm: LLM, workload: Workload, form: PromptForm, new_tokens: int, truncate: Literal["left"] | None
) -> list[list[int]]:
    applied = form.applied(llm.tokenizer, list(workload.prompts))
    return [llm.requests.truncated(ids, new_tokens, truncate) for ids in llm.encode(applied)]


def _folders(llm: LLM, model: str | None, loading: Mapping[str, Any]) -> tuple[Path, Path | None]:
    """Return the checkpoint folders of the target and of the draft model, as `load` found them."""
    target = demo.target_path() if model is None else resolve(model, loading.get("revision"))
    target = with_loras(target, loading.get("lora", ()))
    if not any(drafter.whole_model for drafter in llm.loaded.engine.drafters.values()):
        return target, None
    if loading.get("draft") is not None:
        return target, resolve(loading["draft"], loading.get("draft_revision"))
    return target, demo.draft_path() if model is None else None


def _shown(folder: Path) -> str:
    """Return the name of a model's folder or GGUF file, and of its LoRAs."""
    return " + ".join([source_of(folder).name, *(lora.name for _, lora in loras_of(folder))])


def _models(loaded: Loaded, folders: tuple[Path, Path | None]) -> tuple[ModelRecord, ...]:
    """Return the records of the target and of the draft model."""
    models = [model_record("target", _shown(folders[0]), loaded.runner, loaded.weights)]
    for drafter in loaded.engine.drafters.values():
        if drafter.whole_model and drafter.draft_pass is not None and folders[1] is not None:
            models.append(model_record("draft", source_of(folders[1]).name, drafter.draft_pass.runner))
    return tuple(models)
