"""Make the graph for batches in which some fields are all ones (masks without padding) of the graph for any batches.

A capture reads no values, so a forward does the same for both; the second differs in one op for each such field.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import fx

from shardwise.graph.captured import Captured

aten = torch.ops.aten


def with_ones(captured: Captured, fields: Collection[str]) -> Captured:
    """Return ``captured`` with ``torch.ones_like`` of these fields wherever it reads them, but for their sizes."""
    if not fields:
        return captured
    graph = fx.Graph()
    output = graph.graph_copy(captured.graph, {}, return_output_node=True)
    assert output is not None  # every capture returns a loss
    value, old = output
    graph.output(value).meta = dict(old.meta)
    places = graph.find_nodes(op="placeholder")
    for place in places:
        if captured.fields.get(place.name) in fields:
            with graph.inserting_after(places[-1]):
                ones = graph.call_function(aten.ones_like.default, (place,), {"pin_memory": False})
            value = ones.meta["val"] = place.meta["val"]  # the views of the field are views of this now
            with value.fake_mode:
                place.meta["val"] = torch.ones_like(value)
            for user in [one for one in place.users if one is not ones and one.target is not aten.sym_size.int]:
                user.replace_input_with(place, ones)
    return replace(captured, graph=graph)
