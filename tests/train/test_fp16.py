"""Training in fp16: overflows skip steps, on all ranks and stages alike, and too many of them end the run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.layout import rank_rows
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.core.scale import ScaleChoice
from shardwise.data.loader import AXES, Batch
from shardwise.lower.compiled import Compiled
from shardwise.models import GPT
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.train.errors import LossScaleError
from shardwise.train.trainer import Trainer
from shardwise.verify.verify import verify

ROWS, LENGTH = 6, 8


class Spiked(nn.Module):
    """A GPT with a loss times ``spike``, a field of one number a row: a large one makes gradients overflow."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = GPT(vocabulary=11, width=15, layers=3, heads=3, context=LENGTH)

    def forward(self, input_ids: Tensor, labels: Tensor, spike: Tensor) -> Tensor:
        logits = self.inner(input_ids)
        return nn.functional.cross_entropy((logits * spike[:, None, None]).flatten(0, 1), labels.flatten())


def batch(step: int, spike: float = 1.0, row: int = -1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 11, (ROWS, LENGTH + 1), generator=generator)
    spikes = torch.ones(ROWS)
    spikes[row] = spike
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous(), "spike": spikes}


def run(
    plan: Plan, batches: list[dict[str, Tensor]], scale: ScaleChoice | None = None, module: nn.Module | None = None
) -> list[list[dict[str, Any]]]:
    """What each rank saw of each step, and its weights after it."""
    compiled = Compiled(module or Spiked(), plan, batches[0])

    def rank(comm: ThreadCommunicator) -> list[dict[str, Any]]:
        trainer = Trainer(
            compiled, OptimizerChoice("adamw", lr=1e-2), plan, {}, clip_norm=1.0, comm=comm, loss_scale=scale
        )
        seen = []
        for given in batches:
            ranges = rank_rows(ROWS, plan.microbatches, comm.mesh.axis_size(AXES), comm.mesh.index(comm.rank, AXES))
            mine = {n: torch.cat([v[a:b] for a, b in ranges]) for n, v in given.items()}
            result = trainer.step(Batch(mine, ROWS, tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges)))
            assert result.scale is not None
            assert result.overflows is not None
            numbers = {
                "skipped": bool(result.skipped),
                "scale": float(result.scale),
                "overflows": int(result.overflows),
            }
            seen.append({**numbers, "norm": float(result.grad_norm), "state": trainer.state_dict()})
        return seen

    return run_ranks(plan.mesh, rank, timeout=60)


SPIKES = [batch(0), batch(1), batch(2, 3e38), batch(3), batch(4, 3e38, row=0), batch(5, 3e38), batch(6)]
SKIPPED = [False, False, True, False, True, True, False]
SCALES = [2.0**16, 2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**14, 2.0**13]


def check_skipped(ranks: list[list[dict[str, Any]]]) -> None:
    """All ranks skip the same steps, of which nothing is left, and have the same state at the end."""
    for seen in ranks:
        assert [step["skipped"] for step in seen] == SKIPPED
        assert [step["scale"] for step in seen] == SCALES
        for before, after in zip(seen, seen[1:], strict=False):
            same = all(torch.equal(after["state"][n], v) for n, v in before["state"].items())
            assert same == after["skipped"]
    assert all(torch.equal(v, ranks[-1][-1]["state"][n]) for n, v in ranks[0][-1]["state"].items())


@pytest.mark.quick(1)
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("zero", "dp", "microbatches"), [(0, 1, 1), (0, 3, 2), (1, 2, 1), (2, 3, 2), (3, 3, 1), (3, 2, 2)]
)
def test_an_overflow_in_one_rank_skips_the_step_on_all(zero: int, dp: int, microbatches: int) -> None:
    """The spike is in the rows of the last rank, or of the first; nothing of a skipped step is left."""
    plan = data_parallel(Plan.of(precision="fp16", microbatches=microbatches), dp, zero)
    ranks = run(plan, SPIKES)
    check_skipped(ranks)


