"""A form describes how an op of a captured graph treats shards of its operands; rules make forms, and others read them.

On a group of mesh axes a value is in one *state*: sharded at a :class:`Shard` (V), a partial sum ("P"), replicated with
a replicated gradient ("I"), or replicated with a partial gradient ("R").  Most ops are described by labels for the dims
of operands and results, as in an einsum: a sharded label makes results that have it sharded and results that lack it
partial sums.  Whatever the group, one sentence gives all gradient reductions: *an op whose result is sharded or partial
needs its replicated operands as R*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import fx


class Shard(NamedTuple):
    """This says where a tensor is sharded: dim ``dim`` is pre × size × post, and the factor in the middle is sharded,
    or each of its ``parts`` where it is a concatenation.

    ``pre`` is an expression in the number of rows where a dim has these before the factor: rows × heads.
    """

    dim: int
    pre: Any = 1
    post: int = 1
    parts: tuple[int, ...] = ()


Placement = Shard | str
"""A state: a place, or "P", "I", "R"."""

Label = Any
"""The label of a dim; None means that the op needs the dim whole."""

DimLabels = Sequence[Label]


class Strategy(NamedTuple):
    """A strategy says in which states an op takes its operands on one group of axes, and gives its results."""

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]

    @property
    def sharded(self) -> bool:
        """Return whether an operand or a result is sharded."""
        return any(isinstance(s, Shard) for s in (*self.operands, *self.results))


class Emission(NamedTuple):
    """This is what an op is emitted with: the values of its operands, the layouts of its results, and its strategy on
    each group."""

    values: list[fx.Node]
    layouts: list[Any]
    strategies: dict[str, Strategy]

    @property
    def layout(self) -> Any:
        """Return the layout of the only result."""
        return self.layouts[0]


ShardRule = Callable[[int, Shard], Strategy | None]
Emit = Callable[[Any, Emission], fx.Node]
"""This adds the local op; it is called with the :class:`~shardwise.shard.emit.Emitter`."""


class OwnCall(NamedTuple):
    """This calls one of shardwise's own functions in place of an op, as ``function(env, *args, **kwargs)``.

    With ``count`` it gets one more argument of this name: what the ranks of ``spread`` compute by that call, summed
    over these ranks, or the product of these sizes.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = MappingProxyType({})
    count: OwnCall | Sequence[Any] | None = None
    spread: tuple[str, ...] = ()


Call = Callable[[Mapping[str, Strategy], Sequence[Any]], OwnCall | None]
"""This returns the call that replaces an op with these strategies and values of its operands, or None for no change.
"""


def sharding(strategies: Mapping[str, Strategy], dim: int) -> tuple[str, ...]:
    """Return the groups of axes that shard ``dim`` of an op's first operand."""
    return tuple(g for g, s in strategies.items() if isinstance(at := s.operands[0], Shard) and at.dim == dim)


