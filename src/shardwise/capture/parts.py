"""Parts of functions, statement by statement, as functions of their own.

Where forward reads values in line with its layers (``if h.mean() > 0: h = 2 * h``), no function can be left out of the
capture without the layers beside it.  So the statements around the read become a function, of the names that they use,
which returns those that they set; the function that had them calls it in their place while a model is captured.  The
smallest part comes first: the statement that read, then with those that follow it, then the statement around them.
Where a statement decides by one test, which reads nothing itself, that is computed before the part, which is given it:
so the test stays in the graph, and all that the part decides by is an argument.
Where statements write to a tensor in place, their part writes to a copy, and the function writes that to the tensor: so
the write is in the graph, and all that has memory of the tensor sees it.
"""

from __future__ import annotations
import __future__

import ast
import copy
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from torch import Tensor

from shardwise.capture.statements import (
    DEFINES,
    TEST,
    Renamed,
    blocks_around,
    changes_objects,
    closed,
    decides,
    escapes,
    given_by,
    hoisted,
    inside,
    name_for,
    names_in,
    names_set,
    private,
    taken_by,
    written_by,
)

UNBOUND = "<unbound>"
"""It stands for a name that has no value."""
ATTRIBUTE = "<attribute>"  # stands for what reads one
COPY, WRITE = "<copy>", "<write>"  # stand for what copies a tensor, and what writes to one
FOLLOWING = 3  # the most statements after one that are put into its part
_PART = "part"
_FRAME = {"locals", "vars", "eval", "exec", "dir"}  # they see all names of the function that calls them
_CLASS = {"super", "__class__"}


class Part(NamedTuple):
    """Statements of ``function``, those ``first`` to ``last`` of the block at ``path`` in its code: ``taken`` are the
    names and attributes that they use, ``given`` the names that they set and are used elsewhere.  With ``ends`` they
    are the last ones of the function, and return what it returns.  The ``innermost`` function is the one that reads
    values; others call it.  ``tested`` says that the part is given the test by which its first statement decides, and
    ``alone`` that it compares nothing else, and has no other branch.  The names ``written`` are of tensors to which the
    statements write in place, and are among those ``given``."""

    function: FunctionType
    path: tuple[tuple[str, int], ...]
    first: int
    last: int
    taken: tuple[str, ...]
    given: tuple[str, ...]
    ends: bool
    innermost: bool
    tested: bool = False
    alone: bool = False
    written: tuple[str, ...] = ()

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
    if tree is None or private(tree) or names_in([tree]) & _FRAME:
        return
    if any(isinstance(node, _WHOLE) for node in ast.walk(tree)):
        return
    for path, at in reversed(blocks_around(tree, line)):
        block = Part(function, path, at, at, (), (), False, innermost).block(tree)
        for last in range(at, min(at + FOLLOWING + 1, len(block))):
            ends = _ends(block[at : last + 1])
            last = len(block) - 1 if ends else last
            statements = block[at : last + 1]
            if (ends and len(path) > 1) or escapes(statements) or names_in(statements) & _CLASS:
                break
            if any(isinstance(node, DEFINES) for one in statements for node in ast.walk(one)):
                break  # a function inside would see the names of the part
            written = () if ends else written_by(statements, frame.f_locals)
            if names_set(statements).union(written) & closed(tree):
                break  # and one outside those of the whole
            if changes_objects(statements, frame.f_locals):
                break  # a branch that is seen later may do so, of which nothing would be left
            given = () if ends else _given(function, tree, path, statements, written)
            for tested in (True, False):
                own = copy.deepcopy(statements)
                if not tested or hoisted(own[0]) is not None:
                    taken, alone = tuple(taken_by(function, own, given, frame.f_locals)), tested and not decides(own)
                    part = Part(function, path, at, last, taken, given, ends, innermost, tested, alone, written)
                    yield _made(part, tree)
            if ends:
                break


def part_with(
    function: FunctionType, path: tuple[tuple[str, int], ...], first: int, last: int, taken: tuple[str, ...],
    innermost: bool, tested: bool, written: tuple[str, ...],
) -> FunctionType:  # fmt: skip
    """Return again the part of a function that :func:`parts` yielded with these fields; raise :class:`LookupError`
    where its code has no such statements."""
    tree = _tree(function.__code__)
    if tree is None:
        raise LookupError(f"{function.__qualname__} has no source")
    part = Part(function, path, first, last, taken, (), False, innermost, tested, written=written)
    statements = part.block(tree)[first : last + 1]
    own = copy.deepcopy(statements)
    if tested and hoisted(own[0]) is None:
        raise LookupError(f"{function.__qualname__} does not decide by one test there")
    ends, alone = _ends(statements), tested and not decides(own)
    given = () if ends else _given(function, tree, path, statements, written)
    return _made(part._replace(given=given, ends=ends, alone=alone), tree)


def _given(
    function: FunctionType, tree: ast.FunctionDef, path: tuple[tuple[str, int], ...], statements: list[ast.stmt],
    written: Iterable[str],
) -> tuple[str, ...]:  # fmt: skip
    return tuple(sorted({*given_by(function, tree, path, statements), *written}))


