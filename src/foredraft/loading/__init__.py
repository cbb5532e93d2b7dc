"""The composition root: names and options -> objects, by the tables of `kinds`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from foredraft import demo
from foredraft.decode.engine import Engine
from foredraft.decode.params import SamplingParams, is_whole
from foredraft.decode.vocab_ops import vocab_ops_of
from foredraft.errors import ConfigError, RequestError
from foredraft.kinds import DRAFTERS, POLICIES, DrafterKind, Parts, default_drafter, suits
from foredraft.llm import LLM
from foredraft.loading.capacity import rows_and_positions
from foredraft.loading.device import check_dtype, find_device
from foredraft.loading.pairing import (
    check_kind,
    fitting_kinds,
    same_vocabulary,
    tokenizer_of,
    vocabulary_map,
)
from foredraft.loading.planning import PlanSource, chosen_plan
from foredraft.loading.policies import check_settings, make_policy
from foredraft.model.generation import FILE as GENERATION
from foredraft.model.generation import generation_defaults
from foredraft.model.hub import resolve
from foredraft.model.runner import Runner, cached_shapes, check_compiler, probe_shapes, unserved_because
from foredraft.model.spec import ModelSpec
from foredraft.model.tokenizer import Tokenizer
from foredraft.model.weights import load_decoder

__all__ = ["DRAFTERS", "POLICIES", "load"]

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
Needs = Callable[[Tokenizer | None, SamplingParams], tuple[int, int]]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load(
    path: str | Path | None = None,
    *,
    drafter: str | None = None,
    draft: str | Path | None = None,
    revision: str | None = None,
    draft_revision: str | None = None,
    plan: PlanSource | None = None,
    policy: str = "auto",
    policy_options: Mapping[str, float | str] | None = None,
    max_draft: int | None = None,
    draft_sampling: Literal["sampled", "greedy"] = "sampled",
    dtype: str | None = None,
    device: str | None = None,
    max_batch: int | None = None,
    max_length: int | None = None,
    deterministic: bool = True,
    compile: bool = False,
    kernels: bool | None = None,
    needs: Needs | None = None,
    progress: Progress | None = None,
) -> LLM:
    """Load a Hugging Face checkpoint, and whatever drafts for it.

    Args:
        path: A folder or a hub id; None is the demo pair, with its draft model.
        drafter: Who drafts unless a request says otherwise: "none", "lookup", "draft-model", "retokenize",
            "layer-skip", or "auto", whichever of those loaded pays most. None means "layer-skip" where a plan
            is given, else "none" without a draft, "draft-model" with one that has the target's tokenizer, and
            "retokenize" with any other.
        draft: The draft model's folder or hub id.
        revision: The branch, tag or commit of a hub id; "owner/name@revision" says the same.
        draft_revision: The same of the draft model.
        plan: What of the model its own drafts leave out: a file that `foredraft tune` wrote, what is in one
            (`PlanFile`), or spelled as "exit:8" or "skip:attn=3,5-7/mlp=4". None: the one that is kept for
            this model, if any.
        policy: How long a draft is: "auto", "fixed", "heuristic", "confidence", "adaptive-exit",
            "target-confidence" or "fallback".
        policy_options: The policy's own numbers, by name (docs/guides/policies.md).
        max_draft: Tokens drafted in a round at most, by default the plan's number where "layer-skip" drafts
            by default and the policy does not weigh costs, else the policy's.
        draft_sampling: "sampled" drafts from q, "greedy" drafts its argmax (a one-hot q); both are exact.
        dtype: "bfloat16", "float16" or "float32", by default the checkpoint's.
        device: "cpu", "cuda", "cuda:1", ...; by default "cuda" where there is one.
        max_batch: Sequences decoded together, by default as many as fit, 8 at most on a CPU and 32 on a GPU.
        max_length: Positions of each, by default the model's. Where memory cannot hold 8 sequences of them,
            they are halved until it can, but not below 4096; where it cannot hold even one (or max_batch), on
            to 512.
        deterministic: Greedy output is bit-identical whatever drafts and whoever shares the batch.
        compile: Fuse what lies between the products of each layer, by torch.compile; it needs a compiler, and
            seconds at loading and at the beginning of the first text. Meant for GPUs: on CPUs it takes the
            place of the kernels.
        kernels: Run whole layers, and what is decided over a vocabulary, by Foredraft's own kernels, which a
            C compiler makes for this CPU once, in two seconds. None: where there is one, and they serve.
        needs: Given the tokenizer and the model's default parameters, the sequences and the positions that
            will be used; no more are made room for than that, unless max_batch or max_length says so.
        progress: Called as (stage, done, total) while loading and prefilling.

    Raises:
        ConfigError: An option has a value that cannot be honoured.
        CheckpointError: The folder, or what the hub has, cannot be loaded or run exactly.
    """
    _check_name("drafter", drafter, (None, *DRAFTERS))
    _check_name("policy", policy, POLICIES)
    settings = check_settings(policy, {} if policy_options is None else policy_options)
    _check_name("draft_sampling", draft_sampling, ("sampled", "greedy"))
    _check_name("dtype", dtype, (None, *DTYPES))
    for option, value in (("max_draft", max_draft), ("max_batch", max_batch), ("max_length", max_length)):
        if value is not None and not is_whole(value, 1):
            instead = ", or drafter='none'" if option == "max_draft" else ""
            raise ConfigError(f"{option} is {value!r}; give a whole number, 1 or more{instead}")
    for option, wanted, of in (("revision", revision, path), ("draft_revision", draft_revision, draft)):
        if wanted is not None and of is None:
            raise ConfigError(f"{option} is {wanted!r}, but no hub id is given that has it; leave it out")
    if path is None:
        path, draft = demo.target_path(), demo.draft_path() if draft is None else draft
    if drafter is not None and DRAFTERS[drafter].needs_draft and draft is None:
        raise ConfigError(
            f"drafter is {drafter!r}; give draft=, the folder or hub id of the small model, too"
        )
    if drafter is not None and DRAFTERS[drafter].chooses and not suits(drafter, policy):
        raise ConfigError(f"drafter is {drafter!r}, but policy {policy!r} cannot choose; give policy='auto'")
    where = find_device(device)
    if compile:
        check_compiler(where)
    if compile and kernels:
        raise ConfigError("compile is on, and so are the kernels, whose place it takes; leave one out")

    report = progress or _silent
    folders = [resolve(str(path), revision, report)]
    if draft is not None:
        folders.append(resolve(str(draft), draft_revision, report))
    tokenizers = tuple(tokenizer_of(folder) for folder in folders)
    other = draft is not None and not same_vocabulary(folders, tokenizers)
    specs = [ModelSpec.from_folder(folder) for folder in folders]
    drafter = drafter or default_drafter(draft is not None, other, plan_given=plan is not None)
    dtypes = [DTYPES[spec.dtype if dtype is None else dtype] for spec in specs]
    self_draft = chosen_plan(
        plan, folders[0], specs[0].layers, where, dtypes[0], needed=DRAFTERS[drafter].needs_plan
    )
    kinds = fitting_kinds(draft is not None, other, self_draft is not None)
    check_kind(drafter, draft_sampling, kinds, folders)
    if POLICIES[policy].confident:
        _check_confident(policy, drafter, kinds)
    tokenizer, default_params = tokenizers[0], _default_params(folders[0], specs[0])
    needed = (None, None) if needs is None else needs(tokenizer, default_params)
    stretch = max(kind.stretch for kind in kinds.values())
    models = list(zip(specs, dtypes, strict=True))
    given, native = (max_batch, max_length), kernels is not False and not compile
    rows, positions = rows_and_positions(models, where, given, needed, stretch, native)
    for each in dict.fromkeys(dtypes):
        check_dtype(where, each)
    runners: list[Runner] = []
    for folder, each in zip(folders, dtypes, strict=True):
        report("load", len(runners), len(folders))
        exact = deterministic and not runners
        runners.append(_runner(folder, where, each, exact, compile, kernels))
    report("load", len(folders), len(folders))
    target = runners[0]
    planned = None if self_draft is None or not DRAFTERS[drafter].needs_plan else self_draft.max_draft
    made = make_policy(policy, settings, max_draft, target, planned)

    vocabulary = None if other else vocabulary_map(runners, tokenizers, where)
    cache = target.new_cache(rows, positions)
    parts = Parts(
        target,
        cache,
        runners[1] if len(runners) == 2 else None,
        rows,
        positions,
        tokenizers,
        vocabulary,
        None if self_draft is None else self_draft.skips,
        None if self_draft is None else self_draft.max_draft,
    )
    spec = specs[0]
    engine = Engine(
        target,
        cache,
        made,
        {name: kind.make(parts) for name, kind in kinds.items() if kind.make is not None},
        vocabulary=spec.vocab_size,
        device=where,
        vocab_ops=vocab_ops_of(target),
        greedy_drafts=draft_sampling == "greedy",
    )
    return LLM(
        engine,
        spec,
        tokenizer,
        default_drafter=None if drafter == "none" else drafter,
        max_length=positions,
        default_params=default_params,
        lossless={name: kind.lossless for name, kind in DRAFTERS.items()},
        deterministic=deterministic,
        progress=progress,
    )


def _check_confident(policy: str, drafter: str, kinds: Mapping[str, DrafterKind]) -> None:
    """Raises ConfigError where a policy would never be asked: by nobody, or not by whom drafts by default."""
    fitting = [name for name in kinds if suits(name, policy)]
    if not fitting:
        raise ConfigError(f"policy is {policy!r}, but nothing that drafts can be unsure; give another policy")
    if kinds[drafter].make is not None and drafter not in fitting:
        raise ConfigError(
            f"policy is {policy!r}, but {drafter!r} drafts, which is never unsure; give another policy,"
            f" or drafter={fitting[0]!r}"
        )


def _check_name(option: str, value: str | None, known: Iterable[str | None]) -> None:
    if value not in tuple(known):  # what cannot be looked up in a table is none of its names either
        raise ConfigError(f"{option} is {value!r}; give one of {', '.join(filter(None, known))}")


def _silent(stage: str, done: int, total: int) -> None:
    return None


def _runner(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool = True,
    compile: bool = False,
    kernels: bool | None = None,
) -> Runner:
    """The runner of a checkpoint; probing for its shapes ends before its weights come, so that the memory of
    both is never held at once."""
    outline = load_decoder(folder, "meta", dtype)  # names and shapes are checked, no value is read
    reason = "compile is on" if compile else "they are off" if kernels is False else None
    reason = reason or unserved_because(outline.spec, device, dtype)
    if kernels and reason is not None:
        raise ConfigError(f"kernels is on, but they do not serve {folder} here: {reason}; leave it out")
    if reason is None:
        runner = Runner(load_decoder(folder, device, dtype, native=True))
    else:
        probed = cached_shapes(outline, device, probe_shapes) if deterministic else None
        decoder = load_decoder(folder, device, dtype)
        runner = Runner(decoder, deterministic=deterministic, probed=probed, compile=compile)
    logger.info("%s: %s%s", folder, runner.choices, f"; no kernels: {reason}" if reason else "")
    return runner


def _default_params(folder: Path, spec: ModelSpec) -> SamplingParams:
    """What the checkpoint asks for. A value that no request may have is left out, with a warning: the model
    is none the worse for it."""
    params = SamplingParams()
    for option, value in generation_defaults(folder, spec.vocab_size).items():
        try:
            params = replace(params, **{option: value})
        except RequestError as error:
            logger.warning("%s: %s; it is left out", folder / GENERATION, error)
    return params
