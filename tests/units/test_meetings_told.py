"""What is said of the places where rows meet: the buffer, if it is one, and what is legal for this very model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.pipeline import pipeline
from shardwise.verify.verify import verify

Body = Callable[[Any, Tensor, Tensor], Tensor]
BOTH = 'microbatches = 1 or rows = "batch"'


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.layer, self.out = body, nn.Linear(4, 5, bias=False), nn.Linear(5, 3)
        self.norm, self.blocks = nn.BatchNorm1d(5), nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.register_buffer("centre", torch.zeros(5))

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        h = self.body(self, self.layer(x), number)
        for block in self.blocks:
            h = block(h).tanh()
        return self.out(h).square().mean()


def written(m: Any, h: Tensor, number: Tensor) -> Tensor:
    m.centre.lerp_(h.detach().mean(0), 0.1)
    return h - m.centre


def assigned(m: Any, h: Tensor, number: Tensor) -> Tensor:
    m.centre = h.detach().std(0)
    return h


def inside_an_op(m: Any, h: Tensor, number: Tensor) -> Tensor:
    return h * torch.complex(h, h.sin()).mean(0).abs()


def numbered_too(m: Any, h: Tensor, number: Tensor) -> Tensor:
    return inside_an_op(m, h, number)[number]


def branching(m: Any, h: Tensor, number: Tensor) -> Tensor:
    """It reads a parameter, and all names: it could run as written otherwise."""
    return -h if h.sum() + m.out.bias.sum() > 1e9 and locals() else h


def branching_with_a_buffer(m: Any, h: Tensor, number: Tensor) -> Tensor:
    m.centre = branching(m, h, number).detach().amax(0)
    return h


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(8, 4), "number": torch.randperm(8)}


def plan(dp: int = 2, microbatches: int = 2, rows: Any = "microbatch") -> Plan:
    return Plan.of(Mesh.of(dp=dp), microbatches=microbatches, rows=rows)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("body", "meets", "legal"), [
    (written, ("the buffer centre (lerp)",), BOTH),
    (assigned, ("the buffer centre (std)",), BOTH),
    (lambda m, h, number: m.norm(h), ("norm (batch_norm)",), BOTH),
    (inside_an_op, ("the loss (abs)",), "microbatches = 1"),
])  # fmt: skip
def test_a_note_names_what_is_written_and_what_is_legal(body: Body, meets: tuple[str, ...], legal: str) -> None:
    compiled = Compiled(Model(body), plan(), batch())
    assert compiled.general.meets == meets
    note = compiled.notes[-1]
    assert ", ".join(meets) in note and note.endswith(f"all are seen with {legal}")
    if legal == BOTH:
        report = verify(Model(body), [batch()], plan(rows="batch"))
        assert report.passed and not any("rows meet" in one for one in report.notes)


def test_a_note_of_a_pipeline() -> None:
    compiled = Compiled(Model(written), pipeline(Plan.of(microbatches=2), 2), batch())
    assert compiled.notes[-1].endswith(f"all are seen with {BOTH} with pp = 1")


@pytest.mark.quick(1)
@pytest.mark.parametrize(("body", "legal"), [
    (inside_an_op, '"microbatch", or microbatches = 1'), (numbered_too, "microbatches = 1"),
    (branching, '"microbatch", or microbatches = 1'), (branching_with_a_buffer, "dp = 1 and microbatches = 1"),
])  # fmt: skip
def test_what_is_legal_in_place_of_rows_of_the_batch_is_so(body: Body, legal: str) -> None:
    with pytest.raises(ConfigError, match='^rows: "batch" is not possible') as error:
        Compiled(Model(body), plan(rows="batch"), batch())
    assert str(error.value).endswith(f"; legal: {legal}")
    assert verify(Model(body), [batch()], plan(1 if "dp = 1" in legal else 2, 1)).passed
    if '"microbatch"' in legal:
        assert verify(Model(body), [batch()], plan()).passed
    else:
        with pytest.raises(ConfigError):
            verify(Model(body), [batch()], plan())
