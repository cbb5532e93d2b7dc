"""Loading: the composition root, which turns names and options into objects by the tables of `kinds`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from foredraft import demo
from foredraft.arguments import clear_calls
from foredraft.decode.drafter import Drafter
from foredraft.decode.engine import Engine
from foredraft.decode.params import SamplingParams
from foredraft.decode.vocab_ops import vocab_ops_of
from foredraft.drafters.asset import Parts
from foredraft.errors import ConfigError, Option
from foredraft.forks import Loads
from foredraft.llm import LLM
from foredraft.llm.loaded import Loaded
from foredraft.loading.capacity import CacheLimits, CacheSize, cache_size
from foredraft.loading.checkpoints import default_params, find_target
from foredraft.loading.device import find_device
from foredraft.loading.drafting import ChosenDrafting, choose_drafting
from foredraft.loading.options import LoadOptions, Needs, PlanSource, Progress, checked
from foredraft.loading.policies import make_policy
from foredraft.loading.runners import check_compile, make_runners
from foredraft.loading.threads import settle_threads, use_threads
from foredraft.model.runner import Runner
from foredraft.model.unread import Checkpoint
from foredraft.profiling.profile import use_profile
from foredraft.workers import release_workers

__all__ = ["load", "load_for", "options_for"]

REFUSED_MEMORY = "allocate memory"  # in the errors of PyTorch's allocator of a CPU
_loads = Loads()


@clear_calls(
    ConfigError,
    {"path": "its name is model", "model_path": "its name is model", "torch_dtype": "its name is dtype"},
)
def load(
    model: str | Path | None = None,
    *,
    drafter: str | None = None,
    draft: str | Path | None = None,
    revision: str | None = None,
    draft_revision: str | None = None,
    tokenizer: str | Path | None = None,
    plan: PlanSource | None = None,
    adapter: str | Path | None = None,
    draft_weights: str | None = None,
    policy: str = "auto",
    policy_options: Mapping[str, float | str] | None = None,
    max_draft: int | None = None,
    draft_sampling: Literal["sampled", "greedy"] = "sampled",
    dtype: str | torch.dtype | None = None,
    weights: str | None = None,
    device: str | None = None,
    max_batch: int | None = None,
    max_length: int | None = None,
    deterministic: bool = True,
    compile: bool = False,
    kernels: bool | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> LLM:
    """Load a Hugging Face checkpoint or a GGUF file, and the drafters for it.

    Args:
        model: A folder, a GGUF file or a hub id; "owner/name:Q4_K_M" is a GGUF file of a hub id, by its type.
            None loads the demo models, a target and a draft model.
        drafter: The drafter for requests that do not give one: "none", "lookup", "draft-model", "retokenize",
            "layer-skip", "kangaroo" or "low-bit". "auto" uses in every round the loaded drafter that pays
            most. By default "auto" under policy "auto"; under other policies "kangaroo" if an adapter is
            given, "layer-skip" if a plan is, else the draft model, else "lookup", or "none" where the policy
            needs draft probabilities.
        draft: The draft model's folder, GGUF file or hub id.
        revision: Branch, tag or commit of a hub id; "owner/name@revision" says the same.
        draft_revision: Branch, tag or commit of the draft model.
        tokenizer: The folder of a tokenizer that takes the place of the model's own.
        plan: The sub-layers that "layer-skip" skips: a file that `foredraft tune` wrote, its content
            (`PlanFile`), or a text such as "exit:8" or "skip:attn=3,5-7/mlp=4". None takes the plan that is
            kept for this model, if any.
        adapter: The folder of the adapter that "kangaroo" drafts with, as `foredraft train adapter` wrote it.
            None takes the adapter that is kept for this model, if any.
        draft_weights: "int4" or "int8": make the copy of the target that "low-bit" drafts with, in so many
            bits. With drafter "low-bit" it is "int4" by default, and leaves out what `plan` skips. Otherwise
            "auto" makes a copy in 4 bits by itself where a model of 16 or 32 bits takes 128 MiB or more,
            runs on the CPU kernels, and leaves memory for 4 copies free.
        policy: Decides whether and how far to draft: "auto", "fixed", "heuristic", "confidence",
            "adaptive-exit", "target-confidence" or "fallback".
        policy_options: The policy's own settings by name (docs/guides/policies.md).
        max_draft: Longest draft, in tokens. By default that of the plan or the adapter where "layer-skip" or
            "kangaroo" is the default drafter and the policy does not compare costs, else the policy's.
        draft_sampling: "sampled" draws drafts from q, "greedy" drafts the argmax of q. Both are exact.
        dtype: "bfloat16", "float16" or "float32", as "bf16", "fp16", "fp32" or a dtype of PyTorch, too; by
            default the checkpoint's.
        weights: "int4" or "int8": quantise the target's linear layers while loading, in groups of 32 weights.
            The target is then the quantised model. None keeps the weights of the checkpoint.
        device: "cpu", "cuda", "cuda:1", ...; by default "cuda" where there is a GPU.
        max_batch: Sequences decoded together. By default as many as fit, at most 8 on a CPU and 32 on a GPU.
        max_length: Positions of each sequence; by default the model's. Where 8 sequences do not fit into
            memory, the positions are halved until they do, but not below 4096. Where not even one sequence
            (or max_batch of them) fits, they are halved further, down to 512.
        deterministic: Keep greedy output bit-identical for every drafter and every batch.
        compile: Fuse the operators between the products of each layer with `torch.compile`. It needs a
            compiler, and seconds at loading and at the first text. It is meant for GPUs; on CPUs it replaces
            the kernels.
        kernels: Run layers and vocabulary operations with Foredraft's own kernels, which the wheel
            carries for most CPUs; elsewhere a C compiler builds them once, in seconds. None uses them where
            they are there and support the model.
        threads: CPU threads that compute, of this whole process: a later load with another number changes it
            for every model. By default FOREDRAFT_THREADS, what the program gave to `torch.set_num_threads`,
            OMP_NUM_THREADS, or the CPUs that the process may really use (docs/guides/models.md).
        progress: Called as (stage, done, total) while loading and during prefill.

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
    options = checked(
        LoadOptions(
            model=model, drafter=drafter, draft=draft, revision=revision, draft_revision=draft_revision,
            tokenizer=tokenizer, plan=plan, adapter=adapter, draft_weights=draft_weights, policy=policy,
            policy_options=policy_options, max_draft=max_draft, draft_sampling=draft_sampling, dtype=dtype,
            weights=weights, device=device, max_batch=max_batch, max_length=max_length,
            deterministic=deterministic, compile=compile, kernels=kernels, threads=threads, needs=None,
            progress=progress,
        )
    )  # fmt: skip
    return _assemble(options)


