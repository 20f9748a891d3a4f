"""The whole state, collected a bucket at a time: the right values, on the ranks that want them, in little memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shardwise import OptimizerChoice, Plan
from shardwise.checkpoint.container import write_as_they_come
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.layout import rank_rows
from shardwise.core.mesh import Mesh
from shardwise.launch.results import save_weights
from shardwise.lower.compiled import Compiled
from shardwise.measure.storage_tracker import StorageTracker
from shardwise.models import GPT, Llama
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime import collect
from shardwise.runtime.alone import AloneCommunicator
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import run_ranks
from shardwise.runtime.whole_state import first_names
from shardwise.train.trainer import Trainer
from zoo import Blocks

BASE = Plan.of(microbatches=2)
PLANS: dict[str, Callable[[], Plan]] = {
    "one": lambda: BASE,
    "dp": lambda: data_parallel(BASE, 2),
    "zero1": lambda: data_parallel(BASE, 3, zero=1),
    "zero3": lambda: data_parallel(BASE, 3, zero=3),
    "hybrid": lambda: data_parallel(BASE, 4, zero=3, replicas=2),
    "offload": lambda: data_parallel(BASE.replace(offload="optimizer"), 2, zero=2),
    "tp": lambda: tensor_parallel(BASE, 3, "1d"),
    "pp": lambda: pipeline(BASE, 2, "1f1b"),
    "all": lambda: tensor_parallel(
        pipeline(data_parallel(BASE.replace(precision="bf16"), 2, zero=3), 2, "1f1b"), 2, "1d-sp"
    ),
}
ADAM = OptimizerChoice("adamw", lr=1e-2)


def compiled(plan: Plan, layers: int = 2, model: type[GPT] | type[Llama] = GPT) -> Compiled:
    torch.manual_seed(0)
    module = model(vocabulary=31, width=24, layers=layers, heads=6, context=8)
    ids = torch.randint(0, 31, (6, 8))
    return Compiled(module, plan, {"input_ids": ids, "labels": ids})


@pytest.mark.slow
@pytest.mark.few(9)
@pytest.mark.parametrize("chunk", [collect.CHUNK, 4000])
@pytest.mark.parametrize("name", PLANS)
def test_one_rank_gets_what_all_would(name: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "CHUNK", chunk)
    plan = PLANS[name]()
    made = compiled(plan)
    last = plan.mesh.size - 1

    def rank(comm: Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        engine = Engine(made, comm, ADAM)
        rows = made.example["input_ids"].shape[0]
        parts, at = plan.mesh.axis_size(("dp_replicate", "dp")), plan.mesh.index(comm.rank, ("dp_replicate", "dp"))
        own = [i for a, b in rank_rows(rows, plan.microbatches, parts, at) for i in range(a, b)]
        engine.step({key: value[own] for key, value in made.example.items()}, rows)
        save_weights(engine.whole, tmp_path / "w.safetensors")
        return engine.state_dict(), engine.state_dict(rank=last)

    found = run_ranks(plan.mesh, rank)
    truth = found[0][0]
    own = made.module.state_dict()
    assert list(truth) == list(own) and all(truth[key].shape == own[key].shape for key in own)
    assert any((truth[key] != own[key]).any() for key in own)  # it has been trained
    for number, (every, mine) in enumerate(found):
        assert all(torch.equal(every[key], truth[key]) for key in truth)
        assert set(mine) == (set(truth) if number == last else set())
    assert all(torch.equal(found[last][1][key], truth[key]) for key in truth)
    written = load_file(tmp_path / "w.safetensors")
    assert set(written) == {name for name in truth if first_names(made.module)[name] == name} != set(truth)
    assert all(torch.equal(value, truth[key]) for key, value in written.items())


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", PLANS)
def test_ranks_hold_a_chunk_and_the_one_that_keeps_a_bucket_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PLANS[name]()
    made = compiled(plan, layers=12, model=Llama)
    mesh, rank = plan.mesh, plan.mesh.size - 1
    engine = Engine(made, AloneCommunicator(mesh, rank, torch.device("cpu")), ADAM)
    sizes = {b.index: b.numel * (b.wide if b.learns else b.dtype).itemsize for b in made.general.buckets}
    layouts = {b.index: [b.layout(ADAM, mesh, r) for r in mesh.group(rank, b.axes)] for b in made.general.buckets}
    # All that have a part of a bucket give as much as the one that has the most.
    padded = {
        b.index: len(layouts[b.index]) * max(one.numel for one in layouts[b.index]) * b.wide.itemsize
        for b in made.general.buckets
    }
    largest, most, whole = max(sizes.values()), max(padded.values()), sum(sizes.values())
    assert 4 * most < whole
    with StorageTracker("cpu") as tracker:
        for chunk in (collect.CHUNK, 8000):
            monkeypatch.setattr(collect, "CHUNK", chunk)
            bound, before = min(most, chunk), tracker.mark()
            for _ in engine.whole.collect(rank=mesh.size):  # of which this rank keeps nothing
                raise AssertionError("it was given something")
            assert tracker.peak - before <= bound
            if mesh.size > 1 and name != "dp":
                assert tracker.peak > before
            assert engine.state_dict(rank=mesh.size) == {}
            assert tracker.peak - before <= bound
            tracker.mark()
            for _, value in engine.whole.collect():
                del value
            assert largest <= tracker.peak - before <= largest + bound
            assert tracker.current == before
            tracker.mark()
            kept = engine.state_dict()
            assert (
                whole
                <= tracker.peak - before
                <= whole + bound + sum(one.nbytes for one in engine.memory.buffers.values())
            )
            del kept


def test_a_full_disk_takes_all_values_and_is_told(tmp_path: Path) -> None:
    taken = []

    def values() -> Iterator[tuple[str, Tensor]]:
        for name in "abc":
            taken.append(name)
            yield name, torch.zeros(3)

    described = [(name, (3,), torch.float32) for name in "ab"]
    with pytest.raises(OSError):
        write_as_they_come(tmp_path / "no folder" / "w", described, values(), {})
    assert taken == ["a", "b", "c"]
    write_as_they_come(tmp_path / "w", described, values(), {"format": "pt"})
    assert {key: value.tolist() for key, value in load_file(tmp_path / "w").items()} == {"a": [0.0] * 3, "b": [0.0] * 3}
    with pytest.raises(ShardwiseError, match="no values for d"):
        write_as_they_come(tmp_path / "w", [*described, ("d", (3,), torch.float32)], values(), {})
    for wrong, words in ((("a", (4,), torch.float32), "it was to be"), (("a", (3,), torch.complex128), "cannot hold")):
        taken.clear()
        with pytest.raises(ShardwiseError, match=words):
            write_as_they_come(tmp_path / "w", [wrong], values(), {})
        assert taken == ["a", "b", "c"]


@pytest.mark.slow
def test_no_rank_waits_for_one_that_cannot_write_a_dtype(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = GPT(vocabulary=31, width=24, layers=2, heads=6, context=8)
    module.register_buffer("odd", torch.zeros(2, dtype=torch.complex128))
    ids = torch.randint(0, 31, (6, 8))
    made = Compiled(module, PLANS["zero3"](), {"input_ids": ids, "labels": ids})

    def rank(comm: Communicator) -> str:
        engine, said = Engine(made, comm, ADAM), ""
        try:
            save_weights(engine.whole, tmp_path / "w.safetensors")
        except ShardwiseError as error:
            said = str(error)
        comm.barrier(what="the weights")
        return said

    first, *others = run_ranks(made.plan.mesh, rank, timeout=20.0)
    assert "cannot hold torch.complex128" in first and others == ["", ""]


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("name", PLANS)
def test_the_end_of_a_run_takes_no_more_than_its_steps(name: str) -> None:
    """Also on the rank that is given the tensors, one after the other, as those are that go into a file."""
    plan = PLANS[name]()
    made = compiled(plan, layers=12, model=Llama)
    comm = AloneCommunicator(plan.mesh, plan.mesh.size - 1, torch.device("cpu"))
    parts, at = plan.mesh.axis_size(("dp_replicate", "dp")), plan.mesh.index(comm.rank, ("dp_replicate", "dp"))
    rows = [i for a, b in rank_rows(12, plan.microbatches, parts, at) for i in range(a, b)]
    given = {key: value.repeat(2, 1)[rows] for key, value in made.example.items()}
    with StorageTracker("cpu") as tracker:
        engine = Engine(made, comm, ADAM)
        engine.step(given, 12)  # makes the states of the optimizer
        tracker.mark()
        engine.step(given, 12)
        step, between = tracker.peak, tracker.current
        assert step > between
        tracker.mark()
        for _, value in engine.whole.collect():
            del value
        assert between < tracker.peak <= step


@pytest.mark.slow
def test_a_trainer_keeps_nothing_of_the_module_that_it_was_given() -> None:
    """Its memory is for gradients and optimizer state; names of tied tensors are known all the same."""
    module = GPT(vocabulary=31, width=24, layers=1, heads=6, context=8)
    ids = torch.randint(0, 31, (6, 8))
    alone = AloneCommunicator(Mesh.of(dp=1), 0, torch.device("cpu"))
    trainer = Trainer(module, ADAM, Plan.of(), {"input_ids": ids, "labels": ids}, comm=alone)
    left = [weakref.ref(parameter) for parameter in module.parameters()]
    names = list(module.state_dict())
    del module
    gc.collect()
    assert not any(one() is not None for one in left)
    assert list(trainer.state_dict()) == names


class Extra(Blocks):
    """A module whose state has more than tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 0}


def test_a_state_that_cannot_be_collected_is_refused_before_training() -> None:
    made = Compiled(Extra(5), Plan.of(), {name: torch.randn(4, 5) for name in "xy"})
    with pytest.raises(ConfigError, match='model: its state has "_extra_state", which is no parameter or buffer'):
        Engine(made, AloneCommunicator(Mesh.of(dp=1), 0, torch.device("cpu")), ADAM)
