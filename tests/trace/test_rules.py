"""Every rule: an op between trainable parameters, its rows on two and three ranks, one of them without any."""

from __future__ import annotations

import pytest
import torch
from harness import Subject, parity
from op_cases import LOCAL, LOSSES, MIXING, PARAMETERS, Op, Probe, batch

from shardwise.trace.trace import Trace

STATIC = {"take_along_dim", "distances", "some rows", "views apart again", "parameter of the batch's size"}  # export fixes their rows
ONE_ROW_DIFFERS = {"squeeze all", "some rows"}  # plain PyTorch does something else with a single row
REPLICATED = {"index_add", "index_put", "chosen by a mask", "some targets", "positions of true"}
"""Ops whose result no rank can compute from its own rows, or without a rule."""


def check(op: Op, name: str) -> Trace:
    """Parity with uneven rows, and with a rank that has none; the trace."""
    subject = Subject(Probe(op), batch())
    parity(subject, dp=2, rows=(7,) if name in ONE_ROW_DIFFERS else (7, 1))
    trace = parity(subject, dp=3, rows=(5,))
    assert (trace.rows is None) != (name in STATIC), trace.notes
    assert bool(trace.replicated) == (name in REPLICATED), trace.replicated
    return trace


def communicated(trace: Trace) -> list[str]:
    return [kind for kind, _, _ in trace.collectives if kind != "slice"]


@pytest.mark.parametrize("name", LOCAL)
def test_local(name: str) -> None:
    assert communicated(check(LOCAL[name], name)) == []


@pytest.mark.parametrize("name", MIXING)
def test_mixing(name: str) -> None:
    assert communicated(check(MIXING[name], name)) != []


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    check(PARAMETERS[name], name)


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    check(LOSSES[name], name)


def test_all_targets_ignored_is_not_a_number() -> None:
    """0/0, as in plain PyTorch, on every rank."""
    fields = batch()
    fields["label"][:] = -100
    parity(Subject(Probe(lambda m, h, b: torch.nn.functional.cross_entropy(h[:, 0], b["label"])), fields), dp=(1, 2))


def test_a_planted_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that forgets that a mean is over the rows of all ranks."""
    from shardwise.trace import rules

    wrong = {**rules.RULES, "mean": rules.RULES["softmax"]}
    monkeypatch.setattr(rules, "RULES", wrong)
    with pytest.raises(AssertionError, match="off by|disagree"):
        parity(Subject(Probe(lambda m, h, b: h - h.mean(-1, keepdim=True).exp().mean(1, keepdim=True)), batch()), dp=2)
