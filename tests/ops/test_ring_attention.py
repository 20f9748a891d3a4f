"""Ring attention equals attention of one device: out, and the gradients of queries, keys, values and mask."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.core.layout import axis_ranges
from shardwise.core.mesh import Mesh
from shardwise.ops.attention_blocks import Block, attend, attend_backward
from shardwise.ops.env import Env
from shardwise.ops.ring_attention import ring_attention
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.threads import run_ranks

KINDS = ("causal", "full", "bool", "padding", "added", "learned", "heads", "nothing")


def masked(kind: str, b: int, h: int, s: int, t: int, dtype: torch.dtype) -> Tensor | None:
    if kind == "bool":
        return torch.rand(b, 1, s, t) < 0.6
    if kind == "padding":
        return (torch.arange(t) < torch.randint(1, t + 1, (b, 1)))[:, None, None]
    if kind == "nothing":
        return (torch.rand(b, h, s, t) < 0.6) & (torch.arange(s) % 3 > 0)[:, None]
    if kind in ("added", "learned"):
        return torch.randn(s, t, dtype=dtype).requires_grad_(kind == "learned")
    return torch.randn(1, h, 1, t, dtype=dtype).requires_grad_() if kind == "heads" else None


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Spelled out; a query that sees nothing gives zeros."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * 0.3
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    dead = torch.isneginf(scores).all(-1, keepdim=True)
    return scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0) @ v


def part(x: Tensor, dim: int, size: int, ranks: int, index: int, axis: str) -> Tensor:
    return torch.cat([x.narrow(dim, a, b - a) for a, b in axis_ranges(size, (axis,), ranks, index)], dim)


def compared(kind: str, axis: str, ranks: int, sizes: tuple[int, int], heads: tuple[int, int], far: int,
             dtype: torch.dtype = torch.float64) -> dict[str, float]:  # fmt: skip
    """The largest error of each, relative to the largest value."""
    s, t = sizes
    q, k, v = (torch.randn(2, n, length, size, dtype=dtype, requires_grad=True)
               for n, length, size in ((heads[0], s, 8), (heads[1], t, 8), (heads[1], t, far)))  # fmt: skip
    mask, causal, grad = masked(kind, 2, heads[0], s, t, dtype), kind == "causal", torch.randn(2, heads[0], s, far)
    learned = [q, k, v, *([mask] if mask is not None and mask.requires_grad else [])]
    wide = [None if x is None else x.double() if x.is_floating_point() else x for x in (q, k, v, mask)]
    truth = attention(*wide, causal)  # type: ignore[arg-type]
    expected = torch.autograd.grad(truth, learned, grad.double())

    def rank(comm: Communicator) -> list[tuple[Tensor, ...]]:
        env, axes = Env(comm, tensor={axis: (ranks, comm.rank)}), (axis,)
        own = [part(x.detach(), 2, n, ranks, comm.rank, axis).requires_grad_() for x, n in ((q, s), (k, t), (v, t))]
        mine = mask.detach() if mask is not None else None
        if mine is not None and mine.shape[-2] == s:
            mine = part(mine, mine.dim() - 2, s, ranks, comm.rank, axis)
        if mask is not None and mask.requires_grad:
            assert mine is not None
            mine = mine.clone().requires_grad_()
        out = ring_attention(env, *own, mine, (s, axes), (t, axes), causal, 0.3)
        mattering = [*own, *([mine] if mine is not None and mine.requires_grad else [])]
        found = torch.autograd.grad(out, mattering, part(grad, 2, s, ranks, comm.rank, axis).to(dtype))
        return [(out.detach(),), found]  # type: ignore[list-item]

    each: Any = run_ranks(Mesh.of(**{axis: ranks}), rank, timeout=20)

    def error(found: Tensor, whole: Tensor, dim: int, n: int, rank: int) -> float:
        off = found.double() - part(whole, dim, n, ranks, rank, axis)
        return float(off.abs().max() / whole.abs().max()) if off.numel() else 0.0

    errors = {"out": 0.0}
    for i, (((out,), grads)) in enumerate(each):
        errors["out"] = max(errors["out"], error(out, truth.detach(), 2, s, i))
        for name, n, mine, whole in zip("qkv", (s, t, t), grads, expected, strict=False):
            errors[name] = max(errors.get(name, 0.0), error(mine, whole, 2, n, i))
    if len(learned) > 3 and learned[3].shape[-2] == s:
        for i, (_, grads) in enumerate(each):
            errors["mask"] = max(errors.get("mask", 0.0), error(grads[3], expected[3], learned[3].dim() - 2, s, i))
    elif len(learned) > 3:
        off = sum(grads[3] for _, grads in each) - expected[3]
        errors["mask"] = float(off.abs().max() / expected[3].abs().max())
    return errors


@pytest.mark.quick(16)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", ["cp", "tp"])
@pytest.mark.parametrize(("ranks", "sizes"), [(2, (8, 8)), (3, (7, 7)), (4, (13, 13)), (5, (6, 6)), (4, (5, 11))])
@pytest.mark.parametrize(("heads", "far"), [((4, 4), 8), ((4, 2), 8), ((2, 2), 5)])
def test_equals_attention_of_one_device(
    kind: str, axis: str, ranks: int, sizes: tuple[int, int], heads: tuple[int, int], far: int
) -> None:
    """In zigzag order (cp) and in pieces as they come (tp), and values of another size than keys."""
    if kind == "causal" and sizes[0] != sizes[1]:
        sizes = sizes[1], sizes[1]
    torch.manual_seed(3)
    errors = compared(kind, axis, ranks, sizes, heads, far)
    assert max(errors.values()) <= 1e-12, errors


@pytest.mark.slow
def test_random_lengths() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(60):
        ranks, s = chosen.randint(2, 5), chosen.randint(6, 40)
        kind, keys = chosen.choice(KINDS), chosen.choice([1, 2, 4])
        t = s if kind == "causal" else chosen.randint(6, 40)
        errors = compared(kind, "cp", ranks, (s, t), (4, keys), chosen.choice([8, 8, 3]))
        assert max(errors.values()) <= 1e-12, (kind, ranks, s, t, keys, errors)


@pytest.mark.parametrize("kind", ["causal", "padding"])
def test_in_low_precision_errors_are_those_of_rounding(kind: str) -> None:
    torch.manual_seed(0)
    errors = compared(kind, "cp", 4, (64, 64), (4, 2), 8, torch.bfloat16)
    assert max(errors.values()) <= 0.03, errors


@pytest.mark.parametrize(("masked_by", "causal"), itertools.product(["none", "bool", "added"], [False, True]))
def test_fused_kernels_and_plain_products_agree(masked_by: str, causal: bool) -> None:
    if masked_by != "none" and causal:
        causal = False
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 9, 8, dtype=torch.float64) for h in (4, 2, 2))
    mask = None if masked_by == "none" else masked(masked_by, 2, 4, 9, 9, torch.float64)
    if mask is not None and mask.dtype is torch.bool:
        mask[:, :, 4] = False
    both = [Block(q, k, v, mask, causal, 0.3, kernel) for kernel in ("host", "")]
    assert [one.fused for one in both] == [True, False]
    fused, plain = map(attend, both)
    for mine, other in zip(fused[:2], plain[:2], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13)
    grad = torch.randn_like(q)
    for mine, other in zip(*(attend_backward(one, grad, plain, False)[:3] for one in both), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13)


def test_second_order_is_refused() -> None:
    def rank(comm: Communicator) -> str:
        q, k, v = (torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3))
        part = 8, ("cp",)
        out = ring_attention(Env(comm, tensor={"cp": (2, comm.rank)}), q, k, v, None, part, part)
        (found,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            found.sum().backward()
        return ""

    run_ranks(Mesh.of(cp=2), rank, timeout=20)
