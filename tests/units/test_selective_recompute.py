"""Selective recomputation: bit-equal to none, and after FORWARD nothing is alive but what it says."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from harness import Subject, parity, sharded_run
from measured import counter
from shardwise.core.errors import ShardwiseError
from shardwise.core.instruction import Instruction, Op
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.graph.schema import tensors_in
from shardwise.graph.torch_private import TorchDispatchMode, storage_key
from shardwise.lower.compiled import Compiled
from shardwise.models.gpt import GPT
from shardwise.ops.env import Env
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.units import selective_recompute
from shardwise.units.selective_recompute import Tape, recalled
from shardwise.units.trace import Unit
from shardwise.units.tracing import trace
from shardwise.units.weight_products import Operand
from zoo import make

aten = torch.ops.aten


class Alive(TorchDispatchMode):
    """The storages that ops made while it was on, with their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        given = {storage_key(t) for t in tensors_in((args, kwargs))}
        for t in tensors_in(results):
            if (key := storage_key(t)) not in given:
                self.made[key] = (StorageWeakRef(t.untyped_storage()), t.untyped_storage().nbytes())
        return results

    @property
    def bytes(self) -> int:
        """Of what is alive now."""
        gc.collect()
        return sum(size for ref, size in self.made.values() if not ref.expired())


@torch.library.custom_op("recall_test::add", mutates_args=())
def _squared(x: Tensor) -> Tensor:
    return x * x


@torch.library.custom_op("recall_test::mm", mutates_args=())
def _two(x: Tensor) -> list[Tensor]:
    return [x + 1, x + 2]


# ---- one op ----------------------------------------------------------------------------------------------------------


def _t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


BUCKET = 4 * 5 + 4
OPS: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "linear": (F.linear, [_t(2, 3, 5), _t(4, 5), _t(4)]),
    "linear of a bucket": (lambda x, p: F.linear(x, p[:20].view(4, 5), p[20:]), [_t(2, 3, 5), _t(BUCKET)]),
    "linear without rows": (F.linear, [_t(0, 3, 5), _t(4, 5), _t(4)]),
    "transposed weight": (lambda x, w: aten.matmul(x, w.t()), [_t(2, 3, 5), _t(4, 5)]),
    "strided input": (lambda x, w: aten.mm(x.t(), w), [_t(5, 3), _t(5, 4)]),
    "twice the same": (lambda x: aten.matmul(x, x), [_t(4, 4)]),
    "batched": (aten.bmm.default, [_t(2, 3, 5), _t(2, 5, 4)]),
    "added": (aten.addmm.default, [_t(4), _t(3, 5), _t(5, 4)]),
    "batched and added": (aten.baddbmm.default, [_t(2, 3, 4), _t(2, 3, 5), _t(2, 5, 4)]),
    "einsum": (lambda a, b: aten.einsum("bij,bjk->bik", [a, b]), [_t(2, 3, 5), _t(2, 5, 4)]),
    "einsum, permuted": (lambda a, b: aten.einsum("ibj,jkb->bik", [a, b]), [_t(3, 2, 5), _t(5, 4, 2)]),
    "bilinear": (aten.bilinear.default, [_t(3, 4), _t(3, 5), _t(2, 4, 5), _t(2)]),
    "convolution": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [_t(2, 3, 6, 6), _t(4, 3, 3, 3), _t(4)]),
    "convolution in channels last": (
        lambda x, w: F.conv2d(x.contiguous(memory_format=torch.channels_last), w), [_t(2, 3, 6, 6), _t(4, 3, 3, 3)]),
    "transposed convolution": (F.conv_transpose2d, [_t(2, 3, 4, 4), _t(3, 2, 3, 3), _t(2)]),
    "complex": (lambda a, b: aten.matmul(a, b.mH).abs(),
    [_t(3, 5, dtype=torch.complex64), _t(4, 5, dtype=torch.complex64)]),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [_t(2, 2, 7, 8)] * 3),
    "attention of one tensor": (
        lambda x: F.scaled_dot_product_attention(*x.unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)),
        [_t(2, 7, 48)]),
    "attention with a learnt bias": (F.scaled_dot_product_attention, [*[_t(1, 2, 20, 4)] * 3, _t(2, 20, 20)]),
}  # fmt: skip


