"""This is a model as a flat graph of ATen ops, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from shardwise.core.errors import ShardwiseError
from shardwise.graph.torch_private import Assumed


class Uncapturable(ShardwiseError):
    """The model cannot be turned into a graph; it still trains, as one unit."""


@dataclass
class Captured:
    """This is a flat graph, and what its placeholders are.

    Tied parameters and shared buffers appear once, under the first of their names; ``names`` has all names of
    parameters, each with that first one.  ``rows`` is None if the batch dim is symbolic, else the only number of rows
    that the graph takes.
    """

    graph: fx.Graph
    owner: fx.GraphModule
    parameters: dict[str, str]  # placeholder name → canonical parameter name
    buffers: dict[str, str]  # placeholder name → canonical buffer name
    constants: dict[str, Tensor]  # by placeholder name
    fields: dict[str, str]  # placeholder name → batch field
    rows: int | None
    trainable: dict[str, bool] = field(default_factory=dict)  # by canonical parameter name
    values: dict[str, Tensor] = field(default_factory=dict)  # of buffers and constants, by placeholder
    notes: list[str] = field(default_factory=list)
    precision: str = "fp32"
    names: dict[str, str] = field(default_factory=dict)
    outputs: Any = None  # the structure of the outputs that follow the loss (`capture/outputs.py`), if there are any
    assumed: Assumed = Assumed()  # of the symbols of its sizes
    reads: tuple[Any, ...] = ()  # what forward read in Python (`capture/reads.py`); their operands are the last outputs
    looped: int = 0  # over so many experts forward loops, at most (`capture/expert_loops.py`)
    # Of each random call its ordinal, and the row that it is for if it is in a loop over rows; empty: none is.
    draws: list[tuple[int, int | None]] = field(default_factory=list)
    functions: list[Any] = field(default_factory=list)  # the CustomFunctions of `capture/functions.py`, by number
    opened: list[Any] = field(default_factory=list)  # the Functions of which the graph has the forward instead

    def value(self, name: str) -> Tensor:
        """Return what the placeholder of a buffer or constant held at capture."""
        return self.constants[name] if name in self.constants else self.values[name]
