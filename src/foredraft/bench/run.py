"""The whole benchmark: what is loaded, what is measured, and the record of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

import foredraft
from foredraft import demo
from foredraft.bench.contender import BenchContext
from foredraft.bench.contenders import CONTENDERS, PROGRAMS, check_policy, chosen, deciding
from foredraft.bench.foredraft_contender import ForedraftContender
from foredraft.bench.lineup import LineUp
from foredraft.bench.machine import Memory, bandwidth, machine
from foredraft.bench.measurement import Measurement, Progress
from foredraft.bench.options import MAX_REPEATED, Options
from foredraft.bench.records import Costs, Model, Report, Row
from foredraft.bench.weights import weigh
from foredraft.bench.workload import Workload
from foredraft.decode.draft_pass import ModelDrafter
from foredraft.decode.policy import Policy
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.errors import ConfigError
from foredraft.kinds import DRAFTERS
from foredraft.llm import LLM
from foredraft.loading.policies import check_settings
from foredraft.model.hub import resolve
from foredraft.model.runner import Runner

__all__ = ["bench"]

Prompts = Mapping[str, list[list[int]]]  # the ids of each workload's


def bench(
    workloads: Sequence[Workload],
    options: Options,
    *,
    model: str | None = None,
    draft: str | None = None,
    truncate: Literal["left"] | None = None,
    progress: Progress = lambda stage, done, total: None,
    **loading: Any,
) -> Report:
    """Time every contender on every workload.

    model, draft, loading: as `foredraft.load` takes them. truncate: "left" drops the oldest tokens of a
    prompt that is too long. progress: (stage, done, total). Raises what `load` and `LLM.encode` raise, and
    ConfigError of a contender that was asked for by name and cannot run. A KeyboardInterrupt ends it early,
    with the rows that are done, or is raised where there are none.
    """
    check_policy(options.methods, loading.get("policy"), loading.get("max_draft"))
    before = Memory(torch.device("cpu")).settled()
    llm = _load(workloads, options, {"path": model, "draft": draft, **loading}, progress)
    memory = Memory(llm.engine.device)
    ours = memory.settled() - (before if memory.device.type == "cpu" else 0)
    prompts = {w.name: _encoded(llm, w, options.new_tokens, truncate) for w in workloads}
    folders = _folders(model, draft, loading)
    setting = _setting(llm, folders, prompts, options, loading)
    models = _models(llm, folders)
    field = LineUp()
    try:
        field.enter(setting, chosen(options.methods), memory, ours, wanted=options.methods or ())
        field.under(setting, deciding(options.policies))
        field.notes += _unheeding(field, loading.get("policy"))
        speed = bandwidth(setting.device)
        longest = max(map(_longest, [llm.engine.policy, *_followed(field)]))
        read_seconds = None if speed is None else models[0].step_bytes / speed.bytes_per_second
        race = Measurement(setting, field, options, memory, longest, read_seconds, progress)
        costs, rows, finished = _run(race, prompts)
        programs = {CONTENDERS[contender.method].program for contender in field.contenders}
        versions = {name: PROGRAMS[name].version for name in sorted(programs - {"foredraft"})}
        return Report(
            options=_asked(llm, prompts, options, model, draft, loading),
            machine=machine(setting.device) | versions,
            models=models,
            bandwidth=speed,
            costs=tuple(costs),
            rows=tuple(rows),
            notes=tuple(field.notes),
            finished=finished,
        )
    finally:
        field.close()


def _run(race: Measurement, prompts: Prompts) -> tuple[list[Costs], list[Row], bool]:
    """The costs and the rows, and whether they are all."""
    costs: list[Costs] = []
    rows: list[Row] = []
    try:
        for name, own in prompts.items():
            for met, more in race.rows(name, own):
                costs.append(met)
                rows += more
    except KeyboardInterrupt:
        if not rows:
            raise
        return costs, rows, False
    return costs, rows, True


def _unheeding(field: LineUp, policy: str | None) -> list[str]:
    """What to say of those who draft by a policy of their own, whichever was asked for."""
    if policy is None:
        return []
    own = {one.method: one.policy for one in reversed(field.contenders) if one.policy is not None}
    return [f"{method} keeps to policy {name}" for method, name in own.items() if name != policy]


def _followed(field: LineUp) -> list[Policy]:
    """The policies of those whose drafts are foretold from costs."""
    return [
        one.decides
        for one in field.contenders
        if isinstance(one, ForedraftContender) and one.method in DRAFTERS
    ]


def _longest(policy: Any) -> int:
    """Of its drafts: every policy is made from it."""
    return int(policy.max_draft)


def _asked(
    llm: LLM,
    prompts: Prompts,
    options: Options,
    model: str | None,
    draft: str | None,
    loading: dict[str, Any],
) -> dict[str, Any]:
    """All that was asked for, and the values that hold where nothing was; for JSON."""
    asked = {"model": model or "demo", "draft": draft or (None if model else "demo"), **loading}
    asked |= asdict(options) | {"policy": llm.engine.policy.name, "max_draft": _longest(llm.engine.policy)}
    asked |= {"deterministic": llm.deterministic, "max_repeated": MAX_REPEATED}
    plans = [str(each.skips) for each in llm.engine.drafters.values() if isinstance(each, LayerSkip)]
    asked |= {"plan": next(iter(plans), None)}
    asked |= {"workloads": {name: len(own) for name, own in prompts.items()}}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asked.items()}


def _setting(
    llm: LLM,
    folders: tuple[Path, Path | None],
    prompts: Prompts,
    options: Options,
    loading: Mapping[str, Any],
) -> BenchContext:
    cache = llm.engine.cache
    longest = max(len(ids) for own in prompts.values() for ids in own)
    positions = longest + options.new_tokens
    return BenchContext(
        llm,
        *folders,
        cache.dtype,
        cache.device,
        positions,
        options.temperature,
        options.coupled,
        loading.get("max_draft"),
        check_settings(llm.engine.policy.name, loading.get("policy_options") or {}),
        next((each.planned for each in llm.engine.drafters.values() if isinstance(each, LayerSkip)), None),
    )


def _load(
    workloads: Sequence[Workload], options: Options, loading: dict[str, Any], progress: Progress
) -> LLM:
    most = max(options.batch)
    if (loading.get("max_batch") or most) < most:
        raise ConfigError(f"max_batch is {loading['max_batch']}, but batch asks for {most}; leave it out")

    def needs(tokenizer: Any, defaults: Any) -> tuple[int, int]:
        if tokenizer is None:
            raise ConfigError("a workload is text, but this model's folder has no tokenizer.json; add one")
        texts = (text for workload in workloads for text in workload.prompts)
        return most, max(len(tokenizer.encode(text)) for text in texts) + options.new_tokens

    def loading_only(stage: str, done: int, total: int) -> None:
        if stage != "prefill":  # whoever draws in the middle of a run slows it down
            progress(stage, done, total)

    rows = {"max_batch": loading.get("max_batch") or most}  # else a CPU has rows for a few, and others wait
    return foredraft.load(needs=needs, progress=loading_only, **loading | rows)


def _encoded(
    llm: LLM, workload: Workload, new_tokens: int, truncate: Literal["left"] | None
) -> list[list[int]]:
    return [llm.fitting(ids, new_tokens, truncate) for ids in llm.encode(list(workload.prompts))]


def _folders(model: str | None, draft: str | None, loading: Mapping[str, Any]) -> tuple[Path, Path | None]:
    """Of the target and the draft, as `load` found them."""
    if draft is not None:
        drafted: Path | None = resolve(draft, loading.get("draft_revision"))
    else:
        drafted = demo.draft_path() if model is None else None
    return demo.target_path() if model is None else resolve(model, loading.get("revision")), drafted


def _models(llm: LLM, folders: tuple[Path, Path | None]) -> tuple[Model, ...]:
    target = llm.engine.target
    assert isinstance(target, Runner)
    models = [weigh("target", folders[0].name, target)]
    for drafter in llm.engine.drafters.values():
        runner = drafter.draft_pass.runner if isinstance(drafter, ModelDrafter) else target
        if runner is not target and folders[1] is not None:
            models.append(weigh("draft", folders[1].name, runner))
    return tuple(models)
