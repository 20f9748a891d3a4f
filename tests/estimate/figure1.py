"""Figure 1 of Korthikanti et al. (2022) beside what our traces say, as the table of docs/memory.md: run it to print
that.

One layer is traced at full size on meta, for CUDA.  Tensor and sequence parallelism over t divide it as the paper says
(its table 2): all of it under sequence parallelism; without, all but 10sbh and the statistics of the norms.
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from layer import Layer, Layers
from zero_states import model_states

from shardwise.measure.storage_tracker import StorageTracker
from shardwise.measure.unit_memory import profile
from shardwise.units.tracing import trace

GIB = 2**30


@dataclass(frozen=True)
class Row:
    """GiB a GPU of the first pipeline stage: published and ours, states and activations; bytes of norms' statistics in
    ours.
    """

    model: str
    selective: bool
    states: tuple[float, float]
    activations: tuple[float, float]
    statistics: float
    vectors: float  # states of biases and norms, which the paper leaves out


def layer_bytes(b: int, s: int, h: int, a: int, selective: bool) -> tuple[int, int]:
    """What a layer keeps, its input or output included, and its parameters."""
    with torch.device("meta"):
        whole, one = Layers(h, a), Layer(h, a, selective=True).bfloat16()
        x = torch.empty(b, s, h, dtype=torch.bfloat16, requires_grad=True)
    parameters = sum(p.numel() for p in one.parameters())
    if selective:
        tracker = StorageTracker()
        with tracker:
            y = one(x)
        assert y.requires_grad
        return tracker.current, parameters
    found = trace(whole, {"ids": torch.zeros(b, s, dtype=torch.int64)}, precision="bf16")
    unit = profile(found, b, device="gpu").units[2]
    return unit.outputs + unit.none.kept, parameters


@functools.cache
def rows() -> list[Row]:
    lines = (Path(__file__).parent / "published" / "korthikanti_figure1.csv").read_text().splitlines()
    found = []
    for line in csv.DictReader(x for x in lines if not x.startswith("#")):
        b, s, h, a, layers, t, p, v = (
            int(line[k])
            for k in ("microbatch", "sequence", "hidden", "heads", "layers", "tensor", "pipeline", "interleaved")
        )
        selective = line["selective"] == "1"
        kept, parameters = layer_bytes(b, s, h, a, selective)
        statistics = 2 * 2 * 4 * b * s
        shared = 0 if selective else 10 * s * b * h + statistics
        in_flight = layers * (1 + (p - 1) / (p * v) if v > 1 else 1)  # layers' worth of activations on the first stage
        states = model_states(parameters * layers // (t * p), 0, 1, 2, 4, 12).total
        vectors = 18 * (parameters - 12 * h * h) * layers / (t * p)
        found.append(Row(
            line["model"], selective, (float(line["states_gib"]), states / GIB),
            (float(line["activations_gib"]), (shared + (kept - shared) / t) * in_flight / GIB),
            (statistics / t if selective else statistics) * in_flight / GIB, vectors / GIB,
        ))  # fmt: skip
    return found


def table() -> str:
    lines = [
        "| model | recomputed | states, published | ours | of it biases and norms | activations, published | ours | of "
        "it statistics |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows():
        what = "attention" if r.selective else "nothing"
        lines.append(
            f"| {r.model} | {what} | {r.states[0]:.4f} | {r.states[1]:.4f} | {r.vectors:.4f} "
            f"| {r.activations[0]:.4f} | {r.activations[1]:.4f} | {r.statistics:.4f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
