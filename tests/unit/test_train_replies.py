"""Where replies stand in the text of a conversation: the same by windows as by whole texts, in linear time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foredraft.errors import ConfigError, RequestError
from foredraft.model.chat import ChatTemplate
from foredraft.model.tokenizer import Tokenizer
from foredraft.train import reply_spans as replies
from foredraft.train.reply_spans import TooManyRepliesError, reply_spans
from foredraft.train.texts import Reader
from tests.support.checkpoints import save_checkpoint
from tests.unit.test_model_chat import TEMPLATES

# As those of some published models: a system message that the conversation lacks is added.
DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<system>Help.</system>{% endif %}"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# The reasoning of replies before the last question is left out, also where there is none.
REASONING_ONCE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Every window looks alike, but beginnings of some lengths do not.
COUNTED = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if messages|length in range(18, 26) %}!{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SOURCES = TEMPLATES | {"default system": DEFAULT_SYSTEM, "reasoning once": REASONING_ONCE}
# Of conversations with and without a system message: those whose every turn is written alike.
PERMITS = {"headers", "no-system", "instruct", "default system"}


def chat(
    count: int, *, system: bool = False, tools: bool = False, think: bool = False
) -> list[dict[str, Any]]:
    """Return a conversation of so many exchanges, of which every third calls a tool where they have tools."""
    messages = [{"role": "system", "content": "Be brief."}] if system else []
    for number in range(count):
        messages.append({"role": "user", "content": f" Is {number} prime? " + "x" * (number % 7)})
        if tools and number % 3 == 0:
            call = {"type": "function", "function": {"name": "prime", "arguments": {"n": number}}}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})  # type: ignore[dict-item]
            messages.append({"role": "tool", "content": str(number)})
        reasoning = "<think>\nhm\n</think>\n\n" if think else ""
        messages.append({"role": "assistant", "content": reasoning + f"No, {number}. " * (1 + number % 3)})
    return messages


def template(name: str) -> ChatTemplate:
    return ChatTemplate({"default": SOURCES[name]}, {"bos_token": "<s>", "eos_token": "</s>"})


def by_whole_texts(given: ChatTemplate, messages: list[dict[str, Any]], whole: str) -> list[tuple[int, int]]:
    places = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    found = [replies._by_whole_texts(given, messages, at, whole) for at in places]
    return [span for span in found if span is not None]


@pytest.mark.parametrize("kind", [{}, {"system": True}, {"tools": True}, {"think": True}], ids=str)
@pytest.mark.parametrize("name", SOURCES)
def test_windows_and_whole_texts_find_the_same_replies(name: str, kind: dict[str, bool]) -> None:
    given, messages = template(name), chat(20, **kind)
    try:
        whole = given.render(messages, add_generation_prompt=False)
    except RequestError:
        assert name in ("instruct", "no-system", "chatml"), "only these refuse a conversation"
        return
    assert reply_spans(given, messages, whole) == by_whole_texts(given, messages, whole)
    places = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    found = replies._by_windows(given, messages, places, whole)
    if name in PERMITS and not kind:
        assert found is not None and len(found) == 20
    if name == "reasoning once":
        assert found is None


def test_whole_texts_of_some_replies_have_a_say() -> None:
    given, messages = ChatTemplate({"default": COUNTED}), chat(20)
    whole = given.render(messages, add_generation_prompt=False)
    found = reply_spans(given, messages, whole)
    assert found == by_whole_texts(given, messages, whole) and 10 < len(found) < 20


def test_windows_that_read_otherwise_than_the_conversation_do_not_decide() -> None:
    """The template writes the first messages otherwise, in as many characters."""
    first = "{% if loop.index0 < 9 %}{{ m.content|upper }}{% else %}{{ m.content }}{% endif %}"
    given, messages = ChatTemplate({"default": DEFAULT_SYSTEM.replace("{{ m.content }}", first)}), chat(20)
    whole = given.render(messages, add_generation_prompt=False)
    places = range(1, len(messages), 2)
    assert replies._by_windows(given, messages, places, whole) is None
    assert reply_spans(given, messages, whole) == by_whole_texts(given, messages, whole)


def test_a_conversation_that_the_assistant_opens_is_read_by_windows() -> None:
    given = template("headers")
    messages = [{"role": "assistant", "content": "Hello!"}, *chat(20)]
    whole = given.render(messages, add_generation_prompt=False)
    places = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    found = replies._by_windows(given, messages, places, whole)
    assert found == by_whole_texts(given, messages, whole) and len(found) == 21


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The characters of each text that a template makes."""
    lengths, render = list[int](), ChatTemplate.render

    def counting(self: ChatTemplate, *args: Any, **named: Any) -> str:
        text = render(self, *args, **named)
        lengths.append(len(text))
        return text

    monkeypatch.setattr(ChatTemplate, "render", counting)
    return lengths


@pytest.mark.parametrize("name", ["headers", "no-system", "default system"])
def test_the_characters_rendered_grow_with_the_conversation(name: str, rendered: list[int]) -> None:
    given, cost = template(name), dict[int, float]()
    for count in (100, 200, 400):
        messages = chat(count)
        whole = given.render(messages, add_generation_prompt=False)
        rendered.clear()
        assert len(reply_spans(given, messages, whole)) == count
        cost[count] = sum(rendered) / len(whole)
    assert cost[400] < 1.2 * cost[100] < 15


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("m"), tokenizer=True)


def reader(folder: Path, source: str) -> Reader:
    (folder / "chat_template.jinja").write_text(source)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return Reader(tokenizer, None, 10**6)


def test_a_chat_of_3000_turns_is_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat(3000)}))
    [document] = reader(folder, DEFAULT_SYSTEM).corpus([tmp_path / "a.jsonl"]).documents
    ids = [id for id, counts in zip(document.ids, document.counts, strict=True) if counts]
    assert len(ids) > 3000 and document.counts[-1] and not document.counts[0]


def test_a_template_that_changes_turns_bounds_the_replies(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat(501)}))
    with pytest.raises(
        ConfigError, match="has 501 replies of the assistant, more than the 500 .* changes earlier turns"
    ):
        reader(folder, REASONING_ONCE).corpus([tmp_path / "a.jsonl"])
    messages = chat(501)
    whole = template("reasoning once").render(messages, add_generation_prompt=False)
    with pytest.raises(TooManyRepliesError):
        reply_spans(template("reasoning once"), messages, whole)


def test_a_token_counts_where_a_reply_holds_all_of_it() -> None:
    """As each of its spans says alone, with spans in any order, within each other or empty."""
    from foredraft.train.texts import _within

    tokens = [(start, start + width) for start in range(9) for width in range(4)]
    for spans in ([(2, 5), (6, 8)], [(1, 7), (2, 3)], [(4, 6), (0, 2)], [(3, 3)], [(1, 4), (1, 9)]):
        expected = [any(first <= start and stop <= last for first, last in spans) for start, stop in tokens]
        assert _within(tokens, spans) == expected
