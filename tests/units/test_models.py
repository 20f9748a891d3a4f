"""Whole models under every division of the batch: losses, gradients and state of AdamW steps against the oracle.

By default each model meets every number of ranks, of microbatches and every kind of recomputation, and all pairs of
these occur over the models; ``-m full`` runs the whole product.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from functools import cache

import pytest
import torch
from torch import fx

from communicating import communicated
from harness import OptimizerChoice, Subject, errors, oracle_run, parity, sharded_run
from shardwise.ops import random_ops
from shardwise.units.trace import Trace, Unit
from zoo import NAMES, make

aten = torch.ops.aten
ADAM = OptimizerChoice(
    "adamw", lr=0.01, eps=1e-3, weight_decay=0.1
)  # a larger eps: gradients of pure rounding stay small
RECOMPUTE = ("none", "selective", "full")
PRODUCT = list(itertools.product((1, 2, 3, 4), (1, 2, 3), RECOMPUTE))
MIXES_ROWS = {"own convnet", "own pairs", "resnet", "mixtral", "mixtral balanced", "mixtral padded"}
PADDED = ("llama padded", "gpt2 padded", "bert padded", "mixtral padded", "qwen3 padded")


def covering(index: int) -> list[tuple[int, int, str]]:
    """Four of the product that hold every number of ranks, microbatches and kind of recomputation; shifted for each
    model.
    """
    return [(dp, 1 + (dp + index) % 3, RECOMPUTE[(dp + index // 3) % 3]) for dp in (1, 2, 3, 4)]


@cache
def subject(name: str) -> Subject:
    model = make(name)
    return Subject(model.module, model.batch, model.loss)


def check(name: str, cases: list[tuple[int, int, str]]) -> None:
    one = subject(name)
    assert one.trace.opaque is None
    assert one.trace.rows is None
    for microbatches in {m for _, m, _ in cases}:
        truth = oracle_run(one, microbatches, steps=2, optimizer=ADAM)
        for dp, recompute in [(d, r) for d, m, r in cases if m == microbatches]:
            found = errors(sharded_run(one, dp, microbatches, recompute, steps=2, optimizer=ADAM), truth)
            worst = max(found, key=lambda n: found[n])
            assert found[worst] <= 1e-10, (
                f"dp {dp}, microbatches {microbatches}, {recompute}: {worst} is off by {found[worst]:.1e}"
            )


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("name", NAMES)
def test_covering(name: str) -> None:
    check(name, covering(NAMES.index(name)))


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_full(name: str) -> None:
    check(name, PRODUCT)


def test_the_covering_set_covers() -> None:
    cases = [c for i in range(len(NAMES)) for c in covering(i)]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert {(c[a], c[b]) for c in cases} == {(c[a], c[b]) for c in PRODUCT}


# ---- what is communicated, and what is computed twice ----------------------------------------------------------------


def moved(trace: Trace) -> set[str]:
    """Collectives by the op that needs them; slices are none, nor is the one number that weighs microbatches."""
    return {op for kind, op, _ in communicated(trace) if kind != "slice" and op != "cross_entropy"}


WITHOUT_RULE = {
    "own pairs": {"aten.eye.default"},  # of rows
    "bloom": {"aten.repeat.default"},  # of rows, for what attention adds to scores
}


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMES)
def test_activations_stay_where_they_are(name: str) -> None:
    """Rows are only gathered where a model mixes them, and what is computed for all of them on every rank is listed."""
    trace = subject(name).trace
    assert {op for op, _ in trace.replicated} == WITHOUT_RULE.get(name.split()[0] if "own" not in name else name, set())
    if name.startswith("mixtral"):
        assert moved(trace) == ({"aten.mul.Tensor"} if "balanced" in name else set())  # of the balance loss
    elif name in ("own convnet", "resnet"):
        assert moved(trace) == {"sync_batch_norm"}
    else:
        assert bool(moved(trace)) == (name in MIXES_ROWS), moved(trace)


def attentions(trace: Trace) -> list[fx.Node]:
    nodes = [n for u in trace.units for n in (u.graph.nodes if u.graph else ())]
    return [n for n in nodes if n.target in (aten.scaled_dot_product_attention.default, random_ops.attention)]


def seen(node: fx.Node) -> tuple[bool, bool]:
    """(has a mask, is causal) of an attention."""
    at = 1 if node.target is random_ops.attention else 0
    mask = node.args[3 + at] if len(node.args) > 3 + at else None
    causal = node.args[5 + at] if len(node.args) > 5 + at else False
    return mask is not None, bool(causal)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "causal"),
    [("llama", True), ("gpt2", True), ("qwen3", True), ("mixtral", True), ("bert", False), ("vit", False)],
)
def test_masks_that_say_nothing_are_dropped(name: str, causal: bool) -> None:
    found = [seen(n) for n in attentions(subject(name).trace)]
    assert found == [(False, causal)] * 2


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("name", PADDED)
def test_masks_of_padded_batches_stay(name: str) -> None:
    """... local to the rows, and go where the batch has no padding."""
    one = subject(name)
    assert [has for has, _ in map(seen, attentions(one.trace))] == [True] * 2
    compiled = one.compile(1, 1, "none")
    assert compiled.masks == ("attention_mask",)
    full = compiled.trace(compiled.masks, None)
    assert [seen(n) for n in attentions(full)] == [(False, not name.startswith("bert"))] * 2


def blocks(trace: Trace) -> list[Unit]:
    return [u for u in trace.units if u.name.rpartition(".")[2].isdigit()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own gpt", "own llama", "llama", "gpt2", "bert", "mixtral", "qwen3 padded", "vit"])
def test_equal_blocks_share_one_function(name: str) -> None:
    first, second = blocks(subject(name).trace)
    assert first.function == second.function
    assert first.code == second.code
    assert set(first.parameters).isdisjoint(second.parameters)


def test_microbatches_of_unequal_masks_are_one_batch() -> None:
    """Three microbatches give the loss and gradients of one, though their numbers of targets differ."""
    one = subject("llama")
    whole, parts = sharded_run(one, 1), sharded_run(one, 2, 3)
    found = errors(parts, whole)
    assert max(found.values()) <= 1e-10
    labels = one.batch["labels"].clone()
    labels[0, 1:] = 5
    other = Subject(one.module, {**one.batch, "labels": labels}, compiled=one.compiled)
    assert abs(sharded_run(other, 1).losses[0] - whole.losses[0]) > 1e-6


@pytest.mark.slow
def test_an_uneven_last_batch() -> None:
    parity(subject("own gpt"), dp=(3, 4), rows=(1, 3), microbatches=2, keyed=True)


@pytest.mark.slow
@pytest.mark.fresh
def test_a_capture_does_without_networkx() -> None:
    """Which torch names in annotations; who uses it later has it."""
    code = (
        "import sys, torch; from torch import nn; from shardwise.units.tracing import trace; from shardwise.models "
        "import GPT; "
        "ids = torch.zeros(2, 4, dtype=torch.long); "
        "found = trace(GPT(vocabulary=8, width=8, layers=1, heads=1, context=4), {'input_ids': ids, 'labels': ids}); "
        "assert found.opaque is None and 'networkx' not in sys.modules; "
        "from torch._functorch._activation_checkpointing import graph_info_provider as other; "
        "assert other.nx.DiGraph().number_of_nodes() == 0 and 'networkx' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
