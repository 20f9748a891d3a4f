from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.errors import ShardwiseError
from shardwise.core.layout import Factor, Layout
from shardwise.core.mesh import Axis, Mesh
from shardwise.core.transition import Collective, transition, volume

Arrays = list[np.ndarray]


# A reference executor: every rank's array, one collective at a time


def position(layout: Layout, dim: int, factor: int) -> int:
    """The dim of a fully factored array that is factor ``factor`` of dim ``dim``."""
    return sum(len(factors) for factors in layout.dims[:dim]) + factor


def cut(x: np.ndarray, step: Collective, mesh: Mesh, rank: int, dim: int, factor: int) -> np.ndarray:
    """The part of ``x``, as the source layout has it, that ``rank`` has of this factor in the result."""
    outer = step.source.dims[dim][factor].ranges(mesh, rank)[0]
    inner = step.result.dims[dim][factor].ranges(mesh, rank)[0]
    assert outer[0] <= inner[0] <= inner[1] <= outer[1]
    index = [slice(None)] * x.ndim
    index[position(step.source, dim, factor)] = slice(inner[0] - outer[0], inner[1] - outer[0])
    return x[tuple(index)]


def execute(steps: Sequence[Collective], arrays: Arrays, mesh: Mesh) -> Arrays:
    for step in steps:
        shapes = [[size for dim in step.source.local_factors(mesh, rank) for size in dim] for rank in range(mesh.size)]
        held = [array.reshape(shape) for array, shape in zip(arrays, shapes, strict=True)]
        at = position(step.source, step.dim, step.factor)
        arrays = []
        for rank in range(mesh.size):
            group = [held[member] for member in mesh.group(rank, step.axes)]
            if step.kind == "all_reduce":
                result = sum(group)
            elif step.kind == "reduce_scatter":
                result = cut(np.sum(group, axis=0), step, mesh, rank, step.dim, step.factor)
            elif step.kind == "slice":
                result = cut(held[rank], step, mesh, rank, step.dim, step.factor)
            elif step.kind == "all_gather":
                result = np.concatenate(group, axis=at)
            else:
                pieces = [cut(x, step, mesh, rank, step.to_dim, step.to_factor) for x in group]
                result = np.concatenate(pieces, axis=at)
            arrays.append(result.reshape(step.result.local_shape(mesh, rank)))
    return arrays


def place(terms: np.ndarray, summed: Sequence[str], layout: Layout, mesh: Mesh) -> Arrays:
    """The arrays of a tensor in ``layout``.

    ``terms`` has a leading dim for each mesh axis, of size 1 where the tensor is no sum over it;
    ``summed`` are the axes whose terms are already added up in this layout.
    """
    axes = tuple(mesh.names.index(axis) for axis in summed)
    terms = terms.sum(axis=axes, keepdims=True)
    arrays = []
    for rank in range(mesh.size):
        here = mesh.coordinates(rank)
        mine = terms[tuple(at if terms.shape[n] > 1 else 0 for n, at in enumerate(here.values()))]
        factors = [factor for dim in layout.dims for factor in dim]
        index = tuple(slice(*factor.ranges(mesh, rank)[0]) for factor in factors)
        mine = mine.reshape([factor.size for factor in factors])[index]
        arrays.append(mine.reshape(layout.local_shape(mesh, rank)))
    return arrays


def terms_for(src: Layout, mesh: Mesh, seed: int = 0) -> np.ndarray:
    """Random whole numbers: sums of them are exact in any order."""
    shape = [mesh.axis_size(axis) if axis in src.partial else 1 for axis in mesh.names]
    return np.random.default_rng(seed).integers(-50, 50, size=(*shape, *src.shape))


def run(src: Layout, dst: Layout, mesh: Mesh, steps: Sequence[Collective]) -> bool:
    """Whether ``steps`` make ``dst`` out of ``src``."""
    terms = terms_for(src, mesh)
    found = execute(steps, place(terms, (), src, mesh), mesh)
    expected = place(terms, sorted(src.partial - dst.partial), dst, mesh)
    return all(a.shape == b.shape and np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


# Random pairs


@st.composite
def factorisations(draw: st.DrawFn, size: int) -> list[int]:
    found = []
    while size > 1 and draw(st.booleans()):
        found.append(draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0])))
        size //= found[-1]
    return [*found, size]


