"""The descriptions of the server and of its model, its page, and its routes as OpenAPI.

The page holds no secret, so it asks for no key. It loads nothing from other origins, and its content policy
lets a browser run no other script, whatever a model or a prompt writes. The app reads bodies itself, so each
route is described here; tests hold replies against the document.
"""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from pydantic import TypeAdapter

from foredraft.kinds.tables import DRAFTERS, POLICIES, PREDICTION
from foredraft.pages.trace import ORIGINS, stylesheet
from foredraft.serve import reply_types
from foredraft.serve.bodies import SHAPES
from foredraft.serve.generations import Model
from foredraft.serve.tokens import READERS


def card(model: Model, name: str) -> dict[str, Any]:
    return {
        "id": name, "object": "model", "created": 0, "owned_by": "foredraft",
        "max_model_len": model.llm.max_length,
    }  # fmt: skip


def capabilities(model: Model) -> dict[str, Any]:
    llm, drafters = model.llm, model.llm.loaded.engine.drafters
    return {
        "model": model.names[0], "max_model_len": llm.max_length, "max_batch": model.rows,
        "deterministic": llm.deterministic, "weights": llm.weights, "lora": [*llm.lora],
        "drafters": {name: {"lossless": DRAFTERS[name].lossless} for name in drafters},
        "default_drafter": llm.default_drafter,
        "policy": llm.loaded.engine.policy.name, "policies": list(POLICIES),
        "chat": model.chats, "tools": model.chats, "prediction": PREDICTION in drafters,
        "constraints": ["ban", "regex", "json_schema", "json_object", "grammar"] if llm.tokenizer else [],
        "streams": ["sse", "text", "websocket"],
    }  # fmt: skip


PAGE_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; object-src 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a browser asks whether its copy is still the server's
}


def add_page(app: FastAPI) -> None:
    """Add the page as `/`, and as `/page/NAME` its files and those that it shares with the trace page."""
    static = files("foredraft.serve") / "static"
    contents = {file.name: file.read_bytes() for file in static.iterdir() if file.is_file()}
    contents["rounds.js"] = (files("foredraft.pages") / "rounds.js").read_bytes()
    contents["tokens.css"] = stylesheet().encode()
    meanings = {name: origin.meaning for name, origin in ORIGINS.items()}
    contents["origins.js"] = f"export const ORIGINS = {json.dumps(meanings)};\n".encode()
    for name, content in contents.items():
        path = "/" if name == "index.html" else f"/page/{name}"
        _add_file(app, path, content, PAGE_TYPES[name.rpartition(".")[2]])


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": tag}

    async def answer(request: Request) -> Response:
        known = request.headers.get("if-none-match", "").replace("W/", "").split(",")
        if tag in [each.strip() for each in known]:  # the browser's copy is good
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    app.router.add_route(path, answer, methods=["GET"])


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


def _header(description: str, **more: bool) -> dict[str, Any]:
    return {"description": description, "schema": {"type": "string"}, **more}


UNKNOWN = "Names of unknown fields and of variables that no template reads, which were ignored."
LISTED = {"x-ignored-fields": _header(UNKNOWN)}
NOTES = LISTED | {
    "x-ignored-tools": _header("Tools that are no functions, which the model does not see."),
    "x-unenforced-keywords": _header("Places of keywords of schemas that the text is not constrained by."),
}
REQUEST_ID = _header("The request's id.", required=True)
RUN = NOTES | {
    "x-broken-keywords": _header("Those of them that a call breaks, in a whole reply."),
    "x-request-id": REQUEST_ID,
}
SCHEME = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
BEARER, EITHER = ("bearer",), ("bearer", "x-api-key")
TYPES: dict[str, Any] = {}  # all types that descriptions refer to, by name


def _described(
    reply: Any,
    refusals: dict[int, str],
    *,
    body: Any = None,
    event: Any = None,
    text: bool = False,
    errors: tuple[Any, ...] = (reply_types.Error,),
    headers: dict[str, Any] | None = None,
    schemes: tuple[str, ...] = BEARER,
) -> dict[str, Any]:
    """Return the description of a route; with `text`, a stream ends in [DONE] and may be plain text."""
    plain: dict[str, Any] = {"schema": {"type": "string"}}
    content: dict[str, Any] = (
        {"text/plain": plain} if reply is str else {"application/json": {"schema": _reference(reply)}}
    )
    if event is not None:  # a stream, whose data have a type unless they are the last ones
        typed = {"contentMediaType": "application/json", "contentSchema": _reference(event)}
        data = {"type": "string", "anyOf": [typed, *([{"const": "[DONE]"}] if text else [])]}
        fields = {"event": {"type": "string"}, "data": data}
        content["text/event-stream"] = {
            "itemSchema": {"type": "object", "required": ["data"], "properties": fields}
        }
    if text:
        content["text/plain"] = plain
    done = {"description": "The reply.", "content": content, "headers": headers or {}}
    wrong = {"application/json": {"schema": {"anyOf": [_reference(error) for error in errors]}}}
    refused = {str(code): {"description": why, "content": wrong} for code, why in sorted(refusals.items())}
    made: dict[str, Any] = {"responses": {"200": done, **refused}}
    if body is not None:
        read = {"application/json": {"schema": _reference(body)}}
        made["requestBody"] = {"required": True, "content": read}
    if schemes:
        made["security"] = [{scheme: []} for scheme in schemes]
    return made


def _reference(type_: Any) -> dict[str, str]:
    TYPES[type_.__name__] = type_
    return {"$ref": f"#/components/schemas/{type_.__name__}"}


ROUTES = {
    "/health": _described(reply_types.Health, STATE, schemes=()),
    "/ready": _described(reply_types.Health, STATE, schemes=()),
    "/metrics": _described(str, OPEN | {401: KEYED[401]}),
    "/version": _described(reply_types.Version, OPEN, schemes=()),
    "/v1/models": _described(reply_types.ModelList, KEYED, schemes=EITHER),
    "/v1/models/{name}": _described(reply_types.ModelCard, NAMED, schemes=EITHER),
    "/v1/capabilities": _described(reply_types.Capabilities, KEYED, schemes=EITHER),
    "/tokenizer_info": _described(reply_types.TokenizerInfo, KEYED | {400: "The model has no tokenizer."}),
    **{
        path: _described(
            each.type, READS, body=each.request, errors=each.errors,
            headers=NOTES if each.either else LISTED, schemes=EITHER if each.either else BEARER,
        )
        for path, each in READERS.items()
    },
    **{
        path: _described(
            each.types[0], RUNS, body=each.request, event=each.types[1], text=bool(each.done),
            errors=each.errors, schemes=EITHER if each.own_headers else BEARER,
            headers=RUN | ({"request-id": REQUEST_ID} if each.own_headers else {}),
        )
        for path, each in SHAPES.items()
    },
}  # fmt: skip


def document(app: FastAPI, *, keys: bool) -> dict[str, Any]:
    made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for path, operations in made["paths"].items():
        for operation in operations.values():
            # instead of FastAPI's, which knows neither bodies nor errors of this app
            operation |= ROUTES[path]
            if not keys:
                operation.pop("security", None)
    adapters: list[Any] = [(each, "validation", TypeAdapter(each)) for each in TYPES.values()]
    _, schemas = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")
    made["components"] = {"schemas": schemas["$defs"]} | ({"securitySchemes": SCHEME} if keys else {})
    return made
