"""Each way to weaken the judge by one thing, found in its source: so a new check has its weakenings, too.

A weakening leaves out a check, one of its conditions, a part of what it compares, a call of it, or what the judge
remembers for it; or lets a bound pass that is just reached; or excuses more than the judge does."""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final
from unittest.mock import patch

from tests.simulation import electorate
from tests.simulation.invariants import Invariants
from tests.simulation.liveness import Liveness

JUDGES: Final = (Invariants, Liveness, electorate)
NO_JUDGES: Final = {"__init__", "forget", "_look", "put_back"}
"""Functions of these that only build, forget or play the operator."""
LOOSER: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {ast.GtE: ast.Gt, ast.LtE: ast.Lt}
WIDER: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {ast.Gt: ast.GtE, ast.Lt: ast.LtE}

Change = Callable[[ast.AST], ast.AST]


@dataclass(frozen=True)
class Weakening:
    """One function of the judge with one thing less."""

    name: str
    owner: Any
    function: str
    tree: ast.Module

    def applied(self) -> AbstractContextManager[Any]:
        """Return what puts the weaker function in the place of the judge's."""
        original = getattr(self.owner, self.function)
        made: dict[str, Any] = {}
        exec(compile(self.tree, f"<{self.name}>", "exec"), original.__globals__, made)
        if original in getattr(self.owner, "_JUDGES", {}).values():
            kind = next(kind for kind, judge in self.owner._JUDGES.items() if judge is original)
            return patch.dict(self.owner._JUDGES, {kind: made[self.function]})
        return patch.object(self.owner, self.function, made[self.function])


def weakenings() -> Iterator[Weakening]:
    """Return all, in order of the source."""
    for owner in JUDGES:
        for name, function in list(vars(owner).items()):
            mine = isinstance(function, FunctionType) and function.__module__ == (
                owner.__module__ if inspect.isclass(owner) else owner.__name__
            )
            if mine and name not in NO_JUDGES:
                yield from _of(owner, name, ast.parse(textwrap.dedent(inspect.getsource(function))))


def _of(owner: Any, name: str, tree: ast.Module) -> Iterator[Weakening]:
    numbers = {id(node): number for number, node in enumerate(ast.walk(tree))}
    for node in ast.walk(tree):
        for target, what, change in _changes(node):
            changed = copy.deepcopy(tree)
            twin = next(one for number, one in enumerate(ast.walk(changed)) if number == numbers[id(target)])
            ast.fix_missing_locations(_Replaced(twin, change).visit(changed))
            text = " ".join(ast.unparse(target).split())
            yield Weakening(f"{owner.__name__.split('.')[-1]}.{name}: {what}: {text[:90]}", owner, name, changed)


class _Replaced(ast.NodeTransformer):
    """Puts what `change` makes of one node in its place."""

    def __init__(self, target: ast.AST, change: Change) -> None:
        self._target, self._change = target, change

    def visit(self, node: ast.AST) -> Any:
        return self._change(node) if node is self._target else self.generic_visit(node)


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, str, Change]]:
    """Return what may change in a statement for it to be weaker, and how."""
    if _is_refusal(node):
        yield node, "no such check", _pass
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _is_own(node.value.func):
        yield node, "not called", _pass
    if isinstance(node, ast.Assign) and any(_is_memory(target) for target in node.targets):
        yield node, "not remembered", _pass
    if isinstance(node, ast.If) and any(_is_refusal(one) for one in node.body):
        for part in ast.walk(node.test):
            if isinstance(part, ast.BoolOp) and isinstance(part.op, ast.Or):
                yield from ((condition, "left out", _false) for condition in part.values)
            if isinstance(part, ast.Compare) and type(part.ops[0]) in LOOSER:
                yield part, "reached is no more broken", _with(LOOSER)
            if isinstance(part, ast.Compare) and isinstance(part.left, ast.Tuple):
                numbers = range(len(part.left.elts))
                yield from ((part, f"part {number + 1} not compared", _shorter(number)) for number in numbers)
    if isinstance(node, ast.If) and _excuses(node.body[-1]):
        for part in ast.walk(node.test):
            if isinstance(part, ast.BoolOp) and isinstance(part.op, ast.And):
                yield from ((condition, "excused without", _true) for condition in part.values)
            if isinstance(part, ast.Compare) and type(part.ops[0]) in WIDER and ".now" not in ast.unparse(part):
                yield part, "reached is excused", _with(WIDER)


def _excuses(node: ast.stmt) -> bool:
    """Return whether nothing is judged from here on."""
    return isinstance(node, ast.Return) and (node.value is None or ast.unparse(node.value) in ("False", "''"))


def _is_refusal(node: ast.AST) -> bool:
    """Return whether a statement says that something does not hold."""
    if isinstance(node, ast.Return):
        text = node.value
        return isinstance(text, ast.JoinedStr) or (isinstance(text, ast.Constant) and text.value not in ("", None, True, False))
    return isinstance(node, ast.Raise)


def _is_own(function: ast.expr) -> bool:
    """Return whether this is a check, or a note of the judge's."""
    text = ast.unparse(function)
    return text.startswith(("self.", "electorate.")) and not text.startswith(("self._world.", "self._records."))


def _is_memory(target: ast.expr) -> bool:
    return isinstance(target, ast.Subscript) and ast.unparse(target.value) not in ("self._records",)


def _pass(node: ast.AST) -> ast.AST:
    return ast.Pass()


def _false(node: ast.AST) -> ast.AST:
    return ast.Constant(False)


def _true(node: ast.AST) -> ast.AST:
    return ast.Constant(True)


def _with(operators: Mapping[type[ast.cmpop], type[ast.cmpop]]) -> Change:
    def change(node: ast.AST) -> ast.AST:
        assert isinstance(node, ast.Compare)
        node.ops[0] = operators[type(node.ops[0])]()
        return node

    return change


def _shorter(number: int) -> Change:
    def change(node: ast.AST) -> ast.AST:
        assert isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators):
            if isinstance(side, ast.Tuple):
                del side.elts[number]
        return node

    return change
