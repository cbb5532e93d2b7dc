"""Tensors here are tiny: a second thread only gets in the way. And what a module says of itself to tests of `matrix`."""

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


@pytest.fixture
def kinds(llm: Any, request: pytest.FixtureRequest) -> list[str]:
    """The kinds of drafters that a module names, by its KINDS or a function `kinds_of` the model."""
    return list(request.module.kinds_of(llm) if hasattr(request.module, "kinds_of") else request.module.KINDS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function.__module__ == "tests.exactness.matrix":
        for name, values in (("policy", "POLICIES"), ("way", "WAYS"), ("law", "LAWS")):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, getattr(metafunc.module, values, ("padded",)), ids=_id)


def _id(value: Any) -> str:
    """Name a law by the arguments of what loads its model, and its own words."""
    return "-".join(map(str, (*value[0].args, *value[1:]))) if isinstance(value, tuple) else str(value)
