"""Parts of functions, statement by statement, as functions of their own.

Where forward reads values in line with its layers (``if h.mean() > 0: h = 2 * h``), no function can be left out of the
capture without the layers beside it.  So the statements around the read become a function, of the names that they use,
which returns those that they set; the function that had them calls it in their place while a model is captured.  The
smallest part comes first: the statement that read, then with those that follow it, then the statement around them.
"""

from __future__ import annotations

import ast
import copy
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import BuiltinMethodType, CodeType, FrameType, FunctionType, MethodType, MethodWrapperType
from typing import Any, NamedTuple

from torch import Tensor

UNBOUND = "<unbound>"
"""It stands for a name that has no value."""
FOLLOWING = 3  # the most statements after one that are put into its part
_PART = "part"
_FRAME = {"locals", "vars", "eval", "exec", "dir"}  # they see all names of the function that calls them
_CLASS = {"super", "__class__"}


class Part(NamedTuple):
    """Statements of ``function``, those ``first`` to ``last`` of the block at ``path`` in its code: ``taken`` are the
    names and attributes that they use, ``given`` the names that they set and are used elsewhere.  With ``ends`` they
    are the last ones of the function, and return what it returns.  The ``innermost`` function is the one that reads
    values; others call it."""

    function: FunctionType
    path: tuple[tuple[str, int], ...]
    first: int
    last: int
    taken: tuple[str, ...]
    given: tuple[str, ...]
    ends: bool
    innermost: bool

    def block(self, tree: ast.FunctionDef) -> list[ast.stmt]:
        """Return the block of statements in a tree of the function's code."""
        node: Any = tree
        for name, index in self.path[:-1]:
            node = getattr(node, name)[index]
        found: list[ast.stmt] = getattr(node, self.path[-1][0])
        return found

    def lines(self, tree: ast.FunctionDef) -> tuple[int, int]:
        """Return the first and the last line in the file."""
        block = self.block(tree)
        return block[self.first].lineno, block[self.last].end_lineno or block[self.last].lineno

    def within(self, other: Part) -> bool:
        """Whether all of this is in another part of the same function."""
        depth = len(other.path) - 1
        if len(self.path) <= depth or self.path[:depth] != other.path[:depth]:
            return False
        name, at = self.path[depth]
        first, last = (self.first, self.last) if len(self.path) == depth + 1 else (at, at)
        return name == other.path[depth][0] and other.first <= first and last <= other.last


def part_of(function: FunctionType) -> Part | None:
    """Return the part that a function made by :func:`parts` is."""
    found: Part | None = getattr(function, _PART, None)
    return found


def parts(function: FunctionType, frame: FrameType, line: int, innermost: bool = True) -> Iterator[FunctionType]:
    """Yield the parts of a function around a line at which a ``frame`` of it has stopped, as functions, the smallest
    first; the ``innermost`` function is the one that reads values.

    There are none where the code cannot be read, or does what only all of a function can do."""
    tree = _tree(function.__code__)
    if tree is None or _private(tree) or _names([tree]) & _FRAME:
        return
    if any(isinstance(node, _WHOLE) for node in ast.walk(tree)):
        return
    for path, at in reversed(_blocks(tree, line)):
        block = Part(function, path, at, at, (), (), False, innermost).block(tree)
        for last in range(at, min(at + FOLLOWING + 1, len(block))):
            ends = any(isinstance(node, ast.Return) for one in block[at : last + 1] for node in _inside(one))
            last = len(block) - 1 if ends else last
            statements = block[at : last + 1]
            if (ends and len(path) > 1) or _escapes(statements) or _names(statements) & _CLASS:
                break
            if any(isinstance(node, _DEFINES) for one in statements for node in ast.walk(one)):
                break  # a function inside would see the names of the part
            if _set(statements) & _closed(tree):
                break  # and one outside those of the whole
            given = () if ends else _given(function, tree, path, statements)
            taken = _taken(function, statements, given, frame.f_locals)
            yield _made(Part(function, path, at, last, tuple(taken), given, ends, innermost), tree)
            if ends:
                break


