"""Name captured ops for people."""

from __future__ import annotations

from torch import fx

from shardwise.core.pins import starred
from shardwise.graph.torch_private import schema


def module_path(node: fx.Node | None) -> str:
    """Return the path, in the user's model, of the module that a captured op came from."""
    if node is None:
        return ""
    if "path" in node.meta:
        return str(node.meta["path"])
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return str(path).removeprefix("module").removeprefix(".")


def op_in_words(node: fx.Node) -> str:
    """Return the name of an op in all blocks, such as ``linear blocks.*.mlp.up``."""
    return (
        f"{getattr(schema(node.target), 'name', str(node.target)).removeprefix('aten::')} {starred(module_path(node))}"
    ).rstrip()
