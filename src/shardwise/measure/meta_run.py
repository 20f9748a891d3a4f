"""Run units on the meta device, as one rank would run them on its own device.

Nothing is allocated; strides, views and shards are those of the real run.  The tables in ``device_kernels.py`` say what
depends on the device.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental import _config as fx_config

from shardwise.core.errors import ConfigError
from shardwise.graph.schema import as_result, outputs_of, tensors_in, values_of
from shardwise.graph.sizes import depends_on_data, size_for_rows
from shardwise.graph.torch_private import storage_key
from shardwise.kernels.device_kernels import COMPOSED, DEVICES, is_known
from shardwise.ops.env import Env
from shardwise.ops.silent import Silent
from shardwise.shard.sizes import local_shape
from shardwise.units.batch_sums import stand_ins
from shardwise.units.selective_recompute import recalled
from shardwise.units.trace import Trace, Unit, part_of_batch

META = torch.device("meta")


Places = Mapping[str, tuple[int, int]]
"""This maps each axis of tensor parallelism to its number of ranks and to the rank's index along it."""


def check_numbers(what: str, trace: Trace, rows: int, parts: int, device: str, tensor: Places | None) -> Places:
    """Return ``tensor``, or, where it is None, the last rank along each axis, which has the most.

    Raises :class:`ConfigError`, whose message begins with ``what``, for numbers that the trace cannot take.
    """
    if device not in DEVICES:
        raise ConfigError(f"{what}: device {device!r} is not known; legal: {', '.join(DEVICES)}")
    if rows < 1 or parts < 1:
        raise ConfigError(f"{what}: rows {rows} over parts {parts} is not legal; legal: 1 or more of each")
    if trace.rows not in (None, rows) and not (trace.cuts_batch and rows < trace.rows):
        legal = f"at most {trace.rows}" if trace.cuts_batch else trace.rows
        raise ConfigError(f"{what}: rows {rows} is not legal: the model's batch dim is static; legal: {legal}")
    places = {axis: (parts, parts - 1) for axis, parts in trace.tensor.items()} if tensor is None else dict(tensor)
    if {axis: ranks for axis, (ranks, _) in places.items()} != trace.tensor or not all(
        0 <= i < n for n, i in places.values()
    ):
        legal = ", ".join(f"0 to {n - 1} of {n} along {axis}" for axis, n in trace.tensor.items()) or "none"
        raise ConfigError(f"{what}: places {places} on axes of tensor parallelism are not the model's; legal: {legal}")
    return places


def largest_sizes() -> Any:
    """Return a context in which a size that depends on data is the largest that it can be."""
    return cast(Any, fx_config).patch(meta_nonzero_assume_all_nonzero=True)


