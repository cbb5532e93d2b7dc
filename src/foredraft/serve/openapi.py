"""The descriptions of the server and of its model, its page, and its routes as OpenAPI.

The page holds no secret, so it asks for no key. It loads nothing from other origins, and its content policy
lets a browser run no other script, whatever a model or a prompt writes. The app reads bodies itself, so each
route is described here; tests hold replies against the document.
"""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from foredraft.kinds.tables import DRAFTERS, POLICIES, PREDICTION
from foredraft.pages.origins import ORIGINS, stylesheet
from foredraft.serve.bodies import SHAPES
from foredraft.serve.problems import Error
from foredraft.serve.replies import Reply
from foredraft.serve.state import Model
from foredraft.serve.tokens import COUNTERS, DetokenizeRequest, Text, TokenizeRequest, TokenizerInfo, Tokens


class Health(TypedDict, closed=True):
    status: Literal["ok"]


class Version(TypedDict, closed=True):
    version: str


class ModelCard(TypedDict, closed=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict, closed=True):
    object: Literal["list"]
    data: list[ModelCard]


class DrafterTraits(TypedDict, closed=True):
    lossless: bool


class Capabilities(TypedDict, closed=True):
    """What the model and the server can do."""

    model: str
    max_model_len: int
    max_batch: int
    deterministic: bool
    weights: str | None
    lora: list[str]
    drafters: dict[str, DrafterTraits]
    default_drafter: str | None
    policy: str
    policies: list[str]
    chat: bool
    tools: bool
    prediction: bool
    constraints: list[str]
    streams: list[str]


def card(model: Model, name: str) -> ModelCard:
    return {
        "id": name, "object": "model", "created": 0, "owned_by": "foredraft",
        "max_model_len": model.llm.max_length,
    }  # fmt: skip


def capabilities(model: Model) -> Capabilities:
    llm = model.llm
    return {
        "model": model.names[0], "max_model_len": llm.max_length, "max_batch": model.rows,
        "deterministic": llm.deterministic, "weights": llm.weights, "lora": [*llm.lora],
        "drafters": {name: {"lossless": DRAFTERS[name].lossless} for name in model.drafters},
        "default_drafter": llm.default_drafter,
        "policy": llm.loaded.engine.policy.name, "policies": list(POLICIES),
        "chat": model.chats, "tools": model.chats, "prediction": PREDICTION in model.drafters,
        "constraints": ["ban", "regex", "json_schema", "json_object", "grammar"] if llm.tokenizer else [],
        "streams": ["sse", "text", "websocket"],
    }  # fmt: skip


PAGE_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; object-src 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a browser asks whether its copy is still the server's
}


def add_page(app: FastAPI) -> None:
    """Add the routes of the page: `/`, and `/page/NAME` for its files."""
    for name, content in _files().items():
        _add(
            app,
            "/" if name == "index.html" else f"/page/{name}",
            content,
            PAGE_TYPES[name.rpartition(".")[2]],
        )


def _add(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": tag}

    async def answer(request: Request) -> Response:
        known = request.headers.get("if-none-match", "").replace("W/", "").split(",")
        if tag in [each.strip() for each in known]:  # the browser's copy is good
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    app.router.add_route(path, answer, methods=["GET"])


def _files() -> dict[str, bytes]:
    """Return all files by name: those of the page, and what it shares with the trace page."""
    contents = {
        file.name: file.read_bytes()
        for file in (files("foredraft.serve") / "static").iterdir()
        if file.is_file()
    }
    contents["rounds.js"] = (files("foredraft.pages") / "rounds.js").read_bytes()
    contents["tokens.css"] = stylesheet().encode()
    meanings = {name: origin.meaning for name, origin in ORIGINS.items()}
    contents["origins.js"] = f"export const ORIGINS = {json.dumps(meanings)};\n".encode()
    return contents


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


def _text_header(description: str) -> dict[str, Any]:
    return {"description": description, "schema": {"type": "string"}}


REQUEST_ID = _text_header("The request's id.") | {"required": True}
LISTED = {
    "x-ignored-fields": _text_header(
        "Names of unknown fields and of variables that no template reads, which were ignored."
    )
}
NOTES = LISTED | {
    "x-ignored-tools": _text_header("Tools that are no functions, which the model does not see."),
    "x-unenforced-keywords": _text_header(
        "Places of keywords of schemas that the text is not constrained by."
    ),
}
BROKEN = {"x-broken-keywords": _text_header("Those of them that a call breaks, in a whole reply.")}
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
    """Return the description of a route; with `text`, a stream ends in [DONE] and may be plain text."""
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
    return {"type": "object", "required": ["data"], "properties": {"event": {"type": "string"}, "data": data}}


def _reference(type_: Any) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{type_.__name__}"}


def _shape(shape: type[Reply]) -> dict[str, Any]:
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
