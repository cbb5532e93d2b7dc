"""Chat templates render the same text as transformers; every failure is one line.

The templates imitate those of published checkpoints. Seen to fail on: white space around blocks kept, JSON
escaped for HTML, the generation prompt left out, a token stored as an object, special_tokens_map.json ignored,
tools that do not select their template, the caller's messages changed.
"""

from __future__ import annotations

import copy
import enum
import inspect
import json
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from foredraft.errors import CheckpointError, RequestError
from foredraft.model.chat import ChatTemplate
from foredraft.model.tokenizer import Tokenizer
from tests.support.checkpoints import tiny_tokenizer

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}
"""
HEADERS = """{%- for message in messages %}
    {%- set text = '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|turn|>' %}
    {%- if loop.index0 == 0 %}
        {%- set text = bos_token + text %}
    {%- endif %}
    {{- text }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}
"""
INSTRUCT = """{%- if messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'] -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set rest = messages -%}
{%- endif -%}
{{- bos_token -}}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('After the optional system message, roles must alternate user/assistant!') -}}
    {%- endif -%}
    {%- if message['role'] == 'user' -%}
        {%- if loop.last and system is defined -%}
            {{- '[INST] ' + system + '\\n\\n' + message['content'] + '[/INST]' -}}
        {%- else -%}
            {{- '[INST] ' + message['content'] + '[/INST]' -}}
        {%- endif -%}
    {%- elif message['role'] == 'assistant' -%}
        {{- ' ' + message['content'] + eos_token -}}
    {%- else -%}
        {{- raise_exception('Only user and assistant roles are supported!') -}}
    {%- endif -%}
{%- endfor -%}
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
TRAINED = """{% for message in messages %}
  {% if message.role == 'assistant' %}
    {% generation %}
    {% set word = message.content %}
{{ word }}<|im_end|>
    {% endgeneration %}
  {% else %}
{{ message.role }}: {{ message.content }}
  {% endif %}
{{ word }}
{% endfor %}
"""
TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "instruct": INSTRUCT,
    "no-system": NO_SYSTEM,
    "thinking": THINKING,
    "dated": DATED,
    "tools": TOOLS,
    "trained": TRAINED,
}

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
CONVERSATIONS = [[USER], [USER, REPLY, AGAIN], [SYSTEM, USER], [SYSTEM, USER, REPLY, AGAIN, REPLY]]


WORDS = st.text(st.sampled_from("ab \n'\"<&é漢🙂{}%\\"), max_size=8)
TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": WORDS}),
    min_size=1,
    max_size=4,
)


def save(folder: Path, templates: dict[str, str] | str | None, **config: Any) -> Path:
    """Save a tokenizer with its chat templates in tokenizer_config.json."""
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


def ours(folder: Path) -> Tokenizer:
    loaded = Tokenizer.from_folder(folder)
    assert loaded is not None and loaded.chat is not None
    return loaded


def theirs(folder: Path) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def assert_alike(folder: Path, messages: list[dict[str, Any]], **variables: Any) -> None:
    """Check that foredraft and transformers give the same text and ids, or both refuse."""
    mine, reference = ours(folder), theirs(folder)
    variables = {"add_generation_prompt": True} | variables
    refusal = ""
    try:
        expected = reference.apply_chat_template(messages, tokenize=False, **variables)
    except Exception as error:
        refusal = " ".join(str(error).split())
    if refusal:
        with pytest.raises(RequestError) as caught:
            mine.encode_chat(messages, **variables)
        assert refusal in str(caught.value)
        return
    assert mine.chat is not None
    assert mine.chat.render(messages, **variables) == expected
    ids = reference.apply_chat_template(messages, tokenize=True, **variables)["input_ids"]
    assert mine.encode_chat(messages, **variables) == ids


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    for name, template in TEMPLATES.items():
        save(folder / name, template)
    return folder


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=lambda m: "-".join(x["role"][0] for x in m))
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_renders_as_in_transformers(
    folders: Path, name: str, messages: list[dict[str, Any]]
) -> None:
    before = copy.deepcopy(messages)
    for prompt in (True, False):
        assert_alike(folders / name, messages, add_generation_prompt=prompt)
    assert messages == before


