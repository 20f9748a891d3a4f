"""Every op of the cases of ``op_cases.py`` by every strategy that its rule has, on pieces of two and three ranks,
against the op whole (``sharding_oracle.py``).
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
from op_cases import LOCAL, LOSSES, MIXING, PARAMETERS, RANDOM
from sharding_oracle import errors
from torch import fx

from shardwise.ops import softmax
from shardwise.ops.own_op import OwnOp
from shardwise.shard import rules
from shardwise.shard.context import Rule, ShardingContext
from shardwise.shard.op_spec import OpSharding, Shard, Strategy
from shardwise.shard.rules import reductions
from shardwise.shard.rules.table import pointwise

CASES = {"local": LOCAL, "mixing": MIXING, "parameters": PARAMETERS, "losses": LOSSES, "random": RANDOM}
NAMES = [(kind, name) for kind, ops in CASES.items() for name in ops]


@pytest.fixture(scope="module")
def seen() -> set[str]:
    """The ops that tests before have had: most cases have some in common."""
    return set()


@pytest.fixture(autouse=True)
def softmax_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the dims of the cases are small."""
    monkeypatch.setattr(reductions, "FEW", 1)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_an_op_on_pieces_is_the_op_whole(kind: str, name: str, seen: set[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, on what some cases ask for
        assert errors(CASES[kind][name], seen) == []


# ---- the oracle finds what is wrong ----------------------------------------------------------------------------------


def of_own_pieces(context: ShardingContext, node: fx.Node) -> OpSharding:
    return pointwise(context, node)


def of_summands(context: ShardingContext, node: fx.Node) -> OpSharding:
    return pointwise(context, node, (0,))


def without_reduction(context: ShardingContext, node: fx.Node) -> OpSharding:
    """Whole operands beside sharded ones have whole gradients, it says."""
    form = pointwise(context, node)

    def moves(position: int, place: Shard) -> Strategy | None:
        found = form.by_label(position, place)
        return found and found._replace(operands=tuple("I" if s == "R" else s for s in found.operands))

    form.moves = moves
    return form


def taken_for_whole(context: ShardingContext, node: fx.Node) -> OpSharding | None:
    form = reductions.RULES["sum"](context, node)
    return form and replace(form, alike=frozenset({0}))


@pytest.mark.parametrize(
    ("op", "rule", "name", "wrong"),
    [
        ("softmax", of_own_pieces, "softmax", "result 0 is off by"),
        ("exp", of_summands, "unary chain", "result 0 is off by"),
        ("mul", without_reduction, "mul broadcast over rows", "ranks that should have the same do not"),
        ("sum", taken_for_whole, "sum", "ranks that should have the same do not"),
    ],
)
def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch, op: str, rule: Rule, name: str, wrong: str) -> None:
    monkeypatch.setattr(rules, "RULES", {**rules.RULES, op: rule})
    assert any(wrong in error for error in errors(LOCAL[name], set()))


def test_a_function_that_does_not_say_that_it_communicates_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax.softmax, "own_op", OwnOp())
    assert any("no function that it calls says so" in error for error in errors(LOCAL["softmax"], set()))
