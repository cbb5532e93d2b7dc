"""The whole benchmark: what is run in which order, and the record of it.

Contract: every contender is warmed up before its runs count; then, prompt by prompt, all take turns
(`schedule`). What is measured besides (costs, bandwidth, memory, where a round's time goes) has runs of its
own, so that looking does not change what is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

import foredraft
from foredraft import demo
from foredraft.bench.contender import Contender, Setting
from foredraft.bench.contenders import CONTENDERS, PROGRAMS, chosen
from foredraft.bench.costs import measure_costs
from foredraft.bench.field import Field
from foredraft.bench.figures import Group, Runs, Series, row_of
from foredraft.bench.machine import Memory, bandwidth, machine
from foredraft.bench.ours import Ours
from foredraft.bench.records import PLAIN, Bandwidth, Costs, Model, Report, RoundTime, Row, Spread
from foredraft.bench.schedule import groups_of, turns
from foredraft.bench.timing import parted
from foredraft.bench.weights import weigh
from foredraft.bench.workload import Workload
from foredraft.errors import ConfigError
from foredraft.llm import LLM
from foredraft.model.hub import resolve
from foredraft.model.runner import Runner
from foredraft.ngrams import repeated

__all__ = ["MAX_REPEATED", "Options", "bench"]

MAX_REPEATED = 0.3  # share of repeated 4-grams from which on a prompt does not count: drafting is easy there
LOOKED_INTO = 3  # groups of a workload whose rounds are taken apart

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Options:
    """methods: names of contenders; None = all that are possible. new_tokens: of every prompt. repeats: of
    every contender on every prompt. batch: sizes. coupled: ours draw by the coupled acceptance rule.

    Raises ConfigError that names a value out of range.
    """

    methods: tuple[str, ...] | None = None
    new_tokens: int = 64
    repeats: int = 3
    batch: tuple[int, ...] = (1,)
    temperature: float = 0.0
    coupled: bool = False

    def __post_init__(self) -> None:
        chosen(self.methods)
        if self.new_tokens < 2:
            raise ConfigError(f"new_tokens is {self.new_tokens}; give 2 or more")
        if self.repeats < 1:
            raise ConfigError(f"repeats is {self.repeats}; give 1 or more")
        if not self.batch or min(self.batch) < 1:
            raise ConfigError(f"batch is {','.join(map(str, self.batch))!r}; give sizes of 1 or more")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; give 0 or more")


def bench(
    workloads: Sequence[Workload],
    options: Options = Options(),
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
    host = Memory(torch.device("cpu"))
    before = host.held()
    llm = _load(workloads, options, {"path": model, "draft": draft, **loading}, progress)
    memory = Memory(llm.engine.device)
    ours = memory.held() - (before if memory.device.type == "cpu" else 0)
    prompts = {w.name: _encoded(llm, w, options.new_tokens, truncate) for w in workloads}
    folders = _folders(model, draft, loading)
    positions = options.new_tokens + max(len(ids) for encoded in prompts.values() for ids in encoded)
    cache = llm.engine.cache.data
    setting = Setting(
        llm, *folders, cache.dtype, cache.device, positions, options.temperature, options.coupled
    )
    field = Field()
    try:
        field.enter(setting, chosen(options.methods), memory, ours, wanted=options.methods is not None)
        return _Benchmark(setting, field, options, memory, prompts, progress).report(
            {"model": model or "demo", "draft": draft or (None if model else "demo"), **loading},
            _models(llm, folders),
        )
    finally:
        field.close()


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

    return foredraft.load(needs=needs, progress=progress, **loading)


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
    drafts = [getattr(drafter, "runner", None) for drafter in llm.engine.drafters.values()]
    for runner in drafts:
        if runner is not None and folders[1] is not None:
            models.append(weigh("draft", folders[1].name, runner))
    return tuple(models)
