"""Wrap what torch offers on one type of device: this is the only place that tells one maker's devices from another's.

Everything else asks a :class:`Backend`, so CUDA, ROCm (which torch calls "cuda" too), XPU, MPS and a device that an
extension of torch registers go through the same door.  What torch itself has for all of them (``torch.accelerator``,
``torch.Event``, ``torch.Stream``, the table of distributed backends) is used as it is.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.devices import runs_on
from shardwise.core.errors import ConfigError
from shardwise.wide import WideProduct, into_float32, multiplies_wide

if TYPE_CHECKING:
    from torch.numa.binding import NumaOptions

Kind = Literal["cpu", "gpu"]
"""This says whose kernels compute, for tables of what they keep: a CPU's, or a device's with its own memory."""

CPU = "cpu"
CUDA = "cuda"  # ROCm's devices have this type, too
NCCL = "nccl"  # RCCL has this name, too
XCCL = "xccl"
RECORDED = "2000"  # the number of collectives that a process remembers: those of some steps
_HOST = (CPU, "meta")

MOVES = ("cpu", "cuda", "xpu", "pin_memory")
"""The methods of tensors that move them, besides ``to``."""

# A process on such a device should have these variables in its environment before torch starts the device; a user's own
# value stays.  expandable_segments: the caching allocator grows its segments in place of making new ones, so that less
# is lost to fragmentation.  CUDA_DEVICE_MAX_CONNECTIONS: the number of hardware queues; with 1, which Megatron sets, a
# gather would wait for the products issued before it.
_ENVIRONMENT: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {CUDA: {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}}
)

# These variables make a process on such a device repeat itself, if they are set before its libraries start.
# CUBLAS_WORKSPACE_CONFIG: products in several streams take workspaces of one size each, and with them the same
# algorithms. NCCL_ALGO, NCCL_PROTO: sums are taken in the order of a ring, which depends on nothing that NCCL measures
# or tunes.
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_REPEATABLE: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {CUDA: {CUBLAS: ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}}
)
_LEGAL = {CUBLAS: (":4096:8", ":16:8")}


@dataclass(frozen=True)
class Backend:
    """This is one ``type`` of device, in torch's words: "cpu", "cuda", "xpu", "mps", or what an extension registers."""

    type: str

    @staticmethod
    def of(device: torch.device | str) -> Backend:
        """Return the backend of a device, or of a type of devices."""
        return Backend(torch.device(device).type)

    @staticmethod
    def here() -> Backend:
        """Return the backend of the accelerator that this torch has and can use, else the CPU's."""
        found = torch.accelerator.current_accelerator(check_available=True)
        return Backend(CPU if found is None else found.type)

    @staticmethod
    def built() -> Backend:
        """Return the backend of the accelerator that this torch is made for, whether or not there is one here: the
        driver is not asked, nothing starts."""
        found = torch.accelerator.current_accelerator(check_available=False)
        return Backend(CPU if found is None else found.type)

    @staticmethod
    def of_kind(kind: Kind) -> Backend:
        """Return the backend with the kernels of a kind: for GPUs that of the accelerator here, else CUDA's."""
        if kind == "cpu":
            return Backend(CPU)
        found = Backend.here()
        return found if found.kind == kind else Backend(CUDA)

    @staticmethod
    def stood_for(device: torch.device, kind: Kind | Literal[""]) -> Backend:
        """Return the backend of a device; on meta that of the devices of a ``kind`` that tensors stand for, if any."""
        return Backend.of_kind(kind) if kind else Backend.of(device)

    @property
    def kind(self) -> Kind:
        """Return which tables of kernels hold for it."""
        return "gpu" if self.asynchronous else "cpu"

    @property
    def asynchronous(self) -> bool:
        """Return whether the device works through queues while the host goes on."""
        return self.type not in _HOST

    @property
    def rocm(self) -> bool:
        """Return whether what torch calls "cuda" is an AMD device."""
        return self.type == CUDA and torch.version.hip is not None

    @property
    def transport(self) -> str | None:
        """Return the backend of ``torch.distributed`` between devices of this type: "gloo", "nccl" (also RCCL), "xccl",
        or an extension's.

        It is None where torch knows of none, and for MPS, of which a machine has one device.
        """
        return None if self.type == "mps" else dist.Backend.default_device_backend_map.get(self.type)

    def urgent_group(self) -> Any:
        """Return options of one new process group, whose operations are taken up before what computes; None where there
        are none to choose."""
        if self.transport != NCCL or not dist.is_nccl_available():
            return None
        return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)

    @property
    def count(self) -> int:
        """Return the number of devices of this type that this process sees; a CPU is one."""
        if not self.asynchronous:
            return 1
        module = self._module
        return int(module.device_count()) if module.is_available() else 0

    def device(self, local_rank: int | None = None) -> torch.device:
        """Return the device of a rank of this host, by default of the one that torchrun's LOCAL_RANK says."""
        if not self.asynchronous:
            return torch.device(CPU)
        index = int(os.environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank
        return torch.device(self.type, index % max(self.count, 1))

    def name(self, device: torch.device) -> str:
        """Return what its maker calls the device, such as "NVIDIA H100 80GB HBM3"; its type if no driver tells."""
        ask = getattr(self._module, "get_device_name", None)
        return str(ask(device)) if ask is not None else self.type

    @property
    def counts_steps(self) -> bool:
        """Return whether torch's optimizers without a fused kernel keep their counters of steps on the device, where a
        step can be skipped without asking the host."""
        return self.type != "mps"

    # ---- what this torch can do with it ------------------------------------------------------------------------------

    @property
    def maker(self) -> str:
        """Return whose devices are of this type: "NVIDIA", "AMD", "Intel" or "Apple"; the type itself for others."""
        if self.rocm:
            return "AMD"
        return {CUDA: "NVIDIA", "xpu": "Intel", "mps": "Apple"}.get(self.type, self.type)

    @property
    def toolkit(self) -> tuple[int, int] | None:
        """Return the CUDA that this torch is built with, such as (12, 8); None for all others, ROCm's too."""
        if self.type != CUDA or self.rocm or torch.version.cuda is None:
            return None
        major, minor = torch.version.cuda.split(".")[:2]
        return int(major), int(minor)

    def objection(self) -> str:
        """Return why torch cannot use a device of this type, in torch's words; "" where it says nothing."""
        try:
            getattr(self._module, "init", lambda: None)()
        except Exception as error:  # noqa: BLE001 - whatever it raises is the answer
            return str(error).strip().partition("\n")[0].rstrip(".")
        return ""

    def without_kernels(self, first: int) -> list[tuple[str, tuple[int, int]]]:
        """Return the names and compute capabilities of those of the ``first`` devices that no kernel of this torch runs
        on ("no kernel image").

        They are known of CUDA's alone.  The driver is asked, but nothing is allocated on a device.
        """
        if self.type != CUDA or self.rocm:
            return []
        kernels = torch.cuda.get_arch_list()
        capabilities = [torch.cuda.get_device_capability(index) for index in range(min(first, self.count))]
        lacking = [
            index for index, capability in enumerate(capabilities) if kernels and not runs_on(capability, kernels)
        ]
        return [(torch.cuda.get_device_name(index), capabilities[index]) for index in lacking]

    @property
    def kernels(self) -> str:
        """Return what this torch has kernels for, in its own words: "sm_80 sm_90"."""
        return " ".join(torch.cuda.get_arch_list()) if self.type == CUDA else ""

    def uuid(self, device: torch.device) -> str:
        """Return what tells an NVIDIA card from all others, whatever a process calls it.

        It is "" for other makers, because two cards of AMD's can have the same."""
        if self.type != CUDA or self.rocm:
            return ""
        found = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
        return found if found.strip("0-") else ""

    # ---- queues ------------------------------------------------------------------------------------------------------

    def select(self, device: torch.device) -> None:
        """Make ``device`` the current device of this thread; one without an index is that already."""
        if self.asynchronous and device.index is not None:
            torch.accelerator.set_device_index(device)

    def synchronize(self, device: torch.device) -> None:
        """Wait on the host until the device has done all that was issued to it."""
        if self.asynchronous:
            torch.accelerator.synchronize(device)

    @property
    def widest_float(self) -> torch.dtype:
        """Return the widest floating-point dtype that it has: MPS lacks float64, and so do some XPUs."""
        lacks = self.type == "mps" or (
            self.type == "xpu" and self.count > 0 and not torch.xpu.get_device_properties(0).has_fp64
        )
        return torch.float32 if lacks else torch.float64

    def event(self, device: torch.device, *, timing: bool = False) -> torch.Event:
        """Return a new event, recorded in the current stream; two with ``timing`` give the time between them, in ms."""
        made = torch.Event(device=device, enable_timing=timing)
        made.record(torch.accelerator.current_stream(device))  # without it: in that of the thread's current device
        return made

    def stream(self, device: torch.device) -> torch.Stream:
        """Return a new queue of the device; ``with stream:`` makes it the current one."""
        return torch.Stream(device)

    @contextmanager
    def queue(self, device: torch.device) -> Iterator[None]:
        """Issue this thread's work in a new stream of the device meanwhile; on a CPU nothing changes."""
        if not self.asynchronous:
            yield
            return
        self.select(device)
        with self.stream(device):
            yield

    def keep(self, x: Tensor) -> None:
        """Keep the memory of ``x``, if it is freed, from being used again before the current stream has done what is
        issued to it by then."""
        if self.asynchronous:
            x.record_stream(torch.accelerator.current_stream(x.device))

    # ---- copies ------------------------------------------------------------------------------------------------------

    def to_device(self, x: Tensor, device: torch.device) -> Tensor:
        """Return ``x`` on the device.  The host does not wait for the copy, which is from page-locked memory: torch
        keeps that until then.
        """
        if x.device.type == self.type:
            return x
        if x.device.type != CPU or not self.pins:
            return x.to(device)
        x = x.contiguous()
        return (x if x.is_pinned() else x.pin_memory()).to(device, non_blocking=True)

    # ---- memory ------------------------------------------------------------------------------------------------------

    @property
    def pins(self) -> bool:
        """Return whether copies from page-locked host memory run while the host goes on."""
        return self.asynchronous and self.type != "mps"  # MPS shares the host's memory

    def free_and_total(self, device: torch.device) -> tuple[int, int]:
        """Return the bytes of the device that nobody has taken, and all of them, as the driver says."""
        module = self._module
        if hasattr(module, "mem_get_info"):
            free, total = module.mem_get_info(device)
        elif self.type == "mps":  # shares the host's memory: the system says how much of it is for the device
            total = module.recommended_max_memory()
            free = total - module.driver_allocated_memory()
        else:
            free, total = torch.accelerator.get_memory_info(device)
        return int(free), int(total)

    def allocated(self, device: torch.device) -> int:
        """Return the bytes of live tensors of this process."""
        return int(
            self._module.current_allocated_memory()
            if self.type == "mps"
            else torch.accelerator.memory_allocated(device)
        )

    def most_allocated(self, device: torch.device) -> int:
        """Return the most bytes of live tensors since :meth:`reset_peak`; of MPS, which keeps no record, those now."""
        return self.allocated(device) if self.type == "mps" else int(torch.accelerator.max_memory_allocated(device))

    def reserved(self, device: torch.device) -> int:
        """Return the bytes that this process's allocator has taken from the device."""
        return int(
            self._module.driver_allocated_memory() if self.type == "mps" else torch.accelerator.memory_reserved(device)
        )

    def reset_peak(self, device: torch.device) -> None:
        """Begin a new record for :meth:`most_allocated`."""
        if self.type != "mps":
            torch.accelerator.reset_peak_memory_stats(device)

    # ---- kernels -----------------------------------------------------------------------------------------------------

    def wide_product(self, dtype: torch.dtype | None) -> WideProduct | None:
        """Return what multiplies matrices of ``dtype``, bf16 or fp16, into float32 ones, without rounding the sums on
        the way and without memory of its own; None where there is nothing to widen, or no kernel.

        A device that this process has started is asked, by some small products that the host waits for; for any other,
        what torch documents is believed: CUDA has such kernels.
        """
        if not self.asynchronous or dtype not in (torch.bfloat16, torch.float16):
            return None
        started = self.count > 0 and getattr(self._module, "is_initialized", lambda: True)()
        has = multiplies_wide(into_float32, torch.device(self.type), dtype) if started else self.type == CUDA
        return into_float32 if has else None

    @property
    def attention_kernel(self) -> Literal["host", "flash", ""]:
        """Return which of torch's fused kernels for attention gives, with its result, the logarithms by which results
        for blocks of keys are merged: the CPU's, FlashAttention, or none."""
        return "host" if self.type == CPU else "flash" if self.type == CUDA else ""

    @property
    def triton(self) -> bool:
        """Return whether kernels written in Triton run on it; this is believed of devices that are not here."""
        return self.type in (CUDA, "xpu") and (self.count == 0 or _has_triton(self))

    # ---- processes ---------------------------------------------------------------------------------------------------

    @property
    def tf32(self) -> bool:
        """Return whether torch may compute products of float32 matrices with TF32, as it is set now."""
        return self.type == CUDA and torch.backends.cuda.matmul.fp32_precision == "tf32"

    @contextmanager
    def allow_tf32(self) -> Iterator[None]:
        """Let torch meanwhile multiply float32 matrices with TF32 (10 bits of mantissa) where the device can."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def numa_options(self, ranks: int) -> NumaOptions | None:
        """Return how torchelastic shall bind ``ranks`` ranks to the CPUs beside their devices; None if it shall not.

        That takes several NUMA nodes, a device for each rank and the program numactl; torch knows only where CUDA's
        devices are.
        """
        nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
        if self.type != CUDA or self.count < ranks or nodes < 2 or shutil.which("numactl") is None:
            return None
        from torch.numa.binding import AffinityMode, NumaOptions

        return NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)

    @contextmanager
    def forked_generator(self) -> Iterator[None]:
        """Restore torch's generators at the end: the CPU's and the current device's, so that no other device starts."""
        started = self.asynchronous and getattr(self._module, "is_initialized", bool)()
        devices = [torch.accelerator.current_device_index()] if started else []
        with torch.random.fork_rng(devices=devices, device_type=self.type if started else CUDA):
            yield

    def prepare(self, environment: dict[str, str] | os._Environ[str]) -> None:
        """Put into an environment what helps a process on such a device, where the user has not said otherwise; call it
        before the device starts."""
        for name, value in _ENVIRONMENT.get(self.type, {}).items():
            environment.setdefault(name, value)

    def prepare_repeatable(self, environment: dict[str, str] | os._Environ[str]) -> None:
        """Put in what makes a process repeat itself; raise :class:`ConfigError` where the user's value cannot serve."""
        for name, value in _REPEATABLE.get(self.type, {}).items():
            found = environment.setdefault(name, value)
            if found not in _LEGAL.get(name, (found,)):
                wrong = f"{name}={found} in the environment lets cuBLAS choose"
                raise ConfigError.on("train.deterministic", wrong, f"{' or '.join(_LEGAL[name])}, or not to set it")

    def repeats(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of an environment that let a run repeat itself."""
        return {name: environment[name] for name in _REPEATABLE.get(self.type, {}) if name in environment}

    def flight_recorder(self, files: str, pipes: str | None = None) -> dict[str, str]:
        """Return the environment of a rank whose backend keeps its last collectives; {} where it keeps none.

        It writes them into the file ``files`` + rank when one of them times out, or somebody writes into the pipe
        ``pipes`` + rank + ".pipe", which it makes.  Names differ between versions of torch: the newer ones begin with
        TORCH_FR.
        """
        if self.transport not in (NCCL, XCCL):
            return {}
        sizes = dict.fromkeys(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), RECORDED)
        written = dict.fromkeys(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), files)
        asked = dict.fromkeys(("TORCH_FR_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"), pipes)
        given = {name: value for name, value in asked.items() if value is not None}
        return {**sizes, **written, **given, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.type)


@functools.cache
def _has_triton(backend: Backend) -> bool:
    old = backend.type == CUDA and not backend.rocm and torch.cuda.get_device_capability(0) < (7, 0)
    return not old and find_spec("triton") is not None
