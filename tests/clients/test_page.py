"""docs/guides/clients.md names each client at the version that the tests install."""

from __future__ import annotations

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "guides" / "clients.md"
# Packages of npm -> names on the page; None: the clients of the page come with it or load it.
NAMES = {
    "@anthropic-ai/claude-code": "Claude Code", "@openai/codex": "Codex CLI", "opencode-ai": "opencode", "ai": "AI SDK",
    "openai": "(Python),", "@ai-sdk/anthropic": None, "@ai-sdk/openai-compatible": None, "zod": None,
}  # fmt: skip


def test_the_page_names_the_versions_of_the_tests() -> None:
    wanted = {}
    for file in ("requirements.txt", "aider.txt"):
        for line in (HERE / file).read_text().splitlines():
            name, version = re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?==([\w.]+)", line).groups()  # type: ignore[union-attr]
            if name != "transformers":  # lm-eval loads it
                wanted[name.removesuffix("-chat")] = version
    packages = json.loads((HERE / "package.json").read_text())["dependencies"]
    wanted |= {shown: packages[name] for name, shown in NAMES.items() if shown is not None}
    assert packages.keys() == NAMES.keys()
    rows = PAGE.read_text()
    missing = [f"{name} {version}" for name, version in wanted.items() if f"{name} {version}" not in rows]
    assert not missing
