"""What ranks and microbatches count of experts is what one device counts, of the own layer and of transformers'."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from shardwise.core.layout import rank_rows
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.data.loader import AXES
from shardwise.lower.compiled import Compiled
from shardwise.models import Llama
from shardwise.nn import MoE
from shardwise.parallel.context import context_parallel
from shardwise.parallel.data import data_parallel
from shardwise.parallel.experts import expert_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.engine import Engine
from shardwise.train.expert_loads import ExpertLoad, expert_loads, in_metrics
from shardwise.verify.verify import run_threads

ALONE, ROWS, EXPERTS = Plan.of(precision="fp64", mesh=Mesh(())), 7, 5


def own() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    moe = {"experts": EXPERTS, "capacity_factor": 0.6}
    ids, labels = (torch.randint(0, 24, (ROWS, 8), generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    model = Llama(vocabulary=24, width=16, layers=2, heads=4, hidden=12, context=8, moe=moe)
    return model.double().train(), {"input_ids": ids, "labels": labels}


def of_transformers() -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers as t

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32, "num_local_experts": EXPERTS,
    }  # fmt: skip
    batch = {name: value[:ROWS] for name, value in zoo.tokens(words=24).items()}
    return t.MixtralForCausalLM(t.MixtralConfig(**sizes)).double().train(), batch


def counted(module: nn.Module, batch: dict[str, Tensor]) -> list[list[int]]:
    """What an ordinary forward counts, by layer: the choices of each expert, and last those of none."""
    found: list[list[int]] = []
    hooks = []

    def count(ids: Tensor) -> None:
        found.append(torch.bincount(ids.flatten(), minlength=EXPERTS + 1).tolist())

    for one in module.modules():
        if isinstance(one, MoE):
            compute = one.compute

            def watched(tokens: Tensor, ids: Tensor, compute: Callable[..., Tensor] = compute) -> Tensor:
                count(ids)
                return compute(tokens, ids)

            one.compute = watched  # type: ignore[method-assign]
        elif type(one).__name__ == "MixtralExperts":
            hooks.append(one.register_forward_pre_hook(lambda _, arguments: count(arguments[1])))
    module(**batch)
    for one in module.modules():
        if isinstance(one, MoE):
            del one.compute
    for hook in hooks:
        hook.remove()
    return found


@functools.cache
def model(kind: str) -> tuple[Compiled, dict[str, Tensor], list[list[int]]]:
    module, batch = own() if kind == "own" else of_transformers()
    if kind != "own":
        module.set_experts_implementation("eager")  # type: ignore[operator]
        expected = counted(module, batch)
        module, batch = of_transformers()
    else:
        expected = counted(module, batch)
    return Compiled(module, ALONE, batch, None, wanted="load"), batch, expected


PLANS: dict[str, Callable[[Plan], Plan]] = {
    "alone": lambda plan: plan,
    "dp": lambda plan: data_parallel(plan, 3, 3),
    "ep": lambda plan: expert_parallel(plan, 2),
    "tp": lambda plan: tensor_parallel(plan, 2),
    "tp by number": lambda plan: tensor_parallel(plan, 2, experts="by-number"),
    "cp": lambda plan: context_parallel(plan, 2),
    "pp": lambda plan: pipeline(plan.replace(recompute="full"), 2),
    "microbatches": lambda plan: plan.replace(microbatches=3),
    "all": lambda plan: pipeline(
        data_parallel(expert_parallel(tensor_parallel(plan.replace(microbatches=2), 2), 2), 2), 2
    ),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["own", "transformers"])
@pytest.mark.parametrize("name", PLANS)
def test_loads(kind: str, name: str) -> None:
    """Every rank knows those of all layers."""
    one, batch, expected = model(kind)
    compiled = one.under(PLANS[name](ALONE))

    def rank(comm: Communicator) -> Any:
        engine = Engine(compiled, comm, OptimizerChoice("sgd", lr=0.1), strict=True)
        parts, index = comm.mesh.axis_size(AXES), comm.mesh.index(comm.rank, AXES)
        ranges = rank_rows(ROWS, compiled.plan.microbatches, parts, index)
        mine = {k: torch.cat([v[a:b] for a, b in ranges]) for k, v in batch.items()}
        return expert_loads(engine.step(mine, ROWS), comm)

    for found in run_threads(compiled, rank):
        assert [[*one.load, one.dropped] for one in found] == expected  # type: ignore[attr-defined]
        names = [one.name for one in found]  # type: ignore[attr-defined]
        assert len(set(names)) == 2 and (kind != "own" or names == ["blocks.0.mlp", "blocks.1.mlp"])


def test_numbers() -> None:
    even, one, half = ExpertLoad("a", (3, 3), 0), ExpertLoad("b", (4, 0), 4), ExpertLoad("c", (2, 2, 0, 0), 0)
    assert (even.entropy, even.highest, even.share_dropped) == (1.0, 1.0, 0.0)
    assert (one.entropy, one.highest, one.share_dropped) == (0.0, 2.0, 0.5)
    assert half.entropy == pytest.approx(0.5) and half.highest == 2.0
    nothing, single = ExpertLoad("d", (0, 0), 0), ExpertLoad("e", (5,), 0)
    assert nothing.entropy == single.entropy == nothing.highest == single.highest == 1.0
    assert in_metrics([even, one]) == {
        "expert_entropy": 0.5, "expert_load_highest": 2.0, "expert_dropped": 0.25,
        "expert_load": {"a": [3, 3], "b": [4, 0]},
    }  # fmt: skip


@pytest.mark.slow
def test_without_asking_nothing_is_counted() -> None:
    module, batch = own()
    assert not Compiled(module, ALONE, batch, None).general.kept


@pytest.mark.slow
def test_a_run(tmp_path: Path) -> None:
    """Metrics have loads at the steps that were asked for; without experts that is refused before a step."""
    words = [
        "model.width=24", "model.layers=2", "model.heads=4", "data.source=docs", "data.tokenizer=bytes",
        "data.sequence_length=16", "data.batch_size=4", "validation.share=0", "train.steps=5", "train.devices=2",
        "train.expert_load_every=2", f"train.run_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "shardwise", "train", *words]
    subprocess.run([*command, "model.experts=4", "parallel.ep=2"], check=True, capture_output=True, timeout=120)
    lines = [json.loads(one) for one in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in lines if "expert_load" in one] == [0, 2, 4]
    assert [sum(load) for load in lines[2]["expert_load"].values()] == [4 * 16 * 2] * 2
    dense = subprocess.run(
        [*command, f"train.run_dir={tmp_path / 'dense'}"], capture_output=True, timeout=120, text=True
    )
    assert dense.returncode and "no layer of experts was found in the model; legal: 0" in dense.stdout + dense.stderr
