"""This module has all that is known of device models: their speed, memory and links.  All predictions use it.

The figures are from datasheets and architecture whitepapers of the makers: NVIDIA's of V100, A100, GA102, Ada, H100,
H200 NVL, RTX Blackwell, HGX B200 and B300; AMD's of CDNA 2 to 4.  The memory is the total that the driver reports, some
percent less than the name says, and the least that has been reported of a model; it is None if no report is known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple


class Peak(NamedTuple):
    """These are peaks of dense products in TFLOP/s; None means that there are no such units or no published figure."""

    fp64: float | None  # that of the tensor cores if they compute in fp64
    fp32: float
    tf32: float | None
    bf16: float | None  # accumulated in fp32, as torch does
    fp16: float | None = None  # accumulated in fp32 too; None means the same as bf16

    def flops(self, precision: str, *, tf32: bool = False) -> float | None:
        """Return the peak of products in a plan's ``precision``, in FLOP/s; ``tf32`` lets torch use TF32 for fp32."""
        fp32 = self.tf32 if tf32 and self.tf32 is not None else self.fp32
        fp16 = self.bf16 if self.fp16 is None else self.fp16
        tera = {"fp32": fp32, "bf16": self.bf16, "fp16": fp16, "fp64": self.fp64}[precision]
        return None if tera is None else tera * 1e12


@dataclass(frozen=True)
class DeviceModel:
    """This describes one model of GPU.

    Attributes:
        name: The name that ``--device`` takes.
        driver: A pattern of the whole name that the driver gives, without the maker.  Slices of a device ("... MIG
            1g.10gb"), laptop versions and other sizes have fewer or slower units and match nothing.
        memory: The total memory in GiB, as the driver reports it.
        bandwidth: The bandwidth of its memory in TB/s.
        link: The bandwidth to other devices of its host in GB/s one way: to all of them together over NVLink or
            Infinity Fabric, else that of its PCIe slot.
        peak: The peak speeds of dense products.
    """

    name: str
    driver: str
    memory: float | None
    bandwidth: float
    link: float
    peak: Peak


PCIE3, PCIE4, PCIE5 = 15.75, 31.5, 63.0  # the bandwidth of 16 lanes, in GB/s one way
_V100 = Peak(7.8, 15.7, None, None, 125.0)
_V100_PCIE = Peak(7.0, 14.0, None, None, 112.0)
_A100 = Peak(19.5, 19.5, 156.0, 312.0)
_HOPPER, _NVL = Peak(67.0, 67.0, 494.5, 989.0), Peak(60.0, 60.0, 417.5, 835.5)

