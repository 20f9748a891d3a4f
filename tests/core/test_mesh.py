from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.errors import ConfigError, ShardwiseError, did_you_mean
from shardwise.core.mesh import Axis, Mesh, joined, sub_axes

meshes = st.lists(st.integers(1, 4), min_size=0, max_size=3).map(
    lambda sizes: Mesh(tuple(Axis(name, size) for name, size in zip(("pp", "dp", "tp"), sizes, strict=False)))
)


def test_first_axis_varies_slowest() -> None:
    mesh = Mesh.of(pp=2, dp=3, tp=2)
    assert (mesh.size, mesh.names, mesh.shape) == (12, ("pp", "dp", "tp"), (2, 3, 2))
    assert mesh.coordinates(7) == {"pp": 1, "dp": 0, "tp": 1}
    assert mesh.rank({"pp": 1, "dp": 2, "tp": 1}) == 11
    assert mesh.rank({"dp": 2}) == 4


def test_axis_sizes_multiply_and_absent_axes_count_as_one() -> None:
    mesh = Mesh.of(dp=3, tp=2)
    assert mesh.axis_size("tp") == 2
    assert mesh.axis_size(("dp", "tp", "cp")) == 6
    assert mesh.axis_size(["dp", "tp", "cp"]) == 6  # any sequence will do
    assert mesh.axis_size("cp") == mesh.axis_size(()) == 1
    assert mesh.group(4, "cp") == (4,)
    assert mesh.index(4, "cp") == 0


def test_groups_are_major_first_in_the_order_of_the_names() -> None:
    mesh = Mesh.of(pp=2, dp=2, tp=2)
    assert mesh.group(5, "dp") == (5, 7)
    assert mesh.group(5, ("dp", "tp")) == (4, 5, 6, 7)
    assert mesh.group(5, ("tp", "dp")) == (4, 6, 5, 7)
    assert mesh.index(5, ("dp", "tp")) == 1
    assert mesh.index(5, ("tp", "dp")) == 2


@settings(max_examples=60, deadline=None)
@given(meshes, st.data())
def test_ranks_coordinates_and_groups_agree(mesh: Mesh, data: st.DataObject) -> None:
    names = data.draw(st.permutations(mesh.names).flatmap(lambda p: st.integers(0, len(p)).map(lambda n: p[:n])))
    seen: list[int] = []
    for rank in range(mesh.size):
        here = mesh.coordinates(rank)
        assert mesh.rank(here) == rank
        group = mesh.group(rank, tuple(names))
        assert group[mesh.index(rank, tuple(names))] == rank
        assert len(set(group)) == len(group) == mesh.axis_size(tuple(names))
        others = [{k: v for k, v in mesh.coordinates(r).items() if k not in names} for r in group]
        assert all(other == others[0] for other in others)
        seen += group if group[0] == rank else []
    assert sorted(seen) == list(range(mesh.size)), "groups must partition the ranks"


def test_an_axis_is_two_sub_axes() -> None:
    mesh = Mesh.of(dp=2, tp=6)
    outer, inner = sub_axes("tp", 3)
    assert (mesh.axis_size(outer), mesh.axis_size(inner), mesh.axis_size(("dp", outer, inner))) == (2, 3, 12)
    for rank in range(mesh.size):
        assert mesh.group(rank, (outer, inner)) == mesh.group(rank, "tp")
        assert mesh.index(rank, (outer, inner)) == mesh.index(rank, "tp")
        for names in (outer, inner, (inner, "dp"), (inner, outer)):
            group = mesh.group(rank, names)
            assert group[mesh.index(rank, names)] == rank and len(set(group)) == len(group) == mesh.axis_size(names)
    assert mesh.group(10, outer) == (7, 10) and mesh.group(10, inner) == (9, 10, 11)
    assert mesh.places(10, ("dp", outer, inner)) == {"dp": (2, 1), outer: (2, 1), inner: (3, 1)}
    assert Mesh.spanned({outer: 2, inner: 3, "dp": 2}) == Mesh.of(tp=6, dp=2)


