"""Conversation: messages of the API, and items of POST /v1/responses -> the prompt that a chat template
makes, and how the reply to it marks its thinking.

Templates differ in what they take: some know no calls, some no system message, no two messages of one role in
a row, or no two calls in one turn. The same conversation has a form for each of them. The server keeps no
state, so an item that names an earlier response's is refused, unless it names reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

from foredraft.decode.thinking import ThinkingMarkers
from foredraft.errors import RequestError, shortened
from foredraft.model.chat import ChatTemplate
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve.blocks import HERMES
from foredraft.serve.problems import invalid

Messages: TypeAlias = list[dict[str, Any]]
# The key of an earlier reply's reasoning, which templates of models that reason read; others pass over it.
REASONING = "reasoning_content"


def messages_of(given: Messages) -> Messages:
    """Return messages whose content is text and whose calls have objects as arguments."""
    if not given:
        raise invalid("messages", "messages is empty")
    made = [_message(message, f"messages[{place}]") for place, message in enumerate(given)]
    results: set[str] = set()  # ids of those that follow one message
    for place, message in enumerate(made):
        if message.get("role") == "tool":
            _check_single(message.get("tool_call_id"), results, f"messages[{place}].tool_call_id")
            continue
        results, calls = set(), set[str]()
        for index, call in enumerate(message.get("tool_calls") or ()):
            _check_single(call.get("id"), calls, f"messages[{place}].tool_calls[{index}].id")
    return made


def _check_single(id: object, known: set[str], name: str) -> None:
    """Check that no two calls of one message have one id, nor two results that follow it."""
    if id is None:
        return
    if not isinstance(id, str):
        raise invalid("messages", f"{name} is {shortened(id)}; give a string")
    if id in known:
        says = f"{name} is {shortened(id)}, as an earlier one of the same turn; give each an id of its own"
        raise invalid("messages", says)
    known.add(id)


def text_of(content: object, name: str, param: str) -> str:
    """Return content as text: the API allows a list of parts, most templates do not."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(param, f"{name} must be text or a list of parts")
    texts = []
    for part in content:
        fields = part if isinstance(part, Mapping) else {"type": part}
        if fields.get("type") != "text" or not isinstance(fields.get("text"), str):
            kind = shortened(fields.get("type"))
            raise invalid(param, f"{name} has a part of type {kind}, but only text is read; leave it out")
        texts.append(fields["text"])
    return "".join(texts)


def begun_reply(message: Mapping[str, Any], *, adds_prompt: bool) -> str:
    """Return the text of a last message that the reply continues; a prompt for another one excludes that."""
    if message.get("role") != "assistant" or message.get("content") is None or message.get("tool_calls"):
        problem = "continue_final_message needs a last message of the assistant that is text"
        raise invalid("continue_final_message", problem)
    if adds_prompt:
        problem = "continue_final_message and add_generation_prompt exclude each other"
        raise invalid("add_generation_prompt", problem)
    return text_of(message["content"], "the last message", "messages")


def chat_text(tokenizer: Tokenizer, messages: Messages, variables: dict[str, Any]) -> str:
    """Return messages as their template renders them, in the first form of the conversation that it takes."""
    chat, refusal = tokenizer.chat, None
    if chat is not None and "tool_calls" not in chat.source(with_tools="tools" in variables):
        messages = spelled_out(messages)
    for form in fitted(messages):
        try:
            return tokenizer.chat_text(form, **variables)
        except RequestError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def spelled_out(messages: Messages) -> Messages:
    """Return messages whose calls and results are text, for a template that knows no calls."""
    made: Messages = []
    for message in messages:
        content, calls = message.get("content"), message.get("tool_calls")
        if message.get("role") == "tool":
            message = {"role": "user", "content": f"<tool_response>\n{content or ''}\n</tool_response>"}
        elif calls:
            functions = [call["function"] for call in calls]
            named = [{name: each[name] for name in ("name", "arguments")} for each in functions]
            written = [HERMES.opens + json.dumps(each, ensure_ascii=False) + HERMES.closes for each in named]
            parts = [content, *written] if content else written
            message = {"role": message.get("role"), "content": HERMES.between.join(parts)}
        made.append(message)
    return made


def fitted(messages: Messages) -> Iterator[Messages]:
    """Yield the messages, then the same conversation as narrower templates take it, nearest first."""
    yield messages
    for change in (_one_call_a_turn, _one_message_a_turn, _without_system):
        changed = change(messages)
        if changed != messages:
            messages = changed
            yield messages


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
            made.append({**message, "tool_calls": [call]} | ({"content": None} if place else {}))
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


