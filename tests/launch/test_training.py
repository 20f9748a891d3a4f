"""Training as one rank, in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from shardwise.config import Config, Hardware, build_data, build_model, load_config
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.data.loader import Loader
from shardwise.data.order import sample_order
from shardwise.initial.initial import record
from shardwise.launch import matmul
from shardwise.launch.matmul import FAST, SAFE, SQUARE, choose_matmul, typical_shapes
from shardwise.launch.ready import Surroundings
from shardwise.launch.results import MetricsWriter, save_weights
from shardwise.launch.training import train
from shardwise.models import Llama
from shardwise.runtime.alone import AloneCommunicator
from shardwise.runtime.batch import StepResult
from shardwise.runtime.progress import Progress, read_record, record_path
from shardwise.runtime.whole_state import TensorSpec, WholeState, first_names
from shardwise.train.errors import NonFiniteError

EXPLOSIVE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x, scale):
        return self.linear(x) * scale

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
    def forward(self, x, scale):
        x = self.blocks[0](x, torch.ones_like(scale))
        x = self.blocks[1](x, scale)
        return self.blocks[2](x, torch.ones_like(scale)).square().mean()

class Data:
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return {"x": torch.ones(4), "scale": torch.full((1,), float("inf") if index == 7 else 1.0)}

def net():
    return Net()

def data():
    return Data()
"""


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """Training sets threads and float32 kernels of the process."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    torch.set_float32_matmul_precision(before[1])


def run(tmp_path: Path, *overrides: str) -> Config:
    """One rank that trains; what it leaves is in ``tmp_path``."""
    config = load_config(None, ["train.devices=1", f"train.run_dir={tmp_path}", *overrides], hardware=Hardware(cores=1))
    train(config, Surroundings(Progress(record_path(tmp_path, 0))))
    return config


@pytest.mark.slow
def test_the_first_loss_is_that_of_the_plain_model(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(range(1, 256)) * 8)
    config = run(
        tmp_path, "model.name=llama", "model.tied=true", "model.width=16", "model.layers=1", "model.heads=2",
        "data.sequence_length=8", "data.batch_size=6", f"data.source={tmp_path / 'text.txt'}", "train.steps=3",
        "train.seed=5", "parallel.microbatches=2",
    )  # fmt: skip
    plain = record(build_model(config)[0]).materialise_all(5, "cpu")
    with Loader(build_data(config).train, Mesh.of(dp=1), 0, 6, seed=5) as loader:
        expected = plain(**next(loader).fields).item()
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["loss"] == pytest.approx(expected, rel=1e-5)
    assert len(metrics) == 3

    tensors = load_file(tmp_path / "weights.safetensors")
    own = [name for name, _ in plain.named_parameters()]  # a tied parameter once
    assert sorted(tensors) == sorted(own)
    loaded = Llama(vocabulary=256, width=16, layers=1, heads=2, context=8, tied=True, hidden=config.model.hidden)
    load_model(loaded, tmp_path / "weights.safetensors")
    assert not torch.equal(loaded.get_parameter(own[0]), plain.get_parameter(own[0]))
    about = json.loads((tmp_path / "about.json").read_text())
    assert about["float32_matmul"]["precision"] == torch.get_float32_matmul_precision()
    assert about["parameters"] == sum(p.numel() for p in plain.parameters())
    last = read_record(tmp_path, 0)
    assert last is not None and last.doing == "writing a sample"


def test_a_loss_that_is_not_finite_stops_the_run_at_its_step(tmp_path: Path) -> None:
    step = 2
    index = sample_order(0, 0, 4 * step, 4 * step + 4, 32)[0]
    (tmp_path / "explosive.py").write_text(EXPLOSIVE.replace("== 7", f"== {index}"))
    with pytest.raises(NonFiniteError) as found:
        run(
            tmp_path, f"model.factory={tmp_path}/explosive.py:net", f"data.factory={tmp_path}/explosive.py:data",
            "data.batch_size=4", "train.steps=8",
        )  # fmt: skip
    assert f"step {step}:" in str(found.value) and "blocks.1" in str(found.value)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == step
    assert all(bool(value.isfinite().all()) for value in load_file(tmp_path / "weights.safetensors").values())
    assert not (tmp_path / "result.json").exists()


def test_metrics_are_written_one_step_late_and_skipped_steps_not(tmp_path: Path) -> None:
    def result(loss: float, skipped: float = 0.0) -> StepResult:
        return StepResult(
            torch.tensor(loss), torch.tensor(2.0), torch.tensor(skipped), torch.tensor(4), torch.tensor(0.0)
        )

    path, seen = tmp_path / "metrics.jsonl", []
    with path.open("w") as file:
        writer = MetricsWriter(file, OptimizerChoice(lr=0.5), 10, torch.device("cpu"), seen.append)
        writer.add(0, 4, result(3.0), 0.5)
        assert path.read_text() == ""
        writer.add(1, 4, result(float("inf")), 0.5)
        assert [one["loss"] for one in seen] == [3.0] and len(path.read_text().splitlines()) == 1
        writer.add(2, 4, result(1.0, skipped=1.0), 0.5)
        writer.flush()
        writer.flush()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in rows] == [
        (0, 3.0, 2.0, 0.5),
        (1, None, 2.0, 0.5),
    ]
    assert rows[0]["tokens_per_second"] == pytest.approx(40 / rows[0]["step_seconds"])
    summary = writer.summary()
    assert (summary["steps"], summary["loss_first"], summary["loss_last"]) == (2, 3.0, None)


def saved_by(state: dict[str, torch.Tensor], module: nn.Module, path: Path) -> None:
    """What a lone rank would save that has ``state``."""

    class Known(WholeState):
        def describe(self) -> dict[str, TensorSpec]:
            return {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in state.items()}

        def collect(self, rank: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
            yield from state.items()

    comm = AloneCommunicator(Mesh(()), 0, torch.device("cpu"))
    known = Known(comm, Plan.of(), OptimizerChoice(), None, first_names(module), (), {}, {}, {})  # type: ignore[arg-type]
    save_weights(known, path)


def test_weights_of_a_tied_model_load_into_it(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.b.weight = self.a.weight
            self.register_buffer("mean", torch.zeros(3))

    state = {"mean": torch.arange(3.0), "a.weight": torch.full((2, 2), 7.0)}
    saved_by(state, Tied(), tmp_path / "w.safetensors")
    assert set(load_file(tmp_path / "w.safetensors")) == {"a.weight", "mean"}
    model = Tied()
    assert load_model(model, tmp_path / "w.safetensors") == (set(), [])
    assert model.b.weight is model.a.weight and model.b.weight.sum().item() == 28 and model.mean.tolist() == [0, 1, 2]


def test_fast_matmul_is_chosen_only_where_it_is_accurate(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_float32_matmul_precision("high")
    choice = choose_matmul([(64, 64, 64)])
    assert torch.get_float32_matmul_precision() == "high"  # as before
    assert choice.precision == (FAST if choice.fast_error <= 4 * choice.safe_error else SAFE)
    assert 0 < choice.safe_error < 1e-6
    for factor, expected in ((3.9, FAST), (4.1, SAFE), (float("inf"), SAFE), (float("nan"), SAFE)):
        monkeypatch.setattr(matmul, "_errors", lambda shape, factor=factor: {FAST: factor * 1e-7, SAFE: 1e-7})
        assert choose_matmul([(8, 8, 8)]).precision == expected
    answers = iter(({FAST: 1e-3, SAFE: 1e-7}, {FAST: 1e-7, SAFE: 1e-7}))
    monkeypatch.setattr(matmul, "_errors", lambda shape: next(answers))
    assert choose_matmul([(8, 8, 8), (4, 4, 4)]).precision == SAFE  # one inaccurate shape is enough


def test_rounding_to_bf16_would_be_seen() -> None:
    x, exact = torch.randn(64, 64), torch.randn(64, 64)
    product = x @ exact
    rounded = x.bfloat16().float() @ exact.bfloat16().float()
    assert matmul._relative(rounded, x.double() @ exact.double()) > 100 * matmul._relative(
        product, x.double() @ exact.double()
    )


def test_typical_shapes() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 40), nn.Conv1d(40, 40, 3))
    assert typical_shapes(model, 96) == [SQUARE, (96, 5, 40)]
    assert typical_shapes(nn.Conv1d(1, 1, 1), 96) == [SQUARE]
