"""Makes a parsed chat template count what it does, where Jinja's sandbox offers no other hook.

Contract: the template renders the same text. Its loops and macros call `tick` of the environment; its lists,
objects, slices and `{% set %}` blocks pass through `made`, operands of comparisons and keys through `read`,
and arguments with a star through `spread`; and the operator ~ becomes a call of `joined`
(`template_sandbox.py`).
"""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

__all__ = ["MADE", "Counting"]

MADE = " made"  # the name of the filter that does the same as `made`; no template can spell it


class Counting(NodeTransformer):
    """Rewrites the loops, macros, lists, objects and slices of a template, and the operator ~."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", nodes.Tuple(node.nodes, "load", lineno=node.lineno))

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
        if isinstance(node.arg, nodes.Slice):
            return _call("made", node)
        node.arg = _read(node.arg)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        for operand in node.ops:
            operand.expr = _read(operand.expr)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        return self._count_arguments(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        return self._count_arguments(node)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        return self._count_arguments(node)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, MADE, [], [], None, None, lineno=node.lineno)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._count_body(node)
        if node.test is not None:
            node.test = nodes.And(_tick(0, node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._count_body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._count_body(node)

    def _count_arguments(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = _call("spread", node.dyn_args)
        return node  # type: ignore[no-any-return]

    def _count_body(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        size = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_tick(size, node.lineno), lineno=node.lineno))
        return node  # type: ignore[no-any-return]


def _made(node: nodes.Expr, items: list[nodes.Expr]) -> nodes.Expr:
    """Count a list or an object that holds values of variables; others are no larger than their source."""
    if all(isinstance(item, nodes.Const) for item in items) or any(isinstance(i, nodes.Slice) for i in items):
        return node
    return _call("made", node)


def _read(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _call("read", node)


def _tick(size: int, line: int) -> nodes.Expr:
    return _call("tick", nodes.Const(size, lineno=line))


def _call(method: str, argument: nodes.Expr) -> nodes.Expr:
    """Return a call of a method of `Environment`."""
    line = argument.lineno
    return nodes.Call(
        nodes.EnvironmentAttribute(method, lineno=line), [argument], [], None, None, lineno=line
    )
