"""What statements of a function use and set, and where they can be cut out of it."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import BuiltinMethodType, FunctionType, MethodType, MethodWrapperType
from typing import Any

from torch import Tensor

TEST = "_shardwise_test"
"""The name of what a part decides by, where that is computed before it."""
READING = {"float", "int", "bool", "item", "tolist", "numpy", "len", "isinstance", "equal", "allclose"}
CHANGING = {
    "append", "appendleft", "extend", "insert", "pop", "popitem", "popleft", "remove", "clear", "update", "setdefault",
    "add", "discard", "sort", "reverse", "__setitem__", "__setattr__",
}  # fmt: skip
DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def private(tree: ast.FunctionDef) -> bool:
    """Whether names are private to a class, and so others in its code than in its source."""
    names = {one.attr if isinstance(one, ast.Attribute) else one.id for one in ast.walk(tree)
             if isinstance(one, (ast.Attribute, ast.Name))}  # fmt: skip
    return any(name.startswith("__") and not name.endswith("__") for name in names)


def blocks_around(tree: ast.FunctionDef, line: int) -> list[tuple[tuple[tuple[str, int], ...], int]]:
    """Return the statements around a line, the outermost first: the path of the block of each, and its place there."""
    found: list[tuple[tuple[tuple[str, int], ...], int]] = []
    node, path = tree, tuple[tuple[str, int], ...]()
    while True:
        inner = [
            (name, at, one) for name, block in ast.iter_fields(node) if isinstance(block, list)
            for at, one in enumerate(block)
            if isinstance(one, (ast.stmt, ast.excepthandler, ast.match_case)) and _around(one, line)
        ]  # fmt: skip
        if not inner or isinstance(inner[0][2], DEFINES):
            return found
        name, at, one = inner[0]
        if isinstance(one, ast.stmt):
            found.append(((*path, (name, at)), at))
        node, path = one, (*path, (name, at))


def _around(node: Any, line: int) -> bool:
    if isinstance(node, ast.match_case):
        return node.pattern.lineno <= line <= (node.body[-1].end_lineno or 0)
    return bool(node.lineno <= line <= (node.end_lineno or node.lineno))


def inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those in it that are of the same function."""
    yield node
    if not isinstance(node, (ast.Lambda, *DEFINES)):
        for one in ast.iter_child_nodes(node):
            yield from inside(one)


def escapes(statements: Sequence[ast.AST]) -> bool:
    """Whether a ``break`` or ``continue`` leads out of statements."""
    for node in statements:
        if isinstance(node, (ast.Break, ast.Continue)):
            return True
        if isinstance(node, (ast.For, ast.While)):
            if escapes(node.orelse):
                return True
        elif not isinstance(node, DEFINES) and escapes([*ast.iter_child_nodes(node)]):
            return True
    return False


def closed(tree: ast.FunctionDef) -> set[str]:
    """Return the names in functions inside a function."""
    inner = (node for one in tree.body for node in ast.walk(one))
    return names_in(node for node in inner if isinstance(node, (ast.Lambda, *DEFINES)))


def names_in(statements: Iterable[ast.AST], *kinds: type[ast.expr_context]) -> set[str]:
    """Return the names in statements, also in functions inside, that are used in one of these ways (none: in any);
    ``x += 1`` uses ``x`` in both."""
    found = set[str]()
    for node in (each for one in statements for each in ast.walk(one)):
        if isinstance(node, ast.Name) and (not kinds or isinstance(node.ctx, kinds)):
            found.add(node.id)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def names_set(statements: Sequence[ast.AST], inner: bool = True) -> set[str]:
    """Return the names that statements may set, also in scopes ``inner`` to the function's."""
    found = names_in(statements, ast.Store)
    if not inner:  # a comprehension has its own
        every = [node for one in statements for node in ast.walk(one)]
        own = {id(name) for node in every if isinstance(node, ast.comprehension) for name in ast.walk(node.target)}
        found = names_in([node for node in every if isinstance(node, ast.Name) and id(node) not in own], ast.Store)
    return found | _bound(statements)


