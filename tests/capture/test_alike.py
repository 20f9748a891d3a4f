"""Ops without values run once for operands that are alike, and make what they would make if they ran each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.capture.alike import Alike
from shardwise.graph.torch_private import TorchDispatchMode, fake_mode, storage_key

aten = torch.ops.aten


class Counting(TorchDispatchMode):
    """Counts the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is not torch.ops.prim.device.default
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[tuple[Alike, Counting]]:
    with fake_mode() as mode, Counting() as counting:
        yield Alike(mode), counting


def geometry(found: Any) -> list[tuple[Any, ...]]:
    every: Sequence[Tensor] = found if isinstance(found, tuple | list) else [found]
    return [(one.dtype, one.device, one.shape, one.stride(), one.storage_offset(), one.requires_grad) for one in every]


def run(alike: Alike, op: Any, args: Sequence[Any]) -> Any:
    tensors = [one for arg in args for one in (arg if isinstance(arg, list) else [arg]) if isinstance(one, Tensor)]
    return alike(op, args, {}, tensors)


NEW: dict[str, tuple[Any, Callable[[], list[Any]]]] = {
    "a sum": (aten.add.Tensor, lambda: [torch.ones(3, 4), torch.ones(4)]),
    "of other dtypes": (aten.mul.Tensor, lambda: [torch.ones(3, 4, dtype=torch.int64), torch.ones(3, 1)]),
    "with a number": (aten.mul.Tensor, lambda: [torch.ones(3, dtype=torch.int64), 2.0]),
    "of columns": (aten.relu.default, lambda: [torch.ones(3, 4).t()]),
    "a list": (aten.cat.default, lambda: [[torch.ones(3, 4), torch.ones(2, 4)]]),
    "several results": (aten.native_layer_norm.default, lambda: [torch.ones(3, 4), [4], torch.ones(4), None, 1e-5]),
    "a convolution": (
        aten.convolution.default,
        lambda: [torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1],
    ),
    "a random one": (aten.native_dropout.default, lambda: [torch.ones(3, 4), 0.5, True]),
}


@pytest.mark.parametrize("name", NEW)
def test_an_op_runs_once(name: str) -> None:
    op, made = NEW[name]
    with counted() as (alike, counting):
        first, second = made(), made()
        expected = geometry(op(*second))
        run(alike, op, first)
        before = counting.count
        found = run(alike, op, second)
        assert counting.count == before
        assert geometry(found) == expected
        assert type(found) is type(op(*second))
        given = [storage_key(one) for arg in second for one in (arg if isinstance(arg, list) else [arg])
                 if isinstance(one, Tensor)]  # fmt: skip
        own = [storage_key(one) for one in (found if isinstance(found, tuple) else [found])]
        assert len({*given, *own}) == len(given) + len(own)


def test_an_op_that_writes_returns_what_it_writes_to() -> None:
    with counted() as (alike, counting):
        x, y = torch.ones(3, 4), torch.ones(3, 4)
        assert run(alike, aten.add_.Tensor, [x, 1.0]) is x
        before = counting.count
        assert run(alike, aten.add_.Tensor, [y, 1.0]) is y
        assert counting.count == before


def test_other_operands() -> None:
    """Whatever differs may make another shape."""
    with counted() as (alike, _):
        for given in (
            [torch.ones(3, 4), 1], [torch.ones(3, 5), 1], [torch.ones(4, 3).t(), 1], [torch.ones(3, 4).half(), 1],
            [torch.ones(3, 4).long(), 1], [torch.ones(3, 4).long(), 1.0], [torch.ones(3, 4).long(), True],
        ):  # fmt: skip
            assert geometry(run(alike, aten.mul.Tensor, given)) == geometry(aten.mul.Tensor(*given))


def test_other_numbers() -> None:
    with counted() as (alike, _):
        for given in ([torch.ones(3, 4), [0]], [torch.ones(3, 4), [1]], [torch.ones(3, 4), [1], True]):
            assert geometry(run(alike, aten.sum.dim_IntList, given)) == geometry(aten.sum.dim_IntList(*given))


def test_the_default_dtype_decides() -> None:
    with counted() as (alike, _):
        x = torch.ones(3, dtype=torch.int64)
        assert run(alike, aten.mul.Tensor, [x, 2.0]).dtype is torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert run(alike, aten.mul.Tensor, [x, 2.0]).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


AGAIN: dict[str, tuple[Any, Callable[[], list[Any]]]] = {
    "a view": (aten.t.default, lambda: [torch.ones(3, 4)]),
    "one that no schema shows": (aten._unsafe_view.default, lambda: [torch.ones(3, 4), [12]]),
    "another shape in place": (aten.t_.default, lambda: [torch.ones(3, 4)]),
    "as many as there are": (aten.nonzero.default, lambda: [torch.ones(3, 4)]),
    "a tensor of no operand": (aten.arange.default, lambda: [3]),
    "complex numbers": (aten.mul.Tensor, lambda: [torch.ones(3, dtype=torch.complex64), 2.0]),
    "what is written to the value of a parameter": (aten.add_.Tensor, lambda: [nn.Parameter(torch.ones(3)).data, 1.0]),
}


@pytest.mark.parametrize("name", AGAIN)
def test_an_op_runs_each_time(name: str) -> None:
    op, made = AGAIN[name]
    real = "parameter" in name
    given = [made() for _ in range(2)] if real else []
    with counted() as (alike, counting):
        for number in range(2):
            args = given[number] if real else made()
            before = counting.count
            run(alike, op, args)
            assert counting.count == before + 1


def test_values_that_torch_knows_stay_known() -> None:
    with counted() as (alike, _):
        one = torch.tensor(3)
        for _ in range(2):
            assert run(alike, aten.add.Tensor, [one, one]).item() == 6


def test_a_shape_that_fails_fails_again() -> None:
    with counted() as (alike, _):
        for _ in range(2):
            with pytest.raises(RuntimeError):
                run(alike, aten.add.Tensor, [torch.ones(3), torch.ones(4)])
