"""Files of data: what counts in them, where replies stand in a conversation, and what is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from foredraft.errors import ConfigError, RequestError
from foredraft.model.chat import ChatTemplate
from foredraft.model.tokenizer import Tokenizer
from foredraft.train import texts as replies
from foredraft.train.target import Batches, Document, hold_out
from foredraft.train.texts import BadRecordError, DocumentReader, reply_spans
from tests.support.checkpoints import save_checkpoint
from tests.support.mutation import assert_caught, defect
from tests.unit.test_model_chat import TEMPLATES

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
EOS = 2


def tokenizer_of(folder: Path, template: str) -> Tokenizer:
    save_checkpoint(folder, tokenizer=True)
    (folder / "chat_template.jinja").write_text(template)
    made = Tokenizer.from_folder(folder)
    assert made is not None
    return made


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("m"), TEMPLATE)


def conversation(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[at % 2], "content": turn} for at, turn in enumerate(turns)]


def lines(folder: Path, *records: Any, name: str = "data.jsonl") -> Path:
    file = folder / name
    file.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return file


def counted_text(tokenizer: Tokenizer, document: Document) -> str:
    ids = [id for id, counts in zip(document.ids, document.counts, strict=True) if counts]
    return tokenizer.decode(ids, skip_special=True)


def read(tokenizer: Tokenizer, file: Path, length: int = 500, **more: Any) -> list[Document]:
    return DocumentReader(tokenizer, EOS, length, **more).corpus([file])


def test_of_an_exchange_the_response_counts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    [document] = read(tokenizer, lines(tmp_path, {"prompt": "a few tokens", "response": " ahead of it"}))
    assert counted_text(tokenizer, document) == " ahead of it"
    assert document.ids[-1] == EOS and document.counts[-1]
    prompt = tokenizer.encode("a few tokens")
    assert list(document.ids[: len(prompt)]) == prompt and not any(document.counts[: len(prompt)])


def test_prompt_tokens_that_count_are_caught(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_counts(exchange: Any) -> Any:
        def mutated(reader: DocumentReader, prompt: str, response: str) -> Any:
            ids, _ = exchange(reader, prompt, response)
            return ids, [True] * len(ids)

        return mutated

    check = partial(test_of_an_exchange_the_response_counts, tokenizer, tmp_path)
    assert_caught(defect("prompt counts", DocumentReader._exchange, all_counts, check), monkeypatch)


def test_of_a_conversation_every_reply_counts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    messages = conversation("guess", "a token", "more", "the draft", "unanswered")
    [document] = read(tokenizer, lines(tmp_path, {"messages": messages}))
    text = counted_text(tokenizer, document)
    assert "a token" in text and "the draft" in text
    assert "guess" not in text and "more" not in text and "unanswered" not in tokenizer.decode(document.ids)


def test_a_template_that_drops_earlier_replies_leaves_the_last_one(tmp_path: Path) -> None:
    kept = "{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}"
    source = TEMPLATE.replace("{{ m.content }}", kept)
    messages = conversation("guess", "first", "more", "last one")
    own = tokenizer_of(tmp_path / "m", source)
    [document] = read(own, lines(tmp_path, {"messages": messages}))
    assert counted_text(own, document).strip().removesuffix("</assistant>") == "last one"


def test_a_text_is_cut_into_pieces_that_count_whole(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("the target checks all of them " * 9)
    whole = tokenizer.encode(file.read_text())
    pieces = read(tokenizer, file, length=20)
    assert [id for piece in pieces for id in piece.ids] == whole[: sum(len(p.ids) for p in pieces)]
    assert {len(piece.ids) for piece in pieces[:-1]} == {20} and all(all(piece.counts) for piece in pieces)


def test_an_exchange_longer_than_a_piece_keeps_what_counts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    record = {"prompt": "all of them " * 20, "response": "in one forward pass"}
    pieces = read(tokenizer, lines(tmp_path, record), length=16)
    assert "".join(counted_text(tokenizer, piece) for piece in pieces) == "in one forward pass"


def test_parquet_is_read_like_lines(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {"prompt": "a few", "response": " tokens", "text": None},
        {"prompt": None, "response": None, "text": "ahead"},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    first, second = read(tokenizer, tmp_path / "data.parquet")
    assert counted_text(tokenizer, first) == " tokens" and all(second.counts)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no table")
    with pytest.raises(ConfigError, match="is no Parquet table"):
        read(tokenizer, tmp_path / "broken.parquet")


BAD = {
    "broken line": ('{"text": "a b"}\n{"text": "a', "line 2 is not JSON"),
    "no object": ("[1, 2]", 'line 1 is no object with a "text"'),
    "other keys": ('{"prompt": "a"}', 'line 1 is no object with a "text"'),
    "a number": ('{"text": 3}', "line 1 is no object"),
    "no reply": (
        '{"messages": [{"role": "user", "content": "a"}]}',
        "line 1 has no message of the assistant",
    ),
    "lone surrogate": ('{"text": "\\ud800"}', "line 1 cannot be read"),
    "messages of text": ('{"messages": ["a"]}', "line 1 has no message of the assistant"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_named_or_counted(case: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    content, message = BAD[case]
    file = lines(tmp_path, content)
    with pytest.raises(ConfigError, match="skip_bad_lines") as caught:
        read(tokenizer, file)
    assert message in str(caught.value)
    good = lines(tmp_path, content, {"text": "a few tokens"}, name="more.jsonl")
    reading = DocumentReader(tokenizer, EOS, 100, skip_bad_lines=True)
    assert len(reading.corpus([good])) == 1 + (case == "broken line") and reading.skipped == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "which is empty"),
        (b"  \n", "which is empty"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"a\0b", "not UTF-8"),
    ],
)
def test_files_without_text_fail(content: bytes, message: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "data.txt"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read(tokenizer, file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tokenizer, tmp_path / "none.txt")


def test_data_without_a_response_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = lines(tmp_path, {"prompt": "a", "response": ""})
    reader = DocumentReader(tokenizer, None, 100)
    with pytest.raises(ConfigError, match="no token to learn from"):
        reader.corpus([file])


def test_prompts_are_what_precedes_a_response_or_begins_a_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = lines(tmp_path, {"prompt": "a few", "response": "x"}, {"text": "the target checks " * 30})
    exchange, *texts = DocumentReader(tokenizer, EOS, 100).prompts([file])
    assert exchange == tokenizer.encode("a few")
    assert texts[0] == tokenizer.encode("the target checks " * 30)[:64]


# --- batches --------------------------------------------------------------------------------------------------


def many() -> list[Document]:
    return [Document((n,) * (1 + n % 13), (True,) * (1 + n % 13)) for n in range(101)]


def test_every_epoch_has_every_document_once_in_another_order() -> None:
    batches = Batches(many(), 40, seed=3)
    orders = []
    for epoch in range(3):
        groups = [batches.group_at(epoch * len(batches) + place) for place in range(len(batches))]
        assert sorted(index for group in groups for index in batches.groups[group]) == list(range(101))
        orders.append(groups)
    assert orders[0] != orders[1] != orders[2]
    assert all(sum(len(d.ids) for d in batches.documents_of(group)) <= 40 for group in orders[0])
    again = Batches(many(), 40, seed=3)
    assert again.groups == batches.groups and again.group_at(70) == batches.group_at(70)
    assert Batches(many(), 40, seed=4).groups != batches.groups


def test_held_out_documents_are_in_no_group() -> None:
    rest, held_out = hold_out(many(), 0.05, 64, seed=1)
    assert len(held_out) == 5 and len(rest) == 96
    assert {d.ids for d in rest}.isdisjoint(d.ids for d in held_out)
    assert len(hold_out(many()[:2], 0.5, 64, seed=1)[1]) == 1


# --- replies of a conversation: the same by windows as by whole texts, in linear time -----------------------


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
HEADERS = """{%- for message in messages %}
    {%- set text = '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|turn|>' %}
    {%- if loop.index0 == 0 %}
        {%- set text = bos_token + text %}
    {%- endif %}
    {{- text }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}
