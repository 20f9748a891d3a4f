"""Communicators whose first use blocks the host, as NCCL's do: which a run needs, that they suffice, and what hangs
without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from covering import covering
from shardwise.core.check import ProgramError, check
from shardwise.core.communicators import CONTROL, Members, communicators, groups
from shardwise.core.errors import ConfigError
from shardwise.core.instruction import CHANNELS
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.core.schedules import SCHEDULES
from shardwise.lower.compiled import Compiled
from shardwise.models import GPT, Llama
from shardwise.parallel.data import batch_axes, data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime.call import CommunicationError, CommunicationTimeout
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import ThreadCommunicator, run_ranks

ROWS, RANKS = 8, 2
MODELS = {"tied gpt": GPT, "llama": Llama}
SHARDING = ("zero 0", "zero 1", "zero 2", "zero 3", "tp")
Case = tuple[str, str, int, str]


@cache
def captured(model: str, tp: bool) -> Compiled:
    """Under a plan of one rank, or of two that share out tensors; captures serve all plans."""
    torch.manual_seed(0)
    module: nn.Module = MODELS[model](vocabulary=32, width=16, layers=4, heads=2, context=4)
    return Compiled(module, tensor_parallel(Plan.of(), 2, "1d") if tp else Plan.of(), batch())


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 32, (ROWS, 4), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def plan_of(schedule: str, microbatches: int, sharding: str, stages: int = RANKS) -> Plan:
    plan = Plan.of(microbatches=microbatches, prefetch=1)
    plan = tensor_parallel(plan, 2, "1d") if sharding == "tp" else data_parallel(plan, 2, int(sharding[-1]))
    return pipeline(plan, stages, schedule)


def compiled(case: Case) -> Compiled:
    schedule, model, microbatches, sharding = case
    return captured(model, sharding == "tp").under(plan_of(schedule, microbatches, sharding))


def cases() -> Iterator[Case]:
    """All that a plan may be."""
    for schedule in SCHEDULES:
        for model in MODELS:
            for microbatches in (1, 2, 4):
                for sharding in SHARDING:
                    try:
                        plan_of(schedule, microbatches, sharding)
                    except ConfigError:
                        continue
                    if not (
                        schedule == "pipedream" and model == "tied gpt"
                    ):  # whose stages do not wait for each other's gradients
                        yield schedule, model, microbatches, sharding


CHOSEN = set(covering(list(cases())))


def used(comm: Communicator, one: Compiled) -> float:
    """A step, a window of steps where they overlap, an evaluation, and the state."""
    engine = Engine(one, comm, OptimizerChoice("sgd", lr=0.1))
    axes = batch_axes(one.plan.mesh)
    index, parts = comm.mesh.index(comm.rank, axes), comm.mesh.axis_size(axes)
    size = ROWS // one.plan.microbatches
    rows = [
        r
        for m in range(one.plan.microbatches)
        for r in range(m * size + index * size // parts, m * size + (index + 1) * size // parts)
    ]
    mine = {name: value[rows] for name, value in batch().items()}
    loss = float(engine.step(mine, ROWS).loss)
    if one.plan.overlaps:
        list(engine.steps(iter([(mine, ROWS, False)] * 3), 3))
    engine.evaluate(mine, ROWS)
    engine.state_dict()
    comm.barrier()
    return loss


@pytest.mark.slow
@pytest.mark.few(12)
@pytest.mark.parametrize(
    "case", [one if one in CHOSEN else pytest.param(one, marks=pytest.mark.full) for one in cases()], ids=str
)
def test_every_plan_runs_where_first_uses_block(case: Case) -> None:
    one = compiled(case)
    losses = run_ranks(one.plan.mesh, lambda comm: used(comm, one), timeout=20, first_use_blocks=True)
    assert len(set(losses)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "model", "sharding"),
    [("interleaved", "tied gpt", "zero 3"), ("zb-h1", "tied gpt", "tp"), ("1f1b", "llama", "zero 1")],
)
def test_three_stages_run_where_first_uses_block(schedule: str, model: str, sharding: str) -> None:
    one = captured(model, sharding == "tp").under(plan_of(schedule, 4, sharding, stages=3))
    assert len(set(run_ranks(one.plan.mesh, lambda comm: used(comm, one), timeout=20, first_use_blocks=True))) == 1


def test_groups_of_replicas_run_where_first_uses_block() -> None:
    plan = pipeline(data_parallel(Plan.of(microbatches=2, prefetch=1), 4, 3, 2), RANKS, "1f1b")
    one = captured("tied gpt", False).under(plan)
    assert len(set(run_ranks(plan.mesh, lambda comm: used(comm, one), timeout=20, first_use_blocks=True))) == 1


def test_what_the_product_leaves_out_is_refused() -> None:
    one = compiled(("pipedream", "tied gpt", 1, "zero 0"))
    with pytest.raises(
        ConfigError, match=r'"pipedream" updates each stage for itself, but \S+ is used by stages 0 and 1'
    ):
        one.programs(one.general, 1)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("schedule", "model", "microbatches"), [("1f1b", "tied gpt", 4), ("1f1b", "llama", 1), ("gpipe", "tied gpt", 4)]
)
def test_without_preparing_it_is_stuck(
    schedule: str, model: str, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On threads, and before: the check names the instructions in whose start of a communicator it ends."""
    one = compiled((schedule, model, microbatches, "zero 0"))
    programs = one.programs(one.general, microbatches)
    check(programs, one.plan.mesh)
    check(programs, one.plan.mesh, communicators(programs, one.plan.mesh))
    with pytest.raises(
        ProgramError, match=r"(?s)deadlock.*(SEND|RECEIVE).*starts its communicator, in which its host waits"
    ):
        check(programs, one.plan.mesh, ())
    monkeypatch.setattr(Communicator, "prepare", lambda self, wanted: None)
    with pytest.raises(CommunicationTimeout):
        run_ranks(one.plan.mesh, lambda comm: used(comm, one), timeout=1.0, first_use_blocks=True)
    run_ranks(one.plan.mesh, lambda comm: used(comm, one), timeout=20)  # where it does not block nothing is needed


