"""The parameters of a request, from `params` and from sampling options that are given by name."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields
from typing import Any

from foredraft.decode.params import SamplingKeywords, SamplingParams
from foredraft.errors import RequestError

__all__ = ["SAMPLING_OPTIONS", "with_keywords"]


SAMPLING_OPTIONS = tuple(each.name for each in fields(SamplingParams))


def with_keywords(
    params: SamplingParams | Seq[SamplingParams] | None, default: SamplingParams, options: SamplingKeywords
) -> SamplingParams | list[SamplingParams]:
    """Return the parameters with the options that were given by name in place of their own.

    Args:
        params: For all prompts, or a list with one for each prompt; None takes `default`.
        default: The model's own.
        options: Options by name.

    Raises:
        RequestError: `params` is anything else, or an option is unknown or out of range.
    """
    if isinstance(params, list | tuple):
        return [_one(f"params[{place}]", each, options) for place, each in enumerate(params)]
    return _one("params", default if params is None else params, options)


def _one(what: str, params: Any, options: SamplingKeywords) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise RequestError(
            option=what,
            value=params,
            remedy="give its entries as keywords, as in generate(prompt, **options)"
            if isinstance(params, Mapping)
            else "give a SamplingParams, or options as keywords, as in temperature=0",
        )
    return params.replace(**options) if options else params
