"""Starting without a module in memory: the same state, and never more than one parameter beside the engine."""

from __future__ import annotations

import copy
import gc
import json
import os
import re
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import shardwise
import zoo
from loading import load_weights
from shardwise import OptimizerChoice, Trainer, Values, record
from shardwise.checkpoint.weights import fit_weights
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.layout import Box
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.initial.initial import Recorded
from shardwise.lower.compiled import Compiled
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import run_ranks

SEED = 3
LONG = {
    "llama padded",
    "llama ones",
    "gpt2 padded",
    "bert padded",
    "mixtral balanced",
    "mixtral padded",
    "qwen3 padded",
    "vit",
}


class Computed(nn.Module):
    """Buffers that the constructor computes, persistent or not, shared ones, tensors that are attributes, and what
    nobody reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 6), nn.Linear(6, 3)
        self.unread = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(6, 6).tril() / torch.arange(1, 7).unsqueeze(1))
        self.register_buffer(
            "angles", torch.outer(torch.arange(6.0), 10.0 ** -torch.arange(6.0)).sin(), persistent=False
        )
        self.register_buffer("again", self.mask)
        self.register_buffer("drawn", torch.randn(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.scale = torch.linspace(0.5, 1.5, 6)
        self.shifts = [torch.full((6,), 0.1), {"one": torch.randn(6)}]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = (
            self.inner(x) @ self.mask * self.scale
            + self.angles[0]
            + self.drawn
            + self.shifts[0]
            + self.shifts[1]["one"]
        )
        return self.out(torch.tanh(y) @ self.again).square().mean()


class Frozen(nn.Module):
    """A frozen first half, tied to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.words.weight
        self.body.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.body(self.words(tokens)))).flatten(0, 1), tokens.flatten())


class Branching(nn.Module):
    """Cannot be captured: a branch that depends on what it computes, and on the names around it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.register_buffer("shift", torch.randn(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(x + self.shift)
        return (y.square() if y.sum() > 1e9 and locals() else y.abs()).mean()


class Hidden(nn.Module):
    """Holds a tensor where nobody can see it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)
        scale = torch.randn(3)
        self.scaled: Callable[[Tensor], Tensor] = lambda y: y * scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.out(x)).square().mean()


class Seeding(Computed):
    """Cannot be recorded."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()


class Around(nn.Module):
    """A real layer before a module from elsewhere."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(6, 6), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.before(x))


def rows(width: int = 6) -> dict[str, Tensor]:
    return {"x": torch.randn(zoo.ROWS, width, generator=torch.Generator().manual_seed(1))}


def words() -> dict[str, Tensor]:
    return {"tokens": torch.randint(0, 9, (zoo.ROWS, 5), generator=torch.Generator().manual_seed(1))}


