"""Models that read tensors in Python: what follows from the batch is decided for all of it, on all ranks alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.verify.verify import verify

WIDTH, CLASSES = 6, 5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.down(torch.tanh(self.up(self.norm(x))))
        if mask.any():
            h = h.masked_fill(mask[..., None], 0.0)
        return x + h


class Deciding(nn.Module):
    """It checks labels, skips a mask that hides nothing, cuts rows at the longest, and decides by a number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.register_buffer("most", torch.tensor(3))

    def forward(self, x: Tensor, hidden: Tensor, label: Tensor) -> Tensor:
        if label.max() >= CLASSES:
            raise ValueError(f"a label of {int(label.max())}")
        assert torch.isfinite(x).all().item()
        longest = int((~hidden).sum(1).max())
        x, hidden = x[:, :longest], hidden[:, :longest]
        h = self.entry(x)
        if (label == 0).sum() > self.most:
            h = 2 * h
        for layer in self.layers:
            h = layer(h, hidden)
        return F.cross_entropy(self.head(h.mean(1)), label)


def batch(lengths: list[int], labels: list[int], seed: int = 0) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(seed)
    hidden = torch.arange(7) >= torch.tensor(lengths)[:, None]
    x = torch.randn(len(lengths), 7, 4, generator=own, dtype=torch.float64)
    return {"x": x, "hidden": hidden, "label": torch.tensor(labels)}


# What is decided differs from batch to batch, and on the rows of one rank from what it is on all rows.
BATCHES = [
    batch([7, 7, 7, 7, 7, 7], [1, 2, 3, 4, 1, 2], 0),
    batch([7, 7, 7, 5, 4, 6], [0, 2, 3, 0, 1, 2], 1),
    batch([3, 3, 3, 5, 5, 5], [0, 0, 3, 0, 0, 2], 2),
    batch([7, 7, 7, 7, 7, 7], [1, 2, 0, 4, 1, 2], 3),
    batch([5, 5, 2, 5, 5], [0, 0, 0, 4, 0], 4),
    batch([7, 7, 7, 5, 4, 6], [0, 2, 3, 0, 1, 2], 5),
]

