"""One small model for every op and the arguments that it takes: a parameter before it, a parameter after it, rows
sharded.

An op gets ``m`` (the model and its parameters), ``h`` (an activation, (rows, 3, 4), that depends on a parameter) and
``b`` (the fields of the batch); it returns one tensor or several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 7
Op = Callable[[Any, Tensor, dict[str, Tensor]], Any]


class Probe(nn.Module):
    """A linear layer, the op, a parameter, and a loss that sees every element of the op's result and where it is."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.op = op
        self.before = nn.Linear(4, 12)
        self.after = nn.Parameter(torch.tensor(0.7))
        self.p = nn.Parameter(torch.randn(4))
        self.q = nn.Parameter(torch.randn(3, 4))
        self.w = nn.Parameter(torch.randn(4, 4))
        self.table = nn.Parameter(torch.randn(7, 4))
        self.kernel = nn.Parameter(torch.randn(6, 3, 2))
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.linspace(0, 1, 4))

    def forward(self, x: Tensor, ids: Tensor, label: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        h = self.before(x).view(x.shape[0], 3, 4)
        out = self.op(self, h, {"x": x, "ids": ids, "label": label, "keep": keep, "target": target})
        results = out if isinstance(out, tuple | list) else (out,)
        return sum((weighed(y, self.after) for y in results), torch.zeros(()))


def weighed(y: Tensor, after: Tensor) -> Tensor:
    """A scalar in which every element of ``y`` counts differently."""
    if y.dtype is torch.bool or not y.is_floating_point():
        y = y.to(torch.get_default_dtype()) * 0.1
    weight = torch.ones(())
    for d, size in enumerate(y.shape):
        wave = 1.5 + torch.cos(torch.arange(size) * (1.3 + d))
        weight = weight * wave.reshape([-1] + [1] * (y.dim() - d - 1))
    return (torch.tanh(y * after * 0.3) * weight).sum() / 20


def batch(rows: int = ROWS) -> dict[str, Tensor]:
    """Fields of every kind: floats, tokens, classes, booleans."""
    g = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(rows, 4, generator=g),
        "ids": torch.randint(0, 7, (rows, 5), generator=g),
        "label": torch.randint(0, 4, (rows,), generator=g),
        "keep": torch.rand(rows, 3, generator=g) > 0.3,
        "target": torch.rand(rows, 3, 4, generator=g),
    }


def rows_of(t: Tensor) -> Any:
    return torch.arange(t.shape[0])