_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_WHOLE = (ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom, ast.Await, ast.Delete)


def _tree(code: CodeType) -> ast.FunctionDef | None:
    """Return the tree of a function's code, with the lines of its file; None where there is no source."""
    try:
        lines, start = inspect.getsourcelines(code)
        text = "".join(lines)
        shift = 1 if text[:1].isspace() else 0
        tree = ast.parse(f"if 1:\n{text}" if shift else text)
    except (OSError, SyntaxError, TypeError):
        return None
    ast.increment_lineno(tree, start - 1 - shift)
    first = tree.body[0].body[0] if shift else tree.body[0]  # type: ignore[attr-defined]
    return first if isinstance(first, ast.FunctionDef) and first.name == code.co_name else None


def _private(tree: ast.FunctionDef) -> bool:
    """Whether names are private to a class, and so others in its code than in its source."""
    names = {one.attr if isinstance(one, ast.Attribute) else one.id for one in ast.walk(tree)
             if isinstance(one, (ast.Attribute, ast.Name))}  # fmt: skip
    return any(name.startswith("__") and not name.endswith("__") for name in names)


def _blocks(tree: ast.FunctionDef, line: int) -> list[tuple[tuple[tuple[str, int], ...], int]]:
    """Return the statements around a line, the outermost first: the path of the block of each, and its place there."""
    found: list[tuple[tuple[tuple[str, int], ...], int]] = []
    node, path = tree, tuple[tuple[str, int], ...]()
    while True:
        inner = [
            (name, at, one) for name, block in ast.iter_fields(node) if isinstance(block, list)
            for at, one in enumerate(block)
            if isinstance(one, (ast.stmt, ast.excepthandler, ast.match_case)) and _around(one, line)
        ]  # fmt: skip
        if not inner or isinstance(inner[0][2], _DEFINES):
            return found
        name, at, one = inner[0]
        if isinstance(one, ast.stmt):
            found.append(((*path, (name, at)), at))
        node, path = one, (*path, (name, at))


def _around(node: Any, line: int) -> bool:
    if isinstance(node, ast.match_case):
        return node.pattern.lineno <= line <= (node.body[-1].end_lineno or 0)
    return bool(node.lineno <= line <= (node.end_lineno or node.lineno))


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those in it that are of the same function."""
    yield node
    if not isinstance(node, (ast.Lambda, *_DEFINES)):
        for one in ast.iter_child_nodes(node):
            yield from _inside(one)


def _escapes(statements: Sequence[ast.AST]) -> bool:
    """Whether a ``break`` or ``continue`` leads out of statements."""
    for node in statements:
        if isinstance(node, (ast.Break, ast.Continue)):
            return True
        if isinstance(node, (ast.For, ast.While)):
            if _escapes(node.orelse):
                return True
        elif not isinstance(node, _DEFINES) and _escapes([*ast.iter_child_nodes(node)]):
            return True
    return False


def _closed(tree: ast.FunctionDef) -> set[str]:
    """Return the names in functions inside a function."""
    inner = (node for one in tree.body for node in ast.walk(one))
    return _names(node for node in inner if isinstance(node, (ast.Lambda, *_DEFINES)))


def _names(statements: Iterable[ast.AST], *kinds: type[ast.expr_context]) -> set[str]:
    """Return the names in statements, also in functions inside, that are used in one of these ways (none: in any);
    ``x += 1`` uses ``x`` in both."""
    found = set[str]()
    for node in (each for one in statements for each in ast.walk(one)):
        if isinstance(node, ast.Name) and (not kinds or isinstance(node.ctx, kinds)):
            found.add(node.id)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def _set(statements: Sequence[ast.AST], inner: bool = True) -> set[str]:
    """Return the names that statements may set, also in scopes ``inner`` to the function's."""
    found = _names(statements, ast.Store)
    if not inner:  # a comprehension has its own
        every = [node for one in statements for node in ast.walk(one)]
        own = {id(name) for node in every if isinstance(node, ast.comprehension) for name in ast.walk(node.target)}
        found = _names([node for node in every if isinstance(node, ast.Name) and id(node) not in own], ast.Store)
    for node in (each for one in statements for each in ast.walk(one)):
        name = getattr(node, "name", None) or getattr(node, "rest", None) or getattr(node, "asname", None)
        if isinstance(node, ast.alias):
            name = name or node.name.partition(".")[0]
        found |= {name} if isinstance(name, str) else set()
        found |= {node.arg} if isinstance(node, ast.arg) else set()
    return found