SMALL: dict[str, tuple[type[nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "computed": (Computed, rows), "frozen": (Frozen, words), "branching": (Branching, rows), "hidden": (Hidden, rows),
    "seeding": (Seeding, rows),
}  # fmt: skip


def make(name: str) -> zoo.Model:
    if name in SMALL:
        build, batch = SMALL[name]
        return zoo.Model.of(build, batch())
    return zoo.make(name)


def begin(model: zoo.Model, module: nn.Module, initial: Mapping[str, Tensor] | None, precision: str = "fp32") -> Any:
    """An engine on one rank, its whole state at the start, and the losses of two steps."""
    compiled = Compiled(module, Plan.of(Mesh.of(dp=1), precision=precision), model.batch, model.loss, initial=initial)

    def rank(comm: Any) -> Any:
        engine = Engine(compiled, comm, OptimizerChoice("sgd", lr=0.1))
        held = {
            **engine.memory.leaves,
            **engine.unused,
            **engine.memory.buffers,
            **{"state " + k: v for k, v in engine.state_dict().items()},
        }
        state = {name: value.detach().clone() for name, value in held.items()}
        return engine, state, [float(engine.step(model.batch, zoo.ROWS).loss) for _ in range(2)]

    return run_ranks(Mesh.of(dp=1), rank)[0]


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


@pytest.mark.slow
@pytest.mark.few(5)
@pytest.mark.parametrize(
    "name", [*SMALL, *(pytest.param(n, marks=pytest.mark.full) if n in LONG else n for n in zoo.NAMES)]
)  # fmt: skip
def test_the_state_is_that_of_the_whole_module(name: str) -> None:
    model = make(name)
    recorded = record(model.build, seed=SEED)
    assert (recorded.reason is None) == (name != "seeding")
    lazy, mine, losses = begin(model, recorded.module, Values.of_recorded(recorded, SEED))
    whole, theirs, expected = begin(model, recorded.materialise_all(SEED, "cpu"), None)
    assert same(mine, theirs)
    assert losses == expected
    ours = lazy.compiled.general
    assert [str(u.graph) for u in ours.units] == [str(u.graph) for u in whole.compiled.general.units]
    bare = all(p.is_meta for p in lazy.compiled.module.parameters())
    assert bare == (name not in ("branching", "hidden", "seeding"))
    added = [n for n in ours.notes if n not in whole.compiled.general.notes]
    assert bool(added) == (name in ("branching", "hidden")) and all(
        "every rank builds the whole model" in n for n in added
    )
    _, other, _ = begin(model, recorded.module, Values.of_recorded(recorded, SEED + 1))
    assert name == "seeding" or not same(other, theirs)


@pytest.mark.quick(1)
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("name", ["computed", "frozen", "own convnet"])
def test_in_other_precisions(name: str, precision: str) -> None:
    model = make(name)
    recorded = record(model.build)
    _, mine, losses = begin(model, recorded.module, Values.of_recorded(recorded, SEED), precision)
    _, theirs, expected = begin(model, recorded.materialise_all(SEED, "cpu"), None, precision)
    assert same(mine, theirs) and losses == expected


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["computed", "frozen", "branching", "hidden", "seeding", "own convnet", "own tagger"])
def test_weights_of_a_file_are_those_of_a_module_filled_from_it(name: str, tmp_path: Path) -> None:
    model = make(name)
    recorded = record(model.build, seed=SEED)
    saved, module = recorded.materialise_all(SEED + 1, "cpu"), recorded.materialise_all(SEED, "cpu")
    tensors = {n: v.detach().half() if v.is_floating_point() else v for n, v in saved.state_dict().items()}
    for tied in {"frozen": ["head.weight"], "own tagger": ["out.weight"]}.get(name, ["again"]):
        tensors.pop(tied, None)
    save_file(tensors, tmp_path / "weights.safetensors")
    load_weights(tmp_path / "weights.safetensors", module)
    found = fit_weights(tmp_path / "weights.safetensors", recorded.module)
    assert set(found) == set(module.state_dict()) and not found.whole
    _, mine, losses = begin(model, recorded.module, Values.of_recorded(recorded, SEED).with_weights(found))
    _, theirs, expected = begin(model, module, None)
    assert same(mine, theirs) and losses == expected
    first = next(iter(tensors))
    tensors |= {"surplus": torch.zeros(1), first: torch.zeros(77)}
    save_file(tensors, tmp_path / "weights.safetensors")
    raised = []
    for one, function in ((module, load_weights), (recorded.module, fit_weights)):
        with pytest.raises(ConfigError, match="unexpected: surplus; other shapes") as caught:
            function(tmp_path / "weights.safetensors", one)
        raised.append(str(caught.value))
    assert raised[0] == raised[1]


def test_values_by_every_name() -> None:
    recorded = record(Computed)
    values, module = Values.of_recorded(recorded, SEED), recorded.materialise_all(SEED, "cpu")
    expected = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    assert set(values) == {*expected, "scale", "shifts.0", "shifts.1.one"} and len(values) == len(set(values))
    assert all(torch.equal(values[n], v) for n, v in expected.items())
    assert same(values, Values(module))
    whole = values.whole()
    assert isinstance(whole, Computed) and whole.again is whole.mask and same(Values(whole), values)
    with pytest.raises(KeyError):
        values["nothing"]
    state = {n: v + 1 for n, v in module.state_dict().items() if n != "mask"}
    other = Values.of_recorded(recorded, SEED).with_weights(state)
    assert torch.equal(other["mask"], module.mask + 1) and torch.equal(other["angles"], module.angles)
    filled = other.whole()
    assert torch.equal(filled.get_buffer("mask"), module.mask + 1) and torch.equal(
        filled.get_buffer("angles"), module.angles
    )


def frozen_later(module: nn.Module) -> nn.Module:
    module.get_submodule("out").requires_grad_(False)
    module.get_parameter("out.bias").requires_grad_(True)
    module.get_submodule("out").eval()
    return module


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["computed", "branching", "hidden", "seeding"])
def test_a_module_that_was_changed_after_it_was_recorded(name: str) -> None:
    model = make(name)
    recorded = record(model.build, seed=SEED)
    whole = frozen_later(recorded.materialise_all(SEED, "cpu"))
    frozen_later(recorded.module)
    lazy, mine, losses = begin(model, recorded.module, Values.of_recorded(recorded, SEED))
    _, theirs, expected = begin(model, whole, None)
    assert same(mine, theirs) and losses == expected
    assert lazy.compiled.general.frozen == ("out.weight",) and not lazy.compiled.module.get_submodule("out").training


