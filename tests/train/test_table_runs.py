"""Tables with gradients by rows in runs: a user's loop as torch has it, processes, checkpoints, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from processes import run_processes
from shardwise import Mesh, OptimizerChoice, ParameterGroup, Plan
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.local import local_training
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.server import asynchronous_server, parameter_server
from shardwise.parallel.tables import table_gradients
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime.engine import Engine
from shardwise.runtime.tables import TableGradient, check_tables
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.train.checkpoints import Checkpoints
from shardwise.train.distribute import distribute
from shardwise.train.trainer import Trainer
from shardwise.units.share import Share
from shardwise.units.trace import Bucket, Parameter

ADAGRAD = OptimizerChoice("adagrad", lr=0.05)
SPARSE_ADAM = OptimizerChoice("adamw", groups=(ParameterGroup.of("users.weight", name="sparse_adam", lr=0.05),))


class Clicks(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.users, self.head = nn.Embedding(53, 5, sparse=sparse), nn.Linear(5, 1)

    def forward(self, user: Tensor, clicked: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.head(self.users(user)).squeeze(-1), clicked)


def clicks(sparse: bool = True) -> Clicks:
    torch.manual_seed(0)
    return Clicks(sparse).double()


def batch(step: int, rows: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    user = torch.randint(0, 53, (rows,), generator=generator)
    return {"user": user, "clicked": torch.randint(0, 2, (rows,), generator=generator).double()}


def tables(model: Any) -> list[bool]:
    return [b.table for b in model.trainer.engine.compiled.buckets]


OPTIMIZERS: dict[str, Any] = {
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1), "sgd": lambda p: torch.optim.SGD(p, lr=0.3)
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("backwards", [1, 2])
def test_a_loop_gives_what_torch_gives_with_sparse_gradients(name: str, backwards: int) -> None:
    def run(model: Any, optimizer: Any) -> list[float]:
        losses = []
        for step in range(6):
            optimizer.zero_grad()
            for number in range(backwards):
                loss = model(**batch(2 * step + number))
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    plain = clicks()
    ours = copy.deepcopy(plain)
    truth = run(plain, OPTIMIZERS[name](plain.parameters()))
    model, optimizer = distribute(ours, OPTIMIZERS[name](ours.parameters()))
    assert run(model, optimizer) == pytest.approx(truth, rel=1e-12)
    assert any(tables(model))
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-12, atol=1e-12)


def pair(module: Clicks, **options: Any) -> list[torch.optim.Optimizer]:
    table = torch.optim.SparseAdam(module.users.parameters(), lr=0.05, **options)
    return [table, torch.optim.AdamW(module.head.parameters(), lr=0.01)]


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("backwards", [1, 2])
def test_sparse_adam_moves_the_rows_that_were_looked_up(backwards: int, looks: bool) -> None:
    """By torch's own numbers, also where the loop changes gradients; and its state goes on from torch and back."""

    def run(model: Any, optimizers: list[Any], first: int) -> None:
        for step in range(first, first + 4):
            for one in optimizers:
                one.zero_grad()
            for number in range(backwards):
                model(**batch(2 * step + number)).backward()
            for parameter in model.parameters() if looks else ():
                parameter.grad = parameter.grad * 0.5
            for one in optimizers:
                one.step()

    plain, ours = clicks(), clicks()
    begun = plain.users.weight.detach().clone()
    both, (model, optimizer) = pair(plain, maximize=looks), distribute(ours, pair(ours, maximize=looks))
    run(plain, both, 0)
    run(model, [optimizer], 0)
    assert any(tables(model)) and (plain.users.weight == begun).all(1).any()
    check_same(model, plain)
    state = optimizer.state_dict()["state"]
    truth = [one.state[p] for one in both for group in one.param_groups for p in group["params"]]
    for number, expected in enumerate(truth):
        assert state[number].keys() == expected.keys() and type(state[number]["step"]) is type(expected["step"])
        for key, value in expected.items():
            torch.testing.assert_close(torch.as_tensor(state[number][key]), torch.as_tensor(value), rtol=1e-12, atol=0)
    again = clicks()
    later, loaded = distribute(again, pair(again, maximize=looks))
    later.load_state_dict(plain.state_dict())
    loaded.load_state_dict({"state": dict(enumerate(copy.deepcopy(truth))), "param_groups": loaded.param_groups})
    run(plain, both, 4)
    run(later, [loaded], 4)
    check_same(later, plain)


