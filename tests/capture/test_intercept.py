"""Torch functions are seen once each, also those that another one calls."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.capture.intercept import Intercept, _body
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import verify


def test_a_function_whose_helper_asks_again_is_seen_once() -> None:
    seen: list[str] = []

    def layer(func: Any, args: Any, kwargs: Any, proceed: Any) -> Any:
        seen.append(func.__name__)
        return proceed(func, args, kwargs)

    x, y = torch.arange(2), torch.arange(3)
    with Intercept(layer):
        rows, columns = torch.meshgrid(x, y, indexing="ij")
    assert seen.count("meshgrid") == 2  # the function, and the one of torch's own that it calls
    assert rows.tolist() == [[0, 0, 0], [1, 1, 1]] and columns.tolist() == [[0, 1, 2], [0, 1, 2]]


class Grid(nn.Module):
    """Positions on a grid, made in forward, are added to an image's patches."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.mix, self.out = nn.Linear(2, 16), nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        grid = torch.meshgrid(torch.linspace(0, 1, 3), torch.linspace(0, 1, 2), indexing="ij")
        z = x + self.places(torch.stack(grid, -1).flatten(0, 1).to(x.dtype))
        return F.mse_loss(self.out(F.gelu(self.mix(z))).mean((1, 2)), y)


def _functions() -> list[Any]:
    return [
        one for module in (torch.functional, F) for one in vars(module).values()
        if isinstance(one, FunctionType) and one.__module__ == module.__name__
    ]  # fmt: skip


def test_functions_that_name_themselves_end() -> None:
    """``F.threshold`` is ``_threshold``, which names itself."""
    for one in _functions():
        assert _body(one).__code__ is one.__code__
    seen: list[Any] = []

    def noted(func: Any, args: Any, kwargs: Any, proceed: Any) -> Any:
        seen.append(func)
        return proceed(func, args, kwargs)

    x = torch.linspace(-1, 1, 5)
    with Intercept(noted):
        assert torch.equal(nn.Threshold(0.1, 0.2)(x), torch.where(x > 0.1, x, 0.2))
    assert seen.count(F.threshold) == 1


def test_a_grid_made_in_forward_is_captured() -> None:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(rows, 6, 16), "y": torch.randn(rows)} for rows in (5, 3)]
    report = verify(Grid(), batches, tensor_parallel(Plan.of(Mesh(())), 2, "1d"))
    assert report.passed, report.worst
