"""The table of facts: names that exist, facts that torch itself can confirm, and the facts of our own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from shardwise.graph.aten_ops import FACTORS, FACTS, Fact, is_blind, may_share, named, permutation, regroups
from shardwise.graph.torch_private import is_composite, storage_key
from shardwise.ops import collectives, cross_entropy, norms, random_ops, softmax
from shardwise.ops.own_op import argument_at, facts_of

aten = torch.ops.aten

VIEWS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "view": (aten.view.default, ([6, 2],)),
    "reshape": (aten.reshape.default, ([6, 2],)),
    "flatten": (aten.flatten.using_ints, (0, 1)),
    "squeeze": (aten.squeeze.default, ()),
    "unsqueeze": (aten.unsqueeze.default, (0,)),
    "transpose": (aten.transpose.int, (0, 2)),
    "permute": (aten.permute.default, ([2, 0, 1],)),
    "movedim": (aten.movedim.int, (0, 2)),
    "moveaxis": (aten.moveaxis.int, (0, 2)),
    "swapaxes": (aten.swapaxes.default, (0, 1)),
    "mT": (aten.mT.default, ()),
    "adjoint": (aten.adjoint.default, ()),
    "expand_as": (aten.expand_as.default, (torch.empty(5, 3, 2, 2),)),
    "slice": (aten.slice.Tensor, (0, 1, 2)),
    "unfold": (aten.unfold.default, (0, 2, 1)),
    "split": (aten.split.Tensor, (2,)),
    "split_with_sizes": (aten.split_with_sizes.default, ([1, 2],)),
    "unsafe_split": (aten.unsafe_split.Tensor, (2,)),
    "unsafe_chunk": (aten.unsafe_chunk.default, (2,)),
    "tensor_split": (aten.tensor_split.sections, (2,)),
    "_unsafe_view": (aten._unsafe_view.default, ([6, 2],)),
    "atleast_2d": (aten.atleast_2d.default, ()),
    "to": (aten.to.dtype, (torch.float32,)),
    "contiguous": (aten.contiguous.default, ()),
}  # fmt: skip


def called(target: Any, *args: Any) -> fx.Node:
    """A node that calls ``target`` on a tensor of (3, 2, 2)."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, 2, 2)
    return graph.call_function(target, (x, *args))


def test_names_are_ops() -> None:
    assert not [n for n in {*FACTS, *FACTORS} if "::" not in n and not hasattr(aten, n)]


def test_what_is_said_to_be_composed_is() -> None:
    overloads = {n: [getattr(getattr(aten, n), o) for o in getattr(aten, n).overloads()] for n in named(Fact.ALIKE)}
    assert not [n for n, every in overloads.items() if not any(is_composite(one) for one in every)]


@pytest.mark.parametrize("name", VIEWS)
def test_views_share_memory_and_need_no_values(name: str) -> None:
    target, args = VIEWS[name]
    x = torch.randn(3, 2, 2)
    result = target(x, *args)
    assert {storage_key(r) for r in (result if isinstance(result, tuple | list) else [result])} == {storage_key(x)}
    node = called(target, *args)
    assert may_share(node) and is_blind(node)


@pytest.mark.parametrize("target", [aten.gather.default, aten.scatter.src, aten.mul.Tensor, aten.clone.default])
def test_what_makes_a_new_tensor_shares_none(target: Any) -> None:
    """Two of them have names that moves have too."""
    assert not may_share(called(target))
    assert is_blind(called(target)) == (target is aten.clone.default)


@pytest.mark.parametrize("name", [n for n in VIEWS if FACTS.get(n, Fact(0)) & Fact.PERMUTES])
def test_the_order_of_dims(name: str) -> None:
    target, args = VIEWS[name]
    order, x = permutation(called(target, *args)), torch.randn(3, 2, 2)
    assert order is not None and torch.equal(x.permute(order), target(x, *args))


def test_a_view_of_other_bits_regroups_nothing() -> None:
    assert regroups(called(aten.view.default, [12])) and not regroups(called(aten.view.dtype, torch.int32))


@pytest.mark.parametrize(
    ("function", "communicates", "shares", "blind", "kept"),
    [
        (collectives.gather, True, True, True, False), (collectives.own, False, True, True, False),
        (collectives.same, False, True, True, False), (collectives.shard_leaf, False, True, True, False),
        (random_ops.dropout, False, True, True, False), (random_ops.alpha_dropout, False, True, True, False),
        (random_ops.attention, False, False, False, True), (random_ops.bernoulli, False, False, False, False),
        (cross_entropy.cross_entropy, True, False, False, False), (softmax.logsumexp, True, False, False, False),
        (norms.sync_batch_norm, True, False, False, False), (norms.batch_norm, False, False, False, False),
    ],
)  # fmt: skip
def test_our_own_functions(
    function: Callable[..., Tensor], communicates: bool, shares: bool, blind: bool, kept: bool
) -> None:
    facts = facts_of(function)
    assert (facts.communicates, facts.shares, facts.blind, facts.kept) == (communicates, shares, blind, kept)


def test_the_place_of_an_ordinal() -> None:
    assert argument_at(random_ops.dropout, "ordinal") == 3
    assert argument_at(random_ops.attention, "ordinal") == 7
    assert argument_at(aten.dropout.default, "ordinal") is None