def check_same(model: Any, plain: Clicks) -> None:
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-12, atol=1e-12)


def test_a_gradient_that_the_loop_changes() -> None:
    """As plain torch does with a dense gradient of the same table."""

    def run(model: Any, optimizer: Any) -> None:
        for step in range(4):
            optimizer.zero_grad()
            model(**batch(step)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(0.5)
            optimizer.step()

    plain, ours = clicks(sparse=False), clicks()
    run(plain, OPTIMIZERS["adagrad"](plain.parameters()))
    model, optimizer = distribute(ours, OPTIMIZERS["adagrad"](ours.parameters()))
    run(model, optimizer)
    assert any(tables(model))
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-12, atol=1e-12)


def test_a_hook_on_a_table_is_given_a_dense_gradient() -> None:
    seen: list[torch.Size] = []
    ours = clicks()
    ours.users.weight.register_hook(lambda gradient: seen.append(gradient.shape))
    model, optimizer = distribute(ours, OPTIMIZERS["sgd"](ours.parameters()))
    model(**batch(0)).backward()
    optimizer.step()
    assert seen[-1] == (53, 5) and not any(tables(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [1, 3, 4])
@pytest.mark.parametrize("rows", [0, 1, 2, 5])
@pytest.mark.parametrize("kind", ["dp", "zero1", "server"])
def test_any_number_of_rows_of_any_width_travels(kind: str, rows: int, width: int, dtype: torch.dtype) -> None:
    """Also none, of one rank or of all, and rows of bytes that no alignment divides."""
    bucket = Bucket(0, (Parameter("t", (64, width), dtype, (0,)),), (0,), dtype, table=True)
    plan = {"dp": data_parallel(Plan.of(), 2), "zero1": data_parallel(Plan.of(), 2, zero=1)}.get(
        kind, parameter_server(data_parallel(Plan.of(), 2))
    )
    shares = [Share.of(bucket, plan, ADAGRAD, rank) for rank in range(2)]
    numbers = torch.tensor([3, 40, 63, 0, 3])[:rows]

    def rank(comm: ThreadCommunicator) -> tuple[Tensor, Tensor]:
        table = TableGradient(bucket, shares[comm.rank].held, torch.device("cpu"))
        if comm.rank == 1:
            table.add(numbers, torch.arange(1, rows * width + 1).view(rows, width).to(dtype), -1)
        if kind == "dp":
            table.reduce(comm, ("dp",), "reduce", "rows").wait()
        else:
            owners = [share.held for share in shares if share.held.numel]
            table.send_to_owners(comm, owners, "reduce", "rows").wait()
        param = torch.zeros(shares[comm.rank].layout.numel, dtype=dtype)
        if kind != "dp":
            own = table.rows.between(shares[comm.rank].held)
            param.view(-1, width)[own.numbers] = own.values.to(dtype)
            table.touched = [own.numbers]
            table.refresh(comm, param, 1 if kind == "server" else 2, "gather", "rows").wait()
        return table.dense(), param

    found = run_ranks(plan.mesh, rank, timeout=30)
    truth = torch.zeros(64, width, dtype=bucket.wide)
    truth.index_add_(0, numbers, torch.arange(1, rows * width + 1).view(rows, width).to(bucket.wide))
    whole = found[0][0] if kind != "zero1" else torch.cat([one for one, _ in found])
    torch.testing.assert_close(whole[: 64 * width], truth.flatten(), rtol=0, atol=0)
    if kind != "dp":
        for _, param in found:
            torch.testing.assert_close(param[: 64 * width].to(bucket.wide), truth.flatten(), rtol=0, atol=0)


# ---- processes -------------------------------------------------------------------------------------------------------

LOOP = """
import json, sys
import torch
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/train"]
from test_table_runs import ADAGRAD, batch, clicks, planned, tables
from shardwise.runtime.connect import connect
from shardwise.train.distribute import distribute

torch.set_num_threads(1)
plan = planned(sys.argv[3])
model, optimizer = distribute(clicks(), ADAGRAD, plan, comm=connect(plan.mesh, backend=sys.argv[2]), clip_norm=0.1)
losses = []
for step in range(5):
    optimizer.zero_grad()
    loss = model(**batch(step))
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert any(tables(model))
print(json.dumps([losses, {k: v.tolist() for k, v in model.state_dict().items()}]), flush=True)
model.trainer.comm.close()
"""


def planned(kind: str) -> Plan:
    plan = Plan.of(precision="fp64", microbatches=2)
    plan = data_parallel(plan, 3, 1 if kind == "zero1" else 0)
    plan = parameter_server(plan, 2) if kind == "server" else plan
    return table_gradients(plan, ADAGRAD)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "shared"])
