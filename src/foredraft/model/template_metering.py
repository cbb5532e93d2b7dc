"""Makes a parsed chat template pass its values to the meter, where Jinja's sandbox offers no other hook.

Contract: the template renders the same text. What its loops go through, its lists, objects and slices, the
operands of its comparisons, and the operator ~ become filters of `template_sandbox.py`, under names that no
template can spell. Statements and arguments that no published template needs are refused by name.
"""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.visitor import NodeTransformer

__all__ = ["JOINED", "LOOPED", "MADE", "READ", "Metering", "refusal"]

MADE, READ, LOOPED, JOINED = " made", " read", " looped", " joined"
REFUSED: dict[type[nodes.Node], str] = {  # what these make would not pass the meter
    nodes.Block: "block",
    nodes.Extends: "extends",
    nodes.FromImport: "from",
    nodes.Import: "import",
    nodes.Include: "include",
    nodes.ScopedEvalContextModifier: "autoescape",
}


def refusal(kind: str, name: str, of: str = "") -> SecurityError:
    """Return the error of a name that is not in the tables of the sandbox."""
    owner = of and f" of {of}"
    return SecurityError(f"the {kind} {name!r}{owner} is not among those that published chat templates use")


class Metering(NodeTransformer):
    """Rewrites the loops, lists, objects, slices and comparisons of a template, and the operator ~."""

    def visit(self, node: nodes.Node, *args: Any, **named: Any) -> Any:
        if (name := REFUSED.get(type(node))) is not None:
            raise refusal("statement", name)
        if getattr(node, "dyn_args", None) is not None or getattr(node, "dyn_kwargs", None) is not None:
            raise refusal("argument", "*")
        return super().visit(node, *args, **named)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise refusal("loop modifier", "recursive")
        self.generic_visit(node)
        node.iter = _filtered(LOOPED, node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(JOINED, nodes.Tuple(node.nodes, "load", lineno=node.lineno))

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _made(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx == "store" else _made(node, node.items)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _made(node, [each for pair in node.items for each in (pair.key, pair.value)])

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(MADE, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        for operand in node.ops:
            if not isinstance(operand.expr, nodes.Const):
                operand.expr = _filtered(READ, operand.expr)
        return node


def _made(node: nodes.Expr, items: list[nodes.Expr]) -> nodes.Expr:
    """Count a list or an object that holds values of variables; others are no larger than their source."""
    return node if all(isinstance(item, nodes.Const) for item in items) else _filtered(MADE, node)


def _filtered(name: str, value: nodes.Node) -> nodes.Expr:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)
