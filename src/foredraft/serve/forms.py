"""Forms: the same conversation as narrower chat templates take it, and the text of the first one that fits.

Templates differ in what they take: some know no calls, no system message or one at the beginning alone, no
two messages of one role in a row, or no two calls in one turn. Some refuse the rest, and some leave it out
without a word; so a form counts only if every message's content and calls are in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import groupby, product
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from foredraft.errors import RequestError, shortened
from foredraft.model.chat import NULL, ChatTemplate
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve.call_formats import HERMES, ID_LENGTH
from foredraft.serve.calls import is_json

Messages: TypeAlias = list[dict[str, Any]]
Form: TypeAlias = Callable[[Messages], Messages]
MARK = "foredraft{}probe"  # a word that survives what templates do to a message
MARKS = re.compile(r"foredraft\d+(?:x\d+x)?probe")
RESULT = "<tool_response>\n{}\n</tool_response>"


def chat_text(tokenizer: Tokenizer, messages: Messages, variables: dict[str, Any]) -> str:
    """Return messages as their template renders them, in the first form of the conversation that it takes."""
    chat, refusal = tokenizer.chat, None
    if chat is not None and "tool_calls" not in chat.source(with_tools="tools" in variables):
        messages = spelled_out(messages)
    messages = spelled_out(messages, _is_cut)
    for form in forms(messages, calls_as(tokenizer, messages, variables)):
        try:
            _check_whole(tokenizer, form, variables)
            return tokenizer.chat_text(form, **variables)
        except RequestError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def forms(messages: Messages, calls: Sequence[Form] = ()) -> Iterator[Messages]:
    """Yield the messages, then the same conversation as narrower templates take it, nearest first.

    Args:
        messages: The conversation.
        calls: Changes of the messages with calls in all forms.
    """
    turns, answers, systems = (
        [each for each in own if each is _as_it_is or each(messages) != messages] for own in CHANGES
    )
    last = None
    for turn, narrower, answer, system in product(turns, range(len(NARROWER) + 1), answers, systems):
        form = messages
        for change in (turn, *calls, answer, system, *NARROWER[:narrower]):
            form = change(form)
        if form != last:
            yield form
        last = form


def calls_as(tokenizer: Tokenizer, messages: Messages, variables: dict[str, Any]) -> tuple[Form, ...]:
    """Return the changes of ids, arguments and absent contents with which a template tells a call.

    They are found once for a template, by a short conversation with one call.
    """
    chat = tokenizer.chat
    if chat is None or not any(message.get("tool_calls") for message in messages):
        return ()
    found, with_tools = _calls_as.setdefault(chat, {}), "tools" in variables
    source = chat.source(with_tools=with_tools)
    known = {"tools": TOOLS} if with_tools else {}  # not those of a request, which may be wrong
    if source not in found:
        found[source] = next(
            (each for each in product(*OF_CALLS) if _tells(tokenizer, each, known)), (_as_it_is,)
        )
    return found[source]


def _tells(tokenizer: Tokenizer, changes: Iterable[Form], variables: dict[str, Any]) -> bool:
    form = CALLED
    for change in changes:
        form = change(form)
    try:
        _check_whole(tokenizer, form, variables)
    except RequestError:
        return False
    return True


def spelled_out(messages: Messages, only: Callable[[Mapping[str, Any]], bool] | None = None) -> Messages:
    """Return messages whose calls and their results are text, for a template that knows no calls.

    Args:
        messages: The conversation.
        only: Which messages with calls; all by default.
    """
    made: Messages = []
    in_text = only is None  # results that follow
    for message in messages:
        content, calls = message.get("content"), message.get("tool_calls")
        if calls:
            in_text = only is None or only(message)
        if in_text and message.get("role") == "tool":
            message = {"role": "user", "content": RESULT.format(content or "")}
        elif in_text and calls:
            parts = [content] if content else []
            parts += [_call_text(call["function"]) for call in calls]
            message = {"role": message.get("role"), "content": HERMES.between.join(parts)}
        made.append(message)
    return made


def _call_text(function: Mapping[str, Any]) -> str:
    """Return a call as text; one whose arguments are no object, as a limit cuts them, as it was written."""
    name, given = function["name"], function["arguments"]
    if isinstance(given, str):
        closes = HERMES.closes if is_json(given) else HERMES.closes.removeprefix("}")
        return f"{HERMES.opens}{name}{HERMES.middle}{given}{closes}"
    return HERMES.write(name, given)


def _is_cut(message: Mapping[str, Any]) -> bool:
    """Return whether a message has a call whose arguments are no object."""
    return any(isinstance(call["function"]["arguments"], str) for call in message.get("tool_calls") or ())


def _says_and_calls(message: Mapping[str, Any]) -> bool:
    return bool(message.get("content")) and bool(message.get("tool_calls"))


def _check_whole(tokenizer: Tokenizer, messages: Messages, variables: dict[str, Any]) -> None:
    """Render the conversation with marks in place of its texts, and raise RequestError if one is left out."""
    marked = [_marked(message, place) for place, message in enumerate(messages)]
    text = tokenizer.chat_text([message for message, _ in marked], **variables)
    shown = set(MARKS.findall(text))
    for place, (message, marks) in enumerate(marked):
        if not shown.issuperset(marks):
            raise RequestError(
                f"the chat template leaves out messages[{place}], whose role is {shortened(message['role'])}",
                remedy="leave it out, or tell it in another message",
            )
    if "None" in text and any(message.get("content") is NULL for message, _ in marked):
        named = tokenizer.chat_text(_without_null([message for message, _ in marked]), **variables)
        if named.count("None") < text.count("None"):
            raise RequestError("the chat template writes None for a content that is null")


def _marked(message: Mapping[str, Any], place: int) -> tuple[dict[str, Any], list[str]]:
    """Return a message with marks as its content and as the arguments of its calls, and the marks."""
    made, marks = dict(message), []
    if isinstance(content := message.get("content"), str) and content.strip():
        marks.append(MARK.format(place))
        made["content"] = marks[0]
    arguments: list[object] = []
    for index, call in enumerate(message.get("tool_calls") or ()):
        given, mark = call["function"]["arguments"], MARK.format(f"{place}x{index}x")
        arguments.append(json.dumps(mark) if isinstance(given, str) else dict.fromkeys(given, mark))
        marks += [mark] if given else []
    return {**made, "tool_calls": _with_arguments(message, arguments)} if arguments else made, marks


def _with_arguments(message: Mapping[str, Any], arguments: Iterable[object]) -> list[dict[str, Any]]:
    """Return the calls of a message with other arguments."""
    pairs = zip(message["tool_calls"], arguments, strict=True)
    return [{**call, "function": {**call["function"], "arguments": each}} for call, each in pairs]


def _as_it_is(messages: Messages) -> Messages:
    return messages


def _null_as(content: object, messages: Messages) -> Messages:
    """Return messages with another content where they have calls alone."""
    absent = (None, NULL)
    return [
        {**each, "content": content} if each.get("tool_calls") and each.get("content") in absent else each
        for each in messages
    ]


def _without_null(messages: Messages) -> Messages:
    return _null_as("", messages)


def _arguments_in_text(messages: Messages) -> Messages:
    """Return messages whose calls have their arguments as JSON, as some templates of DeepSeek's take them."""
    made: Messages = []
    for message in messages:
        if calls := message.get("tool_calls"):
            given = [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in calls]
            message = {**message, "tool_calls": _with_arguments(message, given)}
        made.append(message)
    return made


