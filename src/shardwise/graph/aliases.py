"""Find what captured ops do besides returning values: share memory, write in place, draw random numbers."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.graph.aten_ops import Fact, has, named
from shardwise.graph.captured import Uncapturable
from shardwise.graph.naming import place
from shardwise.graph.schema import given, has_argument, op_name
from shardwise.graph.torch_private import has_storage, storage_key

_DROPOUTS = named(Fact.DROPOUT)


def aliased(old: fx.Node) -> fx.Node | None:
    """Return the operand whose memory ``old`` shares, if any."""
    mine = _storages(old.meta.get("val"))
    return next((i for i in old.all_input_nodes if mine & _storages(i.meta.get("val"))), None)


def _storages(value: Any) -> set[int]:
    if isinstance(value, Tensor):
        return {storage_key(value)}
    return {s for v in value for s in _storages(v)} if isinstance(value, tuple | list) else set()


def refuse_without_memory(node: fx.Node) -> None:
    """Raise :class:`Uncapturable` if a node is a tensor without memory: nobody can tell what writes to it."""
    value = node.meta.get("val")
    for one in value if isinstance(value, tuple | list) else (value,):
        if isinstance(one, Tensor) and not has_storage(one):
            kind = "tensors of torch.func (vmap, grad, jvp)" if one.layout is torch.strided else "sparse tensors"
            raise Uncapturable(f"it computes with {kind}, which have no memory of their own{place(node)}")


def looks_alike(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of the same memory are views of the same elements in the same order."""
    if a.dtype != b.dtype or a.dim() != b.dim():
        return False
    places = ([str(s) for s in (*x.shape, *x.stride(), x.storage_offset())] for x in (a, b))
    return next(places) == next(places)


def operand_itself(node: fx.Node) -> fx.Node | None:
    """Return the operand that a node returns, if that is no other tensor: one that autograd knows as before, also where
    it does not look (``x.to(x.dtype)`` under ``torch.no_grad``)."""
    call, index = (node.args[0], node.args[1]) if node.target is operator.getitem else (node, None)
    if not is_idle(node) and (not has(call, Fact.ITSELF) or given(call, "copy")):
        return None
    operand = call.args[0] if index is None else call.args[0][index]
    if not isinstance(operand, fx.Node):
        return None
    value, own = node.meta["val"], operand.meta["val"]
    lazy = (value.is_conj(), value.is_neg()) != (own.is_conj(), own.is_neg())
    return operand if value.device == own.device and looks_alike(value, own) and not lazy else None


def is_idle(node: fx.Node) -> bool:
    """Return whether a node is a dropout that changes nothing, since it is called outside training."""
    return op_name(node).rstrip("_") in _DROPOUTS and not given(node, "train", True)


def is_random(node: fx.Node) -> bool:
    """Return whether an op draws random numbers with the arguments that it is given."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()) and not has(node, Fact.RECURRENT):
        return False
    if any(
        has_argument(node, name) and not given(node, name) for name in ("dropout_p", "dropout", "train", "training")
    ):
        return False
    return not (has(node, Fact.RECURRENT) and given(node, "num_layers") == 1)  # dropout is between layers