class MetaRun:
    """This holds the arguments of units on one rank for one microbatch; tensors keep their identity between units.

    It is rank ``index`` of ``parts``, by default the last, which has the most of the ``rows`` rows.  ``tensor`` is its
    place on the axes of tensor parallelism; ``env`` has further fields of :class:`Env`.  The batch has
    ``microbatches``, and ``batch`` rows, by default as many in each.
    """

    def __init__(
        self, trace: Trace, rows: int, parts: int, device: str, index: int | None = None, *, tensor: Places,
        microbatches: int = 1, batch: int | None = None, **env: Any,
    ) -> None:  # fmt: skip
        place, batch = parts - 1 if index is None else index, batch or rows * microbatches
        self.env = part_of_batch(trace, Env(Silent(), ("dp",), parts, place, tensor=tensor, **env), rows, batch)
        self.number = microbatches if microbatches > 1 else -(-self.env.rows // rows)
        self.windows = self.env.of_exchange(self.number).windows if trace.shared else ()
        self.env.counts = stand_ins(trace.sums, self.env, trace.cuts_batch)
        self.device, self.frozen, self.captured = device, set(trace.frozen), _captured(trace)
        self.leaves: dict[tuple[str, str], Tensor] = {}
        self.live: dict[str, Tensor] = {}

    def publish(self, unit: Unit, results: Sequence[Tensor]) -> list[Tensor]:
        """Make a unit's outputs live; return those through which gradients come back."""
        outputs = results[: len(unit.outputs)]
        for name, value, grad in zip(unit.outputs, outputs, unit.output_grads, strict=True):
            self.live[name] = value.detach().requires_grad_(grad)
        return [o for o, g in zip(outputs, unit.output_grads, strict=True) if g]

    def env_of(self, unit: Unit) -> Env:
        """Return where a unit runs."""
        return unit.place(self.env, self.number)

    @property
    def own(self) -> int:
        """The first microbatch with as many rows as this one has."""
        first, last = self.env.window or (0, self.env.rows)
        return next((m for m, (a, b) in enumerate(self.windows) if b - a == last - first), 0)

    def inputs(self, unit: Unit) -> list[Tensor]:
        """Return a unit's live inputs; those of an exchange are of each microbatch, one after the other."""
        if not unit.exchanges or len(self.windows) < 2:
            return [self.live[n] for n in unit.inputs]
        found: list[Tensor] = []
        for name, (m, window) in itertools.product(unit.inputs, enumerate(self.windows)):
            value = self.live[name]
            if m != self.own:
                shape, dtype = unit.local(name, replace(self.env, window=window))
                value = torch.empty(shape, dtype=dtype, device=META, requires_grad=value.requires_grad)
            found.append(value)
        return found

    def arguments(self, unit: Unit) -> tuple[list[Tensor], ...]:
        """Return a unit's parameters, buffers, constants, batch fields and live inputs."""
        parameters, buffers, batch = (
            [self.leaf(kind, name) for name in names]
            for kind, names in (("p", unit.parameters), ("b", unit.buffers), ("f", unit.fields))
        )
        constants = [torch.empty_like(c, device=META) for c in unit.constants]
        return parameters, buffers, constants, batch, self.inputs(unit)

    def leaf(self, kind: str, name: str) -> Tensor:
        """Return this rank's shard of a parameter ("p"), a buffer ("b") or a batch field ("f")."""
        if (kind, name) not in self.leaves:
            meta = self.captured[kind, name]
            shape = local_shape(meta["val"], meta["layout"], self.env)
            grad = kind == "p" and name not in self.frozen
            self.leaves[kind, name] = torch.empty(shape, dtype=meta["val"].dtype, device=META, requires_grad=grad)
        return self.leaves[kind, name]


class UnitRun:
    """Run graphs op by op, dropping each value after its last use as the graph's own code does.

    ``unknown`` names the ops whose memory is a guess: they run as composed on meta, or an op that keeps nothing stands
    in for them.
    """

    def __init__(self, run: MetaRun, unit: Unit | None = None) -> None:
        self.run, self.env = run, run.env if unit is None else run.env_of(unit)
        self.unknown: set[str] = set()

    def forward(self, graph: fx.Graph, arguments: Sequence[Tensor]) -> Any:
        values: dict[fx.Node, Any] = {}
        feed = iter([self.env, *arguments])
        last = _last_uses(graph)
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = next(feed)
            elif node.op == "output":
                return fx.node.map_arg(node.args[0], values.__getitem__)
            else:
                values[node] = self.call(node, _filled(node.args, values), _filled(node.kwargs, values))
                for done in last[node]:
                    del values[done]
        raise AssertionError("a graph without output")

    def call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        target: Any = node.target
        try:
            if target is recalled:
                env, number, read, target, *args = args
                result = recalled(env, number, read, self.placed(target), *args, **kwargs)
            else:
                result = self.placed(target)(*args, **kwargs)
        except (NotImplementedError, RuntimeError):  # no kernel for meta tensors, or one that needs to see values
            self.unknown.add(str(target))
            if node.target is recalled and self.env.tape is not None:
                self.env.tape.kept[number] = None
            return self.stand_in(node, args)
        kept = not is_known(target) and any(r.requires_grad for r in tensors_in(result))
        if kept or _depends_on_data(node):
            self.unknown.add(str(target))
        return result

    def placed(self, target: Any) -> Any:
        """Return ``target`` as the device composes it."""
        return partial(COMPOSED[target], self.run.device) if target in COMPOSED else target

    def stand_in(self, node: fx.Node, args: Any) -> Any:
        """Return results of the captured shapes for an op that cannot run; data-dependent sizes are the largest, and a
        number that is read from a tensor is 1."""
        if "val" not in node.meta:
            return 1
        layouts = node.meta["layout"] if isinstance(node.meta["val"], tuple | list) else [node.meta["layout"]]
        operands = tensors_in(args)
        most = max((o.numel() for o in operands), default=1)
        made: list[Any] = []
        for one, placed in zip(values_of(node), layouts, strict=True):
            if not isinstance(one, Tensor):
                made.append(size_for_rows(one, self.env.rows, most))
                continue
            shape = local_shape(one, placed, self.env, most)
            made.append(_StandIn.apply(shape, one.dtype, *operands))  # type: ignore[no-untyped-call]
        return as_result(node, made)


class _StandIn(torch.autograd.Function):
    """Make an empty tensor that depends on ``operands`` and keeps nothing."""

    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], dtype: torch.dtype, *operands: Tensor) -> Tensor:
        ctx.like = [(o.shape, o.dtype) if o.is_floating_point() else None for o in operands]
        return torch.empty(tuple(shape), dtype=dtype, device=META)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *(None if o is None else torch.empty(o[0], dtype=o[1], device=META) for o in ctx.like)


