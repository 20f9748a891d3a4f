"""Modules that cannot be copied, or have no shapes yet, are refused before anything starts, with the attribute."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import TOLERANCE, Subject, errors, plain_run, sharded_run
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.initial.values import Values
from shardwise.lower.compiled import Compiled


class Stubborn:
    def __deepcopy__(self, memo: Any) -> Stubborn:
        raise RuntimeError("there is one of me")


class Model(nn.Module):
    """A model with an attribute ``kept`` in one of its blocks; ``branches`` keeps it from being captured."""

    def __init__(self, kept: Any = None, last: nn.Module | None = None, branches: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 5), last or nn.Linear(5, 3)])
        self.blocks[0].kept, self.branches = kept, branches

    def forward(self, x: Tensor) -> Tensor:
        if self.branches and x.sum() > 1e9:
            x = -x
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(6, 4)}


KEPT: dict[str, tuple[Callable[[], Any], str]] = {
    "a lock": (threading.Lock, "blocks.0.kept, of type lock"),
    "an open file": (lambda: open(__file__), "blocks.0.kept, of type TextIOWrapper"),  # noqa: SIM115
    "a generator": (lambda: (i for i in range(3)), "blocks.0.kept, of type generator"),
    "a lock in a dict": (lambda: {"all": [1, threading.Lock()]}, "blocks.0.kept['all'][1], of type lock"),
    "an object of the user's": (Stubborn, "blocks.0.kept, of type Stubborn, cannot be copied: there is one of me"),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("branches", [False, True])
def test_what_cannot_be_copied_is_named(name: str, branches: bool) -> None:
    make, told = KEPT[name]
    with pytest.raises(ConfigError, match=f"^model: {re.escape(told)}.*; legal: "):
        Compiled(Model(make(), branches=branches), Plan.of(Mesh.of(dp=2)), batch())


def test_values_of_a_module_that_cannot_be_copied() -> None:
    model = Model(threading.Lock())
    with pytest.raises(ConfigError, match=r"blocks\.0\.kept"):
        Values(model, ({name: value + 1 for name, value in model.state_dict().items()},)).whole()


class Leaves(nn.Module):
    """A module that leaves its lock out of its copies, as the message says."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.up = threading.Lock(), nn.Linear(5, 3)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "lock": None}

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.up(x)
        return result


def parity(model: nn.Module) -> None:
    subject = Subject(model, batch())
    truth = plain_run(subject)
    for dp, microbatches in ((1, 1), (2, 2)):
        assert max(errors(sharded_run(subject, dp, microbatches), truth).values()) <= TOLERANCE


def test_a_module_that_leaves_it_out_trains() -> None:
    parity(Model(last=Leaves()))


@pytest.mark.parametrize(("make", "kind"), [
    (lambda: nn.LazyLinear(3), "LazyLinear"), (nn.LazyBatchNorm1d, "LazyBatchNorm1d")
])  # fmt: skip
def test_a_lazy_module_is_named_and_trains_once_it_has_run(make: Callable[[], nn.Module], kind: str) -> None:
    model = Model(last=make())
    with pytest.raises(
        ConfigError, match=rf"^model: blocks\.1\.weight has no shape yet.* {kind} .*; legal: one forward"
    ):
        Compiled(model, Plan.of(Mesh.of(dp=2)), batch())
    model(**batch())
    if kind == "LazyLinear":
        parity(model)


class Graph(nn.Module):
    """Mixes columns by a sparse matrix, which it holds or makes of two buffers."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, matrix = nn.Linear(4, 5), torch.eye(5).roll(1, 0).to_sparse()
        if whole:
            self.register_buffer("matrix", matrix)
        self.register_buffer("places", matrix.indices())
        self.register_buffer("values", matrix.values())
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.matrix if self.whole else torch.sparse_coo_tensor(self.places, self.values, (5, 5))
        return torch.sparse.mm(matrix, self.up(x).T).square().mean()


def test_a_sparse_buffer_is_refused_and_one_that_forward_makes_is_not() -> None:
    with pytest.raises(ConfigError, match="^model: matrix is a sparse tensor.*; legal: "):
        Compiled(Graph(True), Plan.of(), batch())
    parity(Graph(False))
