"""Updates by a stage's own norm, validated under the next batch: the same numbers as with a barrier, whether or not
they are made again.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from post_validating import PLANS, compiled, steps
from torch import Tensor, nn
from training import trained

from covering import covering
from models import captured, deep, tokens
from processes import run_processes
from shardwise.core.check import ProgramError, check
from shardwise.core.errors import ConfigError
from shardwise.core.instruction import Op
from shardwise.core.plan import CHOICES, Plan
from shardwise.core.program import Program
from shardwise.core.repeat import repeated
from shardwise.core.scale import ScaleChoice
from shardwise.core.schedules import SCHEDULES
from shardwise.core.timetable import to_texts
from shardwise.lower.compiled import Compiled
from shardwise.lower.validate import Validations
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.runtime.batch import BatchStates
from shardwise.runtime.buffers import BucketMemory
from shardwise.runtime.threads import run_ranks
from shardwise.train.errors import NonFiniteError
from shardwise.verify.verify import Report, verify
from timetables import SYNCHRONOUS, any_order

ROWS = 9
STEPS = 5
NEVER, OFTEN = math.inf, 0.4
"""Norms to clip to: none of the first steps has one of the first, and some, not all, have more than the second."""

Case = tuple[str, str, int, str, int, int, str, float]


def plan_of(schedule: str, pp: int, microbatches: int, dp: int = 1, zero: int = 0, **changes: Any) -> Plan:
    return pipeline(
        data_parallel(Plan.of(microbatches=microbatches, norm="post-validate", **changes), dp, zero), pp, schedule
    )


def batches(number: int = STEPS, rows: int = ROWS) -> list[dict[str, Tensor]]:
    """Some have much larger gradients than others: all rows are the same, or none."""
    torch.manual_seed(1)
    found = [tokens(rows) for _ in range(number)]
    return [
        {k: v[:1].expand_as(v).contiguous() for k, v in one.items()} if i % 2 else one for i, one in enumerate(found)
    ]


@functools.cache
def alone(name: str, layers: int, precision: Any = "fp64") -> Compiled:
    """Its capture serves all plans of this precision."""
    torch.manual_seed(0)
    return Compiled(deep(name, layers)[0].train(), Plan.of(precision=precision), batches(1)[0])


def verified(name: str, plan: Plan, clip: float, **changes: Any) -> tuple[Report, int]:
    """The report, and how many updates were made again."""
    one = alone(name, 6)
    report = verify(one.module, batches(), plan, clip_norm=clip, captured=one, **changes)
    note = next(one for one in report.notes if "made again" in one)
    return report, int(note.split()[3])


SHAPES: list[Case] = [
    (name, schedule, pp, m, *shards, recompute, clip)
    for name, schedule, pp, m, shards, recompute, clip in itertools.product(
        ("gpt", "llama", "gpt2"), SYNCHRONOUS, (2, 3, 4), ("pp", "2pp", "2pp + 1"),
        ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3)),
        CHOICES["recompute"], (NEVER, OFTEN),
    )
]  # fmt: skip
FEW = list(covering(random.Random(0).sample(SHAPES, 600)))


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id="-".join(map(str, c)), marks=pytest.mark.full if i >= 8 else ()) for i, c in enumerate(FEW)],
)
def test_it_equals_one_device(case: Case) -> None:
    name, schedule, pp, m, dp, zero, recompute, clip = case
    number = 1 if SCHEDULES[schedule].max_microbatches == 1 else {"pp": pp, "2pp": 2 * pp, "2pp + 1": 2 * pp + 1}[m]
    report, again = verified(name, plan_of(schedule, pp, number, dp, zero, recompute=recompute), clip)
    assert report.passed, (report.largest, report.worst[:3])
    assert report.ranks_agree
    assert again == 0 if clip == NEVER else 0 < again < STEPS


@pytest.mark.slow
def test_what_it_goes_back_to_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states before an update, and the loss of a batch whose forwards are run again; without clipping nothing goes
    back.
    """
    plan = plan_of("1f1b", 3, 5)
    broken = (BucketMemory, "restore"), (BatchStates, "again")
    for owner, name in broken:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *_: None)
            assert not verified("llama", plan, OFTEN)[0].passed
    for owner, name in broken:
        monkeypatch.setattr(owner, name, lambda *_: None)
    assert verified("llama", plan, NEVER)[0].passed


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("home", "ranks"),
    [
        ((1, 0), {"sends_wait": True}),
        ((0, 1, 1, 0), {"delay_seed": 3}),
        ((0, 2, 1, 1, 0, 2), {"delay_seed": 4, "sends_wait": True}),
    ],
)
def test_any_order_on_any_backend(home: tuple[int, ...], ranks: dict[str, Any]) -> None:
    """Whatever ranks compute first, and however slow messages are: the bits are those with a barrier."""
    order = any_order(home, 3, random.Random(len(home)))
    plan = data_parallel(Plan.of(microbatches=3, norm="post-validate"), 2, 3)
    plan = pipeline(plan, 1 + max(home), "auto", timetable=to_texts(order))
    ours, theirs = (
        trained(one, batches(), alone("gpt", 6, "fp32"), clip_norm=OFTEN, ranks=more)[0]
        for one, more in ((plan, ranks), (plan.replace(norm="barrier"), {}))
    )
    assert any(result.repeated for result in ours[0]) and not any(result.repeated for result in theirs[0])
    for mine, other in zip(ours[0], theirs[0], strict=True):
        assert (float(mine.loss), float(mine.grad_norm)) == (float(other.loss), float(other.grad_norm))
    assert all(torch.equal(value, theirs[2][name]) for name, value in ours[2].items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv", "mixtral", "bert", "llama-padded", "static"])
def test_other_models(name: str) -> None:
    """Also buffers that a forward writes, which is run twice."""
    one, make, loss = captured(name)
    torch.manual_seed(0)
    given = [make(13) for _ in range(4)]
    report = verify(one.module, given, plan_of("1f1b", 2, 3, 2, 1), loss=loss, clip_norm=0.1, captured=one)
    assert report.passed, (report.largest, report.worst[:3])
    assert any(note.startswith("of 4 updates 3") for note in report.notes)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("pp", "schedule", "window"), [(2, "1f1b", 2), (3, "zb-h1", 32), (2, "gpipe", 3)])
