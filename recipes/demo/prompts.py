"""Cut prompts out of held-out modules: functions up to their body, for completion and speed tests.

A prompt is a verbatim stretch of a held-out module. It ends with the signature of a function, or with its
docstring if it has one. It starts at a line break and has at most `MAX_PROMPT_TOKENS` tokens.

    python -m recipes.demo.prompts --corpus DIR --out FILE --count 200
"""

from __future__ import annotations

import argparse
import ast
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from .corpus import Source, read_sources, write_jsonl

MAX_PROMPT_TOKENS = 200
MIN_BODY_LINES = 3  # shorter bodies leave too little to complete


@dataclass(frozen=True)
class Prompt:
    """A prompt, its origin as "package:path", and the name of the function to complete."""

    prompt: str
    module: str
    name: str


def completable_functions(text: str) -> Iterator[tuple[ast.FunctionDef, int, int]]:
    """Yield functions whose body is long enough: the node, its first line, the last line of its header.

    Decorators count, and the docstring belongs to the header. Lines count from 1.
    """
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        documented = ast.get_docstring(node, clean=False) is not None
        body = node.body[1:] if documented else node.body
        header_end = node.body[0].end_lineno if documented else node.body[0].lineno - 1
        if not body or header_end is None or header_end < node.lineno:
            continue
        if node.end_lineno - header_end >= MIN_BODY_LINES:
            yield node, first, header_end


def cut_prompt(source: Source, first: int, header_end: int, tokenizer: Tokenizer) -> str | None:
    """Return the module up to `header_end`, cut at a line break on the left to fit the token limit.

    None: the header of the function alone is too long. Lines count from 1.
    """
    lines = source.text.split("\n")
    kept = lines[first - 1 : header_end]
    if len(tokenizer.encode("\n".join(kept)).ids) > MAX_PROMPT_TOKENS:
        return None
    for line in reversed(lines[: first - 1]):
        if len(tokenizer.encode("\n".join([line, *kept])).ids) > MAX_PROMPT_TOKENS:
            break
        kept = [line, *kept]
    return "\n".join(kept).strip("\n")


def collect_prompts(sources: Sequence[Source], tokenizer: Tokenizer, count: int) -> list[Prompt]:
    """Return up to `count` prompts: one of each module, in hash order, then a second of each, and so on."""
    by_module: list[list[Prompt]] = []
    for source in sources:
        found = []
        for node, first, header_end in completable_functions(source.text):
            text = cut_prompt(source, first, header_end, tokenizer)
            if text is not None:
                found.append(Prompt(text, f"{source.package}:{source.path}", node.name))
        found.sort(key=lambda p: hashlib.blake2b(f"{p.module}:{p.name}".encode()).digest())
        by_module.append(found)
    turns = max(map(len, by_module), default=0)
    return [found[turn] for turn in range(turns) for found in by_module if turn < len(found)][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description="Cut function prompts out of the held-out modules.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder that recipes.demo.corpus wrote")
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines file to write")
    parser.add_argument("--count", type=int, default=200, help="largest number of prompts")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.corpus / "tokenizer.json"))
    prompts = collect_prompts(read_sources(options.corpus / "heldout.jsonl"), tokenizer, options.count)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(options.out, map(asdict, prompts))


if __name__ == "__main__":
    main()
