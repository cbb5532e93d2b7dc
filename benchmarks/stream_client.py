"""A process that reads streams of server-sent events over plain sockets, for the scripts that time servers.

Each line of standard input is {"port": ..., "bodies": [...], "leave": seconds or null}: these requests to
/v1/completions are sent at a time. Each line of standard output is the list of their texts and times.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from typing import Any


class Stream:
    """One request and what has come of its reply."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        )
        self.begun, self.first, self.ended = time.perf_counter(), 0.0, 0.0
        self.text, self.usage, self._rest = "", None, b""
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.sendall(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)

    def read(self) -> bool:
        """Read what has come; return whether the reply has ended."""
        data = self.socket.recv(1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in map(bytes.strip, lines):
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(chunk["error"])
                self.first = self.first or time.perf_counter() - self.begun
                self.usage = chunk.get("usage") or self.usage
                for choice in chunk["choices"]:
                    self.text += choice["text"]
            elif line == b"data: [DONE]":
                self.ended = time.perf_counter() - self.begun
        if not data and not self.ended:
            raise RuntimeError(f"the stream broke off: {self._rest!r}, {lines!r}")
        return bool(self.ended)


def run(port: int, bodies: list[dict[str, Any]], leave: float | None) -> list[dict[str, Any]]:
    """Send requests at a time and read their replies to the end, or until it is time to leave."""
    streams, selector = [Stream(port, body) for body in bodies], selectors.DefaultSelector()
    for stream in streams:
        selector.register(stream.socket, selectors.EVENT_READ, stream)
    until = float("inf") if leave is None else time.perf_counter() + leave
    while selector.get_map() and time.perf_counter() < until:
        for key, _ in selector.select(None if leave is None else 0.1):
            if key.data.read():
                selector.unregister(key.fileobj)
    for stream in streams:
        stream.socket.close()
    return [
        {"text": each.text, "first": each.first, "seconds": each.ended, "usage": each.usage}
        for each in streams
    ]


if __name__ == "__main__":
    for line in sys.stdin:
        given = json.loads(line)
        print(json.dumps(run(given["port"], given["bodies"], given["leave"])), flush=True)