def load_for(needs: Needs, model: str | Path | None = None, **options: Any) -> LLM:
    """Load as `load` does, with caches no larger than the coming requests need; for the commands.

    Args:
        needs: Given the tokenizer and the model's default parameters, returns the sequences and the positions
            that will be used at most. max_batch and max_length override it.
        model: As `load` takes it.
        **options: The other arguments of `load`.
    """
    return _assemble(options_for(model, needs, **options))


def options_for(model: str | Path | None = None, needs: Needs | None = None, **options: Any) -> LoadOptions:
    """Return the checked options of `load`, with its defaults for those that are not given.

    Raises:
        ConfigError: An option has a value that cannot be honoured.
    """
    defaults = {name: parameter.default for name, parameter in signature(load).parameters.items()}
    return checked(LoadOptions(**defaults | options | {"model": model, "needs": needs}))


def _assemble(options: LoadOptions) -> LLM:
    """Build the model; memory that the system refuses is the error of the option that took it."""
    try:
        return _assembled(options)
    except (MemoryError, RuntimeError) as error:  # PyTorch raises RuntimeError where a CPU's memory ends
        if isinstance(error, RuntimeError) and REFUSED_MEMORY not in str(error):
            raise
        raise ConfigError(
            "for which the system gives too little memory", option="model", value=str(options.model),
            remedy=("lower ", Option("max_length"), " or ", Option("max_batch"), ", or end other programs"),
        ) from error  # fmt: skip


