"""Some rules end to end: an op between trainable parameters, its rows on two and three ranks, one of them without any.

Each rule by itself, with all of its strategies, is ``test_sharding_oracle.py``.
"""

from __future__ import annotations

import pytest
import torch
from op_cases import LOCAL, LOSSES, MIXING, PARAMETERS, RANDOM, Op, Probe, batch
from torch import fx

from communicating import communicated
from harness import Subject, parity, sharded_run
from shardwise.ops import collectives
from shardwise.ops.env import Env, Groups
from shardwise.shard import rules
from shardwise.shard.context import ShardingContext
from shardwise.shard.rules.table import pointwise
from shardwise.units.trace import Trace

STATIC = {
    "take_along_dim",
    "distances",
    "some rows",
    "views apart again",
    "parameter of the batch's size",
}  # export fixes their rows
ONE_ROW_DIFFERS = {"squeeze all", "some rows"}  # plain PyTorch does something else with a single row
REPLICATED = {
    "chosen by a mask",
    "targets by another mask",
    "positions of true",
    "where it is true",
}
"""Ops whose result no rank can compute from its own rows, or without a rule."""


def check(op: Op, name: str) -> Trace:
    """Parity with uneven rows, and with a rank that has none; the trace."""
    subject = Subject(Probe(op), batch())
    parity(subject, dp=2, rows=(7,) if name in ONE_ROW_DIFFERS else (7, 1))
    trace = parity(subject, dp=3, rows=(5,))
    assert (trace.rows is None) != (name in STATIC), trace.notes
    assert bool(trace.replicated) == (name in REPLICATED), trace.replicated
    return trace


def kinds(trace: Trace) -> list[str]:
    return [kind for kind, _, _ in communicated(trace) if kind != "slice"]


@pytest.mark.quick(1)
@pytest.mark.few(10)
@pytest.mark.parametrize("name", LOCAL)
def test_local(name: str) -> None:
    assert kinds(check(LOCAL[name], name)) == []


@pytest.mark.quick(1)
@pytest.mark.few(10)
@pytest.mark.parametrize("name", MIXING)
def test_mixing(name: str) -> None:
    trace = check(MIXING[name], name)
    assert kinds(trace) != [] or trace.sums is not None


@pytest.mark.quick(1)
@pytest.mark.few(4)
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    check(PARAMETERS[name], name)


@pytest.mark.quick(1)
@pytest.mark.few(8)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    check(LOSSES[name], name)


@pytest.mark.parametrize("name", ["multi margin", "multi margin sum", "multilabel margin"])
def test_what_a_kernel_leaves_as_it_was_of_no_rows_is_nothing(name: str) -> None:
    """Results that are not written are NaN here."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        parity(Subject(Probe(LOSSES[name]), batch()), dp=2, rows=(1,))
    finally:
        torch.use_deterministic_algorithms(before)


def test_all_targets_ignored_is_not_a_number() -> None:
    """0/0, as in plain PyTorch, on every rank."""
    fields = batch()
    fields["label"][:] = -100
    parity(Subject(Probe(lambda m, h, b: torch.nn.functional.cross_entropy(h[:, 0], b["label"])), fields), dp=(1, 2))


@pytest.mark.quick(1)
@pytest.mark.few(6)
@pytest.mark.parametrize("name", RANDOM)
def test_random(name: str) -> None:
    """Against the oracle, which draws by the sample's index too; microbatches must not change the numbers."""
    subject = Subject(Probe(RANDOM[name]), batch())
    parity(subject, dp=3, rows=(7, 1), keyed=True)
    trace = parity(subject, dp=2, rows=(5,), microbatches=2, keyed=True)
    assert trace.rows is None
    assert not trace.replicated


def test_random_numbers_are_not_all_the_same() -> None:
    """What the comparison with the oracle cannot see: masks differ by row, step and op, and keep what they should."""
    subject = Subject(Probe(RANDOM["dropout"]), batch())
    first, again = sharded_run(subject, 2), sharded_run(subject, 2)
    other = sharded_run(subject, 2, seed=1)
    assert first.losses == again.losses
    assert abs(first.losses[0] - other.losses[0]) > 1e-6
    stepped = sharded_run(subject, 2, steps=2).losses
    assert stepped[0] == first.losses[0]
    assert abs(stepped[1] - stepped[0]) > 1e-6


def test_fused_attention_is_kept_where_its_masks_may_differ() -> None:
    subject = Subject(Probe(RANDOM["attention dropout, causal"]), batch(), dropout="fast")
    targets = [str(n.target) for u in subject.trace.units for n in (u.graph.nodes if u.graph else ())]
    assert "aten.scaled_dot_product_attention.default" in targets
    exact = Subject(Probe(RANDOM["attention dropout, causal"]), batch())
    targets = [str(n.target) for u in exact.trace.units for n in (u.graph.nodes if u.graph else ())]
    assert "aten.scaled_dot_product_attention.default" not in targets


def softmax_of_own_rows(context: ShardingContext, node: fx.Node) -> object:
    return pointwise(context, node)


def test_a_planted_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "RULES", {**rules.RULES, "softmax": softmax_of_own_rows})
    with pytest.raises(AssertionError, match="is off by"):
        parity(Subject(Probe(MIXING["softmax over rows"]), batch()), dp=2)
    parity(Subject(Probe(LOCAL["softmax"]), batch()), dp=2)


def replicate_without_reduction(env: Env, x: torch.Tensor, axes: Groups) -> torch.Tensor:
    return x


def test_a_forgotten_reduction_of_gradients_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An I operand of an op over sharded rows has a partial gradient."""
    parity(Subject(Probe(MIXING["replicated then sharded"]), batch()), dp=2)
    monkeypatch.setattr(collectives, "replicate", replicate_without_reduction)
    with pytest.raises(AssertionError, match="is off by"):
        parity(Subject(Probe(MIXING["replicated then sharded"]), batch()), dp=2)
