"""What tells code that it is exported is put back, also where threads capture at a time."""

from __future__ import annotations

import builtins
import threading

import torch

from shardwise.graph.torch_private import exporting, function_calls, without_modes


def test_two_threads_leave_nothing_behind() -> None:
    """A flag that stays makes torch's optimizers count steps in single precision."""
    before, inside, wait = builtins.max, threading.Event(), threading.Event()

    def first() -> None:
        with exporting():
            inside.set()
            wait.wait(0.2)

    def second() -> None:
        inside.wait(5)
        with exporting():
            assert torch.compiler.is_exporting()
            wait.wait(0.3)

    threads = [threading.Thread(target=one) for one in (first, second)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(10)
    assert not torch.compiler.is_exporting() and not torch.compiler.is_compiling()
    assert builtins.max is before


def test_a_thread_that_runs_sees_nothing_of_one_that_exports() -> None:
    """Neither inside torch.export, which would tell all: a rank may take its step while another captures."""
    inside, over, seen = threading.Event(), threading.Event(), []

    class Telling(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(bool(torch.compiler.is_exporting() and torch.compiler.is_compiling()))
            inside.set()
            assert over.wait(10)
            return x + 1

    def export() -> None:
        with exporting():
            torch.export.export(Telling(), (torch.ones(2),), strict=False)

    thread = threading.Thread(target=export)
    thread.start()
    assert inside.wait(10)
    seen.append(bool(torch.compiler.is_exporting() or torch.compiler.is_compiling()))
    over.set()
    thread.join(10)
    assert seen[:2] == [True, False] and all(seen[2:])


def test_the_mode_of_an_export_is_put_aside_by_no_other_thread() -> None:
    """What it computes then would not be recorded."""
    ended = threading.Event()

    def aside() -> None:
        with without_modes():
            ended.set()

    with exporting():
        thread = threading.Thread(target=aside)
        thread.start()
        assert not ended.wait(0.3)
    thread.join(10)
    assert ended.is_set()


def test_two_threads_that_see_functions_leave_nothing_behind() -> None:
    """Else a later thread of the same number would record Functions as ops of a capture that is over."""
    base = torch.autograd.function._SingleLevelFunction  # type: ignore[attr-defined]
    before, inside = vars(base).get("apply"), threading.Event()

    def seeing(seconds: float, first: bool) -> None:
        if not first:
            inside.wait(5)
        with function_calls(lambda original, function, args: original(*args)):
            inside.set()
            threading.Event().wait(seconds)

    threads = [threading.Thread(target=seeing, args=args) for args in ((0.3, True), (0.1, False))]
    for one in threads:
        one.start()
    for one in threads:
        one.join(10)
    assert vars(base).get("apply") is before
