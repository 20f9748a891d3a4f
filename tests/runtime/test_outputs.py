"""What a model returns besides its loss, under plans of any kind, against the plain module on one device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.capture.outputs import rebuilt
from shardwise.core.errors import ConfigError
from shardwise.core.layout import rank_rows
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.data.loader import AXES
from shardwise.lower.compiled import Compiled
from shardwise.models import GPT
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import run_ranks

ROWS = 7


class Tagger(nn.Module):
    """A classifier of tokens and of rows, with BatchNorm, that returns an object with several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        x = self.embed(input_ids)
        hidden = [x]
        for layer in self.layers:
            x = x + layer(x)
            hidden.append(x)
        logits = self.head(self.norm(x.mean(1)))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits, hidden=tuple(hidden), ids=input_ids, cache=object())


class Branching(Tagger):
    """It cannot be captured: a branch depends on values."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        found = super().forward(input_ids, labels)
        return found if float(found.logits.sum()) > -1e9 and locals() else super().forward(input_ids * 0, labels)


def subject(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    if kind == "gpt":
        module = GPT(vocabulary=31, width=16, layers=3, heads=2, context=12, dropout=0.2)
        labels = torch.randint(0, 31, (ROWS, 12))
        labels[:3, 2:] = -100
        return module, {"input_ids": torch.randint(0, 31, (ROWS, 12)), "labels": labels}
    batch = {"input_ids": torch.randint(0, 13, (ROWS, 5)), "labels": torch.randint(0, 4, (ROWS,))}
    return (Branching() if kind == "branching" else Tagger()), batch


PLANS = {
    "one": Plan.of(precision="fp64"),
    "dp3 x 2": Plan.of(Mesh.of(dp=3), microbatches=2, precision="fp64"),
    "zero3": data_parallel(Plan.of(precision="fp64", microbatches=2), 2, 3),
    "pp": pipeline(Plan.of(precision="fp64", microbatches=3), 2, "1f1b"),
    "zbv": pipeline(data_parallel(Plan.of(precision="fp64", microbatches=2), 2, 1), 2, "zbv"),
    "tp": tensor_parallel(data_parallel(Plan.of(precision="fp64", microbatches=2), 2), 2, "1d"),
    "tp-sp x pp": pipeline(tensor_parallel(Plan.of(precision="fp64", microbatches=2), 2, "1d-sp"), 2),
    "auto": tensor_parallel(Plan.of(precision="fp64"), 2, "1d", "auto", {}),
    "dp8": Plan.of(Mesh.of(dp=8), precision="fp64"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plan"),
    [("gpt", plan) for plan in PLANS] + [("tagger", plan) for plan in PLANS if plan != "tp-sp x pp"],  # its BatchNorm
)
def test_outputs_are_those_of_one_device(kind: str, plan: str) -> None:
    check(kind, PLANS[plan], "both")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp3 x 2", "pp", "tp"])
@pytest.mark.parametrize("kind", ["gpt", "tagger"])
def test_outputs_without_labels(kind: str, plan: str) -> None:
    check(kind, PLANS[plan], "outputs")


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["both", "outputs"])
def test_outputs_of_a_model_that_is_not_captured(wanted: str) -> None:
    """On eight ranks one has no row at all."""
    check("branching", PLANS["dp8"], wanted)
    check("branching", PLANS["dp3 x 2"], wanted)


def check(kind: str, plan: Plan, wanted: Any) -> None:
    module, batch = subject(kind)
    compiled = Compiled(module, plan, batch)
    given = {k: v for k, v in batch.items() if wanted == "both" or k != "labels"}

    def rank(comm: Communicator) -> Any:
        engine = Engine(compiled, comm, OptimizerChoice("adamw", lr=1e-2), strict=True)
        parts, index = comm.mesh.axis_size(AXES), comm.mesh.index(comm.rank, AXES)
        own = [i for a, b in rank_rows(ROWS, plan.microbatches, parts, index) for i in range(a, b)]
        engine.step({k: v[own] for k, v in batch.items()}, ROWS)
        found = engine.evaluate({k: v[own] for k, v in given.items()}, ROWS, None, compiled.evaluation(wanted, given))
        state = engine.state_dict()
        engine.step({k: v[own] for k, v in batch.items()}, ROWS)
        structure = compiled.evaluation(wanted, given).general.outputs
        return own, float(found.loss), found.outputs, structure, state

    results = run_ranks(plan.mesh, rank, timeout=100)
    plain = module.double().eval()
    plain.load_state_dict(results[0][4])
    with torch.no_grad():
        truth = plain(given["input_ids"])
        loss = plain(**given) if wanted == "both" else None
    seen: list[int] = []
    for own, value, outputs, structure, _ in results:
        if loss is not None:
            assert abs(value - float(loss if isinstance(loss, Tensor) else loss.loss)) <= 1e-12
        if outputs is None:
            continue
        found = rebuilt(structure, outputs)
        seen += own
        if kind == "gpt":
            assert float((found - truth[own]).abs().max() if own else 0) <= 1e-12
            continue
        assert set(found) == {"logits", "hidden", "ids"}
        assert len(found.hidden) == 4
        for mine, theirs in zip((found.logits, *found.hidden), (truth.logits, *truth.hidden), strict=True):
            assert mine.shape == theirs[own].shape
            assert not own or float((mine - theirs[own]).abs().max()) <= 1e-12
        assert torch.equal(found.ids, given["input_ids"][own])
    copies = plan.mesh.size // plan.mesh.axis_size(AXES) // plan.mesh.axis_size("pp")
    assert sorted(seen) == sorted([*range(ROWS)] * copies)


class Around(Tagger):
    """Its outputs need none of the last blocks, and one is a field that nothing in forward meets."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, weight: Tensor | None = None) -> SimpleNamespace:
        x = self.layers[0](self.embed(input_ids))
        found = super().forward(input_ids, labels)
        return SimpleNamespace(loss=found.loss, first=x, ids=input_ids[:, 1:], weight=weight)


