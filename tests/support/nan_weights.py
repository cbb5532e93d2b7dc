"""A drafter whose states are no numbers drafts nothing, and leaves the text as it is."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foredraft import LLM, SamplingParams
from foredraft.decode.policy import Fixed
from tests.support.loaded import engine_of


def check_nan_weights(
    llm: LLM, weight: Tensor, params: SamplingParams, prompts: list[list[int]], plain: Sequence[list[int]]
) -> None:
    engine_of(llm).policy = Fixed(4)
    sound = weight.clone()
    weight.fill_(float("nan"))
    try:
        found = llm.generate(prompts, params)
    finally:
        weight.copy_(sound)
    assert [output.token_ids for output in found] == plain
    assert all(output.stats.drafted == 0 for output in found)
