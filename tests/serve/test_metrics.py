"""Metrics: what they count, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft.llm import LLM
from tests.support.serving import load_chat, serving

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "foredraft.json"
BODY: dict[str, Any] = {
    "model": "demo",
    "prompt": "def f(n):\n",
    "temperature": 0,
    "ignore_eos": True,
    "drafter": "draft-model",
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with load_chat(tmp_path_factory.mktemp("chat"), max_batch=2) as found:
        yield found


def test_a_request_counts_once_and_a_sample_once(llm: LLM) -> None:
    with serving(llm) as served:
        body = {**BODY, "prompt": ["def f(n):\n", "class A:\n"], "n": 3, "max_tokens": 7}
        usage = served.client.post("/v1/completions", json=body).json()["usage"]
        assert usage["completion_tokens"] == 6 * 7
        assert served.metric("foredraft_prompt_tokens_total") == usage["prompt_tokens"]
        assert served.metric("foredraft_generation_tokens_total") == 6 * 7
        assert served.metric("foredraft_time_to_first_token_seconds_count") == 1
        assert served.metric("foredraft_time_per_output_token_seconds_count") == 6
        assert served.finished("length") == 6
        # a prompt that is only scored is read, too
        served.client.post("/v1/completions", json={**BODY, "max_tokens": 0, "echo": True, "logprobs": 1})
        assert served.metric("foredraft_prompt_tokens_total") > usage["prompt_tokens"]
        assert served.metric("foredraft_time_to_first_token_seconds_count") == 1


def test_accepted_tokens_add_up_by_position(llm: LLM) -> None:
    with serving(llm) as served:
        found = served.client.post("/v1/completions", json={**BODY, "max_tokens": 60}).json()
        drafting = found["metrics"]["speculative_decoding"]
        assert served.metric("foredraft_draft_tokens_total") == drafting["num_draft_tokens"] > 0
        assert served.metric("foredraft_accepted_tokens_total") == drafting["num_accepted_tokens"] > 0
        assert served.metric("foredraft_drafts_total") == drafting["num_spec_steps"]
        by_position = [
            served.metric(f'foredraft_accepted_tokens_by_position_total{{position="{place}"}}')
            for place in range(len(drafting["acceptance_histogram"]))
        ]
        assert by_position == drafting["acceptance_histogram"]


def test_refusals_are_counted_by_reason(llm: LLM) -> None:
    with serving(llm, max_body=2000) as served:
        post = served.client.post
        assert post("/v1/completions", json={**BODY, "temperature": -1}).status_code == 400
        assert post("/v1/completions", json={**BODY, "model": "nope"}).status_code == 404
        assert post("/v1/completions", content=b"x" * 3000).status_code == 413
        served.state.drain()
        assert post("/v1/completions", json=BODY).status_code == 503
        for reason in ("invalid", "not found", "body too large", "draining"):
            assert served.metric(f'foredraft_requests_refused_total{{reason="{reason}"}}') == 1, reason
        assert served.metric("foredraft_requests_refused_total") == 4


def test_every_name_on_the_dashboard_is_a_metric(llm: LLM) -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    names = {name for query in queries for name in re.findall(r"\bforedraft_\w+", query)}
    with serving(llm) as served:
        served.client.post("/v1/completions", json={**BODY, "max_tokens": 40})
        served.client.post("/v1/completions", json={**BODY, "temperature": -1})
        lines = served.client.get("/metrics").text.splitlines()
    metrics = {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}
    assert len(names) > 12 and names <= metrics, names - metrics
    shown = {re.sub("_(bucket|total)$", "", name) for name in names}
    own = {re.sub("_(bucket|total|count|sum|created)$", "", name) for name in metrics}
    assert own == shown, own ^ shown  # the dashboard leaves nothing out
    assert all(query.count("(") == query.count(")") for query in queries)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in board["panels"]})


def test_metrics_need_a_key_where_the_server_has_keys(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("secret\n")
    with serving(llm, api_key_file=file) as served:
        assert served.client.get("/metrics").status_code == 401
        allowed = served.client.get("/metrics", headers={"authorization": "Bearer secret"})
        assert allowed.status_code == 200 and "foredraft_requests_running" in allowed.text
