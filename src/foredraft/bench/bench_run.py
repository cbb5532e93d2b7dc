"""The whole benchmark: load the contenders, measure them, and return the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any, Literal

import torch

from foredraft import demo
from foredraft.bench.bench_records import MAX_REPEATED, BenchReport, ForwardCosts, ModelRecord, Row, TurnCount
from foredraft.bench.contender import BenchContext, ForedraftContender, LineUp
from foredraft.bench.contenders import check_policy, resolve_methods, resolve_policies
from foredraft.bench.machine_record import LoadWatch, Memory, bandwidth, machine, model_record
from foredraft.bench.measurement import Measurement
from foredraft.bench.settings import BenchSettings, Progress, silent, without_prefill
from foredraft.bench.workload import AS_IT_IS, PromptForm, Workload
from foredraft.decode.policy import Policy
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.errors import ConfigError, Option, python_spelling
from foredraft.kinds.tables import DRAFTERS
from foredraft.llm import LLM
from foredraft.loading import load_for
from foredraft.loading.checkpoints import check_settings
from foredraft.model.locate import resolve, with_loras
from foredraft.model.source import source_of

Prompts = Mapping[str, list[list[int]]]  # token ids of each prompt, by workload


def bench(
    workloads: Sequence[Workload],
    options: BenchSettings,
    *,
    model: str | None = None,
    truncate: Literal["left"] | None = None,
    form: PromptForm = AS_IT_IS,
    progress: Progress = silent,
    spelling: Callable[[Option], str] = python_spelling,
    **loading: Any,
) -> BenchReport:
    """Time every contender on every workload."""
    check_policy(options.methods, loading.get("policy"), loading.get("max_draft"))
    for kind in (DRAFTERS[name] for name in options.methods or () if name in DRAFTERS):
        loading |= {option: loading.get(option) or value for option, value in kind.wanted_by.items()}
    llm, loaded_bytes = _load(workloads, form, options, {"model": model} | loading, progress)
    encoded = {each.name: llm.encode(form.applied(llm.tokenizer, list(each.prompts))) for each in workloads}
    prompts: Prompts = {
        name: [llm.requests.truncated(ids, options.new_tokens, truncate) for ids in several]
        for name, several in encoded.items()
    }
    context = _context(llm, model, prompts, options, loading)
    models = _models(context)
    with closing(LineUp(spelling)) as lineup:
        memory = Memory(context.device)
        methods, required = resolve_methods(options.methods), options.methods or ()
        lineup.load(context, methods, memory, loaded_bytes, required=required, progress=progress)
        lineup.add_policies(context, resolve_policies(options.policies))
        lineup.note_fixed_policies(loading.get("policy"))
        progress("bandwidth", 0, 1)
        speed = bandwidth(context.device)
        progress("bandwidth", 1, 1)
        watch = LoadWatch(progress)
        measurement = Measurement(
            context, lineup, options, memory, _longest_draft(llm.loaded.engine.policy, lineup),
            None if speed is None else models[0].step_bytes / speed.bytes_per_second, watch,
        )  # fmt: skip
        measured, finished = _measure(measurement, prompts)
        return BenchReport(
            options=_effective_options(llm, prompts, options, model, loading) | asdict(form),
            machine=machine(context.device) | {"highest_load": watch.highest} | lineup.versions,
            models=models,
            bandwidth=speed,
            costs=tuple(costs for costs, _, _ in measured),
            rows=tuple(row for _, rows, _ in measured for row in rows),
            notes=tuple(lineup.notes),
            finished=finished,
            turns=tuple(count for _, _, count in measured),
        )


def _measure(
    measurement: Measurement, prompts: Prompts
) -> tuple[list[tuple[ForwardCosts, list[Row], TurnCount]], bool]:
    """Return what was measured, and whether that is all: Ctrl-C leaves what is done."""
    measured: list[tuple[ForwardCosts, list[Row], TurnCount]] = []
    try:
        for name, ids in prompts.items():
            for each in measurement.measure(name, ids):
                measured.append(each)
    except KeyboardInterrupt:
        if measured:
            return measured, False
        raise
    return measured, True


def _longest_draft(loaded: Policy, lineup: LineUp) -> int:
    """Return the longest draft of the policies whose speed is predicted from costs."""
    own = (one for one in lineup.contenders if isinstance(one, ForedraftContender))
    return max([loaded.max_draft, *(one.policy.max_draft for one in own if one.method in DRAFTERS)])


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
    llm: LLM, model: str | None, prompts: Prompts, options: BenchSettings, loading: Mapping[str, Any]
) -> BenchContext:
    engine, cache = llm.loaded.engine, llm.loaded.engine.cache
    found = demo.target_path() if model is None else resolve(model, loading.get("revision"))
    draft = None
    if any(drafter.whole_model for drafter in engine.drafters.values()):
        if loading.get("draft") is not None:
            draft = resolve(loading["draft"], loading.get("draft_revision"))
        elif model is None:
            draft = source_of(demo.draft_path())
    return BenchContext(
        llm=llm,
        target=with_loras(found, loading.get("lora", ())),
        draft=draft,
        dtype=cache.dtype,
        device=cache.device,
        positions=max(len(ids) for several in prompts.values() for ids in several) + options.new_tokens,
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
        problem = ("but ", Option("batch"), f" asks for {largest}")
        raise ConfigError(problem, option="max_batch", value=max_batch, remedy="leave it out")

    def needs(tokenizer: Any, defaults: Any) -> tuple[int, int]:
        if tokenizer is None:
            raise ConfigError(
                "a workload is text, but this model's folder has no tokenizer.json", remedy="add one"
            )
        texts = [text for workload in workloads for text in workload.prompts]
        return largest, form.longest(tokenizer, texts) + options.new_tokens

    before = Memory(torch.device("cpu")).held_after_release()
    llm = load_for(needs, progress=without_prefill(progress), **loading | {"max_batch": max_batch})
    memory = Memory(llm.loaded.engine.device)
    return llm, memory.held_after_release() - (before if memory.device.type == "cpu" else 0)


def _models(context: BenchContext) -> tuple[ModelRecord, ...]:
    """Return the records of the target and of the draft model."""
    loaded, source = context.llm.loaded, context.target
    name = " + ".join([source.path.name, *(lora.name for _, lora in source.loras)])
    models = [model_record("target", name, loaded.runner, loaded.weights)]
    for drafter in loaded.engine.drafters.values():
        if drafter.whole_model and drafter.draft_pass is not None and context.draft is not None:
            models.append(model_record("draft", context.draft.path.name, drafter.draft_pass.runner))
    return tuple(models)