@pytest.mark.parametrize("kind", ["dp", "zero1", "server"])
def test_processes(tmp_path: Path, backend: str, kind: str) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    tests = Path(__file__).parents[1]
    every = run_processes(3, [str(script), str(tests), backend, kind], 150, OMP_NUM_THREADS=1)
    found = [json.loads(one.splitlines()[-1]) for one in every]
    assert found[0] == found[1] == found[2]
    plain = clicks(sparse=False)  # torch does not clip sparse gradients
    optimizer, losses = torch.optim.Adagrad(plain.parameters(), lr=0.05), []
    for step in range(5):
        optimizer.zero_grad()
        loss = plain(**batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    assert found[0][0] == pytest.approx(losses, rel=1e-10)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(torch.tensor(found[0][1][name], dtype=torch.float64), value, rtol=1e-10, atol=1e-12)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


class Rows:
    def __len__(self) -> int:
        return 17

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[0] for name, value in batch(index, 1).items()}


KINDS = {
    "one": Plan.of(), "dense": data_parallel(Plan.of(), 2, zero=2), "dp": data_parallel(Plan.of(), 3),
    "zero1": data_parallel(Plan.of(), 2, zero=1), "zero3": data_parallel(Plan.of(), 4, zero=3, replicas=2),
    "server": parameter_server(data_parallel(Plan.of(), 3), 2),
}  # fmt: skip


def trained(folder: Path, kind: str, stop: int, choice: OptimizerChoice = ADAGRAD) -> dict[str, Tensor]:
    """Go on from the folder's checkpoint to step ``stop``, and save."""
    plan = KINDS[kind].replace(precision="fp64")
    plan = plan if kind == "dense" else plan.replace(sparse_gradients="rows")
    made = Compiled(clicks(), plan, batch(0))

    def rank(comm: ThreadCommunicator) -> dict[str, Tensor]:
        trainer = Trainer(made, choice, plan, {}, seed=3, comm=comm)
        with trainer.loader(Rows(), 5) as loader, Checkpoints(trainer, folder) as checkpoints:
            checkpoints.restore(loader)
            while trainer.engine.step_index < stop:
                trainer.step(next(loader))
            checkpoints.save(loader)
        return trainer.state_dict()

    return run_ranks(plan.mesh, rank, timeout=60)[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [("one", "zero1"), ("zero1", "dense"), ("dense", "dp"), ("dp", "server"), ("server", "zero3"), ("zero3", "one")],
)
def test_checkpoints_go_between_plans(tmp_path: Path, before: str, after: str) -> None:
    """Between gradients by rows and dense ones, too: the optimizer's state is the same."""
    truth = trained(tmp_path / "whole", "one", 6)
    trained(tmp_path / "parts", before, 3)
    found = trained(tmp_path / "parts", after, 6)
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("before", "after"), [("one", "zero1"), ("zero1", "dp"), ("dp", "server"), ("server", "zero3"), ("zero3", "one")]
)
def test_checkpoints_of_sparse_adam_go_between_plans(tmp_path: Path, before: str, after: str) -> None:
    truth = trained(tmp_path / "whole", "one", 6, SPARSE_ADAM)
    trained(tmp_path / "parts", before, 3, SPARSE_ADAM)
    found = trained(tmp_path / "parts", after, 6, SPARSE_ADAM)
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


# ---- what is refused, and what follows by itself ---------------------------------------------------------------------