LOCAL: dict[str, Op] = {  # nothing is communicated for these
    # elementwise and broadcasting
    "add": lambda m, h, b: h + m.p + b["x"][:, None],
    "add alpha": lambda m, h, b: torch.add(h, m.q, alpha=0.3),
    "sub scalar": lambda m, h, b: 1 - h,
    "rsub": lambda m, h, b: torch.rsub(h, m.p, alpha=2),
    "mul broadcast over rows": lambda m, h, b: h * m.q[None],
    "mul rows by rows": lambda m, h, b: h * b["x"].sum(-1, keepdim=True)[..., None],
    "div": lambda m, h, b: h / (m.p.abs() + 1),
    "div rounding": lambda m, h, b: h * torch.div(b["x"], 0.3, rounding_mode="floor")[:, None],
    "pow": lambda m, h, b: (h.abs() + 0.1) ** 1.5,
    "pow tensor": lambda m, h, b: (h.abs() + 0.1) ** m.p,
    "minimum": lambda m, h, b: torch.minimum(h, m.q),
    "clamp tensor": lambda m, h, b: torch.clamp(h, min=m.p - 1, max=m.p + 1),
    "unary chain": lambda m, h, b: torch.exp(-h.square()) + h.sin().abs().sqrt() + torch.log1p(h.abs()) + torch.erf(h),
    "activations": lambda m, h, b: (
        F.gelu(h)
        + F.gelu(h, approximate="tanh")
        + F.silu(h)
        + F.elu(h)
        + F.leaky_relu(h, 0.1)
        + F.softplus(h)
        + F.mish(h)
        + F.hardswish(h)
        + F.logsigmoid(h)
        + F.relu6(h)
        + F.selu(h)
        + F.celu(h)
        + F.hardtanh(h)
        + F.softsign(h)
        + F.tanhshrink(h)
        + F.softshrink(h)
        + F.hardshrink(h)
        + F.hardsigmoid(h)
        + F.threshold(h, 0.1, 0.2)
    ),  # fmt: skip
    "prelu": lambda m, h, b: F.prelu(h, m.q[:, 0]),
    "glu": lambda m, h, b: F.glu(h, -1) + F.glu(h.transpose(1, 2), 1).mT,
    "where": lambda m, h, b: torch.where(b["keep"][..., None], h, m.p),
    "where scalar": lambda m, h, b: torch.where(h > 0, h, 0.5),
    "masked_fill": lambda m, h, b: h.masked_fill(~b["keep"][..., None], -2.0),
    "masked_fill tensor": lambda m, h, b: h.masked_fill(~b["keep"][..., None], m.p[0]),
    "lerp": lambda m, h, b: torch.lerp(h, m.q.expand_as(h), 0.3),
    "addcmul": lambda m, h, b: torch.addcmul(h, m.p, m.q, value=0.5),
    "compare": lambda m, h, b: (h > m.p.detach()).float() * h + (b["ids"][:, :3, None] == 2) * h,
    "logical": lambda m, h, b: (b["keep"][..., None] & ~(h > 0) | (h < -1)) * h,
    "to integer": lambda m, h, b: (h * 10).to(torch.int64) + h,
    "nan_to_num": lambda m, h, b: (h.detach().clamp(min=0) / 0).nan_to_num(0.1, 0.2, 0.3) * h,
    "fractions": lambda m, h, b: h % 1 + torch.fmod(h, 0.5) + h.round() + h.floor() + h.frac() + h.sign(),
    "complex": lambda m, h, b: torch.view_as_real(
        torch.view_as_complex(h.view(-1, 3, 2, 2))
        * torch.polar(torch.ones(3, 2), torch.outer(torch.arange(3.0), m.p[:2].detach()))
    ).flatten(2),
    "fft": lambda m, h, b: torch.fft.fft(torch.fft.fft(h, dim=-1), dim=1).real,
    "fft of several dims": lambda m, h, b: [
        torch.fft.fftn(h, dim=(1, 2)).real,
        torch.view_as_real(torch.fft.rfft2(h)),
        torch.fft.irfft2(torch.fft.rfftn(h, s=(3, 4)), s=(3, 4)),
        torch.fft.fftshift(h, 1) + torch.fft.ifftshift(h, (1, 2)),
        torch.fft.hfft(torch.fft.ihfft(h), 4),
    ],
    "atan2": lambda m, h, b: torch.atan2(h, m.q),
    "zeros_like": lambda m, h, b: h + torch.zeros_like(h) + torch.ones_like(h) + torch.full_like(h, 0.3),
    "clone and detach": lambda m, h, b: h.clone() * h.detach(),
    # shapes
    "view": lambda m, h, b: h.view(h.shape[0], 12),
    "view rows and more": lambda m, h, b: h.view(-1, 4) @ m.w,
    "view -1 inside": lambda m, h, b: h.reshape(h.shape[0], -1, 2),
    "reshape through a transpose": lambda m, h, b: h.transpose(1, 2).reshape(-1, 3),
    "view all": lambda m, h, b: h.reshape(-1),
    "view back and forth": lambda m, h, b: (h.view(-1, 4) @ m.w).view(h.shape[0], 3, 4),
    "view rows inside a dim": lambda m, h, b: h.transpose(0, 2).reshape(2, -1) * 2,
    "flatten": lambda m, h, b: h.flatten(1) + h.flatten(0, 1).view(h.shape[0], -1),
    "unflatten": lambda m, h, b: h.unflatten(-1, (2, 2)).unflatten(1, (3, 1)),
    "squeeze": lambda m, h, b: h[..., :1].squeeze(-1),
    "squeeze all": lambda m, h, b: h[:, :, :1].squeeze() + h[:, :1, :1].squeeze()[..., None],
    "squeeze several": lambda m, h, b: h[:, :1, :1].squeeze((1, -1)),
    "unsqueeze": lambda m, h, b: h.unsqueeze(-1).unsqueeze(-3).unsqueeze(1),
    "transpose": lambda m, h, b: h.transpose(-1, 0).transpose(0, 1).contiguous(),
    "permute": lambda m, h, b: h.permute(2, 0, -2).mT,
    "movedim": lambda m, h, b: h.movedim(0, -1) + h.movedim((0, 1), (2, 0)).transpose(1, 2).movedim(1, 2),
    "t": lambda m, h, b: h[:, 0].t() * m.p[:, None],
    "expand parameters": lambda m, h, b: torch.cat([m.q[None, :1].expand(h.shape[0], -1, -1), h], 1),
    "expand and use": lambda m, h, b: m.q.expand(h.shape[0], 3, 4),
    "expand activations": lambda m, h, b: h[:, None].expand(-1, 2, -1, -1),
    "expand_as": lambda m, h, b: m.p.expand_as(h) * h[:, :, :1].expand_as(h),
    "slice": lambda m, h, b: h[:, 1:, ::2],
    "slice negative": lambda m, h, b: h[..., -3:-1],
    "slice all rows": lambda m, h, b: h[:, 1],
    "select": lambda m, h, b: h.select(-2, -1) + h[:, 0],
    "split": lambda m, h, b: h.split([1, 3], -1),
    "chunk": lambda m, h, b: [c * m.p[:2] for c in h.chunk(2, -1)],
    "unbind": lambda m, h, b: h.unbind(1),
    "cat": lambda m, h, b: torch.cat([h, b["target"], m.q.expand_as(h)], -1),
    "cat along rows": lambda m, h, b: torch.cat([h, h * m.p]),
    "cat three views, uneven": lambda m, h, b: torch.cat([torch.cat([h, h * m.p]), h.sin()]),
    "stack": lambda m, h, b: torch.stack([h, b["target"]], -2),
    "stack in front": lambda m, h, b: torch.stack([h, h.cos()]).flatten(0, 1) @ m.w,
    "views apart again": lambda m, h, b: torch.cat([h, h @ m.w]).chunk(2)[1] * h,
    "one of two views": lambda m, h, b: (
        torch.cat([h, h @ m.w])[: h.shape[0]] + torch.cat([h, h @ m.w])[h.shape[0] :] * 2
    ),
    "repeat": lambda m, h, b: h.repeat(1, 2, 1) + m.p.repeat(1),
    "repeat rows": lambda m, h, b: h.repeat(2, 1, 1),
    "repeat new dims": lambda m, h, b: h.repeat(2, 1, 1, 1),
    "repeat parameters": lambda m, h, b: m.p.repeat(3, 1) + h,
    "repeat_interleave": lambda m, h, b: h.repeat_interleave(2, 1),
    "repeat_interleave rows": lambda m, h, b: h.repeat_interleave(3, 0),
    "tile": lambda m, h, b: h.tile(2, 1, 1) + m.p.tile(1),
    "repeat for each row": lambda m, h, b: [
        h + m.q.repeat(h.shape[0], 1, 1),
        m.q.repeat(h.shape[0], 2).view(h.shape[0], 3, 8),
    ],
    "diff": lambda m, h, b: [
        h.diff(),
        h.diff(2, 1),
        torch.diff(h, prepend=h[..., :1], append=m.q[None, :, :2].expand(h.shape[0], 3, 2)),
        b["ids"].diff(dim=-1),
    ],
    "eye": lambda m, h, b: h @ torch.eye(4) + (h @ m.w) * torch.eye(3, 4) + h * torch.eye(3).sum(0)[:, None],
    "pad": lambda m, h, b: F.pad(h, (1, 2, 0, 1), value=0.3),
    "pad reflect": lambda m, h, b: F.pad(h, (1, 2), mode="reflect") + F.pad(h, (1, 2), mode="replicate"),
    "flip": lambda m, h, b: h.flip(-1, 1),
    "roll": lambda m, h, b: h.roll(1, -1) + h.roll((1, -1), (1, 2)),
    "tril": lambda m, h, b: h.tril() + h.triu(1),
    "one_hot": lambda m, h, b: F.one_hot(b["ids"], 7).to(h.dtype) @ m.table,
    "unfold": lambda m, h, b: h.unfold(-1, 2, 1),
    "diagonal": lambda m, h, b: h.diagonal(0, 1, 2),
    # factories of the batch's size
    "factories": lambda m, h, b: (
        h + torch.zeros(h.shape) + h.new_ones(h.shape[0], 1, 1) + torch.full((h.shape[0], 3, 1), 0.2)
    ),
    "arange of rows": lambda m, h, b: h * rows_of(h)[:, None, None].cos(),
    "positions": lambda m, h, b: h + m.table[torch.arange(3)] + F.embedding(torch.arange(3), m.table),
    "arange with start and step": lambda m, h, b: h * torch.arange(1, 9, 2),
    "linspace": lambda m, h, b: h * torch.linspace(0, 1, 4),
    # lookups
    "embedding": lambda m, h, b: F.embedding(b["ids"], m.table) @ m.w,
    "embedding with padding": lambda m, h, b: F.embedding(b["ids"], m.table, padding_idx=2),
    "embedding with negative padding": lambda m, h, b: F.embedding(b["ids"], m.table, padding_idx=-2),
    "index a table": lambda m, h, b: m.table[b["ids"]],
    "gather": lambda m, h, b: h.gather(-1, b["ids"][:, :3, None] % 4),
    "gather of vocabulary": lambda m, h, b: h.log_softmax(-1).gather(2, b["label"][:, None, None].expand(-1, 3, 1)),
    "take_along_dim": lambda m, h, b: h.take_along_dim(b["ids"][:, :3, None] % 4, -1),
    "scatter": lambda m, h, b: h.scatter(1, b["ids"][:, :3, None].expand(-1, -1, 4) % 1, h * 2),
    "scatter_add": lambda m, h, b: torch.zeros_like(h).scatter_add(2, b["ids"][:, :3, None].expand(-1, -1, 4) % 4, h),
    "scatter value": lambda m, h, b: h.scatter(-1, b["label"][:, None, None].expand(-1, 3, 1), 0.4),
    "index_select": lambda m, h, b: h.index_select(1, torch.tensor([2, 0, 2])),
    "index with a list": lambda m, h, b: h[:, [2, 0]],
    "index last of each row": lambda m, h, b: h[rows_of(h), b["ids"][:, 0] % 3],
    "index rows and columns": lambda m, h, b: h[rows_of(h)[:, None], b["ids"][:, :2] % 3, torch.arange(2)[None]],
    "index whole rows": lambda m, h, b: h[rows_of(h)],
    # contractions
    "linear": lambda m, h, b: F.linear(h, m.w, m.p),
    "linear without bias": lambda m, h, b: F.linear(h, m.w),
    "linear of one dim": lambda m, h, b: F.linear(h, m.p),
    "matmul": lambda m, h, b: h @ m.w,
    "matmul of batches": lambda m, h, b: h @ h.mT,
    "matmul, parameter first": lambda m, h, b: m.q.T @ h,
    "matmul of vectors": lambda m, h, b: h @ m.p + (b["x"] @ m.w)[:, :3],
    "matmul broadcast": lambda m, h, b: h[:, None] @ m.w.expand(2, 4, 4),
    "inner": lambda m, h, b: torch.inner(h, m.w) + torch.inner(m.p, h[:, 1])[:, None, None],
    "inner of vectors and numbers": lambda m, h, b: torch.inner(m.p, m.q[0]) * torch.inner(h, m.p[1]),
    "bmm": lambda m, h, b: torch.bmm(h, m.w.expand(h.shape[0], 4, 4)),
    "addmm": lambda m, h, b: torch.addmm(m.p, h[:, 0], m.w, beta=0.5, alpha=2),
    "baddbmm": lambda m, h, b: torch.baddbmm(h, h @ h.mT, b["target"], beta=0.3),
    "einsum": lambda m, h, b: torch.einsum("bij,jk->bki", h, m.w),
    "einsum of batches": lambda m, h, b: torch.einsum("bij,bkj,j->bik", h, b["target"], m.p),
    "einsum with ellipsis": lambda m, h, b: torch.einsum("...j,jk->...k", h, m.w),
    "einsum without arrow": lambda m, h, b: torch.einsum("bij,jk", h, m.w),
    "lstm": lambda m, h, b: _recurrent(torch.lstm, m, h, b),
    "gru": lambda m, h, b: _recurrent(torch.gru, m, h, b),
    "bilinear": lambda m, h, b: F.bilinear(h[:, 0], b["x"], m.w.expand(2, 4, 4).contiguous()),
    "conv1d": lambda m, h, b: F.conv1d(h, m.kernel, m.table[:6, 0], padding=1),
    "conv1d strided": lambda m, h, b: F.conv1d(h, m.kernel, stride=2, dilation=2, padding="valid"),
    "conv1d same": lambda m, h, b: F.conv1d(h, m.kernel, padding="same"),
    "conv1d groups": lambda m, h, b: F.conv1d(h, m.kernel[:, :1], groups=3),
    "conv1d groups with a bias": lambda m, h, b: F.conv1d(
        h.transpose(1, 2), m.table[:6, :2, None].expand(6, 2, 2), m.table[:6, 0], padding="same", groups=2
    ),
    "conv2d of each channel": lambda m, h, b: F.conv2d(h[..., None], m.kernel[:3, :1, :, None], groups=3, stride=2),
    "conv_transpose1d groups": lambda m, h, b: F.conv_transpose1d(
        h.transpose(1, 2), m.kernel[:4], m.table[:6, 1], 2, 1, 1, 2, 1
    ),
    "conv2d": lambda m, h, b: F.conv2d(h[:, None], m.kernel[:, None, :2], m.table[:6, 1], stride=(1, 2)),
    "conv_transpose1d": lambda m, h, b: F.conv_transpose1d(h, m.kernel[:3].expand(3, 3, 2), stride=2, output_padding=1),
    "conv3d": lambda m, h, b: F.conv3d(h[:, None, None], m.kernel[:2, None, None, :2]),
    "attention": lambda m, h, b: F.scaled_dot_product_attention(*_heads(m, h)),
    "attention causal": lambda m, h, b: F.scaled_dot_product_attention(*_heads(m, h), is_causal=True, scale=0.3),
    "attention mask": lambda m, h, b: F.scaled_dot_product_attention(
        *_heads(m, h), (b["keep"] | rows_of(b["keep"])[:, None].ge(0) & (torch.arange(3) == 0))[:, None, None]
    ),
    "attention bias": lambda m, h, b: F.scaled_dot_product_attention(*_heads(m, h), m.q[:, :3]),
    "attention groups": lambda m, h, b: F.scaled_dot_product_attention(
        h.view(-1, 3, 4, 1).transpose(1, 2),
        *[(h[..., :2] * s).view(-1, 3, 2, 1).transpose(1, 2) for s in (m.p[0], m.p[1])],
        enable_gqa=True,
    ),
    "multi-head attention": lambda m, h, b: F.multi_head_attention_forward(
        h.transpose(0, 1),
        h.transpose(0, 1),
        h.transpose(0, 1),
        4,
        2,
        torch.cat([m.w, m.w * 2, m.w.T]),
        None,
        None,
        None,
        False,
        0.0,
        m.w,
        m.p,
        key_padding_mask=b["keep"] & (torch.arange(3) != 0),
        need_weights=False,
    )[0],
    # reductions within the row
    "sum": lambda m, h, b: h.sum(-1) + h.sum((1, 2), keepdim=True)[..., 0],
    "mean": lambda m, h, b: h.mean(-1, keepdim=True) + h.mean((1, -1), keepdim=True),
    "max": lambda m, h, b: [*h.max(-1), *h.min(1, keepdim=True)],
    "amax": lambda m, h, b: h.amax((1, 2)) + h.amin(-1)[:, 0] + h.argmax(-1)[:, 0],
    "var": lambda m, h, b: [h.var(-1), h.std((1, 2), unbiased=False), h.var(1, keepdim=True), h.var(-1, correction=0)],
    "var with positions": lambda m, h, b: [
        torch.var(h, -1, True),
        torch.var(h, [-1], True, True),
        torch.std(h, [1], False, False),
    ],
    "var_mean": lambda m, h, b: torch.var_mean(h, -1, keepdim=True),
    "prod": lambda m, h, b: h.prod(-1) + h.prod(1, keepdim=True)[:, 0, :3],
    "logsumexp": lambda m, h, b: h.logsumexp(-1) + h.logsumexp((1, 2))[:, None],
    "norm": lambda m, h, b: (
        h.norm(dim=-1)
        + torch.linalg.vector_norm(h, 3, (1, 2))[:, None]
        + F.normalize(h, dim=-1).sum(-1)
        + torch.linalg.norm(h, dim=1).sum(-1, keepdim=True)
        + torch.linalg.matrix_norm(h)[:, None]
        + torch.linalg.norm(h, "nuc", (1, 2))[:, None]
    ),
    "any and all": lambda m, h, b: h * b["keep"].any(-1)[:, None, None] + b["keep"].all(1, keepdim=True)[..., None],
    "median": lambda m, h, b: [h.median(-1).values, h.kthvalue(2, -1).values],
    "softmax": lambda m, h, b: h.softmax(-1) + h.log_softmax(1) + F.softmin(h, 2),
    "cumsum": lambda m, h, b: h.cumsum(-1) + h.cumprod(1) + h.logcumsumexp(-1) + h.cummax(-1).values,
    "sort": lambda m, h, b: [*h.sort(-1, descending=True), h.argsort(1), *h.sort(stable=True, dim=1)],
    "topk": lambda m, h, b: h.topk(2, -1),
    "searchsorted": lambda m, h, b: [
        torch.searchsorted(m.average, h.contiguous()),
        torch.searchsorted(h.sort(-1).values, b["target"].contiguous(), right=True),
        torch.searchsorted(torch.linspace(-1, 1, 5, dtype=h.dtype), h[:, 0, 0].contiguous()),
    ],
    "cosine_similarity": lambda m, h, b: F.cosine_similarity(h, b["target"], -1),
    "pairwise_distance": lambda m, h, b: F.pairwise_distance(h, b["target"]),
    "cdist": lambda m, h, b: torch.cdist(h, b["target"]),
    # norms and pooling
    "layer_norm": lambda m, h, b: F.layer_norm(h, (4,), m.p, m.w[0]) + F.layer_norm(h, (3, 4), m.q),
    "rms_norm": lambda m, h, b: F.rms_norm(h, (4,), m.p) + F.rms_norm(h, (3, 4)),
    "group_norm": lambda m, h, b: (
        F.group_norm(h.transpose(1, 2), 2, m.p, m.w[0]) + F.group_norm(h.transpose(1, 2), 4) * m.w[1][:, None]
    ),
    "instance_norm": lambda m, h, b: F.instance_norm(h, weight=m.q[:, 0]),
    "local_response_norm": lambda m, h, b: F.local_response_norm(h, 2),
    "batch_norm with fixed statistics": lambda m, h, b: F.batch_norm(h[:, 0], m.average, m.average + 1, m.p, m.w[0]),
    "pooling": lambda m, h, b: [
        F.max_pool1d(h, 2),
        F.avg_pool1d(h, 3, 1, 1),
        F.adaptive_avg_pool1d(h, 2),
        F.max_pool2d(h[:, None], 2, 1),
        F.avg_pool2d(h[:, None], (1, 2)),
        F.adaptive_avg_pool2d(h[:, None], 1),
        F.adaptive_max_pool2d(h[:, None], (1, 2)),
        F.lp_pool1d(h, 2, 2),
    ],  # fmt: skip
    "max_pool with indices": lambda m, h, b: F.max_pool2d(h[:, None], 2, 1, return_indices=True),
    "interpolate": lambda m, h, b: [
        F.interpolate(h, scale_factor=2),
        F.interpolate(h[:, None], (5, 6), mode="bilinear"),
        F.interpolate(h[:, None], scale_factor=2.0, mode="bicubic", align_corners=True),
        F.interpolate(h, 7, mode="linear"),
    ],  # fmt: skip
    "pooling by channels": lambda m, h, b: [
        F.max_pool2d(h[..., None].expand(-1, -1, -1, 2), 2),
        F.adaptive_avg_pool2d(h[..., None], 1),
        F.interpolate(h[..., None], scale_factor=2),
    ],
    "pixel_shuffle": lambda m, h, b: (
        F.pixel_shuffle(h.view(h.shape[0], 4, 3, 1), 2)
        + F.pixel_unshuffle(h.view(h.shape[0], 1, 6, 2), 2).view(-1, 1, 6, 2)
    ),
    "image patches": lambda m, h, b: [F.unfold(h[:, None], (2, 2)), F.unfold(h[..., None], (2, 1), padding=(1, 0))],
    "fold": lambda m, h, b: [F.fold(h.view(-1, 4, 3), (2, 4), (2, 2)), F.fold(h.mT, (2, 3), (2, 1))],
    "of rows as channels": lambda m, h, b: [
        F.max_pool1d(h.flatten(1), 2),
        F.max_pool2d(h, 2),
        F.adaptive_max_pool2d(h, (2, 3)),
        F.adaptive_avg_pool2d(h, 2),
        F.avg_pool2d(h, 2),
        F.pad(h, (1, 1, 1, 1), mode="replicate"),
        F.pad(h, (1, 0, 0, 1), mode="reflect"),
        F.pad(h.flatten(1), (2, 1), mode="circular"),
        F.max_pool2d(h, 2, return_indices=True)[0],
        F.pad(h.flatten(1)[None], (2, 1), mode="reflect"),
    ],  # fmt: skip
    "channel_shuffle": lambda m, h, b: F.channel_shuffle(h.view(-1, 4, 3, 1), 2),
}