@pytest.mark.quick(1)
@pytest.mark.parametrize("inner", ["computed", "branching"])
def test_a_recorded_part_of_another_module(inner: str) -> None:
    recorded = record(SMALL[inner][0])
    model = zoo.Model.of(lambda: Around(recorded.module), rows())
    values = Values(model.module, (), (recorded, SEED))
    _, mine, losses = begin(model, model.module, values)
    whole = copy.deepcopy(model.module)
    whole.inner = recorded.materialise_all(SEED, "cpu")
    _, theirs, expected = begin(model, whole, None)
    assert same(mine, theirs) and losses == expected


def test_values_of_one_module_for_another() -> None:
    """The module that is trained is the one that was given, not that of the values."""
    model = make("computed")
    recorded = record(model.build)
    other = frozen_later(Computed())
    engine, mine, _ = begin(model, other, Values.of_recorded(recorded, SEED))
    assert engine.compiled.general.frozen == ("out.weight",)
    _, theirs, _ = begin(model, frozen_later(recorded.materialise_all(SEED, "cpu")), None)
    assert same(mine, theirs)


@pytest.mark.slow
def test_several_ranks_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """They replay one after another: a replay may set torch's default dtype, which belongs to the process."""
    model = make("own convnet")
    recorded = record(model.build)
    running, most = [0], [0]
    original = Recorded.materialise

    def slow(self: Recorded, name: str, *args: Any) -> Tensor:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.002)
        value = original(self, name, *args)
        running[0] -= 1
        return value

    monkeypatch.setattr(Recorded, "materialise", slow)
    values = Values.of_recorded(recorded, SEED)
    plan = Plan.of(Mesh.of(dp=4), precision="fp64")
    compiled = Compiled(recorded.module, plan, model.batch, model.loss, initial=values)
    choice = OptimizerChoice("sgd", lr=0.1)
    states = run_ranks(Mesh.of(dp=4), lambda comm: Engine(compiled, comm, choice).state_dict())
    expected = {
        n: v.double() if v.is_floating_point() else v
        for n, v in recorded.materialise_all(SEED, "cpu").state_dict().items()
    }
    assert all(same(state, expected) for state in states) and most == [1]


def test_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = record(lambda: nn.Conv2d(3, 4, 5).to(memory_format=torch.channels_last))
    values = Values.of_recorded(recorded, SEED)
    weight = values["weight"]
    assert not weight.is_contiguous()
    buffer = torch.zeros(2, 50, dtype=torch.float64)
    one, two = Box((1, 0, 2, 1), (3, 3, 3, 5)), Box((3, 2, 0, 0), (4, 3, 5, 5))
    values.copy_boxes("weight", [(one, buffer[0, 5:29].view(2, 3, 1, 4)), (two, buffer[1, 25:].view(1, 1, 5, 5))])
    assert torch.equal(buffer[0, 5:29].view(2, 3, 1, 4), weight[1:3, :, 2:3, 1:].double())
    assert torch.equal(buffer[1, 25:].view(1, 1, 5, 5), weight[3:, 2:].double())
    assert not buffer[0, :5].any() and not buffer[0, 29:].any() and not buffer[1, :25].any()
    with monkeypatch.context() as patch:
        patch.setattr(Recorded, "materialise", None)  # nothing is made for nothing
        values.copy_boxes("weight", [(Box((1, 0, 2, 2), (3, 3, 2, 5)), torch.zeros(2, 3, 0, 3))])
    for start, stop, size in (
        ((0,), (4,), (4,)),
        ((0, 0, 0, 0), (5, 1, 1, 1), (5, 1, 1, 1)),
        ((0, 0, 0, 0), (1, 1, 1, 2), (2,)),
    ):
        with pytest.raises(
            ShardwiseError, match=re.escape(f'box {start} to {stop} of "weight", which is [4, 3, 5, 5], into')
        ):
            values.copy_boxes("weight", [(Box(start, stop), torch.zeros(size))])


