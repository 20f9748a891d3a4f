"""Models that nobody would call usual, under all recipes, equal one device."""

from __future__ import annotations

import functools

import pytest
import torch
from test_tensor import ALONE, KINDS, PLAIN, check, oracle
from torch import Tensor, nn

from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import run_steps, run_threads, verify


class PartsOfAParameter(nn.Module):
    """A parameter of a product that is taken apart as well, by ops with several results."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.out = nn.Parameter(torch.randn(4, 8)), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ self.table.T).softmax(-1)
        first, second = self.table.chunk(2)
        scale, shift, *_ = self.table.unbind()
        h = self.up(x) * scale + shift + first.sum(0) * second.mean(0) + scores @ self.table
        values, _ = self.table.sort(-1)
        return self.out(h.tanh() + values[1]).square().mean()


class RepeatedParts(nn.Module):
    """Columns that are repeated, and then taken apart within one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 6), nn.Linear(4, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first(x).repeat_interleave(2, -1).split([4, 8], -1)
        return (self.second(first) + self.third(second.sin())).square().mean()


class Counts(nn.Module):
    """Scores less how often each class occurs in the batch: a size that nobody knows until it meets the classes'."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(8, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        labels = x[:, 0].abs().mul(3).long() % 12
        scores = self.out(self.up(x).tanh()) - torch.bincount(labels, minlength=12).to(x.dtype).log1p()
        return nn.functional.cross_entropy(scores, labels)


class ExpertsInALoop(nn.Module):
    """Rows to the experts that chose them, found by the positions of true, and added to zeros without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(2, -1)
        h = x * weight.sum(-1, keepdim=True)
        out, mask = torch.zeros_like(h), nn.functional.one_hot(chosen, 3).permute(2, 1, 0)
        for i, expert in enumerate(self.experts):
            place, row = torch.where(mask[i])
            out.index_add_(0, row, expert(h[None, row].reshape(-1, 8)) * weight[row, place, None])
        return (out + h).square().mean()


class ReadInManyWays(nn.Module):
    """One weight that ten ops read, some of them what others make of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Parameter(torch.randn(12, 8) * 0.4), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h, table = x.unflatten(0, (-1, 1)).expand(-1, 2, -1), self.table
        mask = torch.ones(12, 8, dtype=x.dtype).tril()
        for _ in range(2):
            up, down = (table * mask).T.expand(h.shape[0], 8, 12), torch.where(table > 0, table, table * 0.1)
            h = self.norm(h + torch.bmm(h, up).relu() @ down * 0.3)
            heads = (h.flatten(0, 1) @ table.roll(1, 0).T).view(-1, 2, 3, 4)
            h = self.norm(h + torch.einsum("bshd,hdi->bsi", heads, (table * mask).view(3, 4, 8)) * 0.3)
        return h.square().mean() + 1e-3 * table.square().sum()


class Frequencies(nn.Module):
    """Products of complex numbers, whose parameter is pairs of real ones: sums over channels are sums of complex
    numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.filters, self.out = (
            nn.Linear(8, 6),
            nn.Parameter(torch.randn(6, 6, 2, 2) * 0.3),
            nn.Linear(6, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x[:, None] * torch.arange(1, 5, dtype=x.dtype)[:, None]).transpose(1, 2)
        filters = torch.view_as_complex(self.filters)
        found = torch.einsum("bim,iom->bom", torch.fft.rfft(h)[..., :2], filters)
        found = torch.einsum("bom,iom->bim", found, filters.conj())
        h = h + torch.fft.irfft(found, n=4)
        return self.out(h.transpose(1, 2)).square().mean()


class FewHeads(nn.Module):
    """Heads, fewer than ranks, which a linear mixes: some ranks have none."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.mix, self.out = nn.Linear(8, 12), nn.Linear(3, 3), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            self.query(x[:, None] * torch.arange(1, 3, dtype=x.dtype)[:, None]).unflatten(-1, (3, 4)).transpose(1, 2)
        )
        scores = self.mix((heads @ heads.mT).movedim(1, -1)).movedim(-1, 1).softmax(-1)
        return self.out((scores @ heads).transpose(1, 2).flatten(2)).square().mean()


MODELS = {
    "parts of a parameter": PartsOfAParameter, "repeated parts": RepeatedParts, "frequencies": Frequencies,
    "few heads": FewHeads,
}  # fmt: skip
OF_DATA = {"counts": Counts, "experts in a loop": ExpertsInALoop}


@functools.cache
def subject(name: str) -> tuple[Compiled, list[dict[str, Tensor]], list]:  # type: ignore[type-arg]
    torch.manual_seed(0)
    module = {**MODELS, **OF_DATA, "many ways": ReadInManyWays}[name]().double()
    batches = [{"x": torch.randn(rows, 8, dtype=torch.float64)} for rows in (7, 5)]
    return Compiled(module, ALONE, batches[0]), batches, oracle(module, None, batches, PLAIN, 1)


@pytest.mark.quick(3)
@pytest.mark.few(7)
@pytest.mark.parametrize(("name", "kind", "tp"), [
    pytest.param(name, *one, marks=() if (i + j) % 4 == 0 else pytest.mark.full) for i, name in enumerate(MODELS) for j,
    one in enumerate(KINDS)
])  # fmt: skip
def test_an_odd_model(name: str, kind: str, tp: int) -> None:
    one, batches, truth = subject(name)
    check(one.under(tensor_parallel(ALONE, tp, kind)), batches, truth, PLAIN)  # type: ignore[arg-type]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("kind", "tp"), [("1d", 2), ("2d", 4)])
@pytest.mark.parametrize("name", MODELS)
def test_a_solver_takes_odd_models(name: str, kind: str, tp: int) -> None:
    one, batches, truth = subject(name)
    check(one.under(tensor_parallel(ALONE, tp, kind, "auto")), batches, truth, PLAIN)  # type: ignore[arg-type]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("kind", "tp", "plan"), [("1d", 2, "recipe"), ("1d-sp", 3, "recipe"), ("3d", 8, "recipe"), ("2d", 4, "auto")]
)
@pytest.mark.parametrize("name", OF_DATA)
def test_sizes_of_data(name: str, kind: str, tp: int, plan: str) -> None:
    one, batches, truth = subject(name)
    check(one.under(tensor_parallel(ALONE, tp, kind, plan)), batches, truth, PLAIN)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_solver_has_room_for_a_weight_that_is_read_in_many_ways() -> None:
    """In tables of what each reader makes of it these would be gigabytes: parts of the model are solved in turn."""
    one, batches, truth = subject("many ways")
    plan = one.under(tensor_parallel(ALONE, 2, "1d", "auto"))
    assert any("too many ops depend on each other" in note for note in plan.general.notes)
    check(plan, batches, truth, PLAIN)


def test_numbers_in_pairs_that_ranks_have_one_each_of() -> None:
    """The halves are gathered side by side: ``view_as_complex`` takes no others."""
    one, batches, truth = subject("frequencies")
    check(one.under(tensor_parallel(ALONE, 2, "1d", "propagate", {"filters": "3"})), batches, truth, PLAIN)


class SequenceFirst(nn.Module):
    """BatchNorm of prototypes, and of a sequence that is before the rows: dim 0 is not the rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 5), nn.BatchNorm1d(5)
        self.kinds, self.centred = nn.Parameter(torch.randn(7, 5)), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(self.up(x).relu())
        near = (h @ self.centred(self.kinds).T).logsumexp(-1)
        return self.norm(h.permute(1, 2, 0)).tanh().square().mean() + near.mean()


@functools.cache
def sequence_first() -> tuple[Compiled, list[dict[str, Tensor]], list]:  # type: ignore[type-arg]
    torch.manual_seed(0)
    module = SequenceFirst().double()
    batches = [{"x": torch.randn(rows, 6, 8, dtype=torch.float64)} for rows in (7, 4, 1)]
    return Compiled(module, ALONE, batches[0]), batches, oracle(module, None, batches, PLAIN, 1)


@pytest.mark.parametrize(("kind", "tp"), [("1d-sp", 2), ("1d-sp", 4), ("2d", 4)])
def test_batch_norm_counts_what_is_cut_whatever_it_is(kind: str, tp: int) -> None:
    one, batches, truth = sequence_first()
    check(one.under(tensor_parallel(ALONE, tp, kind)), batches, truth, PLAIN)  # type: ignore[arg-type]


@pytest.mark.parametrize("pins", [{"kinds": "0"}, {"kinds": "0", "down": "1"}])
def test_batch_norm_of_a_pinned_parameter(pins: dict[str, str]) -> None:
    one, batches, truth = sequence_first()
    check(one.under(tensor_parallel(ALONE, 2, "1d", "propagate", pins)), batches, truth, PLAIN)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(67, 8), nn.Linear(8, 67, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.out(self.table(ids)).flatten(0, 1), labels.flatten())


@functools.cache
def table() -> tuple[Compiled, dict[str, Tensor]]:
    torch.manual_seed(0)
    batch = {"ids": torch.randint(0, 67, (4, 3)), "labels": torch.randint(0, 67, (4, 3))}
    return Compiled(Table().double(), ALONE, batch), batch


@pytest.mark.parametrize(("kind", "tp", "field", "value"), [
    ("1d", 2, "ids", -1), ("1d", 2, "labels", -1), ("1d", 3, "ids", 67), ("1d", 3, "labels", 67), ("2d", 4, "ids", 100),
    ("2d", 4, "labels", 100),
])  # fmt: skip
def test_what_is_not_in_a_table_in_pieces_fails_as_on_one_device(kind: str, tp: int, field: str, value: int) -> None:
    one, batch = table()
    compiled = one.under(tensor_parallel(ALONE, tp, kind))  # type: ignore[arg-type]
    layouts = {p.name: p.layout for bucket in compiled.general.buckets for p in bucket.parameters}
    assert kind != "1d" or any(factor.axes for factor in layouts["table.weight"].dims[0])
    batch = {k: v.clone() for k, v in batch.items()}
    batch[field][1, 2] = value
    with pytest.raises((IndexError, RuntimeError), match="out of (range|bounds)"):
        run_threads(compiled, lambda comm: run_steps(compiled, comm, [batch], PLAIN, 1.0, 0))


class NormTwice(nn.Module):
    """A BatchNorm that is used twice counts its batches twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.out = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.out(self.norm(self.up(x)).relu())).tanh().mean()


@pytest.mark.parametrize("where", ["1", "-1", "whole"])
def test_a_pin_of_what_batch_norm_returns_is_not_of_its_buffers(where: str) -> None:
    torch.manual_seed(0)
    module, batch = NormTwice().double(), {"x": torch.randn(7, 8, dtype=torch.float64)}
    compiled = Compiled(module, tensor_parallel(ALONE, 2, "1d", "propagate", {"norm": where}), batch)
    layouts = {p.name: p.layout for bucket in compiled.general.buckets for p in bucket.parameters}
    assert bool(layouts["norm.weight"] and layouts["norm.weight"].sharding_axes) == (where != "whole")
    check(compiled, [batch], oracle(module, None, [batch], PLAIN, 1), PLAIN)


class Pairs(nn.Module):
    """It takes even numbers of rows alone, and a branch depends on values, so that it cannot be captured."""

    def __init__(self, p: float, branches: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.drop, self.branches = nn.Linear(4, 3), nn.Dropout(p), branches

    def forward(self, x: Tensor) -> Tensor:
        if self.branches and x.sum() > 1e9:
            return x.sum()
        pairs = x.view(x.shape[0] // 2, 2, 4)
        return self.drop(self.layer(pairs).flatten(0, 1)).square().mean()


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("branches", [False, True])
def test_even_numbers_of_rows(p: float, branches: bool) -> None:
    """Batch dims of random calls are found with twice as many rows where one more is not legal."""
    batch = {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(0))}
    report = verify(Pairs(p, branches), [batch] * 2, data_parallel(Plan.of(), 1 if branches else 2))
    assert report.passed, report.worst[:3]


class Square(nn.Module):
    """It draws a number for each pair of rows."""

    def __init__(self, dropout: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.dropout = nn.Linear(4, 3), dropout

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        pairs = h @ h.T
        if self.dropout:
            return nn.functional.dropout(pairs, 0.5).square().mean()
        return (pairs * torch.rand(x.shape[0], x.shape[0])).square().mean()


@pytest.mark.parametrize("dropout", [False, True])
def test_draws_of_which_two_dims_are_rows(dropout: bool) -> None:
    """The first is the batch dim, for the engine as for the oracle."""
    batch = {"x": torch.randn(5, 4, generator=torch.Generator().manual_seed(0))}
    report = verify(Square(dropout), [batch] * 2, data_parallel(Plan.of(), 2))
    assert report.passed, report.worst[:3]


class IdleDropout(nn.Module):
    """Dropout in place with p = 0, of chances that softmax keeps for its backward: torch returns them as they are."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.drop, self.down = nn.Linear(4, 6), kind(0.0, inplace=True), nn.Linear(6, 4)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        chances = self.up(x).softmax(-1)
        return self.down(self.drop(chances[..., None]).squeeze(-1)).square().mean()


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_idle_dropout_in_place(kind: type[nn.Module]) -> None:
    batch = {"x": torch.randn(5, 4, generator=torch.Generator().manual_seed(0))}
    report = verify(IdleDropout(kind), [batch] * 2, data_parallel(Plan.of(), 2))
    assert report.passed, report.worst[:3]
