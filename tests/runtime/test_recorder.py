"""What a recorder sees of a step: every instruction, once, between the stamps it was given; and nothing where there is
none.
"""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.core.instruction import Instruction, Lane, Op
from shardwise.core.layout import rank_rows
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.core.recording import RankStep
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.report.scaling import split
from shardwise.runtime import recorder as module
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.engine import Engine
from shardwise.runtime.recorder import Recorder
from shardwise.runtime.threads import run_ranks
from zoo import Blocks

ROWS = 12


def compiled(dp: int, zero: int, microbatches: int, device: str = "cpu") -> Compiled:
    torch.manual_seed(0)
    plan = data_parallel(Plan.of(microbatches=microbatches), dp, zero)
    return Compiled(
        Blocks(6), plan, {"x": torch.randn(ROWS, 6), "y": torch.randn(ROWS, 6)}, device=torch.device(device)
    )


def fields(one: Compiled, rank: int) -> dict[str, Tensor]:
    own = rank_rows(ROWS, one.plan.microbatches, one.plan.mesh.size, rank)
    return {k: torch.cat([v[a:b] for a, b in own]) for k, v in one.example.items()}


def steps(one: Compiled, recorded: bool) -> list[tuple[RankStep | None, dict[str, Tensor], float]]:
    """Of each rank: the second of three steps if it is recorded, the weights at the end, the last loss."""

    def rank(comm: Communicator) -> tuple[RankStep | None, dict[str, Tensor], float]:
        engine, given = Engine(one, comm, OptimizerChoice("adamw", lr=1e-2), clip_norm=1.0), fields(one, comm.rank)
        engine.step(given, ROWS)
        found = None
        if recorded:
            with Recorder(engine.interpreter) as recorder:
                engine.step(given, ROWS)
            found = recorder.found(1, 77)
        else:
            engine.step(given, ROWS)
        assert engine.interpreter.recorder is None
        loss = float(engine.step(given, ROWS).loss)
        return found, engine.state_dict(), loss

    return run_ranks(one.plan.mesh, rank, timeout=60)


@pytest.mark.parametrize(("dp", "zero", "microbatches"), [(1, 0, 1), (2, 0, 3), (2, 2, 2), (3, 3, 2)])
def test_every_instruction_is_recorded_and_the_numbers_are_the_same(dp: int, zero: int, microbatches: int) -> None:
    one = compiled(dp, zero, microbatches)
    seen, plain = steps(one, True), steps(one, False)
    program = one.programs(one.general, microbatches)[0].instructions
    for index, ((found, state, loss), (nothing, other, same)) in enumerate(zip(seen, plain, strict=True)):
        assert nothing is None and loss == same and all(torch.equal(state[n], other[n]) for n in state)
        assert found is not None and (found.step, found.rank, found.ranks, found.memory) == (1, index, dp, 77)
        assert found.pipeline == index  # no stages: each rank is a pipeline of its own
        assert [e.text for e in found.events] == [str(i) for i in program]
        assert [(e.op, e.lane, e.microbatch, e.peer) for e in found.events] == [
            (i.op, i.lane, i.microbatch, -1) for i in program
        ]
        assert [e.stage for e in found.events] == [0 if i.unit >= 0 else -1 for i in program]
        assert all(0 <= e.start <= e.stop <= found.seconds for e in found.events)
        computed = [e for e in found.events if e.lane == Lane.COMPUTE]
        assert all(before.stop <= after.start for before, after in itertools.pairwise(computed))
        waited: set[int] = set()
        for at, instruction in enumerate(program):
            for before in instruction.waits:  # it had arrived by then, and was looked after only now
                assert found.events[before].stop <= found.events[at].start
                if dp > 1 and before not in waited and program[before].lane is not Lane.COMPUTE:
                    between = [
                        e.stop
                        for e, i in zip(found.events[before:at], program[before:at], strict=True)
                        if i.lane is Lane.COMPUTE
                    ]
                    assert found.events[before].stop >= max(between, default=0.0)
                waited |= {b for b in range(before + 1) if program[b].lane is program[before].lane}
        assert waited or dp == 1
        assert RankStep.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_the_other_side_of_a_message_is_a_rank() -> None:
    one = compiled(3, 0, 1)

    def rank(comm: Communicator) -> list[int]:
        engine = Engine(one, comm, OptimizerChoice("sgd", lr=0.1))
        with Recorder(engine.interpreter, stage=lambda _: 5) as recorder:
            for at, offset in enumerate((1, -1)):
                recorder.run(
                    at, Instruction(Op.SEND, microbatch=at, peer=("dp", offset), lane=Lane.SEND), lambda _: None
                )
        found = recorder.found(0, 0)
        assert [event.stage for event in found.events] == [5, 5]
        return [event.peer for event in found.events]

    assert run_ranks(one.plan.mesh, rank, timeout=60) == [[1, 2], [2, 0], [0, 1]]