class Given(Tagger):
    """Its only output needs no block."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, weight: Tensor | None = None) -> SimpleNamespace:
        return SimpleNamespace(loss=super().forward(input_ids, labels).loss, weight=weight)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["one", "dp3 x 2", "pp", "zbv"])
@pytest.mark.parametrize("kind", [Around, Given])
@pytest.mark.parametrize("wanted", ["both", "outputs"])
def test_outputs_that_do_not_need_the_whole_model(kind: type[Tagger], plan: str, wanted: Any) -> None:
    """Some stages of a pipeline then compute nothing."""
    _, batch = subject("tagger")
    batch["weight"] = torch.randn(ROWS, 2, dtype=torch.float64)
    module, plans = kind(), PLANS[plan]
    compiled = Compiled(module, plans, batch)
    given = {k: v for k, v in batch.items() if wanted == "both" or k != "labels"}

    def rank(comm: Communicator) -> Any:
        engine = Engine(compiled, comm, OptimizerChoice("sgd", lr=0.0))
        parts, index = comm.mesh.axis_size(AXES), comm.mesh.index(comm.rank, AXES)
        own = [i for a, b in rank_rows(ROWS, plans.microbatches, parts, index) for i in range(a, b)]
        found = engine.evaluate({k: v[own] for k, v in given.items()}, ROWS, None, compiled.evaluation(wanted, given))
        return own, found.outputs

    structure = compiled.evaluation(wanted, given).general.outputs
    results = run_ranks(plans.mesh, rank, timeout=100)
    with torch.no_grad():
        truth = {k: v for k, v in vars(module.double().eval()(**given)).items() if k != "loss"}
    parts = [(own, rebuilt(structure, outputs)) for own, outputs in results if outputs is not None]
    assert {i for own, _ in parts for i in own} == set(range(ROWS))
    for own, found in parts:
        assert set(found) == set(truth)
        for name, value in truth.items():
            assert found[name].shape == value[own].shape
            assert float((found[name] - value[own]).abs().max()) <= 1e-12


class Apart(Tagger):
    """Its outputs alone need the last stage's parameters, and nothing of what comes before."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        found = super().forward(input_ids, labels)
        return SimpleNamespace(loss=found.loss, own=self.head(self.embed(input_ids)[:, 0]))


