"""Blocks: the text of one sample as a row of blocks, each thinking, a text or a call, while it grows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from foredraft.decode.thinking import ThinkingMarkers, ThinkingReader
from foredraft.model.chat import ChatTemplate
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve.tool_calls import ParsedToolCall
from foredraft.serve.tools import Tools


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A way in which models write their reasoning."""

    opens: str  # before it
    closes: str  # after it
    answer: tuple[str, str] = ("", "")  # around the answer after it
    sign: str = ""  # what a chat template contains that was made for it; by default the closing marker


# The first one counts whose sign a template has.
FORMS = (
    # https://huggingface.co/ibm-granite/granite-3.2-8b-instruct
    ReasoningFormat("Here is my thought process:", "Here is my response:"),
    # https://huggingface.co/ibm-granite/granite-3.3-8b-instruct
    ReasoningFormat("<think>", "</think>", ("<response>", "</response>"), sign="<response></response>"),
    # https://huggingface.co/Qwen/Qwen3-8B, DeepSeek's R1 and its distilled models, SmolLM3, and many more
    ReasoningFormat("<think>", "</think>"),
    ReasoningFormat("[THINK]", "[/THINK]"),  # https://huggingface.co/mistralai/Magistral-Small-2507
    ReasoningFormat(
        "<seed:think>", "</seed:think>"
    ),  # https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct
)
SWITCHES = ("enable_thinking", "thinking")  # names of the variable that turns reasoning on or off
EFFORT, NO_EFFORT = "reasoning_effort", "none"


def thinking_after(
    tokenizer: Tokenizer, prompt: str, begun: str | None = None, *, stops: bool = False
) -> ThinkingMarkers | None:
    """Return how the reply to a prompt marks its thinking; None where it has none, or none any more."""
    source = "" if tokenizer.chat is None else "\n".join(tokenizer.chat.templates.values())
    shown = (form for form in FORMS if (form.sign or form.closes) in source)
    known = (form for form in FORMS if not form.sign and tokenizer.inner.token_to_id(form.closes) is not None)
    form = next(shown, None) or next(known, None)
    if form is None:
        return None
    end = prompt.rstrip()
    opened, closed = end.endswith(form.opens), end.endswith(form.closes)
    if begun:
        opened, closed = begun.lstrip().startswith(form.opens), form.closes in begun
    if closed or (begun and not opened):
        return None
    return ThinkingMarkers(form.opens, form.closes, opened, stops, form.answer)


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


@dataclass(slots=True)
class ContentBlock:
    """A part of a reply."""

    index: int  # of the block in its reply
    call: ParsedToolCall | None = None  # the call; None for text
    text: str = ""  # so far: the text, or the arguments as JSON
    thinking: bool = False  # the text is reasoning

    @property
    def is_content(self) -> bool:
        return self.call is None and not self.thinking


class BlockEvent(NamedTuple):
    """What happens to a block; `text` is what a "delta" adds."""

    kind: Literal["open", "delta", "close"]
    block: ContentBlock
    text: str = ""


class ContentBlocks:
    """The blocks of one text. Without tools and thinking it is one block, open from the beginning."""

    def __init__(self, tools: Tools | None, thinking: ThinkingMarkers | None = None) -> None:
        self._calls = None if tools is None else tools.reader()
        self._thinking = None if thinking is None else ThinkingReader(thinking)
        self.all: list[ContentBlock] = []  # the blocks so far; the last one may be open
        if self._calls is None and self._thinking is None:
            self.all.append(ContentBlock(0))

    def read(self, text: str, *, ended: bool, cut: bool = False) -> list[BlockEvent]:
        parts = [("content", text)] if text else []
        if self._thinking is not None:
            parts = [*self._thinking.read(text), *(self._thinking.end(cut=cut) if ended else ())]
        steps: list[BlockEvent] = []
        for kind, shown in parts:
            if kind == "thinking" or self._calls is None:
                steps += self._add(None, shown, thinking=kind == "thinking")
            else:
                steps += [step for event in self._calls.read(shown) for step in self._add(*event)]
        if ended and self._calls is not None:
            steps += [step for event in self._calls.end(cut=cut) for step in self._add(*event)]
        return steps

    def _add(self, call: ParsedToolCall | None, text: str, *, thinking: bool = False) -> list[BlockEvent]:
        """Return the steps that add a text to a call, to the thinking or to the content."""
        last, steps = self.all[-1] if self.all else None, list[BlockEvent]()
        if last is None or last.call is not call or last.thinking != thinking:
            steps = [BlockEvent("close", last)] if last is not None else []
            steps.append(self._open(call, thinking))
        if text:
            self.all[-1].text += text
            steps.append(BlockEvent("delta", self.all[-1], text))
        return steps

    def close(self) -> list[BlockEvent]:
        """Return the steps that end the text; a text without blocks gets an empty one."""
        opened = [] if self.all else [self._open(None)]
        return [*opened, BlockEvent("close", self.all[-1])]

    @property
    def thought(self) -> int:
        """Characters of the text that belong to the thinking, as in `ThinkingReader`."""
        return 0 if self._thinking is None else self._thinking.thought

    @property
    def content(self) -> str:
        return "".join(block.text for block in self.all if block.is_content)

    @property
    def reasoning(self) -> str:
        return "".join(block.text for block in self.all if block.thinking)

    @property
    def calls(self) -> list[ParsedToolCall]:
        return [block.call for block in self.all if block.call is not None]

    def _open(self, call: ParsedToolCall | None, thinking: bool = False) -> BlockEvent:
        self.all.append(ContentBlock(len(self.all), call, thinking=thinking))
        return BlockEvent("open", self.all[-1])
