"""The part "prototypes": small programs that time several ways to do the same, with the bytes that each takes beside
its inputs.

Every function here runs in a process of its own.  It returns, for each way, the milliseconds, the bytes at the peak,
and the largest relative error where the ways may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.backend import Backend
from task import divided

from .contenders import compiler, task_for
from .fast import environment
from .parts import Part, in_child
from .profiles import profile
from .timing import measure

QUESTIONS: dict[str, str] = {
    "weight_gradient": "dW straight into fp32, by out_dtype",
    "cross_entropy": "cross-entropy: whole, in pieces, fused by the compiler",
    "dropout": "keyed dropout beside torch's own",
    "grouped_query": "enable_gqa instead of expanded heads of keys and values",
    "optimizer": "launches of STEP: a bucket at a time, or all together",
    "autograd_threads": "backward in autograd's device thread, or in the caller's",
    "elements_fused": "element-wise ops of a Llama block: one by one, or compiled",
}
Ways = Mapping[str, Callable[[], object]]


def prototypes(part: Part) -> None:
    """Measure all ideas one after the other."""
    options = part.options
    part.figures["prototypes"] = {}
    for name, what in QUESTIONS.items():
        if not part.time_for(what, 15.0 if options.tiny else 40.0):
            continue
        with part.guarded(what):
            found = in_child(
                f"gpu.prototypes:{name}",
                min(part.left, 120.0),
                environment(options.device),
                device=options.device,
                tiny=options.tiny,
            )
            part.figures["prototypes"][name] = {"what": what, "ways": found}
            lines = [f"{way} {_told(values)}" for way, values in found.items()]
            ours = [values for way, values in found.items() if way.startswith("shardwise")]
            ran = any("milliseconds" in one for one in found.values()) and all("milliseconds" in one for one in ours)
            part.check(what, ran, "; ".join(lines))


def _told(values: Mapping[str, Any]) -> str:
    if "unknown" in values:
        return f"unknown ({values['unknown']})"
    words = f"{values['milliseconds']:.3f} ms"
    words += f", {values['bytes'] / 2**20:,.1f} MiB" if values.get("bytes") is not None else ""
    words += f", off by {values['error']:.0e}" if "error" in values else ""
    return words + (f", {values['kernels']:.0f} kernels" if "kernels" in values else "")


def _place(device: str) -> torch.device:
    backend = Backend.of(device)
    found = backend.device()
    backend.select(found)
    torch.manual_seed(0)
    return found


def weight_gradient(device: str, tiny: bool) -> dict[str, Any]:
    """Time dW += dYᵀ X of a Llama-1B's MLP, with bf16 factors and an fp32 sum; the error is that of one addition to
    zero, against fp64.
    """
    from shardwise.ops.weight_gradients import GradientFactors, Kernels, accumulate

    place = _place(device)
    tokens, out, width = (64, 48, 32) if tiny else (4096, 5632, 2048)
    dy = torch.randn(tokens, out, device=place).bfloat16()
    x = torch.randn(tokens, width, device=place).bfloat16()
    goal = torch.zeros(out, width, device=place)
    aten: Any = torch.ops.aten
    fp32 = torch.float32

    def rounded() -> None:
        goal.add_(dy.t() @ x)

    def by_mm() -> None:
        goal.add_(aten.mm.dtype(dy.t(), x, fp32))

    def in_place() -> None:
        aten.addmm.dtype_out(goal, dy.t(), x, fp32, out=goal)

    kernels = Kernels.of(Backend.of(device), torch.bfloat16)

    def shardwise() -> None:
        accumulate(goal, GradientFactors("w", dy, "linear", x, None, ()), True, kernels)

    ways: Ways = {
        "rounded to bf16, then added": rounded,
        "fp32 result, then added": by_mm,
        "added in place": in_place,
        "shardwise": shardwise,
    }
    found = measure(place, ways, tiny)
    exact = dy[:, :64].double().t() @ x.double()
    for name, way in ways.items():
        if "milliseconds" in found[name]:
            goal.zero_()
            way()
            found[name]["error"] = float((goal[:64] - exact).abs().max() / exact.abs().max())
    return found


def cross_entropy(device: str, tiny: bool) -> dict[str, Any]:
    """Time forward and backward of the mean over bf16 scores; beside the scores, 2 bytes a score are their gradient."""
    from shardwise.ops import cross_entropy
    from shardwise.ops.env import Env

    place = _place(device)
    rows, classes = (64, 128) if tiny else (8192, 32000)
    scores = torch.randn(rows, classes, device=place).bfloat16().requires_grad_()
    target = torch.randint(0, classes, (rows,), device=place)
    options: dict[str, Any] = {
        "ignore_index": -100, "smoothing": 0.0, "reduction": cross_entropy.MEAN, "count": rows,
        "log_probabilities": False, "summand": True,
        "share": None,
    }  # fmt: skip

    def whole(scores: Tensor) -> Tensor:
        return F.cross_entropy(scores.float(), target)

    fused = torch.compile(whole, backend=compiler(tiny))

    def both(loss: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss(scores), scores)

    ways: Ways = {
        "whole, in fp32": both(whole), "compiled": both(fused),
        "shardwise": both(lambda scores: cross_entropy.cross_entropy(Env(), scores, target, None, **options)),
    }  # fmt: skip
    found = measure(place, ways, tiny)
    for values in found.values():
        if values.get("bytes") is not None:
            values["bytes_per_score"] = values["bytes"] / scores.numel()
    return found


def dropout(device: str, tiny: bool) -> dict[str, Any]:
    """Time forward and backward of dropout on bf16 activations."""
    from shardwise.ops.keyed_random import keyed_dropout

    place = _place(device)
    x = torch.randn(*((4, 32, 64) if tiny else (4, 4096, 2048)), device=place).bfloat16().requires_grad_()
    dy = torch.randn_like(x)

    def keyed() -> object:
        return torch.autograd.grad(keyed_dropout(x, 0.1, 1, 2, 3, (0, 1)), x, dy)

    def own() -> object:
        return torch.autograd.grad(F.dropout(x, 0.1, True), x, dy)

    return measure(place, {"torch's own": own, "shardwise, keyed": keyed}, tiny)


def grouped_query(device: str, tiny: bool) -> dict[str, Any]:
    """Time forward and backward of causal attention with 32 heads of queries and 4 of keys and values."""
    place = _place(device)
    rows, heads, shared, tokens, size = (1, 4, 2, 32, 16) if tiny else (2, 32, 4, 4096, 64)
    q = torch.randn(rows, heads, tokens, size, device=place).bfloat16().requires_grad_()
    k, v = (torch.randn(rows, shared, tokens, size, device=place).bfloat16().requires_grad_() for _ in range(2))
    dy = torch.randn_like(q)

    def expanded() -> object:
        wide = (t.repeat_interleave(heads // shared, 1) for t in (k, v))
        return torch.autograd.grad(F.scaled_dot_product_attention(q, *wide, is_causal=True), (q, k, v), dy)

    def grouped() -> object:
        return torch.autograd.grad(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), (q, k, v), dy
        )

    return measure(place, {"expanded": expanded, "enable_gqa": grouped}, tiny)


def optimizer(device: str, tiny: bool) -> dict[str, Any]:
    """Time AdamW's update of 24 buckets of two segments each, with the clipping coefficient and the skip flag."""
    from shardwise.core.optim import OptimizerChoice
    from shardwise.runtime.optimizer import FlatOptimizer, Segment

    place = _place(device)
    elements, buckets = (1024, 3) if tiny else (22_000_000, 24)
    choice = OptimizerChoice("adamw", lr=1e-4)
    segments = []
    for _ in range(buckets):
        flat, gradient = torch.randn(elements, device=place), torch.randn(elements, device=place)
        cut = elements // 64 * 63
        segments.append([Segment(flat[:cut], gradient[:cut], 0), Segment(flat[cut:], gradient[cut:], 1)])
    apart = [FlatOptimizer(choice, one) for one in segments]
    together = FlatOptimizer(choice, [segment for one in segments for segment in one])
    factor, skip = torch.tensor(0.999, device=place), torch.tensor(0.0, device=place)
    ways: Ways = {
        "a bucket at a time": lambda: [one.step(choice.settings(0), factor, skip) for one in apart],
        "all together": lambda: together.step(choice.settings(0), factor, skip),
    }  # fmt: skip
    found = measure(place, ways, tiny)
    for name, way in ways.items():
        found[name]["kernels"] = profile(way, place, warmup=1, steps=1)["kernels"]
    return found