def test_what_sub_axes_leave() -> None:
    mesh = Mesh.of(dp=2, tp=6)
    outer, inner = sub_axes("tp", 3)
    assert mesh.other_axes(()) == ("dp", "tp") and mesh.other_axes(("tp", "pp")) == ("dp",)
    assert mesh.other_axes((outer,)) == ("dp", inner) and mesh.other_axes((inner, "dp")) == (outer,)
    assert mesh.other_axes((outer, inner)) == ("dp",)
    assert (
        joined(("dp", outer, inner)) == ("dp", "tp")
        and joined((inner, outer)) == (inner, outer)
        and joined((inner,)) == (inner,)
    )


def test_offset_wraps_only_when_told() -> None:
    mesh = Mesh.of(pp=3, dp=2)
    assert mesh.offset(1, "pp", 1) == 3
    assert mesh.offset(5, "pp", 1, wrap=True) == 1
    assert mesh.offset(0, "pp", -1, wrap=True) == 4
    with pytest.raises(ShardwiseError, match='coordinate 3 on axis "pp"'):
        mesh.offset(5, "pp", 1)
    with pytest.raises(ShardwiseError, match='coordinate 1 on axis "cp"'):
        mesh.offset(0, "cp", 1)


def test_classes_and_their_members() -> None:
    mesh = Mesh.of(dp=2, pp=2, tp=2)
    assert mesh.classes(("pp",)) == ((("pp", 0),), (("pp", 1),))
    assert mesh.members((("pp", 1),)) == (2, 3, 6, 7)
    assert mesh.classes(()) == ((),)
    assert mesh.members(()) == tuple(range(8))
    members = [mesh.members(place) for place in mesh.classes(("tp", "dp"))]
    assert sorted(rank for ranks in members for rank in ranks) == list(range(8))
    assert mesh.classes(("tp", "dp"))[1] == (("dp", 0), ("tp", 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mesh.of(dp=0), "mesh.dp.size: 0 is not legal; legal: an integer of at least 1"),
        (lambda: Mesh.of(dp=True), "mesh.dp.size: True"),
        (lambda: Mesh.of(dp="2"), "mesh.dp.size: '2'"),
        (lambda: Axis("", 2), "mesh axis name: ''"),
        (lambda: Axis("d p", 2), "mesh axis name: 'd p'"),
        (lambda: Mesh((Axis("dp", 2), Axis("dp", 3))), 'axis "dp" is there twice'),
        (lambda: Mesh(("dp",)), "mesh: 'dp' is not legal"),  # type: ignore[arg-type]
    ],
)
def test_bad_meshes_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_ranks_outside_the_mesh_are_refused() -> None:
    for rank in (-1, 4):
        with pytest.raises(ShardwiseError, match=f"rank {rank} is not in the mesh; legal: 0 to 3"):
            Mesh.of(dp=4).coordinates(rank)


def test_every_coordinate_names_one_rank() -> None:
    mesh = Mesh.of(a=2, b=3)
    places = [dict(zip("ab", place, strict=True)) for place in product(range(2), range(3))]
    assert [mesh.rank(place) for place in places] == list(range(6))


@pytest.mark.parametrize("sizes", [(2, 3, 4), (3, 1, 4), (1, 5, 2), (2, 2, 6)])
@pytest.mark.parametrize("per_host", [1, 2, 3, 4, 6, 8, 24, 100])
def test_links_are_those_between_the_members_of_groups(sizes: tuple[int, ...], per_host: int) -> None:
    mesh = Mesh.of(**dict(zip("abc", sizes, strict=True)))
    for axis in mesh.axes:
        hosts = [{member // per_host for member in mesh.group(rank, axis.name)} for rank in range(mesh.size)]
        expected = "host" if any(len(one) > 1 for one in hosts) else "device"
        assert mesh.links(per_host).get(axis.name, "device") == expected
    assert Mesh.of(pp=2, dp=2, tp=8).links(8) == {"pp": "host", "dp": "host", "tp": "device"}


def test_did_you_mean() -> None:
    assert did_you_mean("recompte", ["mesh", "recompute"]) == ' Did you mean "recompute"?'
    assert did_you_mean("ADAMW", ["adam", "AdamW"]) == ' Did you mean "AdamW"?'
    assert did_you_mean("zzz", ["mesh", "recompute"]) == ""
