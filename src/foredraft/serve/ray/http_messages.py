"""HTTP messages on their way from the ingress to a replica."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HttpCall", "HttpHead"]

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class HttpCall:
    """An HTTP request.

    Attributes:
        method: GET, POST, ...
        path: Of the URL.
        query: Of the URL.
        headers: As ASGI has them.
        body: Whole.
        address: Of the client, as Ray's proxy sees it; "" where it is not known.
        key: Of `affinity.prompt_key`.
    """

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    address: str = ""
    key: int | None = None


@dataclass(frozen=True, slots=True)
class HttpHead:
    """The beginning of a response.

    Attributes:
        status: Of HTTP.
        headers: As ASGI has them.
    """

    status: int
    headers: Headers
