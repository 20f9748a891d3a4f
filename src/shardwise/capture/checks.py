"""The checks of a capture: what forward reads in Python of a batch, and of random numbers that are drawn for all rows,
and what it read when it was captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.capture.coins import FUNCTIONS, Drawing, drawn, for_all_rows
from shardwise.capture.reads import sized
from shardwise.core.fields import has_rows, is_kept
from shardwise.graph.assumed import keep_checks
from shardwise.graph.captured import Uncapturable
from shardwise.graph.functional import Normal
from shardwise.graph.schema import op_name, outputs_of


@dataclass(frozen=True)
class Checks:
    """``module(drawing, *fields, *buffers, *constants)`` gives the tensors that ``reads`` read, one after the other."""

    module: fx.GraphModule
    fields: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[Tensor, ...]
    reads: tuple[Any, ...]
    rows: int | None = None  # of the batches for which it holds, if they all have this number

    @property
    def vary(self) -> bool:
        """Whether a batch, or a step by its random numbers, may decide otherwise, and not new values of buffers alone,
        which no forward writes."""
        drawing = next(iter(self.module.graph.nodes))
        return bool(self.fields or drawing.users)

    @property
    def sized(self) -> bool:
        """Whether forward reads sizes that follow from values."""
        return sized(self.reads)

    def hold(self, fields: Mapping[str, Tensor], buffers: Mapping[str, Tensor], drawing: Drawing) -> bool:
        """Whether forward reads of a batch, all rows of it on the host, in the step of ``drawing`` what it read when it
        was captured."""
        if self.rows is not None and any(value.shape[0] != self.rows for n, value in fields.items() if has_rows(n)):
            return False
        with torch.no_grad():
            given = [*(fields[n] for n in self.fields), *(buffers[n].cpu() for n in self.buffers), *self.constants]
            try:
                operands = list(self.module(drawing, *given))
            except (IndexError, RuntimeError):  # the answers are in this graph: with others its sizes do not fit
                return False
        for read in self.reads:
            own, operands = operands[: read.operands], operands[read.operands :]
            answer = read.of(own)
            if type(answer) is not type(read.answer) or answer != read.answer:
                return False  # what is read later may depend on this
        return True


def take_checks(normal: Normal) -> Checks | None:
    """Take what is read out of the outputs of a graph, in place, and return the checks; None if nothing is read.  What
    the capture took for granted is checked in the graph.

    Raises :class:`Uncapturable` where that depends on parameters, random numbers of rows, or buffers that forward
    writes."""
    reads = normal.captured.reads
    number = sum(read.operands for read in reads)
    if not number:
        return None
    every = outputs_of(normal.graph)
    last = 1 + sum(map(is_kept, normal.updates))
    read = every[last - number : last]
    _keep_outputs(normal, [*every[: last - number], *every[last:]])
    normal.updates[last - 1 - number : last - 1] = []
    nodes = iter(read)
    each = [(one, [next(nodes) for _ in range(one.operands)]) for one in reads]
    keep_checks(normal.graph, [(own[0], bool(one.answer), one.place) for one, own in each if one.assumed])
    before = [(one, own) for one, own in each if not one.assumed]
    if not before:
        return None
    return _checks(normal, [node for _, own in before for node in own], [one for one, _ in before])


def _for_all_rows(node: fx.Node, rows: int | None) -> bool:
    return op_name(node) in FUNCTIONS and "row" not in node.meta and for_all_rows(node.meta["val"].shape, rows)


def _keep_outputs(normal: Normal, kept: Sequence[fx.Node]) -> None:
    (output,) = normal.graph.find_nodes(op="output")
    output.args = (tuple(kept),)


def _checks(normal: Normal, read: Sequence[fx.Node], reads: Sequence[Any]) -> Checks:
    captured, seen, stack = normal.captured, dict[fx.Node, None](), list(read)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen[node] = None
            stack.extend(node.all_input_nodes)
    why = "forward decides in Python by values that depend on"
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
    new.output(tuple(copies[node] for node in read))
    fields, buffers, constants = groups
    return Checks(
        fx.GraphModule(torch.nn.Module(), new),
        tuple(captured.fields[n.name] for n in fields),
        tuple(captured.buffers[n.name] for n in buffers),
        tuple(captured.constants[n.name] for n in constants),
        tuple(reads),
        captured.rows,
    )
