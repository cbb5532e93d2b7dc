"""OpenAPI: the routes of the app, for programs such as generators of clients, and testers.

The app reads bodies itself, so each route is described here. The schemas come from the types that check the
bodies, and from those that the replies are built of. Tests hold replies against the document.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from foredraft.serve.about import Capabilities, Health, ModelCard, ModelList, Version
from foredraft.serve.counting import COUNTERS
from foredraft.serve.problems import Error
from foredraft.serve.replies import Reply
from foredraft.serve.shapes import SHAPES
from foredraft.serve.tokens import DetokenizeRequest, Text, TokenizeRequest, TokenizerInfo, Tokens

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
LISTED = {
    "x-ignored-fields": {
        "description": "Names of unknown fields and of variables that no template reads, which were ignored.",
        "schema": {"type": "string"},
    }
}  # fmt: skip
NOTES = LISTED | {
    "x-ignored-tools": {
        "description": "Tools that are no functions, which the model does not see.",
        "schema": {"type": "string"},
    },
    "x-unenforced-keywords": {
        "description": "Places of keywords of schemas that the text is not constrained by.",
        "schema": {"type": "string"},
    },
}
BROKEN = {
    "x-broken-keywords": {
        "description": "Those of them that a call breaks, in a whole reply.", "schema": {"type": "string"}
    }
}  # fmt: skip
SCHEME = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


EITHER = ("bearer", "x-api-key")


def _described(
    reply: Any,
    refusals: dict[int, str],
    *,
    body: Any = None,
    event: Any = None,
    text: bool = False,
    errors: tuple[Any, ...] = (Error,),
    headers: dict[str, Any] | None = None,
    schemes: tuple[str, ...] = ("bearer",),
) -> dict[str, Any]:
    """Return the description of a route.

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


def _shape(shape: type[Reply]) -> dict[str, Any]:
    """Return the description of the route of a shape."""
    ids = ["x-request-id", *(["request-id"] if shape.own_headers else [])]
    return _described(
        shape.types[0], RUNS, body=shape.request, event=shape.types[1], text=bool(shape.done),
        errors=shape.errors, headers=NOTES | BROKEN | dict.fromkeys(ids, REQUEST_ID),
        schemes=EITHER if shape.own_headers else ("bearer",),
    )  # fmt: skip


ROUTES = {
    "/health": _described(Health, STATE, schemes=()),
    "/ready": _described(Health, STATE, schemes=()),
    "/metrics": _described(str, OPEN | {401: KEYED[401]}),
    "/version": _described(Version, OPEN, schemes=()),
    "/v1/models": _described(ModelList, KEYED, schemes=EITHER),
    "/v1/models/{name}": _described(ModelCard, NAMED, schemes=EITHER),
    "/v1/capabilities": _described(Capabilities, KEYED, schemes=EITHER),
    "/tokenize": _described(Tokens, READS, body=TokenizeRequest, headers=LISTED),
    "/detokenize": _described(Text, READS, body=DetokenizeRequest, headers=LISTED),
    "/tokenizer_info": _described(TokenizerInfo, KEYED | {400: "The model has no tokenizer."}),
    **{path: _shape(shape) for path, shape in SHAPES.items()},
    **{
        path: _described(
            each.type, READS, body=each.request, errors=each.errors, headers=NOTES, schemes=EITHER
        )
        for path, each in COUNTERS.items()
    },
}
TYPES = (
    Capabilities, Error, Health, ModelCard, ModelList, Text, TokenizerInfo, Tokens, Version, TokenizeRequest,
    DetokenizeRequest,
    *(each for shape in SHAPES.values() for each in (shape.request, *shape.types, *shape.errors)),
    *(each for counter in COUNTERS.values() for each in (counter.request, counter.type)),
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
