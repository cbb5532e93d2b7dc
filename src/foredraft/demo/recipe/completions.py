"""Judge completions: does the code parse.

Contract: `parses` may remove only what the length limit left unfinished at the very end: the last
incomplete statement and headers of blocks that are still empty; a `try` that is still open is closed.
Nothing in the middle is ever removed, and a completion with no statement left fails.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Sequence

# A blank line, a comment, a decorator, or a block header with nothing after it.
EMPTY = re.compile(
    r"\s*($|#|@|(async |def|class|if|elif|else|for|while|with|try|except|finally)\b.*:\s*(#.*)?$)"
)


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def function_start(lines: Sequence[str], name: str) -> int:
    """Index of the line that begins the prompt's last function, decorators left out."""
    pattern = re.compile(rf"\s*(async\s+)?def\s+{re.escape(name)}\b")
    return max(index for index, line in enumerate(lines) if pattern.match(line))


def logical_ends(lines: Sequence[str]) -> set[int]:
    """Line numbers, from 1, on which a logical line ends."""
    ends = set()
    try:
        for token in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
            if token.type == tokenize.NEWLINE:
                ends.add(token.end[0])
    except (tokenize.TokenError, SyntaxError):
        pass
    return ends


def body_end(lines: Sequence[str], head: int, depth: int) -> int | None:
    """Index of the first line after the function, or None if it never ends.

    A line indented no deeper than the function ends it, unless it continues an open statement.
    """
    ends = logical_ends(lines) | {0}
    statement_starts = True
    for index, line in enumerate(lines):
        if index >= head and line.strip() and statement_starts and indent(line) <= depth:
            return index
        blank = not line.strip() or line.lstrip().startswith("#")
        statement_starts = index + 1 in ends or (statement_starts and blank)
    return None


def close_unfinished(lines: list[str], head: int) -> list[str]:
    """Without the incomplete last statement and empty trailing blocks; open `try` blocks are closed."""
    complete = [end for end in logical_ends(lines[:-1]) if end >= head]  # the limit falls in the last line
    lines = lines[: max(complete, default=head)]
    while len(lines) > head and EMPTY.match(lines[-1]):
        lines.pop()
    depth, closers = indent(lines[-1]), []
    for line in reversed(lines[head:-1]):  # outwards through the blocks that hold the last statement
        if line.strip() and indent(line) < depth:
            depth = indent(line)
            if line.strip() == "try:":
                closers += [" " * depth + "finally:", " " * depth + "    pass"]
    return lines + closers


def parses(prompt: str, completion: str, name: str, limited: bool) -> bool:
    """Whether the prompt's last function, completed, is Python. `limited`: cut by the length limit."""
    start = function_start(prompt.split("\n"), name)
    lines = (prompt + completion).split("\n")[start:]
    head = len(prompt.split("\n")) - start
    end = body_end(lines, head, indent(lines[0]))
    if end is not None:
        lines = lines[:end]
    elif limited:
        lines = close_unfinished(lines, head)
    if not any(line.strip() and not line.strip().startswith("#") for line in lines[head:]):
        return False
    wrapper = "if True:\n" if indent(lines[0]) else ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(wrapper + "\n".join(lines) + "\n")
    except (SyntaxError, ValueError):
        return False
    return True
