"""Fields that number rows of the batch: they count those of the whole batch, also where ranks have some of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import TOLERANCE, Subject, errors, oracle_run, plain_run, planned_run, sharded_run
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled

Body = Callable[[Tensor, Tensor], Tensor]


def _put(z: Tensor, number: Tensor) -> Tensor:
    out = z * 2
    out[number] = z.sin()
    return out


NUMBERED: dict[str, tuple[Body, str]] = {
    "index": (lambda z, number: z[number], "index"),
    "index of what is made of it": (lambda z, number: z[(number[:, None] + 0).squeeze(1).flip(0)], "index"),
    "index_select": (lambda z, number: z.index_select(0, number), "index_select"),
    "gather": (lambda z, number: z.gather(0, number[:, None].expand(-1, 5)), "gather"),
    "index_add": (lambda z, number: torch.zeros_like(z).index_add(0, number, z), "index_add"),
    "in place": (_put, "index_put"),
    "embedding": (lambda z, number: F.embedding(number, z), "embedding"),
}

OF_A_MICROBATCH: dict[str, Body] = {
    "in the order of a field": lambda z, number: z[number.argsort()],
    "the nearest": lambda z, number: z[torch.cdist(z, z).topk(2, largest=False)[1][:, -1]],
    "of a mask": lambda z, number: z[(number > 1).nonzero()[:, 0]].sum(0).expand_as(z),
    "columns": lambda z, number: z.flip(0).gather(1, number[:, None] % 5).expand_as(z),
    "classes": lambda z, number: torch.zeros(2, 5, dtype=z.dtype).index_add(0, number % 2, z)[number % 2],
}


class Inner(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body

    def forward(self, z: Tensor, number: Tensor) -> Tensor:
        return self.body(z, number)


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.out = nn.Linear(4, 5), Inner(body), nn.Linear(5, 5)

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        z = self.first(x).tanh()
        return (self.out(z) - self.inner(z, number)).square().mean()


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(7, 4), "number": torch.randperm(7)}


@pytest.mark.parametrize("name", NUMBERED)
def test_ranks_exchange_rows_and_microbatches_are_refused(name: str) -> None:
    body, op = NUMBERED[name]
    subject = Subject(Model(body), batch())
    truth = plain_run(subject)
    found = [sharded_run(subject, 1), sharded_run(subject, 2), sharded_run(subject, 3)]
    with pytest.raises(
        ConfigError, match=rf"^microbatches: 2 .*rows meet in {op} in inner \({__file__}:\d+\)"
    ) as error:
        sharded_run(subject, 2, 2)
    assert str(error.value).endswith('legal: microbatches = 1 or rows = "batch"')
    plan = Plan.of(Mesh.of(dp=2), microbatches=2, rows="batch", precision="fp64")
    found.append(planned_run(Compiled(subject.module, plan, subject.batch), subject.batch))
    for run in found:
        assert max(errors(run, truth).values()) <= TOLERANCE


@pytest.mark.parametrize("name", OF_A_MICROBATCH)
def test_numbers_that_a_microbatch_makes_are_its_own(name: str) -> None:
    subject = Subject(Model(OF_A_MICROBATCH[name]), batch())
    truth = oracle_run(subject, 2)
    assert not subject.trace.cuts_batch
    assert max(errors(sharded_run(subject, 2, 2), truth).values()) <= TOLERANCE


def test_rows_of_a_field_are_looked_up_beforehand() -> None:
    class Fields(Model):
        def forward(self, x: Tensor, number: Tensor) -> Tensor:
            return (self.out(self.first(x).tanh()) - x[number].sum(-1, keepdim=True)).square().mean()

    subject = Subject(Fields(lambda z, number: z), batch())
    assert max(errors(sharded_run(subject, 2, 2), plain_run(subject)).values()) <= TOLERANCE
