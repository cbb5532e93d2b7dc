"""Thinking: the part of a text in which a model reasons before it answers, between two markers.

What follows its closing marker is the *content*: stop strings act there, and a grammar holds there. Line
breaks around the thinking, and those before the content, belong to neither.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal, TypeAlias

Part: TypeAlias = tuple[Literal["thinking", "content"], str]


@dataclass(frozen=True, slots=True)
class ThinkingMarkers:
    """How the thinking of one request's texts is marked."""

    opens: str  # before the thinking
    closes: str  # after the thinking
    begun: bool = False  # the prompt ends within the thinking
    stops: bool = False  # stop strings act in the thinking, too
    answer: tuple[str, str] = ("", "")  # what some models write around the content, no part of it

    @property
    def markers(self) -> tuple[str, str]:
        return self.opens, self.closes


class ThinkingReader:
    """Reads one text piece by piece; wherever it is cut into pieces, it has the same parts."""

    def __init__(self, thinking: ThinkingMarkers) -> None:
        self._thinking = thinking
        self._phase: Literal["opening", "thinking", "after", "content"] = "opening"
        self._text = ""  # not shown yet
        self._read = 0  # characters
        self._shown = False  # some thinking is
        self._answer_closes = ""  # looked for in the content
        self.content_at: int | None = None  # characters before the content; None until it has begun
        self.thought = 0  # characters up to the closing marker's end; `sys.maxsize` before that
        if thinking.begun:
            self._begin_thinking()

    @property
    def undecided(self) -> int:
        """How many characters at the end may turn out to be content, or a marker."""
        return len(self._text) if self._phase in ("opening", "after") else 0

    def read(self, text: str) -> list[Part]:
        self._text += text
        self._read += len(text)
        parts: list[Part] = []
        if self._phase == "opening":
            self._open()
        if self._phase == "thinking":
            self._think(parts)
        if self._phase == "after":
            self._follow()
        if self._phase == "content":
            self._show_content(parts)
        return parts

    def end(self, *, cut: bool = False) -> list[Part]:
        left, self._text = self._text, ""
        if self._phase == "thinking":
            left = left.rstrip("\n")
        if not left or cut:
            return []
        return [("thinking" if self._phase == "thinking" else "content", left)]

    def _open(self) -> None:
        begun = self._text.lstrip()
        answer = self._thinking.answer[0]
        if begun.startswith(self._thinking.opens):
            self._text = begun.removeprefix(self._thinking.opens)
            self._begin_thinking()
        elif answer and begun.startswith(answer):
            self._text, self._phase = begun, "after"
        elif not any(each.startswith(begun) for each in (self._thinking.opens, answer)):
            self._begin_content()

    def _begin_thinking(self) -> None:
        self._phase, self.thought = "thinking", sys.maxsize

    def _think(self, parts: list[Part]) -> None:
        if not self._shown:
            self._text = self._text.lstrip("\n")
        before, marker, rest = self._text.partition(self._thinking.closes)
        if not marker:
            before = before[: len(before) - overlap(before, self._thinking.closes)]
        shown = before.rstrip("\n")
        if shown:
            self._shown = True
            parts.append(("thinking", shown))
        self._text = rest if marker else self._text[len(shown) :]
        if marker:
            self._phase, self.thought = "after", self._read - len(rest)

    def _follow(self) -> None:
        """Read what stands between the closing marker and the content."""
        self._text = self._text.lstrip("\n")
        opens, closes = self._thinking.answer
        if opens and self._text.startswith(opens):
            self._text, self._answer_closes = self._text.removeprefix(opens), closes
            self._begin_content()
        elif self._text and not opens.startswith(self._text):
            self._begin_content()

    def _begin_content(self) -> None:
        self._phase, self.content_at = "content", self._read - len(self._text)

    def _show_content(self, parts: list[Part]) -> None:
        before, closes = self._text, self._answer_closes
        if closes:
            before, marker, rest = self._text.partition(closes)
            if marker:
                before, self._answer_closes = before + rest, ""
            else:
                before = before[: len(before) - overlap(before, closes)]
        self._text = "" if not self._answer_closes else self._text[len(before) :]
        if before:
            parts.append(("content", before))


def overlap(text: str, marker: str) -> int:
    """Return how many last characters of a text may begin the marker."""
    return next((n for n in range(min(len(marker), len(text)), 0, -1) if marker.startswith(text[-n:])), 0)
