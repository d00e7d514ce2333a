"""The expressions of assertions: a small subset of Python, evaluated without `eval`.

The syntax tree is interpreted node by node. Everything that is not listed is refused when the expression is read:
attributes other than the listed methods of texts and lists, imports, lambdas, and unknown names. The number of steps of
an evaluation and the size of its values are limited.
"""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

MAX_CHARS: Final = 2_000
"""Of an expression."""
_MAX_STEPS: Final = 200_000
_MAX_SIZE: Final = 1_000_000
"""Characters of a text, members of a list."""

_COMPARE: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
}
_ARITHMETIC: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: Final[Mapping[type[ast.unaryop], Callable[[Any], Any]]] = {ast.Not: operator.not_, ast.USub: operator.neg}
_MAX_PLACES: Final = 30


def _round(number: float, places: int | None = None) -> float:
    """Round with a limit: Python would compute any power of ten, which may never end."""
    if places is not None and abs(places) > _MAX_PLACES:
        raise ExpressionFailed(f"A number can be rounded to {_MAX_PLACES} places at most.")
    return round(number, places)


_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "abs": abs,
    "all": all,
    "any": any,
    "bool": bool,
    "len": len,
    "max": max,
    "min": min,
    "round": _round,
    "sorted": sorted,
    "str": str,
    "sum": sum,
}
_METHODS: Final = frozenset(
    {"count", "endswith", "find", "get", "isdigit", "keys", "lower", "split", "startswith", "strip", "upper", "values"}
)
_NODES: Final = (
    ast.Expression,
    ast.BoolOp,
    ast.And,
    ast.Or,
    ast.BinOp,
    ast.UnaryOp,
    ast.IfExp,
    ast.Compare,
    ast.Call,
    ast.Constant,
    ast.Attribute,
    ast.Subscript,
    ast.Slice,
    ast.Name,
    ast.Load,
    ast.Store,
    ast.List,
    ast.Tuple,
    ast.Set,
    ast.ListComp,
    ast.GeneratorExp,
    ast.comprehension,
    *_COMPARE,
    *_ARITHMETIC,
    *_UNARY,
)


class ExpressionRefused(ValueError):
    """An expression that is not valid, or uses something that is not allowed."""