def test_an_optimizer_that_updates_all_rows_is_refused() -> None:
    one = Compiled(clicks(), Plan.of(precision="fp64", sparse_gradients="rows"), batch(0))

    def made(choice: OptimizerChoice) -> None:
        run_ranks(Mesh.of(dp=1), lambda comm: Engine(one, comm, choice))

    for choice in (OptimizerChoice("adamw"), OptimizerChoice("sgd", momentum=0.9)):
        with pytest.raises(ConfigError, match=rf'optimizer: "{choice.name}" updates all rows of users.weight.*"dense"'):
            made(choice)
    with pytest.raises(ConfigError, match='"adagrad" updates all rows'):
        made(OptimizerChoice("adagrad", weight_decay=0.1))
    made(OptimizerChoice("adagrad", weight_decay=0.0))


def test_sparse_adam_without_rows_is_refused() -> None:
    """Of a parameter that is no table, of a table that is dense under the plan, and at servers apart."""

    def made(choice: OptimizerChoice, plan: Plan) -> None:
        one = Compiled(clicks(), plan, batch(0))
        run_ranks(plan.mesh, lambda comm: Engine(one, comm, choice))

    rows = Plan.of(precision="fp64", sparse_gradients="rows")
    legal = r"legal: a table of nn.Embedding\(sparse=True\) that lookups alone read, .* another optimizer for all else"
    for choice, plan, what in (
        (OptimizerChoice("sparse_adam"), rows, "head.weight, whose gradient is dense"),
        (SPARSE_ADAM, Plan.of(precision="fp64"), "users.weight, whose gradient is dense"),
        (SPARSE_ADAM, tensor_parallel(rows, 2, "1d"), "users.weight, whose gradient is dense"),
    ):
        with pytest.raises(ConfigError, match=f'"sparse_adam" updates the rows that were looked up of {what}; {legal}'):
            made(choice, plan)
    one = Compiled(clicks(), rows, batch(0))
    apart = asynchronous_server(Plan.of(), "async", 2, 2)
    with pytest.raises(ConfigError, match="users.weight, which servers apart do not know"):
        check_tables(one.buckets, apart, SPARSE_ADAM)
    assert table_gradients(Plan.of(), SPARSE_ADAM).data.tables == "rows"
    module = clicks(sparse=False)
    model, optimizer = distribute(module, pair(module))
    model(**batch(0)).backward()
    with pytest.raises(ConfigError, match=f"users.weight, whose gradient is dense; {legal}"):
        optimizer.step()


def test_what_moves_all_rows_is_refused_in_a_loop() -> None:
    module = clicks()
    model, optimizer = distribute(module, torch.optim.SGD(module.parameters(), lr=0.1))
    model(**batch(0)).backward()
    optimizer.step()
    optimizer.param_groups[0]["weight_decay"] = 0.1
    optimizer.zero_grad()
    model(**batch(1)).backward()
    with pytest.raises(ShardwiseError, match="optimizer: weight_decay changed after the first step"):
        optimizer.step()


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        (pipeline(Plan.of(microbatches=4), 2, "pipedream-2bw"), '"pipedream-2bw"'),
        (pipeline(Plan.of(norm="post-validate"), 2), '"post-validate"'),
        (Plan.of(offload="optimizer"), 'offload = "optimizer"'),
        (local_training(data_parallel(Plan.of(), 1), 2, 3), "local_steps = 3"),
    ],
)
def test_plans_without_rows(plan: Plan, what: str) -> None:
    with pytest.raises(ConfigError, match=f'sparse_gradients: "rows" is not legal with .*{what}'):
        plan.replace(sparse_gradients="rows")
    assert table_gradients(plan, ADAGRAD) == plan


def test_rows_where_the_optimizer_takes_them() -> None:
    plan = data_parallel(Plan.of(), 2)
    assert table_gradients(plan, ADAGRAD).data.tables == "rows"
    assert table_gradients(plan, OptimizerChoice("adamw")) == plan
    assert table_gradients(plan, ADAGRAD, "dense") == plan
    with pytest.raises(ConfigError, match="sparse_gradients"):
        table_gradients(plan, ADAGRAD, "some")
    with pytest.raises(ConfigError, match='"rows" is not legal with optimizer "adamw" as it is.*"auto", "dense", or'):
        table_gradients(plan, OptimizerChoice("adamw"), "rows")
