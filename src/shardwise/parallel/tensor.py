"""Tensor parallelism: mesh axes over which parameters themselves are sharded.

Every rank of such axes loads the same rows of a batch.  What each has of a parameter is the parameter's ``Layout``,
which follows from the trace; data parallelism and ZeRO work on these local pieces as on whole parameters.  The recipes,
for Y[b,n] = X[b,k] W[k,n]:

    =====================  =============  =============  ====================
    recipe                 X              W              Y
    =====================  =============  =============  ====================
    1d, by columns / rows  -- / k:tp      n:tp / k:tp    n:tp / partial
    2d                     b:i k:j        k:i n:j        b:i n:j
    2.5d                   b:(d,i) k:j    k:i n:j        b:(d,i) n:j
    3d                     b:(i,l) k:j    k:(j,i) n:l    b:(i,j) n:l
    =====================  =============  =============  ====================

A ring over n ranks sends (n-1)/n of what it gathers or scatters.  Because of a product of x, w and y elements a rank
sends, forward and backward: by 1d 2x(t-1)/t by columns, 2y(t-1)/t by rows (of a transformer layer 8bsh(t-1)/t in all),
by 2d 2(x+w)(q-1)/q², by 2.5d 2(x/d+w)(q-1)/q², by 3d 2(x+w+y)(q-1)/q³.

1d after Shoeybi et al. (arXiv 1909.08053, section 3), 1d-sp after Korthikanti et al. (arXiv 2205.05198, section 4.2.2),
2d after Xu and You (Optimus, arXiv 2104.05343), 2.5d after Wang et al. (Tesseract, arXiv 2105.14500), 3d after Bian et
al. (arXiv 2105.14450).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.core.errors import ConfigError, check_choice, check_count
from shardwise.core.mesh import Axis, Mesh, axis_of
from shardwise.core.plan import CHOICES, Plan
from shardwise.core.tensor_options import Pins, Tensor, TensorPlan, tensor_axes


@dataclass(frozen=True)
class Role:
    """What one axis of tensor parallelism does.

    ``rows``: the rows of the batch are sharded over it; ``at_use``: weights are sharded where they rest, and gathered
    where they are used. ``stream`` is what activations between products are: "whole", or sharded along the "sequence",
    the "rows" or the "width"; under "width" every product is by columns, of a gathered input.  ``turned``: tables begin
    with the width sharded, so products by rows come first.
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
"""By recipe: the axes, the first of them major."""


def role(kind: str, axis: str) -> Role | None:
    """What an axis, or a sub-axis of one, does in a recipe; None for one that no recipe has, over which all ranks
    compute the same.

    :class:`ConfigError` for an axis of another recipe.
    """
    axis = axis_of(axis)
    if axis in ROLES[kind]:
        return ROLES[kind][axis]
    if any(axis in roles for roles in ROLES.values()):
        raise ConfigError(f'mesh: axis "{axis}" is not one of tensor "{kind}"; legal: {", ".join(ROLES[kind])}.')
    return None


def sides(kind: str, size: int) -> dict[str, int]:
    """The number of ranks along each axis of a recipe over ``size`` ranks; :class:`ConfigError` where they make no such
    shape.
    """
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
    plan: Plan, size: int, kind: Tensor = "1d", tensor_plan: TensorPlan = "recipe", pins: Mapping[str, str] | Pins = ()
) -> Plan:
    """``plan`` with parameters sharded over ``size`` ranks by the recipe ``kind``, or on the mesh of that recipe as
    ``tensor_plan`` says.

    The axes are the innermost: ranks that share the products of a layer are neighbours, for they wait for each other
    most often.
    """
    own = {axis for roles in ROLES.values() for axis in roles}
    others = tuple(axis for axis in plan.mesh.axes if axis.name not in own)
    inner = tuple(Axis(name, side) for name, side in sides(kind, size).items())
    return plan.replace(
        mesh=Mesh((*others, *(inner if size > 1 else ()))), tensor=kind, tensor_plan=tensor_plan, pins=pins
    )


def axes_across(mesh: Mesh, per_host: int) -> tuple[str, ...]:
    """The tensor-parallel axes that reach over hosts of ``per_host`` ranks."""
    links = mesh.links(per_host)
    return tuple(axis for axis in tensor_axes(mesh) if links[axis] != "device")


def across_hosts(mesh: Mesh, per_host: int) -> str | None:
    """What to say of tensor-parallel groups that have ranks on several hosts of ``per_host`` ranks; None where there
    are none.
    """
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
    """The number of shares of a rank's rows of a batch that the tensor-parallel axes make: between products, where axes
    take turns.
    """
    found = [(role(plan.tensor.recipe, axis) or Role(), plan.mesh.axis_size(axis)) for axis in tensor_axes(plan.mesh)]
    turns = [size for one, size in found if one.stream == "rows"]
    return math.prod(size for one, size in found if one.rows) * max(turns, default=1)
