"""Which tables a statement reads or writes without restricting them by the conversation id parameter itself.

The statement is parsed by the parser of Postgres. Each SELECT, UPDATE, DELETE and INSERT in it is checked by itself, at
any depth: common table expressions, LATERAL, sub-selects in expressions. A table is restricted if the conditions for
its rows, in the WHERE of the same query or in the ON of its join, contain `conversation_id = $n` as a term of a
conjunction. An equality with a column of another table does not count, because a router that looks at one table at a
time cannot use it. A row is inserted with the parameter itself as its conversation id.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pglast import parse_sql
from pglast.ast import (
    A_Expr,
    BoolExpr,
    ColumnRef,
    DeleteStmt,
    InsertStmt,
    JoinExpr,
    Node,
    ParamRef,
    RangeSubselect,
    RangeVar,
    SelectStmt,
    String,
    TypeCast,
    UpdateStmt,
    WithClause,
)
from pglast.enums import A_Expr_Kind, BoolExprType, JoinType

Conditions = tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A table in a FROM clause, and the conditions that its rows have to meet."""

    table: str
    alias: str
    conditions: Conditions


class StatementCheck:
    """Finds the unrestricted uses of tables in one statement."""

    def __init__(self, keys: Mapping[str, str], parameters: frozenset[int]) -> None:
        """`keys`: by table, the column with the conversation id. `parameters`: the numbers of its parameters."""
        self._keys: Final = keys
        self._parameters: Final = parameters
        self.unrestricted: list[str] = []

    def check(self, sql: str) -> list[str]:
        """Return the uses that are not restricted, as `table` or `table AS alias`, in the order of the statement."""
        for raw in parse_sql(sql):
            self._check_query(raw.stmt, frozenset())
        return self.unrestricted

    def _check_query(self, query: Any, ctes: frozenset[str]) -> None:
        """`ctes`: the names of the common table expressions that are visible here."""
        with_clause = query.withClause
        if isinstance(with_clause, WithClause):
            for cte in with_clause.ctes or ():
                self._check_query(cte.ctequery, ctes)
                ctes |= {cte.ctename}
        match query:
            case SelectStmt(larg=None):
                uses = _uses(query.fromClause, _conjuncts(query.whereClause))
            case SelectStmt():
                self._check_query(query.larg, ctes)
                self._check_query(query.rarg, ctes)
                uses = []
            case UpdateStmt():
                uses = _uses((query.relation, *(query.fromClause or ())), _conjuncts(query.whereClause))
            case DeleteStmt():
                uses = _uses((query.relation, *(query.usingClause or ())), _conjuncts(query.whereClause))
            case InsertStmt():
                self._check_insert(query)
                uses = []
                if query.selectStmt is not None:
                    self._check_query(query.selectStmt, ctes)
            case _:
                message = f"a statement of an unexpected kind: {type(query).__name__}"
                raise AssertionError(message)
        self._report(uses, ctes)
        for nested in _nested_queries(query):
            self._check_query(nested, ctes)

    def _report(self, uses: list[Use], ctes: frozenset[str]) -> None:
        for use in uses:
            key = None if use.table in ctes else self._keys.get(use.table)
            if key is not None and not any(self._restricts(each, use.alias, key) for each in use.conditions):
                self.unrestricted.append(use.table if use.table == use.alias else f"{use.table} AS {use.alias}")

    def _check_insert(self, insert: Any) -> None:
        table = insert.relation.relname
        key = self._keys.get(table)
        if key is None:
            return
        names = [column.name for column in insert.cols]
        place = names.index(key)
        rows = _inserted_rows(insert.selectStmt)
        if not all(self._is_parameter(row[place]) for row in rows):
            self.unrestricted.append(f"INSERT INTO {table}")

    def _restricts(self, condition: Node, alias: str, key: str) -> bool:
        if not (isinstance(condition, A_Expr) and condition.kind == A_Expr_Kind.AEXPR_OP):
            return False
        if [part.sval for part in condition.name or ()] != ["="]:
            return False
        sides = (condition.lexpr, condition.rexpr)
        return any(_is_column(one, alias, key) and self._is_parameter(other) for one, other in (sides, reversed(sides)))

    def _is_parameter(self, value: Any) -> bool:
        while isinstance(value, TypeCast):
            value = value.arg
        return isinstance(value, ParamRef) and value.number in self._parameters


def _is_column(value: Any, alias: str, key: str) -> bool:
    """Without a qualifier the column belongs to the only table of the query that has one of this name."""
    if not isinstance(value, ColumnRef):
        return False
    names = [part.sval for part in value.fields or () if isinstance(part, String)]
    return names in ([alias, key], [key])


def _conjuncts(condition: Any) -> Conditions:
    if condition is None:
        return ()
    if isinstance(condition, BoolExpr) and condition.boolop == BoolExprType.AND_EXPR:
        return tuple(each for part in condition.args or () for each in _conjuncts(part))
    return (condition,)


def _uses(items: Any, conditions: Conditions) -> list[Use]:
    return [use for item in items or () for use in _uses_of(item, conditions)]


def _uses_of(item: Any, conditions: Conditions) -> Iterator[Use]:
    if isinstance(item, RangeVar):
        table = str(item.relname)
        yield Use(table=table, alias=table if item.alias is None else str(item.alias.aliasname), conditions=conditions)
    elif isinstance(item, JoinExpr):
        joined = conditions + _conjuncts(item.quals)
        # The condition of an outer join does not restrict the rows of the side that is kept.
        yield from _uses_of(item.larg, joined if item.jointype == JoinType.JOIN_INNER else conditions)
        yield from _uses_of(item.rarg, joined if item.jointype != JoinType.JOIN_RIGHT else conditions)


def _inserted_rows(select: Any) -> list[Any]:
    if select.larg is not None:
        return _inserted_rows(select.larg) + _inserted_rows(select.rarg)
    if select.valuesLists:
        return list(select.valuesLists)
    return [[target.val for target in select.targetList]]


def _nested_queries(query: Any) -> Iterator[Any]:
    """Yield the sub-selects in the expressions and FROM clauses of a query, but not those inside them.

    The sides of a UNION, the source of an INSERT and the common table expressions are checked by the caller.
    """
    for name in query:
        if name not in {"larg", "rarg", "selectStmt", "withClause"}:
            yield from _queries_in(getattr(query, name))


def _queries_in(value: Any) -> Iterator[Any]:
    if isinstance(value, SelectStmt):
        yield value
    elif isinstance(value, RangeSubselect):
        yield value.subquery
    elif isinstance(value, Node):
        for name in value:
            yield from _queries_in(getattr(value, name))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _queries_in(each)
