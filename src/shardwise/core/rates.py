"""How fast devices compute and links carry: plain numbers, from which seconds of a step are predicted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from shardwise.core.devices import ASSUMED, DeviceModel
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
            raise ConfigError(
                f"link: α = {self.latency} s and β = {self.bandwidth} B/s; legal: α of 0 or more, β above 0"
            )


@dataclass(frozen=True)
class Rates:
    """The speeds of one device: FLOP/s of products and bytes a second of its memory; ``link`` is the link between
    devices, ``links`` are those of axes that have others.
    """

    flops: float
    memory: float
    link: Link
    links: Mapping[str, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.flops > 0 and self.memory > 0):
            raise ConfigError(f"rates: {self.flops} FLOP/s and {self.memory} B/s; legal: numbers above 0")

    @property
    def flops_per_byte(self) -> float:
        """FLOPs that the device computes while it moves a byte."""
        return self.flops / self.memory

    def computing(self, flops: float, nbytes: float) -> float:
        """Seconds for ``flops`` FLOPs that read and write ``nbytes`` bytes: the slower of the two."""
        return max(flops / self.flops, nbytes / self.memory)

    def collective(self, kind: str, nbytes: float, axes: Sequence[str], parts: int) -> float:
        """Seconds of a collective of ``nbytes`` of a whole in a ring over the ``parts`` ranks along ``axes``: α +
        bytes/β.
        """
        if parts == 1:
            return 0.0
        links = [self.links.get(axis, self.link) for axis in axes]
        sent = PASSES[kind] * nbytes * (parts - 1) / parts
        return max(link.latency for link in links) + sent / min(link.bandwidth for link in links)


@dataclass(frozen=True)
class Machine:
    """What a solver minimises: seconds of microbatches of ``rows`` rows a rank of the batch axes, at ``rates``.

    ``memory`` are the bytes, of all stages of a pipeline together, for parameters with what belongs to them, ``beside``
    bytes for each element that learns, and for what is kept for backward of ``live`` microbatches; None: any number.
    ``kind`` is that of the devices, "gpu" or "cpu"; None: where the model is traced.
    """

    rates: Rates
    rows: int
    memory: int | None = None
    beside: float = 12  # gradient and two moments in fp32
    live: int = 1
    kind: str | None = None

    def __post_init__(self) -> None:
        if self.rows < 1 or min(self.memory or 0, self.beside, self.live) < 0:
            wrong = f"{self.rows} rows, {self.memory} bytes, {self.beside} beside an element, {self.live} microbatches"
            raise ConfigError.on("machine", wrong, "1 row or more, none of the others below 0")


def rates(kind: str, precision: str, across: Iterable[str] = (), model: DeviceModel | None = None) -> Rates:
    """What is assumed of a device ``kind`` ("gpu" or "cpu") that computes in ``precision``, and of axes that reach
    ``across`` hosts, where nobody says more.

    gpu: its ``model``, by default an H100 SXM (:data:`~shardwise.core.devices.ASSUMED`), and of its data sheet as much
    as is measured of that one: the fastest of many bf16 products reaches 794 of 989 TFLOP/s (ml-engineering, MAMF);
    over NVLink NCCL 2.27 takes 6 to 16 µs for the smallest all-reduce of 2 to 8 ranks, and of 256 MiB a rank sends 305
    to 431 of 450 GB/s (aiconfigurator, nccl-tests): 10 µs and 330 GB/s.  Between hosts each has an adapter of 400 Gb/s
    (DGX H100 data sheet), 50 GB/s; a step of a small ring takes 2.7 µs there and 0.6 over NVLink (NCCL 2.19,
    src/graph/tuning.cc), so 4 to 29 µs more for an all-reduce of 2 to 8 ranks: 20 µs.  NCCL may carry a ring by all
    adapters of a host, which is not counted on. cpu: a core with 90 GFLOP/s in fp32 (docs/performance.md, "float32
    matmul"), half in fp64, 10 GB/s of memory; ranks of a host pass 2 GB/s through shared memory at 50 µs a collective;
    hosts are taken to have 10 Gb/s Ethernet, 1.25 GB/s, and as long again for TCP: 100 µs.
    """
    if precision not in _CORE:
        raise ConfigError(f"rates: precision {precision} is not known; legal: {', '.join(_CORE)}")
    if kind != "gpu":
        return Rates(_CORE[precision], 10e9, Link(50e-6, 2e9), dict.fromkeys(across, Link(100e-6, 1.25e9)))
    model = model or ASSUMED
    # Where a device has no units for a precision, or none are published, it computes as in fp32, and fp64 at half of
    # that at most.
    flops = model.peak.flops(precision) or model.peak.fp32 * 1e12 / (2 if precision == "fp64" else 1)
    link = Link(10e-6, model.link * 1e9 * REACHED_LINK)
    return Rates(flops * REACHED_FLOPS, model.bandwidth * 1e12, link, dict.fromkeys(across, Link(20e-6, 50e9)))


REACHED_FLOPS, REACHED_LINK = 794 / 989, 330 / 450
"""What part of an H100's data sheet is measured: of its peak, and of its links."""
_CORE: Mapping[str, float] = MappingProxyType({"fp32": 90e9, "bf16": 90e9, "fp16": 90e9, "fp64": 45e9})
"""FLOP/s of one core of a CPU."""
