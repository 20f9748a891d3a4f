"""The memory profile of units: what is walked, what is refused, sizes by hand.  For real steps see tests/estimate."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from shardwise.core.errors import ConfigError
from shardwise.measure import unit_memory as module_under_test
from shardwise.measure.unit_memory import UnitMemory, profile
from shardwise.models import GPT
from shardwise.shard.assignment import TensorParallelSpec
from shardwise.units.tracing import trace


def gpt(layers: int) -> list[UnitMemory]:
    module = GPT(vocabulary=61, width=32, layers=layers, heads=4, context=16)
    return list(
        profile(trace(module, {n: torch.zeros(4, 12, dtype=torch.int64) for n in ("input_ids", "labels")}), 4).units
    )


@pytest.mark.slow
def test_equal_blocks_are_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[str] = []

    class Counted(module_under_test.UnitWork):
        def forward(self, what: Any) -> tuple[int, int]:
            walks.append(self.unit.name)
            return super().forward(what)

    monkeypatch.setattr(module_under_test, "UnitWork", Counted)
    counts = []
    for layers in (3, 9):
        walks.clear()
        units = gpt(layers)
        counts.append(len(walks))
        assert len({dataclasses.replace(u, index=0, name="") for u in units[1:-1]}) == 1
        assert [u.index for u in units] == list(range(layers + 2)) and units[4].name in ("blocks.3", "tail")
        assert {w for w in walks if w.startswith("blocks")} <= {"blocks.0", f"blocks.{layers - 1}"}
    assert counts[0] == counts[1]


def test_bytes_by_hand() -> None:
    """5 rows of 8 floats are 160 bytes; relu keeps its result, the output; a linear what the unit before it made."""
    found = trace(zoo.Chain(), {"x": torch.zeros(5, 8)})
    fully, selectively = (profile(found, 5, recompute=how).units for how in ("full", "selective"))
    # That nothing before the first has a gradient makes no difference.
    for unit, other in zip(fully[:3], selectively[:3], strict=True):
        assert (unit.outputs, unit.none.kept, unit.again.kept, unit.again.saved) == (160, 0, 0, 160)
        # the product and relu's result
        assert unit.alone == unit.none.forward == unit.again.forward == unit.again.recompute == 320
        # Relu reads the product, which is kept; of the result of relu nothing is kept, and it is made again.
        again = other.again
        assert (again.forward, again.kept, again.recompute, again.saved) == (320, 160, 160, 160)
        assert (
            other.none == unit.none and unit.outputs == other.outputs == 160 and not unit.unknown and not other.unknown
        )
    first, middle, last, tail = fully
    assert first.gradients == () and middle.gradients == last.gradients == (160,)
    assert (
        middle.none.backward == middle.again.backward == selectively[1].again.backward == 320
    )  # relu's gradient and the input's; the weight's goes into its buffer
    assert (tail.outputs, tail.none.kept) == (0, 4)  # the loss itself


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(x + y).relu()


class Skip(nn.Module):
    """The first block's output is read by the next two; the last reads two tensors that get one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sum() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        a = self.layers[0](x, x)
        return self.layers[2](self.layers[1](a, a), a).mean()


def test_a_gradient_that_two_wait_for_belongs_to_the_one_that_waits_longer() -> None:
    found = trace(Skip(), {"x": torch.zeros(5, 8)})
    _, second, third, _ = profile(found, 5).units
    maker = {n: u.index for u in found.units for n in u.outputs}
    assert {maker[n]: size for n, size in zip(found.units[2].inputs, third.gradients, strict=True)} == {0: 160, 1: 0}
    assert second.gradients == (160,)
    # Relu's gradient takes the place of the pending one, the product's that of the linear's input, which ends with the
    # weight's gradient; then there is one more at a time: its double, and the sum with what was pending.
    assert second.none.backward == third.none.backward == 160


def test_illegal_arguments_are_refused() -> None:
    model = zoo.make("own mlp")
    found = trace(model.module, model.batch, loss=model.loss)
    with pytest.raises(ConfigError, match="memory: device 'tpu'"):
        profile(found, 7, device="tpu")
    with pytest.raises(ConfigError, match="1 or more"):
        profile(found, 7, 0)
    with pytest.raises(ConfigError, match="legal: 0 to 1"):
        profile(found, 7, 2, index=2)
    found = trace(model.module, model.batch, loss=model.loss, tensor=TensorParallelSpec({"tp": 2}))
    for places in ({}, {"tp": (3, 0)}, {"tp": (2, 2)}, {"ep": (2, 0)}):
        with pytest.raises(ConfigError, match="legal: 0 to 1 of 2 along tp"):
            profile(found, 7, tensor=places)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("kind", "tp"), [("1d", 2), ("1d-sp", 2), ("1d", 4)])
def test_selective_recomputation_keeps_shards(kind: str, tp: int) -> None:
    """Of a layer qkv, attention with its statistics and the MLP's first product; of the partial sums the one whose
    value is needed again.
    """
    b, s, h, a = 3, 24, 48, 12
    module = GPT(vocabulary=48, width=h, layers=2, heads=a, context=s)
    batch = {n: torch.zeros(b, s, dtype=torch.int64) for n in ("input_ids", "labels")}
    layer = profile(trace(module, batch, tensor=TensorParallelSpec({"tp": tp}, kind)), b, recompute="selective").units[
        1
    ]
    assert layer.again.kept == 4 * b * s * ((3 * h + h + a + 4 * h) // tp + h)


@pytest.mark.slow
def test_the_last_rank_of_an_axis_has_the_most() -> None:
    model = zoo.make("own gpt")  # four heads, and 31 words
    found = trace(model.module, model.batch, tensor=TensorParallelSpec({"tp": 3}))
    first, *_, last = (profile(found, 7, tensor={"tp": (3, i)}).units for i in range(3))
    assert profile(found, 7).units == last
    assert all(a.none.forward < b.none.forward for a, b in zip(first, last, strict=True) if a.name.startswith("blocks"))


def test_a_rank_of_fewer_rows_holds_less() -> None:
    found = trace(zoo.Chain(), {"x": torch.zeros(5, 8)})
    first, last = (profile(found, 5, 2, index=i).units for i in (0, 1))
    assert [u.outputs for u in first] == [64, 64, 64, 0] and [u.outputs for u in last] == [96, 96, 96, 0]
    assert profile(found, 5, 2) == profile(found, 5, 2, index=1)


def test_a_model_that_was_not_captured_is_unknown() -> None:
    class Stubborn(zoo.Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * float(x.sum()))

    (unit,) = profile(trace(Stubborn(), {"x": torch.ones(5, 8)}), 5).units
    assert unit.unknown == ("the whole model: it was not captured",) and unit.none.forward == 0
