"""How fast devices compute and links carry: plain numbers, from which seconds of a step are predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from shardwise.core.errors import ConfigError

PASSES: Mapping[str, int] = MappingProxyType({"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1})
"""How often a ring sends (n-1)/n of a whole."""


@dataclass(frozen=True)
class Link:
    """``latency`` α in seconds a collective, ``bandwidth`` β in bytes a second that a rank sends."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if self.latency < 0 or not self.bandwidth > 0:
            raise ConfigError(f"link: α = {self.latency} s and β = {self.bandwidth} B/s; legal: α of 0 or more, β above 0")


@dataclass(frozen=True)
class Rates:
    """Of one device: FLOP/s of products, bytes a second of its memory; ``link`` between devices, ``links`` of axes that have others."""

    flops: float
    memory: float
    link: Link
    links: Mapping[str, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.flops > 0 and self.memory > 0):
            raise ConfigError(f"rates: {self.flops} FLOP/s and {self.memory} B/s; legal: numbers above 0")

    def computing(self, flops: float, nbytes: float) -> float:
        """Seconds of so many FLOPs that read and write so many bytes: the slower of both."""
        return max(flops / self.flops, nbytes / self.memory)

    def collective(self, kind: str, nbytes: float, axes: Sequence[str], parts: int) -> float:
        """Seconds of a collective of ``nbytes`` of a whole in a ring over the ``parts`` ranks along ``axes``: α + bytes/β."""
        if parts == 1:
            return 0.0
        links = [self.links.get(axis, self.link) for axis in axes]
        sent = PASSES[kind] * nbytes * (parts - 1) / parts
        return max(link.latency for link in links) + sent / min(link.bandwidth for link in links)


@dataclass(frozen=True)
class Machine:
    """What a solver minimises: seconds of microbatches of ``rows`` rows a rank of the batch axes, at ``rates``; ``memory`` are the bytes that a rank has for
    parameters with what belongs to them, ``beside`` bytes for each element that learns, and for what is kept for backward; None: any number."""

    rates: Rates
    rows: int
    memory: int | None = None
    beside: int = 12  # gradient and two moments in fp32

    def __post_init__(self) -> None:
        if self.rows < 1 or (self.memory is not None and self.memory < 0):
            raise ConfigError(f"machine: {self.rows} rows, {self.memory} bytes; legal: 1 row or more, 0 bytes or more")


def rates(kind: str, precision: str) -> Rates:
    """What is assumed of a device ``kind`` ("cuda" or "cpu") that computes in ``precision``, where nobody says more.

    cuda: NVIDIA's data sheet of the H100 SXM: dense tensor cores (bf16, fp16 989 TFLOP/s; fp32 without TF32 67, fp64 67), 3.35 TB/s of HBM3, and
    NVLink with 450 GB/s each way; 15 µs a collective is the order of what NCCL takes within a host for small messages.
    cpu: a core with 90 GFLOP/s in fp32 (docs/performance.md, "float32 matmul"), half in fp64, 10 GB/s of memory; ranks of a host pass
    2 GB/s through shared memory at 50 µs a collective.
    """
    table = _CUDA if kind == "cuda" else _CPU
    flops = _FLOPS[kind == "cuda"].get(precision)
    if flops is None:
        raise ConfigError(f"rates: precision {precision} is not known; legal: {', '.join(_FLOPS[0])}")
    return Rates(flops, *table)


_CUDA = (3.35e12, Link(15e-6, 450e9))
_CPU = (10e9, Link(50e-6, 2e9))
_FLOPS: tuple[Mapping[str, float], ...] = (
    MappingProxyType({"fp32": 90e9, "bf16": 90e9, "fp16": 90e9, "fp64": 45e9}),
    MappingProxyType({"fp32": 67e12, "bf16": 989e12, "fp16": 989e12, "fp64": 67e12}),
)
