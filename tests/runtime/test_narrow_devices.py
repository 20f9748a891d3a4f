"""Devices without float64, such as MPS and some of Intel's: nothing of that type is made on them, and the numbers are the same to rounding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.backend import Backend
from shardwise.core.scale import ScaleChoice
from shardwise.launch.evaluation import evaluate
from shardwise.ops.collectives import Env
from shardwise.ops.cross_entropy import cross_entropy
from shardwise.runtime.scale import LossScale

CPU = torch.device("cpu")


class Narrow(TorchDispatchMode):
    """Raises what MPS does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(isinstance(one, Tensor) and one.dtype == torch.float64 for one in tree_leaves(found)):
            raise TypeError(f"{func}: Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        return found


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Narrow:
    monkeypatch.setattr(Backend, "widest_float", torch.float32)
    return Narrow()


def test_float64_is_found(narrow: Narrow) -> None:
    with narrow, pytest.raises(TypeError, match="float64"):
        torch.ones(2).double()


def test_an_evaluation(narrow: Narrow) -> None:
    losses = {1.5: 3.0, 2.5: 1.0}
    results = iter([SimpleNamespace(loss=torch.tensor(loss), weight=torch.tensor(weight)) for loss, weight in losses.items()])
    trainer: Any = SimpleNamespace(comm=SimpleNamespace(device=CPU), evaluate=lambda batch: next(results))
    with narrow:
        found = evaluate(trainer, [SimpleNamespace(rows=2)] * 2, perplexity=False)  # type: ignore[list-item]
    assert found["validation_loss"] == 1.75


def test_a_loss_scale(narrow: Narrow) -> None:
    scale = LossScale(ScaleChoice(initial=1024.0, interval=1), CPU)
    with narrow:
        scale.update(torch.zeros(()))
        scale.update(torch.ones(()))
        scale.update(torch.ones(()))
    assert float(scale.scale) == 512.0


@pytest.mark.parametrize("probabilities", [False, True])
def test_a_mean_over_targets_that_nobody_has_counted(narrow: Narrow, probabilities: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, 5, generator=generator)
    target = torch.rand(6, 5, generator=generator) if probabilities else torch.tensor([0, 4, -100, 2, 1, 3])
    how: dict[str, Any] = {"ignore_index": -100, "smoothing": 0.0, "reduction": 1, "counted": False, "log_probabilities": False}
    with narrow:
        found = cross_entropy(Env(rows=6), scores, target, None, **how, summand=True, share=None, spread=())
    assert torch.allclose(found, F.cross_entropy(scores, target), rtol=1e-6)