def assert_continued_alike(folder: Path, messages: list[dict[str, Any]], **variables: Any) -> bool:
    """Check that a continued conversation ends where it does in transformers, or neither continues it."""
    variables = {"continue_final_message": True, "add_generation_prompt": False} | variables
    mine, reference = ours(folder), theirs(folder)
    try:
        expected = reference.apply_chat_template(messages, tokenize=False, **variables)
    except Exception:
        with pytest.raises(RequestError) as caught:
            mine.encode_chat(messages, **variables)
        assert "\n" not in str(caught.value)
        return False
    assert mine.chat is not None
    assert mine.chat.render(messages, **variables) == expected
    assert mine.chat.render(messages, **{**variables, "add_generation_prompt": True}) == expected
    return True


CONTINUED: list[dict[str, Any]] = [
    {"role": "assistant", "content": "Yes, "},
    {"role": "assistant", "content": "  Yes"},
    {"role": "assistant", "content": "\n"},
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": "<think>\nhm"},
    {"role": "assistant", "content": "Yes", "reasoning_content": "hm"},
    {"role": "assistant", "content": [{"type": "text", "text": "Yes "}, {"type": "image"}]},
    {"role": "assistant", "content": [{"type": "image"}]},
    {"role": "assistant", "content": None},
    {"role": "user", "content": "Is it "},
    REPLY,
    CALL,
]


@pytest.mark.parametrize("message", CONTINUED, ids=str)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_last_message_is_continued_as_in_transformers(
    folders: Path, name: str, message: dict[str, Any]
) -> None:
    before = copy.deepcopy(message)
    for earlier in ([USER], [SYSTEM, USER], [USER, REPLY, AGAIN], []):
        assert_continued_alike(folders / name, [*earlier, message])
    assert message == before


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_shows_a_message_as_it_is_continues_it(folders: Path, name: str) -> None:
    continued = assert_continued_alike(folders / name, [USER, {"role": "assistant", "content": "Yes, and"}])
    assert continued is (name != "tools")  # which shows messages as JSON


@given(TURNS, st.sampled_from(sorted(TEMPLATES)))
def test_any_last_message_is_continued_as_in_transformers(
    folders: Path, messages: list[dict[str, Any]], name: str
) -> None:
    assert_continued_alike(folders / name, messages)


def test_a_continued_message_is_rendered_without_a_generation_prompt(tmp_path: Path) -> None:
    folder = save(tmp_path, "{{ add_generation_prompt }}: {{ messages[-1].content }}")
    assert assert_continued_alike(folder, [USER, {"role": "assistant", "content": "Yes, and"}])


def test_a_text_without_its_last_message_is_not_continued(tmp_path: Path) -> None:
    """The template drops the end of the message, so there is no place to go on from."""
    for source in ("{{ messages[-1].content[:3] }}", "{{ messages[-1].content | upper }}", "{{ bos_token }}"):
        folder = save(tmp_path / str(len(source)), source)
        assert not assert_continued_alike(folder, [USER, {"role": "assistant", "content": "Yes, and"}])
    with pytest.raises(
        RequestError, match="^continue_final_message needs a chat template that shows the last"
    ):
        ours(folder).encode_chat([USER, AGAIN], continue_final_message=True)
    with pytest.raises(
        RequestError, match="^continue_final_message needs a last message whose content is text"
    ):
        ours(folder).encode_chat([USER, CALL], continue_final_message=True)


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("thinking", {"enable_thinking": False}),
        ("thinking", {"enable_thinking": True}),
        ("dated", {"date": "1 May 2024"}),
        ("dated", {"bos_token": "<begin>"}),
        ("tools", {"tools": [WEATHER, WEATHER]}),
        ("tools", {"tools": []}),
        ("tools", {"documents": [{"title": "T", "text": "<b>"}]}),
    ],
    ids=str,
)
def test_variables_are_passed_to_the_template(folders: Path, name: str, variables: dict[str, Any]) -> None:
    assert_alike(folders / name, [USER, REPLY, AGAIN], **variables)
    plain = ours(folders / name).encode_chat([USER, REPLY, AGAIN])
    changed = ours(folders / name).encode_chat([USER, REPLY, AGAIN], **variables)
    inert = variables in ({"enable_thinking": True}, {"tools": []})
    assert (plain == changed) is inert


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_lists_that_the_template_does_not_read_are_refused_by_name(folders: Path, name: str) -> None:
    """transformers drops them, and the model never hears of the tools."""
    thinking = ours(folders / "thinking")
    with pytest.raises(RequestError, match=f"the chat template does not read '{name}'; leave it out"):
        thinking.encode_chat([USER], **{name: [WEATHER]})
    for empty in (None, []):
        assert thinking.encode_chat([USER], **{name: empty}) == thinking.encode_chat([USER])


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


