"""Texts of clients are drafts of their later requests: of no other key's, unless the operator shares them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft.drafters.suffix import Suffix
from foredraft.llm import LLM
from foredraft.serve.clients import Client
from tests.support.loaded import engine_of
from tests.support.planting import assert_caught, defect
from tests.support.serving import Served, load_chat, serving


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("chat")
    with load_chat(folder, drafter="suffix", recent_texts=1, max_batch=2) as found:
        yield found


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("alice one\nbob two\n", encoding="utf-8")
    return file


def texts_of(llm: LLM) -> Any:
    found = engine_of(llm).drafters["suffix"]
    assert isinstance(found, Suffix)
    return found.texts


def forget(llm: LLM) -> None:
    texts = texts_of(llm)
    while len(texts):
        texts._drop_oldest()


def asked(served: Served, key: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Return the text of a request, and what became of its drafts."""
    body = {
        "model": "demo",
        "prompt": "# a list of names\n",
        "max_tokens": 48,
        "temperature": 0,
        "ignore_eos": True,
    }
    reply = served.client.post(
        "/v1/completions", json=body | fields, headers={"authorization": f"Bearer {key}"}
    )
    assert reply.status_code == 200, reply.text
    found = reply.json()
    return found["choices"][0]["text"], found["metrics"]["speculative_decoding"]


def check_keys_are_apart(llm: LLM, keys: Path) -> None:
    """A key's second request copies its first; another key's is drafted as if there had been none."""
    with serving(llm, api_key_file=keys) as served:
        forget(llm)
        text, first = asked(served, "one")
        again = asked(served, "one")
        other, salted = asked(served, "two"), asked(served, "two", cache_salt="s")
        assert text == again[0] == other[0] == salted[0]
        assert again[1] != first and other[1] == salted[1] == first
        assert asked(served, "two")[1] == again[1]
        assert len({each.scope for each in texts_of(llm).all()}) == 3


def test_a_key_s_texts_are_its_own(llm: LLM, keys: Path) -> None:
    check_keys_are_apart(llm, keys)


def one_scope(share: Any) -> Any:
    return lambda *given: share(*given)._replace(text_salts=())


def test_a_server_that_shares_all_texts_is_caught(
    llm: LLM, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = lambda: check_keys_are_apart(llm, keys)  # noqa: E731
    assert_caught(defect("another key's text is drafted", Client.share, one_scope, check), monkeypatch)


def test_texts_are_shared_where_the_operator_says_so(llm: LLM, keys: Path) -> None:
    with serving(llm, api_key_file=keys, share_texts=True) as served:
        forget(llm)
        _, first = asked(served, "one")
        again, other = asked(served, "one")[1], asked(served, "two")[1]
        assert again == other != first
        assert asked(served, "two", cache_salt="s")[1] == first


def test_a_server_without_keys_has_one_scope(llm: LLM) -> None:
    with serving(llm) as served:
        forget(llm)
        first, again = asked(served, "none")[1], asked(served, "any")[1]
        assert again != first
        assert {each.scope for each in texts_of(llm).all()} == {b""}


def test_plain_requests_leave_no_texts(llm: LLM) -> None:
    with serving(llm) as served:
        forget(llm)
        asked(served, "any", drafter="none")
        assert len(texts_of(llm)) == 0
