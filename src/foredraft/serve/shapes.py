"""Shapes: the replies of the API by the path of their requests."""

from __future__ import annotations

from foredraft.serve.completions import ChatReply, CompletionReply
from foredraft.serve.messages import MessageReply
from foredraft.serve.replies import Reply
from foredraft.serve.responses import ResponseReply

__all__ = ["SHAPES", "SHORT"]

SHAPES: dict[str, type[Reply]] = {
    "/v1/chat/completions": ChatReply,
    "/v1/completions": CompletionReply,
    "/v1/messages": MessageReply,
    "/v1/responses": ResponseReply,
}
# Paths of clients whose address of the server lacks /v1 -> those that they mean.
SHORT = {"/chat/completions": "/v1/chat/completions", "/completions": "/v1/completions"}