@pytest.mark.quick(1)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_stages_skip_at_the_same_steps_with_the_same_bits(zero: int) -> None:
    plan = Plan.of(precision="fp16")
    first, other = run(data_parallel(plan, 3, 0), SPIKES)[0], run(data_parallel(plan, 3, zero), SPIKES)[0]
    for a, b in zip(first, other, strict=True):
        assert all(torch.equal(v, b["state"][n]) for n, v in a["state"].items())
        assert (a["skipped"], a["scale"]) == (b["skipped"], b["scale"])
        assert a["norm"] == b["norm"] or a["skipped"]


def test_the_scale_grows_after_so_many_good_steps() -> None:
    plan = data_parallel(Plan.of(precision="fp16"), 2, 2)
    seen = run(plan, [batch(i) for i in range(5)], ScaleChoice(initial=8.0, interval=2))[1]
    assert [step["scale"] for step in seen] == [8.0, 8.0, 16.0, 16.0, 32.0]


def test_a_power_of_two_changes_nothing_but_the_range() -> None:
    """The norm, clipping and the update are those of the unscaled gradients."""
    plan = Plan.of(precision="fp16")
    small, large = (run(plan, [batch(i) for i in range(3)], ScaleChoice.fixed(scale))[0] for scale in (1024.0, 4096.0))
    for a, b in zip(small, large, strict=True):
        assert a["norm"] == pytest.approx(b["norm"], rel=1e-3)
        assert max(float((a["state"][n] - v).abs().max()) for n, v in b["state"].items()) < 2e-2


@pytest.mark.parametrize("zero", [0, 3])
def test_overflows_without_end_stop_the_run_with_advice(zero: int) -> None:
    plan = data_parallel(Plan.of(precision="fp16"), 2, zero)
    with pytest.raises(
        LossScaleError, match=r"step 5: .* 4 steps in a row, the loss scale is down to 8192; .* lower the learning rate"
    ) as error:
        run(plan, [batch(0), batch(1), *(batch(i, 3e38) for i in range(2, 9))], ScaleChoice(patience=4))
    assert error.value.unit
    assert error.value.steps == 4


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("zero", "dp"), [(0, 2), (3, 2), (2, 3)])
def test_first_gradients_are_as_near_to_the_truth_as_one_device(zero: int, dp: int) -> None:
    torch.manual_seed(0)
    report = verify(
        Spiked(), [batch(i) for i in range(2)], data_parallel(Plan.of(precision="fp16", microbatches=2), dp, zero)
    )
    assert report.passed, (report.worst[:3], report.low_precision)
    assert report.low_precision is not None


# ---- pipelines -------------------------------------------------------------------------------------------------------


