"""k steps, a checkpoint, and the rest on any number of ranks: the same weights as without an interruption."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.checkpoint import Checkpoint, latest
from shardwise.core.errors import ConfigError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.parameter_groups import ParameterGroup
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.models import GPT
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.train.checkpoints import Checkpoints
from shardwise.train.trainer import Trainer

STEPS = 6
BATCH = 5
State = dict[str, Tensor]


class Rows:
    """Seventeen rows of tokens: with batches of five an epoch ends unevenly after the fourth."""

    def __init__(self, size: int = 17, length: int = 6) -> None:
        self.tokens = torch.randint(0, 11, (size, length + 1), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}


class Normed(nn.Module):
    """Running statistics, a buffer outside the state dict, and parameters: a frozen, an unread and a 0-d one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.unread = nn.Parameter(torch.randn(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        self.seen.add_(1)
        hidden = self.norm(self.embed(input_ids)) * self.scale + self.frozen + self.seen
        return nn.functional.cross_entropy((hidden @ self.embed.weight.T).flatten(0, 1), labels.flatten())


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocabulary=11, width=8, layers=2, heads=2, context=6, dropout=0.2)


def normed() -> nn.Module:
    torch.manual_seed(1)
    return Normed()


class Chain(nn.Module):
    """Blocks that each keep running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(3)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy((hidden @ self.embed.weight.T).flatten(0, 1), labels.flatten())


def chain() -> nn.Module:
    torch.manual_seed(2)
    return Chain()


MODELS = {"gpt": gpt, "normed": normed, "chain": chain}
COMPILED: dict[tuple[Any, ...], Compiled] = {}


def compiled(
    model: str,
    ranks: int,
    precision: str,
    zero: int = 0,
    schedule: str = "1f1b",
    pp: int = 1,
    tp: int = 1,
    tensor: Any = "1d",
) -> Compiled:
    key = (model, ranks, precision, zero, schedule, pp, tp, tensor)
    if key not in COMPILED:
        batch = {name: torch.stack([Rows()[i][name] for i in range(2)]) for name in ("input_ids", "labels")}
        module = MODELS[model]().double() if precision == "fp64" else MODELS[model]()
        replicas = 2 if ranks == 4 and zero else 1
        plan = tensor_parallel(Plan.of(precision=precision), tp, tensor)
        plan = data_parallel(plan, ranks, zero, replicas)
        COMPILED[key] = Compiled(module, pipeline(plan, pp, schedule), batch)
    return COMPILED[key]


def run(
    folder: Path, ranks: int, stop: int, *, model: str = "gpt", precision: str = "fp64", name: str = "adamw",
    rows: int = 17,
    save: bool = True, zero: int = 0, schedule: str = "1f1b", pp: int = 1, tp: int = 1, tensor: str = "1d",
    **options: Any,
) -> tuple[State, list[list[int]]]:  # fmt: skip
    """Go on from the folder's checkpoint to step ``stop`` and save; the state, and each batch's place in the data."""
    made = compiled(model, ranks, precision, zero, schedule, pp, tp, tensor)

    def rank(comm: ThreadCommunicator) -> tuple[State, list[list[int]]]:
        schedule = {"schedule": "cosine", "warmup_steps": 2, "total_steps": STEPS}
        choice = OptimizerChoice(**{"name": name, "lr": 1e-2, **schedule, **OPTIONS.get(name, {})})
        trainer = Trainer(made, choice, made.plan, {}, clip_norm=0.5, seed=3, comm=comm)
        positions = []
        with trainer.loader(Rows(rows), BATCH) as loader, Checkpoints(trainer, folder, **options) as checkpoints:
            checkpoints.restore(loader)
            while trainer.engine.step_index < stop:
                positions.append(list(loader.state))
                trainer.step(next(loader))
            if save:
                checkpoints.save(loader)
        state = trainer.state_dict() | {
            f"buffer {n}": b for n, b in trainer.engine.whole.collect() if n in trainer.engine.memory.buffers
        }
        return state, positions

    return run_ranks(made.plan.mesh, rank, timeout=60)[0]


OPTIONS: dict[str, dict[str, Any]] = {
    "muon": {"beside": (("eps", 1e-4),)}, "adafactor": {"eps": (1e-4, 1e-3)}, "lamb": {"eps": 1e-4},
    "shampoo": {"eps": 1e-2},
    "some with momentum": {"name": "sgd", "momentum": 0.9, "nesterov": True, "groups": (
        ParameterGroup.of("blocks.0.*", momentum=0.0), ParameterGroup.of("*bias", nesterov=False, dampening=0.3))},
    "some with amsgrad": {"name": "adamw", "groups": (ParameterGroup.of(["blocks.1.*", "*norm*"], amsgrad=True),)},
}  # fmt: skip


def worst(ours: State, truth: State) -> float:
    errors = [
        float((ours[n].double() - truth[n].double()).norm() / truth[n].double().norm().clamp(min=1e-30)) for n in truth
    ]
    assert ours.keys() == truth.keys() and all(map(math.isfinite, errors))
    return max(errors)


PIPELINES: list[dict[str, Any]] = [
    {"ranks": 1}, {"ranks": 1, "pp": 2}, {"ranks": 2, "pp": 2, "zero": 3, "schedule": "zb-h1"},
    {"ranks": 1, "pp": 2, "schedule": "zbv"}, {"ranks": 2, "pp": 3, "zero": 1}, {"ranks": 3, "zero": 2},
]  # fmt: skip


LAYERS: list[dict[str, Any]] = [
    {"ranks": 1}, {"ranks": 1, "tp": 2}, {"ranks": 2, "tp": 3, "zero": 3, "tensor": "1d-sp"},
    {"ranks": 1, "tp": 4, "tensor": "1d-sp"}, {"ranks": 2, "tp": 2, "pp": 2, "zero": 1},
    {"ranks": 1, "tp": 4, "tensor": "2d"}, {"ranks": 1, "tp": 8, "tensor": "2.5d"},
    {"ranks": 2, "tp": 8, "tensor": "3d", "zero": 3},
]  # fmt: skip


@pytest.mark.quick(1)
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        (model, before, after)
        for model in MODELS
        for before, after in ((0, 1), (1, 0), (1, 2), (2, 3), (3, 4), (4, 0), (2, 2))
        if model != "normed" or 4 not in (before, after)  # which is one unit
    ]
    + [("gpt", 5, 1)]
    + [
        pytest.param(model, before, after, marks=pytest.mark.full)
        for model in MODELS
        for before, after in ((1, 5), (5, 2), (5, 0), (6, 1), (0, 6), (7, 0), (3, 7), (7, 5), (6, 7), (7, 7))
    ],
)
def test_checkpoints_go_between_ranks_that_share_layers(tmp_path: Path, model: str, before: int, after: int) -> None:
    truth, places = run(tmp_path / "whole", 1, STEPS, model=model)
    _, first = run(tmp_path / "parts", stop=3, model=model, **LAYERS[before])
    state, rest = run(tmp_path / "parts", stop=STEPS, model=model, **LAYERS[after])
    assert first + rest == places
    assert worst(state, truth) <= 1e-12


@pytest.mark.few(3)
@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3), (2, 2)])
def test_checkpoints_go_from_pipeline_to_pipeline(tmp_path: Path, before: int, after: int) -> None:
    truth, places = run(tmp_path / "whole", 1, STEPS)
    _, first = run(tmp_path / "parts", stop=3, **PIPELINES[before])
    state, rest = run(tmp_path / "parts", stop=STEPS, **PIPELINES[after])
    assert first + rest == places
    assert worst(state, truth) <= 1e-12


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("muon", 2, 5), ("muon", 5, 0), ("adafactor", 4, 2), ("lamb", 0, 2), ("lamb", 3, 5), ("shampoo", 5, 4)],
)
def test_state_of_whole_tensors_goes_from_plan_to_plan(tmp_path: Path, name: str, before: int, after: int) -> None:
    truth, _ = run(tmp_path / "whole", 1, STEPS, name=name)
    run(tmp_path / "parts", stop=3, name=name, **PIPELINES[before])
    state, _ = run(tmp_path / "parts", stop=STEPS, name=name, **PIPELINES[after])
    assert worst(state, truth) <= 1e-11
    run(tmp_path / "sharded", stop=3, name=name, **LAYERS[before])
    state, _ = run(tmp_path / "sharded", stop=STEPS, name=name, **LAYERS[after])
    assert worst(state, truth) <= 1e-11


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [(name, *pair) for name in ("some with momentum", "some with amsgrad") for pair in ((5, 2), (2, 0), (4, 1))],
)
def test_state_that_some_parameters_have_goes_from_plan_to_plan(
    tmp_path: Path, name: str, before: int, after: int
) -> None:
    truth, _ = run(tmp_path / "whole", 1, STEPS, name=name)
    run(tmp_path / "parts", stop=3, name=name, **PIPELINES[before])
    state, _ = run(tmp_path / "parts", stop=STEPS, name=name, **PIPELINES[after])
    assert worst(state, truth) <= 1e-12
    run(tmp_path / "sharded", stop=3, name=name, **LAYERS[before])
    state, _ = run(tmp_path / "sharded", stop=STEPS, name=name, **LAYERS[after])
    assert worst(state, truth) <= 1e-12


@pytest.mark.slow
def test_buffers_are_those_of_the_stage_that_writes_them(tmp_path: Path) -> None:
    truth, _ = run(tmp_path / "whole", 1, STEPS, model="chain")
    run(tmp_path / "parts", 2, 3, model="chain", pp=3)
    state, _ = run(tmp_path / "parts", 1, STEPS, model="chain", pp=2)
    assert worst(state, truth) <= 1e-12


PAIRS = random.Random(7).sample(list(itertools.product(range(1, STEPS), (1, 2, 3), (1, 2, 3, 4))), 20)


@pytest.mark.few(9)
@pytest.mark.parametrize(("k", "before", "after"), PAIRS)
def test_going_on_is_as_if_nothing_had_happened(tmp_path: Path, k: int, before: int, after: int) -> None:
    model = "normed" if k % 2 else "gpt"
    name = ("adamw", "nadam", "sgd")[k % 3]
    truth, places = run(tmp_path / "whole", before, STEPS, model=model, name=name)
    _, first = run(tmp_path / "parts", before, k, model=model, name=name)
    state, rest = run(tmp_path / "parts", after, STEPS, model=model, name=name)
    assert first + rest == places
    if before == after:
        assert all(torch.equal(state[n], truth[n]) for n in truth)
    assert worst(state, truth) <= 1e-12


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("before", "after"),
    [((3, 3), (2, 0)), ((2, 0), (4, 3)), ((4, 1), (3, 2)), ((3, 2), (1, 0)), ((1, 0), (3, 1)), ((4, 3), (2, 3))],
)
@pytest.mark.parametrize("model", ["gpt", "normed"])
def test_checkpoints_move_between_stages_and_numbers_of_ranks(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int], model: str
) -> None:
    """(ranks, stage of ZeRO); four ranks shard in two groups."""
    truth, _ = run(tmp_path / "whole", 1, STEPS, model=model)
    run(tmp_path / "parts", before[0], 3, model=model, zero=before[1])
    state, _ = run(tmp_path / "parts", after[0], STEPS, model=model, zero=after[1])
    assert worst(state, truth) <= 1e-12


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(("zero", "precision"), [(1, "bf16"), (2, "fp16"), (3, "bf16"), (3, "fp16")])
def test_bit_equal_in_low_precision_under_every_stage(tmp_path: Path, zero: int, precision: str) -> None:
    """The fp32 masters are what is saved, and the loss scale."""
    truth, _ = run(tmp_path / "whole", 3, STEPS, precision=precision, zero=zero)
    run(tmp_path / "parts", 3, 3, precision=precision, zero=zero)
    state, _ = run(tmp_path / "parts", 3, STEPS, precision=precision, zero=zero)
    assert all(torch.equal(state[n], truth[n]) for n in truth)


@pytest.mark.slow
def test_bit_equal_in_bf16(tmp_path: Path) -> None:
    """The fp32 masters are what is saved, not the bf16 copies."""
    truth, _ = run(tmp_path / "whole", 2, STEPS, precision="bf16")
    run(tmp_path / "parts", 2, 3, precision="bf16")
    state, _ = run(tmp_path / "parts", 2, STEPS, precision="bf16")
    assert all(torch.equal(state[n], truth[n]) for n in truth)
    assert (
        Checkpoint.open(latest(tmp_path / "parts")).tensors["model.blocks.0.attention.qkv.weight"].dtype
        == torch.float32
    )  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_run_in_fp16_goes_on_from_one_in_fp32_and_back(tmp_path: Path) -> None:
    run(tmp_path, 2, 1, precision="fp32")
    run(tmp_path, 2, 2, precision="fp16", zero=3)
    assert "loss_scale.scale" in Checkpoint.open(latest(tmp_path)).tensors  # type: ignore[arg-type]
    run(tmp_path, 1, 3, precision="fp32")


@pytest.mark.slow
def test_other_precision(tmp_path: Path) -> None:
    run(tmp_path, 2, 2, precision="fp64")
    wide, _ = run(tmp_path, 2, 2, precision="fp64")
    narrow, _ = run(tmp_path, 1, 2, precision="fp32", save=False)
    assert all(torch.equal(narrow[n], wide[n].to(narrow[n].dtype)) for n in wide)


def test_without_optimizer_state_it_would_differ(tmp_path: Path) -> None:
    """A control: the parity above is no matter of course."""
    truth, _ = run(tmp_path / "whole", 1, STEPS)
    run(tmp_path / "parts", 1, 3)
    made = compiled("gpt", 1, "fp64")

    def rank(comm: ThreadCommunicator) -> State:
        choice = OptimizerChoice("adamw", lr=1e-2, schedule="cosine", warmup_steps=2, total_steps=STEPS)
        trainer = Trainer(made, choice, made.plan, {}, clip_norm=0.5, seed=3, comm=comm)
        with trainer.loader(Rows(), BATCH) as loader, Checkpoints(trainer, tmp_path / "parts") as checkpoints:
            checkpoints.restore(loader)
            for memory in trainer.engine.memory.buckets.values():
                for update in memory.updates:
                    for _, state in update.optimizer.states():
                        state["exp_avg"].zero_()
            while trainer.engine.step_index < STEPS:
                trainer.step(next(loader))
        return trainer.state_dict()

    state = run_ranks(made.plan.mesh, rank, timeout=60)[0]
    assert worst(state, {n: truth[n] for n in state}) > 1e-6


def test_refused(tmp_path: Path) -> None:
    run(tmp_path, 2, 2)
    path = str(latest(tmp_path))
    with pytest.raises(ConfigError, match="optimizer"):
        run(tmp_path, 1, 3, name="adagrad")
    with pytest.raises(ConfigError, match=path):
        run(tmp_path, 1, 3, model="normed")
    with pytest.raises(ConfigError, match="data"):
        run(tmp_path, 1, 3, rows=18)
    damaged = Path(path) / "rank_00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with pytest.raises(ConfigError, match=str(damaged)):
        run(tmp_path, 2, 3)


def test_a_stop_is_agreed_upon() -> None:
    """Ranks are asked in different steps; all see it in the same one."""
    made = compiled("gpt", 3, "fp64")

    def rank(comm: ThreadCommunicator) -> int:
        trainer = Trainer(made, OptimizerChoice("sgd", lr=1e-2), made.plan, {}, comm=comm)
        with trainer.loader(Rows(), BATCH) as loader:
            while not trainer.stopping:
                if trainer.engine.step_index == 2 + comm.rank:
                    trainer.request_stop()
                trainer.step(next(loader))
        return trainer.engine.step_index

    assert run_ranks(made.plan.mesh, rank, timeout=60) == [3, 3, 3]


def test_a_parameter_without_elements_is_kept(tmp_path: Path) -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.none = nn.Embedding(11, 5), nn.Parameter(torch.zeros(0, 3))

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            logits = self.embed(input_ids) @ self.embed.weight.T
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + self.none.sum()

    MODELS["empty"] = Empty
    run(tmp_path, 3, 2, model="empty")
    assert Checkpoint.open(latest(tmp_path)).tensors["model.none"].shape == (0, 3)  # type: ignore[arg-type]
    run(tmp_path, 2, 3, model="empty")


def test_saving_again_after_going_back(tmp_path: Path) -> None:
    made = compiled("gpt", 1, "fp64")

    def rank(comm: ThreadCommunicator) -> State:
        trainer = Trainer(made, OptimizerChoice("sgd", lr=1e-1), made.plan, {}, seed=3, comm=comm)
        with trainer.loader(Rows(), BATCH) as loader, Checkpoints(trainer, tmp_path) as checkpoints:
            for step in range(4):
                trainer.step(next(loader))
                if step % 2:
                    checkpoints.save(loader)
            checkpoints.wait()
            checkpoints.restore(loader, tmp_path / "step_00000002")
            loader.state = (3, 0)  # other batches
            for _ in range(2):
                trainer.step(next(loader))
            checkpoints.save(loader)
        return trainer.state_dict()

    state = run_ranks(made.plan.mesh, rank, timeout=60)[0]
    saved = Checkpoint.open(latest(tmp_path))  # type: ignore[arg-type]
    values = {f"model.{name}": value for name, value in state.items()}
    assert saved.step == 4 and all(
        torch.equal(saved.read(n), values[n]) for n in saved.tensors if n.startswith("model.")
    )
