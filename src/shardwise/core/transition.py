"""From one layout to another: the collectives that change where a tensor lives.

Each step is one collective over some axes, all of them minor-most where they leave a factor and where they
join one: only then is what a rank sends and receives a plain slice.  Slices come first and gathers last,
so that as little as possible moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from shardwise.core.errors import ShardwiseError
from shardwise.core.layout import Factor, Layout
from shardwise.core.mesh import Mesh

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "slice"]
Dim = tuple[Factor, ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """One step of a transition, from layout ``source`` to layout ``result``, which have the same factors.

    Args:
        kind: ``slice`` keeps this rank's part and communicates nothing; the others are what NCCL calls so.
        axes: the mesh axes of the group, major first.
        dim, factor: the factor that the axes shard: in ``source`` for ``all_gather`` and ``all_to_all``,
            in ``result`` for ``slice`` and ``reduce_scatter``; -1 for ``all_reduce``.
        to_dim, to_factor: for ``all_to_all``, the factor that the axes shard in ``result``.
    """

    kind: Kind
    axes: tuple[str, ...]
    source: Layout
    result: Layout
    dim: int = -1
    factor: int = -1
    to_dim: int = -1
    to_factor: int = -1

    def __str__(self) -> str:
        return f"{self.kind} over {','.join(self.axes)}: {self.source} -> {self.result}"


def transition(src: Layout, dst: Layout, mesh: Mesh | None = None) -> tuple[Collective, ...]:
    """The collectives that change ``src`` into ``dst``, in order; none where they are the same placement.

    Where the two factor a dim differently, both are brought to their common refinement, and the layouts in
    the collectives have its factors; the local tensors are the same.  To split a *sharded* factor needs
    the sizes of its axes: without ``mesh``, or where the pieces do not fall on its cuts, such a dim is
    gathered and then sliced.

    Raises:
        ShardwiseError: the shapes differ, or ``dst`` is partial on an axis on which ``src`` is not.
    """
    if src.shape != dst.shape:
        raise ShardwiseError(f"no transition from {src} to {dst}: their shapes {src.shape} and {dst.shape} differ")
    if not dst.partial <= src.partial:
        axes = ", ".join(sorted(dst.partial - src.partial))
        raise ShardwiseError(f"no transition from {src} to {dst}: it is no partial sum over {axes} to begin with")
    stages = [_stages(a, b, mesh) for a, b in zip(src.dims, dst.dims, strict=True)]
    first, middle, resumed, last = (tuple(stage[at] for stage in stages) for at in range(4))
    late = Layout(last).sharding_axes - Layout(middle).sharding_axes
    held = dst.partial | (src.partial & late)  # what a late dim is scattered over stays partial until then
    return (
        *_steps(Layout(first, src.partial), Layout(middle, held)),
        *_steps(Layout(resumed, held), Layout(last, dst.partial)),
    )


def volume(collective: Collective, mesh: Mesh, itemsize: int) -> int:
    """The bytes that a rank sends: ring algorithms, n-1 steps a pass, the largest of uneven shards."""
    n = mesh.axis_size(collective.axes)
    source = math.prod(_largest(factor, mesh) for dim in collective.source.dims for factor in dim)
    result = math.prod(_largest(factor, mesh) for dim in collective.result.dims for factor in dim)
    elements = {
        "all_reduce": 2 * (n - 1) * -(-source // n),
        "reduce_scatter": (n - 1) * result,
        "all_gather": (n - 1) * source,
        "all_to_all": (n - 1) * -(-source // n),
        "slice": 0,
    }
    return elements[collective.kind] * itemsize


def _largest(factor: Factor, mesh: Mesh) -> int:
    return -(-factor.size // mesh.axis_size(factor.axes))


def _stages(src: Dim, dst: Dim, mesh: Mesh | None) -> tuple[Dim, Dim, Dim, Dim]:
    """The (source, result) of a dim in each of two rounds: a misaligned dim is whole between them."""
    refined = _refine_pair(src, dst, mesh)
    if refined:
        return refined[0], refined[1], refined[1], refined[1]
    return src, _whole(src), _whole(dst), dst


def _whole(dim: Dim) -> Dim:
    return tuple(Factor(factor.size) for factor in dim)


def _steps(src: Layout, dst: Layout) -> tuple[Collective, ...]:
    """The collectives between layouts of equal factors.

    Every step either brings an axis to its final place, which it never leaves, or frees one that is out of
    place: it ends.
    """
    found: list[Collective] = []
    current = src
    while current != dst:
        step = (
            _join(current, dst, "slice")
            or _join(current, dst, "reduce_scatter")
            or _reduce(current, dst)
            or _exchange(current, dst)
            or _gather(current, dst)
        )
        found.append(step)
        current = step.result
    return tuple(found)


def _places(layout: Layout) -> list[tuple[int, int]]:
    return [(dim, factor) for dim, factors in enumerate(layout.dims) for factor in range(len(factors))]


def _missing(current: Layout, dst: Layout, place: tuple[int, int]) -> tuple[str, ...]:
    """The axes that this factor lacks, in order, if it could take them now: nothing on it is out of place."""
    have, want = current.dims[place[0]][place[1]].axes, dst.dims[place[0]][place[1]].axes
    return want[len(have) :] if want[: len(have)] == have else ()


def _surplus(current: Layout, dst: Layout, place: tuple[int, int]) -> tuple[str, ...]:
    """The axes of this factor from the first that is out of place on."""
    have, want = current.dims[place[0]][place[1]].axes, dst.dims[place[0]][place[1]].axes
    right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(have, want, strict=False)))
    return have[right:]


def _set(layout: Layout, place: tuple[int, int], axes: tuple[str, ...]) -> Layout:
    dims = [list(dim) for dim in layout.dims]
    dims[place[0]][place[1]] = Factor(dims[place[0]][place[1]].size, axes)
    return Layout(tuple(tuple(dim) for dim in dims), layout.partial)


def _join(current: Layout, dst: Layout, kind: Literal["slice", "reduce_scatter"]) -> Collective | None:
    """Shard a factor over further axes, replicated (slice) or partial (reduce-scatter) until now."""
    state = "I" if kind == "slice" else "P"
    for place in _places(current):
        run = tuple(takewhile(lambda axis: current.state(axis) == state, _missing(current, dst, place)))
        if run:
            reduced = Layout(current.dims, current.partial - set(run))
            result = _set(reduced, place, current.dims[place[0]][place[1]].axes + run)
            return Collective(kind, run, current, result, *place)
    return None


def _reduce(current: Layout, dst: Layout) -> Collective | None:
    """One all-reduce over all the axes whose sum is wanted whole."""
    axes = tuple(sorted(current.partial - dst.axes_used))
    if not axes:
        return None
    return Collective("all_reduce", axes, current, Layout(current.dims, current.partial - set(axes)))


def _exchange(current: Layout, dst: Layout) -> Collective | None:
    """Move the minor axes of one factor to another that lacks just these."""
    for place in _places(current):
        have, surplus = current.dims[place[0]][place[1]].axes, _surplus(current, dst, place)
        for target in _places(current):
            missing = _missing(current, dst, target)
            for count in range(len(surplus), 0, -1):
                run = surplus[-count:]
                if target != place and missing[:count] == run:
                    left = _set(current, place, have[: len(have) - count])
                    result = _set(left, target, left.dims[target[0]][target[1]].axes + run)
                    return Collective("all_to_all", run, current, result, *place, *target)
    return None


def _gather(current: Layout, dst: Layout) -> Collective:
    """Gather minor axes that are out of place: those replicated in the end, else one, and an exchange
    follows."""
    options: list[tuple[tuple[int, int], tuple[str, ...]]] = []
    for place in _places(current):
        surplus = _surplus(current, dst, place)
        gone = tuple(takewhile(lambda axis: dst.state(axis) == "I", reversed(surplus)))[::-1]
        if surplus:
            options.append((place, gone or surplus[-1:]))
    place, run = max(options, key=lambda option: dst.state(option[1][-1]) == "I")
    have = current.dims[place[0]][place[1]].axes
    return Collective("all_gather", run, current, _set(current, place, have[: len(have) - len(run)]), *place)


def _refine_pair(src: Dim, dst: Dim, mesh: Mesh | None) -> tuple[Dim, Dim] | None:
    """``src`` and ``dst`` with the factors of their common refinement, or None where they have none."""
    if [factor.size for factor in src] == [factor.size for factor in dst]:
        return src, dst
    src, dst = (tuple(factor for factor in dim if factor.size != 1 or factor.axes) for dim in (src, dst))
    sizes = _common_sizes([factor.size for factor in src], [factor.size for factor in dst])
    if sizes is None:
        return None
    refined = (_refine(src, sizes, mesh), _refine(dst, sizes, mesh))
    return (refined[0], refined[1]) if refined[0] is not None and refined[1] is not None else None


def _common_sizes(a: Sequence[int], b: Sequence[int]) -> list[int] | None:
    """The factors of the coarsest common refinement of two factorisations of one number, major first."""
    if 0 in a or 0 in b:
        return None
    left, right, sizes = list(a), list(b), []
    while left and right:
        x, y = left.pop(0), right.pop(0)
        size = min(x, y)
        if max(x, y) % size:
            return None
        sizes.append(size)
        if x > size:
            left.insert(0, x // size)
        if y > size:
            right.insert(0, y // size)
    return None if left or right else sizes


def _refine(dim: Dim, sizes: Sequence[int], mesh: Mesh | None) -> Dim | None:
    """``dim`` with its factors split into ``sizes``, or None where a shard is no product of their ranges."""
    found: list[Factor] = []
    remaining = list(sizes)
    for factor in dim:
        parts = [remaining.pop(0)]
        while math.prod(parts) < factor.size:
            parts.append(remaining.pop(0))
        split = _split(factor, parts, mesh)
        if split is None:
            return None
        found.extend(split)
    return tuple(found)


def _split(factor: Factor, sizes: Sequence[int], mesh: Mesh | None) -> Dim | None:
    """One factor as a product of ``sizes``, its axes given out from the major side.

    Cutting ``f * g`` in ``p`` parts is cutting ``f`` alone if ``p`` divides ``f``, and cutting ``g`` in
    ``q`` inside each of ``f`` if ``p = f * q``.
    """
    found: list[Factor] = []
    axes = factor.axes
    for position, size in enumerate(sizes):
        if position == len(sizes) - 1 or not axes:
            taken = len(axes)
        elif mesh is None:
            return None
        else:
            counts = [n for n in range(len(axes) + 1) if mesh.axis_size(axes[:n]) == size]
            taken = len(axes) if size % mesh.axis_size(axes) == 0 else counts[0] if counts else -1
        if taken < 0:
            return None
        found.append(Factor(size, axes[:taken]))
        axes = axes[taken:]
    return tuple(found)
