"""Cases that Schemathesis makes of the server's own OpenAPI document, right ones and wrong ones, over HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("schemathesis")

import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from foredraft.serve.fields import FORMS
from tests.support.serving import Served, load_chat, serving

CHECKS = [
    not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
    checks.response_headers_conformance, checks.response_schema_conformance, checks.negative_data_rejection,
]  # fmt: skip
ROOM = 256  # positions of the model
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
RUNS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with load_chat(tmp_path_factory.mktemp("chat"), max_length=ROOM) as llm, serving(llm) as found:
        yield found


def bounded(body: dict[str, Any], luck: int) -> None:
    """Let most bodies reach the model, and those that do, ask for little. Hostile values stay as they are."""
    if isinstance(body.get("model"), str) and luck % 8:
        body["model"] = "demo"
    if isinstance(body.get("messages"), list) and luck % 4:
        body["messages"] = MESSAGES
    for name in ("prompt", "input"):
        if body.get(name) in ("", []):
            body[name] = "x"
    for name in LENGTHS:
        if type(value := body.get(name)) is int and 4 < value <= ROOM:
            body[name] = 4
    if not any(type(body.get(name)) is int for name in LENGTHS):
        body["max_output_tokens" if "input" in body else "max_tokens"] = 4
    if type(body.get("n")) is int and 4 < body["n"] <= 128:
        body["n"] = 4
    for name in (*FORMS, "drafter", "response_format", "rollback", "n_predict") if luck % 2 else ():
        body.pop(name, None)  # few texts that are made up are a grammar, or a drafter's name


def run(served: Served, path: str, mode: GenerationMode, count: int) -> Counter[int]:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    [operation] = [each.ok() for each in schema.get_all_operations() if each.ok().path == path]
    statuses: Counter[int] = Counter()
    with requests.Session() as session:

        @settings(
            max_examples=count, derandomize=True, deadline=None, database=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE:
                bounded(case.body, sum(statuses.values()))
            response = case.call_and_validate(checks=CHECKS, session=session, timeout=60)
            statuses[response.status_code] += 1

        send()
    served.wait(served.idle)
    return statuses


PATHS = ("/tokenize", "/detokenize", *RUNS)


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", PATHS)
def test_made_up_bodies_are_answered_as_documented(served: Served, path: str, mode: GenerationMode) -> None:
    statuses = run(served, path, mode, 25)
    assert statuses[200] if mode is GenerationMode.POSITIVE else set(statuses) <= {400, 404}, statuses


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", PATHS)
def test_hundreds_of_made_up_bodies_for_each_route(served: Served, path: str, mode: GenerationMode) -> None:
    statuses = run(served, path, mode, 500)
    assert sum(statuses.values()) >= 500, statuses