def _bound(statements: Iterable[ast.AST]) -> set[str]:
    """Return the names that statements set in other ways than by storing: by imports, by ``except``, as arguments."""
    found = set[str]()
    for node in (each for one in statements for each in ast.walk(one)):
        name = getattr(node, "name", None) or getattr(node, "rest", None) or getattr(node, "asname", None)
        if isinstance(node, ast.alias):
            name = name or node.name.partition(".")[0]
        found |= {name} if isinstance(name, str) else set()
        found |= {node.arg} if isinstance(node, ast.arg) else set()
    return found


def locals_of(function: FunctionType) -> set[str]:
    return {*function.__code__.co_varnames, *function.__code__.co_cellvars}


def given_by(
    function: FunctionType, tree: ast.FunctionDef, path: tuple[tuple[str, int], ...], statements: Sequence[ast.stmt]
) -> tuple[str, ...]:  # fmt: skip
    """Return the local names that statements set and that are used after them; in a loop that is anywhere in it."""
    last, later, node = statements[-1], list[ast.AST](), tree
    for name, at in path[:-1]:
        node = getattr(node, name)[at]
        later += [node] if isinstance(node, (ast.For, ast.While)) else []
    end = (last.end_lineno, last.end_col_offset)
    every: list[Any] = [one for one in ast.walk(tree) if hasattr(one, "lineno")]
    later += [one for one in every if (one.lineno, one.col_offset) >= end]
    return tuple(sorted(names_set(statements, inner=False) & locals_of(function) & names_in(later, ast.Load)))


def taken_by(
    function: FunctionType, statements: Sequence[ast.stmt], given: Sequence[str], known: Mapping[str, Any]
) -> list[str]:  # fmt: skip
    """Return the local names that statements use, and in place of an object the attributes of it that they use.  Names
    that they set have a value before, too, if not all ways through them do so."""
    fixed = set(known) & locals_of(function) - names_set(statements)
    found, done = dict[str, None](), set[str]()
    for statement in copy.deepcopy([*statements]):
        narrowed = _Narrowed(known, fixed)
        used = names_in([narrowed.visit(statement)], ast.Load) & locals_of(function) - done
        found |= {**dict.fromkeys(sorted(used)), **narrowed.found}
        if isinstance(statement, ast.Assign):
            done |= names_in(statement.targets, ast.Store)
    return list(found | dict.fromkeys(name for name in given if name not in done))


_METHODS = (MethodType, BuiltinMethodType, MethodWrapperType)


class _Narrowed(ast.NodeTransformer):
    """Replaces attributes of ``fixed`` names, as far as they are no methods, by names: ``found`` says which."""

    def __init__(self, known: Mapping[str, Any], fixed: set[str]) -> None:
        self.known, self.fixed = known, fixed
        self.found: dict[str, None] = {}

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:  # noqa: N802 - the name that ast looks for
        chain, inner = [node], node.value
        while isinstance(inner, ast.Attribute):
            chain.append(inner)
            inner = inner.value
        if not isinstance(inner, ast.Name) or inner.id not in self.fixed or not isinstance(node.ctx, ast.Load):
            return self.generic_visit(node)
        value, last = self.known[inner.id], None
        for one in reversed(chain):
            if isinstance(value, Tensor):
                break
            try:
                value = getattr(value, one.attr)
            except Exception:  # a property may raise anything
                break
            if isinstance(value, _METHODS):
                break
            last = one
        if last is None:
            return self.generic_visit(node)
        self.found[ast.unparse(last)] = None
        renamed: ast.AST = Renamed({ast.unparse(last)}).visit(node)
        return renamed


class Renamed(ast.NodeTransformer):
    """Replaces ``attributes`` by names."""

    def __init__(self, attributes: set[str]) -> None:
        self.attributes = attributes

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:  # noqa: N802 - the name that ast looks for
        text = ast.unparse(node)
        if isinstance(node.ctx, ast.Load) and text in self.attributes:
            return ast.copy_location(ast.Name(name_for(text), ast.Load()), node)
        return self.generic_visit(node)


