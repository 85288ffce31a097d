"""Each way to weaken the judge, or a fault of the simulator, by one thing. They are found in the source: so a new check
has its weakenings, too.

A weakening leaves out a check, one of its conditions, a part of what it compares, a call of it, or what the judge
remembers for it; or lets a bound pass that is just reached; or excuses more than the judge does."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from types import FunctionType
from typing import Any, Final
from unittest.mock import patch

from tests.simulation import aftermath, electorate, faults, rare_faults
from tests.simulation.disk import Disk
from tests.simulation.invariants import Invariants
from tests.simulation.liveness import Liveness
from tests.simulation.machine import Machine
from tests.simulation.net import Network
from tests.simulation.world import World

JUDGES: Final = (Invariants, Liveness, electorate)
NO_JUDGES: Final = {"__init__", "forget", "_look", "put_back"}
"""Functions of these that only build, forget or play the operator."""
LOOSER: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {ast.GtE: ast.Gt, ast.LtE: ast.Lt}
WIDER: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {ast.Gt: ast.GtE, ast.Lt: ast.LtE}

FAULTS: Final = (
    (faults, "_cut _crash _restore _rate _freeze _slow_peer _slow_disks _operator _suspect _slow_types"),
    (rare_faults, "_damage _pause _resume"),
    (aftermath, "_lose_disk"),
    (Network, "has_parted is_cut delays add_cut end_cut"),
    (Disk, "crash damage save_backup restore _put"),
    (Machine, "stop jump step"),
    (World, "_heal restart crash _end_coordinator started suspect send transmit _receive"),
)
QUIET: Final = (
    "covered",
    "note(",
    "steps",
    "sends",
    "invariants.sent",
    "_count",
    "trac",
    "aftermath",
    "liveness",
    "coordinator",
    "life != life",
)
"""What is in statements that only count, tell, judge or are of the aftermath."""

Change = Callable[[ast.AST], ast.AST]
Changes = Callable[[ast.AST], Iterator[tuple[ast.AST, str, Change]]]


@dataclass(frozen=True)
class Weakening:
    """One function of the judge with one thing less."""

    name: str
    owner: Any
    function: str
    number: int
    """Of the node that changes, in the order of `ast.walk`."""
    change: Change

    @cached_property
    def tree(self) -> ast.Module:
        """The weaker function. Each is made where it is tested: all workers of pytest list them, and one tests them."""
        made = _source_tree(self.owner, self.function)
        target = next(islice(ast.walk(made), self.number, None))
        weaker: ast.Module = ast.fix_missing_locations(_Replaced(target, self.change).visit(made))
        return weaker

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the weaker function in the place of the whole one, also in tables of its owner."""
        original = getattr(self.owner, self.function)
        made: dict[str, Any] = {}
        exec(compile(self.tree, f"<{self.name}>", "exec"), original.__globals__, made)
        weaker = made[self.function]
        with ExitStack() as stack:
            stack.enter_context(patch.object(self.owner, self.function, weaker))
            for table in vars(self.owner).values():
                if isinstance(table, dict):
                    found = {key: weaker for key, value in table.items() if value is original}
                    stack.enter_context(patch.dict(table, found))
            yield


def weaker_judges() -> Iterator[Weakening]:
    """Return all of the judge, in order of the source."""
    for owner in JUDGES:
        for name, function in list(vars(owner).items()):
            mine = isinstance(function, FunctionType) and function.__module__ == (
                owner.__module__ if inspect.isclass(owner) else owner.__name__
            )
            if mine and name not in NO_JUDGES:
                yield from _of(owner, name, _changes)


def weaker_faults() -> Iterator[Weakening]:
    """Return all of the faults: each without one thing that it does."""
    for owner, names in FAULTS:
        for name in names.split():
            yield from _of(owner, name, _deletions)


def _of(owner: Any, name: str, changes: Changes) -> Iterator[Weakening]:
    tree = _source_tree(owner, name)
    numbers = {id(node): number for number, node in enumerate(ast.walk(tree))}
    for node in ast.walk(tree):
        for target, what, change in changes(node):
            text = " ".join(ast.unparse(target).split())
            title = f"{owner.__name__.split('.')[-1]}.{name}: {what}: {text[:90]}"
            yield Weakening(title, owner, name, numbers[id(target)], change)


def _source_tree(owner: Any, name: str) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(getattr(owner, name))))


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


def _deletions(node: ast.AST) -> Iterator[tuple[ast.AST, str, Change]]:
    """Return the node, if it is a statement that does something beyond its function, or ends it early."""
    does = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    targets = (
        node.targets
        if isinstance(node, ast.Assign | ast.Delete)
        else [node.target]
        if isinstance(node, ast.AugAssign)
        else []
    )
    if (
        does
        or any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets)
        or isinstance(node, ast.AugAssign)
    ) and not any(quiet in ast.unparse(node) for quiet in QUIET):
        yield node, "left out", _pass
    if isinstance(node, ast.If) and not any(quiet in ast.unparse(node.test) for quiet in QUIET):
        yield node.test, "never", _false


def _is_refusal(node: ast.AST) -> bool:
    """Return whether a statement says that something does not hold."""
    if isinstance(node, ast.Return):
        text = node.value
        return isinstance(text, ast.JoinedStr) or (
            isinstance(text, ast.Constant) and text.value not in ("", None, True, False)
        )
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
