"""Known origins: pages of other sites may not use the server, which listens beside a user's browser."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from foredraft.serve.answers import answer
from foredraft.serve.problems import Problem

__all__ = ["KnownOrigins"]


class KnownOrigins:
    """ASGI middleware that refuses requests and WebSockets of browsers from other origins.

    A browser sends such a request even where its page may not read the answer, and WebSockets know no CORS.
    Programs send no `Origin`.

    Args:
        app: The app.
        known: Origins that may call, beside the server's own; "*" is all.
    """

    def __init__(self, app: ASGIApp, known: Sequence[str]) -> None:
        self._app, self._known = app, known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "this origin may not call"})
        else:
            problem = Problem(
                403, "this origin may not call; the server's option --cors names those that may"
            )
            await answer(problem, scope["path"])(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin is None:
            return True
        own = headers.get("host", "")
        if not _is_address(own):  # a name may lead here from anywhere (DNS rebinding)
            own = ""
        return origin in (*self._known, f"http://{own}", f"https://{own}") or "*" in self._known


def _is_address(host: str) -> bool:
    """Return whether a `Host` header names this machine by an address, or as localhost."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ip_address(name))
    except ValueError:  # no address, or no host at all
        return False
