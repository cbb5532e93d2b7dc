"""Loading: the composition root, which turns names and options into objects by the tables of `kinds`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from foredraft import demo
from foredraft.arguments import clear_calls, spelled_elsewhere, takes_fields_of
from foredraft.decode.engine import Engine
from foredraft.decode.vocab_ops import vocab_ops_of
from foredraft.drafters.asset import Parts
from foredraft.errors import ConfigError, Option
from foredraft.kinds.load_options import PREFIX_MIB, LoadOptions
from foredraft.llm import LLM
from foredraft.llm.loaded import Loaded
from foredraft.loading.capacity import CacheLimits, CacheSize, Capacity
from foredraft.loading.checkpoints import (
    ChosenDrafting,
    Needs,
    checked,
    choose_drafting,
    default_params,
    find_target,
    make_policy,
)
from foredraft.loading.machine_limits import settle_threads, use_threads
from foredraft.loading.prefixes import Prefixes
from foredraft.loading.runners import check_compile, find_device, make_runners
from foredraft.model.checkpoint import Checkpoint
from foredraft.model.runner import Runner
from foredraft.profiling.profile import use_profile
from foredraft.workers import Loads, release_workers

__all__ = ["load", "load_for", "options_for"]

REFUSED_MEMORY = "allocate memory"  # in the errors of PyTorch's allocator of a CPU
RENAMED = {name: f"its name is {here}" for name, here in spelled_elsewhere(LoadOptions).items()}
_loads = Loads()


@clear_calls(ConfigError, RENAMED)
@takes_fields_of(LoadOptions)
def load(options: LoadOptions) -> LLM:
    """Load a Hugging Face checkpoint or a GGUF file, and the drafters for it.

    It takes the fields of `LoadOptions` as keywords, and `model` by position, too.

    Returns:
        The loaded model.

    Raises:
        ConfigError: An option has a value that cannot be honoured, or this process was forked after another
            model was loaded.
        CheckpointError: A folder or a hub repository cannot be loaded or run exactly.

    Examples:
        >>> llm = foredraft.load(drafter="lookup", max_length=512)
        >>> llm.default_drafter, llm.max_length
        ('lookup', 512)
    """
    return _assemble(checked(options))


def load_for(
    needs: Needs | None, model: str | Path | None = None, *, reserved: int = 0, **options: Any
) -> LLM:
    """Load as `load` does, with caches no larger than the coming requests need; for the commands.

    Args:
        needs: Given the tokenizer and the model's default parameters, returns the sequences and the positions
            that will be used at most. max_batch and max_length override it. None: any number.
        model: As `load` takes it.
        reserved: Bytes of the device that the caller will take for something else.
        **options: The other arguments of `load`.
    """
    return _assemble(options_for(model, **options), needs, reserved)


def options_for(model: str | Path | None = None, **options: Any) -> LoadOptions:
    """Return the checked options of `load`, with its defaults for those that are not given."""
    return checked(LoadOptions(model, **options))


def _assemble(options: LoadOptions, needs: Needs | None = None, reserved: int = 0) -> LLM:
    """Build the model; memory that the system refuses is the error of the option that took it."""
    try:
        return _assembled(options, needs, reserved)
    except (MemoryError, RuntimeError) as error:  # PyTorch raises RuntimeError where a CPU's memory ends
        if isinstance(error, RuntimeError) and REFUSED_MEMORY not in str(error):
            raise
        raise ConfigError(
            "for which the system gives too little memory", option="model", value=str(options.model),
            remedy=("lower ", Option("max_length"), " or ", Option("max_batch"), ", or end other programs"),
        ) from error  # fmt: skip


def _assembled(options: LoadOptions, needs: Needs | None, reserved: int) -> LLM:
    """Build the model step by step. Each step refuses what it can before the next, costlier one."""
    threads = use_threads(options.threads)
    device = find_device(options.device)
    check_compile(options, device)
    target = find_target(options)
    drafting = choose_drafting(options, target, device)
    for found in drafting.found.values():
        found.announce()
    params = default_params(target)
    rows = positions = None
    if needs is not None:
        rows, positions = needs(target.tokenizer, params)
    prefixes = None
    if options.prefix_folder is not None:
        prefixes, reserved = Prefixes(options, target, drafting.found.values()), reserved or PREFIX_MIB << 20
    capacity = Capacity(target, drafting.found.values(), device, options.allows_kernels, reserved)
    size = capacity.cache_size(CacheLimits(options.max_batch, options.max_length, rows, positions))
    _loads.note(threads.number)
    whole = [replace(model, length=size.positions) for model in (target, *drafting.models)]
    runner, *models = make_runners(options, whole, device)
    engine = _engine(options, target, drafting, runner, models, size)
    settle_threads(threads, runner)
    profiled = 0.0
    if drafting.drafter != "none":
        profiled = use_profile(engine, lambda done, total: options.report("profile", done, total))
    if prefixes is not None:
        prefixes.give(engine, runner)
    release_workers()  # another thread may decode
    loaded = Loaded(
        engine=engine,
        runner=runner,
        spec=target.spec,
        tokenizer=target.tokenizer,
        model="demo" if options.model == demo.target_path() else str(options.model),
        weights=target.weights,
        lora=tuple(name for name, _ in target.source.loras),
        max_length=size.positions,
        default_drafter=None if drafting.drafter == "none" else drafting.drafter,
        default_params=params,
        deterministic=options.deterministic,
        profile_seconds=profiled,
    )
    return LLM(loaded, options.progress)


def _engine(
    options: LoadOptions,
    target: Checkpoint,
    drafting: ChosenDrafting,
    runner: Runner,
    models: Sequence[Runner],
    size: CacheSize,
) -> Engine:
    """Build the policy, the caches, every drafter that was found and the engine."""
    policy = make_policy(
        options.policy, options.policy_options or {}, options.max_draft, runner, drafting.planned,
        drafting.longest,
    )  # fmt: skip
    cache = runner.new_cache(size.rows, size.positions)
    parts = Parts(
        target=runner, cache=cache, rows=size.rows, positions=size.positions, tokenizer=target.tokenizer
    )
    waiting = iter(models)  # runners of whole models, in the order of `drafting.models`
    drafters = {
        name: found.make(replace(parts, models=tuple(islice(waiting, len(found.models)))))
        for name, found in drafting.found.items()
    }
    return Engine(
        runner,
        cache,
        policy,
        drafters,
        vocabulary=target.spec.vocab_size,
        vocab_ops=vocab_ops_of(runner),
        greedy_drafts=options.draft_sampling == "greedy",
    )