def test_stages_without_a_backward(pp: int, schedule: str, window: int) -> None:
    """The lower half is frozen: its stages compute forwards alone, and have nothing to update."""
    torch.manual_seed(0)
    module, _ = deep("llama", 6)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not ("embed" in name or any(f"layers.{i}." in name for i in range(4))))
    plan = plan_of(schedule, pp, 4, window=window)
    compiled = Compiled(module, plan, batches(1)[0])
    kinds = [{one.op for one in program.instructions} for program in compiled.programs(compiled.general, 4, 2)]
    assert [
        found for found in kinds if Op.VALIDATE in found and Op.BACKWARD not in found and Op.BACKWARD_INPUT not in found
    ]
    ours, theirs = (
        trained(one, batches(), compiled, clip_norm=OFTEN / 2)[0] for one in (plan, plan.replace(norm="barrier"))
    )
    assert any(result.repeated for result in ours[0])
    assert [float(r.loss) for r in ours[0]] == [float(r.loss) for r in theirs[0]]
    assert all(torch.equal(value, theirs[2][name]) for name, value in ours[2].items())


# ---- steps that are not taken ----------------------------------------------------------------------------------------


class Spiked(nn.Module):
    """Blocks with running statistics; ``spike`` is what a row's output is multiplied by: a large one makes gradients
    overflow in fp16.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4)])
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, spike: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return (self.head(x).squeeze(1) * spike).square().mean()


def spiked(*spikes: float) -> list[dict[str, Tensor]]:
    torch.manual_seed(2)
    return [{"x": torch.randn(ROWS, 8), "spike": torch.full((ROWS,), spike)} for spike in spikes]


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_overflows_skip_steps_and_what_their_forwards_wrote(offload: Any) -> None:
    """The first and the last of a window, several in a row: scales, weights and running statistics are those with a
    barrier.
    """
    plan = plan_of("1f1b", 2, 3, precision="fp16", offload=offload, window=7)
    given = spiked(3e4, 1.0, 1.0, 3e4, 3e4, 1.0, 3e4, 1.0)
    scale = ScaleChoice(initial=3e4, interval=2, growth=1.7)
    ours, theirs = (
        trained(p, given, Spiked(), loss_scale=scale, clip_norm=1.0)
        for p in (plan, plan.replace(norm="barrier", window=1))
    )
    skipped = [bool(result.skipped) for result in theirs[0][0]]
    assert skipped == [True, False, False, True, True, False, True, False]
    for mine in ours:
        for result, other in zip(mine[0], theirs[0][0], strict=True):
            assert bool(result.skipped) == bool(other.skipped)
            assert (float(result.scale), int(result.overflows)) == (float(other.scale), int(other.overflows))
        for name, value in mine[2].items():
            assert torch.equal(value, theirs[0][2][name]), name


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    plan = plan_of("zb-h1", 2, 3, window=6)
    found = trained(plan, spiked(1.0, 1.0, 1e30, 1.0, 1.0, 1.0), Spiked())
    before = trained(plan, spiked(1.0, 1.0), Spiked())
    for (results, error, state), (_, stopping, good) in zip(found, before, strict=True):
        assert (
            isinstance(error, NonFiniteError)
            and error.step == 2
            and "the weights are as before this step" in str(error)
        )
        assert len(results) == 6 and stopping is False
        assert [one.repeated for one in results] == [False, False, True, False, False, None], (
            "nobody goes back at a halt"
        )
        assert all(torch.equal(value, good[name]) for name, value in state.items())


# ---- programs --------------------------------------------------------------------------------------------------------


def programs(schedule: str = "zb-h2", pp: int = 3, m: int = 6, number: int = 3) -> tuple[tuple[Program, ...], Plan]:
    plan = plan_of(schedule, pp, m)
    compiled = alone("llama", 4, "fp32").under(plan)
    return compiled.programs(compiled.general, m, number), plan


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_forwards_are_computed_before_an_update_is_validated(schedule: str) -> None:
    """All that a rank computes before its first backward, but where a stage hears of another's: there the norm is known
    too.
    """
    m = 1 if SCHEDULES[schedule].max_microbatches == 1 else 6
    found, _ = programs(schedule, 3, m)
    for program in found:
        for span in repeated(program.instructions).values():
            kinds = {program.instructions[at].op for at in span}
            assert Op.STEP in kinds and Op.FORWARD in kinds
            assert not kinds & {Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.REDUCE}
        assert sum(one.op is Op.VALIDATE for one in program.instructions) == 2  # with the last batch the program ends
        assert [one.version for one in program.instructions if one.op is Op.REPORT] == [0, 1, 2]


def changed(program: Program, at: int, **changes: Any) -> Program:
    instructions = list(program.instructions)
    instructions[at] = replace(instructions[at], **changes)
    return replace(program, instructions=tuple(instructions))


@pytest.mark.slow
def test_what_cannot_be_run_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found, plan = programs()
    check(found, plan.mesh)
    stage, at = next(
        (s, p)
        for s, program in enumerate(found)
        for p, one in enumerate(program.instructions)
        if one.op is Op.RECEIVE and one.crosses
    )
    wrong = [*found]
    wrong[stage] = changed(found[stage], at, crosses=False)
    with pytest.raises(
        ProgramError, match="is of a message that comes twice if an update was wrong, and does not say so"
    ):
        check(wrong, plan.mesh)
    again = next(iter(repeated(found[0].instructions).values()))
    forward = next(at for at in again if found[0].instructions[at].op is Op.FORWARD)
    with pytest.raises(
        ProgramError, match="lies between the update of batch 0 and its VALIDATE, where it would be run again"
    ):
        check([changed(found[0], forward, op=Op.BACKWARD), *found[1:]], plan.mesh)
    monkeypatch.setattr(Validations, "earliest", lambda *_: 0)
    with pytest.raises(ProgramError, match="asks for a message before a VALIDATE|comes twice"):
        programs()


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_where_it_is_not_legal() -> None:
    with pytest.raises(ConfigError, match=r"norm: 'late' is not legal; legal: \"barrier\", \"post-validate\""):
        Plan.of(norm="late")
    with pytest.raises(
        ConfigError, match=r'norm: "post-validate" is not legal with schedule "pipedream-2bw", which has no barrier'
    ):
        plan_of("pipedream-2bw", 2, 2)
    assert not plan_of("1f1b", 1, 2).post_validates  # nobody to wait for


# ---- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", pytest.param("shared", marks=pytest.mark.full)])
def test_processes_go_back_too(backend: str) -> None:
    command = [str(Path(__file__).with_name("post_validating.py")), backend]
    mesh = PLANS[backend].mesh
    ended = [
        json.loads(output.splitlines()[-1]) for output in run_processes(mesh.size, command, 100, OMP_NUM_THREADS=1)
    ]
    model = compiled(PLANS[backend])
    (truth,) = {json.dumps(found) for found in run_ranks(mesh, lambda comm: steps(comm, model), timeout=60)}
    assert ended == [json.loads(truth)] * mesh.size
    assert {found[2] for found in ended[0]} == {True, False, None}