def _locals(function: FunctionType) -> set[str]:
    return {*function.__code__.co_varnames, *function.__code__.co_cellvars}


def _given(
    function: FunctionType, tree: ast.FunctionDef, path: tuple[tuple[str, int], ...], statements: Sequence[ast.stmt]
) -> tuple[str, ...]:  # fmt: skip
    """Return the local names that statements set and that are used after them; in a loop that is anywhere in it."""
    end, later, node = statements[-1].end_lineno or 0, list[ast.AST](), tree
    for name, at in path[:-1]:
        node = getattr(node, name)[at]
        later += [node] if isinstance(node, (ast.For, ast.While)) else []
    later += [one for one in ast.walk(tree) if getattr(one, "lineno", 0) > end]
    return tuple(sorted(_set(statements, inner=False) & _locals(function) & _names(later, ast.Load)))


def _taken(
    function: FunctionType, statements: Sequence[ast.stmt], given: Sequence[str], known: Mapping[str, Any]
) -> list[str]:  # fmt: skip
    """Return the local names that statements use, and in place of an object the attributes of it that they use.  Names
    that they set have a value before, too, if not all ways through them do so."""
    fixed = set(known) & _locals(function) - _set(statements)
    found, done = dict[str, None](), set[str]()
    for statement in copy.deepcopy([*statements]):
        narrowed = _Narrowed(known, fixed)
        used = _names([narrowed.visit(statement)], ast.Load) & _locals(function) - done
        found |= {**dict.fromkeys(sorted(used)), **narrowed.found}
        if isinstance(statement, ast.Assign):
            done |= _names(statement.targets, ast.Store)
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
        renamed: ast.AST = _Renamed({ast.unparse(last)}).visit(node)
        return renamed


class _Renamed(ast.NodeTransformer):
    """Replaces ``attributes`` by names."""

    def __init__(self, attributes: set[str]) -> None:
        self.attributes = attributes

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:  # noqa: N802 - the name that ast looks for
        text = ast.unparse(node)
        if isinstance(node.ctx, ast.Load) and text in self.attributes:
            return ast.copy_location(ast.Name(_name(text), ast.Load()), node)
        return self.generic_visit(node)


def _name(taken: str) -> str:
    return taken.replace(".", "__of__")


def _made(part: Part, tree: ast.FunctionDef) -> FunctionType:
    """Return a part as a function."""
    function: Any = part.function
    block = part.block(tree)[part.first : part.last + 1]
    renamed = _Renamed({one for one in part.taken if "." in one})
    body = [renamed.visit(copy.deepcopy(one)) for one in block]
    names = [_name(one) for one in part.taken]
    start = [_parsed(f"if {name} is {UNBOUND!r}: del {name}", body[0]) for name in names]
    given = ", ".join(_get(name) for name in part.given)
    end = [] if part.ends else [_parsed(f"return ({given}{',' * bool(part.given)})", body[-1])]
    code = _compiled(function, f"def {function.__name__}_part({', '.join(names)}): pass", [*start, *body, *end])
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    first, last = part.lines(tree)
    where = f"line {first}" if first == last else f"lines {first} to {last}"
    code = code.replace(co_qualname=f"{function.__qualname__} ({where})")
    found = FunctionType(
        code, function.__globals__, code.co_name, None, tuple(cells[name] for name in code.co_freevars)
    )  # fmt: skip
    found.__qualname__, found.__module__ = code.co_qualname, function.__module__
    setattr(found, _PART, part)
    return found


