"""CTC losses, of labels in one list or in rows, are those of one device under every plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.verify.verify import verify

STEPS, LABELS, CLASSES = 9, 4, 7


class Speech(nn.Module):
    """A head as the speech models of transformers have it: ignored labels are negative."""

    def __init__(self, form: str = "list", reduction: str = "sum", zero_infinity: bool = True) -> None:
        super().__init__()
        self.form, self.reduction, self.zero_infinity = form, reduction, zero_infinity
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        log_probs = F.log_softmax(self.head(x), -1).transpose(0, 1)
        lengths, mask = seen.sum(-1), labels >= 0
        rest = (lengths, mask.sum(-1), 0, self.reduction, self.zero_infinity)
        if self.form == "list":
            if labels.max() >= CLASSES:
                raise ValueError("a label that is no class")
            return F.ctc_loss(log_probs, labels.masked_select(mask), *rest)
        loss = nn.CTCLoss(0, self.reduction, self.zero_infinity)
        return loss(log_probs, labels.clamp_min(0), lengths, mask.sum(-1)).mean()


def batch(rows: int, seed: int, scattered: bool = False) -> dict[str, Tensor]:
    """Rows of several lengths, some with no labels, and one with more than it has steps; ``scattered`` are those that
    do not stand at the beginning."""
    own = torch.Generator().manual_seed(seed)
    lengths = torch.randint(LABELS, STEPS + 1, (rows,), generator=own)
    counts = torch.randint(LABELS + 1, (rows,), generator=own)
    labels = torch.randint(1, CLASSES, (rows, LABELS), generator=own)
    kept = torch.arange(LABELS) < counts[:, None]
    lengths[0], kept[0] = 2, True
    if scattered:
        kept = kept.flip(1)
    return {
        "x": torch.randn(rows, STEPS, 6, generator=own, dtype=torch.float64),
        "seen": (torch.arange(STEPS) < lengths[:, None]).to(torch.int64),
        "labels": labels.masked_fill(~kept, -100),
    }


PLANS = {
    "alone": Plan.of(),
    "dp": data_parallel(Plan.of(microbatches=2), 2),
    "zero3": data_parallel(Plan.of(), 3, zero=3),
    "tp": Plan.of(Mesh.of(tp=2)),
    "pp": Plan.of(Mesh.of(pp=2), microbatches=2, schedule="1f1b"),
    "all": Plan.of(Mesh.of(pp=2, dp=2, tp=2), microbatches=2, schedule="1f1b"),
}
FORMS = [("list", "sum"), ("list", "mean"), ("rows", "mean"), ("rows", "none")]


@pytest.mark.quick(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("form", "reduction"), FORMS)
def test_ctc_is_that_of_one_device(form: str, reduction: str, plan: str) -> None:
    torch.manual_seed(0)
    batches = [batch(rows, seed, form == "list") for seed, rows in enumerate((6, 6, 5))]
    report = verify(Speech(form, reduction), batches, PLANS[plan])
    assert report.passed, report
    assert not [note for note in report.notes if "not captured" in note]


def test_rows_stay_on_their_ranks() -> None:
    found = Compiled(Speech(), Plan.of(precision="fp64"), batch(6, 0)).general
    assert found.opaque is None and found.rows is None and not found.meets and not found.notes_without_rule(6)


def test_a_list_of_labels_that_says_nothing_of_rows() -> None:
    class Alone(Speech):
        def forward(self, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
            log_probs = F.log_softmax(self.head(self.layers[0](x)), -1).transpose(0, 1)
            return F.ctc_loss(log_probs, labels.flatten(), seen.sum(-1), (labels >= 0).sum(-1))

    with pytest.raises(ConfigError, match="tp: the model could not be captured"):
        Compiled(Alone(), Plan.of(Mesh.of(tp=2)), batch(6, 0))
