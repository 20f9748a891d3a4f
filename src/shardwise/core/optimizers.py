"""The table of optimizers: what each takes, keeps and needs in an update.  All work element by element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

ADAM = ("betas", "eps", "amsgrad", "maximize")


class OptimizerFacts(NamedTuple):
    """What is known of an optimizer.

    ``options`` are its arguments besides ``lr``; ``state`` are the tensors of a parameter's size that it keeps, and
    ``scalars`` those without a dim.  ``fused`` are the types of devices on which it has fused kernels in the oldest
    torch that shardwise supports.  ``temporaries`` are the tensors of a segment's size that an update takes where it is
    not fused, by type of device: (without weight decay, with it).
    """

    options: tuple[str, ...]
    state: tuple[str, ...]
    scalars: tuple[str, ...] = ("step",)
    fused: tuple[str, ...] = ()
    temporaries: Mapping[str, tuple[int, int]] = {}


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
}  # fmt: skip
"""These are optimizers of :mod:`torch.optim`, and Lion (:class:`shardwise.runtime.lion.Lion`)."""

MORE_STATE: Mapping[str, str] = {
    "momentum": "momentum_buffer",
    "amsgrad": "max_exp_avg_sq",
    "centered": "grad_avg",
}
"""The tensor of a parameter's size that an option adds to the state, where it is not zero or false."""

FIRST_RATE = frozenset({"eta", "step_size"})
"""The state that begins with the learning rate of the first step."""

NOT_BY_GROUP = (
    "amsgrad", "centered", "nesterov", "maximize", "decoupled_weight_decay", "initial_accumulator_value",
)  # fmt: skip
"""Groups of parameters do not differ in these options."""

SAME_KIND = ("momentum", "dampening")
"""In these options groups differ only where they are more than 0 in all: what state there is depends on that."""

APPLIES: Mapping[str, tuple[str, ...]] = {
    option: tuple(name for name, facts in OPTIMIZERS.items() if option in facts.options)
    for option in dict.fromkeys(option for facts in OPTIMIZERS.values() for option in facts.options)
}
"""The optimizers that have each option."""

FUSED: Mapping[str, tuple[str, ...]] = {
    kind: tuple(name for name, facts in OPTIMIZERS.items() if kind in facts.fused) for kind in ("cpu", "gpu")
}
"""The optimizers with fused kernels, by type of device."""