@st.composite
def layouts(draw: st.DrawFn, shape: Sequence[int], mesh: Mesh, may_be_partial: frozenset[str]) -> Layout:
    sizes = [draw(factorisations(size)) for size in shape]
    places = [(dim, factor) for dim, factors in enumerate(sizes) for factor in range(len(factors))]
    held: dict[tuple[int, int], list[str]] = {}
    partial = set()
    for name in draw(st.permutations(mesh.names)):
        where = draw(st.sampled_from([None, *(["partial"] if name in may_be_partial else []), *places, *places]))
        if where == "partial":
            partial.add(name)
        elif isinstance(where, tuple):
            held.setdefault(where, []).append(name)
    dims = tuple(
        tuple(Factor(size, tuple(held.get((dim, factor), ()))) for factor, size in enumerate(factors))
        for dim, factors in enumerate(sizes)
    )
    return Layout(dims, frozenset(partial))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mesh, Layout, Layout]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    mesh = Mesh(tuple(Axis(name, size) for name, size in zip("abc", sizes, strict=False)))
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12]), max_size=3))
    src = draw(layouts(shape, mesh, frozenset(mesh.names)))
    return mesh, src, draw(layouts(shape, mesh, src.partial))


@settings(max_examples=400, deadline=None)
@given(cases(), st.booleans())
def test_transitions_give_exactly_the_destination(case: tuple[Mesh, Layout, Layout], with_mesh: bool) -> None:
    mesh, src, dst = case
    steps = transition(src, dst, mesh if with_mesh else None)
    assert run(src, dst, mesh, steps), [str(step) for step in steps]
    for step in steps:
        assert [[f.size for f in dim] for dim in step.source.dims] == [[f.size for f in d] for d in step.result.dims]
        assert volume(step, mesh, 4) >= 0


@settings(max_examples=100, deadline=None)
@given(cases())
def test_a_missing_step_is_noticed(case: tuple[Mesh, Layout, Layout]) -> None:
    """The reference is strict: without its last step, a transition that moves or adds anything fails."""
    mesh, src, dst = case
    steps = transition(src, dst, mesh)
    moving = steps and mesh.axis_size(steps[-1].axes) > 1 and math.prod(src.shape) > 1
    if moving and steps[-1].kind == "slice":
        assert not run(src, dst, mesh, steps[:-1])


# Known pairs

MESH = Mesh.of(a=2, b=3)


def kinds(src: Layout, dst: Layout, mesh: Mesh | None = MESH) -> list[str]:
    steps = transition(src, dst, mesh)
    assert run(src, dst, MESH, steps), [str(step) for step in steps]
    return [f"{step.kind}:{''.join(step.axes)}" for step in steps]


def sharded(first: str = "", second: str = "", partial: str = "") -> Layout:
    return Layout.sharded((12, 7), {0: tuple(first), 1: tuple(second)}, partial)


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        (sharded(), sharded(), []),
        (sharded(partial="a"), sharded(), ["all_reduce:a"]),
        (sharded(partial="ab"), sharded(), ["all_reduce:ab"]),
        (sharded(partial="a"), sharded("a"), ["reduce_scatter:a"]),
        (sharded(partial="ab"), sharded("ab"), ["reduce_scatter:ab"]),
        (sharded(partial="ab"), sharded("a", partial="b"), ["reduce_scatter:a"]),
        (sharded("a"), sharded(), ["all_gather:a"]),
        (sharded("ab"), sharded(), ["all_gather:ab"]),
        (sharded("ab"), sharded("a"), ["all_gather:b"]),
        (sharded("a"), sharded("", "a"), ["all_to_all:a"]),
        (sharded("ab"), sharded("", "ab"), ["all_to_all:ab"]),
        (sharded("ab"), sharded("a", "b"), ["all_to_all:b"]),
        (sharded(), sharded("a"), ["slice:a"]),
        (sharded("a"), sharded("ab"), ["slice:b"]),
        # a slice before the gather: a third of the bytes
        (sharded("a"), sharded("", "b"), ["slice:b", "all_gather:a"]),
        (sharded("a", partial="b"), sharded(), ["all_reduce:b", "all_gather:a"]),
        # the major axis cannot leave before the minor one
        (sharded("ab"), sharded("b"), ["all_gather:b", "all_gather:a", "slice:b"]),
        # a swap: one gather makes room for the exchange
        (sharded("a", "b"), sharded("b", "a"), ["all_gather:a", "all_to_all:b", "slice:a"]),
    ],
)
def test_known_pairs(src: Layout, dst: Layout, expected: list[str]) -> None:
    assert kinds(src, dst) == expected