"""
SOURCES = TEMPLATES | {"headers": HEADERS, "default system": DEFAULT_SYSTEM, "reasoning once": REASONING_ONCE}
# Of conversations with and without a system message: those whose every turn is written alike.
PERMITS = {"headers", "no-system", "instruct", "default system"}


def chat(count: int, system: bool = False, tools: bool = False, think: bool = False) -> list[dict[str, Any]]:
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


def reader(folder: Path, source: str) -> DocumentReader:
    (folder / "chat_template.jinja").write_text(source)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return DocumentReader(tokenizer, None, 10**6)


def test_a_template_that_changes_turns_bounds_the_replies(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat(501)}))
    with pytest.raises(ConfigError, match="has 501 replies .*, more than the 500 .* changes earlier turns"):
        reader(folder, REASONING_ONCE).corpus([tmp_path / "a.jsonl"])
    messages = chat(501)
    whole = template("reasoning once").render(messages, add_generation_prompt=False)
    with pytest.raises(BadRecordError):
        reply_spans(template("reasoning once"), messages, whole)


def test_a_token_counts_where_a_reply_holds_all_of_it() -> None:
    from foredraft.train.texts import _within

    tokens = [(start, start + width) for start in range(9) for width in range(4)]
    for spans in ([(2, 5), (6, 8)], [(1, 7), (2, 3)], [(4, 6), (0, 2)], [(3, 3)], [(1, 4), (1, 9)]):
        expected = [any(first <= start and stop <= last for first, last in spans) for start, stop in tokens]
        assert _within(tokens, spans) == expected
