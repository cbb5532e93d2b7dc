"""Chat templates, like those of published checkpoints, render the same text as transformers; failures are one line."""

from __future__ import annotations

import copy
import enum
import functools
import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from foredraft.errors import CheckpointError, RequestError
from foredraft.model.chat import NULL, ChatTemplate
from foredraft.model.tokenizer import Tokenizer
from tests.support.checkpoints import tiny_tokenizer
from tests.support.mutation import assert_caught, defect

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}
"""
NO_SYSTEM = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
THINKING = """{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and message.content is string %}
        {%- set ns.last = index %}
        {%- set ns.found = true %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "system" and not loop.first %}{%- continue %}{%- endif %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" and loop.index0 < ns.last and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
DATED = """{%- if date is not defined %}{%- set date = strftime_now('%d %b %Y') %}{%- endif %}
{{- bos_token + 'Today: ' + date + '\\n' }}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}"""
TOOLS = """{%- if tools %}
{{- '# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=2) + '\\n' + (tool | tojson) + '\\n' }}{%- endfor %}
{%- endif %}
{%- if documents %}{%- for document in documents %}{{- document.title + ': ' + document.text + '\\n' }}{%- endfor %}{%- endif %}
{%- for message in messages %}{{- message | tojson(sort_keys=true, separators=(',', ':')) }}{%- endfor %}"""
TEMPLATES = {"chatml": CHATML, "no-system": NO_SYSTEM, "thinking": THINKING, "dated": DATED, "tools": TOOLS}

USER = {"role": "user", "content": '  Is 2 < 3 & "so" on? 漢🙂 '}
REPLY = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}
AGAIN = {"role": "user", "content": "Why?"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é<"}}}],
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "It's <wet> in Zürich", "parameters": {"type": "object"}},
}
WORDS = st.sampled_from([REPLY["content"], USER["content"]]) | st.text(
    st.sampled_from("ab \n'\"<&é漢🙂{}%\\"), max_size=8
)
TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": WORDS}),
    min_size=1,
    max_size=4,
)


