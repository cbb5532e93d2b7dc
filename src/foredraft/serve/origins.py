"""Known origins: pages of other sites may not use the server, which listens beside a user's browser.

A page may make its own host name lead to this machine (DNS rebinding), and then reads replies as those of its
own server. So a server that only this machine can reach looks at the name that it was called by, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from foredraft.errors import shortened
from foredraft.serve.answers import answer
from foredraft.serve.problems import Problem

__all__ = ["KnownOrigins", "is_local"]


class KnownOrigins:
    """ASGI middleware that refuses requests and WebSockets of browsers from other origins.

    A browser sends such a request even where its page may not read the answer, and WebSockets know no CORS.
    Programs send no `Origin`.

    Args:
        app: The app.
        known: Origins that may call, beside the server's own; "*" is all.
        local: Requests may name this machine only by an address, as localhost, or as a known origin does.
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
        """Return what is not known of a request; None where it may pass."""
        if not self._is_known(headers):
            return "this origin"
        host = headers.get("host", "")  # browsers always send one
        if self._local and host and not _is_address(host) and not {host, "*"} & {*self._hosts, *self._known}:
            return f"a page of {shortened(host)}"
        return None

    def _is_known(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin is None:
            return True
        own = headers.get("host", "")
        if not _is_address(own):  # a name may lead here from anywhere (DNS rebinding)
            own = ""
        return origin in (*self._known, f"http://{own}", f"https://{own}") or "*" in self._known


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
