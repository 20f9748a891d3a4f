"""Statements of functions that become functions of their own: whatever the line, all computes what it did."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.capture.parts import Part, part_of, parts, with_parts
from shardwise.capture.redirected import redirected
from shardwise.capture.statements import written_by

SHIFT = 3


def straight(a: int, b: int = 2, *more: int, c: int = 5) -> int:
    """A line after the other."""
    d = a + b
    e = d * c + sum(more)
    d += e
    return d - SHIFT


def branches(a: int, b: int) -> Any:
    if a > 1:
        first = a * 2
        both = first
    elif a > 0:
        both = a
        second = b
    else:
        both = second = 7  # noqa: F841
    while both < 30:
        both = both * 2 + 1
        if both == 9:
            continue
        if both > 25:
            break
    for i, one in enumerate([a, b]):
        both += i * one
        last = one
    return both, first if a > 1 else None, last


def unset(a: int, b: int) -> int:
    total = 0
    for i in range(a + 2):
        if i > 1:
            total += t  # noqa: F821
        t = i * b  # noqa: F841
    if a > 5:
        total += never  # type: ignore[name-defined,unused-ignore]  # noqa: F821
    else:
        never = 3
    return total + never + i


def nested(a: int, b: int) -> list[int]:
    many = [x * a for x in range(b + 2) if x != a]

    def twice(x: int) -> int:
        return x * a + len(many)

    many = [twice(x) for x in many]
    a = a + (k := len(many)) + k
    text = f"{a:>{b + 4}} {many}"
    try:
        a = 1 // (b - 1)
    except ZeroDivisionError as error:
        a = len(str(error))
    finally:
        many.append(a)
    with Context(a) as value:
        a += value
    many = sorted(many, key=lambda x: x * b)
    (first, *rest), other = many, text
    return [a, *rest, first, len(other), twice(b)]


def returning(a: int, b: int) -> Any:
    c = a + b
    if c > 3:
        for x in range(c):
            if x > b:
                return {"x": x}
        return c
    c += 1
    match c:
        case 1 | 2:
            d = "small"
        case other:
            d = str(other)
    return (c, d)


def comprehending(a: int, b: int) -> int:
    few = [x + 1 for x in range(a)]
    many = {x: y for x in few for y in range(b)}
    found = sum(x for x in many) + (last := [z := z0 for z0 in few][-1])
    return found + last + z


def keeping(a: int, b: int) -> int:
    c = 1
    if a > 1:
        c = b
    elif b > 3:
        d = a
        c = d
    return c + a


class Context:
    def __init__(self, value: int) -> None:
        self.value = value

    def __enter__(self) -> int:
        return self.value

    def __exit__(self, *_: object) -> None:
        self.value = 0


class Object:
    """Its attributes stand for themselves in the arguments of parts, its methods do not."""

    def __init__(self) -> None:
        self.inner = SimpleNamespace(number=4, further=SimpleNamespace(number=2))
        self.kept = 0

    def method(self, by: int) -> int:
        return self.inner.number * by

    def run(self, a: int, b: int) -> int:
        c = self.inner.number + a * self.inner.further.number
        c = c + self.method(b)
        self.kept = c
        inner = self.inner
        inner = inner.further
        c += inner.number + sum(self.kept for self in [self])
        return super().__hash__() * 0 + c


def closing(number: int) -> FunctionType:
    def inner(a: int, b: int) -> int:
        c = a * number
        d = c + other
        return d + b

    other = 11
    found: Any = inner
    return found


def lines_of(function: FunctionType, run: Callable[[], Any]) -> dict[int, FrameType]:
    """Return the lines that a run of a function comes to, each with a frame that has stopped there."""
    found: dict[int, Any] = {}

    def note(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is function.__code__:
            if event == "line":
                found[frame.f_lineno] = SimpleNamespace(f_locals=dict(frame.f_locals))
            return note
        return None

    before = sys.gettrace()
    sys.settrace(note)
    try:
        run()
    finally:
        sys.settrace(before)
    return found


CASES: list[tuple[Any, tuple[Any, ...]]] = [
    (straight, (1,)), (straight, (1, 2, 3, 4)), *((branches, (a, b)) for a, b in ((2, 1), (1, 5), (0, 3))),
    *((unset, (a, 3)) for a in (0, 2)), (nested, (3, 1)), (nested, (2, 4)),
    *((returning, (a, b)) for a, b in ((3, 2), (0, 0), (0, 1), (9, 20))), (closing(5), (2, 3)), (comprehending, (3, 4)),
    *((keeping, (a, b)) for a, b in ((2, 2), (0, 4), (0, 0))),
]  # fmt: skip


@pytest.mark.parametrize(("function", "given"), CASES, ids=lambda one: getattr(one, "__name__", None))
def test_a_function_that_calls_a_part_computes_the_same(function: FunctionType, given: tuple[Any, ...]) -> None:
    expected, number = function(*given), 0
    for line, frame in lines_of(function, lambda: function(*given)).items():
        for part in parts(function, frame, line):
            calls = list[Any]()

            def call(one: FunctionType, whole: Callable[..., Any], args: Any, kwargs: Any, calls: Any = calls) -> Any:
                calls.append(one)
                return whole(*args, **kwargs)

            with redirected((part,), call):
                assert function(*given) == expected, part.__qualname__
            assert calls and set(calls) == {part}, part.__qualname__
            assert function(*given) == expected and f"({'line' if ' to ' not in part.__qualname__ else 'lines'} " in (
                part.__qualname__
            )
            number += 1
    assert number > 3


def test_a_method_and_the_attributes_that_it_uses() -> None:
    one, names = Object(), set[tuple[str, ...]]()
    expected = one.run(2, 3)
    for line, frame in lines_of(Object.run, lambda: one.run(2, 3)).items():
        for part in parts(Object.run, frame, line):
            own = part_of(part)
            assert own is not None
            names.add(own.taken)
            with redirected((part,), lambda _, whole, args, kwargs: whole(*args, **kwargs)):
                assert one.run(2, 3) == expected
    assert ("a", "self.inner.number", "self.inner.further.number") in names
    assert any("self" in taken for taken in names)


def test_several_parts_of_a_function_at_once() -> None:
    """One inside another is not called."""
    found = lines_of(branches, lambda: branches(2, 1))
    first = branches.__code__.co_firstlineno
    inner = next(parts(branches, found[first + 2], first + 2))
    outer = next(parts(branches, found[first + 1], first + 1))
    loop = next(parts(branches, found[first + 15], first + 15))
    called = list[FunctionType]()

    def call(one: FunctionType, whole: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        called.append(one)
        return whole(*args, **kwargs)

    expected = branches(2, 1)
    with redirected((inner, outer, loop), call):
        assert branches(2, 1) == expected
    assert [one.__qualname__ for one in called][0] == outer.__qualname__ and inner not in called
    assert len(with_parts((inner, outer, loop, straight))) == 1


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a *= 2", "a"), ("a[0][1] = b", "a"), ("a[0] += b[1]", "a"), ("a.mul_(2).add_(b)", "a"),
        ("a[1:].zero_()", "a"),
        ("if a > 0: b -= a\nelse: a /= b", "a b"), ("while a: a += 1", "a"), ("with c: a += 1", "a"),
        ("a = b; a *= 2", ""), ("a *= 2; a = a + 1", ""), ("for a in b: a *= 2", ""), ("[a for a in b]; a *= 2", ""),
        ("with c as a: a *= 2", ""), ("a.x *= 2", ""), ("a.data[0] = 1", ""), ("number += 1", ""), ("other *= 2", ""),
        ("a.unsqueeze_(0)", ""), ("a.__init__()", ""), ("a.mul(2)", ""), ("b = a * 2", ""), ("f(a)[0] = 1", ""),
        ("try: a += 1\nexcept E as b: b += 1", "a"), ("lambda a: 1; a *= 2", ""),
    ],
)  # fmt: skip
def test_names_to_which_statements_write_in_place(text: str, names: str) -> None:
    known = {"a": torch.ones(2), "b": torch.ones(2), "number": 1}
    assert " ".join(written_by(ast.parse(text).body, known)) == names


def generating(a: int, b: int) -> Any:
    yield a + b


def writing(a: int, b: int) -> int:
    global SHIFT
    SHIFT = 3
    return a + b


def looking(a: int, b: int) -> int:
    c = a + b
    return locals()["c"] * 2


@pytest.mark.parametrize("function", [generating, writing, looking])
def test_functions_without_parts(function: Any) -> None:
    frame: Any = SimpleNamespace(f_locals={"a": 1, "b": 2})
    line = function.__code__.co_firstlineno + 1
    assert not [*parts(function, frame, line)]


def test_code_without_a_source_has_no_parts() -> None:
    space: dict[str, Any] = {}
    exec("def made(a):\n    b = a + 1\n    return b\n", space)
    frame: Any = SimpleNamespace(f_locals={"a": 1})
    assert not [*parts(space["made"], frame, 2)]


def test_parts_within_each_other() -> None:
    def part(path: tuple[tuple[str, int], ...], first: int, last: int) -> Part:
        return Part(straight, path, first, last, (), (), False, True)  # type: ignore[arg-type]

    outer = part((("body", 2),), 2, 4)
    assert part((("body", 3), ("orelse", 0)), 0, 1).within(outer) and part((("body", 4),), 4, 4).within(outer)
    assert not part((("body", 1), ("body", 0)), 0, 5).within(outer) and not outer.within(part((("body", 3),), 3, 4))
    assert not outer.within(part((("body", 3), ("body", 0)), 0, 1))


@pytest.mark.parametrize("first", [False, True])
def test_code_is_put_back_also_of_a_function_with_a_part(first: bool) -> None:
    found, code = lines_of(branches, lambda: branches(2, 1)), branches.__code__
    line = code.co_firstlineno + 1
    part = next(parts(branches, found[line], line))
    every = (branches, part) if first else (part, branches)
    with redirected(every, lambda one, whole, args, kwargs: whole(*args, **kwargs)):
        branches(2, 1)
    assert branches.__code__ is code and branches(2, 1)
