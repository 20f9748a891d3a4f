"""The layer ``shardwise.nn.MoE`` equals one device: every option, over ranks of every kind, whatever tokens choose."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_experts import BY_NUMBER, BY_NUMBER_SHARED, composed, enough, fits
from test_tensor import ALONE, CLIP, PLAIN, check, oracle
from torch import Tensor, nn

from communicating import communicated
from covering import covering
from processes import run_processes
from shardwise.core.errors import ConfigError
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.models import GPT, Llama
from shardwise.nn import MoE
from shardwise.parallel.context import context_parallel
from shardwise.parallel.data import data_parallel
from shardwise.parallel.experts import expert_parallel
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import run_steps, run_threads

WIDTH, LENGTH = 8, 6
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "capacity": {"experts": 5, "capacity_factor": 0.6, "balance": "gshard"},
    "bias": {"experts": 4, "scores": "sigmoid", "balance": None, "bias_rate": 0.05, "scale": 2.5, "top_k": 3},
    "all": {
        "experts": 5, "capacity_factor": 1.0, "bias_rate": 0.05, "z_weight": 0.1, "shared": 2, "activation": "gelu",
        "balance_weight": 0.3,
    },
    "switch": {"experts": 4, "top_k": 1, "capacity_factor": 1.25, "z_weight": 0.01, "balance_weight": 0.1},
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(WIDTH), MoE(WIDTH, 12, **{"experts": 4, **options})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found, loss = self.moe(self.norm(x))
        return x + found, loss


class Model(nn.Module):
    """Its words have an embedding, then follow two blocks."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.blocks = nn.Embedding(16, WIDTH), nn.ModuleList(Block(**options) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden, losses = self.table(x), []
        for block in self.blocks:
            hidden, loss = block(hidden)
            losses.append(loss)
        return (hidden - y).square().mean() + torch.stack(losses).sum()


