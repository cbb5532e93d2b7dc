"""Clients share a server: keys, places in the queue, and cached beginnings of prompts that no other key finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft.decode.prefix_cache import Prefix
from foredraft.errors import ConfigError
from foredraft.llm import LLM
from foredraft.serve.clients import Client, Share
from foredraft.serve.keys import Keys
from foredraft.serve.limits import Limits
from foredraft.serve.metrics import Metrics
from foredraft.serve.problems import Problem
from foredraft.serve.settings import Settings
from tests.support.loaded import engine_of
from tests.support.planting import assert_caught, defect
from tests.support.raw import request_from
from tests.support.serving import Served, load_chat, serving

CHUNK = 256


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with load_chat(tmp_path_factory.mktemp("chat"), max_batch=2, max_length=1024) as found:
        yield found


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("alice one\nbob two\n", encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def own_cache(llm: LLM) -> Iterator[None]:
    yield
    engine_of(llm).prefix_cache = None


PROMPT = [5 + place % 90 for place in range(3 * CHUNK)]
PARTLY = [*PROMPT[: CHUNK + 9], *range(7, 300)]


def cached(
    served: Served, key: str, prompt: list[int] = PROMPT, path: str = "completions", **fields: Any
) -> int:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1, **fields}
    reply = served.client.post(f"/v1/{path}", json=body, headers={"authorization": f"Bearer {key}"})
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def check_keys_find_only_their_own(llm: LLM, keys: Path) -> None:
    with serving(llm, api_key_file=keys) as served:
        reads: list[int] = []
        prefill, target = llm.loaded.runner.prefill, llm.loaded.runner

        def counted(*given: Any, **more: Any) -> Any:
            reads.append(len(given[2]))
            return prefill(*given, **more)

        target.prefill = counted  # type: ignore[method-assign]
        try:
            assert cached(served, "one") == 0
            alone = list(reads)
            reads.clear()
            assert cached(served, "two", PARTLY) == cached(served, "two") - CHUNK == 0  # its own part alone
            reads.clear()
            assert cached(served, "two", PROMPT[::-1]) == 0
            assert cached(served, "one") == cached(served, "two") == 2 * CHUNK
            assert cached(served, "one", PARTLY) == CHUNK
            reads.clear()
            engine_of(llm).prefix_cache = type(engine_of(llm).prefix_cache)(1 << 30)  # type: ignore[misc, arg-type]
            assert cached(served, "two", echo=True, logprobs=0) == 0  # is kept, too, under its own salt
            reads.clear()
            assert cached(served, "one") == 0
            assert reads == alone  # as much work as where no key has sent it
        finally:
            del target.prefill


def test_a_key_finds_no_beginning_of_another_key(llm: LLM, keys: Path) -> None:
    check_keys_find_only_their_own(llm, keys)


def unsalted(_: Any) -> Any:
    return lambda cls, *salts: cls()


def test_an_unsalted_cache_is_caught(llm: LLM, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = lambda: check_keys_find_only_their_own(llm, keys)  # noqa: E731
    assert_caught(defect("no salt", Prefix.salted, unsalted, check), monkeypatch)


def test_beginnings_are_shared_where_the_operator_says_so(llm: LLM, keys: Path) -> None:
    with serving(llm, api_key_file=keys, shared_prefixes=True) as served:
        assert cached(served, "one") == 0
        assert cached(served, "two") == 2 * CHUNK
        assert cached(served, "two", cache_salt="s") == 0
        assert cached(served, "one", cache_salt="s") == 2 * CHUNK


def test_a_request_adds_a_salt_of_its_own(llm: LLM, keys: Path) -> None:
    with serving(llm, api_key_file=keys) as served:
        assert [cached(served, "one", cache_salt=salt) for salt in ("a", "b", "a")] == [0, 0, 2 * CHUNK]
        assert cached(served, "one") == cached(served, "two", cache_salt="a") == 0
        body = {"model": "demo", "prompt": "x", "cache_salt": ""}
        refused = served.client.post("/v1/completions", json=body, headers={"authorization": "Bearer one"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "cache_salt"
        message = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        reply = served.client.post(
            "/v1/messages", json={**message, "cache_salt": "a"}, headers={"x-api-key": "one"}
        )
        assert reply.status_code == 200 and "x-ignored-fields" not in reply.headers


def test_a_server_without_keys_has_one_salt(llm: LLM) -> None:
    with serving(llm) as served:
        assert [cached(served, key) for key in ("one", "two")] == [0, 2 * CHUNK]


# --- clients ----------------------------------------------------------------------------------------


def test_a_client_is_a_key_or_an_address() -> None:
    assert Client.of("alice", "10.0.0.1").share(Settings(), None) == Share(
        "alice", ("alice", ""), ("alice", "")
    )
    assert Client.of("", "10.0.0.1").share(Settings(), "s") == Share("10.0.0.1", ("", "s"), ("", "s"))
    own, shared = ("alice", ""), ("", "")
    assert Client.of("alice", "").share(Settings(shared_prefixes=True), None) == Share("alice", shared, own)
    assert Client.of("alice", "").share(Settings(share_texts=True), None) == Share("alice", own, shared)
    assert Client.of("alice", "").share(Settings(fair_shares=False), None) == Share("", own, own)
    assert Client.of("", "::ffff:10.0.0.1").name == "10.0.0.1"
    assert (
        Client.of("", "2001:db8::1").name
        == Client.of("", "2001:db8::2:1").name
        != Client.of("", "2001:db9::1").name
    )
    assert Prefix.salted("", "") == Prefix() != Prefix.salted("a", "") != Prefix.salted("", "a")


def test_requests_reach_the_engine_as_their_client_s(llm: LLM, keys: Path) -> None:
    found: list[str] = []
    submit = engine_of(llm).submit

    def noted(sequence: Any) -> None:
        found.append(sequence.client)
        submit(sequence)

    engine_of(llm).submit = noted  # type: ignore[method-assign]
    try:
        with serving(llm, api_key_file=keys) as served:
            cached(served, "two")
        with serving(llm) as served:
            cached(served, "none")
    finally:
        del engine_of(llm).submit
    assert found == ["bob", "127.0.0.1"]


def test_a_full_queue_still_takes_a_client_that_has_less_than_its_share() -> None:
    limits = Limits(Settings(max_queued=6, max_queued_tokens=100), 2, Metrics(vllm=False))
    held = [limits.take(1, "many") for _ in range(8)]
    for place in held:
        limits.take_tokens(place, 12)
    for client, share in (("many", 0), ("a", 4), ("b", 2)):
        for _ in range(share):
            limits.take_tokens(limits.take(1, client), 8)
        with pytest.raises(Problem, match="max_queued"):
            limits.take(1, client)
    assert limits.samples == 14
    with pytest.raises(Problem, match="max_queued_tokens"):
        limits.take_tokens(held[0], 12)
    for place in (*held, *held):
        place.free()
    assert limits.samples == 6 and limits.tokens == 48
    with pytest.raises(Problem):
        [limits.take(1, f"c{number}") for number in range(20)]
    assert limits.samples <= 16


# --- keys -------------------------------------------------------------------------------------------


def test_a_file_of_keys_may_have_comments_and_a_mark(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    text = "\ufeff# production keys\n\n first \nalice s#cret # hers # indeed\n   # none\nthird\t#\n"
    file.write_text(text, encoding="utf-8")
    keys = Keys.of(Settings(api_key_file=file))
    names = {key: keys.check(None, key) for key in ("first", "s#cret", "third")}
    assert names == {"first": "key 0", "s#cret": "alice", "third": "key 2"}
    for wrong in ("keys", "hers", "indeed", "none", "#", "\ufefffirst", "production"):
        with pytest.raises(Problem):
            keys.check(None, wrong)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# keys\n\n", "has no key"),
        ("\ufeff", "has no key"),
        ("alice #secret\n", "in line 1"),
        ("key 3 s", "'key 3'"),
    ],
)
def test_a_file_of_keys_that_may_be_misread_is_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says) as refused:
        Keys.of(Settings(api_key_file=file))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("value", ["", " ", ",", " , "])
def test_a_variable_without_a_key_does_not_open_the_server(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREDRAFT_API_KEY", value)
    with pytest.raises(ConfigError, match="FOREDRAFT_API_KEY is set, but has no key"):
        Keys.of(Settings())
    monkeypatch.delenv("FOREDRAFT_API_KEY")
    assert not Keys.of(Settings())


def test_tokens_and_texts_count_for_one_client(llm: LLM) -> None:
    long = {"model": "demo", "prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with serving(llm, max_per_key=1) as served, served.client.stream("POST", "/v1/completions", json=long):
        served.wait(lambda: served.metric("foredraft_requests_running") == 1)
        for address, status in (("127.0.0.1", 429), ("127.0.0.2", 200)):
            for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
                assert request_from(address, served.url + path, body).status_code == status
