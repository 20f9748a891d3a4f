"""Models that read values in line with their layers: the statements around the read run as written, for all rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_eager_calls import PLANS
from torch import Tensor, nn

from captures import apart
from shardwise.capture import ways
from shardwise.capture.assumed import BRANCHES
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import verify

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.up(h)))


class Model(nn.Module):
    """Two blocks and a head; what a subclass does between them is in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.limit = 0.2
        self.head = nn.Linear(WIDTH, 2)


class Branch(Model):
    """By the sum over all rows, which is not that of a rank's own rows."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if h.sum() > self.limit:
            h = h * 2.0
        h = self.blocks[1](h)
        return self.head(h).square().mean()


class Numpy(Model):
    """The order of its features is found by numpy."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        order = torch.from_numpy(np.argsort(h.detach().numpy().sum(0)).copy())
        return self.head(self.blocks[1](h[:, order])).square().mean()


class Loop(Model):
    """It goes on until the mean over all rows is large enough."""

    def forward(self, x: Tensor) -> Tensor:
        h, turns = self.blocks[0](x), 0
        while h.abs().mean() < 5 and turns < 20:
            h = h * 1.3
            turns += 1
        return self.head(self.blocks[1](h)).square().mean()


class Float(Model):
    """Divides by a number that it reads, which goes no further."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        scale = float(h.abs().max())
        h = h / scale
        return self.head(self.blocks[1](h)).square().mean()


class InBlocks(nn.Module):
    """Each of its blocks reads, and calls a method; the attribute of a part is another in each."""

    class Own(Block):
        def __init__(self, limit: float) -> None:
            super().__init__()
            self.limit = limit

        def scaled(self, h: Tensor, by: float) -> Tensor:
            return h * by

        def forward(self, h: Tensor) -> Tensor:
            h = super().forward(h)
            if h.abs().max() > self.limit:
                h = self.scaled(h, 0.5)
            elif h.mean() > 0:
                h = self.scaled(h, 1.5)
            return h

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([InBlocks.Own(limit) for limit in (2.0, 0.1, 4.0)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Choosing(Model):
    """One of two layers computes, by what the first one gives: the other takes no step."""

    def __init__(self) -> None:
        super().__init__()
        self.some, self.others = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if h.sum() > 0:
            h = self.some(h)
        else:
            h = self.others(h)
        return self.head(self.blocks[1](h)).square().mean()


class Leaving(Model):
    """Leaves early where the rows are small, and returns there."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if h.abs().mean() < self.limit:
            return self.head(h).square().mean()
        return self.head(self.blocks[1](h)).square().mean()


class Breaking(Model):
    """Leaves a loop over its layers."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = layer(x)
            if x.abs().max() > 3:
                break
        else:
            x = x * 3.0
        return self.head(x).square().mean()


class Unbound(Model):
    """A name that only one branch sets, and one that is set before and after."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if h.sum() > 0:
            t = h.square().mean()
            known = True
        else:
            known = False
        h = self.blocks[1](h)
        return self.head(h).square().mean() + (t if known else h.mean())


