"""Random numbers that a forward draws for one row after the other, in a loop over the rows of its batch, and choices by
weights: each row has its own under every plan, those that it has on one device."""

from collections.abc import Callable

import pytest
import torch
from test_read_in_python import PLANS
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.parallel.data import data_parallel
from shardwise.verify.oracle import Oracle
from shardwise.verify.verify import verify

ROWS, LENGTH, WIDTH = 7, 6, 4


def _parts(x: Tensor, keep: Tensor) -> Tensor:
    return torch.stack([row[torch.randperm(LENGTH)[:3]].mean(0) for row in x])


def _pairs(x: Tensor, keep: Tensor) -> Tensor:
    found = []
    for row in x:
        one = torch.randperm(LENGTH)[:2]
        other = torch.randperm(LENGTH)[:3]
        found.append(row[one].sum(0) - row[other].sum(0))
    return F.dropout(torch.stack(found), 0.3)


def _noise(x: Tensor, keep: Tensor) -> Tensor:
    return torch.stack([F.dropout(row, 0.4).mean(0) + torch.rand(WIDTH).to(x) for row in x]) + torch.rand(()).to(x)


def _chosen(x: Tensor, keep: Tensor) -> Tensor:
    found = []
    for row, kept in zip(x, keep, strict=True):
        weights = kept.float() + 0.1
        few, many = torch.multinomial(weights, 2), weights.multinomial(9, replacement=True)
        found.append(row[few].sum(0) * row[many].mean(0))
    return torch.stack(found)


def _as_values_say(x: Tensor, keep: Tensor) -> Tensor:
    found = []
    for row, kept in zip(x, keep, strict=True):
        places = torch.where(kept)[0]
        found.append(row[places[torch.randperm(places.numel())[:2]]].sum(0))
    return torch.stack(found)


def _in_one_line_or_another(x: Tensor, keep: Tensor) -> Tensor:
    found = []
    for row, kept in zip(x, keep, strict=True):
        if int(kept.sum()) > 3:
            some = torch.multinomial(torch.ones(LENGTH), 2)
        else:
            some = torch.multinomial(torch.ones(LENGTH), 3, replacement=True)
        found.append(row[some].mean(0))
    return torch.stack(found)


def _as_many_as_there_are(x: Tensor, keep: Tensor) -> Tensor:
    found = []
    for row, kept in zip(x, keep, strict=True):
        places = kept.nonzero()[:, 0]
        most = 2 if len(places) > 3 else 1
        found.append(row[places[torch.randperm(len(places))[:most]]].sum(0))
    return torch.stack(found)


def _batched(x: Tensor, keep: Tensor) -> Tensor:
    weights = x.mean(-1).softmax(-1)
    some = torch.cat([weights.multinomial(2), weights.multinomial(5, replacement=True)], -1)
    of_each = torch.multinomial(x.flatten(0, 1).exp(), 1).view(len(x), LENGTH, 1)
    return x.gather(1, some[:, :, None].expand(-1, -1, WIDTH)).mean(1) + x.gather(2, of_each).mean(1)


def _once(x: Tensor, keep: Tensor) -> Tensor:
    return x[:, torch.randperm(LENGTH)[:2]].sum(1) + x[:, torch.multinomial(torch.ones(LENGTH), 2)].mean(1)


def _of_other_distributions(x: Tensor, keep: Tensor) -> Tensor:
    x = F.rrelu(x, training=True) + F.rrelu(x.clone(), 0.2, 0.9, training=True, inplace=True)
    far = torch.empty_like(x).cauchy_(0.5, 2.0).atan() + torch.empty_like(x).log_normal_(0.1, 0.4)
    often = torch.zeros(len(x), 1, WIDTH, dtype=torch.int64).geometric_(0.3)
    x = x * far / often + torch.empty_like(x).exponential_(0.7)
    x = x + nn.init.trunc_normal_(torch.empty_like(x), 0.2) * nn.init.trunc_normal_(torch.empty(WIDTH).to(x), a=2, b=3)
    return F.dropout(x, 0.2).mean(1)


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "parts": _parts,
    "pairs": _pairs,
    "noise": _noise,
    "chosen": _chosen,
    "as values say": _as_values_say,
    "in one line or another": _in_one_line_or_another,
    "as many as there are": _as_many_as_there_are,
    "batched": _batched,
    "once": _once,
    "of other distributions": _of_other_distributions,
}


class Model(nn.Module):
    def __init__(self, form: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.form = nn.Linear(3, WIDTH), form
        self.down = nn.Sequential(nn.Linear(WIDTH, 9), nn.Dropout(0.2), nn.ReLU(), nn.Linear(9, 1))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.down(self.form(self.up(x).tanh(), keep)).square().mean()


class NotCaptured(Model):
    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        loss = super().forward(x, keep)
        return loss / 2 if loss > 1e9 and locals() else loss


def batches(rows: int = ROWS) -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(3)
    found = []
    for _ in range(2):
        keep = torch.rand(rows, LENGTH, generator=made) > 0.4
        keep[:, :2] = True
        found.append({"x": torch.randn(rows, LENGTH, 3, generator=made), "keep": keep})
    return found


OF_VALUES = ("as values say", "in one line or another", "as many as there are")


def check(form: str, plan: Plan, captured: bool = True) -> None:
    torch.manual_seed(1)
    rows = ROWS if plan.mesh.axis_size("pp") == 1 else ROWS + 1  # stages pass tensors of one size on
    model = Model(FORMS[form]) if captured else NotCaptured(FORMS[form])
    report = verify(model, batches(rows), plan, clip_norm=None)
    assert report.passed and report.tolerance <= 1e-10, report
    assert captured != any("not captured" in note for note in report.notes)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("form", [form for form in FORMS if form not in OF_VALUES])
def test_each_row_has_its_own(form: str, plan: str) -> None:
    check(form, PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan.of(), data_parallel(Plan.of(), 3, zero=3), Plan.of(Mesh.of(dp=2, tp=2))])
@pytest.mark.parametrize("form", OF_VALUES)
def test_how_many_follows_from_values(form: str, plan: Plan) -> None:
    check(form, plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan.of(microbatches=3), data_parallel(Plan.of(microbatches=2), 3, zero=2)])
@pytest.mark.parametrize("form", FORMS)
def test_in_models_that_are_not_captured(form: str, plan: Plan) -> None:
    check(form, plan, captured=False)


def test_microbatches_that_find_other_numbers_have_a_capture_each() -> None:
    check("as many as there are", Plan.of(microbatches=2))


def _backwards(x: Tensor, keep: Tensor) -> Tensor:
    return torch.stack([row[torch.randperm(LENGTH)[:3]].sum(0) for row in x.flip(0)]).flip(0)


def test_a_loop_in_another_order_shows_where_the_model_is_not_captured() -> None:
    torch.manual_seed(1)
    plan = data_parallel(Plan.of(), 2)
    with pytest.raises(ConfigError, match="a trial did not show that its loss is a mean over rows"):
        verify(NotCaptured(_backwards), batches(), plan)


def test_one_device_draws_the_same_in_microbatches() -> None:
    for form in FORMS.values():
        torch.manual_seed(1)
        model, batch = Model(form), batches()[0]
        whole, parts = (Oracle(model, microbatches=number).step(batch).loss for number in (1, 3))
        assert abs(whole - parts) < 1e-14
