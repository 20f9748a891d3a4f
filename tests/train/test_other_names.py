"""A loop that keeps tensors with the memory of a model's own, and reads or writes them when it wants."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_habits import HABITS, KINDS, Loop, Net, distributed, plain, run
from torch import Tensor, nn

from processes import run_processes
from shardwise.core.errors import ShardwiseError

NAMES: dict[str, Callable[[Any], Tensor]] = {
    "data": lambda of: next(iter(of.parameters())).data,
    "a view": lambda of: next(iter(of.parameters())).detach().view(-1)[2:9],
    "a buffer": lambda of: next(iter(of.buffers())).detach(),
    "a state": lambda of: dict(of.named_parameters())["second.weight"].data,
}
USES: dict[str, Callable[[Tensor, Loop], object]] = {
    "writes": lambda one, loop: one.clamp_(-0.1, 0.1),
    "reads": lambda one, loop: loop.seen.append(one.clone()),
}
TAKEN = ("in the constructor", "of the module", "of what distribute returned")


def outcome(made: Callable[[type], Loop], kind: type, name: str, use: str, taken: str, step: int, where: str) -> Any:
    """Run a loop that takes a name and uses it in a step and in the last one; return what came out, or what was
    raised, and the warnings."""
    kept: list[Tensor] = []

    class Named(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            if taken == TAKEN[0]:
                kept.append(NAMES[name](self))

    def act(loop: Loop) -> None:
        if not kept:
            kept.append(NAMES[name](loop.net if taken == TAKEN[1] else loop.model))
        USES[use](kept[0], loop)

    HABITS["through another name"] = act
    habits = [(at, place, "through another name") for at, place in dict.fromkeys([(step, where), (2, "step")])]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found: Any = run(made(Named), habits)
        except (ShardwiseError, RuntimeError) as error:
            found = error
        finally:
            del HABITS["through another name"]
    return found, [str(one.message) for one in said if "has had the memory of" in str(one.message)]


@pytest.mark.quick(4)
@pytest.mark.few(40)
@pytest.mark.parametrize("where", ["before", "forward", "backward", "step"])
@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("taken", TAKEN)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_has_another_name(kind: str, name: str, use: str, taken: str, step: int, where: str) -> None:
    """It has the values of the plain loop, and what is written to it acts; or an error says that it cannot be."""
    expected, _ = outcome(plain, KINDS[kind], name, use, taken, step, where)
    found, said = outcome(distributed, KINDS[kind], name, use, taken, step, where)
    if isinstance(found, ShardwiseError):
        unseen = where == "forward" and use == "writes" and name in ("data", "a state")
        assert "legal: " in str(found) and (
            taken != TAKEN[0] or unseen and "without autograd's knowledge" in str(found)
        )
        return
    if isinstance(expected, RuntimeError):  # forward needs the buffer that is written to before its backward
        assert "modified by an inplace operation" in str(expected)
        return
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert said or taken != TAKEN[0]


@pytest.mark.quick(1)
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("taken", [TAKEN[0], TAKEN[2]])
def test_a_write_that_autograd_does_not_see_is_refused(taken: str, step: int) -> None:
    """On one device forward has had the old weight and backward has the new: no gradient of anything."""
    found, _ = outcome(distributed, Net, "a state", "writes", taken, step, "forward")
    assert isinstance(found, ShardwiseError)
    assert "second.weight was written to since model(...)" in str(found) and "test_habits.py" in str(found)
    after, _ = outcome(distributed, Net, "a state", "writes", taken, step, "backward")
    assert not isinstance(after, Exception)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_other_names(kind: str) -> None:
    """Neither the engine's own tensors, nor garbage, nor an optimizer count."""

    def loop() -> Loop:
        made = distributed(KINDS[kind])
        garbage: list[Any] = [made.net.first.weight.data]
        garbage.append(garbage)
        del garbage
        return made

    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*has had the memory of", UserWarning)
        run(loop(), [])


SCRIPT = """
import sys, warnings
import torch
from torch import nn
from shardwise import Plan, distribute
from shardwise.parallel.data import data_parallel
from shardwise.runtime.connect import connect

def trained(wrap, keeps):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    kept = net[0].weight.data if keeps else None
    model, optimizer = wrap(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(step)
        model(torch.randn(5, 4, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        if keeps:
            seen.append(kept.clone())
    return [*seen, *model.state_dict().values()]

plan = data_parallel(Plan.of(precision="fp64"), 2, int(sys.argv[1]))
comm = connect(plan.mesh, backend="gloo")
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    found = trained(lambda net, optimizer: distribute(net, optimizer, plan, comm=comm), comm.rank == 0)
expected = trained(lambda net, optimizer: (net, optimizer), comm.rank == 0)
for mine, theirs in zip(found, expected, strict=True):
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
print(len([one for one in said if "has had the memory of 0.weight" in str(one.message)]), flush=True)
comm.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_one_of_two_ranks_has_kept_a_name(tmp_path: Path, zero: int) -> None:
    """Both bring it up to date; that one is warned."""
    script = tmp_path / "loop.py"
    script.write_text(SCRIPT)
    assert [output.split()[-1] for output in run_processes(2, [str(script), str(zero)], 60)] == ["1", "0"]


def test_copies_of_what_is_shown() -> None:
    """They are ordinary tensors, of the values at that time."""
    loop = distributed()
    run(loop, [])
    one = next(iter(loop.model.parameters()))
    copies = [copy.deepcopy(one), pickle.loads(pickle.dumps(one)), copy.deepcopy(one.data)]
    assert [type(each) for each in copies] == [nn.Parameter, nn.Parameter, Tensor]
    for each in copies:
        assert each.requires_grad == one.requires_grad or each is copies[2]
        assert torch.equal(each, one)
