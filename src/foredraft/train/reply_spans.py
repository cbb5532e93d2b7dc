"""Replies: where the replies of the assistant stand in the text of a conversation.

A reply is what a chat template writes between the prompt for it and the end of its message. Of each reply two
texts decide: `before`, of all messages that precede it with the prompt for a reply, and `after`, of these and
the reply. It counts where the conversation's text begins with both. Templates change earlier turns at times,
as those that drop a reply's reasoning once another question follows; then only later replies count.

Rendering both texts of every reply takes time that grows with the square of their number. So a longer
conversation is read in windows: what a reply adds to a text is rendered after the messages that open the
conversation and the exchange before it alone. Where the parts of all windows make up the conversation's text,
and whole texts of some replies agree, the template writes each turn alike whatever came long before it.
Elsewhere whole texts decide, of a bounded number of replies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from foredraft.errors import RequestError
from foredraft.model.chat import ChatTemplate

__all__ = ["MAX_REPLIES", "TooManyRepliesError", "reply_spans"]

FEW = 16  # replies of which whole texts are cheaper than windows
MAX_REPLIES = 500  # of which whole texts are rendered
MAX_WINDOW = 32  # messages of a window, and of those that open a conversation

Span = tuple[int, int]  # first character of a reply, and the one after its last


class TooManyRepliesError(ValueError):
    """The template changes earlier turns, and the conversation has more replies than `MAX_REPLIES`."""


def reply_spans(chat: ChatTemplate, messages: Sequence[Any], whole: str) -> list[Span]:
    """Return where the replies that count stand in a conversation's text.

    Args:
        chat: The template.
        messages: The conversation, up to its last reply.
        whole: Its text, without a prompt for another reply.

    Raises:
        RequestError: The template refuses a beginning of the conversation.
        TooManyRepliesError: As it says.
    """
    replies = [at for at, message in enumerate(messages) if role_of(message) == "assistant"]
    if len(replies) > FEW:
        spans = _by_windows(chat, messages, replies, whole)
        if spans is not None:
            return [span for span in spans if span[0] < span[1]]
    if len(replies) > MAX_REPLIES:
        raise TooManyRepliesError(len(replies))
    found = (_by_whole_texts(chat, messages, at, whole) for at in replies)
    return [span for span in found if span is not None]


def role_of(message: Any) -> object:
    """Return the role of a message; None where it has none."""
    return message.get("role") if isinstance(message, Mapping) else None


def _by_whole_texts(chat: ChatTemplate, messages: Sequence[Any], at: int, whole: str) -> Span | None:
    """Return where the reply at a place stands; None where it does not count."""
    before = chat.render(messages[:at], add_generation_prompt=True) if at else ""
    after = chat.render(messages[: at + 1], add_generation_prompt=False)
    counts = whole.startswith(before) and whole.startswith(after) and len(before) < len(after)
    return (len(before), len(after)) if counts else None


def _by_windows(
    chat: ChatTemplate, messages: Sequence[Any], replies: Sequence[int], whole: str
) -> list[Span] | None:
    """Return where all replies stand; None where windows do not tell."""
    roles = [role_of(message) for message in messages]
    opening = roles.index("user") if "user" in roles else 0
    if opening > MAX_WINDOW:
        return None
    try:
        first = _by_whole_texts(chat, messages, replies[0], whole)
        if first is None:
            return None
        spans = [first]
        for former, at in pairwise(replies):
            start = _window_start(roles, opening, former)
            if at - start > MAX_WINDOW:
                return None
            window = [*messages[:opening], *messages[start : at + 1]]
            span = _next_span(chat, window, at - former, spans[-1][1], whole)
            if span is None:
                return None
            spans.append(span)
        if spans[-1][1] != len(whole):
            return None
        agree = all(
            _by_whole_texts(chat, messages, replies[place], whole) == spans[place]
            for place in _halves(len(replies))
        )
    except RequestError:  # some templates refuse a conversation that begins in its middle
        return None
    return spans if agree else None


def _window_start(roles: Sequence[object], opening: int, former: int) -> int:
    """Return the place of the question before a reply, or one that is further away than `MAX_WINDOW`."""
    start = former
    while start > opening and roles[start] != "user" and former - start <= MAX_WINDOW:
        start -= 1
    return max(start, opening)


def _next_span(chat: ChatTemplate, window: Sequence[Any], since: int, end: int, whole: str) -> Span | None:
    """Return where the last reply of a window stands in the conversation's text; None where it does not.

    Args:
        chat: The template.
        window: Messages, of which the last is the reply.
        since: Messages after the former reply, the last included.
        end: Where the former reply ends in the conversation's text.
        whole: The conversation's text.
    """
    former = chat.render(window[:-since], add_generation_prompt=False)
    before = chat.render(window[:-1], add_generation_prompt=True)
    after = chat.render(window, add_generation_prompt=False)
    if not (before.startswith(former) and after.startswith(before)):
        return None
    start = end + len(before) - len(former)
    fits = whole.startswith(after[len(former) :], end)
    return (start, start + len(after) - len(before)) if fits else None


def _halves(count: int) -> list[int]:
    """Return the last place, that in the middle, that in the middle before it, and so on."""
    places, place = [], count - 1
    while place:
        places.append(place)
        place //= 2
    return places
