"""Checks of the options of `load` that need several of them, but no file of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch

from foredraft import demo
from foredraft.decode.params import SamplingParams
from foredraft.errors import ConfigError
from foredraft.kinds.compatibility import check_named_drafter
from foredraft.kinds.load_options import LoadOptions
from foredraft.loading.policy_choice import check_settings
from foredraft.model.tokenizer import Tokenizer

__all__ = ["DTYPES", "LoadOptions", "Needs", "checked"]

# The tokenizer and the model's default parameters -> sequences and positions that will be used at most.
Needs: TypeAlias = Callable[[Tokenizer | None, SamplingParams], tuple[int, int]]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def checked(options: LoadOptions) -> LoadOptions:
    """Check combinations, and fill in the demo models and the policy's settings.

    Raises:
        ConfigError: An option has a value that cannot be honoured.
    """
    given = {} if options.policy_options is None else options.policy_options
    options = replace(options, policy_options=check_settings(options.policy, given))
    _check_revision("revision", options.revision, options.model)
    _check_revision("draft_revision", options.draft_revision, options.draft)
    if options.model is None:
        shipped = demo.head_path() if options.drafter == "eagle3" else demo.draft_path()
        draft = shipped if options.draft is None else options.draft
        options = replace(options, model=demo.target_path(), draft=draft)
    if options.drafter is not None:
        check_named_drafter(options.drafter, options.policy, options.assets)
    return options


def _check_revision(option: str, revision: str | None, source: str | Path | None) -> None:
    if revision is not None and source is None:
        raise ConfigError(
            "but no hub id is given that has it", option=option, value=revision, remedy="leave it out"
        )
