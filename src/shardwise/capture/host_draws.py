"""Numbers that forward draws from the generators of Python and numpy, as SpecAugment does for its masks.

Nobody can say of such a number which row it is for.  So what draws, a function or statements of one, runs as it is
written once a step, for all rows of the batch and on all ranks alike, before the model does; each rank takes its rows
of what it returns, as it does of a field of the batch.  The generators are seeded by the seed and the step, so that one
device and all ranks draw the same; what the user draws elsewhere is not touched.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import cycle
from struct import pack
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from shardwise.capture.coins import Drawing
from shardwise.capture.eager_calls import EagerCall
from shardwise.capture.from_batch import FromBatch, from_batch
from shardwise.capture.redirected import redirected
from shardwise.capture.state import generators_kept
from shardwise.core.errors import ConfigError
from shardwise.core.fields import DRAWN, WHOLE, has_rows
from shardwise.graph.captured import Uncapturable
from shardwise.graph.functional import Normal
from shardwise.graph.sizes import concrete
from shardwise.graph.torch_private import process_lock

WHY = "forward draws random numbers of Python or numpy for values that depend on"
STATES = {"getstate", "setstate", "get_state", "set_state", "seed"}  # methods of generators that draw nothing


class Drawn(ConfigError):
    """What forward computes depends on numbers that it draws from a generator of Python or numpy."""


class DrawsHere(Uncapturable):
    """It is raised where forward draws; ``drawn`` says what stands against it."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__(str(drawn).removeprefix("model: "))
        self.drawn = drawn


@contextmanager
def seeded(seed: int, step: int, first: int = 0) -> Iterator[None]:
    """Let the generators of Python and numpy draw the numbers of a step, for a batch or a microbatch that begins with
    the row ``first``; put them back afterwards."""
    digest = blake2b(pack("<3Q", seed % (1 << 64), step % (1 << 64), first), digest_size=8).digest()
    with generators_kept():
        random.seed(digest)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(int.from_bytes(digest[:4], "little"))
        yield


class Looking:
    """Looks for the place where a forward draws, except while it is ``paused``."""

    def __init__(self, drawn: Drawn) -> None:
        self.drawn, self.paused = drawn, False

    @contextmanager
    def stops(self) -> Iterator[None]:
        """Raise :class:`DrawsHere` from functions of ``random`` and ``numpy.random`` that draw."""
        numpy = sys.modules.get("numpy")
        homes = [(random, random.Random), *([] if numpy is None else [(numpy.random, numpy.random.RandomState)])]
        with ExitStack() as stack:
            for home, kind in homes:
                for name, value in list(vars(home).items()):
                    if isinstance(getattr(value, "__self__", None), kind) and name not in STATES:
                        stack.callback(setattr, home, name, value)
                        setattr(home, name, self._stopping(value))
            yield

    def _stopping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            if self.paused:
                return original(*args, **kwargs)
            raise DrawsHere(self.drawn)

        return draw


