"""Counting: the tokens of a prompt, without generating, in the shapes of both APIs.

https://platform.claude.com/docs/en/api/messages-count-tokens,
https://platform.openai.com/docs/api-reference/responses/input-tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import TypedDict

from foredraft.serve import messages, responses
from foredraft.serve.messages import CountTokensRequest, MessageError
from foredraft.serve.problems import Error
from foredraft.serve.requests import Body, ChatRequest
from foredraft.serve.responses import ResponsesRequest

__all__ = ["COUNTERS", "Counter", "InputTokens", "MessageTokens"]


class MessageTokens(TypedDict, closed=True):
    """The reply of POST /v1/messages/count_tokens."""

    input_tokens: int


class InputTokens(TypedDict, closed=True):
    """The reply of POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


@dataclass(frozen=True, slots=True)
class Counter:
    """A route that counts.

    Attributes:
        name: Of the route.
        request: The type of its body.
        type: The type of its reply.
        errors: The types of a refusal's body.
        read: Returns the chat of a body.
        reply: Returns the reply for a number of tokens.
    """

    name: str
    request: type[Body]
    type: Any
    errors: tuple[Any, ...]
    read: Callable[[dict[str, Any]], ChatRequest]
    reply: Callable[[int], MessageTokens | InputTokens]


def _of_messages(tokens: int) -> MessageTokens:
    return {"input_tokens": tokens}


def _of_responses(tokens: int) -> InputTokens:
    return {"object": "response.input_tokens", "input_tokens": tokens}


COUNTERS = {
    "/v1/messages/count_tokens": Counter(
        "count_tokens", CountTokensRequest, MessageTokens, (MessageError, Error),
        lambda body: messages.chat_request(CountTokensRequest.read(body)), _of_messages,
    ),
    "/v1/responses/input_tokens": Counter(
        "count_input_tokens", ResponsesRequest, InputTokens, (Error,),
        lambda body: responses.chat_request(ResponsesRequest.read(body)), _of_responses,
    ),
}  # fmt: skip
