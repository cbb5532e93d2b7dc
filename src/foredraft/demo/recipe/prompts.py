"""Beginnings of held-out functions, for completions, demonstrations and speed tests.

Contract: every prompt is a verbatim stretch of a held-out module that ends with a function's signature
line, its docstring included if it has one, and starts at a line break at most `CONTEXT` tokens earlier.

    python -m foredraft.demo.recipe.prompts --corpus DIR --out FILE --count 200
"""

from __future__ import annotations

import argparse
import ast
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from .corpus import Source, read_sources, write_lines

CONTEXT = 200  # tokens


@dataclass(frozen=True)
class Prompt:
    """One beginning."""

    prompt: str
    module: str
    name: str


def functions(text: str) -> Iterator[tuple[ast.FunctionDef, int, int]]:
    """Functions worth completing: (node, its first line, the last line of its head), counted from 1."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        documented = ast.get_docstring(node, clean=False) is not None
        body = node.body[1:] if documented else node.body
        head = node.body[0].end_lineno if documented else node.body[0].lineno - 1
        if body and head is not None and node.end_lineno - head >= 3 and head >= node.lineno:
            yield node, first, head


def begin(source: Source, first: int, head: int, tokenizer: Tokenizer) -> str | None:
    """The text up to line `head`, cut at a line break to fit; None if the head alone is too long."""
    lines = source.text.split("\n")
    kept = lines[first - 1 : head]
    if len(tokenizer.encode("\n".join(kept)).ids) > CONTEXT:
        return None
    for line in reversed(lines[: first - 1]):
        if len(tokenizer.encode("\n".join([line, *kept])).ids) > CONTEXT:
            break
        kept = [line, *kept]
    return "\n".join(kept).strip("\n")


def collect_prompts(sources: Sequence[Source], tokenizer: Tokenizer, count: int) -> list[Prompt]:
    """Functions in hash order, modules in turn, so that no module dominates."""
    queues: list[list[Prompt]] = []
    for source in sources:
        found = []
        for node, first, head in functions(source.text):
            text = begin(source, first, head, tokenizer)
            if text is not None:
                found.append(Prompt(text, f"{source.package}:{source.path}", node.name))
        found.sort(key=lambda p: hashlib.blake2b(f"{p.module}:{p.name}".encode()).digest())
        queues.append(found)
    turns = max(map(len, queues), default=0)
    return [queue[turn] for turn in range(turns) for queue in queues if turn < len(queue)][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write held-out function beginnings.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=200)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.corpus / "tokenizer.json"))
    prompts = collect_prompts(read_sources(options.corpus / "heldout.jsonl"), tokenizer, options.count)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_lines(options.out, map(asdict, prompts))


if __name__ == "__main__":
    main()
