"""Six kinds of prompts for a model of code, in the spirit of Spec-Bench (arXiv:2401.07851).

Contract: a kind is a function from a module's text to its beginnings. A beginning is a verbatim part of the
module that ends where a natural continuation follows; edits and tests add text of their own. `rest` is the
text that follows in the module, which shows whether a prompt would end inside a token.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from recipes.demo.prompts import completable_functions

ROWS_SHOWN, ROWS_LEFT = 3, 3  # rows of a table in the prompt, and rows that follow, at least
PROSE_LINES = 6  # line breaks of a docstring that counts as prose, at least
EDITED_LINES = range(6, 23)  # lines of a function or class that is edited


@dataclass(frozen=True)
class Beginning:
    """A place in a module where a prompt may end.

    Attributes:
        context: The text before `needed`; a prompt may drop its first lines.
        needed: The text that a prompt holds in full.
        rest: The text that follows.
        name: A label of the place.
    """

    context: str
    needed: str
    rest: str
    name: str


class Text:
    """The lines and the syntax tree of a module; line numbers count from 1, as in the tree."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.tree = ast.parse(text)

    def upto(self, line: int) -> str:
        return "".join(f"{one}\n" for one in self.lines[: line - 1])

    def between(self, first: int, last: int) -> str:
        return "\n".join(self.lines[first - 1 : last])

    def after(self, line: int) -> str:
        return "\n" + "\n".join(self.lines[line:])

    def cut(self, first: int, last: int, name: str) -> Beginning:
        """Return the beginning whose needed text is the lines from `first` to `last`."""
        return Beginning(self.upto(first), self.between(first, last), self.after(last), name)


def complete_function(text: Text) -> Iterator[Beginning]:
    """A signature, its docstring included, whose body is to be written."""
    for node, first, head in completable_functions("\n".join(text.lines)):
        yield text.cut(first, head, node.name)


def write_docstring(text: Text) -> Iterator[Beginning]:
    """Yield functions and classes up to the quotes that open their docstrings."""
    for node in ast.walk(text.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        docstring = ast.get_docstring(node, clean=False)
        if docstring is None or len(docstring) < 80:
            continue
        line = text.lines[node.body[0].lineno - 1]
        opening = re.match(r'\s*[rRuU]?("""|\'\'\')', line)
        if opening:
            whole = text.cut(node.lineno, node.body[0].lineno, node.name)
            needed = whole.needed[: len(whole.needed) - len(line) + opening.end()]
            yield Beginning(whole.context, needed, line[opening.end() :] + whole.rest, node.name)


def edit_file(text: Text) -> Iterator[Beginning]:
    """Yield code, an instruction to rename a variable, and a third of the edited copy."""
    for node in ast.walk(text.tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.end_lineno is None:
            continue
        count = node.end_lineno - node.lineno + 1
        if count not in EDITED_LINES:
            continue
        original = text.between(node.lineno, node.end_lineno)
        for name in _names_in_use(node):
            edited = re.sub(rf"\b{name}\b", f"new_{name}", original)
            begun = "\n".join(edited.split("\n")[: count // 3])
            instruction = f"{' ' * node.col_offset}# The same code with {name} renamed to new_{name}:"
            needed = f"{original}\n\n\n{instruction}\n{begun}"
            yield Beginning("", needed, edited[len(begun) :], f"{node.name}:{name}")


def fill_table(text: Text) -> Iterator[Beginning]:
    """Yield the first rows of literals, and of runs of similar statements, that have several more rows."""
    for node in ast.walk(text.tree):
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            rows: Sequence[ast.expr] = node.elts
        elif isinstance(node, ast.Dict):
            rows = [key or value for key, value in zip(node.keys, node.values, strict=True)]
        else:
            for body in (getattr(node, field, None) for field in ("body", "orelse")):
                if isinstance(body, list):
                    yield from _runs(text, body)
            continue
        places = [row.lineno for row in rows]
        if len(set(places)) == len(places) >= ROWS_SHOWN + ROWS_LEFT:
            last = places[ROWS_SHOWN] - 1
            yield text.cut(node.lineno, last, f"line {node.lineno}")


def write_tests(text: Text) -> Iterator[Beginning]:
    """Yield whole functions, each followed by the head of a test of it."""
    for node in text.tree.body:
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None or node.name.startswith("test"):
            continue
        if 3 <= node.end_lineno - node.lineno <= 30:
            code = text.cut(node.lineno, node.end_lineno, node.name)
            head = f"\n\n\ndef test_{node.name.strip('_')}():"
            yield Beginning(code.context, code.needed + head, "\n    ", node.name)


def continue_prose(text: Text) -> Iterator[Beginning]:
    """Yield prose of several lines, from docstrings and comments, cut at the end of a line."""
    for node in ast.walk(text.tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        docstring = ast.get_docstring(node, clean=False)
        if docstring is not None and docstring.count("\n") >= PROSE_LINES:
            first = node.body[0].lineno
            yield text.cut(first, first + 2, getattr(node, "name", "module"))
    comments = groupby(enumerate(text.lines, 1), lambda line: line[1].lstrip().startswith("# "))
    for is_comment, block in comments:
        numbers = [number for number, _ in block]
        if is_comment and len(numbers) >= 4:
            yield text.cut(numbers[0], numbers[1], f"line {numbers[0]}")


KINDS: dict[str, Callable[[Text], Iterator[Beginning]]] = {
    "complete-function": complete_function,
    "write-docstring": write_docstring,
    "edit-file": edit_file,
    "fill-table": fill_table,
    "write-tests": write_tests,
    "free": continue_prose,
}


def _names_in_use(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """Return the arguments and local variables that the code mentions at least three times."""
    names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
    own = {part.id for part in names if isinstance(part.ctx, ast.Store)}
    own |= {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)} - {"self", "cls"}
    uses = Counter(part.id for part in names if part.id in own and len(part.id) > 2)
    return [name for name, count in uses.items() if count >= 3]


def _runs(text: Text, body: list[ast.stmt]) -> Iterator[Beginning]:
    """Yield the first of consecutive one-line statements that begin alike."""

    def start(statement: ast.stmt) -> str:
        one_line = statement.lineno == statement.end_lineno
        head = re.match(r"\s*(assert\b|[\w.]+\()", text.lines[statement.lineno - 1])
        return head[1] if one_line and head else ""

    for head, group in groupby(body, start):
        run = list(group)
        if head and len(run) >= ROWS_SHOWN + ROWS_LEFT:
            yield text.cut(run[0].lineno, run[ROWS_SHOWN].lineno - 1, f"line {run[0].lineno}")
