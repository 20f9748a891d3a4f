"""Time fused AdamW over one flat buffer against ``torch.optim.AdamW(fused=True)`` over many tensors.

    python benchmarks/flat_optimizer.py [--elements 30000000] [--tensors 100] [--threads 1]

Both update the same number of elements in fp32, in turns; the medians of the steps are printed, with and without
clipping (which for torch is ``torch._foreach_mul_`` by the coefficient before the step, as in ``clip_grad_norm_``).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from shardwise.core.optim import OptimizerChoice
from shardwise.runtime.optimizer import FlatOptimizer, Segment


def medians(steps: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each step, where all run in turns ``repeats`` times after one warm-up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if repeat:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def compare(elements: int, tensors: int, repeats: int) -> dict[str, float]:
    """Return the median seconds of a step, flat and per tensor, each with and without a clipping coefficient."""
    choice = OptimizerChoice("adamw", lr=1e-3)
    param, grad = torch.randn(elements), torch.randn(elements)
    flat = FlatOptimizer(choice, [Segment(param, grad)])
    singles = [torch.randn(elements // tensors) for _ in range(tensors)]
    for single in singles:
        single.grad = torch.randn_like(single)
    per_tensor = torch.optim.AdamW(singles, lr=1e-3, fused=True)
    coefficient, taken = torch.tensor(0.999), torch.tensor(0.0)
    grads = [single.grad for single in singles if single.grad is not None]

    def clip_and_step() -> None:
        torch._foreach_mul_(grads, coefficient)
        per_tensor.step()

    steps: dict[str, Callable[[], object]] = {
        "flat": lambda: flat.step(choice.settings(0)),
        "per tensor": per_tensor.step,
        "flat, clipped, with skip flag": lambda: flat.step(choice.settings(0), coefficient, taken),
        "per tensor, clipped": clip_and_step,
    }
    return medians(steps, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fused AdamW: one flat buffer against many tensors.")
    parser.add_argument("--elements", type=int, default=30_000_000)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    times = compare(options.elements, options.tensors, options.repeats)
    for name, seconds in times.items():
        print(f"{name:32}{seconds * 1e3:8.2f} ms")
    print(f"{'per tensor / flat':32}{times['per tensor'] / times['flat']:8.3f}")


if __name__ == "__main__":
    main()
