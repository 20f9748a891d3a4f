"""The backward of a unit; ranks and measurements on the meta device run the same code."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwise.ops.weight_gradients import GradientFactors
from shardwise.units.trace import Unit
from shardwise.units.weight_products import Multiplier, Operand, watch

Place = tuple[str, int]
"""A live tensor's name and its microbatch; one that all microbatches share is of the first."""


class Saved(NamedTuple):
    """What a forward leaves for its backward: outputs with gradients, operands of products, parameters as leaves.

    Of outputs whose memory may end before the backward it leaves only where their gradients enter the graph."""

    outputs: list[Tensor | GradientEdge]
    operands: list[Operand]  # on a rank they refer to gathered parameters
    leaves: Sequence[Tensor]

    @staticmethod
    def of(
        unit: Unit, outputs: Sequence[Tensor], operands: Sequence[Operand], leaves: Sequence[Tensor],
        ends: Callable[[Tensor], bool] = lambda one: False,
    ) -> Saved:  # fmt: skip
        """Return what to save of all ``outputs`` of a unit's forward; ``ends`` says which are views of memory that is
        written to before the backward: autograd would refuse them."""
        good = [o for o, g in zip(outputs, unit.output_grads, strict=False) if g]
        edges = [get_gradient_edge(o) if o.requires_grad and (unit.passing or ends(o)) else o for o in good]
        return Saved(edges, [*operands], leaves)


def _learns(output: Tensor | GradientEdge) -> bool:
    return not isinstance(output, Tensor) or output.requires_grad


class UnitBackward(Multiplier):
    """Runs the backward of units; a subclass says how gradients are computed and where those of parameters go.

    ``pending`` holds the gradients of live tensors, by name and microbatch, until the backward of the units that made
    these; ``microbatch`` is the microbatch of the current backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pending: dict[Place, Tensor] = {}
        self.microbatch = 0

    @abstractmethod
    def solve(self, outputs: Sequence[Any], wanted: Sequence[Any], seeds: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the gradients of ``wanted``, as ``torch.autograd.grad`` does."""

    @abstractmethod
    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Take the gradient of a parameter, which has the parameter's local shape."""

    def pass_on(self, place: Place, gradient: Tensor) -> None:
        """Add ``gradient`` to the pending gradient of a live tensor."""
        before = self.pending.get(place)
        self.pending[place] = gradient if before is None else before + gradient

    def run_backward(
        self, unit: Unit, take: Callable[[], Saved], live: Mapping[Place, Tensor],
        seed: Callable[[str, Any], Tensor | None],
        defer: Callable[[GradientFactors], None] | None = None,
    ) -> None:  # fmt: skip
        """Run BACKWARD from the gradients of outputs that ``seed`` gives; with ``defer``, which gets the factors of the
        weight gradients, run BACKWARD_INPUT.

        ``live`` are the inputs that have a gradient. Nobody else holds what ``take`` returns, so that each part is
        freed as soon as it has been used.
        """
        add, behind = (self.multiply, self.behind) if defer is None else (defer, defer)
        outputs, operands, leaves = take()
        names = [n for n, g in zip(unit.outputs, unit.output_grads, strict=True) if g]
        # By a branch in Python an output may have no gradient in this step, or the loss may not depend on it.
        seeds = [
            (value, own) for name, value in zip(names, outputs, strict=True)
            if (own := seed(name, value)) is not None and (name == "loss" or _learns(value))
        ]  # fmt: skip
        if not seeds:
            return
        parameters = {n: leaf for n, leaf in zip(unit.parameters, leaves, strict=True) if leaf.requires_grad}
        later = watch(unit.products, operands, add, behind)
        wanted = [*parameters.values(), *live.values(), *(p.y for _, p in later)]
        kept, given = zip(*seeds, strict=True)
        del operands  # so that each X is freed when its product has been computed
        grads = self.solve(kept, wanted, given)
        self.flush()
        del outputs, kept, seeds
        own, rest = grads[: len(parameters)], grads[len(parameters) :]
        for name, grad in zip(parameters, own, strict=True):
            if grad is not None:
                self.add_gradient(name, grad)
        for (name, operand), dy in zip(later, rest[len(live) :], strict=True):
            if dy is not None and operand.counts:
                add(operand.factors(name, dy))
        for place, grad in zip(live, rest[: len(live)], strict=True):
            if grad is not None:
                self.pass_on(place, grad)