PLANS = {
    "alone": Plan.of(),
    "microbatches": Plan.of(microbatches=3),
    "dp": data_parallel(Plan.of(microbatches=2), 2),
    "zero3": data_parallel(Plan.of(), 3, zero=3),
    "tp": Plan.of(Mesh.of(tp=2)),
    "pp": Plan.of(Mesh.of(pp=2), microbatches=2, schedule="1f1b"),
    "all": Plan.of(Mesh.of(pp=2, dp=2, tp=2), microbatches=2, schedule="1f1b"),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("plan", PLANS)
def test_what_is_read_is_decided_for_the_whole_batch(plan: str) -> None:
    torch.manual_seed(0)
    report = verify(Deciding(), BATCHES, PLANS[plan])
    assert report.passed, report
    assert not [note for note in report.notes if "not captured" in note]


def test_a_model_that_reads_is_captured_once_for_each_way() -> None:
    compiled = Compiled(Deciding(), Plan.of(precision="fp64"), BATCHES[0])
    assert compiled.general.opaque is None
    assert compiled.general.rows is None

    def of(one: dict[str, Tensor]) -> Compiled:
        return compiled.deciding(one, dict(compiled.module.named_buffers()))

    assert of(BATCHES[0]) is compiled
    second, third = of(BATCHES[1]), of(BATCHES[2])
    assert of(BATCHES[3]) is compiled
    assert of(BATCHES[4]) is third  # though it has fewer rows
    assert of(BATCHES[5]) is second
    assert len({id(one) for one in (compiled, second, third)}) == 3


def test_what_forward_raises_for_a_batch_is_said() -> None:
    wrong = batch([7, 7], [1, CLASSES])
    with pytest.raises(ConfigError, match="its forward fails in a trial with 2 rows .*ValueError: a label of 5"):
        verify(Deciding(), [BATCHES[0], wrong], Plan.of())


class Keeping(nn.Module):
    """It keeps a mean over rows, of batches that are small."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(4, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("kept", torch.zeros(WIDTH))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        h = self.first(x).tanh()
        loss = F.cross_entropy(self.out(h + self.kept), label)
        if x.abs().max() < 0.01:
            self.kept = h.detach().mean(0)
        return loss


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_rows_that_meet_in_one_branch_alone(microbatches: int) -> None:
    """No note could say before that branch is taken what its microbatches compute."""
    first = {"x": torch.randn(6, 4, dtype=torch.float64), "label": torch.arange(6) % CLASSES}
    batches, plan = [first, {**first, "x": 1e-3 * first["x"]}, first], Plan.of(microbatches=microbatches)
    if microbatches == 1:
        assert verify(Keeping(), batches, data_parallel(plan, 2)).passed
        return
    with pytest.raises(ConfigError, match="microbatches: rows meet in the buffer kept by the branch that"):
        verify(Keeping(), batches, plan)


def test_windows_of_batches_are_refused() -> None:
    plan = Plan.of(Mesh.of(pp=2), schedule="pipedream", window=2)
    with pytest.raises(ConfigError, match="schedule: batches overlap, and forward decides in Python by values of each"):
        verify(Deciding(), BATCHES[:2], plan, clip_norm=None)


class Numbered(nn.Module):
    """It has a loss for each number of targets: a number that a Python function makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        factor = 1.0 if int((label > 0).sum()) < 3 else 2.0
        return factor * F.cross_entropy(self.entry(x), label)


@pytest.mark.slow
def test_many_ways_are_told() -> None:
    given = [{"x": torch.randn(12, 4), "label": (torch.arange(12) < n).long()} for n in range(11)]
    compiled = Compiled(Numbered(), Plan.of(), given[0])
    for one in given[:8]:
        compiled.deciding(one, {})
    with pytest.warns(UserWarning, match="forward has decided by values of the batch in 8 ways beside the first"):
        compiled.deciding(given[8], {})


class OfActivations(nn.Module):
    """It decides by what it computes with parameters, or by random numbers, or by what it has written."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.entry = kind, nn.Linear(4, CLASSES)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        h = self.entry(x)
        if self.kind == "parameters" and h.sum() > 0:
            h = 2 * h
        if self.kind == "float" and float(x.sum()) > 0:
            h = 2 * h
        if self.kind == "random" and torch.rand(x.shape[0]).sum() > 1.5:
            h = 2 * h
        if self.kind == "written":
            if self.steps > 1:
                h = 2 * h
            self.steps += 1
        return F.cross_entropy(h, label)


@pytest.mark.parametrize("kind", ["parameters", "random", "written", "float"])
def test_what_does_not_follow_from_the_batch_is_not_decided_beforehand(kind: str) -> None:
    given = {"x": torch.randn(4, 4, dtype=torch.float64), "label": torch.tensor([0, 1, 2, 3])}
    compiled = Compiled(OfActivations(kind).double(), Plan.of(precision="fp64"), given)
    assert compiled.general.checks is None
    assert (compiled.general.opaque is None) == (kind in ("parameters", "float"))  # a part runs as written


class Loads(nn.Module):
    """It loops over the groups that a batch has, as code for experts does over those that were hit."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, CLASSES) for _ in range(parts)])

    def forward(self, x: Tensor, group: Tensor, label: Tensor) -> Tensor:
        out = x.new_zeros(x.shape[0], CLASSES)
        for number in range(int(group.max()) + 1):
            if (group == number).any():
                out = out + (1 + number) * self.parts[number % len(self.parts)](x) * (group == number)[:, None]
        if torch.equal(group, torch.zeros_like(group)):
            out = 3 * out
        return F.cross_entropy(out, label)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "zero3"])
def test_a_loop_over_what_a_batch_has(plan: str) -> None:
    assert verify(Loads(1), grouped(), PLANS[plan]).passed


def test_stages_take_batches_that_skip_a_layer() -> None:
    labels = [0, 1, 2, 3], [0, 1, 1, 0], [3, 0, 1, 1]
    batches = [{"x": torch.randn(4, 4, dtype=torch.float64), "label": torch.tensor(label)} for label in labels]
    plan = Plan.of(Mesh.of(pp=2), microbatches=2, schedule="1f1b")
    assert verify(Skipping(), batches, plan, optimizer=OptimizerChoice("adamw", lr=0.1, weight_decay=0.1)).passed


def grouped() -> list[dict[str, Tensor]]:
    own = torch.Generator().manual_seed(0)
    x = torch.randn(5, 6, 4, generator=own, dtype=torch.float64)
    groups = torch.tensor([[0, 1, 2, 0, 1, 2], [0] * 6, [2, 2, 2, 2, 2, 2], [0, 0, 0, 1, 1, 1], [1, 2, 0, 0, 0, 0]])
    label = torch.tensor([0, 1, 2, 3, 4, 0])
    return [{"x": one, "group": group, "label": label} for one, group in zip(x, groups, strict=True)]