class Detaching(Model):
    """What comes before has no gradient in some steps."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if h.sum() < 0:
            h = h.detach()
        return self.head(self.blocks[1](h)).square().mean()


MODELS: dict[str, Any] = {
    one.__name__: one for one in (Branch, Numpy, Loop, Float, InBlocks, Choosing, Leaving, Breaking, Unbound, Detaching)
}
WHOLE = {"Breaking"}  # one part has all of its blocks


def batches() -> list[dict[str, Tensor]]:
    """Batches that take other branches; the rows of each are of other signs and sizes."""
    own = torch.Generator().manual_seed(3)
    x = torch.randn(7, WIDTH, generator=own, dtype=torch.float64) * torch.tensor([3, 0.1, 1, 1, 0.5, 2, 0.01])[:, None]
    return [{"x": x + 1}, {"x": x - 1}, {"x": 0.01 * x}]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_the_step_of_one_device(name: str, plan: str) -> None:
    torch.manual_seed(0)
    module = MODELS[name]().double()
    if plan == "pp" and name in WHOLE:
        with pytest.raises(ConfigError, match="pp: 2 stages"):
            verify(module, batches(), PLANS[plan])
        return
    report = verify(module, batches(), PLANS[plan])
    assert report.passed and report.largest < 1e-12, report.worst[:3]
    assert any(f"{name}." in note and "runs as it is written" in note for note in report.notes), report.notes


OTHERS = {
    "recompute": data_parallel(Plan.of(recompute="full"), 2),
    "bf16": data_parallel(Plan.of(precision="bf16"), 2),
    "zb-h1": pipeline(Plan.of(microbatches=3), 2, "zb-h1"),
    "1d-sp": tensor_parallel(Plan.of(), 2, "1d-sp"),
    "2d": tensor_parallel(Plan.of(), 4, "2d"),
    "rows": data_parallel(Plan.of(microbatches=2, rows="batch"), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", OTHERS)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in WHOLE])
def test_other_plans(name: str, plan: str) -> None:
    torch.manual_seed(0)
    plain = OTHERS[plan].numeric.precision == "fp32"
    given = batches() if plain else [{"x": one["x"].float()} for one in batches()]
    report = verify(MODELS[name]().double() if plain else MODELS[name](), given, OTHERS[plan])
    assert report.passed and report.largest < 1e-12, report.worst[:3]


@pytest.mark.parametrize("name", ["Branch", "Choosing"])
def test_microbatches_are_batches_of_their_own_which_a_note_says(name: str) -> None:
    torch.manual_seed(0)
    report = verify(MODELS[name]().double(), batches(), data_parallel(Plan.of(), 2).replace(microbatches=2))
    assert report.passed and report.largest < 1e-12, report.worst[:3]
    assert any("microbatch" in note and "the loss (gt)" in note for note in report.notes), report.notes


PARTS = {
    "Branch": "Branch.forward (lines L+2 to L+3)", "Numpy": "Numpy.forward (line L+2)",
    "Loop": "Loop.forward (lines L+2 to L+4)", "Float": "Float.forward (lines L+2 to L+3)",
    "InBlocks": "InBlocks.Own.forward (lines L+2 to L+5)", "Choosing": "Choosing.forward (lines L+2 to L+5)",
    "Leaving": "Leaving.forward (lines L+2 to L+4)",
    "Detaching": "Detaching.forward (lines L+2 to L+3)",
    "Breaking": "Breaking.forward (lines L+1 to L+6)",
}  # fmt: skip
SHARDED = {"Leaving": 3, "Breaking": 2}  # parameters under tp = 2; else three of each block and those of the head


@pytest.mark.parametrize("name", PARTS)
def test_the_smallest_part_runs_as_written_and_all_else_is_captured(name: str) -> None:
    torch.manual_seed(0)
    module = MODELS[name]()
    forward = (InBlocks.Own if name == "InBlocks" else MODELS[name]).forward
    found = Compiled(module, PLANS["tp"], {"x": torch.randn(7, WIDTH)}).general
    line = forward.__code__.co_firstlineno
    lines = PARTS[name]
    for at in range(7):
        lines = lines.replace(f"L+{at}", str(line + at))
    assert found.opaque is None and any(note.startswith(f"{lines}: it reads") for note in found.notes), found.notes
    sharded = [p.name for b in found.buckets for p in b.parameters if p.axes]
    assert len(sharded) == SHARDED.get(name, 3 * len(module.blocks) + 2), sharded


TESTED = {"Branch": ["gt"], "Choosing": ["gt"], "Detaching": ["lt"]}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_decides_by_one_test_alone_runs_on_the_rows_of_a_rank(name: str) -> None:
    """Ranks exchange what the test needs, and else rows."""
    torch.manual_seed(0)
    found = Compiled(MODELS[name](), PLANS["dp"], {"x": torch.randn(7, WIDTH)}).general
    if name in TESTED:
        assert found.meets == tuple(f"the loss ({op})" for op in TESTED[name])
        assert any("on each rank's rows, which are independent" in note for note in found.notes), found.notes
    else:
        assert any("runs as written" in where for where in found.meets) or name == "Breaking", found.meets


class Centred(Model):
    """Its rows are not independent in one of two branches."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        h = h - 0.5 * h.mean(0) if h.sum() < 0 else h * 2.0
        return self.head(self.blocks[1](h)).square().mean()


@pytest.mark.parametrize("plan", PLANS)
def test_rows_that_meet_in_one_branch(plan: str) -> None:
    torch.manual_seed(0)
    report = verify(Centred().double(), batches(), PLANS[plan])
    assert report.passed and report.largest < 1e-12, report.worst[:3]


class Hidden(Model):
    """What else it decides by in a branch no trial can show."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if h.sum() > 0:
            h = h * (2.0 if h.detach().numpy().max() > 1e7 else 1.0)
        return self.head(self.blocks[1](h)).tanh().square().mean()


def test_no_more_answers_are_looked_for_where_none_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows from parameters has no value, by whatever functions forward reads."""
    asked, found = ways.asked, list[Any]()

    def noted(*args: Any) -> Any:
        found.append(args[3])
        return asked(*args)

    monkeypatch.setattr(ways, "asked", noted)
    with apart():
        Compiled(Branch(), PLANS["dp"], {"x": batches()[0]["x"].float()})
    assert found == [BRANCHES, BRANCHES]  # as answers that follow from the batch, and as checks


