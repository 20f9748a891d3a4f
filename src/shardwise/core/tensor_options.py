"""This module has the options of a plan for tensor parallelism: they say how the dims of parameters are sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from shardwise.core.errors import ConfigError, check_text
from shardwise.core.local_options import ISLANDS
from shardwise.core.mesh import Axis, Mesh
from shardwise.core.options import check_options, count, word
from shardwise.core.pins import PLANS, cuts

Tensor = Literal["1d", "1d-sp", "2d", "2.5d", "3d"]
TensorPlan = Literal["recipe", "auto", "propagate", "table"]
Context = Literal["gathered", "ring", "heads"]
Experts = Literal["inside", "by-number"]
Overlap = Literal["none", "pairs"]
Pins = tuple[tuple[str, str], ...]

CONTEXT = "cp"
"""The mesh axis of context parallelism: it shards the sequence, and no parameter."""

EXPERTS = "ep"
"""The mesh axis of expert parallelism: it shards the rows of a batch, and experts."""

BY_NUMBER = ("1d", "1d-sp")
"""The recipes whose ranks have the same tokens wherever experts are, so that each can have some experts."""

NON_TENSOR_AXES = (ISLANDS, "pp", "dp_replicate", "dp")
"""These mesh axes shard nothing inside a layer."""


def tensor_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of two ranks or more that shard what is inside a layer, in the order of the mesh: those that
    shard parameters by their dims, ``EXPERTS`` and ``CONTEXT``."""
    return tuple(axis.name for axis in mesh.axes if axis.name not in NON_TENSOR_AXES and axis.size > 1)


def with_outer_axis(mesh: Mesh, name: str, size: int) -> Mesh:
    """Return the mesh with an axis of this name and size, outside those of :func:`tensor_axes`; with size 1 without."""
    axes, inner = [axis for axis in mesh.axes if axis.name != name], tensor_axes(mesh)
    at = next((i for i, axis in enumerate(axes) if axis.name in inner), len(axes))
    if size > 1:
        axes.insert(at, Axis(name, size))
    return Mesh(tuple(axes))


def parameter_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of two ranks or more that shard parameters by their dims as the options say, in the order of the
    mesh."""
    return tuple(axis for axis in tensor_axes(mesh) if axis not in (CONTEXT, EXPERTS))


@dataclass(frozen=True, slots=True)
class TensorOptions:
    """These options say how the axes of tensor parallelism shard parameters.  Users write them as ``tensor``,
    ``tensor_plan``, ``pins`` and ``tensor_bytes``, and ``context`` says how attention joins the parts of a sequence
    that the axis ``cp`` shards (``parallel/context.py``).  ``experts`` says how the ranks of a recipe share experts:
    each has a part of every expert, or some of them.  ``overlap`` says what hides the exchanges of all of these axes
    (``parallel/overlap.py``).

    ``recipe`` says what each axis does.  Under ``plan`` "auto" a solver decides instead, and its plan may need at most
    ``bytes`` bytes (``core/rates.py``, ``SolverObjective.memory``); 0 means no limit.  Under "propagate" and "table"
    the ``pins`` decide: pairs, or a mapping, of a pattern of names and a cut (``core/pins.py``).
    """

    recipe: Tensor = word("1d", get_args(Tensor), key="tensor")
    plan: TensorPlan = word("recipe", get_args(TensorPlan), key="tensor_plan")
    pins: Pins = ()
    bytes: int = count(0, least=0, key="tensor_bytes")
    context: Context = word("gathered", get_args(Context), key="context")
    experts: Experts = word("inside", get_args(Experts), key="experts")
    overlap: Overlap = word("none", get_args(Overlap), key="overlap")

    def __post_init__(self) -> None:
        check_options(self)
        pins = tuple(self.pins.items()) if isinstance(self.pins, Mapping) else self.pins
        if not isinstance(pins, tuple | list) or not all(
            isinstance(pin, tuple | list) and len(pin) == 2 for pin in pins
        ):
            legal = 'a mapping, such as {"*.q_proj.weight": "column"}.'
            raise ConfigError.on("pins", f"{self.pins!r} is not legal", legal)
        object.__setattr__(self, "pins", tuple((pattern, text) for pattern, text in pins))
        if self.pins and self.plan not in PLANS:
            own = ", ".join(f'"{name}"' for name in PLANS)
            wrong = f'"{self.pins[0][0]}" is not legal with tensor_plan = "{self.plan}", which decides itself'
            raise ConfigError.on("pins", wrong, f"none, or tensor_plan = {own}.")
        if self.experts != "inside" and (self.plan != "recipe" or self.recipe not in BY_NUMBER):
            where = f'tensor = "{self.recipe}"' if self.plan == "recipe" else f'tensor_plan = "{self.plan}"'
            one = " or ".join(f'"{name}"' for name in BY_NUMBER)
            legal = f'"inside", or tensor = {one} with tensor_plan = "recipe".'
            raise ConfigError.on("experts", f'"{self.experts}" is not legal with {where}', legal)
        if self.bytes and self.plan != "auto":
            wrong = f'{self.bytes} is not legal with tensor_plan = "{self.plan}"'
            raise ConfigError.on("tensor_bytes", wrong, '0, or tensor_plan = "auto".')

    @property
    def chosen_by(self) -> str:
        """Return the name of what decides how parameters are sharded: the recipe, or the plan that replaces it."""
        return self.recipe if self.plan == "recipe" else self.plan

    def check_axes(self, axes: Sequence[str]) -> None:
        """Raise :class:`ConfigError` if the plan goes by pins and they do not say how to shard over these axes."""
        if self.plan not in PLANS:
            return
        if not axes:
            wrong = f'"{self.plan}" is not legal without ranks to shard over'
            raise ConfigError.on("tensor_plan", wrong, '"recipe", or tp of 2 or more.')
        if not self.pins:
            legal = '"recipe", "auto", or pins, such as {"*.q_proj.weight" = "column"}.'
            raise ConfigError.on("tensor_plan", f'"{self.plan}" goes by pins, and there are none', legal)
        given = dict(self.pins)
        for pattern, text in given.items():
            check_text("pins: pattern", pattern)
            cuts(pattern, text, axes)
        if len(given) < len(self.pins):
            patterns = [pattern for pattern, _ in self.pins]
            twice = next(pattern for i, pattern in enumerate(patterns) if pattern in patterns[:i])
            raise ConfigError.on("pins", f'"{twice}" is there twice', "once.")