class Skipping(nn.Module):
    """A layer that only some batches go through: a parameter without a gradient takes no step, and no decay."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 6)])
        self.second, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
        if label.max() > 1:
            h = h + self.second(h)
        return F.cross_entropy(self.head(h), label)


@pytest.mark.quick(1)
@pytest.mark.parametrize("plan", ["zero3", "dp", "tp", "microbatches"])
def test_a_layer_that_some_batches_skip(plan: str) -> None:
    own = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, 4, generator=own, dtype=torch.float64)
    labels = ([0, 1, 2, 3, 4, 0], [0, 1, 0, 1, 0, 1], [1, 1, 1, 2, 1, 1], [0, 0, 0, 0, 0, 1])
    batches = [{"x": one, "label": torch.tensor(label)} for one, label in zip(x, labels, strict=True)]
    report = verify(Skipping(), batches, PLANS[plan], optimizer=OptimizerChoice("adamw", lr=0.01, weight_decay=0.3))
    assert report.passed, report


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", ["a layer", "experts"])
def test_what_the_first_batch_skips_has_its_place(model: str, plan: str) -> None:
    """It takes no step then, not even a decay, and takes its first one when a batch reaches it."""
    own = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, 4, generator=own, dtype=torch.float64)
    labels = ([0, 1, 0, 1, 0, 1], [0, 1, 2, 3, 4, 0], [1, 1, 0, 1, 1, 1], [1, 2, 0, 0, 0, 1])
    batches = [{"x": one, "label": torch.tensor(label)} for one, label in zip(x, labels, strict=True)]
    module: nn.Module = Skipping()
    if model == "experts":
        module, batches = Loads(3), [grouped()[i] for i in (1, 3, 0, 1, 2)]
    adamw = OptimizerChoice("adamw", lr=0.01, weight_decay=0.3)
    if model == "a layer" and PLANS[plan].mesh.axis_size("pp") > 1:  # the first batch does not tell which stage uses it
        with pytest.raises(ConfigError, match="needs second.weight on rank 1 of the pipeline, and rank 0 has it"):
            verify(module, batches, PLANS[plan], optimizer=adamw)
        return
    report = verify(module, batches, PLANS[plan], optimizer=adamw)
    assert report.passed, report
    assert not [note for note in report.notes if "not captured" in note]


class Padded(nn.Module):
    """It reads its own buffers, which nothing writes, and has a layer that no loss reaches, as codecs with a quantiser
    that passes no gradient on have."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.entry, self.head = nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, CLASSES)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.register_buffer("width", torch.tensor(2))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        codes = self.before(x).argmax(-1)
        h = torch.tanh(self.entry(x)) + codes[:, None]
        for layer in self.layers:
            h = F.pad(torch.tanh(layer(h)), (0, int(self.width)))[:, : -int(self.width)]
        return F.cross_entropy(self.head(h), label)


@pytest.mark.quick(1)
@pytest.mark.parametrize("plan", PLANS)
def test_what_is_read_of_buffers_is_the_same_in_all_batches(plan: str) -> None:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(rows, 4), "label": torch.arange(rows) % CLASSES} for rows in (6, 7)]
    report = verify(Padded(), batches, PLANS[plan])
    assert report.passed, report
    assert not [note for note in report.notes if "not captured" in note]


class TwoNames(nn.Module):
    """Its last layer has two names, and is called by one; or it is called in the first stage also, in some batches."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.twice, self.last = twice, nn.Linear(6, 6)
        self.entry, self.layers = nn.Linear(4, 6), nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Sequential(self.last, nn.Linear(6, CLASSES))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        h = torch.tanh(self.entry(x))
        several = bool(label.max() > 1)
        if several and self.twice:
            h = torch.tanh(self.last(h))
        for layer in self.layers:
            h = h + torch.tanh(layer(h)) * (2 if several else 1)
        return F.cross_entropy(self.head(h), label)


@pytest.mark.parametrize("plan", ["pp", "all"])
def test_a_layer_of_two_names(plan: str) -> None:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(4, 4), "label": torch.tensor(one)} for one in ([0, 1, 2, 3], [0, 1, 1, 0])]
    assert verify(TwoNames(twice=False), batches, PLANS[plan]).passed
    said = "needs last.* on rank 1 of the pipeline, and rank 0 has it"
    if plan == "pp":
        said = "last.* is used on ranks 0 and 1 of the pipeline in other batches, and on 1 alone in this one"
    with pytest.raises(ConfigError, match=said):
        verify(TwoNames(twice=True), batches, PLANS[plan])


class Detached(nn.Module):
    """A parameter has no gradient in one branch, though the loss depends on it there."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.second = nn.Linear(4, CLASSES), nn.Parameter(torch.ones(CLASSES))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        second = self.second if label.max() > 1 else self.second.detach()
        return F.cross_entropy(self.entry(x) * second, label)