def _run(op: Callable[..., Tensor], inputs: list[Tensor], tape: Tape | None) -> Tensor:
    """``op`` with its products kept, whatever views it takes before."""
    env, count = Env(tape=tape), iter(range(9))

    class Keeping(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "").split(".")[0] in selective_recompute.KEPT:
                return recalled(env, next(count), True, func, *args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Keeping():
        return op(*inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", OPS)
def test_gradients_are_those_of_the_op_itself(name: str, dtype: torch.dtype) -> None:
    """... though the inputs of the first run are gone, and those of the second lie elsewhere."""
    op, given = OPS[name]
    if given[0].is_complex() and dtype is torch.bfloat16:
        dtype = torch.float32
    cast = {torch.float64: torch.complex128}.get(dtype, torch.complex64) if given[0].is_complex() else dtype
    first, again = ([t.to(cast, copy=True).requires_grad_() for t in given] for _ in range(2))
    truth = op(*again)
    seed = torch.randn_like(truth)
    wanted = torch.autograd.grad(truth, again, seed)
    tape = Tape()
    with tape.record():
        result = _run(op, first, tape)
    assert torch.equal(result, truth) and result.stride() == truth.stride()
    assert tape.kept
    for t in first:
        t.data.fill_(torch.nan)
    inside = [StorageWeakRef(t.untyped_storage()) for t in first]
    del first, t
    assert all(ref.expired() for ref in inside)
    result = _run(op, again, tape)
    assert torch.equal(result, truth) and result.stride() == truth.stride()
    assert not tape.kept
    for mine, right in zip(torch.autograd.grad(result, again, seed), wanted, strict=True):
        assert torch.equal(mine, right)


def test_only_gradients_that_are_asked_for() -> None:
    x, w = _t(3, 5), _t(4, 5).requires_grad_()
    tape = Tape()
    with tape.record():
        _run(F.linear, [x, w], tape)
    kept = tape.kept[0]
    assert kept is not None and list(kept.starts) == [1]
    assert list(kept.views) == [0]  # the weight is not needed for its own gradient
    result = _run(F.linear, [x, w], tape)
    (grad,) = torch.autograd.grad(result.sum(), [w])
    assert torch.equal(grad, torch.ones(3, 4).t() @ x)


@pytest.mark.slow
def test_what_keeps_more_than_its_result_is_computed_again() -> None:
    op, given = OPS["attention with a learnt bias"]
    tape = Tape()
    with Alive() as alive, tape.record():
        _run(op, [t.clone().requires_grad_() for t in given], tape)
    assert tape.kept == {0: None}
    assert alive.bytes == 0


def test_a_result_that_is_an_input_is_not_kept() -> None:
    """It would hold on to a parameter's memory, and to values that are no longer there."""
    tape = Tape()
    with tape.record():
        _run(lambda x: aten.einsum("ij->ji", [x]), [_t(3, 5).requires_grad_()], tape)
    assert tape.kept == {0: None}


def test_an_op_of_another_library_is_not_mistaken() -> None:
    graph = fx.Graph()
    graph.placeholder("env")
    x = graph.placeholder("x")
    product = graph.call_function(aten.mm.default, (x, x))
    scaled = graph.call_function(torch.ops.recall_test.add.default, (product,))  # it squares
    graph.output((graph.call_function(aten.add.Tensor, (scaled, x)),))
    assert selective_recompute._read(graph, 1) >= {product}
    graph = fx.Graph()
    graph.placeholder("env")
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.recall_test.mm.default, (x,)),))
    assert "recalled" not in str(selective_recompute.recallable(graph, 1))


def test_another_shape_on_the_second_run_is_refused() -> None:
    tape = Tape()
    with tape.record():
        _run(F.linear, [_t(3, 5).requires_grad_(), _t(4, 5).requires_grad_()], tape)
    with pytest.raises(ShardwiseError, match="recomputation gave"):
        _run(F.linear, [_t(2, 5).requires_grad_(), _t(4, 5).requires_grad_()], tape)


# ---- a unit ----------------------------------------------------------------------------------------------------------

ROWS, LENGTH, WIDTH, HEADS = 3, 20, 32, 4


def block(dtype: str = "fp32", dropout: float = 0.0) -> tuple[Unit, list[Any]]:
    """The first block of a GPT, with its arguments."""
    torch.manual_seed(0)
    module = GPT(vocabulary=31, width=WIDTH, layers=2, heads=HEADS, context=LENGTH, dropout=dropout)
    batch = {k: torch.randint(0, 31, (ROWS, LENGTH)) for k in ("input_ids", "labels")}
    unit = trace(module, batch, precision=dtype).units[1]
    values = dict(module.named_parameters())
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[dtype]
    parameters = [values[n].detach().to(compute, copy=True).requires_grad_() for n in unit.parameters]
    return unit, [*parameters, torch.randn(ROWS, LENGTH, WIDTH, dtype=compute).requires_grad_()]


