"""Tensors here are tiny: a second thread only gets in the way. And what plain decoding says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def plain(llm: Any, request: pytest.FixtureRequest) -> list[list[int]]:
    """Each of a module's PROMPTS alone, one token a pass, by its GREEDY parameters."""
    greedy = request.module.GREEDY.replace(drafter="none")
    return [llm.generate([prompt], greedy)[0].token_ids for prompt in request.module.PROMPTS]