def test_a_parameter_without_a_gradient_in_the_first_batch_alone() -> None:
    given = {"x": torch.randn(4, 4), "label": torch.tensor([0, 1, 1, 0])}
    assert "second has no gradient for the first" in (Compiled(Detached(), Plan.of(), given).general.opaque or "")


class OneByOne(nn.Module):
    """It reads each row by itself, as detectors read the boxes of each picture."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        loss = x.new_zeros(())
        for row in range(x.shape[0]):
            if label[row] > 0:
                loss = loss + F.cross_entropy(self.head(x[row]), label[row])
        return loss / x.shape[0]


@pytest.mark.slow
def test_what_is_read_row_by_row() -> None:
    own = torch.Generator().manual_seed(0)
    labels = [1, 0, 2, 3, 0, 1, 4], [0, 0, 1, 2, 3], [1, 0, 2, 3, 0, 1, 4]
    x = [torch.randn(len(one), 4, generator=own, dtype=torch.float64) for one in labels]
    batches = [{"x": one, "label": torch.tensor(label)} for one, label in zip(x, labels, strict=True)]
    assert verify(OneByOne(), batches, Plan.of()).passed
    assert verify(OneByOne(), batches, Plan.of(Mesh.of(tp=2))).passed


class Attend(nn.Module):
    """It attends within each row of those that lie one after the other, cut in Python at their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        q, k, v = self.entry(x)[None, None].chunk(3, -1)
        each = zip(*(torch.split(one, (ends[1:] - ends[:-1]).tolist(), 2) for one in (q, k, v)), strict=True)
        return x + torch.cat([F.scaled_dot_product_attention(a, b, c) for a, b, c in each], 2)[0, 0]


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList([Attend(), Attend()])

    def forward(self, x: Tensor, length: Tensor, y: Tensor) -> Tensor:
        h, ends = self.entry(x.flatten(0, 1)), F.pad(length.cumsum(0), (1, 0))
        for layer in self.layers:
            h = layer(h, ends)
        return (self.head(h).view(len(y), -1).mean(1) - y).square().mean()


def rows_of(lengths: list[int], seed: int) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(seed)
    x = torch.randn(len(lengths), 5, 4, generator=own, dtype=torch.float64)
    y = torch.randn(len(lengths), generator=own, dtype=torch.float64)
    return {"x": x, "length": torch.tensor(lengths), "y": y}


@pytest.mark.quick(1)
@pytest.mark.parametrize("plan", ["dp", "pp", "all", "microbatches"])
def test_what_is_read_of_each_row_of_a_microbatch(plan: str) -> None:
    torch.manual_seed(0)
    report = verify(Split().double(), [rows_of([5] * 7, 1), rows_of([5] * 5, 2)], PLANS[plan])
    assert report.passed and report.largest < 1e-12, report.worst[:3]
    assert not [note for note in report.notes if "not captured" in note]


class Windows(Split):
    """The ends of rows are found in Python, as windows of pictures are: each as often as tokens end there."""

    def forward(self, x: Tensor, length: Tensor, y: Tensor) -> Tensor:
        ends, order = [0], []
        for one in length.tolist():
            places = torch.arange(8).view(2, 4)
            order.append(places[places < one] + ends[-1])
            ends.extend((torch.tensor([one, one]) + ends[-1]).tolist())
        h = self.entry(x.flatten(0, 1))[torch.cat(order)]
        for layer in self.layers:
            h = layer(h, torch.unique_consecutive(torch.tensor(ends)))
        return (self.head(h).view(len(y), -1).mean(1) - y).square().mean()