def _assembled(options: LoadOptions) -> LLM:
    """Build the model step by step. Each step refuses what it can before the next, costlier one."""
    threads = use_threads(options.threads)
    device = find_device(options.device)
    check_compile(options, device)
    target = find_target(options)
    drafting = choose_drafting(options, target, device)
    for found in drafting.found.values():
        found.announce()
    params = default_params(target)
    size = _cache_size(options, target, drafting, params, device)
    _loads.note(threads.number)
    runner, *models = make_runners(options, (target, *drafting.models), device)
    engine = _engine(options, target, drafting, runner, models, size)
    settle_threads(threads, runner)
    profiled = 0.0 if drafting.drafter == "none" else _profile(engine, options)
    release_workers()  # another thread may decode
    loaded = Loaded(
        engine=engine,
        runner=runner,
        spec=target.spec,
        tokenizer=target.tokenizer,
        model="demo" if options.model == demo.target_path() else str(options.model),
        weights=target.weights,
        max_length=size.positions,
        default_drafter=None if drafting.drafter == "none" else drafting.drafter,
        default_params=params,
        deterministic=options.deterministic,
        profile_seconds=profiled,
    )
    return LLM(loaded, options.progress)


def _profile(engine: Engine, options: LoadOptions) -> float:
    """Measure what rounds cost here, unless that is known, and return the seconds that it took."""
    return use_profile(engine, lambda done, total: options.report("profile", done, total))


def _cache_size(
    options: LoadOptions,
    target: Checkpoint,
    drafting: ChosenDrafting,
    params: SamplingParams,
    device: torch.device,
) -> CacheSize:
    """Return the size of the target's cache; `params` are the model's default parameters."""
    rows = positions = None
    if options.needs is not None:
        rows, positions = options.needs(target.tokenizer, params)
    limits = CacheLimits(options.max_batch, options.max_length, rows, positions)
    return cache_size(target, drafting.found.values(), device, limits, kernels=options.allows_kernels)


def _engine(
    options: LoadOptions,
    target: Checkpoint,
    drafting: ChosenDrafting,
    runner: Runner,
    models: Sequence[Runner],
    size: CacheSize,
) -> Engine:
    """Build the policy, the caches, every drafter that was found and the engine.

    Args:
        options: The options of `load`.
        target: The target.
        drafting: The drafters.
        runner: Runs the target.
        models: Run the drafters' whole models, in the order of `drafting.models`.
        size: Of the target's cache.
    """
    policy = make_policy(
        options.policy, options.policy_options or {}, options.max_draft, runner, drafting.planned
    )
    cache = runner.new_cache(size.rows, size.positions)
    parts = Parts(
        target=runner, cache=cache, rows=size.rows, positions=size.positions, tokenizer=target.tokenizer
    )
    return Engine(
        runner,
        cache,
        policy,
        _drafters(drafting, models, parts),
        vocabulary=target.spec.vocab_size,
        device=runner.decoder.device,
        vocab_ops=vocab_ops_of(runner),
        greedy_drafts=options.draft_sampling == "greedy",
    )


def _drafters(drafting: ChosenDrafting, models: Sequence[Runner], parts: Parts) -> dict[str, Drafter]:
    """Build the drafters; `models` run their whole models, in the order of `drafting.models`."""
    waiting = iter(models)
    made: dict[str, Drafter] = {}
    for name, found in drafting.found.items():
        made[name] = found.make(replace(parts, models=tuple(islice(waiting, len(found.models)))))
    return made