@dataclass
class OpSharding:
    """This is the form of a captured op ``node``: it has labels for its tensor ``operands``, in the order of its
    arguments, and for its ``results``.

    ``linear`` names the operands in which the op is linear, by position, or is "add" where it is linear in all of them
    together.  ``added`` are operands that are added to a product: beside a partial sum they count once.  ``moves``
    gives the strategy for a shard of an operand where labels cannot, or None where the op does not take it.  ``spread``
    is another way, with more operands whole, for groups of axes that would not go together otherwise: ``agree`` tells
    that from the layouts of the operands and the sizes of the axes.  ``fresh`` is where the result may be made sharded
    although no operand is.  ``factors`` says whether ``moves``, ``emit`` and ``call`` know of places in concatenations
    and of those behind rows.  ``alike`` are results that are always replicated, without a gradient (statistics of a
    whole batch).  ``selects`` says that the second operand, a mask, selects elements of the first: where
    both are sharded by rows, each rank can select of its own, as many as there are.  ``emit`` adds the local op where
    it is another one; ``call`` gives the function of shardwise's own that is called instead, where there is one: what
    it communicates is found by calling it.  ``divided`` gives the strategy of a layer of experts for the states of its
    operands, where tokens and experts are sharded.  ``suggested`` gives positions of operands with where these may be
    sharded, where labels do not tell.  ``grain`` has places by position of an operand: a dim there is made of
    groups, of ``post`` elements each, within which the op does not take a cut.
    """

    node: fx.Node
    operands: list[tuple[fx.Node, DimLabels]]
    results: list[DimLabels]
    linear: frozenset[int] | str = frozenset()
    added: frozenset[int] = frozenset()
    moves: ShardRule | None = None
    spread: ShardRule | None = None
    agree: Callable[[Sequence[Any], Mapping[str, int]], bool] | None = None
    fresh: Shard | None = None
    alike: frozenset[int] = frozenset()
    selects: bool = False
    emit: Emit | None = None
    call: Call | None = None
    factors: bool = False
    divided: Callable[[Sequence[Placement]], Strategy | None] | None = None
    suggested: Callable[[], Sequence[tuple[int, Shard]]] | None = None
    grain: Mapping[int, Shard] = field(default_factory=dict)

    def ways(self, position: int, place: Shard) -> Iterator[Strategy]:
        """Yield ways to take operand ``position`` sharded at ``place``, the one with fewest whole operands first."""
        for way in (self.shards, self.spread if self.knows(place) else None):
            strategy = None if way is None else way(position, place)
            if strategy is not None:
                yield strategy

    def knows(self, place: Shard) -> bool:
        """Return whether ``moves``, ``emit`` and ``call``, if there are any, know of this kind of place."""
        plain = not place.parts and isinstance(place.pre, int)
        return plain or self.factors or (self.moves is None and self.emit is None and self.call is None)

    def shards(self, position: int, place: Shard) -> Strategy | None:
        """Return the strategy that takes operand ``position`` sharded at ``place``; None where it has to be whole."""
        if not self.knows(place):
            return None
        return self.by_label(position, place) if self.moves is None else self.moves(position, place)

    def by_label(self, position: int, place: Shard) -> Strategy | None:
        """Return what :meth:`shards` says by labels alone."""
        label = self.operands[position][1][place.dim]
        if label is None:
            return None

        def at(labels: DimLabels, rest: Placement) -> Placement:
            return place._replace(dim=list(labels).index(label)) if label in labels else rest

        results = tuple("I" if i in self.alike else at(labels, "P") for i, labels in enumerate(self.results))
        partial = "P" in results
        operands = tuple(
            at(labels, "P" if partial and i in self.added else "R") for i, (_, labels) in enumerate(self.operands)
        )
        return Strategy(operands, results)

    def states(self, strategies: Mapping[str, Strategy]) -> tuple[list[dict[str, Placement]], ...]:
        """Return the states of the operands, and those of the results, by group, under a strategy on each group."""
        return (
            [{g: s.operands[i] for g, s in strategies.items()} for i in range(len(self.operands))],
            [{g: s.results[i] for g, s in strategies.items()} for i in range(len(self.results))],
        )

    def sums(self, label: Label) -> bool:
        """Return whether the op sums over a label."""
        return label is not None and all(label not in labels for labels in self.results) and self.moves is None

    def contracts(self, position: int) -> bool:
        """Return whether the op sums over a label that operand ``position`` shares with others."""
        others = {label for j, (_, theirs) in enumerate(self.operands) if j != position for label in theirs}
        return any(self.sums(label) and label in others for label in self.operands[position][1])

    @property
    def multiplies(self) -> bool:
        """Return whether this is an op of several operands that sums over a label: a product, or a lookup."""
        return len(self.operands) > 1 and any(self.sums(label) for _, labels in self.operands for label in labels)

    def keeps(self, partial: Sequence[int]) -> bool:
        """Return whether the op can be applied to partial sums of just these operands."""
        if not partial:
            return False
        return self.linear == "add" or (len(partial) == 1 and partial[0] in self.linear)

    def on_partial(self, partial: Sequence[int]) -> Strategy:
        """Return the strategy that applies the op to partial sums of these operands."""
        every = self.linear == "add"
        operands = tuple("P" if every or i in partial else "R" for i in range(len(self.operands)))
        return Strategy(operands, ("P",) * len(self.results))

    def whole(self, state: str) -> Strategy:
        """Return the strategy under which all operands and results are replicated as ``state``, "I" or "R"."""
        return Strategy((state,) * len(self.operands), (state,) * len(self.results))