def test_special_tokens_are_read_from_both_files(tmp_path: Path) -> None:
    shown = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ messages[0].content }}"
    kept = {"content": "<pad>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    table = {"2": kept | {"content": "</s>", "special": True}}
    older = {"bos_token": kept, "unk_token": "</s>"}
    for name, config in {
        "plain": {},
        "object": {"pad_token": {"__type": "AddedToken"} | kept},
        "null": {"bos_token": None},
        "older": {},
        "newer": {"added_tokens_decoder": table},
    }.items():
        folder = save(tmp_path / name, shown, **config)
        if name in ("older", "newer"):
            (folder / "special_tokens_map.json").write_text(json.dumps(older))
        assert_alike(folder, [USER])
    texts = {
        name: ours(tmp_path / name).chat.render([AGAIN]) for name in ("plain", "object", "null", "older")
    }  # type: ignore[union-attr]
    assert texts == {
        "plain": "<s>|</s>|||Why?",
        "object": "<s>|</s>|<pad>||Why?",
        "null": "|</s>|||Why?",
        "older": "<pad>|</s>||</s>|Why?",
    }


def test_templates_are_read_from_files_and_from_the_config(tmp_path: Path) -> None:
    def write(path: Path, text: str) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")

    listed = save(tmp_path / "listed", {"default": "plain", "tool_use": "tools {{ tools | length }}"})
    filed = save(tmp_path / "filed", "config")
    write(filed / "chat_template.jinja", "file ü")
    several = save(tmp_path / "several", "config")
    write(several / "chat_template.jinja", "file")
    write(several / "additional_chat_templates/tool_use.jinja", "tools")
    write(several / "additional_chat_templates/rag.jinja", "rag")
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
    nameless = save(tmp_path / "nameless", {"rag": "rag", "tool_use": "tools"})
    with pytest.raises(
        RequestError, match="has chat templates named rag, tool_use, but none named default; put"
    ):
        ours(nameless).encode_chat([USER])
    assert ours(nameless).chat.render([USER], tools=[WEATHER]) == "tools"  # type: ignore[union-attr]


def test_a_conversation_without_a_template_is_refused(tmp_path: Path) -> None:
    loaded = Tokenizer.from_folder(save(tmp_path, None))
    assert loaded is not None and loaded.chat is None
    with pytest.raises(RequestError, match=r"no chat template; give a plain prompt, .* chat_template\.jinja"):
        loaded.encode_chat([USER])
    (tmp_path / "tokenizer_config.json").unlink()
    assert ChatTemplate.from_folder(tmp_path) is None


@pytest.mark.parametrize(
    "found", [5, [], [{"name": "default"}], [5], [{"name": 1, "template": ""}], {"a": "b"}]
)
def test_a_malformed_chat_template_entry_is_refused(tmp_path: Path, found: Any) -> None:
    save(tmp_path, None, chat_template=found)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template is neither"):
        Tokenizer.from_folder(tmp_path)


def test_a_template_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (save(tmp_path, None) / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="has a chat template that cannot be read"):
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
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages[0].content.encode('ascii') }}", "the attribute 'encode' of str"),
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


@pytest.mark.parametrize(
    "message",
    [
        *({"role": "tool", "content": content} for content in ({"t": [22.5]}, 22, 1.5, [], [1, "a"], False)),
        {"role": "tool", "tool_call_id": "1"},
        CALL,
        {"role": "assistant", "tool_calls": CALL["tool_calls"], "refusal": None},
        {"role": "assistant", "content": ("a", "b")},
        *({"role": "assistant", **reasoned} for reasoned in REASONED),
    ],
    ids=str,
)
def test_the_template_decides_which_keys_a_message_needs(tmp_path: Path, message: dict[str, Any]) -> None:
    before = copy.deepcopy(message)
    assert_alike(save(tmp_path, OPEN), [USER, message, AGAIN])
    assert message == before


class Role(enum.StrEnum):
    USER = "user"


class Grade(enum.IntEnum):
    GOOD = 2


class Share(float):
    def __str__(self) -> str:
        return "much"


