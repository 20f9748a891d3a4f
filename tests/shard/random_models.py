"""Random small models: a handful of ops over activations and parameters, legal for any number of rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from op_cases import weighed
from torch import Tensor, nn

ROWS = 7  # a size that nothing else has: the generator knows the rows by it
LIMIT = 4000  # elements of a tensor
Step = tuple[Callable[..., Any], list[int]]


class RandomModel(nn.Module):
    """A program of ``steps`` ops chosen by ``seed``; its loss sees everything that no later op has read."""

    def __init__(self, seed: int, steps: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.rng = random.Random(seed)
        self.before = nn.Linear(4, 12)
        self.p, self.q = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3, 4))
        self.weights = nn.ParameterDict({str(n): nn.Parameter(torch.randn(5, n) / 2) for n in range(1, 6)})
        self.after = nn.Parameter(torch.tensor(0.5))
        self.program: list[Step] = []
        self.names: list[str] = []
        values = self.start(torch.randn(ROWS, 4), torch.randint(0, 7, (ROWS, 5)))
        for _ in range(steps or self.rng.randint(5, 12)):
            self.grow(values)

    def start(self, x: Tensor, ids: Tensor) -> list[Tensor]:
        return [self.before(x).view(-1, 3, 4), x, self.p, self.q, ids]

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        values = self.start(x, ids)
        for function, operands in self.program:
            values.append(function(*(values[i] for i in operands)))
        read = {i for _, operands in self.program for i in operands}
        left = [v for i, v in enumerate(values) if i not in read and i > 4]
        return sum((weighed(v, self.after) for v in left), torch.zeros(()))

    # ---- growing -----------------------------------------------------------------------------------------------------

    def grow(self, values: list[Tensor]) -> None:
        """Add one op that works on the example, whatever is tried before it."""
        for _ in range(200):
            at = self.pick(len(values))
            name = self.rng.choice(KINDS)
            made = getattr(self, f"make_{name}")(values, at)
            if made is None:
                continue
            function, operands = made
            result = function(*(values[i] for i in operands))
            if 0 < result.numel() <= LIMIT and result.dim() <= 5 and sum(s % ROWS == 0 for s in result.shape) <= 2:
                self.program.append((function, operands))
                self.names.append(name)
                values.append(result.detach())
                return
        raise AssertionError("no op fits")

    def pick(self, count: int) -> int:
        """Recent values more often than old ones."""
        return max(self.rng.randrange(count), self.rng.randrange(count))

    def dim(self, x: Tensor) -> int:
        return self.rng.randrange(x.dim()) - self.rng.choice((0, x.dim()))

    def other(self, values: list[Tensor], at: int) -> int | None:
        same = [i for i, v in enumerate(values) if v.shape == values[at].shape and v.is_floating_point()]
        return self.rng.choice(same) if same else None

    def make_unary(self, values: list[Tensor], at: int) -> Any:
        names = ("tanh", "relu", "sigmoid", "abs", "neg", "sin", "square")
        f = getattr(torch, self.rng.choice(names))
        return ((lambda x: f(x * 0.9)), [at])

    def make_parameter(self, values: list[Tensor], at: int) -> Any:
        x = values[at]
        if x.dim() == 0 or x.shape[-1] != 4:
            return None
        return (
            self.rng.choice((lambda x: x * self.p, lambda x: x + self.p, lambda x: x / (1 + self.p.square()))),
            [at],
        )

    def make_pair(self, values: list[Tensor], at: int) -> Any:
        other = self.other(values, at)
        return (
            None if other is None else (self.rng.choice((torch.add, torch.mul, torch.sub, torch.minimum)), [at, other])
        )

    def make_broadcast(self, values: list[Tensor], at: int) -> Any:
        other = self.pick(len(values))
        try:
            torch.broadcast_shapes(values[at].shape, values[other].shape)
        except RuntimeError:
            return None
        return (self.rng.choice((torch.add, torch.mul, torch.maximum)), [at, other])

    def make_join(self, values: list[Tensor], at: int) -> Any:
        other = self.other(values, at)
        if other is None or values[at].dim() == 0:
            return None
        d, f = self.dim(values[at]), self.rng.choice((torch.cat, torch.stack))
        return ((lambda a, b: f([a, b], d)), [at, other])

    def make_along(self, values: list[Tensor], at: int) -> Any:
        x = values[at]
        if x.dim() == 0 or not x.is_floating_point():
            return None
        d = self.dim(x)
        return (
            self.rng.choice(
                (
                    lambda x: x.softmax(d), lambda x: x.cumsum(d) * 0.5, lambda x: x.flip(d),
                    lambda x: x.sort(d).values,
                    lambda x: x - x.mean(d, keepdim=True), lambda x: x / (1 + x.square().sum(d, keepdim=True)),
                    lambda x: x.roll(1, d),
                    lambda x: F.normalize(x + 0.1, dim=d), lambda x: x * x.amax(d, keepdim=True),
                    lambda x: x.log_softmax(d),
                )
            ),
            [at],
        )  # fmt: skip

    def make_reduce(self, values: list[Tensor], at: int) -> Any:
        x = values[at]
        if x.dim() < 2 or not x.is_floating_point():
            return None
        d, keep = self.dim(x), self.rng.random() < 0.3
        return (
            self.rng.choice(
                (
                    lambda x: x.sum(d, keepdim=keep) * 0.3, lambda x: x.mean(d, keepdim=keep),
                    lambda x: x.amax(d, keepdim=keep),
                    lambda x: x.logsumexp(d, keepdim=keep), lambda x: x.var(d, correction=0, keepdim=keep),
                    lambda x: x.norm(dim=d, keepdim=keep),
                )
            ),
            [at],
        )  # fmt: skip

    def make_everything(self, values: list[Tensor], at: int) -> Any:
        return (
            (self.rng.choice((torch.mean, lambda x: x.sum() * 0.1, torch.amax)), [at])
            if values[at].is_floating_point()
            else None
        )

    def make_order(self, values: list[Tensor], at: int) -> Any:
        if values[at].dim() < 2:
            return None
        order = self.rng.sample(range(values[at].dim()), values[at].dim())
        a, b = self.dim(values[at]), self.dim(values[at])
        return (
            self.rng.choice((lambda x: x.permute(order), lambda x: x.transpose(a, b), lambda x: x.movedim(a, b))),
            [at],
        )

    def make_merge(self, values: list[Tensor], at: int) -> Any:
        if values[at].dim() < 2:
            return None
        d = self.rng.randrange(values[at].dim() - 1)
        return ((lambda x: x.reshape(*x.shape[:d], -1, *x.shape[d + 2 :])), [at])

    def make_split(self, values: list[Tensor], at: int) -> Any:
        dims = [d for d, s in enumerate(values[at].shape) if s % 2 == 0]
        if not dims:
            return None
        d, parts = self.rng.choice(dims), self.rng.choice(((2, -1), (-1, 2)))
        return (
            ((lambda x: x.unflatten(d, parts)), [at])
            if values[at].shape[d] % ROWS
            else ((lambda x: x.unflatten(d, (2, x.shape[d] // 2))), [at])
        )

    def make_flatten(self, values: list[Tensor], at: int) -> Any:
        return (self.rng.choice((lambda x: x.flatten(), lambda x: x.flatten(1) if x.dim() > 1 else x * 1)), [at])

    def make_unsqueeze(self, values: list[Tensor], at: int) -> Any:
        d = self.rng.randrange(values[at].dim() + 1)
        return (
            self.rng.choice((lambda x: x.unsqueeze(d), lambda x: x.unsqueeze(d).expand(*x.shape[:d], 2, *x.shape[d:]))),
            [at],
        )

    def make_squeeze(self, values: list[Tensor], at: int) -> Any:
        return ((lambda x: x.squeeze()), [at]) if 1 in values[at].shape else None

    def make_linear(self, values: list[Tensor], at: int) -> Any:
        x = values[at]
        if x.dim() == 0 or not x.is_floating_point() or str(x.shape[-1]) not in self.weights:
            return None
        w = self.weights[str(x.shape[-1])]
        return (
            self.rng.choice(
                (lambda x: F.linear(x, w), lambda x: x @ w.T, lambda x: torch.einsum("...k,nk->...n", x, w))
            ),
            [at],
        )

    def make_product(self, values: list[Tensor], at: int) -> Any:
        x = values[at]
        if x.dim() < 2 or not x.is_floating_point():
            return None
        return (self.rng.choice((lambda x: x @ x.mT * 0.2, lambda x: x.mT @ x * 0.2)), [at])

    def make_part(self, values: list[Tensor], at: int) -> Any:
        x = values[at]
        if x.dim() == 0:
            return None
        d = self.dim(x)
        if x.shape[d] % ROWS == 0:
            return (
                self.rng.choice((lambda x: x.select(d, 0), lambda x: x.narrow(d, 0, 1), lambda x: x.select(d, -1))),
                [at],
            )
        size = x.shape[d]
        if size < 2:
            return None
        return (
            self.rng.choice(
                (
                    lambda x: x.narrow(d, 1, size - 1),
                    lambda x: x.select(d, 1),
                    lambda x: x.chunk(2, d)[0],
                    lambda x: x.unbind(d)[-1],
                )
            ),
            [at],
        )

    def make_repeat(self, values: list[Tensor], at: int) -> Any:
        if values[at].dim() == 0:
            return None
        d = self.rng.randrange(values[at].dim())
        return (
            self.rng.choice(
                (lambda x: x.repeat_interleave(2, d), lambda x: x.repeat(*(2 if i == d else 1 for i in range(x.dim()))))
            ),
            [at],
        )

    def make_choice(self, values: list[Tensor], at: int) -> Any:
        other = self.other(values, at)
        if other is None:
            return None
        return (
            self.rng.choice((lambda x, y: torch.where(x > y, x, y * 0.5), lambda x, y: x.masked_fill(y > 0, 0.3))),
            [at, other],
        )

    def make_norm(self, values: list[Tensor], at: int) -> Any:
        x = values[at]
        if x.dim() < 2 or not x.is_floating_point() or x.shape[-1] < 2:
            return None
        if x.shape[-1] % ROWS == 0:
            return (
                ((lambda x: F.batch_norm(x, None, None, training=True)), [at])
                if x.dim() in (2, 3) and x.shape[1] % ROWS
                else None
            )
        return ((lambda x: F.layer_norm(x, x.shape[-1:])), [at])

    def make_lookup(self, values: list[Tensor], at: int) -> Any:
        x = values[at]
        if x.dim() == 0 or x.dim() > 3:
            return None
        return (
            self.rng.choice(
                (
                    lambda x: F.embedding((x > 0).long(), self.q), lambda x: self.q[(x > 0.2).long()],
                    lambda x: x[torch.arange(x.shape[0])],
                    lambda x: x[(torch.arange(x.shape[0]) * 2) % x.shape[0]], lambda x: x.gather(-1, x.argsort(-1)),
                    lambda x: x * x.argmax(0),
                )
            ),
            [at],
        )  # fmt: skip

    def make_in_place(self, values: list[Tensor], at: int) -> Any:
        x = values[at]
        if x.dim() == 0 or not x.is_floating_point():
            return None
        d = self.dim(x)

        def write(x: Tensor) -> Tensor:
            y = x.clone()
            y.select(d, 0).mul_(0.5)
            y.narrow(d, 0, 1).add_(1)
            y.relu_()
            return y + x

        return (write, [at])

    def make_row_numbers(self, values: list[Tensor], at: int) -> Any:
        x = values[at]
        if x.dim() == 0 or x.shape[0] % ROWS:
            return None
        return ((lambda x: x * torch.arange(x.shape[0]).view(-1, *[1] * (x.dim() - 1)).cos()), [at])


KINDS = [name.removeprefix("make_") for name in dir(RandomModel) if name.startswith("make_")]
