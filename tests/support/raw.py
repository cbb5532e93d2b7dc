"""Raw connections to a server, for what well-behaved clients never do."""

from __future__ import annotations

import json
import socket
from typing import Any

__all__ = ["RawClient", "request_bytes"]


def request_bytes(body: Any, path: str = "/v1/completions", **headers: str) -> bytes:
    """Return a POST request; a body that is bytes is sent as it is."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + data


class RawClient:
    """One connection that reads as slowly as the test does.

    Args:
        url: Of the server.
        buffer: Bytes that the kernel takes for it.
    """

    def __init__(self, url: str, buffer: int = 4096) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.settimeout(30)
        host, _, port = url.removeprefix("http://").partition(":")
        self.socket.connect((host, int(port)))

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def rest(self) -> bytes:
        """Read up to the last event of a stream, or to the end of the connection."""
        data = b""
        while b"data: [DONE]\n\n" not in data[-40:]:
            part = self.socket.recv(1 << 16)
            if not part:
                break
            data += part
        return data