def _short_ids(messages: Messages) -> Messages:
    """Return messages whose ids of calls are nine letters and digits, as Mistral's templates ask."""

    def short(id: object) -> object:
        if not isinstance(id, str) or (len(id) == ID_LENGTH and id.isalnum()):
            return id
        return sha256(id.encode(errors="replace")).hexdigest()[:ID_LENGTH]

    made: Messages = []
    for message in messages:
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": short(message["tool_call_id"])}
        elif calls := message.get("tool_calls"):
            message = {**message, "tool_calls": [{**call, "id": short(call.get("id"))} for call in calls]}
        made.append(message)
    return made


def _results_answered(messages: Messages) -> Messages:
    """Return messages in which an empty answer follows results that the user goes on behind."""
    made: Messages = []
    for message in messages:
        if message.get("role") == "user" and made and made[-1].get("role") == "tool":
            made.append({"role": "assistant", "content": ""})
        made.append(message)
    return made


def _calls_apart(messages: Messages) -> Messages:
    """Return messages whose calls follow what was said beside them as a message of their own."""
    made: Messages = []
    for message in messages:
        if _says_and_calls(message):
            made.append({key: value for key, value in message.items() if key != "tool_calls"})
            message = {**message, "content": None}
        made.append(message)
    return made


def _system_first(messages: Messages) -> Messages:
    """Return messages whose system messages are one, at the beginning."""
    told = [each.get("content") for each in messages if each.get("role") == "system"]
    rest = [each for each in messages if each.get("role") != "system"]
    return [{"role": "system", "content": _paragraphs(*told)}, *rest] if told else messages