class Probed(nn.Module):
    """Blocks with a *probe*, a parameter whose gradient alone is multiplied by a field: overflows are there only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.probes = nn.ParameterList(nn.Parameter(torch.zeros(6)) for _ in range(4))

    def forward(self, x: Tensor, probe: Tensor) -> Tensor:
        for i, (block, one) in enumerate(zip(self.blocks, self.probes, strict=True)):
            x = torch.tanh(block(x)) + one * probe[:, i, None]
        return x.square().mean()


def probed(step: int, block: int = -1) -> dict[str, Tensor]:
    """The gradient of a block's probe overflows, or none does; of the last row, so it is on one rank of the batch axes
    alone.
    """
    probe = torch.zeros(ROWS, 4)
    if block >= 0:
        probe[-1, block] = 6e4
    return {"x": torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(step)), "probe": probe}


PROBES = [probed(0), probed(1), probed(2, 0), probed(3), probed(4, 3), probed(5, 1), probed(6)]


@pytest.mark.parametrize(
    ("schedule", "microbatches", "dp", "zero"),
    [("1f1b", 2, 1, 0), ("zb-h1", 3, 1, 0), ("1f1b", 2, 2, 1), ("zbv", 2, 2, 3), ("interleaved", 2, 1, 0)],
)
def test_an_overflow_on_one_stage_skips_the_step_on_all(schedule: str, microbatches: int, dp: int, zero: int) -> None:
    """On the first stage, on the last, on one in between; nothing of a skipped step is left on any."""
    plan = pipeline(data_parallel(Plan.of(precision="fp16", microbatches=microbatches), dp, zero), 2, schedule)
    ranks = run(plan, PROBES, module=Probed())
    assert len(ranks) == 2 * dp
    check_skipped(ranks)


@pytest.mark.parametrize(("block", "unit"), [(0, "head"), (1, "blocks.1"), (3, "tail")])
def test_the_stage_whose_gradients_overflow_without_end_is_named(block: int, unit: str) -> None:
    """A probe belongs to the block that reads it; the first one is an input of the model, the last comes after all
    blocks.
    """
    plan = pipeline(Plan.of(precision="fp16", microbatches=2), 2)
    with pytest.raises(LossScaleError, match=r"step 4: .* 3 steps in a row") as error:
        run(plan, [probed(0), probed(1), *(probed(i, block) for i in range(2, 9))], ScaleChoice(patience=3), Probed())
    assert error.value.unit == unit


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("precision", "schedule", "dp", "zero"),
    [
        ("fp16", "1f1b", 1, 0),
        ("fp16", "zb-h1", 2, 3),
        ("bf16", "1f1b", 1, 0),
        ("bf16", "zbv", 1, 0),
        ("bf16", "interleaved", 2, 1),
    ],
)
def test_first_gradients_of_pipelines_are_as_near_to_the_truth(
    precision: Any, schedule: str, dp: int, zero: int
) -> None:
    torch.manual_seed(0)
    plan = pipeline(data_parallel(Plan.of(precision=precision, microbatches=2), dp, zero), 2, schedule)
    report = verify(Spiked(), [batch(i) for i in range(2)], plan)
    assert report.passed, (report.worst[:3], report.low_precision)
    assert report.ranks_agree
    assert (
        report.low_precision is not None and report.low_precision["one_device"] > 1e-4
    )  # so it is low precision that is compared


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Blocks with a probe as wide as their hidden layer, which lies in pieces as that does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(4))
        self.probes = nn.ParameterList(nn.Parameter(torch.zeros(16)) for _ in range(4))

    def forward(self, x: Tensor, probe: Tensor) -> Tensor:
        for i, (block, one) in enumerate(zip(self.blocks, self.probes, strict=True)):
            x = x + block[1](torch.addcmul(torch.tanh(block[0](x)), one, probe[:, i]))
        return x.square().mean()


def widely(step: int, block: int = -1, column: int = 0) -> dict[str, Tensor]:
    """The gradient of one element of a block's probe overflows, or none does."""
    probe = torch.zeros(ROWS, 4, 16)
    if block >= 0:
        probe[-1, block, column] = 6e4
    return {"x": torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step)), "probe": probe}


WIDE = [widely(0), widely(1), widely(2, 0, 15), widely(3), widely(4, 3, 0), widely(5, 1, 15), widely(6)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tp", "dp", "zero", "pp"),
    [
        ("1d", 2, 2, 3, 2),
        ("2d", 4, 1, 0, 2),
        *(
            pytest.param(*one, marks=pytest.mark.full)
            for one in [
                ("1d", 2, 1, 0, 1),
                ("1d-sp", 3, 2, 1, 1),
                ("2d", 4, 2, 3, 2),
                ("2d", 9, 1, 0, 1),
                ("2.5d", 8, 1, 0, 1),
                ("2.5d", 8, 2, 3, 1),
                ("3d", 8, 1, 0, 1),
                ("3d", 8, 2, 2, 2),
            ]
        ),
    ],
)
def test_an_overflow_in_one_piece_skips_the_step_on_all(kind: Any, tp: int, dp: int, zero: int, pp: int) -> None:
    """In the last piece of a parameter, or in the first; the ranks that have others see only the norm of it."""
    base = Plan.of(precision="fp16", microbatches=2)
    plan = tensor_parallel(pipeline(data_parallel(base, dp, zero), pp), tp, kind)
    module = Wide()
    trace = Compiled(module, plan, WIDE[0]).general
    assert sum(bool(p.axes) for p in trace.parameters if p.name.startswith("probes")) == 4, "in pieces"
    ranks = run(plan, WIDE, module=module)
    assert len(ranks) == tp * dp * pp
    check_skipped(ranks)
    norms = [[step["norm"] for step in seen if not step["skipped"]] for seen in ranks]
    assert all(math.isfinite(one) for one in norms[0]) and all(other == norms[0] for other in norms)