class Facts(NamedTuple):
    """What a call asks of a tensor whose values it does not need."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class HostDraws:
    """The calls that draw in a forward, in their order, each with what it takes: the next tensor that ``given``
    computes from a batch (None), or one of these facts.  The fields that have their results are like the ``examples``,
    one row of each, on the meta device."""

    given: FromBatch
    calls: tuple[tuple[EagerCall, tuple[Facts | None, ...]], ...]
    examples: Mapping[str, Tensor]

    def of(
        self, fields: Mapping[str, Tensor], buffers: Mapping[str, Tensor], drawing: Drawing, first: int = 0
    ) -> dict[str, Tensor]:
        """Return what is drawn for a batch, all rows of it on the host, in the step of ``drawing``, by field; it may
        be a microbatch that begins with the row ``first``."""
        given, found = iter(self.given.of(fields, buffers, drawing)), list[Tensor]()
        with process_lock, seeded(*drawing, first):  # the ranks of a process are threads, which share the generators
            for call, taken in self.calls:
                tensors = [next(given) if one is None else torch.empty(one.shape, dtype=one.dtype) for one in taken]
                found += call(*tensors)
        return dict(zip(self.examples, found, strict=True))

    @contextmanager
    def given_rows(self, values: Mapping[str, Tensor], rows: int, first: int) -> Iterator[None]:
        """Let the calls of a forward of ``rows`` rows, from the ``first`` on, return these of the ``values`` of all."""
        names = iter(self.examples)
        following = cycle([(call, [next(names) for _ in call.made]) for call, _ in self.calls])

        def answered(*_: Any) -> Any:
            one, own = next(following)
            found = [values[n][first : first + rows] if has_rows(n) else values[n] for n in own]
            return one.rebuilt([value.clone() for value in found])

        with redirected(list(dict.fromkeys(one.seen.function for one, _ in self.calls)), answered):
            yield


def take_draws(normal: Normal) -> HostDraws | None:
    """Take the calls that draw out of a graph, in place, and return them; fields have their results.  None if there are
    none.

    Raises :class:`Uncapturable` where what they are given does not follow from the batch alone."""
    nodes = [n for n in normal.graph.nodes if isinstance(n.target, EagerCall) and n.target.draws]
    if not nodes:
        return None
    taken = [tuple(_taken(normal, node.target, i, one) for i, one in enumerate(node.args)) for node in nodes]
    calls = tuple((node.target, facts) for node, facts in zip(nodes, taken, strict=True))
    needed = [
        one for node, facts in zip(nodes, taken, strict=True)
        for one, fact in zip(node.args, facts, strict=True) if fact is None
    ]  # fmt: skip
    return HostDraws(
        from_batch(normal, needed, WHY), calls, dict(one for node in nodes for one in _as_fields(normal, node))
    )


def _taken(normal: Normal, call: EagerCall, number: int, node: fx.Node) -> Facts | None:
    """Return the facts of what a call takes if it asks no more, and has it not from the batch."""
    value = node.meta["val"]
    if number in call.seen.facts and all(isinstance(size, int) for size in value.shape):
        try:
            from_batch(normal, [node], WHY)
        except Uncapturable:
            return Facts(tuple(value.shape), value.dtype)
    return None


def _as_fields(normal: Normal, node: fx.Node) -> Iterator[tuple[str, Tensor]]:
    """Put fields in place of the results of a call, behind all others, and yield each with an example."""
    graph, captured = normal.graph, normal.captured
    for number, value in enumerate(node.meta["val"]):
        first, *_ = (*value.shape, None)
        rows = isinstance(first, torch.SymInt) or (first is not None and first == captured.rows)
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            place = graph.placeholder(f"drawn_{node.name}_{number}")
        place.meta["val"] = value
        captured.fields[place.name] = name = f"{'' if rows else WHOLE}{DRAWN}{node.name} {number}"
        for user in [one for one in node.users if one.args[1] == number]:
            user.replace_all_uses_with(place)
            graph.erase_node(user)
        sizes = list(map(concrete, (1, *value.shape[1:]) if rows else value.shape))
        yield name, torch.empty(sizes, dtype=value.dtype, device="meta")
    graph.erase_node(node)


def notes(draws: HostDraws) -> list[str]:
    """Say what draws, once for each function."""
    return [
        f"{one} draws random numbers of Python or numpy: it runs once a step for all rows, on the host and on every "
        "rank alike, with generators that are seeded by the seed and the step"
        for one in dict.fromkeys(call.title for call, _ in draws.calls)
    ]


def joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the fields of a batch, given those of its microbatches.

    Raises :class:`ConfigError` where these draw in other ways, or something that is the same for all rows."""
    names = list(parts[0])
    if any(list(one) != names for one in parts) or not all(map(has_rows, names)):
        wrong = "forward draws random numbers of Python or numpy in another way for fewer rows, or for all rows at once"
        raise ConfigError.on("microbatches", wrong, "1")
    return {name: torch.cat([one[name] for one in parts]) for name in names}