class ExpressionFailed(ValueError):
    """An expression that raised an error on its values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """An expression that was read and is allowed."""

    source: str
    tree: ast.expr


def read_expression(source: str, names: frozenset[str]) -> Expression:
    """Parse and check an expression. `names`: those of the values. Raises `ExpressionRefused`."""
    if len(source) > MAX_CHARS:
        raise ExpressionRefused(f"An expression has at most {MAX_CHARS} characters.")
    try:
        tree = ast.parse(source.strip(), mode="eval")
    except SyntaxError as error:
        raise ExpressionRefused(f"This is not an expression: {error.msg}.") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ExpressionRefused(f"This is not an expression: {error}.") from error
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        _check(node, names | bound | _FUNCTIONS.keys())
        if id(node) not in called:
            _check_uncalled(node, names | bound)
    return Expression(source=source, tree=tree.body)


def evaluate(expression: Expression, values: Mapping[str, Any]) -> Any:
    """Evaluate an expression. Raises `ExpressionFailed`."""
    try:
        return _Evaluation(values).evaluate(expression.tree)
    except ExpressionFailed:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ExpressionFailed(f"{type(error).__name__}: {error}") from error


def _check(node: ast.AST, names: frozenset[str]) -> None:
    if not isinstance(node, _NODES):
        raise ExpressionRefused(f"{type(node).__name__} is not allowed here.")
    match node:
        case ast.Name() if node.id not in names:
            raise ExpressionRefused(f"`{node.id}` is not defined. Names: {', '.join(sorted(names))}.")
        case ast.Attribute() if node.attr not in _METHODS:
            raise ExpressionRefused(f"`.{node.attr}` is not allowed. Methods: {', '.join(sorted(_METHODS))}.")
        case ast.Call(func=ast.Name() | ast.Attribute(), keywords=[]):
            return
        case ast.Call():
            raise ExpressionRefused("Functions and methods are called by name, without keyword arguments.")
        case ast.comprehension(is_async=1):
            raise ExpressionRefused("Asynchronous loops are not allowed.")
        case _:
            return


def _check_uncalled(node: ast.AST, values: frozenset[str]) -> None:
    """Refuse a function that is not called. It is always true, so the assertion would check nothing."""
    match node:
        case ast.Name() if node.id not in values:
            raise ExpressionRefused(f"`{node.id}` must be called: {node.id}(...).")
        case ast.Attribute():
            raise ExpressionRefused(f"`.{node.attr}` must be called: .{node.attr}(...).")
        case _:
            return


class _Evaluation:
    """One evaluation of a tree."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._steps = 0

    def evaluate(self, node: ast.expr) -> Any:
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise ExpressionFailed("The evaluation takes too many steps.")
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._values[node.id] if node.id in self._values else _FUNCTIONS[node.id]
            case ast.List() | ast.Tuple() | ast.Set():
                return [self.evaluate(element) for element in node.elts]
            case ast.BoolOp():
                return self._decide(node)
            case ast.IfExp():
                return self.evaluate(node.body if self.evaluate(node.test) else node.orelse)
            case ast.ListComp() | ast.GeneratorExp():
                return list(self._comprehend(node.elt, list(node.generators)))
            case ast.Compare():
                return self._compare(node)
            case _:
                return self._compute(node)

    def _compute(self, node: ast.expr) -> Any:
        match node:
            case ast.UnaryOp():
                return _UNARY[type(node.op)](self.evaluate(node.operand))
            case ast.BinOp():
                return self._calculate(node)
            case ast.Subscript():
                return self.evaluate(node.value)[self._index(node.slice)]
            case ast.Call(func=ast.Attribute() as method):
                owner = self.evaluate(method.value)
                if not isinstance(owner, str | list | dict):
                    raise ExpressionFailed(f"A {type(owner).__name__} has no .{method.attr}.")
                return _within(getattr(owner, method.attr)(*[self.evaluate(argument) for argument in node.args]))
            case ast.Call():
                function = self.evaluate(node.func)
                if function not in _FUNCTIONS.values():
                    raise ExpressionFailed("This is not a function.")
                return _within(function(*[self.evaluate(argument) for argument in node.args]))
            case _:
                raise ExpressionFailed(f"{type(node).__name__} is not an expression.")

    def _decide(self, node: ast.BoolOp) -> Any:
        value: Any = None
        for operand in node.values:
            value = self.evaluate(operand)
            if bool(value) is isinstance(node.op, ast.Or):
                return value
        return value

    def _compare(self, node: ast.Compare) -> bool:
        left = self.evaluate(node.left)
        for comparison, operand in zip(node.ops, node.comparators, strict=True):
            right = self.evaluate(operand)
            if not _COMPARE[type(comparison)](left, right):
                return False
            left = right
        return True

    def _calculate(self, node: ast.BinOp) -> Any:
        left, right = self.evaluate(node.left), self.evaluate(node.right)
        is_plain = isinstance(left, int | float) and isinstance(right, int | float)
        if not is_plain and not isinstance(node.op, ast.Add):
            # A text times a number, or a format with `%`, can have any length.
            raise ExpressionFailed("Operators other than + need numbers.")
        return _within(_ARITHMETIC[type(node.op)](left, right))

    def _index(self, node: ast.expr) -> Any:
        if not isinstance(node, ast.Slice):
            return self.evaluate(node)
        if node.step is not None:
            raise ExpressionFailed("A slice must not have a step.")
        bounds = [None if bound is None else self.evaluate(bound) for bound in (node.lower, node.upper)]
        return slice(*bounds)

    def _comprehend(self, element: ast.expr, loops: list[ast.comprehension]) -> Iterator[Any]:
        if not loops:
            yield self.evaluate(element)
            return
        loop, *inner = loops
        if not isinstance(loop.target, ast.Name):
            raise ExpressionFailed("A loop must have one name.")
        outside = dict(self._values)
        for value in self.evaluate(loop.iter):
            self._values[loop.target.id] = value
            if all(self.evaluate(condition) for condition in loop.ifs):
                yield from self._comprehend(element, inner)
        self._values = outside


def _within(value: Any) -> Any:
    """Return the value, or raise `ExpressionFailed` if it is too large."""
    match value:
        case bool() | float() | None:
            return value
        case int():
            is_large = abs(value) > 10**30
        case str() | list() | dict():
            is_large = len(value) > _MAX_SIZE
        case _:
            value = list(value)
            is_large = len(value) > _MAX_SIZE
    if is_large:
        raise ExpressionFailed("A value is too large.")
    return value
