"""The segments of a block are pure functions of tensors, forward and backward: what one microbatch's run is traced to
gives another one's numbers, holds nothing but ops that torch knows, and can be compiled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_overlap import composed, model
from test_tensor import PLAIN, check, oracle
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise.ops.env import Env
from shardwise.units.trace import Unit

CASES = [
    ("own gpt", ("tp", "1d", 2)), ("own llama", ("tp", "1d-sp", 2)), ("bert", ("tp", "1d", 3)),
    ("gpt2 padded", ("tp", "2d", 4)), ("bloom", ("cp", "gathered", 2)), ("mixtral", ("ep", 1, 2)),
    ("deepseek", ("ep", 1, 3)),
]  # fmt: skip
Runs = list[tuple[Env, list[Any]]]
Result = tuple[list[Tensor], list[Tensor]]


def segments(name: str, shared: tuple[str, Any, int]) -> list[tuple[Unit, Runs]]:
    """Train a step of four rows; return the segments that do not communicate, with what the first rank gave them for
    each of two microbatches."""
    one, batches, module = model(name)
    compiled = one.under(composed(shared, (1, 0, 1), (1, "1f1b"), "none", 2))
    runs: dict[int, Runs] = defaultdict(list)
    found = {unit.index: unit for unit in compiled.general.units if unit.moves is None and not unit.collectives}
    functions = {at: unit.training_function for at, unit in found.items() if unit.training_function is not None}

    def noting(at: int) -> Callable[..., Any]:
        def run(env: Env, *given: Any) -> Any:
            if env.comm.rank == 0:
                runs[at].append((env, [*given]))
            return functions[at](env, *given)

        return run

    for at in functions:
        object.__setattr__(found[at], "training_function", noting(at))
    batch = {name: values[:4] for name, values in batches[0].items()}
    check(compiled, [batch], oracle(module, one.loss, [batch], PLAIN, 2), PLAIN)
    for at, function in functions.items():
        object.__setattr__(found[at], "training_function", function)
    return [(found[at], runs[at]) for at in sorted(runs)]


def joint(unit: Unit, env: Env, given: Sequence[Any]) -> Result:
    """Return what a segment computes, and the gradients of the sum of that by its arguments."""
    assert unit.training_function is not None
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in given]
    with torch.enable_grad():
        outputs = [x for x in unit.training_function(env, *leaves) if isinstance(x, Tensor)]
        ends = [x for x in outputs if x.requires_grad]
        wanted = [x for x in leaves if x.requires_grad]
        seeds = [torch.ones_like(x) for x in ends]
        grads = torch.autograd.grad(ends, wanted, seeds, allow_unused=True) if ends else ()
    return [x.detach() for x in outputs], [x for x in grads if x is not None]


def largest(ours: Result, truth: Result) -> float:
    pairs = [(a, b) for mine, other in zip(ours, truth, strict=True) for a, b in zip(mine, other, strict=True)]
    return max(float((a.double() - b.double()).abs().max()) if a.numel() else 0.0 for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shared"), CASES, ids=str)
def test_a_trace_of_one_microbatch_computes_another(name: str, shared: tuple[str, Any, int]) -> None:
    found = segments(name, shared)
    assert found and all(len(runs) == 2 for _, runs in found)
    for unit, ((env, given), (_, more)) in found:
        traced = make_fx(lambda *x, unit=unit, env=env: joint(unit, env, x))(*given)
        targets = {node.target for node in traced.graph.nodes if node.op == "call_function"}
        assert not [one for one in targets if not str(one).startswith(("aten.", "shardwise.grouped_mm", "<built-in"))]
        if [x.shape for x in given] == [x.shape for x in more]:  # experts get other numbers of rows
            assert largest(traced(*more), joint(unit, env, more)) == 0  # dropout has the keys of its microbatch


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "shared"), [("own llama", ("tp", "1d-sp", 2)), ("own llama", ("tp", "1d", 3))], ids=str
)
def test_segments_are_compiled(name: str, shared: tuple[str, Any, int]) -> None:
    """Keyed dropout multiplies int32 numbers that wrap, which inductor's C++ does not promise: these have none."""
    for unit, ((env, given), (_, more)) in segments(name, shared)[2:7]:
        traced = make_fx(lambda *x, unit=unit, env=env: joint(unit, env, x))(*given)
        compiled = torch.compile(traced, fullgraph=True, dynamic=False)
        assert largest(compiled(*more), joint(unit, env, more)) < 1e-12
