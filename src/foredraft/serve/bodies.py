"""Bodies of requests, which are bounded before they are read whole; answers to them; pages of other sites get
none.

What all bodies take together is shared among addresses. A page may make its own host name lead to this
machine (DNS rebinding), so a server that only this machine can reach looks at the name that it was called
by, too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import Any, NoReturn
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.errors import shortened
from foredraft.serve.completions import ChatReply, CompletionReply
from foredraft.serve.limits import Bodies
from foredraft.serve.logs import current
from foredraft.serve.messages import MessageReply, error_body
from foredraft.serve.offload import without_collection
from foredraft.serve.problems import Problem
from foredraft.serve.replies import Reply
from foredraft.serve.responses import ResponseReply

SHAPES: dict[str, type[Reply]] = {
    "/v1/chat/completions": ChatReply,
    "/v1/completions": CompletionReply,
    "/v1/messages": MessageReply,
    "/v1/responses": ResponseReply,
}
# Paths of clients whose address of the server lacks /v1 -> those that they mean.
SHORT = {"/chat/completions": "/v1/chat/completions", "/completions": "/v1/completions"}

MESSAGES = "/v1/messages"  # whose errors, and those of all paths below it, have a shape of their own


def answer(problem: Problem, path: str) -> JSONResponse:
    body = error_body(problem) if f"{path}/".startswith(f"{MESSAGES}/") else problem.body
    return JSONResponse(body, problem.status, headers=problem.headers)


class KnownOrigins:
    """ASGI middleware that refuses requests and WebSockets of browsers from other origins.

    A browser sends such a request even where its page may not read the answer, and WebSockets know no CORS.
    Programs send no `Origin`.
    """

    def __init__(self, app: ASGIApp, known: Sequence[str], *, local: bool = False) -> None:
        self._app, self._known, self._local = app, known, local
        self._hosts = {urlsplit(origin).netloc for origin in known}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stranger = scope["type"] in ("http", "websocket") and self._stranger(Headers(scope=scope))
        if not stranger:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": f"{stranger} may not call"})
        else:
            message = f"{stranger} may not call; the server's option --cors names the origins that may"
            await answer(Problem(403, message), scope["path"])(scope, receive, send)

    def _stranger(self, headers: Headers) -> str | None:
        """Return who may not call; None where the caller may."""
        host, origin = headers.get("host", ""), headers.get("origin")  # browsers always send a host
        # a name may lead here from anywhere (DNS rebinding)
        own = [f"http://{host}", f"https://{host}"] if _is_address(host) else ["http://", "https://"]
        if origin is not None and "*" not in self._known and origin not in (*self._known, *own):
            return "this origin"
        if self._local and host and not _is_address(host) and not {host, "*"} & {*self._hosts, *self._known}:
            return f"a page of {shortened(host)}"
        return None


def is_local(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on an address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _is_address(host: str) -> bool:
    """Return whether a `Host` header names this machine by an address, or as localhost."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ip_address(name))
    except ValueError:  # no address, or no host at all
        return False


MORE_BODIES = 64  # of the largest size that may be held beside those of the rows
BYTES_OF_TOKEN = 32  # that a body may have: a token is 4 of plain text, up to 24 where text is escaped
# Lists, objects and keys of a body: one for each token that it may have, and at least MIN_PARTS, because
# parsing holds the interpreter for a microsecond for each. Other values, such as token ids, take a tenth.
MIN_PARTS = 64 << 10
VALUES_OF_PART = 4
PIECE = 64 << 10  # characters that are looked through at a time, while other threads wait
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # the escape of half a surrogate pair


def json_object(data: bytes | str, most: int) -> dict[str, Any]:
    """Return what a body of JSON holds; raise Problem where it is no object, or has too many parts."""

    def finite(number: str) -> float:
        """Return a number; one that is too large would become infinite, which no reply could repeat."""
        if not math.isfinite(found := float(number)):
            raise ValueError(f"{shortened(number)} is too large for a number")
        return found

    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number of JSON")

    try:
        text = data if isinstance(data, str) else data.decode(json.detect_encoding(data))
        _check_parts(text, max(MIN_PARTS, most // BYTES_OF_TOKEN))
        with without_collection():
            found = json.loads(text, parse_constant=refuse_constant, parse_float=finite)
        if SURROGATE.search(text):  # a whole pair is a character; half of one is no text
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeError as error:
        problem = f"this is not JSON in UTF-8 (invalid at {error.start})"  # type: ignore[attr-defined]
        raise Problem(400, problem, code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"this is not JSON ({error})", code="invalid_json") from None
    if not isinstance(found, dict):
        raise Problem(400, "this is JSON, but not an object", code="invalid_json")
    return found


def _check_parts(text: str, most: int) -> None:
    """Check how many lists, objects and keys a text of JSON has, and how many values, before it is parsed."""

    def marks(text: str) -> tuple[int, int]:
        return sum(map(text.count, "[{:")), text.count(",")

    parts, values = marks(text)
    if parts <= most and values <= VALUES_OF_PART * most:  # though those in strings count, too
        return
    parts = values = 0
    inside = False  # of a string
    text = text.replace("\\\\", "").replace('\\"', "")
    for start in range(0, len(text), PIECE):
        pieces = text[start : start + PIECE].split('"')
        more, further = marks("".join(pieces[inside::2]))
        parts, values = parts + more, values + further
        inside ^= len(pieces) % 2 == 0
        if parts > most or values > VALUES_OF_PART * most:
            says = f"the body has more than {most} lists, objects and keys, or {VALUES_OF_PART * most} values"
            raise too_large(says)


def too_large(says: str) -> Problem:
    return Problem(413, f"{says}; the server's option --max-body sets the limit", code="body_too_large")


class BoundedBodies:
    """ASGI middleware that bounds the bodies of HTTP requests."""

    def __init__(self, app: ASGIApp, most: Callable[[], int], all_: Bodies) -> None:
        self._app, self._most, self._all = app, most, all_

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._most()
        problem = too_large(f"the body has more than {most} bytes")
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        if lengths and (not lengths[0].isdigit() or int(lengths[0]) > most):
            await answer(problem, scope["path"])(scope, receive, send)
            return
        read = 0
        held = self._all.of_address(str((scope.get("client") or ("",))[0]))

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            if message["type"] == "http.request":
                more = len(message.get("body", b""))
                read += more
                if read > most:
                    raise problem
                held.grow(more)
                current().size = read  # of one that never ends, too: it leaves memory behind
            return message

        async def sending(message: Message) -> None:
            held.shrink()  # an answer that begins keeps nothing of the body
            await send(message)

        try:
            await self._app(scope, bounded, sending)
        finally:
            held.shrink()