@pytest.mark.quick(1)
@pytest.mark.parametrize("plan", ["tp", "zero3", "pp", "all", "microbatches"])
def test_sizes_that_values_say(plan: str) -> None:
    torch.manual_seed(0)
    report = verify(Windows().double(), [rows_of([5] * 7, 1), rows_of([5] * 5, 2)], PLANS[plan])
    assert report.passed and report.largest < 1e-12, report.worst[:3]
    assert not [note for note in report.notes if "not captured" in note]


class Visible(nn.Module):
    """It computes with the patches that a mask leaves, as many of each row, and compares the others, as VideoMAE does;
    and it has places for the most marks that a row has, as Longformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = torch.tanh(self.entry(x))[~mask].reshape(len(x), -1, WIDTH)
        for layer in self.layers:
            h = torch.tanh(layer(h)) * (2 if h.shape[1] > 3 else 1)
        most = mask.sum(1).max()
        places = h.new_zeros(len(x), most.expand(1).view(1)[0], 4)
        for column in range(places.shape[1]):
            places[:, column] = self.head(h.mean(1)) + column
        marked = mask.nonzero(as_tuple=True)
        goal = x[marked].view(len(marked[0]), -1).reshape(len(x), -1, 4) + x[mask].view(len(x), -1, 4)
        return (places - goal.mean(1, keepdim=True)).square().mean()


def patches(rows: int, hidden: int, seed: int) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, 4, generator=own, dtype=torch.float64)
    return {"x": x, "mask": torch.rand(rows, 6, generator=own).argsort(1) < hidden}


@pytest.mark.quick(2)
@pytest.mark.parametrize("plan", ["dp", "tp", "zero3", "pp", "all", "microbatches"])
def test_patches_that_a_mask_leaves(plan: str) -> None:
    torch.manual_seed(0)
    batches = [patches(8, 2, 1), patches(5, 2, 2), patches(6, 3, 3)]
    report = verify(Visible().double(), batches, PLANS[plan])
    assert report.passed and report.largest < 1e-12, report.worst[:3]
    assert not [note for note in report.notes if "not captured" in note]


class Totals(Split):
    """It decides by a number of all rows."""

    def forward(self, x: Tensor, length: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, length, y)
        return 2 * loss if int(length.sum()) > 30 else loss


def test_microbatches_that_would_decide_otherwise_are_refused() -> None:
    assert verify(Totals().double(), [rows_of([5] * 7, 1)], PLANS["zero3"]).passed
    with pytest.raises(ConfigError, match="microbatches: 2, of which each decides in Python by its own values, and a"):
        verify(Totals().double(), [rows_of([5] * 7, 1)], Plan.of(microbatches=2))


OTHERS = {
    "microbatches": Plan.of(microbatches=3),
    "dp": data_parallel(Plan.of(microbatches=2), 2),
    "pp": Plan.of(Mesh.of(pp=2), microbatches=3, schedule="1f1b"),
    "tp": Plan.of(Mesh.of(tp=2), microbatches=2),
    "all": Plan.of(Mesh.of(pp=2, dp=2, tp=2), microbatches=2, schedule="1f1b"),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("plan", OTHERS)
def test_microbatches_of_which_forward_reads_other_values(plan: str) -> None:
    """Each is captured for the values of its own rows; of one size there are several."""
    torch.manual_seed(0)
    lengths = [[5, 5, 5, 5, 4, 6], [4, 6, 5, 5, 6, 4], [5, 5, 5, 5, 4, 6], [6, 4, 5, 5, 5, 5]]
    report = verify(Split().double(), [rows_of(each, i) for i, each in enumerate(lengths)], OTHERS[plan])
    assert report.passed and report.largest < 1e-12, report.worst[:3]
    assert not [note for note in report.notes if "not captured" in note]


class Packed(nn.Module):
    """Pictures of 8 patches each lie one after the other; their grids say where each begins, as towers of vision do."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.attend, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 1)
        self.heights, self.order = nn.Embedding(5, WIDTH), nn.Linear(1, WIDTH)

    def forward(self, x: Tensor, grid: Tensor, y: Tensor) -> Tensor:
        counts = grid.prod(1)
        places = [torch.arange(height).repeat_interleave(width) for height, width in grid.tolist()]
        first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        order = (torch.arange(counts.sum()) - first)[:, None].to(x.dtype)
        h = self.entry(x.flatten(0, 1)) + self.heights(torch.cat(places)) + self.order(order / 8)
        q, k, v = self.attend(h).chunk(3, -1)
        each = zip(*(torch.split(one, counts.tolist()) for one in (q, k, v)), strict=True)
        h = torch.cat([torch.softmax(a @ b.T, -1) @ c for a, b, c in each])
        return (self.head(h).view(len(y), -1).mean(1) - y).square().mean()


