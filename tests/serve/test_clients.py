"""Further clients drive the server: `openai` for Node, `litellm` and `langchain-openai`.

Each gets the library's own text, whole and streamed, and its own types of errors. The one for Node is found by
NODE_PATH: `npm install --prefix DIR openai`, then NODE_PATH=DIR/node_modules.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft.llm import LLM
from tests.support.serving import Served

MESSAGES: list[Any] = [{"role": "user", "content": "def add(a, b):"}]
SCHEMA = {
    "title": "Choice", "description": "A choice.", "type": "object", "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"], "additionalProperties": False,
}  # fmt: skip
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24}


def chat(llm: LLM, **more: Any) -> Any:
    [output] = llm.chat(MESSAGES, drafter="none", **GREEDY, **more)
    return output


def test_openai_for_node(served: Served, llm: LLM) -> None:
    node = shutil.which("node")
    if node is None or subprocess.run([node, "-e", 'require("openai")'], capture_output=True).returncode:
        pytest.skip("needs node, and the npm package openai on NODE_PATH")
    [free] = llm.generate("def add(a, b):", drafter="none", **GREEDY)
    stop = str(free.text).split()[1]
    command = [node, str(Path(__file__).parent / "client.js"), f"{served.url}/v1", stop]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    want = chat(llm, logprobs=2)
    assert found["whole"] == found["streamed"] == found["response"] == want.text
    assert found["scores"] == [[score.logprob, 2] for score in want.logprobs]
    assert found["usage"]["completion_tokens"] == found["streamedUsage"]["completion_tokens"] == 24
    assert found["reason"] == "length" and found["models"] == ["demo"]
    assert found["stopped"] == [str(free.text).partition(stop)[0], "stop"]
    assert found["wrong"] == [
        {"kind": "BadRequestError", "status": 400, "param": "temperature", "code": None},
        {"kind": "NotFoundError", "status": 404, "param": "model", "code": "model_not_found"},
    ]
    served.wait(served.idle, 5)  # the stream that it left has ended


@pytest.fixture
def event_loop() -> Iterator[None]:
    """Give a client that asks for this thread's event loop one that is closed in the end."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.mark.filterwarnings("ignore")  # the client's own
@pytest.mark.usefixtures("event_loop")
def test_litellm(served: Served, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks the internet
    litellm: Any = pytest.importorskip("litellm")
    common = {
        "model": "openai/demo", "messages": MESSAGES, "api_base": f"{served.url}/v1", "api_key": "none",
        "max_tokens": 24, "temperature": 0, "max_retries": 0,
    }  # fmt: skip
    want = chat(llm, logprobs=2)
    whole = litellm.completion(**common, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == want.text and whole.choices[0].finish_reason == "length"
    scores = whole.choices[0].logprobs.content
    assert [each.logprob for each in scores] == [score.logprob for score in want.logprobs]
    assert [len(each.top_logprobs) for each in scores] == [2] * 24
    assert whole.usage.completion_tokens == 24 and whole.usage.prompt_tokens == want.prompt_tokens
    chunks = list(litellm.completion(**common, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == want.text
    assert [each.usage.completion_tokens for each in chunks if getattr(each, "usage", None)] == [24]
    stop = want.text.split()[1]
    stopped = litellm.completion(**common, stop=[stop]).choices[0]
    assert stopped.message.content == want.text[: want.text.index(stop)] and stopped.finish_reason == "stop"
    form = {"type": "json_schema", "json_schema": {"name": "choice", "schema": SCHEMA, "strict": True}}
    made = litellm.completion(**{**common, "max_tokens": 100}, response_format=form)
    assert json.loads(made.choices[0].message.content)["a"] in ("x", "y")
    del common["messages"]
    text = litellm.text_completion(**{**common, "model": "text-completion-openai/demo"}, prompt="def f(")
    [plain] = llm.generate("def f(", drafter="none", **GREEDY)
    assert text.choices[0].text == plain.text
    common["messages"] = MESSAGES
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**{**common, "temperature": -1})
    with pytest.raises(litellm.NotFoundError, match="nope"):
        litellm.completion(**{**common, "model": "openai/nope"})


@pytest.mark.filterwarnings("ignore")  # the client's own
def test_langchain(served: Served, llm: LLM) -> None:
    langchain: Any = pytest.importorskip("langchain_openai")
    import openai

    def model(**more: Any) -> Any:
        given = {"model": "demo", "temperature": 0, "max_completion_tokens": 24} | more
        return langchain.ChatOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, **given)

    want = chat(llm, logprobs=2)
    prompt = [("user", "def add(a, b):")]
    whole = model(logprobs=True, top_logprobs=2).invoke(prompt)
    assert whole.content == want.text and whole.response_metadata["finish_reason"] == "length"
    scores = whole.response_metadata["logprobs"]["content"]
    assert [each["logprob"] for each in scores] == [score.logprob for score in want.logprobs]
    assert whole.usage_metadata["output_tokens"] == 24
    assert whole.usage_metadata["input_tokens"] == want.prompt_tokens
    chunks = list(model(stream_usage=True).stream(prompt))
    assert "".join(chunk.content for chunk in chunks) == want.text and len(chunks) > 2
    assert sum(each.usage_metadata["output_tokens"] for each in chunks if each.usage_metadata) == 24
    assert [each.content for each in model().batch([prompt, prompt])] == [want.text] * 2
    stop = want.text.split()[1]
    assert model().invoke(prompt, stop=[stop]).content == want.text[: want.text.index(stop)]
    structured = model(max_completion_tokens=100).with_structured_output(SCHEMA, method="json_schema")
    assert structured.invoke(prompt)["a"] in ("x", "y")
    completion = langchain.OpenAI(
        model="demo", base_url=f"{served.url}/v1", api_key="none", max_retries=0, temperature=0, max_tokens=24
    )
    [plain] = llm.generate("def f(", drafter="none", **GREEDY)
    assert completion.invoke("def f(") == "".join(completion.stream("def f(")) == plain.text
    with pytest.raises(openai.BadRequestError, match="temperature"):
        model(temperature=-1).invoke(prompt)
    with pytest.raises(openai.NotFoundError, match="nope"):
        model(model="nope").invoke(prompt)