def _message(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    made = dict(message)
    if message.get("content") is not None:
        made["content"] = text_of(message["content"], f"{name}.content", "messages")
    elif message.get("role") == "assistant" and not message.get("tool_calls"):
        made["content"] = ""  # it said nothing, and most templates need a content
    if message.get("role") == "developer":  # the newer name of the system message
        made["role"] = "system"
    if message.get("tool_calls") is not None:
        made["tool_calls"] = _calls(message["tool_calls"], f"{name}.tool_calls")
    return made


def _calls(given: object, name: str) -> list[dict[str, Any]]:
    """Return the calls of an earlier reply; templates read arguments as an object."""
    if not isinstance(given, list):
        raise invalid("messages", f"{name} must be a list")
    calls = []
    for place, call in enumerate(given):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise invalid("messages", f"{name}[{place}] has no function with a name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                says = f"{name}[{place}] has arguments that are no JSON"
                raise invalid("messages", says) from None
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


TEXTS = {  # types of parts -> where their text is
    "input_text": "text", "output_text": "text", "refusal": "refusal",
}  # fmt: skip
REASONING_ID = "rs_"  # begins the ids of reasoning items
CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
RESULTS = ("function_call_output", "custom_tool_call_output")


def messages_of_items(items: list[dict[str, Any]]) -> Messages:
    """Return the messages of a conversation; what the assistant does in a turn is one."""
    messages: Messages = []
    for item in items:
        _add(messages, item)
    return [each for each in messages if not _is_thought(each)]


def _add(messages: Messages, item: dict[str, Any]) -> None:
    kind, last = str(item.get("type", "message")), messages[-1] if messages else {}
    if kind == "message":
        message = {"role": item.get("role"), "content": _texts(item.get("content"))}
        if message["role"] == "assistant" and _is_thought(last):
            last |= message
        else:
            messages.append(message)
    elif kind in CALLS:
        if last.get("role") != "assistant":
            messages.append(last := {"role": "assistant", "content": None})
        given = item.get(CALLS[kind], "{}")
        arguments = given if kind == "function_call" else json.dumps({"input": given})
        function = {"name": item.get("name"), "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(call)
    elif kind in RESULTS:
        text = _texts(item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        given = [part for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
        texts = [part["text"] for part in given if isinstance(part.get("text"), str)]
        if text := "\n".join(texts):  # otherwise it has none that can be read
            messages.append({"role": "assistant", "content": None, REASONING: text})
    elif kind == "item_reference":
        if not str(item.get("id")).startswith(REASONING_ID):
            says = f"input refers to the item {shortened(item.get('id'))}, and this server keeps no items"
            remedy = 'send the item itself, as clients do with "store": false'
            raise invalid("input", f"{says}; {remedy}")
    else:
        raise invalid("input", f"input items of type {shortened(kind)} are not supported")


def _is_thought(message: Mapping[str, Any]) -> bool:
    """Return whether a message is reasoning that nothing has followed yet."""
    return REASONING in message and message["content"] is None and "tool_calls" not in message


def _texts(content: Any) -> Any:
    """Return content with the parts of chat completions in place of this API's."""
    if not isinstance(content, list):
        return content
    return [
        {**part, "type": "text", "text": part.get(TEXTS[part["type"]])}
        if isinstance(part, dict) and str(part.get("type")) in TEXTS
        else part
        for part in content
    ]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A way in which models write their reasoning."""

    opens: str  # before it
    closes: str  # after it
    answer: tuple[str, str] = ("", "")  # around the answer after it
    sign: str = ""  # what a chat template contains that was made for it; by default the closing marker


# The first one counts whose sign a template has.
FORMS = (
    # https://huggingface.co/ibm-granite/granite-3.2-8b-instruct
    ReasoningFormat("Here is my thought process:", "Here is my response:"),
    # https://huggingface.co/ibm-granite/granite-3.3-8b-instruct
    ReasoningFormat("<think>", "</think>", ("<response>", "</response>"), sign="<response></response>"),
    # https://huggingface.co/Qwen/Qwen3-8B, DeepSeek's R1 and its distilled models, SmolLM3, and many more
    ReasoningFormat("<think>", "</think>"),
    ReasoningFormat("[THINK]", "[/THINK]"),  # https://huggingface.co/mistralai/Magistral-Small-2507
    # https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct
    ReasoningFormat("<seed:think>", "</seed:think>"),
)
SWITCHES = ("enable_thinking", "thinking")  # names of the variable that turns reasoning on or off
EFFORT, NO_EFFORT = "reasoning_effort", "none"


def thinking_after(
    tokenizer: Tokenizer, prompt: str, begun: str | None = None, *, stops: bool = False
) -> ThinkingMarkers | None:
    """Return how the reply to a prompt marks its thinking; None where it has none, or none any more."""
    source = "" if tokenizer.chat is None else "\n".join(tokenizer.chat.templates.values())
    shown = (form for form in FORMS if (form.sign or form.closes) in source)
    known = (form for form in FORMS if not form.sign and tokenizer.inner.token_to_id(form.closes) is not None)
    form = next(shown, None) or next(known, None)
    if form is None:
        return None
    end = prompt.rstrip()
    opened, closed = end.endswith(form.opens), end.endswith(form.closes)
    if begun:
        opened, closed = begun.lstrip().startswith(form.opens), form.closes in begun
    if closed or (begun and not opened):
        return None
    return ThinkingMarkers(form.opens, form.closes, opened, stops, form.answer)


def template_variables(
    chat: ChatTemplate | None,
    given: Mapping[str, Any],
    *,
    effort: str | None,
    thinks: bool | None,
    prefers: bool | None = None,
    with_tools: bool,
) -> tuple[dict[str, Any], list[str]]:
    """Return the variables for the chat template, and the names of the fields that it does not read.

    An effort "none" turns the reasoning off under a template that has a switch for it. What a request gives
    by its variable's own name counts first.
    """
    read = frozenset[str]() if chat is None else chat.variables(with_tools=with_tools)
    unread = set() if chat is None else set(chat.unread(given, with_tools=with_tools))
    variables = {name: value for name, value in given.items() if name not in unread}
    ignored = [f"chat_template_kwargs.{name}" for name in given if name in unread]
    switch = next((name for name in SWITCHES if name in read), None)
    if thinks is not None and switch is None:
        ignored.append(SWITCHES[0])
    if switch is not None:
        off = False if effort == NO_EFFORT else None
        chosen = next((each for each in (thinks, prefers, off) if each is not None), None)
        if chosen is not None:
            variables.setdefault(switch, chosen)
    if effort is not None and EFFORT in read and not (effort == NO_EFFORT and switch is not None):
        variables.setdefault(EFFORT, effort)
    return variables, ignored
