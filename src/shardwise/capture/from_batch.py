"""What follows from a batch alone, as a graph of its own: it is computed before the model is, for all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from shardwise.capture.coins import FUNCTIONS, Drawing, drawn, for_all_rows
from shardwise.graph.captured import Uncapturable
from shardwise.graph.functional import Normal
from shardwise.graph.schema import op_name
from shardwise.graph.torch_private import process_lock


@dataclass(frozen=True)
class FromBatch:
    """``module(drawing, *fields, *buffers, *constants)`` gives tensors that follow from a batch."""

    module: fx.GraphModule
    fields: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[Tensor, ...]

    @property
    def varies(self) -> bool:
        """Whether they depend on the batch, or on random numbers of the step."""
        drawing = next(iter(self.module.graph.nodes))
        return bool(self.fields or drawing.users)

    def of(self, fields: Mapping[str, Tensor], buffers: Mapping[str, Tensor], drawing: Drawing) -> list[Tensor]:
        """Return the tensors for a batch, all rows of it on the host, in the step of ``drawing``."""
        with process_lock, torch.no_grad():  # a capture in another thread changes what holds for all
            given = [*(fields[n] for n in self.fields), *(buffers[n].cpu() for n in self.buffers), *self.constants]
            return list(self.module(drawing, *given))


def from_batch(normal: Normal, results: Sequence[fx.Node], why: str) -> FromBatch:
    """Return the graph of ``results``.

    Raises :class:`Uncapturable`, with ``why``, where they depend on parameters, random numbers of rows, or buffers that
    forward writes."""
    captured, seen, stack = normal.captured, dict[fx.Node, None](), list(results)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen[node] = None
            stack.extend(node.all_input_nodes)
    for node in seen:
        if node.name in captured.parameters and node.op == "placeholder":
            raise Uncapturable(f"{why} the parameter {captured.parameters[node.name]}")
        if "ordinal" in node.meta and not _for_all_rows(node, captured.rows):
            raise Uncapturable(f"{why} random numbers of rows")
        if node.op == "placeholder" and (name := captured.buffers.get(node.name)) in normal.updates:
            raise Uncapturable(f"{why} the buffer {name}, which it writes")
    places = [n for n in normal.graph.nodes if n in seen and n.op == "placeholder"]
    kinds = (captured.fields, captured.buffers, captured.constants)
    groups = [[n for n in places if n.name in names] for names in kinds]
    new, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    drawing = new.placeholder("drawing")
    for node in (n for group in groups for n in group):
        copies[node] = new.placeholder(node.name)
    for node in normal.graph.nodes:
        if node in seen and "ordinal" in node.meta:
            args, options = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            options = {**options, "dtype": node.meta["val"].dtype}
            copies[node] = new.call_function(drawn, (drawing, node.meta["ordinal"], op_name(node), *args), options)
        elif node in seen and node.op == "call_function":
            copies[node] = new.node_copy(node, copies.__getitem__)
    new.output(tuple(copies[node] for node in results))
    fields, buffers, constants = groups
    return FromBatch(
        fx.GraphModule(torch.nn.Module(), new),
        tuple(captured.fields[n.name] for n in fields),
        tuple(captured.buffers[n.name] for n in buffers),
        tuple(captured.constants[n.name] for n in constants),
    )


def _for_all_rows(node: fx.Node, rows: int | None) -> bool:
    return op_name(node) in FUNCTIONS and "row" not in node.meta and for_all_rows(node.meta["val"].shape, rows)
