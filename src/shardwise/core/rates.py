"""This module has the speeds of devices and links, as plain numbers from which the seconds of a step are predicted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from shardwise.core.devices import ASSUMED, DeviceModel
from shardwise.core.errors import ConfigError

PASSES: Mapping[str, int] = MappingProxyType({"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1})
"""For each collective, this is the number of times that each rank of a ring of n sends (n-1)/n of the whole tensor."""

SHIFT = "shift"
"""In this collective each rank sends a tensor to the next."""


@dataclass(frozen=True)
class Link:
    """A link has a ``latency`` α in seconds per collective and a ``bandwidth`` β in bytes per second sent by a rank."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if self.latency < 0 or not self.bandwidth > 0:
            raise ConfigError(
                f"link: α = {self.latency} s and β = {self.bandwidth} B/s; legal: α of 0 or more, β above 0"
            )


@dataclass(frozen=True)
class Rates:
    """These are the speeds of one device: ``flops`` of matrix products in FLOP/s and ``memory`` in bytes per second.
    ``link`` connects devices; ``links`` has the links of those mesh axes that use other ones.
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
        """Return how many FLOPs the device computes in the time in which it reads or writes a byte of memory."""
        return self.flops / self.memory

    def computing(self, flops: float, nbytes: float) -> float:
        """Return the seconds that ``flops`` FLOPs take, or reading and writing ``nbytes`` bytes if that is slower."""
        return max(flops / self.flops, nbytes / self.memory)

    def collective(self, kind: str, nbytes: float, axes: Sequence[str], parts: int) -> float:
        """Return the seconds α + bytes/β of a collective in a ring over the ``parts`` ranks along ``axes``; ``nbytes``
        is the size of the whole tensor, or of what a rank sends in a ``SHIFT``.
        """
        if parts == 1:
            return 0.0
        links = [self.links.get(axis, self.link) for axis in axes]
        sent = nbytes if kind == SHIFT else PASSES[kind] * nbytes * (parts - 1) / parts
        return max(link.latency for link in links) + sent / min(link.bandwidth for link in links)


@dataclass(frozen=True)
class SolverObjective:
    """This is what a solver minimises: the seconds of a microbatch of ``rows`` rows per rank, at ``rates``.

    ``memory`` is the limit in bytes, over all stages of a pipeline together, for parameters, their gradients and
    optimizer states (``state_bytes_per_element`` bytes per trainable element) and the activations saved for backward of
    ``live_microbatches`` microbatches; None means no limit.  ``kind`` of device is "gpu" or "cpu"; None means where the
    model is traced.  Gradients are summed over ranks as ``summed`` bytes an element; None means as they are kept.
    """

    rates: Rates
    rows: int
    memory: int | None = None
    state_bytes_per_element: float = 12  # the gradient and Adam's two moments in fp32
    live_microbatches: int = 1
    kind: str | None = None
    summed: int | None = None

    def __post_init__(self) -> None:
        if self.rows < 1 or min(self.memory or 0, self.state_bytes_per_element, self.live_microbatches) < 0:
            numbers = f"{self.state_bytes_per_element} beside an element, {self.live_microbatches} microbatches"
            wrong = f"{self.rows} rows, {self.memory} bytes, {numbers}"
            raise ConfigError.on("machine", wrong, "1 row or more, none of the others below 0")


def rates(kind: str, precision: str, across: Iterable[str] = (), model: DeviceModel | None = None) -> Rates:
    """Return the speeds that are assumed of a device ``kind`` ("gpu" or "cpu") computing in ``precision``, and of mesh
    axes that reach ``across`` hosts, if nothing was measured.  :class:`ConfigError` for an unknown precision.

    A GPU is its ``model``, by default an H100 SXM (:data:`~shardwise.core.devices.ASSUMED`); it is assumed to reach the
    part of its data sheet that an H100 was measured to reach.  There the fastest of many bf16 products has 794 of 989
    TFLOP/s (ml-engineering, MAMF).  Over NVLink, NCCL 2.27 takes 6 to 16 µs for the smallest all-reduce of 2 to 8
    ranks, and for 256 MiB a rank sends 305 to 431 of 450 GB/s (aiconfigurator, nccl-tests): 10 µs and 330 GB/s are
    assumed.  Between hosts each GPU has an adapter of 400 Gb/s (DGX H100 data sheet), 50 GB/s.  A step of a small ring
    takes 2.7 µs there and 0.6 µs over NVLink (NCCL 2.19, src/graph/tuning.cc), so an all-reduce of 2 to 8 ranks takes 4
    to 29 µs more: 20 µs are assumed.  That NCCL may use all adapters of a host for a ring is ignored.  A CPU core has
    90 GFLOP/s in fp32 (docs/performance.md, "float32 matmul"), half in fp64, and 10 GB/s of memory.  Ranks of a host
    pass 2 GB/s through shared memory at 50 µs per collective; between hosts 10 Gb/s Ethernet (1.25 GB/s) takes 100 µs.
    """
    if precision not in _CORE:
        raise ConfigError(f"rates: precision {precision} is not known; legal: {', '.join(_CORE)}")
    if kind != "gpu":
        return Rates(_CORE[precision], 10e9, Link(50e-6, 2e9), dict.fromkeys(across, Link(100e-6, 1.25e9)))
    model = model or ASSUMED
    # A device that has no units for a precision, or no published figure, is taken to compute as in fp32; for fp64 half
    # of that is assumed.
    flops = model.peak.flops(precision) or model.peak.fp32 * 1e12 / (2 if precision == "fp64" else 1)
    link = Link(10e-6, model.link * 1e9 * REACHED_LINK)
    return Rates(flops * REACHED_FLOPS, model.bandwidth * 1e12, link, dict.fromkeys(across, Link(20e-6, 50e9)))


REACHED_FLOPS, REACHED_LINK = 794 / 989, 330 / 450
"""These are the measured parts of an H100's data sheet: of its peak FLOP/s and of the bandwidth of its links."""
_CORE: Mapping[str, float] = MappingProxyType({"fp32": 90e9, "bf16": 90e9, "fp16": 90e9, "fp64": 45e9})
"""One core of a CPU has these FLOP/s in each precision."""
