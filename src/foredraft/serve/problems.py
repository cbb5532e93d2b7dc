"""Problems: errors in the shape of the OpenAI API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Self

from typing_extensions import TypedDict

from foredraft.errors import ContextLengthError, ForedraftError, Option, RequestError, python_spelling
from foredraft.llm.output import Output

__all__ = [
    "FIELDS",
    "Error",
    "LengthFields",
    "Problem",
    "TooLong",
    "as_problems",
    "busy",
    "check_output",
    "forget_frames",
    "of_error",
]

# Options of the library -> fields of requests, where the names differ.
FIELDS = {
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "truncate": "truncate_prompt",
    "include_stop": "include_stop_str_in_output",
}  # fmt: skip
TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
    500: "server_error", 503: "overloaded_error",
}  # fmt: skip

MAX_SHOWN = 1000  # characters of a message


class ErrorFields(TypedDict, closed=True):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict, closed=True):
    """An error in the shape of the OpenAI API; within a stream, an event has the same shape."""

    error: ErrorFields


class Problem(Exception):
    """An error with its HTTP status.

    Args:
        status: The HTTP status.
        message: One line for people.
        param: The field at fault.
        code: For programs.
        headers: Of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > MAX_SHOWN:  # it may quote what the client sent
            message = f"{message[:MAX_SHOWN]}..."
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @classmethod
    def read(cls, status: int, body: Error) -> Self:
        """Return the problem of a body."""
        error = body["error"]
        return cls(status, error["message"], param=error["param"], code=error["code"])

    @property
    def body(self) -> Error:
        """The body of the response, and of an event within a stream."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class LengthFields(NamedTuple):
    """The fields of a shape of the API that decide how long a request is.

    Attributes:
        prompt: Holds the prompt.
        new: Say how many new tokens are asked for; the first one that is given counts.
        shorten: What makes the server shorten a prompt, as a remedy names it.
    """

    prompt: str
    new: tuple[str, ...] = ()
    shorten: str = ""

    def asked(self, body: Mapping[str, object]) -> str | None:
        """Return the field by which a body asks for a number of tokens; None where none does."""
        return next((name for name in self.new if body.get(name) is not None), None)


class TooLong(Problem):
    """A prompt, perhaps with the tokens that are asked for, is longer than the context.

    Clients know it by its code or by words of its message: "this model's maximum context length is" (litellm)
    and "prompt is too long" (LangChain, which looks for the code only in what OpenAI's client makes text of)
    (https://github.com/BerriAI/litellm, exception_mapping_utils.py; https://github.com/langchain-ai/langchain,
    chat_models of libs/partners/openai and libs/partners/anthropic).

    Args:
        error: The library's.
        fields: Of the request's shape.
        asked: The field by which the request asks for a number of tokens; None where it leaves that open.
    """

    def __init__(self, error: ContextLengthError, fields: LengthFields, asked: str | None) -> None:
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
    message = error.describe(lambda option: python_spelling(_field(option)))
    if not isinstance(error, RequestError):
        return Problem(500, message)
    option = error.option
    return Problem(400, message, param=None if option is None else FIELDS.get(option, option))


@contextmanager
def as_problems(
    fields: LengthFields | None = None, body: Mapping[str, object] | None = None
) -> Iterator[None]:
    """Turn errors of the library into problems.

    Args:
        fields: Of the request's shape; None where nothing is generated.
        body: Of the request.
    """
    try:
        yield
    except ContextLengthError as error:
        if fields is None:
            raise of_error(error) from error
        raise TooLong(error, fields, fields.asked(body or {})) from error
    except ForedraftError as error:
        raise of_error(error) from error


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


def check_output(output: Output) -> None:
    """Check that a sample did not fail while it ran.

    Raises:
        Problem: It did.
    """
    if output.finish_reason == "error":
        raise Problem(500, f"the request failed: {output.error}", code="generation_failed")


def busy(message: str, status: int = 503, seconds: int = 1) -> Problem:
    """Return the refusal of a request that may come again after some seconds."""
    code = "rate_limit_exceeded" if status == 429 else "overloaded"
    return Problem(status, message, code=code, headers={"Retry-After": str(seconds)})


def _field(option: Option) -> Option:
    return Option(FIELDS.get(option.name, option.name), option.value)
