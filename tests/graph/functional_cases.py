"""Forwards that write in place: to activations, views, buffers, with and without autograd looking.

Each takes ``m`` (the model), ``h`` (an activation, (rows, 3, 4), that depends on a parameter) and ``x`` (a batch field,
(rows, 4)).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Forward = Callable[[Any, Tensor, Tensor], Tensor]


class Machine(nn.Module):
    """Two blocks around a forward that writes."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = forward
        self.blocks = nn.ModuleList([nn.Linear(4, 12), nn.Linear(12, 12), nn.Linear(4, 3)])
        self.w = nn.Parameter(torch.randn(4, 4))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.norm = nn.BatchNorm1d(3, momentum=0.2)
        self.register_buffer("state", torch.linspace(-1, 1, 4))
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("memory", torch.randn(5, 4))
        self.register_buffer("passing", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[1](torch.tanh(self.blocks[0](x))).view(-1, 3, 4)
        y = self.body(self, h, x)
        return self.blocks[2](y.reshape(-1, 4)).square().mean() + y.mean()


CASES: dict[str, Forward] = {}


def case(function: Forward) -> Forward:
    CASES[function.__name__] = function
    return function


@case
def add_(m: Any, h: Tensor, x: Tensor) -> Tensor:
    h += 1
    h.mul_(x[:, None]).sub_(m.w[0])
    return h


@case
def activations_(m: Any, h: Tensor, x: Tensor) -> Tensor:
    h = F.relu(h * 1, inplace=True)
    h = F.leaky_relu_(h - 0.1) * 2
    return (F.silu(h, inplace=True) + 1).clamp_(-1, 1)


@case
def select_(m: Any, h: Tensor, x: Tensor) -> Tensor:
    h = h.clone()
    h[:, 0] = 0
    h[:, 1] = x @ m.w
    h[..., 2] += 1
    return h


@case
def slice_(m: Any, h: Tensor, x: Tensor) -> Tensor:
    h = h * 1
    h[:, 1:, ::2] = h[:, :2, ::2] * 2
    h[:, :, -1:].mul_(m.w[0, 0])
    return h


@case
def rows_(m: Any, h: Tensor, x: Tensor) -> Tensor:
    h = h.clone()
    h[0] = h[-1] * 2
    h[-1:] += 1
    return h


@case
def view_(m: Any, h: Tensor, x: Tensor) -> Tensor:
    h = h.clone()
    flat = h.view(h.shape[0], 12)
    flat[:, 3] = 1
    h.transpose(1, 2)[:, 0].mul_(2)
    h.permute(2, 0, 1)[1] -= 1
    h.unsqueeze(1)[:, 0, 0] += x
    return h + flat.view_as(h)


@case
def views_of_many_kinds(m: Any, h: Tensor, x: Tensor) -> Tensor:
    h = h * 1
    for view in (h.movedim(0, 2), h.mT, h.swapaxes(0, 1), h.adjoint(), h.ravel(), h.reshape_as(h.flatten(1))):
        view.mul_(1.1)
        view[-1] += m.w[0, 0]
    return h


@case
def nested_views(m: Any, h: Tensor, x: Tensor) -> Tensor:
    h = h.clone()
    v = h[:, 1:]
    w = v.transpose(1, 2)[:, :2]
    before = v.sum()
    w += 1
    w[:, 0].mul_(m.w[1, 1])
    return h * v.sum() * 0.01 + before * w.mean()


@case
def unbind_(m: Any, h: Tensor, x: Tensor) -> Tensor:
    y = torch.stack([x, x.cos(), x * 2], 1)
    a, b, c = y.unbind(1)
    b *= 2
    c.copy_(a)
    left, right = y.split([1, 3], -1)
    left.zero_()
    right += 0.5
    first, _ = y.chunk(2, 2)
    first.sub_(1)
    return h * y + b[:, None]


@case
def read_after_write(m: Any, h: Tensor, x: Tensor) -> Tensor:
    h = h.clone()
    v = h[:, 0]
    before = v * 1
    h.mul_(3)
    return h * v[:, None] + before[:, None]


@case
def diagonal_(m: Any, h: Tensor, x: Tensor) -> Tensor:
    square = h[:, :, :3].clone()
    square.diagonal(0, 1, 2).fill_(0.5)
    square.diagonal(0, 1, 2).add_(m.w[0, 0])
    return F.pad(square, (0, 1))


@case
def masked_(m: Any, h: Tensor, x: Tensor) -> Tensor:
    h = h.clone().masked_fill_(x[:, None] > 0.5, 0.1)
    h[x[:, :3] > 0] = 0.3
    h[h < -1] = -1
    return h


@case
def indexed_(m: Any, h: Tensor, x: Tensor) -> Tensor:
    rows, columns = torch.arange(h.shape[0]), (x[:, 0] > 0).long()
    h = h.clone()
    h[rows, columns] = x
    h[:, [0, 2]] += 1
    table = torch.zeros(h.shape[0], 5)
    table[rows, columns + 1] = h[:, 0, 0]
    table.scatter_(1, columns[:, None], 2.0)
    return h * table.sum(-1)[:, None, None]


@case
def fill_(m: Any, h: Tensor, x: Tensor) -> Tensor:
    room = torch.empty(h.shape[0], 3, 4).fill_(0.5)
    room[:, 0].fill_(m.w[0, 0])
    room[:, 1:2].zero_()
    room[:, 2].copy_(x)
    return h * room


@case
def narrow_(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """An in-place op keeps the dtype: this one overflows."""
    counts = torch.zeros(3, 4, dtype=torch.int32)
    counts += torch.full((4,), 2**31 + 7)
    flags = x > 0
    flags |= x < -1
    flags[:, 0] = True
    return h * (counts == 7 - 2**31) * flags[:, None]


@case
def through_detach(m: Any, h: Tensor, x: Tensor) -> Tensor:
    free = x * 2
    free.detach().mul_(3)
    other = free.detach()
    other.copy_(x @ m.w)
    return h * free[:, None] + other[:, None]


@case
def no_grad_block(m: Any, h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.abs().mean(-1, keepdim=True)
        scale += 1
        half = scale[:, 1:]
    half.mul_(2)
    return h / scale + m.w.detach() @ m.w[0]


@case
def no_grad_inside_out(m: Any, h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        a = h * 2
        with torch.enable_grad():
            b = h * a
        c = b * 2
    return b + c * m.w[0]


@case
def shape_in_place(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """What was taken before the shape changed stays; what is written after is seen in it."""
    w = m.w * 1
    first, column = w[0], w[:, 1]
    w.t_()
    h = h + first
    w[0].mul_(2)
    h = h @ w + first + column
    v = h[:, 0]
    h.unsqueeze_(1)
    h.transpose_(2, 3).mul_(0.5)
    h.swapaxes_(2, 3).squeeze_(1)
    return h + v[:, None]


@case
def shape_in_place_without_autograd(m: Any, h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.w * 1
        row = y[1:3]
        y.add_(1).t_()
    y.unsqueeze_(0)
    y += 1
    return (h @ y) * row.sum() + row[0]


@case
def detach_after_a_view(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """Views from before have their gradient; the tensor itself has none any more."""
    y, free = h * 1, h * 2
    v = y[:, 0]
    y.detach_()
    free.detach_().mul_(3)
    return h * v[:, None] + y * m.w[0] + free


@case
def returned_from_no_grad(m: Any, h: Tensor, x: Tensor) -> Tensor:
    y = x * 1
    with torch.no_grad():
        v = y[:, :2]
        v += 1
    y *= 2
    return h * y[:, None] + v.sum(-1)[:, None, None]


def cast(h: Tensor) -> Tensor:
    return h.to(h.dtype)


def copied(h: Tensor) -> Tensor:
    return h.to(h.dtype, copy=True)


def in_order(h: Tensor) -> Tensor:
    return h.contiguous()


def of_three_dims(h: Tensor) -> Tensor:
    return torch.atleast_3d(h)


def flat(h: Tensor) -> Tensor:
    return h.flatten(1, 1).positive().resolve_conj()


def broadcast(h: Tensor) -> Tensor:
    return torch.broadcast_tensors(h, h)[1].sum_to_size(h.shape)


def idle(h: Tensor) -> Tensor:
    return F.dropout(h, 0.5, training=False)


def ellipsis(h: Tensor) -> Tensor:
    """It returns another tensor of the same memory, without a gradient."""
    return h[...]


def without_autograd(function: Callable[[Tensor], Tensor]) -> Forward:
    """Return a forward in which ``function`` returns its operand itself where autograd does not look."""

    def forward(m: Any, h: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = function(h)
            gate = (y @ m.w).sum(-1, keepdim=True)
        return torch.tanh(h @ m.w) + y * gate.sigmoid()

    return forward


CASES |= {
    f"{one.__name__} without autograd": without_autograd(one)
    for one in (cast, copied, in_order, of_three_dims, flat, broadcast, idle, ellipsis)
}


@case
def counter(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.counter += 1
    return h / m.counter


@case
def average(m: Any, h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.state.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
    return h - m.state


@case
def average_read_before(m: Any, h: Tensor, x: Tensor) -> Tensor:
    y = h - m.state
    m.state.copy_(0.5 * m.state + 0.5 * h.detach().mean((0, 1)))
    m.state[0] = 0
    return y


@case
def codebook(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """Vector quantisation with codes that follow the mean of what they are chosen for (van den Oord et al. 2017)."""
    flat = h.reshape(-1, 4)
    distance = flat.square().sum(-1, keepdim=True) - 2 * flat @ m.memory.T + m.memory.square().sum(-1)
    chosen = distance.argmin(-1)
    with torch.no_grad():
        hot = F.one_hot(chosen, 5).to(flat.dtype)
        count = hot.sum(0).clamp(min=1)
        m.memory.lerp_((hot.T @ flat) / count[:, None], 0.1)
    codes = m.memory[chosen].view_as(h)
    return h + (codes - h).detach() + (h - codes.detach()).square().mean() * m.w[0, 0]


@case
def queue(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """A memory bank that forgets its oldest entries (He et al. 2020)."""
    scores = h[:, 0] @ m.memory.clone().T
    m.memory.copy_(torch.cat([h[:, 0].mean(0, keepdim=True).detach(), m.memory[:-1]]))
    return h * scores.softmax(-1).sum(-1)[:, None, None] + scores.mean()


@case
def batch_norm_twice(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return m.norm(torch.relu(m.norm(h)))


@case
def frozen(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * m.frozen + (m.w @ m.frozen).square().mean()


DRAWN = {"drawn_by_default_"}  # plain PyTorch draws other numbers than the keyed ones


@case
def powers_(m: Any, h: Tensor, x: Tensor) -> Tensor:
    one, two, three = h.abs() + 1, h.abs() + 1, h.abs() + 1
    one **= 2
    two.pow_(m.w[0].abs())
    three.float_power_(0.5)
    h = (h.abs() + 1).polygamma_(1)
    return one + two * three + h.ldexp_(torch.tensor([1, 2, 0, 1]))


@case
def compare_(m: Any, h: Tensor, x: Tensor) -> Tensor:
    positive, zeros = x.clone(), torch.zeros_like(h)
    return h * positive.gt_(0)[:, None] + zeros.logical_not_() * h.floor_divide(2).detach()


@case
def drawn_by_default_(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.empty_like(h).bernoulli_()


@case
def out_(m: Any, h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch.div(m.state, 2, out=m.state)
        torch.mv(m.w, m.state + 1, out=m.passing)
        F.normalize(m.passing + m.state, dim=0, out=m.state)
        torch.mul(m.w[:3], 2, out=m.memory[1:4])
        parts = torch.empty_like(h)
        torch.gt(h[..., ::2], 0, out=parts[..., ::2])
        parts[..., 1::2] = 0
    return h * m.state + m.passing * parts + m.memory[2]


def average_with_gradient(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.passing.mul_(0.5)
    m.passing += h.mean((0, 1))
    return h * m.passing


REFUSED: dict[str, tuple[Forward, str]] = {}


def refused(reason: str) -> Callable[[Forward], Forward]:
    def register(function: Forward) -> Forward:
        REFUSED[function.__name__] = (function, reason)
        return function

    return register


@refused("a write to data of a tensor")
def data_of_an_activation(m: Any, h: Tensor, x: Tensor) -> Tensor:
    h = h * 1
    h.data.mul_(2)
    return h


@refused("unseen by autograd")
def no_grad_write(m: Any, h: Tensor, x: Tensor) -> Tensor:
    h = h * 1
    with torch.no_grad():
        h[:, 0] = 0
    return h


@refused("unseen by autograd")
def no_grad_shape(m: Any, h: Tensor, x: Tensor) -> Tensor:
    w = m.w * 1
    with torch.no_grad():
        w.t_()
    return h @ w


@refused("gives no gradient")
def logical_with_a_gradient(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """Torch passes the gradient on, as if the op were not there."""
    k = h * 1
    k.logical_not_()
    return h + k


@refused("changes the shape")
def out_of_another_shape(m: Any, h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        found = torch.empty(0, dtype=h.dtype)
        torch.mul(m.w, 2, out=found)
    return h @ found


@refused("fill_diagonal_.default has no functional form")
def without_a_form(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h @ (m.w * 1).fill_diagonal_(0)


@refused("the shape of memory")
def shape_of_a_buffer(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.memory.unsqueeze_(0)
    return h * m.memory.sum()


@refused("lies in memory")
def strided(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h.as_strided((4, h.shape[0]), (1, 12)).T @ m.w


@refused("functional form")
def expanded(m: Any, h: Tensor, x: Tensor) -> Tensor:
    y = h.clone()
    y.view(-1, 2, 6).unfold(2, 3, 3)[:, 0, 0, 0] = 1
    return y
