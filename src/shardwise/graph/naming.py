"""Name captured ops for people."""

from __future__ import annotations

import re

from torch import fx

from shardwise.core.errors import in_users_file
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


def users_line(node: fx.Node) -> str:
    """Return ``file:line`` of the innermost line of the user's code that called a captured op; "" if it has none."""
    frames = re.findall(r'^ *File "(.*?)", line (\d+)', node.meta.get("stack_trace") or "", re.MULTILINE)
    return next((f"{name}:{line}" for name, line in reversed(frames) if in_users_file(name)), "")


def place(node: fx.Node) -> str:
    """Return where a captured op is, for messages: `` in head.norm (model.py:12)``, or less where less is known."""
    path, line = module_path(node), users_line(node)
    return (f" in {path}" if path else "") + (f" ({line})" if line else "")


def op_in_words(node: fx.Node) -> str:
    """Return the name of an op in all blocks, such as ``linear blocks.*.mlp.up``."""
    return (
        f"{getattr(schema(node.target), 'name', str(node.target)).removeprefix('aten::')} {starred(module_path(node))}"
    ).rstrip()