MODELS: tuple[DeviceModel, ...] = (
    DeviceModel("GB300", r"GB300", None, 8.0, 900, Peak(None, 80.0, 1250.0, 2500.0)),
    DeviceModel("GB200", r"GB200", None, 8.0, 900, Peak(40.0, 80.0, 1250.0, 2500.0)),
    DeviceModel("B300", r"B300( SXM6( AC)?)?", None, 8.0, 900, Peak(1.25, 75.0, 1125.0, 2250.0)),
    DeviceModel("B200", r"B200", 178.35, 8.0, 900, Peak(37.0, 75.0, 1125.0, 2250.0)),
    DeviceModel("GH200-144GB", r"GH200 144G HBM3e", None, 4.8, 450, _HOPPER),
    DeviceModel("GH200-96GB", r"GH200 (120GB|480GB)", None, 4.0, 450, _HOPPER),
    DeviceModel("H200-NVL", r"H200 NVL", None, 4.8, 450, _NVL),
    DeviceModel("H200", r"H200", 139.72, 4.8, 450, _HOPPER),
    DeviceModel("H100-NVL", r"H100 NVL", None, 3.9, 300, _NVL),
    DeviceModel("H100-PCIe", r"H100 PCIe", None, 2.0, PCIE5, Peak(51.0, 51.0, 378.0, 756.0)),
    DeviceModel("H100-80GB", r"H100 80GB HBM3", 79.10, 3.35, 450, _HOPPER),
    DeviceModel("A100-80GB", r"A100-SXM4-80GB", 79.10, 2.04, 300, _A100),
    DeviceModel("A100-40GB", r"A100-SXM4-40GB", 39.38, 1.555, 300, _A100),
    DeviceModel("A100-80GB-PCIe", r"A100-(PCIE|PCIe)-80GB|A100 80GB PCIe", 79.10, 1.935, PCIE4, _A100),
    DeviceModel("A100-40GB-PCIe", r"A100-(PCIE|PCIe)-40GB", 39.38, 1.555, PCIE4, _A100),
    DeviceModel("A800-80GB", r"A800-SXM4-80GB", None, 2.04, 200, _A100),
    DeviceModel("A800-40GB", r"A800-SXM4-40GB", None, 1.555, 200, _A100),
    DeviceModel("A800-80GB-PCIe", r"A800 80GB PCIe", None, 1.935, PCIE4, _A100),
    DeviceModel("A30", r"A30", None, 0.933, PCIE4, Peak(10.3, 10.3, 82.0, 165.0)),
    DeviceModel("A40", r"A40", None, 0.696, PCIE4, Peak(None, 37.4, 74.8, 149.7)),
    DeviceModel("A10", r"A10", 21.98, 0.6, PCIE4, Peak(None, 31.2, 62.5, 125.0)),
    DeviceModel("A6000", r"RTX A6000", None, 0.768, PCIE4, Peak(None, 38.7, 77.4, 154.8)),
    DeviceModel("L4", r"L4", 21.95, 0.3, PCIE4, Peak(None, 30.3, 60.0, 121.0)),
    DeviceModel("L40", r"L40", None, 0.864, PCIE4, Peak(None, 90.5, 90.5, 181.0)),
    DeviceModel("L40S", r"L40S", 44.39, 0.864, PCIE4, Peak(None, 91.6, 183.0, 362.0)),
    DeviceModel("RTX6000-Ada", r"RTX 6000 Ada Generation", None, 0.96, PCIE4, Peak(None, 91.1, 182.1, 364.2)),
    DeviceModel("V100-16GB", r"V100-SXM[23]-16GB(-LS)?", 15.77, 0.9, 150, _V100),
    DeviceModel("V100-32GB", r"V100-SXM[23]-32GB(-LS)?", 31.73, 0.9, 150, _V100),
    DeviceModel("V100-16GB-PCIe", r"V100-PCIE-16GB", 15.77, 0.9, PCIE3, _V100_PCIE),
    DeviceModel("V100-32GB-PCIe", r"V100-PCIE-32GB", 31.73, 0.9, PCIE3, _V100_PCIE),
    DeviceModel("V100S", r"V100S-PCIE-32GB", 31.73, 1.134, PCIE3, Peak(8.2, 16.4, None, None, 130.0)),
    DeviceModel("T4", r"T4", 14.56, 0.32, PCIE3, Peak(None, 8.1, None, None, 65.0)),
    DeviceModel("RTX3090", r"GeForce RTX 3090", 23.67, 0.936, PCIE4, Peak(0.556, 35.6, 35.6, 71.0)),
    DeviceModel("RTX3090Ti", r"GeForce RTX 3090 Ti", None, 1.008, PCIE4, Peak(0.625, 40.0, 40.0, 80.0)),
    DeviceModel("RTX4080", r"GeForce RTX 4080", None, 0.717, PCIE4, Peak(0.761, 48.7, 48.7, 97.5)),
    DeviceModel("RTX4090", r"GeForce RTX 4090", 23.63, 1.008, PCIE4, Peak(1.29, 82.6, 82.6, 165.2)),
    DeviceModel("RTX5080", r"GeForce RTX 5080", None, 0.96, PCIE5, Peak(0.879, 56.3, 56.3, 112.6)),
    DeviceModel("RTX5090", r"GeForce RTX 5090", None, 1.792, PCIE5, Peak(1.64, 104.8, 104.8, 209.5)),
    # A torch device is one of the two dies of an MI250 or MI250X: half of what the datasheet gives for both.
    DeviceModel("MI250", r"Instinct MI250", None, 1.638, 350, Peak(45.3, 45.3, None, 181.0)),
    DeviceModel("MI250X", r"Instinct MI250X", None, 1.638, 350, Peak(47.9, 47.9, None, 191.5)),
    DeviceModel("MI300X", r"Instinct MI300X", None, 5.3, 448, Peak(163.4, 163.4, 653.7, 1307.4)),
    DeviceModel("MI325X", r"Instinct MI325X", None, 6.0, 448, Peak(163.4, 163.4, 653.7, 1307.4)),
    DeviceModel("MI350X", r"Instinct MI350X", None, 8.0, 535.5, Peak(72.1, 144.2, None, 2300.0)),
    DeviceModel("MI355X", r"Instinct MI355X", None, 8.0, 535.5, Peak(78.6, 157.3, None, 2500.0)),
)  # fmt: skip

NAMED: Mapping[str, DeviceModel] = MappingProxyType({model.name: model for model in MODELS})
ASSUMED = NAMED["H100-80GB"]
"""A GPU of an unknown model is taken to be as fast as this one."""


def model_of(name: str) -> DeviceModel | None:
    """Return the model of a device by the name that its driver gives or ``--device`` takes; None if it is not known."""
    if name in NAMED:
        return NAMED[name]
    short = re.sub(r"^(NVIDIA |Tesla |AMD )*", "", name.strip())
    return next((model for model in MODELS if re.fullmatch(model.driver, short)), None)


def runs_on(capability: tuple[int, int], kernels: Sequence[str]) -> bool:
    """Return whether one of ``kernels``, such as "sm_80" or "compute_90", runs on a card of a compute capability.

    Machine code (sm) runs on cards of its own major version that are not older, and code for the driver to compile
    (compute) on all cards that are not older.  Code for one architecture (sm_90a, compute_90a) runs on that
    architecture only, and code for a family (sm_100f, compute_100f) on cards of its own major version.
    """
    for name in kernels:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        if match is None:
            return True  # the name is unknown here, so the decision is left to torch
        made, suffix = (int(match[2]), int(match[3])), match[4]
        reaches = made[0] == capability[0] or (match[1] == "compute" and not suffix)
        if made == capability or (suffix != "a" and made < capability and reaches):
            return True
    return False
