"""Calls of models that write them with special tokens or in elements, as templates tell them: served whole and
streamed, in every API, and read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

import foredraft
from foredraft.model.chat import ChatTemplate
from foredraft.serve.call_formats import LLAMA, CallFormat
from foredraft.serve.tools import written_by
from tests.serve.routes import CHAT, MESSAGE, RESPONSES, post
from tests.serve.test_histories import streamed
from tests.support.checkpoints import save_checkpoint
from tests.support.serving import Served, serving
from tests.unit.test_serve_calls import SPECIAL, every_format

PATH = {"type": "object", "properties": {"path": {"enum": ["a", "b"]}}, "required": ["path"]}
ASK = {"role": "user", "content": "hi"}
TOOLS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [ASK], "tool_choice": "required"},
    RESPONSES: {"input": [ASK], "tool_choice": "required"},
    MESSAGE: {"messages": [ASK], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
}
TOOLS[CHAT]["tools"] = [{"type": "function", "function": {"name": "read", "parameters": PATH}}]
TOOLS[RESPONSES]["tools"] = [{"type": "function", "name": "read", "parameters": PATH}]
TOOLS[MESSAGE]["tools"] = [{"name": "read", "input_schema": PATH}]


def template(format: CallFormat) -> str:
    """Return a template that tells calls in a format."""

    def shown(text: str) -> str:
        return "{{ " + json.dumps(text, ensure_ascii=False) + " }}"

    before, key, after = format.element
    value = "{{ v }}"
    if format.payload == "gemma":
        before, key, after, value = "", ":", "", '<|"|>{{ v }}<|"|>'
    given = "{{ c.function.arguments | tojson }}"
    if format.payload in ("elements", "gemma"):
        given = f"{{% for k, v in c.function.arguments.items() %}}{shown(before)}{{{{ k }}}}{shown(key)}{value}{shown(after)}{{% endfor %}}"  # fmt: skip
    name = "{{ c.function.name }}"
    id = shown(format.id) + "{{ c.id }}" if format.id else ""
    call = f"{shown(format.opens)}{name}{id}{shown(format.middle)}{given}{shown(format.closes)}"
    calls = f"{shown(format.first)}{{% for c in m.tool_calls %}}{{% if loop.index0 %}}{shown(format.between)}{{% endif %}}{call}{{% endfor %}}{shown(format.last)}"  # fmt: skip
    return (
        "{{ tools }}{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}" + calls
        + "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )  # fmt: skip


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A random model whose tokenizer has the special tokens that calls are written with."""
    folder = tmp_path_factory.mktemp("marked") / "model"
    save_checkpoint(folder, tokenizer=True, eos_token_id=2, max_position_embeddings=2048)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(SPECIAL[1:])
    save_checkpoint(folder, eos_token_id=2, vocab_size=size + len(SPECIAL), max_position_embeddings=2048)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with foredraft.load(folder, device="cpu", max_length=1024) as llm, serving(llm) as found:
        yield found


def calls_of(path: str, reply: dict[str, Any]) -> list[tuple[str, Any]]:
    if path == CHAT:
        made = [call["function"] for call in reply["choices"][0]["message"]["tool_calls"]]
        return [(call["name"], json.loads(call["arguments"])) for call in made]
    if path == RESPONSES:
        return [(item["name"], json.loads(item["arguments"])) for item in reply["output"]]
    return [(part["name"], part.get("input")) for part in reply["content"]]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGE])
@every_format
def test_calls_come_in_every_api_whole_and_streamed(
    marked: Served, monkeypatch: pytest.MonkeyPatch, format: CallFormat, path: str
) -> None:
    tokenizer = marked.llm.tokenizer
    assert tokenizer is not None
    monkeypatch.setattr(tokenizer, "chat", ChatTemplate({"default": template(format)}))
    assert written_by(tokenizer) == format
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    fields = {**TOOLS[path], limit: 300, "seed": 1, "temperature": 1, "model": marked.state.model.names[0]}  # type: ignore[union-attr]
    single = {} if path == MESSAGE else {"parallel_tool_calls": False}
    whole = post(marked, path, **fields, **single)
    assert whole.status_code == 200, whole.text
    found = calls_of(path, whole.json())
    assert found and all(name == "read" and given["path"] in ("a", "b") for name, given in found)
    if path != MESSAGE:
        [_] = found
        more = streamed(path, post(marked, path, **fields, **single, stream=True).text)
        assert calls_of(path, more) == found
    if path == CHAT:
        assert not whole.json()["choices"][0]["message"]["content"]
    bounded = {
        "type": "object",
        "properties": {"at": {"type": "string", "maxLength": 4}},
        "additionalProperties": False,
    }
    strict = {"type": "function", "function": {"name": "read", "parameters": bounded, "strict": True}}
    if path == CHAT:  # what the grammar of a format does not hold is refused where it is strict
        held = format.payload in ("object", "json")
        assert post(marked, path, **{**fields, "tools": [strict]}).status_code == (200 if held else 400)
    if format is not LLAMA:  # whose calls begin the text, or are none
        free = {**fields, "tool_choice": {"type": "auto"} if path == MESSAGE else "auto", limit: 40}
        assert post(marked, path, **free).status_code == 200
