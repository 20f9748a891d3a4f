"""Asynchronous pipelines equal one device that uses the same old weights; which these are, how many are kept, and where
it ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training import trained

from models import deep, tokens
from shardwise.core.errors import ConfigError
from shardwise.core.instruction import Op
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.core.scale import ScaleChoice
from shardwise.data.loader import Batch
from shardwise.lower import step as lowering
from shardwise.lower.compiled import Compiled
from shardwise.lower.versions import steady_batches
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.versions import double_buffered_version, stashed_version
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import run_ranks
from shardwise.train.errors import NonFiniteError
from shardwise.train.trainer import Trainer
from shardwise.verify.oracle import Oracle
from shardwise.verify.verify import OVERLAPPING_STEPS, TOLERANCE, verify, windows

ROWS = 9  # of a batch: uneven parts of microbatches and ranks


def plan_of(schedule: str, pp: int, microbatches: int = 1, dp: int = 1, **changes: Any) -> Plan:
    return pipeline(data_parallel(Plan.of(microbatches=microbatches, **changes), dp), pp, schedule)


def batches(number: int, rows: int = ROWS) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [tokens(rows) for _ in range(number)]


@functools.cache
def alone(name: str) -> Compiled:
    """Four blocks, whose capture serves all plans."""
    torch.manual_seed(0)
    return Compiled(deep(name, 4)[0], Plan.of(precision="fp64"), batches(1)[0])


CASES: list[tuple[str, str, int, int, int, dict[str, Any]]] = [
    ("llama", "pipedream", 2, 1, 1, {}),
    ("llama", "pipedream", 3, 1, 2, {"recompute": "full", "window": 5}),
    ("llama", "pipedream", 4, 1, 1, {"recompute": "selective"}),
    ("gpt", "pipedream-2bw", 2, 2, 1, {"window": 5}),
    ("gpt2", "pipedream-2bw", 3, 4, 1, {"recompute": "selective"}),
    ("llama", "pipedream-2bw", 4, 4, 2, {"recompute": "full"}),
]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "schedule", "pp", "microbatches", "dp", "changes"), CASES)
def test_a_replay_with_the_same_versions_is_matched(
    name: str, schedule: str, pp: int, microbatches: int, dp: int, changes: dict[str, Any]
) -> None:
    one = alone(name)
    plan = plan_of(schedule, pp, microbatches, dp, **changes)
    clip = None if schedule == "pipedream" else 1.0
    report = verify(one.module, batches(OVERLAPPING_STEPS), plan, clip_norm=clip, captured=one)
    assert report.passed, report.worst[0]
    assert report.largest <= TOLERANCE


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a sum": lambda z, y, w: F.cross_entropy(z, y, reduction="sum"),
    "twice a mean": lambda z, y, w: 2 * F.cross_entropy(z, y),
    "a masked mean": lambda z, y, w: (F.cross_entropy(z, y, reduction="none") * w).sum() / w.sum(),
    "rows that meet": lambda z, y, w: F.cross_entropy(z, y) + z.softmax(-1).mean(0).square().sum(),
}


class Lossy(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss, self.layers, self.out = loss, nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.loss(self.out(x), y, w)


@pytest.mark.quick(1)
@pytest.mark.parametrize("loss", LOSSES)
def test_any_loss_of_the_batch(loss: str) -> None:
    """Microbatches are parts of a batch here too; the first one has no target that counts, unless it is a batch of its
    own."""
    torch.manual_seed(1)
    given = []
    for _ in range(4):
        y = torch.randint(0, 3, (8,))
        y[: 1 if loss == "rows that meet" else 3] = -100
        given.append({"x": torch.randn(8, 6), "y": y, "w": torch.rand(8)})
    for schedule, microbatches, clip in (("pipedream-2bw", 4, 1.0), ("pipedream", 1, None)):
        plan = pipeline(Plan.of(microbatches=microbatches, window=4), 2, schedule)
        report = verify(Lossy(LOSSES[loss]), given, plan, clip_norm=clip)
        assert report.passed, (schedule, report.worst[:3])


@pytest.mark.slow
def test_vertical_sync() -> None:
    one = alone("llama")
    plan = plan_of("pipedream", 3).replace(vertical_sync=True)
    assert verify(one.module, batches(6), plan, clip_norm=None, captured=one).passed


@pytest.mark.slow
def test_old_weights_are_not_what_one_device_without_them_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison notices: with the newest weights on one device, and where nothing keeps the old ones."""
    torch.manual_seed(0)
    module, _ = deep("llama", 2)
    plan = plan_of("pipedream-2bw", 2, 2)
    with monkeypatch.context() as patch:
        patch.setattr("shardwise.verify.verify.versions", lambda compiled, number, pieces: None)
        assert not verify(module, batches(4), plan).passed
    monkeypatch.setattr(lowering, "stash", lambda draft, buckets, ends: ([[] for _ in ends], ()))
    assert not verify(module, batches(4), plan).passed


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_the_programs_have_the_papers_versions(pp: int) -> None:
    """PipeDream's stage s of n uses weights n - s - 1 updates old and keeps as many beside the newest; 2BW's are one
    update old, and two versions are there."""
    number = 12
    for schedule, m in (("pipedream", 1), ("pipedream-2bw", pp)):
        compiled = alone("llama").under(plan_of(schedule, pp, m, precision="fp64"))
        programs = compiled.programs(compiled.general, m, number)
        for stage, program in enumerate(programs):
            used = {one.microbatch: one.version for one in program.instructions if one.op in (Op.FORWARD, Op.BACKWARD)}
            expected = [
                stashed_version(k, stage, pp) if schedule == "pipedream" else double_buffered_version(k, m)
                for k in range(number * m)
            ]
            assert [used[k] for k in range(number * m)] == expected
            both = {
                (one.microbatch, one.version) for one in program.instructions if one.op in (Op.FORWARD, Op.BACKWARD)
            }
            assert len(both) == number * m  # forward and backward have the same
            learning = {one.bucket for one in program.instructions if one.op is Op.STEP}
            kept = pp - stage - 1 if schedule == "pipedream" else 1
            if stage < pp - 1 or schedule == "pipedream":
                assert len(program.stashes) == kept * len(learning)