def test_stamps_are_those_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that ticks at each look, an instruction that is done at once takes one tick."""
    one = compiled(1, 0, 2)
    ticks = itertools.count(5_000_000, 1_000_000)
    monkeypatch.setattr(module.time, "perf_counter_ns", lambda: next(ticks))
    found = steps(one, True)[0][0]
    assert found is not None
    assert [(round(1e3 * e.start), round(1e3 * e.stop)) for e in found.events] == [
        (2 * i + 1, 2 * i + 2) for i in range(len(found.events))
    ]
    assert round(1e3 * found.seconds) == 2 * len(found.events) + 1


def test_without_a_recorder_nothing_is_stamped(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Any:
        raise AssertionError("a recorder is at work")

    for name in ("run", "arrived", "_stamp"):
        monkeypatch.setattr(Recorder, name, refuse)
    steps(compiled(2, 3, 2), False)
    with pytest.raises(AssertionError, match="at work"):  # of the same step with one
        steps(compiled(2, 3, 2), True)


def test_a_step_that_fails_leaves_no_recorder() -> None:
    one = compiled(1, 0, 1)
    engine = Engine(one, run_ranks(Mesh.of(dp=1), lambda comm: comm)[0], OptimizerChoice("sgd", lr=0.1))
    wrong = {"x": torch.zeros(ROWS, 6)}
    recorder = Recorder(engine.interpreter)

    def step() -> None:
        with recorder:
            assert engine.interpreter.recorder is recorder
            engine.step(wrong, ROWS)

    with pytest.raises(ConfigError, match="batch"):
        step()
    assert engine.interpreter.recorder is None


def test_operations_have_members_and_are_stamped_at_the_post_and_around_the_wait() -> None:
    """Of three ranks two exchange a message, and the last posts its part of a sum late."""
    one, late = compiled(3, 0, 1), 0.2

    def rank(comm: Communicator) -> RankStep:
        engine = Engine(one, comm, OptimizerChoice("sgd", lr=0.1))
        x = torch.ones(4)
        with Recorder(engine.interpreter) as recorder:
            message = comm.send(x, 1) if comm.rank == 0 else comm.receive(x, 0) if comm.rank == 1 else None
            if message is not None:
                message.wait()
            else:
                time.sleep(late)
            handle = comm.all_reduce(x, "dp", lane="reduce")
            handle.wait()
            handle.wait()  # again: it stays as it was
            comm.all_reduce(x, "tp")  # among one rank: nothing to record
        comm.all_reduce(x, "dp").wait()
        assert comm.recorder is None
        return recorder.found(0, 0)

    found = run_ranks(one.plan.mesh, rank, timeout=60)
    told = [[(o.kind, o.ranks, o.queue) for o in f.operations] for f in found]
    total = ("all_reduce", (0, 1, 2), "reduce")
    assert told == [
        [("send", (0, 1), "message tensors"), total],
        [("receive", (0, 1), "message tensors"), total],
        [total],
    ]
    for f in found:
        assert all(0 <= o.posted <= o.waited <= o.arrived <= f.seconds for o in f.operations)
        assert RankStep.from_dict(json.loads(json.dumps(f.to_dict()))) == f
    waits = [f.operations[-1].arrived - f.operations[-1].waited for f in found]
    assert min(waits[:2]) > late / 2 > waits[2]
    # Of three ranks two wait for the last, which does what is no instruction.
    seconds, shares = split(found)
    assert shares["waiting"] * 3 * seconds > 2 * late / 2 and shares["other"] * 3 * seconds >= late * 0.9


@pytest.mark.parametrize(("dp", "zero", "microbatches"), [(2, 0, 1), (2, 3, 2)])
def test_the_split_of_a_recorded_step(dp: int, zero: int, microbatches: int) -> None:
    found = [step for step, _, _ in steps(compiled(dp, zero, microbatches), True) if step is not None]
    seconds, shares = split(found)
    assert seconds >= max(one.seconds for one in found) and sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) >= -1e-6 and shares["computing"] > 0 and shares["exposed"] + shares["waiting"] > 0
    assert all(one.moved >= 0 and one.operations for one in found)
    for one in found:  # a collective that an instruction has posted arrives when the instruction does
        arrived = {round(o.arrived, 3) for o in one.operations}
        assert {round(e.stop, 3) for e in one.events if e.lane in (Lane.REDUCE, Lane.GATHER)} & arrived