def env(tape: Tape | None) -> Env:
    return Env(rows=ROWS, tape=tape)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_nothing_else_is_alive_after_forward(dtype: str) -> None:
    """Per token: queries, keys, values, attention's result and projection, the wide half of the MLP, and one sum for
    each head.
    """
    unit, arguments = block(dtype)
    assert unit.training_function is not None
    size, statistic = {"fp32": (4, 4), "bf16": (2, 4), "fp64": (8, 8)}[dtype]
    tape = Tape()
    with Alive() as alive:
        with tape.record():
            output = unit.training_function(env(tape), *arguments)[0].detach()
        after_forward = alive.bytes
        tokens, kept = ROWS * LENGTH, (3 + 1 + 1 + 4) * WIDTH * size + HEADS * statistic
        assert after_forward == tokens * (kept + WIDTH * size)  # the last is the unit's output
        seed = torch.ones_like(output)
        outputs = unit.training_function(env(tape), *arguments)
        grads = torch.autograd.grad(outputs[0], arguments, seed, allow_unused=True)
        del outputs
        assert alive.bytes == sum(t.nbytes for t in (output, seed, *grads) if t is not None)


@pytest.mark.slow
def test_a_step_keeps_of_each_block_what_its_tape_does() -> None:
    """Alive before the first BACKWARD, beside what full recomputation keeps."""
    torch.manual_seed(0)
    module = GPT(vocabulary=31, width=WIDTH, layers=3, heads=HEADS, context=LENGTH)
    batch = {k: torch.randint(0, 31, (ROWS, LENGTH)) for k in ("input_ids", "labels")}

    def alive(recompute: str) -> int:
        compiled = Compiled(module, Plan.of(recompute=recompute), batch)
        found: list[int] = []

        def rank(comm: ThreadCommunicator) -> None:
            with Alive() as made:

                def look(position: int, one: Instruction) -> None:
                    if one.op in (Op.RECOMPUTE, Op.BACKWARD) and not found:
                        found.append(made.bytes)

                Engine(compiled, comm, OptimizerChoice("sgd", lr=0.0), progress=look).step(batch, ROWS)

        run_ranks(compiled.plan.mesh, rank, timeout=60)
        return found[0]

    assert alive("selective") - alive("full") == 3 * ROWS * LENGTH * (9 * WIDTH * 4 + HEADS * 4)


@pytest.mark.slow
def test_probabilities_are_not_kept() -> None:
    """Attention with dropout is spelled out: what it keeps is larger than everything else of the block."""
    unit, arguments = block(dropout=0.2)
    assert unit.training_function is not None
    tape = Tape()
    with Alive() as alive, tape.record():
        output = unit.training_function(env(tape), *arguments)[0].detach()
    assert alive.bytes == ROWS * LENGTH * WIDTH * 4 * (3 + 1 + 4 + 1)
    assert output.shape == (ROWS, LENGTH, WIDTH)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_parameters_may_move(dtype: str, dropout: float) -> None:
    """ZeRO-3 frees them after FORWARD and gathers them elsewhere for backward."""
    unit, arguments = block(dtype, dropout)
    assert unit.training_function is not None

    def backward(outputs: tuple[Any, ...], arguments: list[Any]) -> list[Tensor]:
        edges = [Operand(*one).y for one in outputs[1:]]
        grads = torch.autograd.grad(outputs[0], [*arguments, *edges], torch.ones_like(arguments[-1]), allow_unused=True)
        return [g for g in grads if g is not None]

    wanted = backward(unit.training_function(env(None), *arguments), arguments)
    tape = Tape()
    moved = [t.detach().clone().requires_grad_() for t in arguments]
    with tape.record():
        unit.training_function(env(tape), *arguments)
    for t in arguments:
        t.data.fill_(torch.nan)
    found = backward(unit.training_function(env(tape), *moved), moved)
    assert len(found) == len(wanted) > 10
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_no_product_is_computed_twice() -> None:
    unit, arguments = block()
    assert unit.training_function is not None
    counts = []
    for tape in (None, Tape()):
        with counter() as count:
            if tape is not None:
                with tape.record():
                    unit.training_function(env(tape), *arguments)
            outputs = unit.training_function(env(tape), *arguments)
            torch.autograd.grad(outputs[0], arguments, torch.ones_like(arguments[-1]), allow_unused=True)
        counts.append(count.get_flop_counts()["Global"])
    assert counts[0] == counts[1]
    assert len(counts[0]) >= 3  # with and without bias, attention