def test_axes_in_place_stay_and_axes_move_in_their_order() -> None:
    mesh = Mesh.of(a=2, b=2, c=3)

    def moves(src: dict[int, str], dst: dict[int, str]) -> list[str]:
        pair = [Layout.sharded((4, 5, 6), {dim: tuple(axes) for dim, axes in held.items()}) for held in (src, dst)]
        steps = transition(*pair, mesh)
        assert run(*pair, mesh, steps)
        return [f"{step.kind}:{''.join(step.axes)}" for step in steps]

    # b and c change places; a, which is where it should be, is left alone
    assert moves({0: "a", 1: "b", 2: "c"}, {0: "a", 1: "c", 2: "b"}) == [
        "all_gather:b",
        "all_to_all:c",
        "slice:b",
    ]
    # b has to wait until a, the major of the two, is there
    assert moves({0: "b", 2: "a"}, {1: "ab"}) == ["all_to_all:a", "all_to_all:b"]


def test_places_of_an_exchange() -> None:
    (step,) = transition(sharded("ab"), sharded("a", "b"))
    assert (step.dim, step.factor, step.to_dim, step.to_factor) == (0, 0, 1, 0)
    (step,) = transition(sharded(partial="b"), sharded("", "b"))
    assert (step.dim, step.factor, step.to_dim) == (1, 0, -1)


@pytest.mark.parametrize(
    ("src", "dst", "with_mesh", "without"),
    [
        # a view that splits an unsharded dim costs nothing
        ((Factor(12),), (Factor(3), Factor(4)), [], []),
        # sharding the 12 over 2 is sharding the major 4 over 2, if the sizes of axes are known
        ((Factor(12, ("a",)),), (Factor(4, ("a",)), Factor(3)), [], ["all_gather:a", "slice:a"]),
        # over 6 = 2 x 3: a on the 2, b on the 6
        (
            (Factor(12, ("a", "b")),),
            (Factor(2, ("a",)), Factor(6, ("b",))),
            [],
            ["all_gather:ab", "slice:a", "slice:b"],
        ),
        # 12 in halves is no range of 3 x 4
        ((Factor(12, ("a",)),), (Factor(3), Factor(4, ("a",))), ["all_gather:a", "slice:a"], None),
        # 3 x 4 and 4 x 3 have no common refinement
        ((Factor(3, ("b",)), Factor(4)), (Factor(4, ("a",)), Factor(3)), ["all_gather:b", "slice:a"], None),
        # heads move from the major to the minor factor
        ((Factor(3, ("b",)), Factor(4)), (Factor(3), Factor(4, ("b",))), ["all_to_all:b"], ["all_to_all:b"]),
    ],
)
def test_factored_dims(src: tuple[Factor, ...], dst: tuple[Factor, ...], with_mesh: list[str], without: list[str] | None) -> None:
    pair = Layout((src,)), Layout((dst,))
    assert kinds(*pair) == with_mesh
    assert kinds(*pair, mesh=None) == (with_mesh if without is None else without)


def test_a_sum_waits_for_a_misaligned_dim() -> None:
    """The reduce-scatter of b over the new factors is still one, after the gather that they need."""
    src = Layout(((Factor(3), Factor(4, ("a",))),), frozenset("b"))
    dst = Layout(((Factor(4), Factor(3, ("b",))),))
    assert kinds(src, dst) == ["all_gather:a", "reduce_scatter:b"]


def test_impossible_pairs_are_refused() -> None:
    with pytest.raises(ShardwiseError, match=r"their shapes \(4,\) and \(2, 2\) differ"):
        transition(Layout.replicated((4,)), Layout.replicated((2, 2)))
    for state in (sharded(), sharded("a")):
        with pytest.raises(ShardwiseError, match="no partial sum over a to begin with"):
            transition(state, sharded(partial="a"))


def test_volumes_are_those_of_rings() -> None:
    whole = 12 * 7 * 4

    def sent(src: Layout, dst: Layout) -> int:
        return sum(volume(step, MESH, 4) for step in transition(src, dst))

    assert sent(sharded(partial="b"), sharded()) == 2 * 2 * whole // 3
    assert sent(sharded(partial="b"), sharded("b")) == 2 * whole // 3
    assert sent(sharded("b"), sharded()) == 2 * whole // 3
    assert sent(sharded("ab"), sharded("b")) == 2 * whole // 6 + whole // 2  # 2 of 6 parts, then 1 of 2
    assert sent(sharded(), sharded("a")) == 0
    assert sent(sharded("a"), sharded("", "a")) == whole // 4
    assert sent(sharded("", "b"), sharded()) == 2 * 12 * 3 * 4  # shards of 2, 2 and 3 columns
    absent = Layout.sharded((12, 7), {0: "z"})
    assert sent(absent, sharded()) == 0