def batch(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    words = torch.randint(0, 16, (rows, LENGTH), generator=generator)
    return {"x": words, "y": torch.randn(rows, LENGTH, WIDTH, generator=generator).double()}


@functools.cache
def model(name: str) -> tuple[Compiled, list[dict[str, Tensor]], nn.Module]:
    """A model on one device, whose capture serves all plans; the last batch has fewer rows than some have ranks."""
    module, batches = Model(**OPTIONS[name]).double().train(), [batch(8), batch(3), batch(8)]
    return Compiled(module, ALONE, batches[0], None), batches, module


@functools.cache
def truth(name: str, microbatches: int) -> Any:
    _, batches, module = model(name)
    return oracle(module, None, batches, PLAIN, microbatches)


CASES = list(
    itertools.product(
        OPTIONS,
        (1, 2, 3, 4),
        ((1, "gathered"), (2, "gathered")),
        (("1d", 1), ("1d", 2), ("1d", 3), ("1d-sp", 2), ("2d", 4), *BY_NUMBER),
        ((1, 0), (2, 0), (3, 1), (2, 2), (2, 3)),
        ((1, "1f1b"), (2, "1f1b"), (2, "zb-h1"), (2, "zbv")),
        ("none", "full", "selective"),
        (1, 2),
    )
)


@pytest.mark.quick(1)
@pytest.mark.few(30)
@pytest.mark.parametrize("case", list(covering([case for case in CASES if fits(case)])), ids=str)
def test_together(case: tuple[Any, ...]) -> None:
    """Every pair of settings of each two axes."""
    name, *options, microbatches = case
    one, batches, _ = model(name)
    check(one.under(composed(*options, microbatches)), batches, truth(name, microbatches), PLAIN)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("plan", ["dp", "ep", "tp", "tp by number", "cp"])
def test_nothing_is_computed_twice(name: str, plan: str) -> None:
    """No op is whole on every rank, and no weight of experts where ranks share them; only a bias lets rows meet."""
    one, batches, _ = model(name)
    made = {
        "dp": lambda: data_parallel(ALONE, 2), "ep": lambda: expert_parallel(ALONE, 2),
        "tp": lambda: tensor_parallel(ALONE, 2),
        "tp by number": lambda: tensor_parallel(ALONE, 2, experts="by-number"),
        "cp": lambda: context_parallel(ALONE, 2),
    }[plan]()  # fmt: skip
    compiled = one.under(made)
    check(compiled, batches, truth(name, 1), PLAIN)
    assert not compiled.general.replicated
    assert compiled.general.rows is None  # one capture is for every number of rows
    weights = [p for p in compiled.general.parameters if p.name.endswith((".up", ".down"))]
    assert len(weights) == 4 and all(bool(p.axes) == (plan in ("ep", "tp", "tp by number")) for p in weights)
    meets = [f"the buffer blocks.{i}.moe.bias (sign)" for i in range(2)] if "bias_rate" in OPTIONS[name] else []
    assert list(compiled.general.meets) == meets
    if plan == "dp":
        assert {kind for kind, *_ in communicated(compiled.general)} <= {"slice", *(["all_reduce"] if meets else [])}


def test_a_bias_moves() -> None:
    """It is that of one device in :func:`test_together`, which would also hold if it stayed."""
    last = truth("bias", 1)[-1].buffers["blocks.0.moe.bias"]
    assert last.abs().max() > 0.04 and last.abs().unique().numel() > 1


@pytest.mark.quick(1)
@pytest.mark.parametrize(("dp", "recompute"), [(1, "full"), (2, "none")])
def test_a_bias_moves_once_a_step_where_microbatches_exchange(dp: int, recompute: Any) -> None:
    one, batches, _ = model("bias")
    plan = data_parallel(ALONE.replace(microbatches=2, rows="batch", recompute=recompute), dp)
    check(one.under(plan), batches, truth("bias", 1), PLAIN)


# ---- the own models --------------------------------------------------------------------------------------------------

OWN = list(
    itertools.product(
        ("gpt", "llama"),
        (1, 2, 4),
        ((1, "gathered"), (2, "ring")),
        (("1d", 1), ("1d", 2), ("1d-sp", 2), *BY_NUMBER),
        ((1, 0), (2, 1), (2, 3)),
        ((1, "1f1b"), (2, "1f1b")),
        ("none", "full", "selective"),
        (1, 2),
    )
)


@functools.cache
def own(kind: str) -> tuple[Compiled, list[dict[str, Tensor]], Any]:
    """Labels are spread unevenly; without a bias, microbatches make no difference."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocabulary": 24, "width": 16, "layers": 2, "heads": 4, "context": 8, "hidden": 24}
    moe = {"experts": 4, "capacity_factor": 1.0, "z_weight": 0.01, "shared": 1}
    made = GPT(**sizes, dropout=0.1, moe=moe) if kind == "gpt" else Llama(**sizes, kv_heads=2, moe=moe)
    batches = []
    for rows in (8, 3):
        ids, labels = (torch.randint(0, 24, (rows, 8), generator=torch.Generator().manual_seed(i)) for i in (rows, 9))
        labels[0, 2:], labels[-1, :5] = -100, -100
        batches.append({"input_ids": ids, "labels": labels})
    module = made.double().train()
    return Compiled(module, ALONE, batches[0], None), batches, oracle(module, None, batches, PLAIN, 1)


@pytest.mark.slow
@pytest.mark.few(12)
@pytest.mark.parametrize("case", list(covering([case for case in OWN if enough(case[1], case[3])])), ids=str)
def test_own_models(case: tuple[Any, ...]) -> None:
    kind, *options = case
    one, batches, expected = own(kind)
    compiled = one.under(composed(*options))
    check(compiled, batches, expected, PLAIN)
    assert not compiled.general.replicated and not compiled.general.meets


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("recipe", ["ep", "tp", "tp by number"])
def test_half_precision(precision: Any, recipe: str) -> None:
    """The numbers of one device to a few bits, also where a rank's part of a weight is not of whole 16 bytes."""
    module = Model(**OPTIONS["capacity"]).train()
    one = {name: value.float() if value.is_floating_point() else value for name, value in batch(8).items()}
    by_number = functools.partial(tensor_parallel, experts="by-number")
    made = {"ep": expert_parallel, "tp": tensor_parallel, "tp by number": by_number}[recipe]

    def losses(plan: Plan) -> list[float]:
        compiled = Compiled(module, plan, one, None)
        steps: Any = run_threads(compiled, lambda comm: run_steps(compiled, comm, [one] * 3, PLAIN, None, 0))
        return [step.loss for step in steps[0]]

    alone = Plan.of(precision=precision)
    assert losses(made(alone, 2)) == pytest.approx(losses(alone), rel=2e-3)


# ---- what tokens choose ----------------------------------------------------------------------------------------------


class Forced(nn.Module):
    """Its batch says which experts each token chooses."""

    def __init__(self, experts: int, top_k: int, factor: float | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(16, WIDTH)
        self.moe = MoE(WIDTH, 12, experts, top_k, capacity_factor=factor, normalise=False)

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        self.moe.route = lambda scores: ids  # type: ignore[method-assign]
        found, loss = self.moe(self.table(x))
        return (found - y).square().mean() + loss


def chosen(how: str, experts: int, rows: int, top_k: int) -> Tensor:
    shape, generator = (rows, LENGTH, top_k), torch.Generator().manual_seed(rows)
    if how == "all to one":
        return torch.full(shape, experts - 1)
    if how == "none to one":
        return torch.randint(1, experts, shape, generator=generator)
    if how == "exactly the capacity":  # LENGTH is a multiple of the experts
        return torch.arange(LENGTH * top_k).remainder(experts).view(shape[1:]).expand(shape).clone()
    return torch.randint(0, experts, shape, generator=generator)


@functools.cache
def forced(how: str, experts: int, top_k: int, factor: float | None) -> tuple[Compiled, list[dict[str, Tensor]], Any]:
    batches = [{**batch(rows), "ids": chosen(how, experts, rows, top_k)} for rows in (8, 3)]
    module = Forced(experts, top_k, factor).double().train()
    return Compiled(module, ALONE, batches[0], None), batches, oracle(module, None, batches, PLAIN, 1)


@pytest.mark.quick(2)
@pytest.mark.parametrize("how", ["all to one", "none to one", "exactly the capacity", "random"])
@pytest.mark.parametrize("factor", [None, 1.0])
@pytest.mark.parametrize(("experts", "top_k"), [(3, 1), (6, 2)])
@pytest.mark.parametrize(
    ("ep", "dp", "tp", "tensor"),
    [
        *((*one, "inside") for one in [(2, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 2), (1, 3, 1)]),
        *((*one, "by-number") for one in BY_NUMBER_SHARED if one[0] * one[2] <= 3),
    ],
)
def test_what_tokens_choose(
    how: str, factor: float | None, experts: int, top_k: int, ep: int, dp: int, tp: int, tensor: Any
) -> None:
    one, batches, expected = forced(how, experts, top_k, factor)
    plan = data_parallel(expert_parallel(tensor_parallel(ALONE, tp, experts=tensor), ep), dp)
    check(one.under(plan), batches, expected, PLAIN)


# ---- bad input, and processes ----------------------------------------------------------------------------------------


def test_more_ranks_than_experts() -> None:
    with pytest.raises(ConfigError, match="ep: 5 is not legal for 4 experts; legal: 1 to 4"):
        model("plain")[0].under(expert_parallel(ALONE, 5))


SCRIPT = """
import json, sys
import torch
from test_moe import Model, batch, OPTIONS
from shardwise import Plan, Trainer
from shardwise.core.optim import OptimizerChoice
from shardwise.parallel.data import data_parallel
from shardwise.parallel.experts import expert_parallel
from shardwise.runtime.connect import connect

backend, ep, dp, zero = sys.argv[1], *map(int, sys.argv[2:5])
torch.set_num_threads(1)
module = Model(**OPTIONS["all"]).double().train()
plan = data_parallel(expert_parallel(Plan.of(precision="fp64"), ep), dp, zero)
comm = connect(plan.mesh, backend=backend)
own, rows = comm.mesh.index(comm.rank, ("dp",)), 6 // dp
batches = [{k: v[own * rows : (own + 1) * rows] for k, v in batch(6).items()} for _ in range(3)]
trainer = Trainer(module, OptimizerChoice("sgd", lr=0.1), plan, batches[0], comm=comm, clip_norm=float(sys.argv[5]))
losses = [float(trainer.step(one).loss) for one in batches]
state = trainer.state_dict()
print(json.dumps([losses, {name: value.norm().item() for name, value in state.items()}]), flush=True)
comm.close()
"""


@pytest.mark.parametrize(
    ("backend", "ep", "dp", "zero"),
    [
        pytest.param("gloo", 2, 1, 0, marks=pytest.mark.slow),
        pytest.param("shared", 2, 2, 3, marks=pytest.mark.full),
    ],
)
def test_processes(tmp_path: Path, backend: str, ep: int, dp: int, zero: int) -> None:
    """Three steps with clipped gradients, dropped tokens and a bias, beside one device."""
    script = tmp_path / "loop.py"
    here = Path(__file__).parent
    script.write_text(f"import sys\nsys.path[:0] = {[str(here), str(here.parent)]}\n{SCRIPT}")
    expected = oracle(Model(**OPTIONS["all"]).double().train(), None, [batch(6)] * 3, PLAIN, 1)
    for output in run_processes(ep * dp, [str(script), backend, *map(str, (ep, dp, zero)), str(CLIP)], 120):
        losses, norms = json.loads(output.splitlines()[-1])
        assert losses == pytest.approx([one.loss for one in expected], rel=1e-10, abs=0)
        for name, value in {**expected[-1].parameters, **expected[-1].buffers}.items():
            assert norms[name] == pytest.approx(value.norm().item(), rel=1e-10, abs=1e-12)
