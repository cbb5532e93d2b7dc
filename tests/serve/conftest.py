"""A served chat model, and OpenAI's client of it. These tests need the extra `serve`."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from foredraft.llm import LLM
from tests.support.serving import Served, load_chat, serving


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load_chat(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[Served]:
    with serving(llm) as found:
        yield found


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as found:
        yield found
