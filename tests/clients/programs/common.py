"""What all programs share: the server's address, what the library says, and how a client refuses."""

import json
import sys
from collections.abc import Callable
from typing import Any

URL = sys.argv[1]
WANT = json.load(sys.stdin)
MESSAGES: list[Any] = [{"role": "user", "content": "def add(a, b):"}]
TOO_LONG: list[Any] = [{"role": "user", "content": "x = 1\n" * 1000}]


def refused(kind: type[Exception], ask: Callable[[], object]) -> Any:
    """Return the error that a request raises; it must be of a class of the client's own."""
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError(f"nothing was refused; wanted {kind.__name__}")
