"""A served chat model of four rows, clients of it, and a file of keys. These tests need the extra `serve`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import foredraft
from foredraft.llm import LLM
from tests.support.checkpoints import save_checkpoint
from tests.support.serving import Served, load_chat, serving


@pytest.fixture(scope="package")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with load_chat(tmp_path_factory.mktemp("chat")) as found:
        yield found


@pytest.fixture(scope="package")
def served(llm: LLM) -> Iterator[Served]:
    with serving(llm) as found:
        yield found


@pytest.fixture(scope="package")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model that ends every text after a few tokens, with an end-of-text token."""
    path = save_checkpoint(tmp_path_factory.mktemp("ending") / "model", tokenizer=True, eos_token_id=2)
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with foredraft.load(path, device="cpu", max_length=128) as llm, serving(llm) as found:
        yield found


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
def claude(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("alice one\nbob two\n", encoding="utf-8")
    return file