@pytest.mark.parametrize(
    "value",
    [Grade.GOOD, np.float64(0.1), np.float32(0.5), np.int64(7), np.bool_(False), Share(0.5), np.str_("x"), (1, 2)],
    ids=repr,
)  # fmt: skip
def test_enumerations_and_numpy_scalars_render_as_in_transformers(tmp_path: Path, value: Any) -> None:
    assert_alike(save(tmp_path, OPEN), [{"role": "tool", "content": value}], shown=value)


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"enable_thinkng": False},
            "does not read 'enable_thinkng'; leave it out (it reads enable_thinking)",
        ),
        ({"shown": CYCLE}, "shown is nested too deeply, or contains itself"),
        ({"shown": np.zeros(2)}, "shown holds a ndarray"),
        ({"shown": np.longdouble(1)}, "shown holds a longdouble"),
        ({"shown": np.datetime64("2024-05-01")}, "shown holds a date"),
        *(
            ({name: True}, f"{name} is not a variable of a chat template; ")
            for name in (
                "chat_template",
                "conversation",
                "max_length",
                "padding",
                "return_assistant_tokens_mask",
                "return_dict",
                "return_tensors",
                "sanitize_control_tokens",
                "tokenize",
                "tokenizer_kwargs",
                "truncation",
            )
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_variable_without_effect_is_refused(
    folders: Path, variables: dict[str, Any], expected: str
) -> None:
    with pytest.raises(RequestError) as caught:
        ours(folders / "thinking").encode_chat([USER], **variables)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


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


def test_an_endless_template_is_stopped() -> None:
    endless = (
        "{% for a in range(99999) %}{% for b in range(99999) %}" + "x" * 999 + "{% endfor %}{% endfor %}"
    )
    with pytest.raises(RequestError, match=r"\(its text is longer than 33554432 characters\)"):
        ChatTemplate({"default": endless}).render([USER])


@pytest.mark.parametrize(
    "template",
    [
        "{% set n = namespace(self=1, values=2, made=3) %}{% set n.self = 4 %}{{ n.self }}{{ n.values }}{{ n.made }}",
        "{% set n = namespace({'a': 1}, b=2) %}{{ n.a + n.b }}",
    ],
)  # fmt: skip
def test_a_namespace_works_as_in_transformers(tmp_path: Path, template: str) -> None:
    assert_alike(save(tmp_path, template), [USER])


@pytest.mark.parametrize(
    "template",
    [
        "{% set n = namespace(_x=1) %}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ dict.update(messages[0], role='none') }}",
        "{{ dict.__base__ }}{{ dict.__base__() }}",
        "{{ namespace.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(tmp_path: Path, template: str) -> None:
    folder = save(tmp_path, template)
    with pytest.raises(jinja2.TemplateError):
        theirs(folder).apply_chat_template([USER], tokenize=False)
    with pytest.raises(RequestError, match="cannot be rendered with these messages") as caught:
        ours(folder).encode_chat([USER])
    assert "\n" not in str(caught.value)


def test_only_plain_values_reach_the_template(folders: Path) -> None:
    chat = ours(folders / "chatml").chat
    assert chat is not None
    assert chat.render([{"role": Role.USER, "content": "x"}]) == chat.render(
        [{"role": "user", "content": "x"}]
    )
    with pytest.raises(RequestError, match=r"messages\[0\] holds a PosixPath; give text, numbers"):
        chat.render([{"role": "user", "content": [Path("x")]}])
    with pytest.raises(RequestError, match=r"tools holds a function"):
        chat.render([USER], tools=[{"call": save}])


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("hello", "messages is not a list"),
        (USER, "messages is not a list"),
        (5, "messages is not a list"),
        ([], "messages is empty"),
        (["hello"], "messages[0] is not an object"),
        ([USER, {"content": "x"}], "messages[1] has no role"),
        ([{"role": 5, "content": "x"}], "messages[0] has no role that is text"),
        ([{"role": "user"}], "'dict object' has no attribute 'content'"),  # a key that this template needs
        ([{"role": "user", "content": 5}], "can only concatenate str"),
        ([{"role": "user", "content": CYCLE}], "messages[0] is nested too deeply, or contains itself; give"),
        ([{"role": "user", "content": "a\udcff"}], "a message is not valid Unicode"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_malformed_messages_are_refused(folders: Path, messages: Any, expected: str) -> None:
    with pytest.raises(RequestError) as caught:
        ours(folders / "chatml").encode_chat(messages)
    assert expected in str(caught.value) and "\n" not in str(caught.value)
