"""What stops a capture, or fixes the number of rows, is said in words, with the module and the user's line."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import TOLERANCE, Subject, errors, oracle_run, sharded_run
from shardwise.capture.hooks import tensor_hooks_refused
from shardwise.capture.running import raised_in
from shardwise.graph.captured import Uncapturable
from shardwise.graph.torch_private import exporting

Body = Callable[[Tensor], Tensor]


class Inner(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.scale = nn.Parameter(torch.ones(()))  # it could run as written otherwise

    def forward(this, h: Tensor) -> Tensor:  # noqa: N805  # a module is found whatever its method calls it
        return this.body(h * this.scale) if locals() else h  # so no part of it could, either


class Model(nn.Module):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(4, 5, bias=False), last])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if locals() else x
        return x.tanh().square().mean()


def subject(last: nn.Module) -> Subject:
    return Subject(Model(last), {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(1))})


def note(last: nn.Module) -> str:
    return next(one for one in subject(last).trace.notes if "captured" in one)


VALUES: dict[str, Body] = {
    "a branch": lambda h: -h if h.sum() > 1e9 else h,
    "a size": lambda h: h * len(h.detach().round().unique()),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_python_reads(name: str) -> None:
    found = note(Inner(VALUES[name]))
    assert re.fullmatch(
        r"not captured, trains as one unit: it reads values of tensors in Python, as a number, a size or a branch "
        rf"in blocks\.1, a Inner \({__file__}:\d+\)",
        found,
    ), found


def test_code_without_a_file_is_not_named() -> None:
    """The line is that of the user's code which called it."""
    body = eval("lambda h: -h if h.sum() > 1e9 else h")
    assert re.search(rf"or a branch in blocks\.1, a Inner \({__file__}:\d+\)$", note(Inner(body)))


def test_code_of_a_package_that_calls_nothing_of_the_users_is_named() -> None:
    file, names = f"{sysconfig.get_path('purelib')}/package/model.py", dict[str, Any]()
    exec(compile("\n\ndef forward(self, h):\n    return outer(h)\n", file, "exec"), names)
    names["outer"] = eval("lambda h: int(h)")
    model = type("Packaged", (nn.Module,), {"forward": names["forward"]})()
    with ThreadPoolExecutor(1) as pool:  # in whose thread no code of a user runs
        error = pool.submit(model, "h").exception()
    assert error is not None and raised_in(error, nn.Sequential(model)) == f" in 0, a Packaged ({file}:4)"


def test_a_batch_norm_that_counts_its_batches_is_named() -> None:
    """With ``momentum=None`` it divides by a counter that it reads in Python."""
    one = subject(nn.BatchNorm1d(5, momentum=None))
    assert f"in blocks.1, a BatchNorm1d ({__file__}:" in one.trace.notes[0]
    for microbatches in (1, 2):
        truth = oracle_run(one, microbatches, steps=2)
        assert max(errors(sharded_run(one, 2, microbatches, steps=2), truth).values()) <= TOLERANCE


def test_other_errors_are_those_of_torch_with_their_place() -> None:
    found = note(Inner(lambda h: h + torch.from_numpy(h.detach().numpy())))
    assert re.search(rf"numpy.* in blocks\.1, a Inner \({__file__}:\d+\)$", found), found


ROWS: dict[str, tuple[Body, str]] = {
    "a loop": (lambda h: sum((h * i for i in range(len(h))), h), "uses their number as a number of Python"),
    "a number": (lambda h: h * int(h.shape[0]), "uses their number as a number of Python"),
    "a size": (lambda h: h.view(8, 5), rf"invalid for input of size 5\*rows in blocks\.1, a Inner \({__file__}:\d+\)$"),
    "first ones": (lambda h: h + h[:4].mean(0), "does not take all numbers of rows in the same way.* 4 <= rows$"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_cannot_stay_open(name: str) -> None:
    body, told = ROWS[name]
    found = note(Inner(body))
    assert re.match(rf"captured for 8 rows at a time, and again for every other number that comes: .*{told}", found), (
        found
    )
    assert "specialized" not in found and "6" not in found.replace(__file__, "") and "L[" not in found


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, h: Tensor) -> Tensor:
        h = h * self.scale
        if h.requires_grad:
            h.register_hook(lambda g: 2 * g)
        return h


def test_a_hook_that_forward_registers() -> None:
    """Forward registers it in each step, which a graph would not; torch's own functions are there afterwards."""
    before = Tensor.register_hook, Tensor.register_post_accumulate_grad_hook
    found = note(Hooked())
    assert "forward registers a hook on a tensor, which sees a gradient inside the model" in found
    assert (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook) == before


class NodeHooked(Hooked):
    def forward(self, h: Tensor) -> Tensor:
        h = h * self.scale
        assert h.grad_fn is not None and h.grad_fn.name() == "MulBackward0"
        h.grad_fn.register_prehook(lambda g: (2 * g[0],))
        return h


class SavedHooked(Hooked):
    def forward(self, h: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: 2 * saved, lambda saved: saved):
            return h * self.scale


def test_hooks_on_what_autograd_has() -> None:
    entered = torch.autograd.graph.saved_tensors_hooks.__enter__
    assert "forward registers a hook on a tensor" in note(NodeHooked())
    assert "forward has hooks on what autograd saves" in note(SavedHooked())
    assert "grad_fn" not in vars(Tensor)
    assert torch.autograd.graph.saved_tensors_hooks.__enter__ is entered


def test_hooks_that_other_threads_register_meanwhile() -> None:
    with tensor_hooks_refused(), ThreadPoolExecutor(1) as pool:
        x = torch.ones(3, requires_grad=True)
        pool.submit(x.register_hook, lambda g: 2 * g).result()
        with pytest.raises(Uncapturable):
            x.register_hook(lambda g: 3 * g)
    x.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0] * 3


def test_masks_of_transformers_are_those_of_a_step() -> None:
    """They are others where a model is exported: some models then see later positions."""

    def asked(module: str) -> bool:
        return bool(eval("bool(asked())", {"__name__": module, "asked": torch.compiler.is_exporting}))  # noqa: S307

    with exporting():
        assert asked("a_model") and torch.compiler.is_exporting() and torch.compiler.is_compiling()
        assert not asked("transformers.masking_utils")
    assert not asked("a_model")