def test_what_is_derived_is_exactly_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step with tensor parallelism within two stages, tied weights and ZeRO-3: nothing in excess, in one order on
    all ranks.
    """
    plan = pipeline(tensor_parallel(data_parallel(Plan.of(microbatches=2), 2, 3), 2, "1d"), 2, "1f1b")
    one = captured("tied gpt", True).under(plan)
    derived = one.communicators([one.general] * 2)
    assert len(set(derived)) == len(derived)
    seen: set[Members] = set()
    before = ThreadCommunicator._post

    def noted(self: ThreadCommunicator, call, *args, **options):  # type: ignore[no-untyped-def]
        seen.add(call.members)
        return before(self, call, *args, **options)

    monkeypatch.setattr(ThreadCommunicator, "_post", noted)

    def step(comm: Communicator) -> None:
        engine = Engine(one, comm, OptimizerChoice("sgd", lr=0.1))
        rows = slice(4 * comm.mesh.index(comm.rank, "dp"), 4 * comm.mesh.index(comm.rank, "dp") + 4)
        engine.step({name: value[rows] for name, value in batch().items()}, ROWS)

    run_ranks(plan.mesh, step, timeout=30)
    assert {each for each in seen if each.lane != CONTROL} == set(derived)


@pytest.mark.slow
def test_neighbours_in_the_order_have_few_ranks_in_common() -> None:
    """Of a pipeline of five ranks all pairs one way are started in two turns."""
    one = captured("llama", False).under(pipeline(Plan.of(microbatches=4), 5, "1f1b", stages=(2, 1, 1, 1, 1)))
    found = [each for each in communicators(one.programs(one.general, 4), one.plan.mesh) if each.pair]
    assert len(found) == 8
    turns: list[set[int]] = [set()]
    for each in found:
        if turns[-1] & set(each.ranks):
            turns.append(set())
        turns[-1] |= set(each.ranks)
    assert len(turns) <= 5


def test_groups() -> None:
    mesh = Mesh.of(pp=2, dp=3)
    assert groups(mesh, "dp", "x") == [Members((0, 1, 2), "x"), Members((3, 4, 5), "x")]
    assert groups(mesh, ("pp",), "x", [4]) == [Members((1, 4), "x")]
    assert groups(mesh, "tp", "x") == []
    assert groups(mesh, mesh.names, "x") == [Members(tuple(range(6)), "x")]


def test_the_start_that_hangs_is_named() -> None:
    def rank(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send(torch.zeros(3), 1, channel=CHANNELS[1])
        else:
            comm.all_reduce(torch.zeros(3), "pp", lane="reduce")

    with pytest.raises(
        CommunicationError, match=r"stuck in the start of its communicator \((messages of gradients|collectives among)"
    ):
        run_ranks(Mesh.of(pp=2), rank, timeout=0.5, first_use_blocks=True)


def test_ranks_that_prepare_different_things_are_told() -> None:
    def rank(comm: Communicator) -> None:
        comm.prepare(groups(comm.mesh, "dp", f"lane {comm.rank}"))

    with pytest.raises(CommunicationError, match="prepare of 1 communicators"):
        run_ranks(Mesh.of(dp=2), rank, timeout=5)
