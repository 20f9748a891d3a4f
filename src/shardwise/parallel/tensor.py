"""Shard parameters themselves over mesh axes: tensor parallelism.

Every rank of these axes loads the same rows of a batch.  A parameter's ``Layout``, which follows from the trace, says
what each rank has of it; data parallelism and ZeRO work on these local pieces as on whole parameters.  These are the
recipes, for Y[b,n] = X[b,k] W[k,n]:

    =====================  =============  =============  ====================
    recipe                 X              W              Y
    =====================  =============  =============  ====================
    1d, by columns / rows  -- / k:tp      n:tp / k:tp    n:tp / partial
    2d                     b:i k:j        k:i n:j        b:i n:j
    2.5d                   b:(d,i) k:j    k:i n:j        b:(d,i) n:j
    3d                     b:(i,l) k:j    k:(j,i) n:l    b:(i,j) n:l
    =====================  =============  =============  ====================

A ring over n ranks sends (n-1)/n of what it gathers or scatters.  For a product of x, w and y elements a rank sends,
forward and backward, this many elements: by 1d 2x(t-1)/t by columns and 2y(t-1)/t by rows (for a transformer layer
8bsh(t-1)/t in all), by 2d 2(x+w)(q-1)/q², by 2.5d 2(x/d+w)(q-1)/q², by 3d 2(x+w+y)(q-1)/q³.

Ranks of 1d and 1d-sp share a layer of experts inside each, by columns and rows, or by number: each has some experts and
computes the rows of all tokens that chose these.  Both send what the two products of an MLP send, and what the router
adds in backward.

1d follows Shoeybi et al. (arXiv 1909.08053, section 3), 1d-sp Korthikanti et al. (arXiv 2205.05198, section 4.2.2), 2d
Xu and You (Optimus, arXiv 2104.05343), 2.5d Wang et al. (Tesseract, arXiv 2105.14500), 3d Bian et al. (arXiv
2105.14450).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.core.errors import ConfigError, check_choice, check_count
from shardwise.core.mesh import Axis, Mesh, axis_of
from shardwise.core.plan import CHOICES, Plan
from shardwise.core.tensor_options import EXPERTS, Experts, Pins, Tensor, TensorPlan, tensor_axes


@dataclass(frozen=True)
class Role:
    """This is what one axis of tensor parallelism does.

    ``rows`` says that the rows of the batch are sharded over it; ``at_use`` says that weights are sharded where they
    rest, and gathered where they are used.  ``stream`` is what activations between products are: "whole", or sharded
    along the "sequence", the "rows" or the "width", or all along the "context"; under "width" every product is by
    columns, of a gathered input.
    ``turned`` says that tables begin with the width sharded, so that products by rows come first.
    """

    rows: bool = False
    at_use: bool = False
    stream: str = "whole"
    turned: bool = False


ROLES: Mapping[str, Mapping[str, Role]] = {
    "1d": {"tp": Role()},
    "1d-sp": {"tp": Role(stream="sequence")},
    "2d": {"tp_i": Role(rows=True, at_use=True), "tp_j": Role(stream="width")},
    "2.5d": {"tp_d": Role(rows=True), "tp_i": Role(rows=True, at_use=True), "tp_j": Role(stream="width")},
    "3d": {"tp_i": Role(rows=True, at_use=True), "tp_j": Role(stream="rows", turned=True), "tp_l": Role(stream="rows")},
}
"""This maps each recipe to its axes, the first of them major."""


def role(kind: str, axis: str) -> Role | None:
    """Return what an axis, or a sub-axis of one, does in a recipe.

    It is None for an axis that no recipe has, over which all ranks compute the same.  Raises :class:`ConfigError` for
    an axis of another recipe.
    """
    axis = axis_of(axis)
    if axis == EXPERTS:
        return Role(rows=True)
    if axis in ROLES[kind]:
        return ROLES[kind][axis]
    if any(axis in roles for roles in ROLES.values()):
        raise ConfigError(f'mesh: axis "{axis}" is not one of tensor "{kind}"; legal: {", ".join(ROLES[kind])}.')
    return None


def sides(kind: str, size: int) -> dict[str, int]:
    """Return the number of ranks along each axis of a recipe over ``size`` ranks.

    Raises :class:`ConfigError` where they do not make its shape."""
    check_choice("tensor", kind, CHOICES["tensor"])
    check_count("tp", size)
    shape: tuple[int, ...] = (size,)
    if kind != "1d" and kind != "1d-sp":
        q = round(size ** (1 / 3)) if kind == "3d" else math.isqrt(size)
        if kind == "2.5d":
            q = next((q for q in range(math.isqrt(size // 2), 1, -1) if size % (q * q) == 0), 1)
        shape = {"2d": (q, q), "2.5d": (size // (q * q), q, q), "3d": (q, q, q)}[kind]
        if math.prod(shape) != size or (q == 1 and size > 1):
            legal = {
                "2d": "a square, such as 4 or 9",
                "2.5d": "d·q² with d and q of 2 or more, such as 8 or 18",
                "3d": "a cube, such as 8 or 27",
            }
            raise ConfigError.on("tp", f'{size} is not legal with tensor "{kind}"', f"{legal[kind]}.")
    return dict(zip(ROLES[kind], shape, strict=True))


def tensor_parallel(
    plan: Plan, size: int, kind: Tensor = "1d", tensor_plan: TensorPlan = "recipe", pins: Mapping[str, str] | Pins = (),
    experts: Experts = "inside",
) -> Plan:  # fmt: skip
    """Return ``plan`` with parameters sharded over ``size`` ranks by the recipe ``kind``, or on the mesh of that recipe
    as ``tensor_plan`` says.  ``experts`` says whether a rank has a part of each expert or some experts.

    The axes are the innermost: ranks that share the products of a layer are neighbours, for they wait for each other
    most often.
    """
    own = {axis for roles in ROLES.values() for axis in roles}
    others = tuple(axis for axis in plan.mesh.axes if axis.name not in own)
    inner = tuple(Axis(name, side) for name, side in sides(kind, size).items())
    return plan.replace(
        mesh=Mesh((*others, *(inner if size > 1 else ()))), tensor=kind, tensor_plan=tensor_plan, pins=pins,
        experts=experts,
    )  # fmt: skip


def axes_across(mesh: Mesh, per_host: int) -> tuple[str, ...]:
    """Return the tensor-parallel axes that reach over hosts of ``per_host`` ranks."""
    links = mesh.links(per_host)
    return tuple(axis for axis in tensor_axes(mesh) if links[axis] != "device")


def across_hosts(mesh: Mesh, per_host: int) -> str | None:
    """Return a note on tensor-parallel groups that reach over hosts of ``per_host`` ranks; None if there are none."""
    found = axes_across(mesh, per_host)
    if not found:
        return None
    size = mesh.axis_size(tensor_axes(mesh))
    return (
        f"{', '.join(found)} across hosts of {per_host} ranks: all {size} ranks of a group wait for each other several "
        "times a layer; "
        f"faster: parallel.tp that divides {per_host}, and parallel.pp or parallel.dp across hosts"
    )


def row_parts(plan: Plan) -> int:
    """Return the number of shares of a rank's rows of a batch that the tensor-parallel axes make between products,
    where axes take turns."""
    found = [(role(plan.tensor.recipe, axis) or Role(), plan.mesh.axis_size(axis)) for axis in tensor_axes(plan.mesh)]
    turns = [size for one, size in found if one.stream == "rows"]
    return math.prod(size for one, size in found if one.rows) * max(turns, default=1)
