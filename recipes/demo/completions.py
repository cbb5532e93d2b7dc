"""Decide whether a completed function is valid Python.

A completion that the length limit cut off is unfinished at its end. `parses` forgives exactly that: it
removes the last incomplete statement and trailing block headers without a body, and it closes an open `try`.
It removes nothing else, and a completion without a single statement fails.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Sequence

# A blank line, a comment, a decorator, or a block header without a body on the same line.
WITHOUT_STATEMENT = re.compile(
    r"\s*($|#|@|(async |def|class|if|elif|else|for|while|with|try|except|finally)\b.*:\s*(#.*)?$)"
)


def indentation(line: str) -> int:
    """Return the number of leading white-space characters."""
    return len(line) - len(line.lstrip())


def find_last_definition(lines: Sequence[str], name: str) -> int:
    """Return the index of the last `def` line of function `name`."""
    pattern = re.compile(rf"\s*(async\s+)?def\s+{re.escape(name)}\b")
    return max(index for index, line in enumerate(lines) if pattern.match(line))


def logical_line_ends(lines: Sequence[str]) -> set[int]:
    """Return the line numbers, from 1, on which a logical line ends, up to the first tokenizer error."""
    ends = set()
    try:
        for token in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
            if token.type == tokenize.NEWLINE:
                ends.add(token.end[0])
    except (tokenize.TokenError, SyntaxError):
        pass
    return ends


def find_function_end(lines: Sequence[str], prompt_lines: int, depth: int) -> int | None:
    """Return the index of the first line after the function, or None if the function is still open.

    A line indented no deeper than the function ends it, unless it continues an open statement or belongs to
    the prompt.
    """
    ends = logical_line_ends(lines) | {0}
    starts_statement = True
    for index, line in enumerate(lines):
        if index >= prompt_lines and line.strip() and starts_statement and indentation(line) <= depth:
            return index
        blank = not line.strip() or line.lstrip().startswith("#")
        starts_statement = index + 1 in ends or (starts_statement and blank)
    return None


def remove_unfinished_end(lines: list[str], prompt_lines: int) -> list[str]:
    """Drop the unfinished last statement and block headers without a body; close open `try` blocks."""
    # The length limit cut the last line, so a logical line that ends there is not complete either.
    complete = [end for end in logical_line_ends(lines[:-1]) if end >= prompt_lines]
    lines = lines[: max(complete, default=prompt_lines)]
    while len(lines) > prompt_lines and WITHOUT_STATEMENT.match(lines[-1]):
        lines.pop()
    depth, closing = indentation(lines[-1]), []
    for line in reversed(lines[prompt_lines:-1]):  # outwards through the blocks around the last statement
        if line.strip() and indentation(line) < depth:
            depth = indentation(line)
            if line.strip() == "try:":
                closing += [" " * depth + "finally:", " " * depth + "    pass"]
    return lines + closing


def parses(prompt: str, completion: str, name: str, truncated: bool) -> bool:
    """Return whether the last function of the prompt, with its completion, is valid Python.

    `truncated`: the length limit ended the completion.
    """
    start = find_last_definition(prompt.split("\n"), name)
    lines = (prompt + completion).split("\n")[start:]
    prompt_lines = len(prompt.split("\n")) - start
    end = find_function_end(lines, prompt_lines, indentation(lines[0]))
    if end is not None:
        lines = lines[:end]
    elif truncated:
        lines = remove_unfinished_end(lines, prompt_lines)
    if not any(line.strip() and not line.strip().startswith("#") for line in lines[prompt_lines:]):
        return False
    wrapper = "if True:\n" if indentation(lines[0]) else ""  # an indented method needs a block around it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(wrapper + "\n".join(lines) + "\n")
    except (SyntaxError, ValueError):
        return False
    return True
