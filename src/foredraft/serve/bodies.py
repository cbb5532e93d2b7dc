"""Bodies: one that is too large is refused before it is read whole, and one that is no JSON object, too.

What all bodies take together is bounded, and shared among addresses as what waits is (`limits`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.errors import shortened
from foredraft.serve.answers import answer
from foredraft.serve.beside import without_collection
from foredraft.serve.clients import Client
from foredraft.serve.limits import Shared
from foredraft.serve.problems import Problem, busy
from foredraft.serve.request_records import current

__all__ = ["BYTES_OF_TOKEN", "MORE_BODIES", "Bodies", "BoundedBodies", "HeldBody", "json_object"]

MORE_BODIES = 64  # of the largest size that may be held beside those of the rows
BYTES_OF_TOKEN = 32  # that a body may have: a token is 4 of plain text, up to 24 where text is escaped
# Lists, objects and keys of a body: one for each token that it may have, and at least MIN_PARTS, because
# parsing holds the interpreter for a microsecond for each. Other values, such as token ids, take a tenth.
MIN_PARTS = 64 << 10
VALUES_OF_PART = 4
PIECE = 64 << 10  # characters that are looked through at a time, while other threads wait
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # the escape of half a surrogate pair


def json_object(data: bytes | str, most: int) -> dict[str, Any]:
    """Return the JSON object of a body or a frame.

    Args:
        data: The body, or the text of the frame.
        most: Bytes, or characters, that it may have.

    Raises:
        Problem: It is something else, or has more parts than any request needs.
    """
    try:
        text = data if isinstance(data, str) else data.decode(json.detect_encoding(data))
        _check_parts(text, max(MIN_PARTS, most // BYTES_OF_TOKEN))
        with without_collection():
            found = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
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
    """Check how many lists, objects and keys a text of JSON has, and how many values, before it is parsed.

    Raises:
        Problem: They are too many.
    """
    parts, values = _marks(text)
    if parts <= most and values <= VALUES_OF_PART * most:  # though those in strings count, too
        return
    parts = values = 0
    inside = False  # of a string
    text = text.replace("\\\\", "").replace('\\"', "")
    for start in range(0, len(text), PIECE):
        pieces = text[start : start + PIECE].split('"')
        more, further = _marks("".join(pieces[inside::2]))
        parts, values = parts + more, values + further
        inside ^= len(pieces) % 2 == 0
        if parts > most or values > VALUES_OF_PART * most:
            says = f"the body has more than {most} lists, objects and keys, or {VALUES_OF_PART * most} values"
            raise Problem(
                413, f"{says}; the server's option --max-body sets the limit", code="body_too_large"
            )


def _marks(text: str) -> tuple[int, int]:
    """Return how many marks of lists, objects and keys a text has, and how many of further values."""
    return sum(map(text.count, "[{:")), text.count(",")


def _finite(number: str) -> float:
    """Return a number; one that is too large would become infinite, which no reply could repeat as JSON."""
    if not math.isfinite(found := float(number)):
        raise ValueError(f"{shortened(number)} is too large for a number")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


class Bodies:
    """What the bodies of all requests and the messages of all WebSockets take together.

    Args:
        most: Returns the bytes that they may have; one body may have as many as it likes where it is alone.
    """

    def __init__(self, most: Callable[[], int]) -> None:
        self._most, self._bytes = most, Shared()

    @property
    def held(self) -> int:
        """Return their bytes."""
        return self._bytes.total

    def of(self, address: str) -> HeldBody:
        """Return a body of an address, of which nothing has come."""
        return HeldBody(self._bytes, self._most, Client.of("", address).name)


class HeldBody:
    """The bytes of one body, among those of all, from when they come until its request is answered.

    `Bodies.of` makes it.
    """

    def __init__(self, all_: Shared, most: Callable[[], int], client: str) -> None:
        self._all, self._most, self._client, self._own = all_, most, client, 0

    def grow(self, more: int) -> None:
        """Add bytes that have come.

        Raises:
            Problem: All bodies together have too many.
        """
        most = self._most()
        if self._all.total > self._own and not self._all.fits(self._client, more, most):
            raise busy(f"{self._all.total} bytes of bodies are held, of {most} at most (--max-bodies)")
        self._own += more
        self._all.add(self._client, more)

    def shrink(self, left: int = 0) -> None:
        """Let go of all but `left` bytes."""
        if self._own > left:
            self._all.add(self._client, left - self._own)
            self._own = left


class BoundedBodies:
    """ASGI middleware that bounds the bodies of HTTP requests.

    Args:
        app: The app.
        most: Returns the bytes of a body at most.
        all_: All bodies.
    """

    def __init__(self, app: ASGIApp, most: Callable[[], int], all_: Bodies) -> None:
        self._app, self._most, self._all = app, most, all_

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._most()
        says = f"the body has more than {most} bytes; the server's option --max-body sets the limit"
        problem = Problem(413, says, code="body_too_large")
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        if lengths and (not lengths[0].isdigit() or int(lengths[0]) > most):
            await answer(problem, scope["path"])(scope, receive, send)
            return
        read = 0
        held = self._all.of(str((scope.get("client") or ("",))[0]))

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
