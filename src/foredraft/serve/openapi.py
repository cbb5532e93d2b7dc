"""OpenAPI: what the app says of its routes. The app reads bodies itself, so each route is described here.

The document is for programs: generators of clients, and testers. Its schemas come from the types that check
the bodies (requests.py and its neighbours), and from those that tests hold the replies against (shapes.py).
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from foredraft.serve import shapes
from foredraft.serve.messages import MessagesRequest
from foredraft.serve.requests import ChatRequest, CompletionRequest
from foredraft.serve.responses import ResponsesRequest
from foredraft.serve.tokens import DetokenizeRequest, TokenizeRequest

__all__ = ["document"]

# Why a route refuses a request, by status.
OPEN = {403: "A page of another origin may not call.", 500: "The server failed."}
STATE = OPEN | {503: "The model is being loaded or could not be, or the server shuts down."}
KEYED = STATE | {401: "The API key is missing or wrong."}
NAMED = KEYED | {404: "The model has another name."}
READS = NAMED | {
    400: "The body is wrong, or a field cannot be honoured; `param` names it.",
    413: "The body is too large.",
}
RUNS = READS | {
    429: "The key has too many requests that run or wait.",
    499: "The client closed the connection.",
    503: "The model is being loaded, or the server is full or shuts down.",
}
REQUEST_ID = {"description": "The request's id.", "required": True, "schema": {"type": "string"}}
IGNORED = {"description": "Names of unknown fields, which were ignored.", "schema": {"type": "string"}}
SCHEME = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def _described(
    reply: Any,
    refusals: dict[int, str],
    *,
    body: Any = None,
    event: Any = None,
    text: bool = False,
    errors: tuple[Any, ...] = (shapes.Error,),
    headers: dict[str, Any] | None = None,
    schemes: tuple[str, ...] = ("bearer",),
) -> dict[str, Any]:
    """Return what the document says of a route.

    Args:
        reply: Type of a whole reply; `str` is plain text.
        refusals: Statuses of errors, each with its reason.
        body: Type of the request's body.
        event: Type of the data of each event of a stream.
        text: A stream may be plain text, too; one of events ends with `[DONE]`.
        errors: Types of an error's body.
        headers: Of a reply, beside those of HTTP.
        schemes: How an API key may come; none where the route asks for none.
    """
    plain: dict[str, Any] = {"schema": {"type": "string"}}
    content = {"text/plain": plain} if reply is str else {"application/json": {"schema": _reference(reply)}}
    if event is not None:
        content["text/event-stream"] = {"itemSchema": _item(event, last="[DONE]" if text else None)}
    if text:
        content["text/plain"] = plain
    done = {"description": "The reply.", "content": content, "headers": headers or {}}
    wrong = {"application/json": {"schema": {"anyOf": [_reference(error) for error in errors]}}}
    refused = {
        str(status): {"description": why, "content": wrong} for status, why in sorted(refusals.items())
    }
    made: dict[str, Any] = {"responses": {"200": done, **refused}}
    if body is not None:
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _reference(body)}},
        }
    if schemes:
        made["security"] = [{scheme: []} for scheme in schemes]
    return made


def _item(event: Any, last: str | None) -> dict[str, Any]:
    """Return the schema of an event whose data has a type, unless they are `last`."""
    typed = {"contentMediaType": "application/json", "contentSchema": _reference(event)}
    data = {"type": "string", "anyOf": [typed, *([] if last is None else [{"const": last}])]}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"event": {"type": "string"}, "data": data},
    }


def _reference(type_: Any) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{type_.__name__}"}


_LISTED = {"x-ignored-fields": IGNORED}
_NAMED = _LISTED | {"x-request-id": REQUEST_ID}
_DIALECT: dict[str, Any] = {
    "headers": _NAMED | {"request-id": REQUEST_ID}, "schemes": ("bearer", "x-api-key"),
}  # fmt: skip
ROUTES = {
    "/health": _described(shapes.Health, STATE, schemes=()),
    "/ready": _described(shapes.Health, STATE, schemes=()),
    "/metrics": _described(str, OPEN | {401: KEYED[401]}),
    "/version": _described(shapes.Version, OPEN, schemes=()),
    "/v1/models": _described(shapes.ModelList, KEYED),
    "/v1/models/{name}": _described(shapes.ModelCard, NAMED),
    "/v1/capabilities": _described(shapes.Capabilities, KEYED),
    "/tokenize": _described(shapes.Tokens, READS, body=TokenizeRequest, headers=_LISTED),
    "/detokenize": _described(shapes.Text, READS, body=DetokenizeRequest, headers=_LISTED),
    "/v1/chat/completions": _described(
        shapes.Chat, RUNS, body=ChatRequest, event=shapes.ChatChunk, text=True, headers=_NAMED
    ),
    "/v1/completions": _described(
        shapes.Completion, RUNS, body=CompletionRequest, event=shapes.CompletionChunk, text=True,
        headers=_NAMED,
    ),
    "/v1/responses": _described(
        shapes.Response, RUNS, body=ResponsesRequest, event=shapes.ResponseEvent, **_DIALECT
    ),
    "/v1/messages": _described(
        shapes.Message, RUNS, body=MessagesRequest, event=shapes.MessageEvent,
        errors=(shapes.MessageError, shapes.Error),  # the second one before the route is reached
        **_DIALECT,
    ),
}  # fmt: skip
TYPES = (
    ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, TokenizeRequest, DetokenizeRequest,
    *(getattr(shapes, name) for name in shapes.__all__),
)  # fmt: skip


def document(app: FastAPI, *, keys: bool) -> dict[str, Any]:
    """Return the document of an app.

    Args:
        app: The app, with all its routes.
        keys: The app asks for API keys.
    """
    made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for path, operations in made["paths"].items():
        for operation in operations.values():
            # instead of FastAPI's, which knows neither bodies nor errors of this app
            operation |= ROUTES[path]
            if not keys:
                operation.pop("security", None)
    adapters: list[tuple[Any, Literal["validation"], TypeAdapter[Any]]]
    adapters = [(each, "validation", TypeAdapter(each)) for each in TYPES]
    _, schemas = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")
    made["components"] = {"schemas": schemas["$defs"]} | ({"securitySchemes": SCHEME} if keys else {})
    return made
