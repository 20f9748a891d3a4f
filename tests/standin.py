"""A device of a type that torch does not have, "standin", as an extension would bring one: ``python standin.py
CASE...``.

Registered with torch like any other, it is this process's accelerator.  Its tensors have values, which the CPU computes
out of sight; an op on tensors of two devices is an error, as it is everywhere.  So plans are verified on it, in threads
with streams that do nothing.  A case is MODEL:PLAN of ``device/test_verify_on_device.py``, MODEL:PLAN:apart where the
oracle leaves on the host what is there, or "facts"; each prints a line of JSON.  Registering lasts as long as the
process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from shardwise.backend import Backend
from shardwise.lower.compiled import Compiled
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.threads import run_ranks

NAME = "standin"
DEVICE = "standin:0"
aten = torch.ops.aten
CROSSING = {aten._to_copy.default, aten.copy_.default}
GIB = 1 << 30


class Module:
    """``torch.standin``: what torch and a backend ask of a device's module."""

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 2

    def get_device_name(self, device: torch.device) -> str:
        return "Stand-In 9000"

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 3 * GIB, 4 * GIB

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass


class There(Tensor):
    """A tensor of the device; ``here`` is its memory."""

    here: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here: Tensor) -> There:
        made = Tensor._make_wrapper_subclass(
            cls,
            here.size(),
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=torch.device(DEVICE),
        )
        made.here = here
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"There({self.here})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made: Tensor = There(self.here.clone())
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=self.requires_grad)
        memo[id(self)] = made
        return made

    def data_ptr(self) -> int:
        return self.here.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.here.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return compute(func, args, dict(kwargs or {}))


class Factories(TorchDispatchMode):
    """Lets ops make tensors there, in this thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return compute(func, args, dict(kwargs or {}))


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The op by the CPU, and its results where they belong."""
    if func is aten.record_stream.default:
        return None
    kwargs.pop("pin_memory", None)
    given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
    there = [a for a in given if isinstance(a, There)]
    if there and func not in CROSSING and any(a.dim() and not isinstance(a, There) for a in given):
        raise RuntimeError(f"{func}: tensors of two devices")
    asked = kwargs.get("device")
    goal = bool(there) if asked is None else torch.device(asked).type == NAME
    if asked is not None:
        kwargs["device"] = "cpu" if goal else asked
    result = func(*_memory(args), **_memory(kwargs))
    written = [
        v
        for one, v in zip(func._schema.arguments, args, strict=False)
        if one.alias_info is not None and one.alias_info.is_write
    ]
    if isinstance(result, Tensor) and len(written) == 1 and isinstance(written[0], Tensor):
        return written[0]
    return tree_map(lambda x: There(x) if isinstance(x, Tensor) and goal else x, result)


def _memory(values: Any) -> Any:
    return tree_map(lambda x: x.here if isinstance(x, There) else x, values)


def _empty(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return There(torch.empty_strided(size, stride, dtype=dtype))


def _copy(source: Tensor, goal: Tensor, non_blocking: bool = False) -> Tensor:
    _memory(goal).copy_(_memory(source))
    return goal


KERNELS = torch.library.Library("aten", "IMPL")
"""What ``torch.tensor`` calls past Python; kept, since they are there as long as it is."""


def register() -> torch.device:
    """Make "standin" a type of device of this process, and the accelerator that it has."""
    _setup_privateuseone_for_python_backend(NAME, Module())
    KERNELS.impl("empty_strided", _empty, "PrivateUse1")
    KERNELS.impl("_copy_from", _copy, "PrivateUse1")
    return torch.device(DEVICE)


def facts(device: torch.device) -> dict[str, Any]:
    """What a backend says of it through torch's own registry."""
    here, backend = Backend.here(), Backend.of(device)
    backend.select(device)
    event = backend.event(device)
    with Factories(), backend.queue(device):
        event.wait()
        backend.keep(torch.ones(3, device=device))
    stream = backend.stream(device)
    return {
        "here": here == backend, "type": backend.type, "kind": backend.kind, "asynchronous": backend.asynchronous,
        "rocm": backend.rocm,
        "count": backend.count, "devices": [str(backend.device(rank)) for rank in range(3)],
        "name": backend.name(device), "transport": backend.transport,
        "memory": backend.free_and_total(device), "event": event.device.type, "stream": stream.device.type,
        "tf32": backend.tf32, "pins": backend.pins,
        "widest": str(backend.widest_float),
    }  # fmt: skip


def verified(device: torch.device, name: str, plan: str, fault: str = "") -> dict[str, Any]:
    """A report, of ranks that are threads."""
    sys.path.insert(0, str(Path(__file__).parent / "device"))
    from test_verify_on_device import PLANS, subject

    from shardwise.core.optim import OptimizerChoice
    from shardwise.verify.device import Together
    from shardwise.verify.verify import verify

    module, batches, loss = subject(name)

    def run(compiled: Compiled, fn: Callable[[Communicator], Any]) -> Any:
        def rank(comm: Communicator) -> Any:
            with Factories():
                return fn(comm)

        return run_ranks(compiled.plan.mesh, rank, timeout=120, device=device)

    pinned = {"pin_memory": lambda self: self, "is_pinned": lambda self: True}
    unknown = {
        "synchronize": lambda self, device: None,
        "most_allocated": lambda self, device: 0,
        "reset_peak": lambda self, device: None,
    }
    together = Together._moved if not fault else lambda self, value: value
    choice = OptimizerChoice("adamw", lr=1e-2)
    with (
        patch.multiple(Tensor, **pinned),
        patch.multiple(Backend, **unknown),
        patch.object(Together, "_moved", together),
        Factories(),
    ):
        try:
            report = verify(module, batches, PLANS[plan](), loss=loss, optimizer=choice, run=run, device=device)
        except RuntimeError as error:
            return {"passed": False, "error": str(error)}
    return {
        "passed": report.passed,
        "largest": report.largest,
        "compared": report.compared,
        "low": report.low_precision,
        "worst": str(report.worst[:2]),
    }


def main(cases: list[str]) -> None:
    device = register()
    torch.set_num_threads(1)
    for case in cases:
        run = partial(facts, device) if case == "facts" else partial(verified, device, *case.split(":"))
        print(json.dumps({"case": case, **run()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
