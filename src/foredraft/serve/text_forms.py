"""Text forms: the fields of requests that say which form the text has, under the names of several servers.

Each stands for an option of the library. A request gives at most one of them, and an error about the option
names the field that the request gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from foredraft.errors import RequestError
from foredraft.serve.problems import Problem, of_error

__all__ = ["FORMS", "Form", "StructuredOutputs", "named_as_given", "only_form", "structured_form"]

# Fields that have the value of an option of the library -> that option.
FORMS = {
    "regex": "regex", "grammar": "grammar", "ebnf": "grammar", "guided_json": "json_schema",
    "guided_regex": "regex", "guided_choice": "choices", "guided_grammar": "grammar",
}  # fmt: skip


class Form(NamedTuple):
    """The form of a text: the field that gives it, the option that it stands for, and its value."""

    field: str
    option: str
    value: Any


class StructuredOutputs(BaseModel):
    """The form of the text, as vLLM's requests give it."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)
    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None


def structured_form(given: StructuredOutputs | None) -> tuple[str, Any] | None:
    """Return the option for `structured_outputs`, and its value; None without the field.

    Raises:
        Problem: It gives none or several.
    """
    if given is None:
        return None
    options = {
        "json_schema": given.json_, "regex": given.regex, "choices": given.choice, "grammar": given.grammar,
        "json_object": given.json_object or None,
    }  # fmt: skip
    chosen = [(option, value) for option, value in options.items() if value is not None]
    if len(chosen) != 1:
        problem = f"structured_outputs gives {len(chosen)} forms; give json, regex, choice or grammar"
        raise Problem(400, problem, param="structured_outputs")
    return chosen[0]


def only_form(forms: Iterable[Form]) -> Form | None:
    """Return the one form of a request; None without one.

    Raises:
        Problem: There are several.
    """
    given = list(forms)
    if len(given) > 1:
        one, other = given[0].field, given[1].field
        raise Problem(400, f"{one} cannot hold together with {other}; give one of them", param=one)
    return given[0] if given else None


@contextmanager
def named_as_given(form: Form | None) -> Iterator[None]:
    """Name the field that a request gives in an error about the option that it stands for.

    Raises:
        Problem: The option is refused, and the field has another name.
    """
    try:
        yield
    except RequestError as error:
        if form is None or error.option != form.option or form.field == form.option:
            raise
        problem = of_error(error)
        message = problem.message.replace(form.option, form.field, 1)
        raise Problem(problem.status, message, param=form.field, code=problem.code) from error