def pictures(grids: list[tuple[int, int]], seed: int) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(seed)
    x = torch.randn(len(grids), 8, 4, generator=own, dtype=torch.float64)
    return {"x": x, "grid": torch.tensor(grids), "y": torch.randn(len(grids), generator=own, dtype=torch.float64)}


@pytest.mark.quick(2)
@pytest.mark.parametrize("plan", ["dp", "tp", "zero3", "microbatches"])
def test_pictures_that_lie_one_after_the_other(plan: str) -> None:
    torch.manual_seed(0)
    batches = [pictures([(2, 4), (4, 2), (1, 8), (2, 4)], 1), pictures([(4, 2), (4, 2), (2, 4), (1, 8)], 2)]
    report = verify(Packed().double(), batches, PLANS[plan])
    assert report.passed and report.largest < 1e-12, report.worst[:3]
    given = {name: one.float() if one.is_floating_point() else one for name, one in batches[0].items()}
    assert Compiled(Packed(), PLANS[plan], given).general.opaque is None


class Resizing(nn.Module):
    """Its positions have the size of the part of the images that is not hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.head = nn.Parameter(torch.randn(1, 4, 5, 5)), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, hidden: Tensor, label: Tensor) -> Tensor:
        size = (~hidden).sum(1).max()
        places = F.interpolate(self.places, size=(2, size), mode="bilinear")
        places = F.pad(places, (0, 7 - size)).mean(2).transpose(1, 2)
        return F.cross_entropy(self.head((x * places).mean(1)), label)


@pytest.mark.quick(1)
@pytest.mark.parametrize("plan", ["dp", "tp"])
def test_sizes_are_read_of_tensors(plan: str) -> None:
    torch.manual_seed(0)
    report = verify(Resizing(), BATCHES, PLANS[plan])
    assert report.passed, report
    assert not [note for note in report.notes if "not captured" in note]


class Pooled(nn.Module):
    """Each row is pooled up to its own length, and a number that is drawn for all rows may skip a layer: speaker heads
    do so."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor, length: Tensor, label: Tensor) -> Tensor:
        h, label = self.entry(x), label.flatten()
        for layer in self.layers:
            if not self.training or torch.rand([]) > 0.3:
                h = torch.tanh(layer(h))
        h = torch.stack([self.part(h[i, :one]) for i, one in enumerate(length)])
        scores = torch.where(F.one_hot(label, CLASSES).bool(), self.head(h) - 0.4, self.head(h))
        return F.cross_entropy(scores, label)

    def part(self, one: Tensor) -> Tensor:
        return one.mean(0)


class Prefixed(Pooled):
    """What it does with a row depends on the row's length."""

    def part(self, one: Tensor) -> Tensor:
        return 2 * one.mean(0) if one.shape[0] > 3 else one[-1]


def labelled(lengths: list[int], seed: int) -> dict[str, Tensor]:
    found = rows_of(lengths, seed)
    return {"x": found["x"], "length": found["length"], "label": torch.arange(len(lengths)) % CLASSES}


@pytest.mark.quick(2)
@pytest.mark.parametrize("plan", ["dp", "zero3", "tp", "pp", "all"])
def test_rows_up_to_their_own_lengths(plan: str) -> None:
    torch.manual_seed(0)
    batches = [labelled(lengths, seed) for seed, lengths in enumerate([[5, 1, 3, 2, 5, 4, 1], [2, 3, 1, 4, 5]])]
    report = verify(Pooled().double(), batches, PLANS[plan])
    assert report.passed and report.largest < 1e-12, report.worst[:3]
    assert not [note for note in report.notes if "not captured" in note]


@pytest.mark.quick(1)
@pytest.mark.parametrize("plan", ["alone", "tp"])
def test_bounds_of_slices_are_read(plan: str) -> None:
    torch.manual_seed(0)
    batches = [labelled(lengths, seed) for seed, lengths in enumerate([[5, 4, 3, 2], [2, 3, 5, 4], [5, 4, 3, 2]])]
    report = verify(Prefixed().double(), batches, PLANS[plan])
    assert report.passed and report.largest < 1e-12, report.worst[:3]
    assert not [note for note in report.notes if "not captured" in note]