def with_parts(functions: Iterable[FunctionType]) -> dict[FunctionType, CodeType]:
    """Return the code of each function of which some are parts that calls these in place of its statements."""
    every: dict[FunctionType, dict[Part, FunctionType]] = {}
    for one in functions:
        if (part := part_of(one)) is not None:
            every.setdefault(part.function, {})[part] = one
    return {function: _calling(function, made) for function, made in every.items()}


def _calling(function: FunctionType, made: Mapping[Part, FunctionType]) -> CodeType:
    tree = _tree(function.__code__)
    assert tree is not None  # the parts were made of it
    outer = [p for p in made if not any(p is not other and p.within(other) for other in made)]
    blocks = [(part.block(tree), part) for part in outer]
    constants: dict[str, Any] = {}
    for block, part in sorted(blocks, key=lambda one: -one[1].first):
        key = f"<part {len(constants)}>"
        constants[key] = made[part]
        given = ", ".join(part.given)
        text = f"{key!r}({', '.join(_get(one) for one in part.taken)})"
        text = f"return {text}" if part.ends else f"({given},) = {text}" if part.given else text
        calls = [_parsed(one, block[part.first]) for one in (
            text, *(f"if {name} is {UNBOUND!r}: del {name}" for name in part.given)
        )]  # fmt: skip
        block[part.first : part.last + 1] = calls
    code = _compiled(function, None, tree.body, tree)
    code = code.replace(co_consts=tuple(
        constants.get(one, one) if isinstance(one, str) else one for one in code.co_consts
    ))  # fmt: skip
    if code.co_freevars != function.__code__.co_freevars:
        raise AssertionError(f"{function.__qualname__} with its parts closes over other names")
    return code.replace(co_qualname=function.__code__.co_qualname)


def _get(taken: str) -> str:
    """Return an expression for a name or an attribute; it gives :data:`UNBOUND` for a name without a value."""
    return taken if "." in taken else f"locals().get({taken!r}, {UNBOUND!r})"


def _parsed(text: str, near: ast.AST) -> ast.stmt:
    """Return the tree of a statement, which stands where ``near`` does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        (found,) = ast.parse(text).body
    for node in ast.walk(found):
        ast.copy_location(node, near)
    return found


def _compiled(
    function: FunctionType, signature: str | None, body: list[ast.stmt], tree: ast.FunctionDef | None = None
) -> CodeType:
    """Return the code of a function with a ``body`` and a ``signature``, or that of ``tree``, which closes over what
    ``function`` closes over."""
    closed = function.__code__.co_freevars
    if tree is None:
        assert signature is not None
        found = ast.parse(signature).body[0]
        assert isinstance(found, ast.FunctionDef)
        found.body = body
    else:
        found = tree
        found.decorator_list, found.returns = [], None
        own = found.args
        own.defaults, own.kw_defaults = [], [None] * len(own.kwonlyargs)
        for one in (*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg):
            if one is not None:
                one.annotation = None
        if closed:  # code that a function takes closes over the same names
            found.body = [_parsed(f"if False: ({', '.join(closed)},)", body[0]), *body]
    outer = ast.parse(f"def outer({', '.join(closed)}): pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [found]
    module = ast.fix_missing_locations(ast.Module([outer], []))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # strings stand for what is called and compared
        code = compile(module, function.__code__.co_filename, "exec", dont_inherit=True)
    for _ in range(2):
        code = next(one for one in code.co_consts if isinstance(one, CodeType))
    return code.replace(co_consts=tuple(UNBOUND if one == UNBOUND else one for one in code.co_consts))


__all__ = ["UNBOUND", "Part", "part_of", "parts", "with_parts"]
