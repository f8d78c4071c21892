"""A small, safe predicate language over the columns of a table, the ``where`` of SQL.

::

    reward < 0 and stop_reason = 'length'
    not (datasource in ('gsm8k', 'math')) or score is null
    answer like '%therefore%'

    or ─▶ and ─▶ not ─▶ comparison: column (= != <> < <= > >=) literal | [not] in (…) | [not] like '…' | is [not] null

It becomes an Arrow expression; as in SQL, a comparison with null keeps no row. Nothing of it is ever executed as code.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_TOKEN = re.compile(
    r"\s*(?:(?P<number>-?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)|(?P<text>'(?:[^']|'')*')"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<sign><=|>=|!=|<>|[=<>(),]))"
)
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_WORDS = {"and", "or", "not", "in", "is", "null", "like"}


@dataclass(frozen=True)
class Predicate:
    """A parsed predicate."""

    expression: pc.Expression
    columns: frozenset[str]  # those it looks at


def parse(where: str, columns: Collection[str]) -> Predicate:
    """Parse ``where`` over ``columns``; ``ConfigError`` saying what is wrong, where, and which columns there are."""
    parser = _Parser(where, columns)
    expression = parser.disjunction()
    parser.expect_end()
    return Predicate(expression, frozenset(parser.used))


class _Parser:
    """Recursive descent, one method per line of the grammar."""

    def __init__(self, where: str, columns: Collection[str]) -> None:
        self._where = where
        self._columns = columns
        self._tokens = list(_tokens(where))
        self._next = 0
        self.used: set[str] = set()

    def disjunction(self) -> Any:
        left = self._conjunction()
        while self._take("or"):
            left = left | self._conjunction()
        return left

    def expect_end(self) -> None:
        kind, text = self._peek()
        if kind != "end":
            raise self._error(f"unexpected {text!r}")

    def _conjunction(self) -> Any:
        left = self._negation()
        while self._take("and"):
            left = left & self._negation()
        return left

    def _negation(self) -> Any:
        if self._take("not"):
            return ~self._negation()
        if self._take("("):
            inner = self.disjunction()
            self._require(")")
            return inner
        return self._comparison()

    def _comparison(self) -> Any:
        column = self._column()
        if self._take("is"):
            negated = self._take("not")
            self._require("null")
            return ~column.is_null() if negated else column.is_null()
        if self._take("not"):
            return ~self._membership(column)
        kind, sign = self._peek()
        if kind == "sign" and sign in _COMPARE:
            self._next += 1
            return _COMPARE[sign](column, self._literal())
        return self._membership(column)

    def _membership(self, column: Any) -> Any:
        if self._take("like"):
            return pc.match_like(column, str(self._literal()))
        self._require("in")
        self._require("(")
        values = [self._literal()]
        while self._take(","):
            values.append(self._literal())
        self._require(")")
        # isin() would make "null not in (…)" true
        found = column == values[0]
        for value in values[1:]:
            found = found | (column == value)
        return found

    def _column(self) -> Any:
        kind, name = self._peek()
        if kind != "name" or name.lower() in _WORDS:
            raise self._error(f"expected a column, found {name!r}")
        if name not in self._columns:
            raise self._error(f"there is no column {name!r}")
        self._next += 1
        self.used.add(name)
        return pc.field(name)

    def _literal(self) -> int | float | str:
        kind, text = self._peek()
        self._next += 1
        if kind == "text":
            return text[1:-1].replace("''", "'")
        if kind == "number":
            return float(text) if re.search(r"[.eE]", text) else int(text)
        raise self._error(f"expected a number or a 'text', found {text!r}")

    def _take(self, word: str) -> bool:
        kind, text = self._peek()
        if kind in ("name", "sign") and text.lower() == word:
            self._next += 1
            return True
        return False

    def _require(self, word: str) -> None:
        if not self._take(word):
            raise self._error(f"expected {word!r}, found {self._peek()[1]!r}")

    def _peek(self) -> tuple[str, str]:
        return self._tokens[min(self._next, len(self._tokens) - 1)]

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"where {self._where!r}: {problem}; columns are {', '.join(sorted(self._columns))}")


def _tokens(where: str) -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    position, end = 0, len(where.rstrip())
    while position < end:
        match = _TOKEN.match(where, position)
        if match is None:
            raise ConfigError(
                f"where {where!r}: cannot read {where[position:].strip()!r}; texts stand in single quotes"
            )
        tokens.append((str(match.lastgroup), match[str(match.lastgroup)]))
        position = match.end()
    return [*tokens, ("end", "end")]
