"""Activation memory of Korthikanti et al. (2022), table 2: bytes of one transformer layer in 16 bits, alone and on one
of t ranks.

The published sums leave out the statistics of the two norms (a mean and a reciprocal deviation for each token, in the
dtype of the parameters on the CPU and in fp32 on CUDA): the difference is exactly these.  Our keyed dropout keeps a
mask of one byte an element, as the paper assumes of the fused kernel.

With sequence parallelism the paper keeps shards of the inputs of the first product in attention and in the MLP, and
gathers these once more in backward, at the cost of two all-gathers beside the 8bsh(t-1)/t.  Here they are kept as the
products took them, gathered: that is 2sbh(1-1/t) bytes more for each of the two.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from figure1 import rows, table
from layer import Layer, Layers

from shardwise.measure.storage_tracker import StorageTracker
from shardwise.measure.unit_memory import UnitMemory, profile
from shardwise.shard.assignment import TensorParallelSpec
from shardwise.units.tracing import trace

SHAPES = [(4, 32, 64, 4), (1, 48, 32, 8), (3, 16, 96, 6)]  # microbatch, sequence, hidden, heads
PARALLEL = [(*shape, t) for shape, t in zip(SHAPES, (4, 8, 2), strict=True)]
"""With the number of ranks."""


def middle_layer(
    b: int, s: int, h: int, a: int, device: str, tensor: TensorParallelSpec | None = None, recompute: str = "none"
) -> UnitMemory:
    with torch.device("meta"):
        module = Layers(h, a)
    found = trace(module, {"ids": torch.zeros(b, s, dtype=torch.int64)}, precision="bf16", tensor=tensor)
    unit = profile(found, b, device=device, recompute=recompute).units[2]
    assert unit.name == "layers.1" and not unit.unknown
    return unit


def statistics(b: int, s: int, device: str) -> int:
    """Two norms, two numbers a token."""
    return 2 * 2 * b * s * {"cpu": 2, "gpu": 4}[device]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize(("b", "s", "h", "a"), SHAPES)
def test_a_layer_keeps_sbh_times_34_and_5as_over_h(b: int, s: int, h: int, a: int, device: str) -> None:
    layer = middle_layer(b, s, h, a, device)
    assert layer.outputs == 2 * s * b * h  # counted with its maker; what this layer takes in is as large
    assert layer.outputs + layer.none.kept == s * b * h * 34 + 5 * a * s * s * b + statistics(b, s, device)


@pytest.mark.quick(1)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize(("b", "s", "h", "a", "t"), PARALLEL)
def test_tensor_parallelism_leaves_10_and_shards_24_of_34(b: int, s: int, h: int, a: int, t: int, device: str) -> None:
    layer = middle_layer(b, s, h, a, device, TensorParallelSpec({"tp": t}, "1d"))
    assert layer.outputs == 2 * s * b * h
    assert (
        t * (layer.outputs + layer.none.kept - statistics(b, s, device))
        == s * b * h * (10 * t + 24) + 5 * a * s * s * b
    )


@pytest.mark.quick(1)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize(("b", "s", "h", "a", "t"), PARALLEL)
def test_sequence_parallelism_shards_all_but_what_was_gathered(
    b: int, s: int, h: int, a: int, t: int, device: str
) -> None:
    """And what recomputation keeps is the shard of the layer's input."""
    layer = middle_layer(b, s, h, a, device, TensorParallelSpec({"tp": t}, "1d-sp"))
    assert t * layer.outputs == 2 * s * b * h
    published, gathered = s * b * h * 34 + 5 * a * s * s * b, 2 * 2 * s * b * h * (t - 1)
    assert t * (layer.outputs + layer.none.kept) == published + gathered + statistics(b, s, device)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("b", "s", "h", "a"), SHAPES)
def test_a_recomputed_layer_keeps_its_input(b: int, s: int, h: int, a: int) -> None:
    """FORWARD that saves nothing leaves 2sbh, and RECOMPUTE brings back the rest."""
    layer = middle_layer(b, s, h, a, "gpu", recompute="full")
    assert layer.outputs == 2 * s * b * h
    assert layer.again.saved == layer.none.kept + layer.outputs


@pytest.mark.parametrize(("b", "s", "h", "a"), SHAPES)
@pytest.mark.parametrize("selective", [False, True])
def test_recomputed_attention_leaves_34sbh(b: int, s: int, h: int, a: int, selective: bool) -> None:
    layer = Layer(h, a, selective=selective).to("meta", torch.bfloat16)
    x = torch.empty(b, s, h, dtype=torch.bfloat16, device="meta", requires_grad=True)
    tracker = StorageTracker()
    with tracker:
        y = layer(x)
    attention = 0 if selective else 5 * a * s * s * b
    assert tracker.current == 34 * s * b * h + attention + statistics(b, s, "gpu")
    assert y.nbytes == x.nbytes == 2 * s * b * h


@pytest.mark.slow
def test_figure_1_but_for_statistics_biases_and_norms() -> None:
    """Full-size layers, from 22 billion parameters to a trillion: both bars, to what the paper leaves out."""
    found = rows()
    assert len(found) == 8
    for row in found:
        assert row.activations[1] - row.activations[0] == pytest.approx(row.statistics, abs=1e-9)
        assert row.states[1] - row.states[0] == pytest.approx(
            row.vectors, abs=1e-6
        )  # padding, and the whole number of parameters
        assert row.statistics < 2e-4 * row.activations[0] and row.vectors < 2e-4 * row.states[0]


@pytest.mark.slow
def test_the_table_in_the_docs_is_what_comes_out() -> None:
    assert table() in (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
