"""Layouts at random: any factors, sharded over any axes, uneven and empty pieces among them."""

from __future__ import annotations

from hypothesis import strategies as st

from shardwise.core.layout import Factor, Layout
from shardwise.core.mesh import Axis, Mesh


@st.composite
def meshes_and_layouts(draw: st.DrawFn) -> tuple[Mesh, Layout]:
    axes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    mesh = Mesh(tuple(Axis(name, size) for name, size in zip("abc", axes, strict=False)))
    sizes = draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=3))
    held: dict[tuple[int, int], list[str]] = {}
    for name in draw(st.permutations(mesh.names)):
        places = [(dim, factor) for dim, dims in enumerate(sizes) for factor in range(len(dims))]
        place = draw(st.sampled_from([None, *places]))
        if place is not None:
            held.setdefault(place, []).append(name)
    dims = tuple(
        tuple(Factor(size, tuple(held.get((dim, factor), ()))) for factor, size in enumerate(factors))
        for dim, factors in enumerate(sizes)
    )
    return mesh, Layout(dims)
