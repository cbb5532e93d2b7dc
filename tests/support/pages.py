"""The documentation pages and the code blocks in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.support.running import ROOT

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        language: The word after the opening fence; empty without one.
        line: Number of its first line in the page, from 1.
        text: Its lines, without the fences.
    """

    language: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Page:
    """A Markdown file of the repository."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def blocks(self) -> list[Block]:
        text = self.text
        return [
            Block(found[1], text[: found.start(2)].count("\n") + 1, found[2])
            for found in FENCED.finditer(text)
        ]

    @property
    def shell(self) -> list[tuple[int, str]]:
        """Return the lines of its sh blocks with their line numbers in the page."""
        return [
            (block.line + index, line)
            for block in self.blocks
            if block.language == "sh"
            for index, line in enumerate(block.text.splitlines())
        ]

    @property
    def python(self) -> str:
        """Return its python blocks as one program, with the line numbers of the page."""
        lines: list[str] = []
        for block in self.blocks:
            if block.language == "python":
                lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
        return "\n".join(lines)


DOCS = [Page(path) for path in sorted((ROOT / "docs").rglob("*.md"))]
EXECUTED = [
    Page(ROOT / "README.md"),
    Page(ROOT / "docs/index.md"),
    Page(ROOT / "docs/losslessness.md"),
    *(page for page in DOCS if page.path.parent.name == "guides"),
]