# ---- values of the capture -------------------------------------------------------------------------------------------


def _captured(trace: Trace) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Return the metadata of batch fields ("f", name), parameters ("p", name) and buffers ("b", name) at capture.

    A buffer that units only update has the metadata of its update.  Fields that no unit reads are found among the
    placeholders of the whole graph, which end with the fields.
    """
    whole = next(node.graph for unit in trace.units for node in unit.values.values())
    places = [n for n in whole.nodes if n.op == "placeholder"]
    found = {("f", name): place.meta for name, place in zip(trace.fields, places[-len(trace.fields) :], strict=True)}
    for unit in trace.units:
        assert unit.graph is not None
        updated = outputs_of(unit.graph)[len(unit.outputs) :]
        found.update((("b", n), u.meta) for n, u in zip(unit.updates, updated, strict=True))
        kinds = {"p": unit.parameters, "b": unit.buffers}
        for place in (n for n in unit.graph.nodes if n.op == "placeholder" and n.name[0] in kinds):
            kind = place.name[0]
            found[kind, kinds[kind][int(place.name[1:])]] = place.meta
    return found


def _depends_on_data(node: fx.Node) -> bool:
    """Return whether the size of a node's result depends on data."""
    if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
        return False
    return any(depends_on_data(s) for v in tensors_in(node.meta["val"]) for s in v.shape)


def _filled(arguments: Any, values: Mapping[fx.Node, Any]) -> Any:
    """Return a node's arguments with values in place of nodes, and the meta device in place of any other."""

    def fill(a: Any) -> Any:
        if isinstance(a, fx.Node):
            return values[a]
        return META if isinstance(a, torch.device) else a

    return fx.node.map_aggregate(arguments, fill)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return what is not needed after each node: values of which it is the last user, and itself if it has none."""
    last: dict[fx.Node, list[fx.Node]] = {n: [] for n in graph.nodes}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if not node.users:
            last[node].append(node)
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                last[node].append(used)
    return last


def failed_op(error: Exception) -> str:
    """Return the op that a failure of autograd names."""
    found = re.search(r"\w+::\w+", str(error))
    return found[0] if found else "the unit"


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage, by the storage's key."""
    return {storage_key(t): t.untyped_storage().nbytes() for t in tensors}


def without(these: Mapping[int, int], *others: Mapping[int, int]) -> dict[int, int]:
    """Return those of ``these`` storages that are in none of the ``others``."""
    return {k: v for k, v in these.items() if not any(k in o for o in others)}