@pytest.mark.slow
def test_outputs_that_need_parameters_of_another_stage() -> None:
    _, batch = subject("tagger")
    plan, given = PLANS["pp"], {"input_ids": batch["input_ids"]}
    compiled = Compiled(Apart(), plan, batch)

    def rank(comm: Communicator) -> Any:
        engine = Engine(compiled, comm, OptimizerChoice("sgd", lr=0.0))
        return engine.evaluate(given, ROWS, None, compiled.evaluation("outputs", given)).outputs

    with pytest.raises(ConfigError, match=r"^pp: what is asked for needs head\.weight on rank 0 .* legal: pp = 1"):
        run_ranks(plan.mesh, rank, timeout=100)


class Counting(Tagger):
    """The first stage of a pipeline writes a buffer, and the last one gives the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        before = self.seen.expand(len(input_ids))
        if self.training:
            self.seen.add_(1)
        return SimpleNamespace(loss=super().forward(input_ids, labels).loss, before=before * 2)


@pytest.mark.parametrize("plan", ["one", "dp3 x 2", "pp"])
def test_outputs_of_buffers_that_training_writes(plan: str) -> None:
    """They are those after the steps; the last stage of a pipeline does not have them, which is refused."""
    _, batch = subject("tagger")
    compiled = Compiled(Counting(), PLANS[plan], batch)

    def rank(comm: Communicator) -> Any:
        engine = Engine(compiled, comm, OptimizerChoice("sgd", lr=0.0))
        parts, index = comm.mesh.axis_size(AXES), comm.mesh.index(comm.rank, AXES)
        own = [i for a, b in rank_rows(ROWS, PLANS[plan].microbatches, parts, index) for i in range(a, b)]
        mine = {k: v[own] for k, v in batch.items()}
        engine.step(mine, ROWS)
        seen = engine.state_dict()["seen"]
        return seen, engine.evaluate(mine, ROWS, None, compiled.evaluation("both")).outputs

    if plan == "pp":
        with pytest.raises(
            ConfigError, match="pp: training writes the buffer seen on rank 0 of the pipeline, and rank 1"
        ):
            run_ranks(PLANS[plan].mesh, rank, timeout=100)
        return
    for seen, (found,) in run_ranks(PLANS[plan].mesh, rank, timeout=100):
        assert float(seen) >= 1
        assert torch.equal(found, (2 * seen).expand(len(found)))


class LossOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(self.layer(x), labels)


class NoRows(LossOnly):
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return {"loss": super().forward(x, labels), "flat": self.layer(x).expand(-1, 2).flatten()}


def test_models_without_outputs_are_refused() -> None:
    batch = {"x": torch.randn(4, 3), "labels": torch.randn(4, 1)}
    alone = Compiled(LossOnly(), Plan.of(precision="fp64"), batch)
    with pytest.raises(ConfigError, match="forward returns its loss alone, so it has no outputs.*model.loss"):
        alone.evaluation("both")
    flat = Compiled(NoRows(), Plan.of(precision="fp64"), batch)
    with pytest.raises(ConfigError, match=r"no output of forward has rows.*2\*"):
        flat.evaluation("both")


@pytest.mark.slow
def test_the_second_call_costs_nothing() -> None:
    """What the calls with and without labels share is computed once: each block's products are there once."""
    module, batch = subject("gpt")
    compiled = Compiled(module, Plan.of(precision="fp64"), batch)
    products = [
        sum("addmm" in str(n.target) or "linear" in str(n.target) for u in one.general.units for n in u.graph.nodes)
        for one in (compiled.evaluation("loss"), compiled.evaluation("both"))
    ]
    assert products[0] == products[1] > 0
