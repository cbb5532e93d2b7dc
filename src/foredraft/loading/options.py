"""The options of `load`, as one object, and the checks that need no file of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from foredraft import demo
from foredraft.decode.params import SamplingParams, is_whole
from foredraft.drafters.plan_search import PlanSource
from foredraft.errors import ConfigError, Option, Text, did_you_mean
from foredraft.kinds.compatibility import asset_options, check_named_drafter
from foredraft.kinds.tables import DRAFTERS, POLICIES
from foredraft.loading.policies import check_settings
from foredraft.loading.threads import check_threads
from foredraft.model.quantisation import BITS
from foredraft.model.tokenizer import Tokenizer

__all__ = ["DTYPES", "LoadOptions", "Needs", "PlanSource", "Progress", "checked"]

# Stage, and how much of it is done, of how much.
Progress: TypeAlias = Callable[[str, int, int], None]
# The tokenizer and the model's default parameters -> sequences and positions that will be used at most.
Needs: TypeAlias = Callable[[Tokenizer | None, SamplingParams], tuple[int, int]]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The arguments of `load`, which documents them; after `checked`, dtype is a name in DTYPES or None."""

    model: str | Path | None
    drafter: str | None
    draft: str | Path | None
    revision: str | None
    draft_revision: str | None
    tokenizer: str | Path | None
    plan: PlanSource | None
    adapter: str | Path | None
    draft_weights: str | None
    policy: str
    policy_options: Mapping[str, float | str] | None
    max_draft: int | None
    draft_sampling: str
    dtype: str | torch.dtype | None
    weights: str | None
    device: str | None
    max_batch: int | None
    max_length: int | None
    deterministic: bool
    compile: bool
    kernels: bool | None
    threads: int | None
    needs: Needs | None
    progress: Progress | None

    @property
    def assets(self) -> dict[str, Any]:
        """The options that the user gives of those that give drafters their assets, with their values."""
        given = {name: getattr(self, name) for name in asset_options()}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def allows_kernels(self) -> bool:
        """Whether Foredraft's kernels may run the models; `compile` takes their place."""
        return self.kernels is not False and not self.compile

    def report(self, stage: str, done: int, total: int) -> None:
        """Report progress where the caller wants it."""
        if self.progress is not None:
            self.progress(stage, done, total)


def checked(options: LoadOptions) -> LoadOptions:
    """Check names, counts and combinations, and fill in the demo models and the policy's settings.

    Raises:
        ConfigError: An option has a value that cannot be honoured.
    """
    _check_name("drafter", options.drafter, (None, *DRAFTERS))
    _check_name("policy", options.policy, POLICIES)
    given = {} if options.policy_options is None else options.policy_options
    options = replace(options, policy_options=check_settings(options.policy, given))
    _check_name("draft_sampling", options.draft_sampling, ("sampled", "greedy"))
    options = replace(options, dtype=_dtype_name(options.dtype))
    _check_name("weights", options.weights, (None, *BITS))
    _check_name("draft_weights", options.draft_weights, (None, *BITS))
    _check_count("max_draft", options.max_draft, (", or ", Option("drafter", "none")))
    _check_count("max_batch", options.max_batch)
    _check_count("max_length", options.max_length)
    check_threads(options.threads)
    _check_revision("revision", options.revision, options.model)
    _check_revision("draft_revision", options.draft_revision, options.draft)
    if options.model is None:
        draft = demo.draft_path() if options.draft is None else options.draft
        options = replace(options, model=demo.target_path(), draft=draft)
    if options.adapter is not None and not isinstance(options.adapter, str | Path):
        raise ConfigError(option="adapter", value=options.adapter, remedy="give the folder of an adapter")
    if options.drafter is not None:
        check_named_drafter(options.drafter, options.policy, options.assets)
    return options


def _check_name(option: str, value: object, known: Iterable[str | None]) -> None:
    names = tuple(known)
    if value not in names:  # of a tuple, because a value that is not hashable is compared too
        shown = [name for name in names if name is not None]
        remedy = f"give one of {', '.join(shown)}{did_you_mean(value, shown)}"
        raise ConfigError(option=option, value=value, remedy=remedy)


def _dtype_name(given: str | torch.dtype | None) -> str | None:
    """Return the name of a dtype that is given as PyTorch's own, by its name or by its short one.

    Examples:
        >>> _dtype_name(torch.bfloat16), _dtype_name("torch.float16"), _dtype_name("FP32")
        ('bfloat16', 'float16', 'float32')
    """
    if given is None:
        return None
    name = str(given).removeprefix("torch.").lower()
    name = SHORT.get(name, name)
    _check_name("dtype", name if name in DTYPES else given, DTYPES)
    return name


def _check_count(option: str, value: int | None, alternative: tuple[str | Option, ...] = ()) -> None:
    if value is not None and not is_whole(value, 1):
        remedy: Text = ("give a whole number, 1 or more", *alternative)
        raise ConfigError(option=option, value=value, remedy=remedy)


def _check_revision(option: str, revision: str | None, source: str | Path | None) -> None:
    if revision is not None and source is None:
        raise ConfigError(
            "but no hub id is given that has it", option=option, value=revision, remedy="leave it out"
        )
