"""What a device does in a step: the share of the time in which it is idle, its kernels by class, and the hidden share
of communication.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from alternate import StepMaker
from shardwise.backend import Backend
from task import Task

from .contenders import Stamps

Span = tuple[float, float]
"""A (start, stop), in seconds."""

# A kernel (on a CPU an op) belongs to the first class whose pattern is found in its name; case does not matter.
CLASSES: tuple[tuple[str, str], ...] = (
    ("communication", r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|gloo|symm_mem"),
    ("attention", r"flash|fmha|mha_|sdpa|scaled_dot_product|attention"),
    ("loss", r"softmax|nll_loss|cross_?entropy|logsumexp"),
    (
        "norm and optimizer",
        r"multi_tensor_apply|fusedadam|adam|norm\w*ops|lpnorm|l2norm|vector_norm|_foreach_norm|linalg_",
    ),
    (
        "products",
        r"gemm|nvjet|cutlass|matmul|(^|::|_)(add|b)?mm(_|$)|s\d+_?tensorop|xmma|splitk|gemv|dot_kernel|cublas|wgmma",
    ),
    (
        "copies",
        r"memcpy|memset|copy|cat_?array|(^|::)(_?to_copy|clone|cat|fill_|zero_|contiguous)$|fill_?functor|transpose|permute",
    ),
    (
        "element-wise",
        r"elementwise|triton|reduce_kernel|functor|embedding|index|gather|scatter|rms_?norm|layer_?norm|^aten::",
    ),
)
OTHER = "other"


def kernel_class(name: str) -> str:
    """Return the class of a kernel, by its name in the profiler."""
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE)), OTHER)


def union(spans: Iterable[Span]) -> list[Span]:
    """Return spans that cover the same time, do not overlap and are in order."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def length(spans: Iterable[Span]) -> float:
    """Return the seconds that at least one of the spans covers."""
    return sum(stop - start for start, stop in union(spans))


def hidden_share(communication: Sequence[Span], computing: Sequence[Span]) -> float | None:
    """Return the share of communication's time in which the device also computes; None without communication."""
    total = length(communication)
    exposed = length([*communication, *computing]) - length(computing)
    return None if not total else max(0.0, 1 - exposed / total)


def summary(kernels: Sequence[tuple[str, float, float]], steps: int, seconds: float | None = None) -> dict[str, Any]:
    """Sum up kernels, given as (name, start, stop), of ``steps`` steps, which took ``seconds`` (by default from the
    first start to the last stop).
    """
    spans = [(start, stop) for _, start, stop in kernels]
    begun, ended = min(start for start, _ in spans), max(stop for _, stop in spans)
    total = seconds or ended - begun
    taken, launches, other = defaultdict[str, float](float), Counter[str](), Counter[str]()
    by: dict[str, list[Span]] = {"communication": [], "computing": []}
    for name, start, stop in kernels:
        kind = kernel_class(name)
        taken[kind] += stop - start
        launches[kind] += 1
        by["communication" if kind == "communication" else "computing"].append((start, stop))
        if kind == OTHER:
            other[name[:80]] += 1
    names = [kind for kind, _ in CLASSES] + [OTHER]
    return {
        "step_seconds": total / steps,
        "profiled_step_seconds": (ended - begun) / steps,
        "idle": max(0.0, 1 - length(spans) / total),
        "kernels": len(kernels) / steps,
        "classes": {n: {"seconds": taken[n] / steps, "launches": launches[n] / steps} for n in names if launches[n]},
        "hidden": hidden_share(by["communication"], by["computing"]),
        "communication_seconds": length(by["communication"]) / steps,
        "other": dict(other.most_common(10)),
    }


def profile(step: Callable[[], Any], device: torch.device, *, warmup: int = 3, steps: int = 3) -> dict[str, Any]:
    """Profile ``steps`` steps that the host issues without waiting.

    The profiler slows the host, not the kernels, so on a card the shares are of the time of as many steps without it.
    On a CPU ops stand for kernels, each with the time that it does not spend in other ops; there only the classes are
    meaningful.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    backend = Backend.of(device)
    for _ in range(warmup):
        step()
    backend.synchronize(device)
    stamps = Stamps(device)
    stamps.now()
    for _ in range(steps):
        step()
    stamps.now()
    plain_seconds = sum(stamps.seconds())
    of_device = getattr(ProfilerActivity, backend.type.upper(), ProfilerActivity.PrivateUse1)
    kinds = {ProfilerActivity.CPU, of_device}
    with torch_profile(activities=kinds) as found:
        for _ in range(steps):
            step()
        backend.synchronize(device)
    kernels = list(_kernels(found, backend.asynchronous))
    if not kernels:
        raise RuntimeError("the profiler saw no kernel of the device")
    return summary(kernels, steps, plain_seconds if backend.asynchronous else None)


def _kernels(found: torch.profiler.profile, asynchronous: bool) -> Iterable[tuple[str, float, float]]:
    for event in found.events() or ():
        on_host = event.device_type == torch.autograd.DeviceType.CPU
        start = event.time_range.start / 1e6
        if event.is_user_annotation:  # on a card an annotation spans the kernels below it
            continue
        if asynchronous and not on_host:
            yield event.name, start, event.time_range.end / 1e6
        elif not asynchronous and event.name.startswith("aten::"):
            yield event.name, start, start + event.self_cpu_time_total / 1e6


def of_contender(
    rank: int, ranks: int, *, make: StepMaker, task: Task, warmup: int = 3, steps: int = 3
) -> Callable[[], float]:
    """Make a contender whose one step is a profile; ``measured`` has its summary."""
    step, device = make(rank, ranks), task.place

    def run() -> float:
        run.measured.append(profile(step, device, warmup=warmup, steps=steps))  # type: ignore[attr-defined]
        return float(step())

    run.measured = []  # type: ignore[attr-defined]
    return run