def test_a_part_that_reads_more_than_its_test_runs_for_all_rows() -> None:
    torch.manual_seed(0)
    given = batches()
    given[0]["x"][0, 0] = 1e8
    report = verify(Hidden().double(), given, PLANS["dp"])
    assert report.passed, report.worst[:3]


# ---- what no part can be -------------------------------------------------------------------------------------------


class Growing(Model):
    """As many rows go on as are positive."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        h = h[torch.from_numpy(np.flatnonzero(h.detach().numpy().sum(1) > 0))]
        h = self.blocks[1](h)
        h = h * 1.0
        h = h + 0.0
        return self.head(h).square().mean()


class Dropping(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        h = torch.dropout(h, 0.1, self.training) if h.sum() > 0 else h
        return self.head(self.blocks[1](h)).square().mean()


class Rarely(Model):
    """It draws in a branch that the first batch does not take."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if h.abs().sum() < 1e-9:
            h = torch.dropout(h, 0.1, self.training)
        return self.head(self.blocks[1](h)).square().mean()


class Clamping(Model):
    """It writes to a parameter, where autograd does not see it; on one device it would be too late for this step."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if h.abs().sum() > 0:
            self.head.weight.data.mul_(0.5)
            h = 2 * h
        return self.head(self.blocks[1](h)).square().mean()


class Counting(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if h.abs().sum() > 0:
            self.limit += 1
        return self.head(self.blocks[1](h)).square().mean()


WHY: dict[type[Model], str] = {
    Dropping: r"Dropping.forward \(line \d+\) draws random numbers",
    Rarely: r"Rarely.forward \(lines .*\) draws random numbers",
    Clamping: r"Clamping.forward \(lines .*\) changes what it is given",
    Counting: r"Counting.forward changes what it is given",
}


@pytest.mark.parametrize("model", WHY)
def test_a_model_without_such_parts_is_one_unit(model: type[Model]) -> None:
    torch.manual_seed(0)
    why = f"the model could not be captured.* nor can it run as written, for {WHY[model]}"
    with pytest.raises(ConfigError, match=why):
        Compiled(model(), PLANS["tp"], {"x": batches()[0]["x"].float()})


class Stopping(Block):
    """Lets no gradient through, by what it is given."""

    def forward(self, h: Tensor) -> Tensor:
        if h.sum() < 0:
            h = h.detach()
        return super().forward(h)


@pytest.mark.parametrize("plan", ["ZeRO-3", "pp"])
def test_a_stage_that_the_loss_does_not_depend_on_in_a_step_stops_it(plan: str) -> None:
    """Elsewhere its parameters are left alone, as on one device."""

    class Last(Model):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Stopping()])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(x).square().mean()

    torch.manual_seed(0)
    module = Last().double()
    if plan == "pp":
        with pytest.raises(ShardwiseError, match="pp: in this step the loss does not depend on what earlier stages"):
            verify(module, batches(), PLANS[plan])
    else:
        report = verify(module, batches(), PLANS[plan])
        assert report.passed and report.largest < 1e-12, report.worst[:3]


class Unseen(Model):
    """What numpy decides no other answer can show before the first step."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.side = what, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if h.detach().numpy().sum() < 0:
            if self.what == "detaches":
                h = h.detach()
            elif self.what == "writes":
                self.side.weight.data.mul_(2)
            h = self.side(h)[:, : 3 if self.what == "sizes" else WIDTH]
        else:
            h = self.side(h)
        return self.head(self.blocks[1](h)).square().mean()


@pytest.mark.parametrize(
    ("what", "why"),
    [("detaches", None), ("writes", "writes to what it is given"), ("sizes", "does not return for this batch what")],
)
def test_what_only_a_step_can_show_stops_it(what: str, why: str | None) -> None:
    torch.manual_seed(0)
    if why is None:
        assert verify(Unseen(what).double(), batches(), PLANS["tp"]).passed
        return
    with pytest.raises(ShardwiseError, match=rf"Unseen.forward \(lines \d+ to \d+\) reads values, and .*{why}"):
        verify(Unseen(what).double(), batches(), PLANS["tp"])


def test_tied_modules_in_a_part() -> None:
    """Both names of a tensor get the same gradient."""

    class Tied(Choosing):
        def __init__(self) -> None:
            super().__init__()
            self.others.weight = self.some.weight

    torch.manual_seed(0)
    report = verify(Tied().double(), batches(), PLANS["dp-tp"])
    assert report.passed and report.largest < 1e-12, report.worst[:3]
