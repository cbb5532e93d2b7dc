"""Problems: errors with an HTTP status, in the shape of the OpenAI API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Self, cast

from pydantic import ValidationError

from foredraft.errors import ContextLengthError, ForedraftError, Option, RequestError, python_spelling

# Options of the library -> fields of requests, where the names differ.
FIELDS = {
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "truncate": "truncate_prompt",
    "include_stop": "include_stop_str_in_output",
}  # fmt: skip
TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
    500: "server_error", 503: "overloaded_error",
}  # fmt: skip

CLASS_NAME = re.compile(r" or instance of \w+$")  # at the end of what pydantic says of an object
MAX_SHOWN = 1000  # characters of a message


class Problem(Exception):
    def __init__(
        self,
        status: int,  # the HTTP status
        message: str,  # one line for people
        *,
        param: str | None = None,  # the field at fault
        code: str | None = None,  # for programs
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > MAX_SHOWN:  # it may quote what the client sent
            message = f"{message[:MAX_SHOWN]}..."
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})  # of the response

    @classmethod
    def read(cls, status: int, body: Mapping[str, Any]) -> Self:
        error = body["error"]
        return cls(status, error["message"], param=error["param"], code=error["code"])

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class LengthFields(NamedTuple):
    """The fields of a shape of the API that decide how long a request is."""

    prompt: str  # holds the prompt
    new: tuple[str, ...] = ()  # say how many new tokens are asked for; the first one that is given counts
    shorten: str = ""  # what makes the server shorten a prompt, as a remedy names it


class TooLong(Problem):
    """A prompt, perhaps with the tokens that are asked for, is longer than the context.

    Clients know it by its code or by words of its message: "this model's maximum context length is" (litellm)
    and "prompt is too long" (LangChain, which looks for the code only in what OpenAI's client makes text of)
    (https://github.com/BerriAI/litellm, exception_mapping_utils.py; https://github.com/langchain-ai/langchain,
    chat_models of libs/partners/openai and libs/partners/anthropic).
    """

    def __init__(self, error: ContextLengthError, fields: LengthFields, body: Mapping[str, object]) -> None:
        asked = next((name for name in fields.new if body.get(name) is not None), None)
        has, remedy = f"it has {error.prompt}", f"shorten {fields.prompt}"
        if asked is not None:
            has += f" and {asked} asks for {error.new}"
            remedy += f", or lower {asked}"
        elif error.prompt < error.most:
            has += f" and the reply needs {error.new}"
        if fields.shorten and error.new < error.most:
            remedy += f", or give {fields.shorten}"
        if error.most < error.reach:
            remedy += f", or start the server with a --max-length of up to {error.reach}"
        says = f"This model's maximum context length is {error.most} tokens, so the prompt is too long: {has}"
        super().__init__(400, f"{says}; {remedy}", param=fields.prompt, code="context_length_exceeded")
        self.for_messages = f"prompt is too long: {error.prompt} tokens > {error.most - error.new} maximum"


def of_error(error: ForedraftError) -> Problem:
    """Return a user's mistake, or a request that failed, as a problem."""
    message = error.describe(
        lambda option: python_spelling(Option(FIELDS.get(option.name, option.name), option.value))
    )
    if not isinstance(error, RequestError):
        return Problem(500, message)
    option = error.option
    return Problem(400, message, param=None if option is None else FIELDS.get(option, option))


def forget_frames(error: BaseException) -> None:
    """Let go of the frames that an error and its causes came through, once it is answered.

    They hold the request. A frame that holds the error, as that of a wait for a thread does, closes a circle,
    whose memory would wait for a collection of garbage.
    """
    left, known = [error], set[int]()
    while left:
        each = left.pop()
        if id(each) not in known:
            known.add(id(each))
            each.__traceback__ = None
            left += [cause for cause in (each.__cause__, each.__context__) if cause is not None]


def invalid(param: str | None, message: str, code: str | None = None) -> Problem:
    return Problem(400, message, param=param, code=code)


def busy(message: str, status: int = 503, seconds: int = 1) -> Problem:
    """Return the refusal of a request that may come again after some seconds."""
    code = "rate_limit_exceeded" if status == 429 else "overloaded"
    return Problem(status, message, code=code, headers={"Retry-After": str(seconds)})


def first_fault(error: ValidationError, body: object) -> Problem:
    """Return the first wrong field as a problem; of the errors of its types, the deepest tells most."""
    found: list[tuple[list[str], str]] = []
    for each in error.errors(include_url=False, include_input=False):
        # those parts of the error's path that lead through the body; pydantic's have names of types, too
        parts, missing, value = each["loc"], each["type"] == "missing", cast(Any, body)
        path: list[str] = []
        for part in parts[:-1] if missing else parts:
            known = (
                range(len(value)) if isinstance(value, list) else value if isinstance(value, Mapping) else ()
            )
            if part in known:
                value = value[part]
                path.append(str(part))
        found.append(([*path, str(parts[-1])] if missing else path, each["msg"]))
    same = [each for each in found if each[0][:1] == found[0][0][:1]]
    path, message = max(same, key=lambda each: len(each[0]))
    says = CLASS_NAME.sub("", message)
    return invalid(path[0] if path else None, f"{'.'.join(path) or 'the body'}: {says}")