def _ends(statements: Iterable[ast.stmt]) -> bool:
    return any(isinstance(node, ast.Return) for one in statements for node in inside(one))


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
    if code not in _codes(code.co_filename, "".join(inspect.findsource(code)[0])):
        return None  # the file is another than when it was imported
    ast.increment_lineno(tree, start - 1 - shift)
    first = tree.body[0].body[0] if shift else tree.body[0]  # type: ignore[attr-defined]
    return first if isinstance(first, ast.FunctionDef) and first.name == code.co_name else None


@lru_cache(maxsize=16)
def _codes(filename: str, text: str) -> frozenset[CodeType]:
    """Return the code of all functions of a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        found = [compile(text, filename, "exec", dont_inherit=True)]
    for one in found:
        found += [inner for inner in one.co_consts if isinstance(inner, CodeType)]
    return frozenset(found)


def _made(part: Part, tree: ast.FunctionDef) -> FunctionType:
    """Return a part as a function."""
    function: Any = part.function
    block = part.block(tree)[part.first : part.last + 1]
    renamed, body = Renamed({one for one in part.taken if "." in one}), copy.deepcopy(block)
    if part.tested:
        hoisted(body[0])
    body = [renamed.visit(one) for one in body]
    names = [TEST] * part.tested + [name_for(one) for one in part.taken]
    copies = {name: f"\nelse: {name} = {COPY!r}({name})" for name in part.written}
    start = [_parsed(f"if {name} is {UNBOUND!r}: del {name}{copies.get(name, '')}", body[0]) for name in names]
    given = ", ".join(_get(name) for name in part.given)
    end = [] if part.ends else [_parsed(f"return ({given}{',' * bool(part.given)})", body[-1])]
    code = _compiled(function, f"def {function.__name__}_part({', '.join(names)}): pass", [*start, *body, *end])
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    first, last = part.lines(tree)
    where = f"line {first}" if first == last else f"lines {first} to {last}"
    code = _filled(code, {COPY: _copy}).replace(co_qualname=f"{function.__qualname__} ({where})")
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
    every = list(made)
    outer = [
        p for i, p in enumerate(every)
        if not any(i != j and p.within(q) and (i < j or not q.within(p)) for j, q in enumerate(every))
    ]  # fmt: skip
    blocks = [(part.block(tree), part) for part in outer]
    constants: dict[str, Any] = {ATTRIBUTE: _attribute, WRITE: _write}
    for block, part in sorted(blocks, key=lambda one: -one[1].first):
        key = f"<part {len(constants)}>"
        constants[key] = made[part]
        given = ", ".join(_new(name) if name in part.written else name for name in part.given)
        test = hoisted(copy.deepcopy(block[part.first])) if part.tested else None
        arguments = [*([] if test is None else [ast.unparse(test)]), *map(_get, part.taken)]
        text = f"{key!r}({', '.join(arguments)})"
        text = f"return {text}" if part.ends else f"({given},) = {text}" if part.given else text
        calls = [_parsed(one, block[part.first]) for one in (
            text, *(f"{name} = {WRITE!r}({_get(name)}, {_new(name)})" for name in part.written),
            *(f"if {name} is {UNBOUND!r}: del {name}" for name in part.given),
        )]  # fmt: skip
        block[part.first : part.last + 1] = calls
    code = _compiled(function, None, tree.body, tree)
    code = _filled(code, constants)
    if code.co_freevars != function.__code__.co_freevars:
        raise AssertionError(f"{function.__qualname__} with its parts closes over other names")
    return code.replace(co_qualname=function.__code__.co_qualname)


def _filled(code: CodeType, constants: Mapping[str, Any]) -> CodeType:
    """Return code with objects in place of the texts that stand for them."""
    filled = (constants.get(one, one) if isinstance(one, str) else one for one in code.co_consts)
    return code.replace(co_consts=tuple(filled))


def _new(name: str) -> str:
    """Return the name of what a part has made of a tensor to which it writes."""
    return f"_shardwise_new_{name}"


def _copy(one: Any) -> Any:
    return one.clone() if isinstance(one, Tensor) else one


def _write(one: Any, new: Any) -> Any:
    return one.copy_(new) if isinstance(one, Tensor) else new


def _get(taken: str) -> str:
    """Return an expression for a name or an attribute; it gives :data:`UNBOUND` where that has no value."""
    root, *attributes = taken.split(".")
    if attributes:
        return f"{ATTRIBUTE!r}({root}, {', '.join(map(repr, attributes))})"
    return f"locals().get({taken!r}, {UNBOUND!r})"


def _attribute(one: Any, *names: str) -> Any:
    for name in names:
        if not hasattr(one, name):
            return UNBOUND
        one = getattr(one, name)
    return one


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
        flags = function.__code__.co_flags & __future__.annotations.compiler_flag
        code: CodeType = compile(module, function.__code__.co_filename, "exec", flags, dont_inherit=True)
    for _ in range(2):
        code = next(one for one in code.co_consts if isinstance(one, CodeType))
    return code.replace(co_consts=tuple(UNBOUND if one == UNBOUND else one for one in code.co_consts))


__all__ = ["UNBOUND", "Part", "part_of", "part_with", "parts", "with_parts"]
