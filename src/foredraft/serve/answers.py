"""Answers: problems as HTTP responses, in the shape that the clients of a path read."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.websockets import WebSocket

from foredraft.serve.keys import Keys
from foredraft.serve.messages import error_body
from foredraft.serve.problems import Problem

__all__ = ["answer", "opened"]

MESSAGES = "/v1/messages"  # whose errors, and those of all paths below it, have a shape of their own


def answer(problem: Problem, path: str) -> JSONResponse:
    """Return the response to a request to `path`."""
    body = error_body(problem) if f"{path}/".startswith(f"{MESSAGES}/") else problem.body
    return JSONResponse(body, problem.status, headers=problem.headers)


async def opened(socket: WebSocket, keys: Keys) -> str | None:
    """Accept a WebSocket and return the name of its key; None where it was refused."""
    try:
        name = keys.check(socket.headers.get("authorization"))
    except Problem:
        await socket.close(code=1008, reason="the API key is missing or wrong")
        return None
    await socket.accept()
    return name
