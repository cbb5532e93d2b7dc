"""Conversation: messages of the API, and items of POST /v1/responses -> messages for a chat template, and how
the reply to them marks its thinking.

The server keeps no state, so an item that names an earlier response's is refused, unless it names reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from foredraft.decode.thinking import ThinkingMarkers
from foredraft.errors import shortened
from foredraft.model.chat import ChatTemplate
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve.forms import Messages
from foredraft.serve.problems import invalid

# The key of an earlier reply's reasoning, which templates of models that reason read; others pass over it.
REASONING = "reasoning_content"


def messages_of(given: Messages) -> Messages:
    """Return messages whose content is text and whose calls have objects as arguments."""
    if not given:
        raise invalid("messages", "messages is empty")
    made = [_message(message, f"messages[{place}]") for place, message in enumerate(given)]
    results = set[str]()  # ids of those that follow one message
    names: dict[object, str] = {}  # of the calls of that message, by id
    for place, message in enumerate(made):
        if message.get("role") == "tool":
            id = message.get("tool_call_id")
            _check_single(id, results, f"messages[{place}].tool_call_id")
            if id in names:  # some templates show it, or refuse a result without it
                message.setdefault("name", names[id])
            continue
        results, names, calls = set(), {}, set[str]()
        for index, call in enumerate(message.get("tool_calls") or ()):
            _check_single(call.get("id"), calls, f"messages[{place}].tool_calls[{index}].id")
            if isinstance(id := call.get("id"), str):
                names[id] = call["function"]["name"]
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


def _message(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    made = {key: value for key, value in message.items() if key != "tool_calls"}
    if message.get("content") is not None:
        made["content"] = text_of(message["content"], f"{name}.content", "messages")
    elif message.get("role") != "assistant" or not message.get("tool_calls"):
        made["content"] = ""  # it said nothing, and most templates need a content
    if message.get("role") == "developer":  # the newer name of the system message
        made["role"] = "system"
    if message.get("tool_calls"):  # an empty list is as none
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
        if isinstance(arguments, str):  # otherwise as they are, such as those that a limit has cut
            with suppress(ValueError, RecursionError):
                read = json.loads(arguments or "{}")
                arguments = read if isinstance(read, dict) else arguments
        elif not isinstance(arguments, Mapping):
            arguments = json.dumps(arguments)
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


FINAL = "<|channel|>final<|message|>"
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
    ReasoningFormat("<|channel>thought", "<channel|>"),  # https://huggingface.co/google/gemma-4-E4B-it
    # the channels of https://github.com/openai/harmony
    ReasoningFormat(
        "<|channel|>analysis<|message|>",
        f"<|end|><|start|>assistant{FINAL}",
        (FINAL, ""),
        sign="<|channel|>analysis<|message|>",
    ),
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
