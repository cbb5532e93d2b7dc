"""Six kinds of prompts for a model of code, in the spirit of Spec-Bench (arXiv:2401.07851).

Contract: a kind is a function from a module's text to its beginnings. A beginning is a verbatim stretch of
the module, up to a place where something natural is left to write; edits and tests add words of their own.
`rest` is what comes next there, so that a cut that would fall inside a token can be told.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from recipes.demo.prompts import completable_functions

ROWS_SHOWN, ROWS_LEFT = 3, 3  # of a table
PROSE_LINES = 6
EDITED_LINES = range(6, 23)


@dataclass(frozen=True)
class Beginning:
    """What comes before, which may be cut short on the left; what must be seen whole; what follows."""

    context: str
    needed: str
    rest: str
    name: str


class Text:
    """A module's lines and its syntax tree; line numbers count from 1, as in the tree."""

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
        """Between two lines."""
        return Beginning(self.upto(first), self.between(first, last), self.after(last), name)


def complete_function(text: Text) -> Iterator[Beginning]:
    """A signature, its docstring included, whose body is to be written."""
    for node, first, head in completable_functions("\n".join(text.lines)):
        yield text.cut(first, head, node.name)


def write_docstring(text: Text) -> Iterator[Beginning]:
    """A function or class up to the quotes that open its docstring."""
    for node in ast.walk(text.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        said = ast.get_docstring(node, clean=False)
        if said is None or len(said) < 80:
            continue
        line = text.lines[node.body[0].lineno - 1]
        opening = re.match(r'\s*[rRuU]?("""|\'\'\')', line)
        if opening:
            whole = text.cut(node.lineno, node.body[0].lineno, node.name)
            needed = whole.needed[: len(whole.needed) - len(line) + opening.end()]
            yield Beginning(whole.context, needed, line[opening.end() :] + whole.rest, node.name)


def edit_file(text: Text) -> Iterator[Beginning]:
    """Code, what is to be changed in it, and a third of the copy; most of the rest is to be copied."""
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
            asked = f"{' ' * node.col_offset}# The same code with {name} renamed to new_{name}:"
            needed = f"{original}\n\n\n{asked}\n{begun}"
            yield Beginning("", needed, edited[len(begun) :], f"{node.name}:{name}")


def fill_table(text: Text) -> Iterator[Beginning]:
    """The first rows of a literal, or of a run of statements alike, that goes on for several more."""
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
    """A function, whole, and the head of a test of it."""
    for node in text.tree.body:
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None or node.name.startswith("test"):
            continue
        if 3 <= node.end_lineno - node.lineno <= 30:
            code = text.cut(node.lineno, node.end_lineno, node.name)
            head = f"\n\n\ndef test_{node.name.strip('_')}():"
            yield Beginning(code.context, code.needed + head, "\n    ", node.name)


def go_on(text: Text) -> Iterator[Beginning]:
    """Prose of several lines, in docstrings and comments, cut at the end of a line."""
    for node in ast.walk(text.tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        said = ast.get_docstring(node, clean=False)
        if said is not None and said.count("\n") >= PROSE_LINES:
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
    "free": go_on,
}


def _names_in_use(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """The arguments and variables of its own that the code mentions three times or more."""
    names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
    own = {part.id for part in names if isinstance(part.ctx, ast.Store)}
    own |= {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)} - {"self", "cls"}
    uses = Counter(part.id for part in names if part.id in own and len(part.id) > 2)
    return [name for name, count in uses.items() if count >= 3]


def _runs(text: Text, body: list[ast.stmt]) -> Iterator[Beginning]:
    """Statements of one line each that begin alike, one after another."""

    def begins(statement: ast.stmt) -> str:
        one_line = statement.lineno == statement.end_lineno
        head = re.match(r"\s*(assert\b|[\w.]+\()", text.lines[statement.lineno - 1])
        return head[1] if one_line and head else ""

    for head, group in groupby(body, begins):
        run = list(group)
        if head and len(run) >= ROWS_SHOWN + ROWS_LEFT:
            yield text.cut(run[0].lineno, run[ROWS_SHOWN].lineno - 1, f"line {run[0].lineno}")