def _recurrent(op: Any, m: Any, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    gates = 4 if op is torch.lstm else 3
    weights = [torch.cat([m.w * (i + 1)] * gates) for i in range(2)]
    biases = [torch.cat([m.p * i] * gates) for i in range(2)]
    start = torch.zeros(1, h.shape[0], 4)
    y, *_ = op(h, (start, start) if gates == 4 else start, [*weights, *biases], True, 1, 0.0, True, False, True)
    z, *_ = op(
        h.transpose(0, 1),
        (start, start + 1) if gates == 4 else start,
        [*weights, *biases],
        True,
        1,
        0.0,
        True,
        False,
        False,
    )
    return y + z.transpose(0, 1)


def _heads(m: Any, h: Tensor) -> list[Tensor]:
    return [(h @ w).view(-1, 3, 2, 2).transpose(1, 2) for w in (m.w, m.w.T, m.w * m.p)]


MIXING: dict[str, Op] = {  # rows meet: communication, the same numbers
    "conv1d groups of one sample": lambda m, h, b: F.conv1d(h.sum(0), m.kernel[:3, :1], groups=3) * h.sum(),
    "sum over rows": lambda m, h, b: h.sum(0).sum() * 0.01,
    "sum of everything": lambda m, h, b: h.sum() * 0.01 * 2 / 3 + h.mean() - h.sum(0).mean(),
    "mean over rows": lambda m, h, b: h * 1.1 - h.mean(0),
    "mean over rows, kept": lambda m, h, b: h - h.mean((0, -1), keepdim=True) * m.p,
    "mean used twice": lambda m, h, b: h.mean(0) * h.mean(0) + h.mean(0).exp() * m.q,
    "sum over rows, used": lambda m, h, b: h * h.sum(0).tanh(),
    "sum over rows, kept": lambda m, h, b: h / (1 + h.sum(0, keepdim=True).square()),
    "var over rows": lambda m, h, b: h / (1 + h.var(0)),
    "std of everything": lambda m, h, b: h / h.std(),
    "var over rows by hand": lambda m, h, b: (h * 1.1 - h.mean(0)) / ((h - h.mean(0)).square().mean(0) + 1).sqrt(),
    "max over rows": lambda m, h, b: [*h.max(0), h.max(), h.amin((0, 1)), h.argmax(0).sum()],
    "softmax over rows": lambda m, h, b: h.softmax(0),
    "softmax over the transposed": lambda m, h, b: h.transpose(0, 2).softmax(-1) * m.p[:, None, None],
    "sort over rows": lambda m, h, b: h.sort(0).values + h.topk(h.shape[0], 0).values,
    "cumsum over rows": lambda m, h, b: h.cumsum(0) + h.flip(0),
    "roll over rows": lambda m, h, b: h.roll(1, 0) + h.roll(1),
    "pad rows": lambda m, h, b: F.pad(h, (0, 0, 0, 0, 1, 2)),
    "first row": lambda m, h, b: h - h[0] + h[-1:],
    "some rows": lambda m, h, b: h[1:] if h.shape[0] > 1 else h,
    "similarities": lambda m, h, b: h[:, 0] @ h[:, 1].T,
    "similarities of labels": lambda m, h, b: (b["label"][:, None] == b["label"][None]) * (h[:, 0] @ h[:, 1].T),
    "inner of rows": lambda m, h, b: torch.inner(h[:, 0], h[:, 1:]) + torch.inner(h[:, 0, 0], h[:, 1, 1]),
    "gram matrix": lambda m, h, b: h[:, 0].T @ h[:, 1] @ m.w,
    "covariance of parameters": lambda m, h, b: (h.flatten(1).T @ h.flatten(1)) * 0.1,
    "einsum over rows": lambda m, h, b: torch.einsum("bi,ci,cj->bj", h[:, 0], h[:, 1], h[:, 2]),
    "einsum that sums an ellipsis": lambda m, h, b: torch.einsum("...ij,jk->ik", h[:, None].expand(-1, 2, 3, 4), m.w),
    "distances": lambda m, h, b: torch.cdist(h[:, 0], h[:, 1]),
    "attention over rows": lambda m, h, b: F.scaled_dot_product_attention(
        h.transpose(0, 1) @ m.w, h.transpose(0, 1), h.transpose(0, 1)
    ),
    "in-batch negatives": lambda m, h, b: F.cross_entropy(
        F.normalize(h[:, 0], dim=-1) @ F.normalize(h[:, 1], dim=-1).T / 0.3, rows_of(h)
    ),
    "negatives both ways": lambda m, h, b: _clip(h[:, 0], h[:, 1] @ m.w),
    "two views": lambda m, h, b: _two_views(torch.cat([h[:, 0], h[:, 1] @ m.w])),
    "index by another row": lambda m, h, b: h[(rows_of(h) + 1) % h.shape[0]] * m.p,
    "index with data": lambda m, h, b: h[b["label"] % h.shape[0]],
    "index_add": lambda m, h, b: torch.zeros(4, 3, 4).index_add(0, b["label"], h) + m.p,
    "index_add to parameters": lambda m, h, b: [
        m.w.index_add(0, b["label"], h[:, 0], alpha=0.5),
        h.index_add(-1, torch.tensor([2, 0, 2]), h[..., :3]),
    ],
    "scatter_add to parameters": lambda m, h, b: m.w.scatter_add(0, b["label"][:, None].expand(-1, 4), h[:, 0]),
    "counts by class": lambda m, h, b: F.one_hot(b["label"], 4).to(h.dtype).T @ h[:, 0],
    "scatter over rows": lambda m, h, b: torch.zeros(4, 4).scatter_add(0, b["label"][:, None].expand(-1, 4), h[:, 0]),
    "index_put": lambda m, h, b: torch.zeros(4, 4).index_put((b["label"],), h[:, 0], accumulate=True),
    "index_put that adds": lambda m, h, b: [
        m.w.index_put((b["label"],), h[:, 0], accumulate=True),
        m.w.index_put((b["label"], b["ids"][:, 0] % 4), h[:, 0, 0], accumulate=True),
        h.index_put((rows_of(h), b["label"] % 3), b["x"], accumulate=True),
    ],
    "batch_norm without running statistics": lambda m, h, b: F.batch_norm(h, None, None, m.q[:, 0], m.q[:, 1], True),
    "batch_norm with running statistics": lambda m, h, b: F.batch_norm(
        h.transpose(1, 2), m.average, torch.ones(4), m.p, m.w[0], True
    ),
    "balance": lambda m, h, b: (
        (h[:, 0].softmax(-1).mean(0) * F.one_hot(h[:, 0].argmax(-1), 4).to(h.dtype).mean(0)).sum() * 4
    ),
    "chosen by a mask": lambda m, h, b: [
        h[b["keep"]] @ m.w,
        h[b["label"] > 1].sum(0),
        h.masked_select(b["keep"][..., None]).mean(),
    ],
    "targets by another mask": lambda m, h, b: F.cross_entropy(
        h[b["keep"]] @ m.w, b["ids"][:, :3][b["keep"].flip(0)] % 4
    ),
    "some targets": lambda m, h, b: F.cross_entropy(h[b["keep"]] @ m.w, b["ids"][:, :3][b["keep"]] % 4),
    "positions of true": lambda m, h, b: h[b["keep"].nonzero()[:, 0]].sum(1),
    "where it is true": lambda m, h, b: _experts(m, h.flatten(0, 1), torch.where(b["keep"])),
    "a number from the data": lambda m, h, b: h.sum() / b["keep"].sum().item() + h * b["target"].max().item(),
    "norm of everything": lambda m, h, b: h / h.norm(),
    "any row": lambda m, h, b: h * b["keep"].any() + b["keep"].all(0)[:, None],
    "masked mean": lambda m, h, b: (h * b["keep"][..., None]).sum() / b["keep"].sum().clamp(min=1) / 4,
    "sum of integers": lambda m, h, b: h * b["ids"].sum() * 0.01 + b["ids"].sum(0)[:4] * 0.01,
    "kl to the mean": lambda m, h, b: F.kl_div(
        h.log_softmax(-1), h.softmax(-1).mean(0).expand_as(h), reduction="batchmean"
    ),
    "replicated then sharded": lambda m, h, b: h * (h.mean(0) @ m.w).softmax(-1),
    "reciprocal of a sum": lambda m, h, b: m.p / (1 + h.sum((0, 1)).square()),
    "two axes of rows": lambda m, h, b: (h[:, None, 0] - h[None, :, 1]).square().sum(-1),
    "flattened rows in another dim": lambda m, h, b: h.transpose(0, 1).reshape(-1, 4).softmax(0),
}


def _experts(m: Any, h: Tensor, chosen: tuple[Tensor, ...]) -> Tensor:
    """Tokens that are chosen, through a weight and added back, as in a mixture of experts' loop."""
    row, column = chosen
    return torch.zeros_like(h).index_add_(
        0, row * 3 + column, (h[None, row * 3 + column].reshape(-1, 4) @ m.w) * m.p[column, None]
    )


def _two_views(z: Tensor) -> Tensor:
    """SimCLR's loss: each row's other view among all rows of both."""
    z = F.normalize(z, dim=-1)
    n = z.shape[0]
    similar = (z @ z.T / 0.5).masked_fill(torch.eye(n, dtype=torch.bool), -1e9)
    return F.cross_entropy(similar, (torch.arange(n) + n // 2) % n)


def _clip(a: Tensor, b: Tensor) -> Tensor:
    scores = a @ b.T
    labels = torch.arange(scores.shape[0])
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


PARAMETERS: dict[str, Op] = {  # parameters alone, and with the batch
    "weight penalty": lambda m, h, b: h.mean() + 0.1 * m.w.pow(2).sum() + m.before.weight.norm(),
    "penalty of a used weight": lambda m, h, b: [(h @ m.w).sum() * 0.1, (m.w @ m.w.T - torch.eye(4)).square().sum()],
    "penalty of parameter statistics": lambda m, h, b: [
        h,
        m.w.var(),
        m.w.softmax(0),
        m.w.max(),
        F.layer_norm(m.w, (4,), m.p),
        m.w.sort(0).values,
    ],
    "weight norm of torch": lambda m, h, b: [
        F.conv1d(h, torch._weight_norm(m.kernel, m.q[:2, :1].T.view(1, 1, 2), 2)),
        F.linear(h, torch._weight_norm(m.w, m.p[:, None], 0)),
    ],
    "weight norm": lambda m, h, b: h @ (m.w / m.w.norm(dim=0, keepdim=True) * m.p),
    "generated weight": lambda m, h, b: h @ F.linear(F.gelu(m.w), m.w, m.p).softmax(-1),
    "parameter meets a replicated value": lambda m, h, b: (h.mean(0) @ m.w).exp().sum() * m.p + m.p * h,
    "penalty times a replicated value": lambda m, h, b: m.w.square().sum() * h.mean().exp(),
    "parameter of the batch's size": lambda m, h, b: h.sum() * 0.1 + m.table[: h.shape[0], 0].sum(),
    "straight through": lambda m, h, b: h + (torch.round(h) - h).detach() * m.p,
    "detached": lambda m, h, b: (h @ m.w).detach() * m.p + m.q.detach() * h,
    "no_grad": lambda m, h, b: h * _frozen(m, h),
    "unused": lambda m, h, b: h * 1.0,
    "stop and go": lambda m, h, b: h.detach() @ m.w,
    "parameter as attention mask": lambda m, h, b: (h @ m.w) * (m.p > 0),
    "zero gradient": lambda m, h, b: h + 0 * m.p,
}


def _frozen(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        return (h @ m.w).sigmoid()


def _labels(b: dict[str, Tensor]) -> Tensor:
    return torch.where(b["ids"][:, :3] > 3, -100, b["ids"][:, :3] % 4)


LOSSES: dict[str, Op] = {
    "mse": lambda m, h, b: F.mse_loss(h, b["target"]),
    "mse sum": lambda m, h, b: F.mse_loss(h, b["target"], reduction="sum") * 0.1,
    "mse none": lambda m, h, b: F.mse_loss(h, b["target"], reduction="none"),
    "mse broadcast": lambda m, h, b: F.mse_loss(h, m.q.expand_as(h)),
    "l1": lambda m, h, b: F.l1_loss(h, b["target"]) + F.l1_loss(h, b["target"], reduction="none").mean((1, 2)),
    "smooth_l1": lambda m, h, b: F.smooth_l1_loss(h, b["target"], beta=0.4),
    "huber": lambda m, h, b: (
        F.huber_loss(h, b["target"], delta=0.3) + F.huber_loss(h, b["target"], reduction="sum") * 0.01
    ),
    "bce": lambda m, h, b: F.binary_cross_entropy(h.sigmoid(), b["target"], weight=m.q.detach().abs()),
    "bce with logits": lambda m, h, b: F.binary_cross_entropy_with_logits(h, b["target"]),
    "bce with pos_weight": lambda m, h, b: F.binary_cross_entropy_with_logits(
        h, b["target"], weight=b["keep"][..., None].to(h.dtype), pos_weight=torch.linspace(1, 2, 4)
    ),
    "bce with logits, none": lambda m, h, b: F.binary_cross_entropy_with_logits(h, b["target"], reduction="none"),
    "kl_div": lambda m, h, b: F.kl_div(h.log_softmax(-1), b["target"].softmax(-1), reduction="batchmean"),
    "kl_div log target": lambda m, h, b: F.kl_div(
        h.log_softmax(-1), b["target"].log_softmax(-1), reduction="mean", log_target=True
    ),
    "poisson": lambda m, h, b: F.poisson_nll_loss(h, b["target"]),
    "soft margin": lambda m, h, b: F.soft_margin_loss(h, b["target"].sign()),
    "nll": lambda m, h, b: F.nll_loss(h[:, 0].log_softmax(-1), b["label"]),
    "nll of several dims": lambda m, h, b: F.nll_loss(h.transpose(1, 2).log_softmax(1), _labels(b)),
    "nll weighted": lambda m, h, b: F.nll_loss(
        h.transpose(1, 2).log_softmax(1), _labels(b), weight=torch.linspace(1, 2, 4)
    ),
    "nll none": lambda m, h, b: F.nll_loss(h[:, 0].log_softmax(-1), b["label"], reduction="none"),
    "cross entropy": lambda m, h, b: F.cross_entropy(h[:, 0], b["label"]),
    "cross entropy of tokens": lambda m, h, b: F.cross_entropy(h.reshape(-1, 4), _labels(b).reshape(-1)),
    "cross entropy of dims": lambda m, h, b: F.cross_entropy(h.transpose(1, 2), _labels(b), label_smoothing=0.2),
    "cross entropy ignoring a class": lambda m, h, b: F.cross_entropy(h[:, 0], b["label"], ignore_index=1),
    "cross entropy weighted": lambda m, h, b: F.cross_entropy(
        h.reshape(-1, 4), _labels(b).reshape(-1), weight=torch.linspace(0.5, 2, 4)
    ),
    "cross entropy weighted, smooth": lambda m, h, b: F.cross_entropy(
        h.transpose(1, 2), _labels(b), weight=torch.linspace(0.5, 2, 4), label_smoothing=0.1
    ),
    "cross entropy sum": lambda m, h, b: F.cross_entropy(h.transpose(1, 2), _labels(b), reduction="sum") * 0.1,
    "cross entropy none": lambda m, h, b: F.cross_entropy(
        h.transpose(1, 2), _labels(b), reduction="none", label_smoothing=0.1
    ),
    "cross entropy with probabilities": lambda m, h, b: F.cross_entropy(
        h.transpose(1, 2), b["target"].transpose(1, 2).softmax(1)
    ),
    "cross entropy with probabilities, weighted": lambda m, h, b: F.cross_entropy(
        h[:, 0], b["target"][:, 0].softmax(-1), weight=torch.linspace(0.5, 2, 4), label_smoothing=0.1
    ),
    "cross entropy, labels from logits": lambda m, h, b: F.cross_entropy(h[:, 0], h[:, 1].argmax(-1)),
    "cross entropy against parameters": lambda m, h, b: F.cross_entropy(m.w, torch.arange(4)) + h.mean(),
    "cross entropy of a replicated value": lambda m, h, b: F.cross_entropy(h.mean(0), torch.arange(3)) + h.mean(),
    "cosine embedding": lambda m, h, b: F.cosine_embedding_loss(h[:, 0], h[:, 1], b["label"].sign() * 2 - 1),
    "triplet": lambda m, h, b: F.triplet_margin_loss(h[:, 0], h[:, 1], h[:, 2]),
    "cosine embedding of one row": lambda m, h, b: F.cosine_embedding_loss(h[:, 0], m.q[:1], b["label"].sign() * 2 - 1),
    "cosine embedding, one row first": lambda m, h, b: F.cosine_embedding_loss(
        m.q[:1], h[:, 0], b["label"].sign() * 2 - 1
    ),
    "cosine embedding of one number": lambda m, h, b: F.cosine_embedding_loss(
        h[:, 0], h[:, 1], torch.ones(1), reduction="none"
    ),
    "cosine embedding, targets alone have rows": lambda m, h, b: (
        F.cosine_embedding_loss(m.q[:1], m.w[:1], b["label"].sign() * 2 - 1) + h.mean()
    ),
    "triplet of one negative": lambda m, h, b: F.triplet_margin_loss(h[:, 0], h[:, 1], m.q[:1]),
    "triplet of one anchor": lambda m, h, b: F.triplet_margin_loss(m.q[:1], h[:, 1], h[:, 0], reduction="sum"),
    "margin ranking": lambda m, h, b: F.margin_ranking_loss(h[:, 0], h[:, 1], b["x"].sign()),
    "hinge embedding": lambda m, h, b: F.hinge_embedding_loss(h, b["target"].sign() * 2 - 1),
    "multi margin": lambda m, h, b: F.multi_margin_loss(h[:, 0], b["label"]),
    "multi margin sum": lambda m, h, b: (
        F.multi_margin_loss(h[:, 0], b["label"], weight=torch.linspace(1, 2, 4), reduction="sum") * 0.1
    ),
    "multilabel margin": lambda m, h, b: F.multilabel_margin_loss(
        h[:, 0], torch.stack([b["label"], -torch.ones_like(b["label"])], 1).repeat(1, 2)
    ),
    "multilabel": lambda m, h, b: F.multilabel_soft_margin_loss(h[:, 0], b["target"][:, 0]),
}


def _first(h: Tensor) -> Tensor:
    return h.mean(0, keepdim=True)


RANDOM: dict[str, Op] = {  # the same numbers as one device draws, whatever the layout
    "dropout": lambda m, h, b: F.dropout(h, 0.3) + F.dropout(h.detach(), 0.6),
    "a single number": lambda m, h, b: h * torch.rand(()) + torch.randn(1),
    "dropout of nothing and everything": lambda m, h, b: F.dropout(h, 0.0) + F.dropout(h, 1.0) + F.dropout(h, 0.5),
    "dropout outside training": lambda m, h, b: F.dropout(h, 0.5, training=False) + F.dropout(h, 0.5),
    "dropout in place": lambda m, h, b: (
        F.dropout(h * 1, 0.4, inplace=True) + F.alpha_dropout(h * 2, 0.5, True, inplace=True)
    ),
    "dropout of flat rows": lambda m, h, b: F.dropout(h.reshape(-1, 4), 0.5) @ m.w,
    "dropout of transposed rows": lambda m, h, b: F.dropout(h.transpose(0, 1), 0.5) * m.q[:, None],
    "dropout of two views": lambda m, h, b: F.dropout(torch.cat([h, h @ m.w]), 0.5),
    "dropout of parameters": lambda m, h, b: h @ F.dropout(m.w, 0.5),
    "dropout of a mean": lambda m, h, b: h * F.dropout(_first(h), 0.5) + h.mean(0) * m.q,
    "dropout of a sum": lambda m, h, b: F.dropout(h.sum(0), 0.5).tanh(),
    "channel dropout": lambda m, h, b: (
        F.dropout2d(h[..., None], 0.5)
        + F.dropout1d(h, 0.5)[..., None]
        + F.dropout3d(h[:, :, :, None, None], 0.5)[..., 0]
    ),
    "alpha dropout": lambda m, h, b: (
        F.alpha_dropout(h, 0.3, True) + F.feature_alpha_dropout(h, 0.3, True) + F.alpha_dropout(h, 0.3)
    ),
    "attention dropout": lambda m, h, b: F.scaled_dot_product_attention(*_heads(m, h), dropout_p=0.4),
    "attention dropout, causal": lambda m, h, b: F.scaled_dot_product_attention(
        *_heads(m, h), dropout_p=0.4, is_causal=True, scale=0.5
    ),
    "attention dropout, mask": lambda m, h, b: F.scaled_dot_product_attention(
        *_heads(m, h), (b["keep"] | (torch.arange(3) == 0))[:, None, None], 0.4
    ),
    "attention dropout, bias": lambda m, h, b: F.scaled_dot_product_attention(*_heads(m, h), m.q[:, :3], 0.4),
    "attention dropout, groups": lambda m, h, b: F.scaled_dot_product_attention(
        h.view(-1, 3, 4, 1).transpose(1, 2),
        *[(h[..., :2] * s).view(-1, 3, 2, 1).transpose(1, 2) for s in (m.p[0], m.p[1])],
        dropout_p=0.3,
        enable_gqa=True,
    ),
    "multi-head attention": lambda m, h, b: F.multi_head_attention_forward(
        h.transpose(0, 1),
        h.transpose(0, 1),
        h.transpose(0, 1),
        4,
        2,
        torch.cat([m.w, m.w * 2, m.w.T]),
        None,
        None,
        None,
        False,
        0.3,
        m.w,
        m.p,
        training=True,
        need_weights=False,
    )[0],
    "noise": lambda m, h, b: h + torch.randn_like(h) * m.p + torch.rand_like(h),
    "noise of the batch's size": lambda m, h, b: (
        h + torch.randn(h.shape) + torch.rand(h.shape[0], 1, 4) + torch.randn(h.shape[0] * 3, 4).view(-1, 3, 4)
    ),
    "noise of flat samples": lambda m, h, b: (
        F.dropout(h.flatten(0, 1), 0.3).view_as(h) + h * torch.rand_like(h.flatten(0, 1)).view_as(h)
    ),
    "integers like": lambda m, h, b: h * torch.randint_like(h, 2, 5) + m.table[torch.randint_like(b["ids"], 7)[:, :3]],
    "noise without rows": lambda m, h, b: h * torch.rand(3, 4) + torch.randint(0, 5, (4,)),
    "random integers": lambda m, h, b: (
        h * torch.randint(2, 5, (h.shape[0], 3, 1)) + m.table[torch.randint(7, (h.shape[0], 3))]
    ),
    "bernoulli": lambda m, h, b: (
        h * torch.bernoulli(h.sigmoid().detach()) + h * torch.bernoulli(torch.full_like(h, 0.2))
    ),
    "in place": lambda m, h, b: (
        h * torch.empty_like(h).uniform_(1, 2)
        + torch.zeros(h.shape).normal_(0.5, 0.1)
        + torch.empty(h.shape).bernoulli_(0.3)
        + torch.empty(h.shape).exponential_(0.5)
    ),
    "gumbel": lambda m, h, b: h * F.gumbel_softmax(h, 0.5),
    "choices by weights": lambda m, h, b: (
        h.gather(1, h.mean(2).softmax(1).multinomial(2)[:, :, None].expand(-1, -1, 4)).sum(1, keepdim=True)
        + h.gather(2, h.flatten(0, 1).exp().multinomial(5, replacement=True).view(-1, 3, 5)[..., :1])
    ),
    "choices without rows": lambda m, h, b: h * torch.randperm(4) + torch.multinomial(torch.arange(1.0, 6), 4) * m.w[0],
    "keep by rows": lambda m, h, b: h * (torch.rand(h.shape[0], 1, 1) > 0.4) / 0.6,
    "reparameterised": lambda m, h, b: h[:, 0] + (h[:, 1] * 0.5).exp() * torch.randn_like(h[:, 1]),
    "masked tokens": lambda m, h, b: F.embedding(torch.where(torch.rand(b["ids"].shape) < 0.3, 1, b["ids"]), m.table),
}