def _system_told(messages: Messages) -> Messages:
    """Return messages whose later system messages are told by the next message of the user."""
    made: Messages = []
    waiting: list[str | None] = []  # what the user has to tell
    for message in messages:
        role = message.get("role")
        if role == "system" and any(each.get("role") != "system" for each in made):
            waiting.append(message.get("content"))
            continue
        if waiting and role == "user":
            message = {**message, "content": _paragraphs(*waiting, message.get("content"))}
            waiting = []
        elif waiting and role == "assistant":
            made.append({"role": "user", "content": _paragraphs(*waiting)})
            waiting = []
        made.append(message)
    if waiting:
        made.append({"role": "user", "content": _paragraphs(*waiting)})
    return made


def _one_call_a_turn(messages: Messages) -> Messages:
    """Return messages in which each call is followed by its result, as if they had come in turns."""
    made: Messages = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            made.append(message)
            continue
        results: dict[object, Messages] = {}
        while at < len(messages) and messages[at].get("role") == "tool":
            results.setdefault(messages[at].get("tool_call_id"), []).append(messages[at])
            at += 1
        for place, call in enumerate(calls):
            further = {"content": None if message.get("content") is None else ""} if place else {}
            made.append({**message, "tool_calls": [call]} | further)
            made += results.pop(call.get("id"), ())
        made += [each for left in results.values() for each in left]
    return made


def _one_message_a_turn(messages: Messages) -> Messages:
    """Return messages in which neighbours of one role are one."""

    def turn(message: dict[str, Any]) -> object:
        alone = message.get("role") == "tool" or message.get("tool_calls")
        return id(message) if alone else message.get("role")

    turns = [list(each) for _, each in groupby(messages, turn)]
    return [
        {**turn[0], "content": _paragraphs(*(each.get("content") for each in turn))} if turn[1:] else turn[0]
        for turn in turns
    ]


def _without_system(messages: Messages) -> Messages:
    """Return messages whose first system message is a part of the first user message."""
    if not messages or messages[0].get("role") != "system":
        return messages
    content, rest = messages[0].get("content"), messages[1:]
    if rest and rest[0].get("role") == "user":
        content, rest = _paragraphs(content, rest[0].get("content")), rest[1:]
    return [{"role": "user", "content": content}, *rest]


def _paragraphs(*texts: str | None) -> str:
    return "\n\n".join(text for text in texts if text)


# What may change: of what stands first the least.
OF_CALLS: tuple[tuple[Form, ...], ...] = (
    (_as_it_is, _short_ids),
    (_as_it_is, _arguments_in_text),
    (partial(_null_as, NULL), _without_null),
)
CHANGES: tuple[tuple[Form, ...], ...] = (
    (_as_it_is, _calls_apart, partial(spelled_out, only=_says_and_calls), spelled_out),
    (_as_it_is, _results_answered),
    (_as_it_is, _system_first, _system_told),
)
NARROWER: tuple[Form, ...] = (_one_call_a_turn, _one_message_a_turn, _without_system)  # one after another
# A tool, a conversation with one call of it, and the changes with which each template was found to tell it.
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "F",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]
CALLED: Messages = [
    {"role": "user", "content": "asked"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"at": "x"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "name": "f", "content": "answered"},
]
_calls_as: WeakKeyDictionary[ChatTemplate, dict[str, tuple[Form, ...]]] = WeakKeyDictionary()
