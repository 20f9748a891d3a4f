"""The table of optimizers: what each takes, keeps and needs in an update, element by element or by whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

Shape = tuple[int, ...]

ADAM = ("betas", "eps", "amsgrad", "maximize")


class WholeFacts(NamedTuple):
    """What is known of an optimizer of whole tensors, by the shape of a parameter: the shape of each tensor of its
    ``state``, and the ``elements`` of all temporaries of an update."""

    state: Callable[[Shape], Mapping[str, Shape]]
    elements: Callable[[Shape], int]


class OptimizerFacts(NamedTuple):
    """What is known of an optimizer.

    ``options`` are its arguments besides ``lr``; ``state`` are the tensors of a parameter's size that it keeps, and
    ``scalars`` those without a dim.  ``fused`` are the types of devices on which it has fused kernels in the oldest
    torch that shardwise supports.  ``temporaries`` are the tensors of a segment's size that an update takes where it is
    not fused, by type of device: (without weight decay, with it).

    An optimizer that needs ``whole`` tensors has the facts of these there.  One that takes ``rows`` alone updates
    tables whose gradients have rows, and no other parameters; its temporaries are of these rows.
    """

    options: tuple[str, ...]
    state: tuple[str, ...]
    scalars: tuple[str, ...] = ("step",)
    fused: tuple[str, ...] = ()
    temporaries: Mapping[str, tuple[int, int]] = {}
    whole: WholeFacts | None = None
    rows: bool = False


def _adafactor(shape: Shape) -> Mapping[str, Shape]:
    """Averages of squares over the last dim and over the last but one; a vector has its own."""
    if len(shape) < 2:
        return {"step": (), "variance": shape}
    return {"step": (), "row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


LARGEST = 1024
"""Dims longer than that have a diagonal preconditioner of Shampoo."""


def _shampoo(shape: Shape) -> Mapping[str, Shape]:
    """A matrix for each dim, or its diagonal."""
    return {f"factor_{i}": (size, size) if size <= LARGEST else (size,) for i, size in enumerate(shape or (1,))}


OPTIMIZERS: Mapping[str, OptimizerFacts] = {
    "adamw": OptimizerFacts((*ADAM, "weight_decay"), ("exp_avg", "exp_avg_sq"), fused=("cpu", "gpu")),
    "adam": OptimizerFacts((*ADAM, "weight_decay"), ("exp_avg", "exp_avg_sq"), fused=("cpu", "gpu")),
    "sgd": OptimizerFacts(
        ("momentum", "dampening", "nesterov", "maximize", "weight_decay"), (), (), ("cpu", "gpu"),
        {"cpu": (0, 1), "gpu": (0, 1)},
    ),
    "adagrad": OptimizerFacts(
        ("eps", "lr_decay", "initial_accumulator_value", "maximize", "weight_decay"), ("sum",), fused=("cpu",),
        temporaries={"gpu": (1, 2)},
    ),
    "rmsprop": OptimizerFacts(
        ("alpha", "eps", "momentum", "centered", "maximize", "weight_decay"), ("square_avg",),
        temporaries={"cpu": (1, 2), "gpu": (1, 2)},
    ),
    "nadam": OptimizerFacts(
        ("betas", "eps", "momentum_decay", "decoupled_weight_decay", "maximize", "weight_decay"),
        ("exp_avg", "exp_avg_sq"), ("step", "mu_product"), temporaries={"cpu": (2, 3), "gpu": (3, 3)},
    ),
    "radam": OptimizerFacts(
        ("betas", "eps", "decoupled_weight_decay", "maximize", "weight_decay"), ("exp_avg", "exp_avg_sq"),
        temporaries={"cpu": (5, 6), "gpu": (4, 5)},
    ),
    "adamax": OptimizerFacts(
        ("betas", "eps", "maximize", "weight_decay"), ("exp_avg", "exp_inf"),
        temporaries={"cpu": (1, 2), "gpu": (1, 2)},
    ),
    "adadelta": OptimizerFacts(
        ("rho", "eps", "maximize", "weight_decay"), ("square_avg", "acc_delta"),
        temporaries={"cpu": (2, 3), "gpu": (2, 3)},
    ),
    "asgd": OptimizerFacts(
        ("lambd", "alpha", "t0", "maximize", "weight_decay"), ("ax",), ("step", "eta", "mu"),
        temporaries={"cpu": (0, 1), "gpu": (1, 2)},
    ),
    "rprop": OptimizerFacts(
        ("etas", "step_sizes", "maximize"), ("prev", "step_size"), temporaries={"cpu": (3, 3), "gpu": (3, 3)},
    ),
    "lion": OptimizerFacts(
        ("betas", "weight_decay"), ("exp_avg",), (), temporaries={"cpu": (1, 1), "gpu": (1, 1)},
    ),
    "sparse_adam": OptimizerFacts(
        ("betas", "eps", "maximize"), ("exp_avg", "exp_avg_sq"), temporaries={"cpu": (0, 0), "gpu": (0, 0)}, rows=True,
    ),
    "muon": OptimizerFacts(
        ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "eps", "weight_decay"), (), (),
        whole=WholeFacts(lambda shape: {"momentum_buffer": shape}, lambda shape: 3 * prod(shape)),
    ),
    "adafactor": OptimizerFacts(
        ("beta2_decay", "d", "eps", "maximize", "weight_decay"), (), (),
        whole=WholeFacts(_adafactor, lambda shape: (1 if len(shape) > 1 else 2) * prod(shape) + sum(shape)),
    ),
    "lamb": OptimizerFacts(
        ("betas", "eps", "weight_decay"), (), (),
        whole=WholeFacts(
            lambda shape: {"step": (), "exp_avg": shape, "exp_avg_sq": shape}, lambda shape: prod(shape) + 4
        ),
    ),
    "shampoo": OptimizerFacts(
        ("eps", "weight_decay"), (), (), whole=WholeFacts(
            _shampoo, lambda shape: 2 * prod(shape) + 3 * max(prod(one) for one in _shampoo(shape).values()),
        ),
    ),
}  # fmt: skip
"""These are optimizers of :mod:`torch.optim`, and those of :mod:`shardwise.runtime.lion`, ``lamb`` and ``shampoo``."""

OWN = "own"
"""The name of an optimizer whose step is the user's own (:class:`shardwise.runtime.own_optimizer.OwnOptimizer`)."""