def test_a_module_without_values_is_refused() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    batch, choice, plan = {"input": rows()["x"]}, OptimizerChoice("sgd", lr=0.1), Plan.of(Mesh.of(dp=1))
    loss: Any = lambda output, fields: output.square().mean()  # noqa: E731

    def train(module: nn.Module, initial: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        def rank(comm: Any) -> dict[str, Tensor]:
            return Trainer(module, choice, plan, batch, initial=initial, loss=loss, comm=comm).state_dict()

        return run_ranks(Mesh.of(dp=1), rank)[0]

    with pytest.raises(
        ConfigError, match=r"without values: 1\.running_mean; legal: .*shardwise\.record\(constructor\)"
    ):
        train(module, None)
    with pytest.raises(ConfigError, match=r"without values: 0\.weight, 0\.bias, 2\.weight and 1 more; legal: "):
        train(nn.Sequential(module[0], nn.Tanh(), module[2]), None)
    state = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).state_dict()
    assert same(train(module, state), state)
    assert all(p.is_meta for p in module.parameters()) and module[1].running_mean.is_meta, (
        "the user's module is left as it is"
    )
    with pytest.raises(ConfigError, match='"3.weight" is no tensor of the model'):
        train(module, {**state, "3.weight": state["2.weight"]})
    with pytest.raises(ConfigError, match=r'"2.bias" is \[4\] instead of \[3\]'):
        train(module, {**state, "2.bias": torch.zeros(4)})
    assert {"record", "Values"} <= set(shardwise.__all__)


@pytest.mark.slow
@pytest.mark.parametrize("lazy", [True, False])
def test_one_value_lives_at_a_time(lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of all values that live at the same time, while an engine is made; the control keeps them."""
    model = make("llama")
    recorded = record(model.build)
    alive: dict[int, int] = {}
    most = [0]
    original = Recorded.materialise

    def counted(self: Recorded, name: str, *args: Any) -> Tensor:
        value = original(self, name, *args)
        storage = value.untyped_storage()
        alive[id(storage)] = storage.nbytes()
        weakref.finalize(storage, alive.pop, id(storage))
        most[0] = max(most[0], sum(alive.values()))
        return value

    monkeypatch.setattr(Recorded, "materialise", counted)
    values = Values.of_recorded(recorded, SEED)
    compiled = Compiled(recorded.module, Plan.of(Mesh.of(dp=1)), model.batch, initial=values if lazy else dict(values))
    gc.collect()
    buffers, most[0] = sum(alive.values()) if lazy else 0, 0
    run_ranks(Mesh.of(dp=1), lambda comm: Engine(compiled, comm, OptimizerChoice("sgd", lr=0.1)))
    sizes = [p.numel() * 4 for p in recorded.module.parameters()]
    if lazy:
        assert max(sizes) <= most[0] <= max(sizes) + buffers < sum(sizes) / 4
    else:
        assert sum(alive.values()) >= sum(sizes)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_start_takes_the_engine_and_one_parameter() -> None:
    """A model of 396 MB: resident memory at its peak ≤ the engine's parameters + the largest parameter + 32 MiB; the
    control takes a whole model more."""
    path = Path(__file__).parent / "peak_of_a_start.py"
    found = {}
    for how in ("lazy", "whole"):
        done = subprocess.run(
            [sys.executable, str(path), how], capture_output=True, text=True, timeout=200, env=os.environ.copy()
        )
        assert done.returncode == 0, done.stderr
        found[how] = json.loads(done.stdout.splitlines()[-1])
    lazy, whole = found["lazy"], found["whole"]
    bound = lazy["engine"] + lazy["largest"] + (32 << 20)
    assert lazy["engine"] > 350e6 and lazy["peak"] <= bound, found
    assert whole["peak"] > bound + 200e6, found
