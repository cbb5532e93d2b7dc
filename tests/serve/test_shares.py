"""Clients share a server: keys, places in the queue, cached beginnings of prompts, and texts as drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft.decode.params import SamplingParams
from foredraft.decode.prefix_cache import Prefix
from foredraft.drafters.recent_texts import Suffix
from foredraft.errors import ConfigError
from foredraft.llm import LLM
from foredraft.llm.requests import Submission
from foredraft.serve.limits import Keys, Limits, client_of, owned
from foredraft.serve.logs import RequestRecord
from foredraft.serve.metrics import Metrics
from foredraft.serve.problems import Problem
from foredraft.serve.settings import Settings
from tests.support.loaded import engine_of
from tests.support.mutation import assert_caught, defect
from tests.support.raw import request_from
from tests.support.serving import Served, load_chat, serving

CHUNK = 256


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with load_chat(
        tmp_path_factory.mktemp("chat"), drafter="suffix", recent_texts=1, max_batch=2, max_length=1024
    ) as found:
        yield found


@pytest.fixture(autouse=True)
def own_cache(llm: LLM) -> Iterator[None]:
    yield
    engine_of(llm).prefix_cache = None


PROMPT = [5 + place % 90 for place in range(2 * CHUNK + 8)]
SHORT = PROMPT[: CHUNK + 8]
COMMON = CHUNK + 9  # tokens that the next prompt shares with it
PARTLY = [*PROMPT[:COMMON], *range(7, 300)]


def cached(served: Served, key: str, prompt: list[int] = SHORT, **fields: Any) -> int:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1, **fields}
    reply = served.client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def check_keys_find_only_their_own(llm: LLM, keys: Path) -> None:
    with serving(llm, api_key_file=keys) as served:
        reads, target = list[int](), llm.loaded.runner
        prefill = target.prefill

        def counted(*given: Any, **more: Any) -> Any:
            reads.append(len(given[2]))
            return prefill(*given, **more)

        target.prefill = counted  # type: ignore[method-assign]
        try:
            assert cached(served, "one", PROMPT) == 0
            alone = list(reads)
            reads.clear()
            assert (
                cached(served, "two", PARTLY) == cached(served, "two", PROMPT) - COMMON == 0
            )  # its own part
            reads.clear()
            assert cached(served, "two", PROMPT[::-1]) == 0
            assert cached(served, "one", PROMPT) == cached(served, "two", PROMPT) == len(PROMPT) - 1
            assert cached(served, "one", PARTLY) == COMMON
            reads.clear()
            engine_of(llm).prefix_cache = type(engine_of(llm).prefix_cache)(1 << 30)  # type: ignore[misc, arg-type]
            assert (
                cached(served, "two", PROMPT, echo=True, logprobs=0) == 0
            )  # is kept, too, under its own salt
            reads.clear()
            assert cached(served, "one", PROMPT) == 0
            assert reads == alone  # as much work as where no key has sent it
        finally:
            del target.prefill


@pytest.mark.heavy
def test_a_key_finds_no_beginning_of_another(llm: LLM, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_keys_find_only_their_own(llm, keys)
    check = lambda: check_keys_find_only_their_own(llm, keys)  # noqa: E731
    assert_caught(defect("no salt", Prefix.salted, lambda _: lambda cls, *salts: cls(), check), monkeypatch)


@pytest.mark.heavy
def test_beginnings_are_shared_where_the_operator_says_so(llm: LLM, keys: Path) -> None:
    with serving(llm, api_key_file=keys, shared_prefixes=True) as served:
        assert cached(served, "one") == 0
        assert cached(served, "two") == len(SHORT) - 1
        assert cached(served, "two", cache_salt="s") == 0
        assert cached(served, "one", cache_salt="s") == len(SHORT) - 1


@pytest.mark.heavy
def test_a_request_adds_a_salt_of_its_own(llm: LLM, keys: Path) -> None:
    with serving(llm, api_key_file=keys) as served:
        assert [cached(served, "one", cache_salt=salt) for salt in ("a", "b", "a")] == [0, 0, len(SHORT) - 1]
        assert cached(served, "one") == cached(served, "two", cache_salt="a") == 0
        body = {"model": "demo", "prompt": "x", "cache_salt": ""}
        refused = served.client.post("/v1/completions", json=body, headers={"authorization": "Bearer one"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "cache_salt"
        message = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "cache_salt": "a"}
        reply = served.client.post("/v1/messages", json=message, headers={"x-api-key": "one"})
        assert reply.status_code == 200 and "x-ignored-fields" not in reply.headers
    with serving(llm) as served:
        assert [cached(served, key) for key in ("any", "other")] == [0, len(SHORT) - 1], (
            "without keys, one salt"
        )


def test_a_client_is_a_key_or_an_address() -> None:
    def asked(key: str, salt: str | None = None, **settings: bool) -> tuple[Any, ...]:
        record = RequestRecord("", "", key=key, address="10.0.0.1")
        found = owned(Submission([5], SamplingParams()), record, Settings(**settings), salt)  # type: ignore[arg-type]
        return found.client, found.salts, found.text_salts

    own, shared = ("alice", ""), ("", "")
    assert asked("alice") == ("alice", own, own)
    assert asked("alice", shared_prefixes=True) == ("alice", shared, own)
    assert asked("alice", share_texts=True) == ("alice", own, shared)
    assert asked("alice", fair_shares=False) == ("", own, own)
    assert asked("", "s") == ("10.0.0.1", ("", "s"), ("", "s"))
    addresses = ("::ffff:10.0.0.1", "2001:db8::1", "2001:db8::2:1", "2001:db9::1")
    mapped, one, near, far = (client_of("", address) for address in addresses)
    assert mapped == "10.0.0.1" and one == near != far
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
            cached(served, "two", [5])
        with serving(llm) as served:
            cached(served, "none", [5])
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
    assert limits.samples.total == 14
    with pytest.raises(Problem, match="max_queued_tokens"):
        limits.take_tokens(held[0], 12)
    for place in (*held, *held):
        place.free()
    assert limits.samples.total == 6 and limits.tokens.total == 48
    with pytest.raises(Problem):
        [limits.take(1, f"c{number}") for number in range(20)]
    assert limits.samples.total <= 16


@pytest.mark.parametrize("letter", ["caf\u00e9", "\u00e0", "\u20ac", "\u4f60\u597d", "plain"])
def test_a_file_of_keys_may_have_comments_a_mark_and_any_letters(tmp_path: Path, letter: str) -> None:
    file = tmp_path / "keys"
    lines = ("\ufeff# production keys", "", " first ", "alice s#cret # hers # indeed", "   # none")
    file.write_text("\n".join([*lines, f"the name {letter}\t#\n"]), encoding="utf-8")
    keys = Keys.of(Settings(api_key_file=file))
    assert (keys.check(None, "first"), keys.check(None, "s#cret")) == ("key 0", "alice")
    sent = [letter.encode()] + ([letter.encode("latin-1")] if max(letter) < "\u0100" else [])
    for key in (data.decode("latin-1") for data in sent):  # as ASGI hands over what clients write
        assert keys.check(f"Bearer {key}") == keys.check(None, key) == "the name"
    wrong = "keys hers indeed none # \ufefffirst production ? caf?".split()
    for key in (*wrong, "", "\u00e0\u00a0", letter[:-1]):
        with pytest.raises(Problem):
            keys.check(f"Bearer {key}")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        *((empty, "^api_key_file is .* has no key") for empty in (b"# keys\n\n", b"\n \n", b"\xef\xbb\xbf")),
        *((content, "^api_key_file is .* cannot be read") for content in (b"\xff", None)),
        (b"alice #secret\n", "in line 1"),
        (b"key 3 s", "'key 3'"),
    ],
)
def test_a_file_of_keys_that_may_mislead_is_refused(tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as refused:
        Keys.of(Settings(api_key_file=file))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("value", ["", " ", ",", " , "])
def test_a_variable_without_a_key_opens_no_server(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def texts_of(llm: LLM) -> Any:
    found = engine_of(llm).drafters["suffix"]
    assert isinstance(found, Suffix)
    return found.texts


def forget(llm: LLM) -> None:
    texts = texts_of(llm)
    while len(texts):
        texts._drop_oldest()


def asked(served: Served, key: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"prompt": "# a list of names\n", "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    own = {"authorization": f"Bearer {key}"}
    reply = served.client.post("/v1/completions", json=body | fields, headers=own)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    return found["choices"][0]["text"], found["metrics"]["speculative_decoding"]


def check_keys_are_apart(llm: LLM, keys: Path) -> None:
    with serving(llm, api_key_file=keys) as served:
        forget(llm)
        text, first = asked(served, "one")
        again = asked(served, "one")
        other, salted = asked(served, "two"), asked(served, "two", cache_salt="s")
        assert text == again[0] == other[0] == salted[0]
        assert again[1] != first and other[1] == salted[1] == first
        assert asked(served, "two")[1] == again[1]
        assert len({each.scope for each in texts_of(llm).all()}) == 3


def test_a_key_s_texts_are_its_own(llm: LLM, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_keys_are_apart(llm, keys)
    check = lambda: check_keys_are_apart(llm, keys)  # noqa: E731
    one_scope = lambda share: lambda *given: replace(share(*given), text_salts=())  # noqa: E731
    assert_caught(defect("another key's text is drafted", owned, one_scope, check), monkeypatch)


def test_texts_are_shared_where_the_operator_says_so(llm: LLM, keys: Path) -> None:
    with serving(llm, api_key_file=keys, share_texts=True) as served:
        forget(llm)
        _, first = asked(served, "one")
        again, other = asked(served, "one")[1], asked(served, "two")[1]
        assert again == other != first
        assert asked(served, "two", cache_salt="s")[1] == first


def test_a_server_without_keys_has_one_scope_and_plain_requests_leave_no_texts(llm: LLM) -> None:
    with serving(llm) as served:
        forget(llm)
        asked(served, "any", drafter="none")
        assert len(texts_of(llm)) == 0
        first, again = asked(served, "none")[1], asked(served, "any")[1]
        assert again != first
        assert {each.scope for each in texts_of(llm).all()} == {b""}