def autograd_threads(device: str, tiny: bool) -> dict[str, Any]:
    """Time a step of a small Llama, which the host limits, with autograd's threads and without."""
    place = _place(device)
    trainer, given = divided(0, 1, task=task_for(device, True))
    found = {}
    for name, threads in {"its own threads": True, "the caller's thread": False}.items():
        with torch.autograd.set_multithreading_enabled(threads):
            found |= measure(place, {name: lambda: trainer.step(given)}, tiny)
    return found


def elements_fused(device: str, tiny: bool) -> dict[str, Any]:
    """Time forward and backward of a block's residual sum, norm and SwiGLU without its products."""
    from shardwise.models.llama import RMSNorm

    place = _place(device)
    rows, tokens, width, hidden = (1, 32, 32, 64) if tiny else (1, 4096, 2048, 5632)
    norm = RMSNorm(width).to(place).bfloat16()
    x, residual = (torch.randn(rows, tokens, width, device=place).bfloat16().requires_grad_() for _ in range(2))
    gate, up = (torch.randn(rows, tokens, hidden, device=place).bfloat16().requires_grad_() for _ in range(2))
    inputs = (x, residual, gate, up, *norm.parameters())

    def elements(x: Tensor, residual: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(total) + total, F.silu(gate) * up

    def both(call: Callable[..., Any]) -> Callable[[], object]:
        def run() -> object:
            found = call(x, residual, gate, up)
            return torch.autograd.grad(found, inputs, [torch.ones_like(one) for one in found])

        return run

    fused = torch.compile(elements, backend=compiler(tiny))
    return measure(place, {"one by one": both(elements), "compiled": both(fused)}, tiny)
