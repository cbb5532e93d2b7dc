"""Compilations of constraints: bounded in bytes, in threads of their own, once a request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from foredraft import LLM, SamplingParams
from foredraft.constraints import ConstraintFactory
from foredraft.decode.text_buffer import StopAutomaton
from foredraft.serve import compilations
from tests.support.serving import Served, load_chat, serving


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with load_chat(tmp_path_factory.mktemp("chat"), max_batch=4) as found:
        yield found


def post(served: Served, **body: Any) -> httpx.Response:
    return served.client.post(
        "/v1/completions", json={"model": "demo", "prompt": "x", "max_tokens": 2, **body}
    )


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"stop": ["a" * 1001]}, "stop"),
        ({"ban": ["\u4f60" * 300, "b" * 200]}, "ban"),
        ({"regex": "a" * 1001}, "regex"),
        ({"stop": ["a" * 400], "ban": ["b" * 601]}, "ban"),
    ],
    ids=["stop", "ban", "regex", "together"],
)
def test_bytes_of_patterns_are_bounded(llm: LLM, options: dict[str, Any], param: str) -> None:
    with serving(llm, max_patterns=1000) as served:
        refused = post(served, **options)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
        assert "of 1000 at most (--max-patterns)" in refused.json()["error"]["message"]
        served.wait(served.idle)
        assert post(served, stop=["a" * 400], ban=["b" * 400]).status_code == 200


def test_compilations_that_never_end_stop_only_those_behind_them(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far more than a server has threads for all else."""
    ends, maker = threading.Event(), ConstraintFactory.maker

    def slow(self: ConstraintFactory, prompt: list[int], params: SamplingParams, **options: Any) -> Any:
        if params.regex is not None:
            ends.wait(60)
        return maker(self, prompt, params, **options)

    monkeypatch.setattr(ConstraintFactory, "maker", slow)
    monkeypatch.setattr(compilations, "SECONDS", 4.0)
    with serving(llm) as served, ThreadPoolExecutor(70) as pool:
        asked = [pool.submit(post, served, regex="[a-z]+") for _ in range(66)]
        served.wait(lambda: any(each.done() for each in asked))  # the two that had no place in the queue
        assert served.client.get("/health", timeout=3).status_code == 200
        assert post(served).status_code == 200
        answers = [each.result() for each in asked]
        assert {answer.status_code for answer in answers} == {503}
        messages = [answer.json()["error"]["message"] for answer in answers]
        assert sum("64 requests wait" in message for message in messages) == 2
        assert sum("were not compiled within 4 s" in message for message in messages) == 64
        ends.set()
        served.wait(served.idle)
        assert post(served, regex="[a-z]+").status_code == 200


def test_a_panic_of_a_compilation_fails_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    def panic(*given: Any, **options: Any) -> Any:
        raise Panic("planted")

    with serving(llm) as served:
        with monkeypatch.context() as patch:
            patch.setattr(ConstraintFactory, "maker", panic)
            assert [post(served, regex="[a-z]+").status_code for _ in range(3)] == [500] * 3
        assert post(served, regex="[a-z]+").status_code == 200


def test_stop_strings_are_compiled_once_for_all_prompts_and_samples(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, init = list[tuple[str, ...]](), StopAutomaton.__init__

    def note(self: StopAutomaton, strings: tuple[str, ...]) -> None:
        made.append(strings)
        init(self, strings)

    monkeypatch.setattr(StopAutomaton, "__init__", note)
    llm.generate(["x", "y"], SamplingParams(stop=["abc"], max_new_tokens=2, seed=1), n=4)
    assert made == [("abc",)]
    with serving(llm) as served:
        assert post(served, prompt=["x", "y", "z"], stop=["xyz"], n=2).status_code == 200
    assert made == [("abc",), ("xyz",)]
    llm.generate("x", SamplingParams(stop=["a" * (257 << 10)], max_new_tokens=1), n=2)
    assert len(made) == 3 and llm.requests.stops.total <= 256 << 10, "what is too large is not kept"