WHOLE = tuple(name for name, facts in OPTIMIZERS.items() if facts.whole is not None)
"""The optimizers that need whole tensors."""

MORE_STATE: Mapping[str, str] = {
    "momentum": "momentum_buffer",
    "amsgrad": "max_exp_avg_sq",
    "centered": "grad_avg",
}
"""The tensor of a parameter's size that an option adds to the state, where it is not zero or false."""

FIRST_RATE = frozenset({"eta", "step_size"})
"""The state that begins with the learning rate of the first step."""

OF_STATE = (*MORE_STATE, "dampening")
"""What state there is depends on whether these options are zero, or false."""

OF_MOMENTUM: Mapping[str, Any] = {"nesterov": False, "dampening": 0.0}
"""Without momentum torch ignores these options, as if they had these values."""

ROWS = tuple(name for name, facts in OPTIMIZERS.items() if facts.rows)
"""The optimizers that take rows alone."""

MOVES_ROWS = ("weight_decay", "lr_decay")
"""With these options an optimizer moves rows without a gradient, or by a rate that this has no part in."""

APPLIES: Mapping[str, tuple[str, ...]] = {
    option: tuple(name for name, facts in OPTIMIZERS.items() if option in facts.options)
    for option in dict.fromkeys(option for facts in OPTIMIZERS.values() for option in facts.options)
}
"""The optimizers that have each option."""

FUSED: Mapping[str, tuple[str, ...]] = {
    kind: tuple(name for name, facts in OPTIMIZERS.items() if kind in facts.fused) for kind in ("cpu", "gpu")
}
"""The optimizers with fused kernels, by type of device."""