def name_for(taken: str) -> str:
    return taken.replace(".", "__of__")


def changes_objects(statements: Sequence[ast.stmt], tensors: Mapping[str, Any]) -> bool:
    """Whether statements write to attributes or items of objects that are there before them, or call methods that
    change such; items of ``tensors`` they may write to, which shows."""
    made = names_set(statements)

    def outside(node: ast.AST) -> bool:
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        return not (isinstance(node, ast.Name) and (node.id in made or isinstance(tensors.get(node.id), Tensor)))

    for node in (each for one in statements for each in ast.walk(one)):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store) and outside(node):
            return True
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in CHANGING and outside(called.value):
            return True
    return False


SHAPING = {
    "requires_grad_", "detach_", "resize_", "resize_as_", "set_", "as_strided_", "t_", "transpose_", "swapaxes_",
    "swapdims_", "squeeze_", "unsqueeze_", "rename_",
}  # fmt: skip
"""Methods whose names end as those of in-place ops do, and that change more than values."""


def written_by(statements: Sequence[ast.stmt], known: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of tensors to which statements write in place, and which they do not set to others."""
    found, nodes = set[str](), [node for one in statements for node in ast.walk(one)]
    augmented = {id(node.target) for node in nodes if isinstance(node, ast.AugAssign)}
    for node in nodes:
        goal: ast.AST | None = None
        if isinstance(node, ast.AugAssign):
            goal = node.target
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            goal = node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            goal = node.func.value if name[-1] == "_" != name[-2:-1] and name not in SHAPING else None
        while isinstance(goal, ast.Subscript):
            goal = goal.value
        if isinstance(goal, ast.Name) and isinstance(known.get(goal.id), Tensor):
            found.add(goal.id)
    plain = [node for node in nodes if isinstance(node, ast.Name) and id(node) not in augmented]
    others = names_in(plain, ast.Store) | _bound(statements)
    return tuple(sorted(found - others))


def decides(statements: Sequence[ast.stmt]) -> bool:
    """Whether statements compare or branch, but for the test of the first that is put before them."""
    found = [node for one in statements for node in ast.walk(one)]
    branches = [node for node in found if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.For, ast.Match, ast.Try))]
    return len(branches) != 1 or any(isinstance(node, (ast.Compare, ast.BoolOp, ast.comprehension)) for node in found)


def hoisted(statement: ast.stmt) -> ast.expr | None:
    """Put the name :data:`TEST` in place of the test by which a statement decides, and return that test; None where
    there is not one test, or where it reads values itself."""
    if isinstance(statement, ast.If):
        deciding: list[Any] = [statement]
    elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)):
        deciding = [node for node in inside(statement) if isinstance(node, ast.IfExp)]
    else:
        return None
    scoped = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr, ast.Lambda)
    if len(deciding) != 1 or any(isinstance(node, scoped) for node in ast.walk(deciding[0].test)):
        return None
    if not isinstance(statement, ast.If) and any(isinstance(node, scoped) for node in ast.walk(statement)):
        return None
    holder, field = deciding[0], "test"
    while isinstance(getattr(holder, field), ast.UnaryOp) and isinstance(getattr(holder, field).op, ast.Not):
        holder, field = getattr(holder, field), "operand"
    test: ast.expr = getattr(holder, field)
    branches = (ast.BoolOp, ast.IfExp)
    if not isinstance(test, (ast.Compare, ast.Call)) or any(isinstance(node, branches) for node in ast.walk(test)):
        return None
    called = {node.func.id for node in ast.walk(test) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    asked = {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}
    if called & READING or asked & READING:
        return None
    setattr(holder, field, ast.copy_location(ast.Name(TEST, ast.Load()), test))
    return test


__all__ = [
    "DEFINES", "TEST", "Renamed", "blocks_around", "changes_objects", "closed", "decides", "escapes", "given_by",
    "hoisted", "inside", "name_for", "names_in", "names_set", "private", "taken_by",
    "written_by",
]  # fmt: skip
