"""Raw connections to a server, for what well-behaved clients never do."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack
from typing import Any

import httpx

UPGRADE = (
    b"GET /v1/stream HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)  # to a WebSocket
TEXT, PING = 0x81, 0x89  # first bytes of frames that are whole


def request_bytes(body: Any, path: str = "/v1/completions", **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + data


def frame(first: int, payload: bytes) -> bytes:
    return bytes([first, 0x80 | len(payload)]) + b"\0\0\0\0" + payload


def request_from(address: str, url: str, body: Any = None) -> httpx.Response:
    with httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=20) as client:
        return client.get(url) if body is None else client.post(url, json=body)


def opened_from(address: str, url: str, stack: ExitStack) -> socket.socket:
    made = stack.enter_context(socket.socket())
    made.settimeout(20)
    made.bind((address, 0))
    made.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    return made


class RawClient:
    """One connection that reads as slowly as the test does; `buffer` are bytes that the kernel takes for it."""

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

    def upgrade(self) -> None:
        self.send(UPGRADE)
        head = b""
        while b"\r\n\r\n" not in head:
            head += self.socket.recv(1)
        assert head.startswith(b"HTTP/1.1 101 "), head

    def keep_sending(self, data: bytes, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.send(data)
            time.sleep(0.01)

    def rest(self) -> bytes:
        """Read up to the last event of a stream, or to the end of the connection."""
        data = b""
        while b"data: [DONE]\n\n" not in data[-40:]:
            part = self.socket.recv(1 << 16)
            if not part:
                break
            data += part
        return data
