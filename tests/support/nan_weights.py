"""A drafter whose states are no numbers drafts nothing, and leaves the text as it is."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foredraft import LLM, SamplingParams
from foredraft.decode.policy import Fixed
from tests.support.loaded import engine_of

__all__ = ["check_nan_weights"]


def check_nan_weights(
    llm: LLM, weight: Tensor, params: SamplingParams, prompts: list[list[int]], plain: Sequence[list[int]]
) -> None:
    """Compare the texts of prompts with plain decoding's while a drafter's weight is NaN.

    Args:
        llm: The model.
        weight: A weight of the drafter, which is restored.
        params: Name the drafter.
        prompts: The prompts.
        plain: The new ids of plain decoding.
    """
    engine_of(llm).policy = Fixed(4)
    sound = weight.clone()
    weight.fill_(float("nan"))
    try:
        found = llm.generate(prompts, params)
    finally:
        weight.copy_(sound)
    assert [output.token_ids for output in found] == plain
    assert all(output.stats.drafted == 0 for output in found)
