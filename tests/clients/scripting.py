"""Scripts: what a model of random weights says to a coding agent, one step for each of its requests.

A step narrows the request on its way to the server: the model must call one tool with given arguments, or say one text.
All else, from the grammar to the stream, is the real server's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

GENERATING = ("/chat/completions", "/messages", "/responses")
FEW = 16  # tokens of replies that the script does not know


class Call(NamedTuple):
    tool: str
    arguments: dict[str, Any]


class Say(NamedTuple):
    text: str


@dataclass
class Script:
    steps: list[
        Call | Say
    ]  # a request takes the next one, if it has the tool, or any tools where it is a text
    with_tools: bool = True  # requests without tools are beside the conversation, such as those for a title
    seen: list[tuple[str, dict[str, Any], int]] = field(
        default_factory=list
    )  # path, body as sent, and status

    def narrowed(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        names = [_function(tool).get("name") for tool in body.get("tools") or ()]
        length = "max_output_tokens" if path.endswith("/responses") else "max_tokens"
        if not self.steps or (self.with_tools and not names):
            return body | {length: FEW}
        step = self.steps[0]
        if isinstance(step, Call) and step.tool not in names:
            return body | {length: FEW}
        del self.steps[0]
        if isinstance(step, Say):
            spoken = {"type": "none"} if path.endswith("/messages") else "none"
            return body | ({"tool_choice": spoken} if names else {}) | {"guided_choice": [step.text]}
        tools = [_narrowed(tool, step, path) for tool in body["tools"]]
        return body | {"tools": tools, "tool_choice": _choice(step.tool, path)}


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    inner = tool.get("function")
    return inner if isinstance(inner, dict) else tool


def _narrowed(tool: dict[str, Any], step: Call, path: str) -> dict[str, Any]:
    function = _function(tool)
    if function.get("name") != step.tool:
        return tool
    schema = {
        "type": "object", "properties": {name: {"const": value} for name, value in step.arguments.items()},
        "required": [*step.arguments], "additionalProperties": False,
    }  # fmt: skip
    name = "input_schema" if path.endswith("/messages") else "parameters"
    narrow = function | {name: schema, "strict": True}
    return narrow if function is tool else tool | {"function": narrow}


def _choice(tool: str, path: str) -> dict[str, Any]:
    if path.endswith("/messages"):
        return {"type": "tool", "name": tool}
    if path.endswith("/responses"):
        return {"type": "function", "name": tool}
    return {"type": "function", "function": {"name": tool}}


class Scripted:
    def __init__(self, app: ASGIApp, script: Script) -> None:
        self.app, self.script = app, script

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith(GENERATING):
            await self.app(scope, receive, send)
            return
        sent = b""
        while True:
            message = await receive()
            sent += message.get("body", b"")
            if not message.get("more_body"):
                break
        body = json.loads(sent)
        narrowed = json.dumps(self.script.narrowed(scope["path"], body)).encode()
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        headers.append((b"content-length", str(len(narrowed)).encode()))
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": narrowed, "more_body": False}

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.script.seen.append((scope["path"], body, message["status"]))
            await send(message)

        await self.app({**scope, "headers": headers}, replay, noted)
