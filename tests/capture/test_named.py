"""Names of functions and of parts of them, by which a later start finds them."""

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.capture.named import NotNamed, name_of, named
from shardwise.capture.parts import part_of, part_with


def outside(h: Tensor) -> float:
    return float(h.sum())


def wrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def outer(*args: Any) -> Any:
        return function(*args)

    return outer


class Other:
    @staticmethod
    def of(h: Tensor) -> Tensor:
        return h

    @classmethod
    def made(cls) -> None: ...


def model() -> nn.Module:
    """A model of a class that no name leads to."""

    class Local(nn.Module):
        @property
        def largest(self) -> int:
            return 3

        @wrapping
        def told(self, h: Tensor) -> Tensor:
            return h

        @contextmanager
        def within(self) -> Iterator[None]:
            yield

        def forward(self, h: Tensor) -> Tensor:
            if h.sum() > 0:
                h = 2 * h
            return h

    return nn.Sequential(Local())


def functions(one: nn.Module) -> dict[str, Any]:
    kind: Any = type(one[0])  # type: ignore[index]
    return {
        "a function": outside, "a static method": Other.of, "a class method": Other.made.__func__,  # type: ignore[attr-defined]
        "a property": kind.largest.fget, "a wrapped method": kind.told.__wrapped__, "a method": kind.forward,
        "the generator of a context": kind.within.__wrapped__,
    }  # fmt: skip


def part(function: FunctionType, taken: tuple[str, ...] = ("h",)) -> FunctionType:
    return part_with(function, (("body", 0),), 0, 0, taken, True, True, ())


@pytest.mark.parametrize("what", functions(model()))
def test_a_name_leads_to_its_function(what: str) -> None:
    one = model()
    function = functions(one)[what]
    name = json.loads(json.dumps(name_of(function, one)))
    assert named(name, one) is function
    with pytest.raises(NotNamed):
        named({**name, "code": "0"}, one)
    with pytest.raises(NotNamed):
        named({**name, "module": "nowhere"}, one)


def test_a_name_leads_to_a_part() -> None:
    one = model()
    made = part(functions(one)["a method"])
    found = named(json.loads(json.dumps(name_of(made, one))), one)
    assert part_of(found) == part_of(made)
    assert found.__code__ == made.__code__
    assert found(True, torch.ones(2))[0].tolist() == [2, 2]
    assert found(False, torch.ones(2))[0].tolist() == [1, 1]


@pytest.mark.parametrize("taken", ["h if print('!') else h", "h, x", "del", "h.", "1h", ""])
def test_a_name_brings_no_code(taken: str) -> None:
    one = model()
    name = name_of(part(functions(one)["a method"]), one)
    name["part"]["taken"] = ["h", taken]
    with pytest.raises(NotNamed):
        named(name, one)


@pytest.mark.parametrize("written", ["x", "self.h", "h; h", ""])
def test_a_name_writes_to_nothing_else(written: str) -> None:
    one = model()
    name = name_of(part(functions(one)["a method"]), one)
    name["part"].update(taken=["h", "self.h"], written=[written])
    with pytest.raises(NotNamed):
        named(name, one)


@pytest.mark.parametrize(
    "place", [{"path": [["body", 7], ["body", 0]]}, {"path": [["rows", 0]]}, {"first": 1, "last": 1}]
)
def test_a_part_of_no_such_statements_is_not_made(place: dict[str, Any]) -> None:
    one = model()
    name = name_of(part(functions(one)["a method"]), one)
    name["part"].update(place)
    with pytest.raises((LookupError, AttributeError)):
        named(name, one)


def test_what_no_name_leads_to_has_none() -> None:
    def inside(h: Tensor) -> Tensor:
        return h

    for one in (inside, functions(model())["a method"]):  # of another class of that name
        with pytest.raises(NotNamed):
            name_of(one, model())
