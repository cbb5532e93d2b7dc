"""Routes beside those of texts: tokens, the tokenizer, and short paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft.llm import LLM
from foredraft.serve.settings import Settings
from tests.support.checkpoints import save_checkpoint
from tests.support.serving import Served, serving

MESSAGES: list[Any] = [{"role": "user", "content": "def add(a, b):"}]
PROMPT = "def fibonacci(n):\n"


def tokens(served: Served, **fields: Any) -> Any:
    reply = served.client.post("/tokenize", json=fields)
    assert reply.status_code == 200, reply.text
    assert reply.json()["count"] == len(reply.json()["tokens"])
    return reply.json()["tokens"]


def test_a_conversation_has_the_tokens_of_its_chat(served: Served, llm: LLM) -> None:
    assert llm.tokenizer is not None
    assert tokens(served, messages=MESSAGES) == llm.tokenizer.encode_chat(MESSAGES)
    bare = llm.tokenizer.encode_chat(MESSAGES, add_generation_prompt=False)
    assert tokens(served, messages=MESSAGES, add_generation_prompt=False) == bare
    parts = [{"role": "user", "content": [{"type": "text", "text": "def add(a, b):"}]}]
    assert tokens(served, messages=parts) == llm.tokenizer.encode_chat(MESSAGES)
    tools = [{"type": "function", "function": {"name": "stop"}}]
    body = {"messages": MESSAGES, "tools": tools, "max_tokens": 1}
    usage = served.client.post("/v1/chat/completions", json=body).json()["usage"]
    assert len(tokens(served, messages=MESSAGES, tools=tools)) == usage["prompt_tokens"]


def test_content_is_llama_cpp_s_name_of_the_text(tmp_path: Path) -> None:
    """Its special tokens are added on request alone; this tokenizer puts <s>, id 1, in front."""
    path = save_checkpoint(tmp_path / "model", tokenizer=True)
    with foredraft.load(path, device="cpu", max_length=64) as own, serving(own) as served:
        bare = tokens(served, content="a b")
        assert bare == tokens(served, prompt="a b", add_special_tokens=False) and 1 not in bare
        assert tokens(served, content="a b", add_special=True) == tokens(served, prompt="a b") == [1, *bare]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [({}, "prompt"), ({"prompt": "a", "content": "b"}, "content"), ({"content": "a", "messages": MESSAGES}, "messages"),
     ({"messages": []}, "messages"), ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
     ({"prompt": "a", "tools": []}, "tools"), ({"content": "a", "with_pieces": True}, "with_pieces"),
     ({"prompt": "a", "model": "nope"}, "model")],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_name(served: Served, wrong: dict[str, Any], param: str) -> None:
    reply = served.client.post("/tokenize", json=wrong)
    assert reply.status_code in (400, 404) and reply.json()["error"]["param"] == param, reply.text


def test_the_tokenizer_is_described_for_clients(served: Served, llm: LLM) -> None:
    """By the names that lm-eval's remote tokenizer reads."""
    info = served.client.get("/tokenizer_info").json()
    assert llm.tokenizer is not None and llm.tokenizer.chat is not None
    [end] = llm.tokenizer.encode(info["eos_token"], False)
    assert end in llm.loaded.spec.eos_token_ids
    assert info["chat_template"] == llm.tokenizer.chat.templates["default"]
    assert info["bos_token"] is None or llm.tokenizer.encode(info["bos_token"], False) == [
        llm.loaded.spec.bos_token_id
    ]
    text = "def add(a, b):"
    ids = tokens(served, prompt=text, add_special_tokens=False)
    assert served.client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == text


def test_paths_without_v1_are_the_same(served: Served) -> None:
    for path, body in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": PROMPT})):
        sent = {**body, "temperature": 0, "max_tokens": 8, "seed": 1}
        short, long = (served.client.post(f"{base}/{path}", json=sent).json() for base in ("", "/v1"))
        assert short["choices"] == long["choices"]
        streamed = served.client.post(f"/{path}", json={**sent, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("origin", "remedy"),
    [("localhost:3000", "http://localhost:3000"), ("http://localhost:3000/", "http://localhost:3000"),
     ("https://a.example/page", "http://a.example"), ("a.example", "http://a.example"), ("//x", "http://x")],
)  # fmt: skip
def test_an_origin_without_a_scheme_is_refused(origin: str, remedy: str) -> None:
    from foredraft.errors import ConfigError

    with pytest.raises(ConfigError, match="^cors is ") as caught:
        Settings(cors=("https://right.example", origin))
    assert origin in str(caught.value) and f'"{remedy}"' in str(caught.value)


def test_origins_are_taken(llm: LLM) -> None:
    given = ("http://localhost:3000", "https://a.example", "*", "null")
    assert Settings(cors=given).cors == given
    with serving(llm, cors=("http://localhost:3000",)) as served:
        headers = {"origin": "http://localhost:3000"}
        reply = served.client.get("/v1/models", headers=headers)
        assert reply.headers["access-control-allow-origin"] == "http://localhost:3000"
