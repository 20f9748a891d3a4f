"""The storage tracker against bytes counted by hand, on the CPU and on meta."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.measure.storage_tracker import StorageTracker

DEVICES = pytest.mark.parametrize("device", ["cpu", "meta"])


@DEVICES
def test_forward_and_backward_of_a_layer(device: str) -> None:
    """y = relu(x w), loss = sum(y), of x (4, 5) and w (5, 6) in fp32: a product of 96 bytes, 120 bytes of gradient."""
    x = torch.empty(4, 5, device=device)
    w = torch.empty(5, 6, device=device, requires_grad=True)
    tracker = StorageTracker()
    with tracker:
        loss = (x @ w).relu().sum()
    assert (tracker.current, tracker.peak) == (96 + 4, 96 + 96)  # relu keeps its result, the product is dropped
    assert tracker.peak_op == "aten.relu.default"
    before = tracker.mark()
    with tracker:
        (gradient,) = torch.autograd.grad(loss, w)
    assert before == 100
    assert tracker.peak == 4 + 4 + 96 + 120  # the loss, its seed (expanded, not copied), relu's gradient, the product's
    assert tracker.peak_op == "aten.mm.default"  # by then relu's result is gone
    assert tracker.current == 4 + 120
    del gradient, loss
    assert tracker.current == 0


@DEVICES
def test_views_and_writes_in_place_add_nothing(device: str) -> None:
    x = torch.empty(8, 8, device=device)
    tracker = StorageTracker()
    with tracker:
        x.view(64).add_(1).unsqueeze(0)[:, :3].mul_(2)
        torch.add(x, 1, out=x)
        assert tracker.peak == 0
        y = x + 1
        y.t().add_(1)
        z = y[0]
        del y
    assert (tracker.current, tracker.peak) == (256, 256)  # a row keeps the whole
    assert z in tracker and x not in tracker
    del z
    assert tracker.current == 0


@DEVICES
def test_what_torch_tensor_makes_and_what_is_resized(device: str) -> None:
    tracker = StorageTracker()
    with tracker:
        x = torch.tensor([1.0, 2.0], device=device) if device == "cpu" else torch.empty(2, device=device)
        assert tracker.current == 8
        x.resize_(10)
        assert tracker.current == tracker.peak == 40
        x.resize_(5)
    assert tracker.current == 40
    del x
    assert tracker.current == 0


def test_only_one_device_counts_where_asked() -> None:
    tracker = StorageTracker("meta")
    with tracker:
        x, y = torch.empty(3), torch.empty(3, device="meta")
    assert tracker.current == 12 and y in tracker and x not in tracker


def test_several_results_each_count() -> None:
    tracker = StorageTracker()
    with tracker:
        values, where = torch.empty(4, 6).max(1)
    assert tracker.current == 4 * 4 + 4 * 8
    assert tracker.peak == 4 * 4 + 4 * 8 + 96
    del values
    assert tracker.current == where.nbytes


@DEVICES
def test_what_autograd_keeps_lives_as_long_as_the_graph(device: str) -> None:
    x = torch.empty(16, device=device, requires_grad=True)
    tracker = StorageTracker()

    def chain(x: Tensor) -> Tensor:
        return x.exp().sin().sum()

    with tracker:
        y = chain(x)
    assert tracker.current == 64 + 4  # the exponential, which both exp and sin keep, and the sum
    del y
    assert tracker.current == 0
