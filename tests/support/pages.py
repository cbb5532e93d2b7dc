"""The documentation pages and the code blocks in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.support.running import ROOT

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    language: str  # the word after the opening fence; empty without one
    line: int  # number of its first line in the page, from 1
    text: str  # its lines, without the fences


@dataclass(frozen=True, slots=True)
class Page:
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
        found = FENCED.finditer(text)
        return [Block(each[1], text[: each.start(2)].count("\n") + 1, each[2]) for each in found]

    @property
    def shell(self) -> list[tuple[int, str]]:
        return [
            (block.line + index, line)
            for block in self.blocks
            if block.language == "sh"
            for index, line in enumerate(block.text.splitlines())
        ]

    @property
    def python(self) -> str:
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