@pytest.mark.slow
def test_results_that_only_residuals_read_have_no_values() -> None:
    """The block's last product ends in its output, which RECOMPUTE's caller does not read."""
    unit, arguments = block(dropout=0.2)
    assert unit.training_function is not None
    tape = Tape()
    with tape.record():
        unit.training_function(env(tape), *arguments)
    assert [k is not None and k.value is not None for k in tape.kept.values()] == [True, False, True, True, False]
    assert tape.kept[4] is not None  # its graph is there: it is not computed again
    output = unit.training_function(env(tape), *arguments)[0]
    assert bool(output.isnan().all())


# ---- models ----------------------------------------------------------------------------------------------------------


class Products(nn.Module):
    """Blocks of products over views, slices and casts of parameters, and of inputs that have no gradient."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.experts = nn.Parameter(torch.randn(2, 6, 6) / 3), nn.Parameter(torch.randn(6, 2, 3) / 2)
            self.bias, self.frozen = (
                nn.Parameter(torch.randn(6)),
                nn.Parameter(torch.randn(6, 6) / 3, requires_grad=False),
            )
            self.conv = nn.Conv1d(6, 6, 3, padding=1)

        def forward(self, x: Tensor, fixed: Tensor) -> Tensor:
            up, down = self.both.unbind(0)
            y = torch.tanh(x @ up.t()) @ down + fixed @ up
            y = y + torch.einsum("bsi,ikj->bskj", y, self.experts).flatten(2) * F.linear(fixed, self.frozen)
            y = self.conv(y.transpose(1, 2)).transpose(1, 2) + self.bias
            scores = (y @ y.transpose(1, 2) / 6).softmax(-1)
            return x + F.linear(torch.bmm(scores, x), self.frozen, self.bias)

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Products.Block() for _ in range(2)]), nn.Linear(6, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(x)
        for one in self.blocks:
            h = one(h, x)
        return F.mse_loss(self.head(h).squeeze(-1), y)


class DataDependent(nn.Module):
    """Control flow that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        return F.mse_loss(self.b(h if h.abs().max().item() > 1e6 and locals() else torch.tanh(h)).squeeze(-1), y)


@pytest.mark.slow
def test_products_of_all_kinds() -> None:
    torch.manual_seed(1)
    subject = Subject(Products(), {"x": torch.randn(7, 5, 6), "y": torch.randn(7, 5)})
    parity(subject, dp=(1, 2, 3, 4), rows=(7, 3), recompute="selective")
    parity(subject, dp=2, microbatches=3, recompute="selective", steps=2)


@pytest.mark.slow
def test_running_statistics_are_updated_once() -> None:
    model = make("own convnet")
    subject = Subject(model.module, model.batch, model.loss)
    parity(subject, dp=(1, 2, 3), recompute="selective", keyed=True)
    assert any(u.updates for u in subject.trace.units[:-1])  # in a unit that is computed twice
    ours = sharded_run(subject, 2, 3, "selective", steps=2)
    assert {int(v) for n, v in ours.state.items() if n.endswith("num_batches_tracked")} == {2}


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "products"),
    [("own gpt", 5), ("own llama", 8), ("llama", 8), ("gpt2", 5), ("bert", 7), ("mixtral", 8), ("vit", 7)],
)
def test_every_product_of_a_block_is_kept(name: str, products: int) -> None:
    model = make(name)
    unit = next(u for u in trace(model.module, model.batch, loss=model.loss).units if u.name.endswith(".0"))
    assert inspect.getsource(unit.training_function).count("recalled") == products  # type: ignore[arg-type]


def test_a_model_that_is_not_captured_says_that_nothing_is_recomputed() -> None:
    one = Subject(DataDependent(), {"x": torch.randn(4, 6), "y": torch.randn(4)})
    assert one.trace.opaque is not None
    assert any("per-unit recomputation" in note for note in one.trace.notes)
    parity(one, dp=2, recompute="selective", opaque=True)
