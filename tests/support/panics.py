"""Panics of a library in Rust, as it raises them, whose type can be had in no other way; functions that raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import decoders


def stripping(letter: str) -> dict[str, Any]:
    return {"type": "Strip", "content": letter, "start": 0, "stop": 2}


def panic() -> BaseException:
    try:
        decoders.Strip("a", 0, 2).decode(["a"])
    except BaseException as error:
        return error
    raise AssertionError("the library did not panic")


def raising(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises an error, whatever it is given."""

    def function(*_: object, **__: object) -> Any:
        raise error

    return function
