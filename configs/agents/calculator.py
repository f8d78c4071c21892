"""A calculator that a policy may call: ``agent.tools=configs/agents/calculator.py:calculator``."""

from __future__ import annotations

import ast
import operator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_CHARACTERS = 200
MAX_BITS = 4096  # of an integer: 9**9**9 would compute for hours
BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: Numbers, parentheses and + - * / // % **, such as "17 * (3 + 4)".
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression is longer than {MAX_CHARACTERS} characters")
    value = evaluate(ast.parse(expression.strip(), mode="eval").body)
    if isinstance(value, complex):
        raise ValueError("the result is no real number")
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"
    return str(value)


def evaluate(node: ast.expr) -> float:
    """The value of an expression of numbers; nothing else is looked at, so nothing is run.

    Raises:
        ValueError: it holds something else, or a number too large.
    """
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
        return UNARY[type(node.op)](evaluate(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        left, right = evaluate(node.left), evaluate(node.right)
        if isinstance(node.op, ast.Pow) and _bits(left) * abs(right) > MAX_BITS:
            raise ValueError("the result is too large")
        return BINARY[type(node.op)](left, right)
    raise ValueError(f"only numbers and + - * / // % ** can be computed, not {ast.unparse(node)!r}")


def _bits(value: float) -> int:
    return max(1, int(abs(value)).bit_length())
