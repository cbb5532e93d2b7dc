"""Shapes: the replies of the API by the path of their requests."""

from __future__ import annotations

from foredraft.serve.completions import ChatReply, CompletionReply
from foredraft.serve.messages import MessageReply
from foredraft.serve.replies import Reply
from foredraft.serve.responses import ResponseReply

__all__ = ["SHAPES"]

SHAPES: dict[str, type[Reply]] = {
    "/v1/chat/completions": ChatReply,
    "/v1/completions": CompletionReply,
    "/v1/messages": MessageReply,
    "/v1/responses": ResponseReply,
}