@pytest.mark.slow
def test_what_stages_of_their_own_cannot_have() -> None:
    torch.manual_seed(0)
    module, _ = deep("gpt", 2)
    compiled = Compiled(module, plan_of("pipedream", 2), batches(1)[0])
    with pytest.raises(ConfigError, match="wte.weight is used by stages 0 and 1; legal: weights that are not tied"):
        compiled.programs(compiled.general, 1)
    module, _ = deep("llama", 2)
    compiled = Compiled(module, plan_of("pipedream", 2), batches(1)[0])

    def clipped(comm: Communicator) -> None:
        Engine(compiled, comm, OptimizerChoice("sgd"), clip_norm=1.0)

    with pytest.raises(ConfigError, match='clip_norm: 1 is not legal with schedule "pipedream"'):
        run_ranks(compiled.plan.mesh, clipped, timeout=60)


# ---- windows of a Trainer --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_results_come_in_order_and_all_ranks_agree() -> None:
    torch.manual_seed(0)
    module, _ = deep("gpt", 2)
    given = batches(7)
    several = trained(plan_of("pipedream-2bw", 2, 2, window=3), given, module)
    losses = [[float(r.loss) for r in found] for found, _, _ in several]
    assert losses[0] == losses[1] and len(losses[0]) == 7
    oracle = Oracle(module.eval(), precision="fp32")
    first = [oracle.step(one).loss for one in given[:2]]  # nothing has been updated for the first two of a window
    module.train()
    assert abs(losses[0][0] - first[0]) < 0.2 and abs(losses[0][1] - first[1]) < 0.2  # but for dropout


@pytest.mark.slow
def test_a_step_that_is_not_finite_ends_the_window() -> None:
    """2BW undoes it: what comes after is skipped, on all stages."""
    torch.manual_seed(0)
    module, _ = deep("llama", 2)
    given = batches(6)
    plan = plan_of("pipedream-2bw", 2, 2, window=6)
    compiled = Compiled(module, plan, given[0])

    def rank(comm: Communicator) -> Any:
        with Trainer(compiled, OptimizerChoice("adamw", lr=1e-2), plan, given[0], comm=comm) as trainer:

            def inspect(position: int, what: str, values: list[Tensor]) -> None:
                if what == "output" and trainer.engine.step_index > 3 and values[0].requires_grad:
                    values[0].data.fill_(float("nan"))

            trainer.engine.interpreter.inspect = inspect
            feed = iter([Batch(one, ROWS, (), ()) for one in given])
            with pytest.raises(NonFiniteError) as caught:
                list(trainer.steps(feed, len(given)))
            return caught.value.step, trainer.state_dict()

    found = run_ranks(plan.mesh, rank, timeout=120)
    assert len({step for step, _ in found}) == 1
    step, state = found[0]
    assert step <= 3
    before = trained(plan, given[:step], module)[0][2]
    assert all(torch.equal(state[name], value) for name, value in before.items())


@pytest.mark.slow
def test_a_wish_to_stop_comes_after_the_window() -> None:
    torch.manual_seed(0)
    module, _ = deep("llama", 2)
    for found, stopping, _ in trained(plan_of("pipedream", 2, window=4), batches(12), module, stop_after=3):
        assert len(found) == 8 and stopping


@pytest.mark.slow
def test_an_overflow_under_2bw_skips_one_update_on_all_stages() -> None:
    """The scale goes down, and batches keep the scale that their weights' time had."""
    torch.manual_seed(0)
    module, _ = deep("llama", 2)
    plan = plan_of("pipedream-2bw", 2, 2, precision="fp16", window=8)
    scale = ScaleChoice(initial=2.0**40)
    for found, _, state in trained(plan, batches(8), module, loss_scale=scale):
        skipped = [bool(r.skipped) for r in found]
        assert skipped[0] and all(torch.isfinite(v).all() for v in state.values() if v.is_floating_point())
        scales = [float(r.scale) for r in found]
        assert scales[0] == scales[1] == 2.0**40 and scales[2] < scales[0]


def test_a_steady_window_is_no_longer_than_the_plan_s() -> None:
    assert steady_batches(plan_of("1f1b", 2, 4)) == 1
    assert steady_batches(plan_of("pipedream-2bw", 2, 4, window=2)) == 2
    assert steady_batches(plan_of("pipedream", 4, window=64)) == 7
    assert windows(plan_of("pipedream", 4, window=5), 12) == [(0, 5), (5, 10), (10, 12)]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_one_stage_has_nothing_to_overlap(schedule: str) -> None:
    torch.manual_seed(0)
    module, _ = deep("gpt", 2)
    plan = plan_of(schedule, 1, 4, precision="fp16")
    assert verify(module, batches(3), plan.replace(precision="fp64")).passed
    compiled = Compiled(module, plan, batches(1)[0])
    (program,) = compiled.programs(compiled.general, 4)
    assert {one.version for one in program.instructions} == {0} and program.stashes == ()