def save(folder: Path, templates: dict[str, str] | str | None, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    inner = tiny_tokenizer()
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    inner.save(str(folder / "tokenizer.json"))
    if isinstance(templates, dict):
        templates = [{"name": name, "template": text} for name, text in templates.items()]  # type: ignore[assignment]
    written = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | config
    if templates is not None:
        written["chat_template"] = templates
    (folder / "tokenizer_config.json").write_text(json.dumps(written), encoding="utf-8")
    return folder


@functools.cache
def ours(folder: Path) -> Tokenizer:
    loaded = Tokenizer.from_folder(folder)
    assert loaded is not None and loaded.chat is not None
    return loaded


@functools.cache
def theirs(folder: Path) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def assert_alike(folder: Path, messages: list[dict[str, Any]], **variables: Any) -> bool:
    """Check that foredraft and transformers give the same text and ids, or both refuse; return whether they give any."""
    before = copy.deepcopy(messages)
    mine, reference = ours(folder), theirs(folder)
    variables = {"add_generation_prompt": True} | variables
    try:
        expected = reference.apply_chat_template(messages, tokenize=False, **variables)
    except Exception as error:
        with pytest.raises(RequestError) as caught:
            mine.encode_chat(messages, **variables)
        refusal = " ".join(str(error).split())
        assert "\n" not in str(caught.value)
        assert (refusal and refusal in str(caught.value)) or "continue_final_message" in variables
        return False
    assert mine.chat is not None and mine.chat.render(messages, **variables) == expected
    ids = reference.apply_chat_template(messages, tokenize=True, **variables)["input_ids"]
    assert mine.encode_chat(messages, **variables) == ids
    assert messages == before
    return True


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    for name, template in TEMPLATES.items():
        save(folder / name, template)
    return folder


def assert_continued_alike(folder: Path, messages: list[dict[str, Any]]) -> bool:
    """Check that a continued conversation ends where it does in transformers, or neither continues it."""
    continued = assert_alike(folder, messages, continue_final_message=True, add_generation_prompt=False)
    if continued:
        chat = ours(folder).chat
        assert chat is not None
        one, two = (
            chat.render(messages, continue_final_message=True, add_generation_prompt=prompt)
            for prompt in (True, False)
        )
        assert one == two
    return continued


CONTINUED: list[dict[str, Any]] = [
    *({"role": "assistant", "content": text} for text in ("Yes, ", "  Yes", "\n", "", "<think>\nhm", None)),
    {"role": "assistant", "content": "Yes", "reasoning_content": "hm"},
    {"role": "assistant", "content": [{"type": "text", "text": "Yes "}, {"type": "image"}]},
    {"role": "assistant", "content": [{"type": "image"}]},
    {"role": "user", "content": "Is it "},
    REPLY,
    CALL,
]


@pytest.mark.parametrize("message", CONTINUED, ids=str)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_last_message_is_continued_as_in_transformers(
    folders: Path, name: str, message: dict[str, Any]
) -> None:
    for earlier in ([USER], [SYSTEM, USER], [USER, REPLY, AGAIN], []):
        assert_continued_alike(folders / name, [*earlier, message])


def test_only_a_template_that_shows_a_message_as_it_is_continues_it(folders: Path, tmp_path: Path) -> None:
    """Where it drops the end of the message, there is no place to go on from."""
    said = [USER, {"role": "assistant", "content": "Yes, and"}]
    for name in TEMPLATES:
        assert assert_continued_alike(folders / name, said) is (name != "tools"), f"{name}: tools shows JSON"
    sources = ("[:3] }}", " | upper }}", " }}: {{ add_generation_prompt }}", " }}")
    for number, rest in enumerate(sources):
        folder = save(tmp_path / str(number), "{{ messages[-1].content" + rest)
        assert assert_continued_alike(folder, said) is (number >= 2), rest
    folder = save(tmp_path, "{{ bos_token }}")
    assert not assert_continued_alike(folder, said)
    for message, needs in (
        (AGAIN, "a chat template that shows the last"),
        (CALL, "a last message whose content is"),
    ):
        with pytest.raises(RequestError, match=f"^continue_final_message needs {needs}"):
            ours(folder).encode_chat([USER, message], continue_final_message=True)


@pytest.mark.parametrize(
    ("name", "variables", "inert"),
    [
        ("thinking", {"enable_thinking": False}, False),
        ("thinking", {"enable_thinking": True}, True),
        ("thinking", {"tools": None, "documents": []}, True),
        ("dated", {"date": "1 May 2024"}, False),
        ("dated", {"bos_token": "<begin>"}, False),
        ("tools", {"tools": [WEATHER, WEATHER]}, False),
        ("tools", {"tools": []}, True),
        ("tools", {"documents": [{"title": "T", "text": "<b>"}]}, False),
    ],
    ids=str,
)
def test_variables_are_passed_to_the_template(
    folders: Path, name: str, variables: dict[str, Any], inert: bool
) -> None:
    assert_alike(folders / name, [USER, REPLY, AGAIN], **variables)
    plain = ours(folders / name).encode_chat([USER, REPLY, AGAIN])
    assert (plain == ours(folders / name).encode_chat([USER, REPLY, AGAIN], **variables)) is inert


def test_tool_calls_and_results_render_as_in_transformers(folders: Path) -> None:
    result = {"role": "tool", "content": "3", "name": "add"}
    assert_alike(folders / "thinking", [USER, CALL, result])
    assert_alike(folders / "tools", [USER, CALL, result], tools=[WEATHER])
    assert "null" not in ours(folders / "tools").chat.render([USER, CALL])  # type: ignore[union-attr]


@given(TURNS, st.sampled_from(sorted(TEMPLATES)), st.booleans())
def test_any_messages_render_as_in_transformers(
    folders: Path, messages: list[dict[str, Any]], name: str, prompt: bool
) -> None:
    assert_alike(folders / name, messages, add_generation_prompt=prompt)
    assert_continued_alike(folders / name, messages)


def test_special_tokens_are_read_from_both_files(tmp_path: Path) -> None:
    shown = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ messages[0].content }}"
    kept = {"content": "<pad>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    table = {"2": kept | {"content": "</s>", "special": True}}
    older = {"bos_token": kept, "unk_token": "</s>"}
    for name, config, text in (
        ("plain", {}, "<s>|</s>|||Why?"),
        ("object", {"pad_token": {"__type": "AddedToken"} | kept}, "<s>|</s>|<pad>||Why?"),
        ("null", {"bos_token": None}, "|</s>|||Why?"),
        ("older", {}, "<pad>|</s>||</s>|Why?"),
        ("newer", {"added_tokens_decoder": table}, None),
    ):
        folder = save(tmp_path / name, shown, **config)
        if name in ("older", "newer"):
            (folder / "special_tokens_map.json").write_text(json.dumps(older))
        assert_alike(folder, [USER])
        chat = ours(folder).chat
        assert chat is not None and text in (None, chat.render([AGAIN])), name


def test_templates_are_read_from_files_and_from_the_config(tmp_path: Path) -> None:
    listed = save(tmp_path / "listed", {"default": "plain", "tool_use": "tools {{ tools | length }}"})
    filed, several = (save(tmp_path / name, "config") for name in ("filed", "several"))
    (filed / "chat_template.jinja").write_text("file ü", encoding="utf-8")
    (several / "chat_template.jinja").write_text("file")
    (more := several / "additional_chat_templates").mkdir()
    (more / "tool_use.jinja").write_text("tools")
    (more / "rag.jinja").write_text("rag")
    for folder, plain, tools in (
        (listed, "plain", "tools 1"),
        (filed, "file ü", None),  # it reads no tools
        (several, "file", "tools"),
    ):
        assert_alike(folder, [USER])
        chat = ours(folder).chat
        assert chat is not None and chat.render([USER]) == plain
        if tools is not None:
            assert_alike(folder, [USER], tools=[WEATHER])
            assert chat.render([USER], tools=[WEATHER]) == tools
    nameless = ours(save(tmp_path / "nameless", {"rag": "rag", "tool_use": "tools"}))
    with pytest.raises(
        RequestError, match="has chat templates named rag, tool_use, but none named default; put"
    ):
        nameless.encode_chat([USER])
    assert nameless.chat.render([USER], tools=[WEATHER]) == "tools"  # type: ignore[union-attr]


def test_a_conversation_without_a_template_is_refused(tmp_path: Path) -> None:
    loaded = Tokenizer.from_folder(save(tmp_path, None))
    assert loaded is not None and loaded.chat is None
    with pytest.raises(RequestError, match=r"no chat template; give a plain prompt, .* chat_template\.jinja"):
        loaded.encode_chat([USER])
    (tmp_path / "tokenizer_config.json").unlink()
    assert ChatTemplate.from_folder(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="has a chat template that cannot be read"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "found", [5, [], [{"name": "default"}], [5], [{"name": 1, "template": ""}], {"a": "b"}]
)
def test_a_malformed_chat_template_entry_is_refused(tmp_path: Path, found: Any) -> None:
    save(tmp_path, None, chat_template=found)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template is neither"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ raise_exception('no\n\nway') }}", "the chat template refuses the messages: no way"),
        ("{% if %}", "cannot be rendered with these messages (Expected an expression"),
        ("{{ messages[0].nothing.more }}", "cannot be rendered with these messages ('dict object' has no"),
        ("{{ messages[7] | tojson }}", "is not JSON serializable"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ dict.update(messages[0], role='none') }}", "cannot be rendered with these messages"),
        ("{{ dict.__base__ }}{{ dict.__base__() }}", "cannot be rendered with these messages"),
        ("{{ namespace.__init__.__globals__ }}", "cannot be rendered with these messages"),
        ("{% set n = namespace(_x=1) %}", "cannot be rendered with these messages"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", "cannot be rendered with these messages"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages[0].content.encode('ascii') }}", "'ascii' codec can't encode"),
    ],
)
def test_a_failing_template_is_reported_in_one_line(template: str, expected: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate({"default": template}).render([USER])
    assert expected in str(caught.value) and "\n" not in str(caught.value)


OPEN = """{% for m in messages %}[{{ m.role }}] {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>
{% endif %}{% if m.content is not defined %}-{% elif m.content is string %}{{ m.content }}{% else %}
{{ m.content | tojson }}{{ m.content is iterable }}{% endif %}{% for call in m.tool_calls %}{{ call.function.name }}
{% endfor %}{{ m | tojson }}{{ m }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}{{ shown }}"""
REASONED = [
    {"reasoning_content": "r"},
    {"reasoning": "r"},
    {"thinking": "t", "reasoning": "r"},
    {"reasoning": "r", "thinking": "", "content": None},
    {"reasoning_content": None, "thinking": "t", "reasoning": "r", "content": "x"},
]


class Grade(enum.IntEnum):
    GOOD = 2


class Share(float):
    def __str__(self) -> str:
        return "much"


CONTENTS = [{"t": [22.5]}, 22, 1.5, [], [1, "a"], False, ("a", "b"), Grade.GOOD, Share(0.5)]
SCALARS = [np.float64(0.1), np.float32(0.5), np.int64(7), np.bool_(False), np.str_("x")]


@pytest.mark.parametrize(
    "message",
    [
        *({"role": "tool", "content": content} for content in (*CONTENTS, *SCALARS)),
        {"role": "tool", "tool_call_id": "1"},
        CALL,
        {"role": "assistant", "tool_calls": CALL["tool_calls"], "refusal": None},
        *({"role": "assistant", **reasoned} for reasoned in REASONED),
    ],
    ids=str,
)
def test_any_keys_and_values_render_as_in_transformers(tmp_path: Path, message: dict[str, Any]) -> None:
    """The template decides which keys a message needs."""
    assert_alike(save(tmp_path, OPEN), [USER, message, AGAIN], shown=message.get("content"))


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


def test_every_option_of_transformers_is_supported_or_refused(tmp_path: Path) -> None:
    """Even a template that reads a variable of the same name does not receive the option."""
    options = inspect.signature(transformers.PreTrainedTokenizerBase.apply_chat_template).parameters
    taken = {"self", "kwargs", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    chat = ours(save(tmp_path, "{{ " + " }}{{ ".join(options) + " }}")).chat
    assert chat is not None
    assert len(options) > 15
    for option in options.keys() - taken:
        with pytest.raises(RequestError, match=f"^{option} is not a variable of a chat template; "):
            chat.render([USER], **{option: None})


REFUSED: list[tuple[str, Any, dict[str, Any], str]] = [
    *(("chatml", messages, {}, "messages is not a list") for messages in ("hello", USER, 5)),
    ("chatml", [], {}, "messages is empty"),
    ("chatml", ["hello"], {}, "messages[0] is not an object"),
    ("chatml", [USER, {"content": "x"}], {}, "messages[1] has no role"),
    ("chatml", [{"role": 5, "content": "x"}], {}, "messages[0] has no role that is text"),
    # the template needs it
    ("chatml", [{"role": "user"}], {}, "'dict object' has no attribute 'content'"),
    *(
        ("chatml", [{"role": "user", "content": content}], {}, expected)
        for content, expected in (
            (5, "can only concatenate str"),
            (CYCLE, "messages[0] is nested too deeply, or contains itself; give"),
            ("a\udcff", "a message is not valid Unicode"),
            ([Path("x")], "messages[0] holds a PosixPath; give text, numbers"),
        )
    ),
    # transformers drops lists that the template does not read, and the model never hears of the tools
    *(
        ("thinking", [USER], {name: [WEATHER]}, f"the chat template does not read '{name}'; leave it out")
        for name in ("tools", "documents")
    ),
    ("thinking", [USER], {"enable_thinkng": 1}, "'enable_thinkng'; leave it out (it reads enable_thinking)"),
    ("thinking", [USER], {"shown": CYCLE}, "shown is nested too deeply, or contains itself"),
    ("thinking", [USER], {"shown": np.zeros(2)}, "shown holds a ndarray"),
    ("thinking", [USER], {"tools": [{"call": len}]}, "tools holds a builtin_function_or_method"),
    ("thinking", [USER], {"shown": np.longdouble(1)}, "shown holds a longdouble"),
    ("thinking", [USER], {"shown": np.datetime64("2024-05-01")}, "shown holds a date"),
]


@pytest.mark.parametrize(
    ("name", "messages", "variables", "expected"), REFUSED, ids=[case[3][:40] for case in REFUSED]
)
def test_malformed_messages_and_variables_without_effect_are_refused(
    folders: Path, name: str, messages: Any, variables: dict[str, Any], expected: str
) -> None:
    with pytest.raises(RequestError) as caught:
        ours(folders / name).encode_chat(messages, **variables)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


# --- templates that take a text as a list of parts ---------------------------------------------------------

PART = "{% for part in m.content %}{% if part.type == 'text' %}[{{ part.text }}]{% endif %}{% endfor %}"
FIRST = "[{{ m['content'][0]['text'] }}]"
EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + PART + "{% endif %}"
SAID = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


def rendered(shown: str, messages: Any = SAID, **more: Any) -> str:
    return ChatTemplate({"default": "{% for m in messages %}" + shown + "{% endfor %}"}).render(
        messages, **more
    )


def test_a_template_of_parts_alone_shows_texts() -> None:
    for shown in (PART, FIRST):
        assert rendered(shown) == "[Hi][Ho]"
        assert rendered(shown, continue_final_message=True) == "[Hi][Ho"


def test_a_template_that_takes_texts_gets_texts() -> None:
    assert rendered(EITHER) == "HiHo"
    assert rendered("{{ m.content }} (text)") == "Hi (text)Ho (text)"
    parts = [{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}]
    assert rendered(EITHER, parts) == rendered(PART, parts) == "[A][B]", "as they are given"


@pytest.mark.parametrize(
    ("answer", "check"),
    [
        (False, test_a_template_of_parts_alone_shows_texts),
        (True, test_a_template_that_takes_texts_gets_texts),
    ],
)
def test_a_defect_is_caught(answer: bool, check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = defect("parts", ChatTemplate._takes_parts_alone, lambda sound: lambda chat, source: answer, check)
    assert_caught(told, monkeypatch)


def test_a_content_that_is_none_is_absent_and_null_is_null() -> None:
    chat = ChatTemplate(
        {"default": "{% for m in messages %}{{ m.content is defined }} {{ m.content is none }};{% endfor %}"}
    )
    told = [{"role": "assistant", "content": each, "tool_calls": [{}]} for each in (None, NULL)]
    assert chat.render(told) == "False False;True True;"
