"""Thinking: how the models of chat templates mark their reasoning, and what a request asks of it.

A template that knows reasoning spells out its markers; under any other one the vocabulary may have a token
for the closing marker. The prompt's end says whether the template has opened the thinking, or closed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foredraft.decode.thinking import Thinking
from foredraft.model.chat import ChatTemplate
from foredraft.model.tokenizer import Tokenizer

__all__ = ["template_variables", "thinking_after"]


@dataclass(frozen=True, slots=True)
class Form:
    """A way in which models write their reasoning.

    Attributes:
        opens: Before it.
        closes: After it.
        answer: Around the answer after it.
        sign: What a chat template contains that was made for it; by default the closing marker.
    """

    opens: str
    closes: str
    answer: tuple[str, str] = ("", "")
    sign: str = ""


# The first one counts whose sign a template has.
FORMS = (
    # https://huggingface.co/ibm-granite/granite-3.2-8b-instruct
    Form("Here is my thought process:", "Here is my response:"),
    # https://huggingface.co/ibm-granite/granite-3.3-8b-instruct
    Form("<think>", "</think>", ("<response>", "</response>"), sign="<response></response>"),
    # https://huggingface.co/Qwen/Qwen3-8B, DeepSeek's R1 and its distilled models, SmolLM3, and many more
    Form("<think>", "</think>"),
    Form("[THINK]", "[/THINK]"),  # https://huggingface.co/mistralai/Magistral-Small-2507
    Form("<seed:think>", "</seed:think>"),  # https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct
)
SWITCHES = ("enable_thinking", "thinking")  # names of the variable that turns reasoning on or off
EFFORT, NO_EFFORT = "reasoning_effort", "none"


def thinking_after(
    tokenizer: Tokenizer, prompt: str, begun: str | None = None, *, stops: bool = False
) -> Thinking | None:
    """Return how the reply to a prompt marks its thinking; None where it has none, or none any more.

    Args:
        tokenizer: With its chat template.
        prompt: As the template rendered it.
        begun: The text of the reply that the prompt ends with; None where it ends with none.
        stops: Stop strings act in the thinking, too.
    """
    form = _form(tokenizer)
    if form is None:
        return None
    end = prompt.rstrip()
    opened, closed = end.endswith(form.opens), end.endswith(form.closes)
    if begun:
        opened, closed = begun.lstrip().startswith(form.opens), form.closes in begun
    if closed or (begun and not opened):
        return None
    return Thinking(form.opens, form.closes, opened, stops, form.answer)


def _form(tokenizer: Tokenizer) -> Form | None:
    """Return how the model of a tokenizer writes its reasoning; None where nothing shows that it does."""
    source = "" if tokenizer.chat is None else "\n".join(tokenizer.chat.templates.values())
    shown = (form for form in FORMS if (form.sign or form.closes) in source)
    known = (form for form in FORMS if not form.sign and tokenizer.inner.token_to_id(form.closes) is not None)
    return next(shown, None) or next(known, None)


def template_variables(
    chat: ChatTemplate | None,
    given: Mapping[str, Any],
    *,
    effort: str | None,
    thinks: bool | None,
    prefers: bool | None = None,
    with_tools: bool,
) -> tuple[dict[str, Any], list[str]]:
    """Return the variables for the chat template, and the names of the fields that it does not read.

    An effort "none" turns the reasoning off under a template that has a switch for it. What a request gives
    by its variable's own name counts first.

    Args:
        chat: The templates.
        given: The request's `chat_template_kwargs`.
        effort: Its `reasoning_effort`.
        thinks: Its `enable_thinking`.
        prefers: Whether the reply begins with reasoning where the template can choose, by a field of another
            shape of the API.
        with_tools: It has tools.
    """
    read = frozenset[str]() if chat is None else chat.variables(with_tools=with_tools)
    unread = set() if chat is None else set(chat.unread(given, with_tools=with_tools))
    variables = {name: value for name, value in given.items() if name not in unread}
    ignored = [f"chat_template_kwargs.{name}" for name in given if name in unread]
    switch = next((name for name in SWITCHES if name in read), None)
    if thinks is not None and switch is None:
        ignored.append(SWITCHES[0])
    if switch is not None:
        off = False if effort == NO_EFFORT else None
        chosen = next((each for each in (thinks, prefers, off) if each is not None), None)
        if chosen is not None:
            variables.setdefault(switch, chosen)
    if effort is not None and EFFORT in read and not (effort == NO_EFFORT and switch is not None):
        variables.setdefault(EFFORT, effort)
    return variables, ignored
