"""Groups of queries that share heads of keys and values, fewer than ranks: whole over a sub-axis, with nothing gathered
for attention.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from test_tensor import OPTIMIZER, PLAIN, check, oracle
from torch import Tensor, nn

import zoo
from communicating import communicated
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.lower import reduce
from shardwise.lower.compiled import Compiled
from shardwise.models import Llama
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel

SIZE = 4  # of a head
Case = tuple[str, int, int, int, tuple[int, int]]
CASES: list[Case] = [  # model, heads, of keys and values, ranks, those along the sub-axes
    ("own", 8, 2, 4, (2, 2)), ("llama", 8, 2, 4, (2, 2)), ("llama padded dropout", 8, 2, 4, (2, 2)),
    ("qwen3", 8, 2, 4, (2, 2)),
    ("llama", 8, 1, 2, (2, 1)), ("own", 6, 1, 3, (3, 1)), ("llama padded", 6, 1, 3, (3, 1)),
    ("own", 6, 3, 6, (3, 2)), ("llama dropout", 6, 3, 6, (3, 2)), ("qwen3 padded", 12, 3, 6, (3, 2)),
    ("llama", 12, 4, 6, (2, 3)), ("llama padded", 12, 4, 6, (2, 3)),  # groups of queries cut apart
    ("llama", 6, 2, 4, (2, 2)), ("llama padded", 6, 2, 3, (3, 1)), ("llama", 6, 3, 4, (4, 1)),  # uneven pieces
]  # fmt: skip
DEFAULT = [(CASES[i], kind) for i, kind in ((0, "1d-sp"), (2, "1d"), (5, "1d-sp"), (9, "1d-sp"), (10, "1d"))]


@functools.cache
def subject(name: str, heads: int, shared: int) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    torch.manual_seed(heads)
    fields: dict[str, Any] = {
        "hidden_size": heads * SIZE, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": heads,
        "num_key_value_heads": shared, "vocab_size": zoo.WORDS, "max_position_embeddings": 16,
    }  # fmt: skip
    module: nn.Module
    if name == "own":
        module = Llama(
            vocabulary=zoo.WORDS, width=heads * SIZE, layers=2, heads=heads, context=zoo.LENGTH, kv_heads=shared
        )
    elif name.startswith("qwen3"):
        module = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**fields, head_dim=SIZE))
    else:
        dropped = 0.1 if "dropout" in name else 0.0
        module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields, attention_dropout=dropped))
    batch = zoo.padded(zoo.tokens()) if "padded" in name else zoo.tokens()
    return module.double().train(), [batch, {k: v[:3] for k, v in batch.items()}]


@functools.cache
def compiled(name: str, heads: int, shared: int, tp: int, kind: Any) -> Compiled:
    module, batches = subject(name, heads, shared)
    return Compiled(module, tensor_parallel(Plan.of(precision="fp64", mesh=Mesh(())), tp, kind), batches[0])


def parity(case: Case, kind: Any) -> None:
    name, heads, shared, tp, (outer, inner) = case
    one, (module, batches) = compiled(name, heads, shared, tp, kind), subject(name, heads, shared)
    assert one.general.tensor == ({"tp": tp} if inner == 1 else {f"tp//{inner}": outer, f"tp%{inner}": inner})
    gathered = [
        path
        for (move, _, path) in communicated(one.general)
        if move == "all_gather" and "att" in path.rpartition(".")[2]
    ]
    assert not gathered
    check(one, batches, oracle(module, None, batches, PLAIN, 1), PLAIN)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(("case", "kind"), DEFAULT, ids=str)
def test_parity(case: Case, kind: str) -> None:
    parity(case, kind)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["1d", "1d-sp"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_parity(case: Case, kind: str) -> None:
    parity(case, kind)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "own"])
def test_keys_and_values_are_whole_over_a_sub_axis(name: str) -> None:
    one = compiled(name, 8, 2, 4, "1d").general
    found = {
        p.name.split(".", 3)[-1].removeprefix("self_"): p.placed
        for b in one.buckets
        for p in b.parameters
        if ".0." in p.name
    }
    placed = {key.removeprefix("attention.").removeprefix("attn."): layout for key, layout in found.items()}
    assert str(placed["q_proj.weight"]) == "[4:tp*8, 32]" and str(placed["o_proj.weight"]) == "[32, 4:tp*8]"
    for weight in ("k_proj.weight", "v_proj.weight"):
        assert str(placed[weight]) == "[2:tp//2*4, 32]"
        assert [placed[weight].intervals(Mesh.of(tp=4), rank)[0] for rank in range(4)] == [[(0, 4)]] * 2 + [
            [(4, 8)]
        ] * 2
    layer = Counter({key: n for key, n in communicated(one).items() if ".0." in key[2] or key[2].endswith(".0")})
    assert {kind for kind, _, _ in layer} == {"all_reduce", "all_reduce in backward"}
    assert layer.total() == 4  # as for heads of each query's own
    summed = {
        p.name.rpartition("attn.")[2].rpartition("attention.")[2]: p.summed for b in one.buckets for p in b.parameters
    }
    assert summed["k_proj.weight"] == summed["v_proj.weight"] == ("tp%2",) and not summed["q_proj.weight"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dp", "zero", "pp", "recompute", "m"),
    [("1d", 2, 3, 1, "full", 2), ("1d-sp", 1, 0, 2, "selective", 2), ("1d-sp", 2, 1, 2, "none", 1)],
)
def test_together_with_all_else(kind: str, dp: int, zero: int, pp: int, recompute: Any, m: int) -> None:
    one, (module, batches) = compiled("own", 8, 2, 4, kind), subject("own", 8, 2)
    plan = pipeline(data_parallel(Plan.of(microbatches=m, recompute=recompute, precision="fp64"), dp, zero), pp)
    check(one.under(tensor_parallel(plan, 4, kind)), batches, oracle(module, None, batches, OPTIMIZER, m), OPTIMIZER)  # type: ignore[arg-type]


@pytest.mark.slow
def test_evaluation_takes_the_sub_axes_of_training() -> None:
    one = compiled("own", 8, 2, 4, "1d")
    assert one.evaluation().general.tensor == one.general.tensor == {"tp//2": 2, "tp%2": 2}


@pytest.mark.slow
def test_a_forgotten_sum_over_the_sub_axis_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = reduce.reductions
    monkeypatch.setattr(reduce, "reductions", lambda plan, rule, summed: plain(plan, rule))
    module, batches = subject("own", 8, 2)
    one = Compiled(module, tensor_parallel(Plan.of(precision="fp64", mesh=Mesh(())), 4, "1d"), batches[0])
    with pytest.raises(AssertionError):
        check(one, batches, oracle(module, None, batches, PLAIN, 1), PLAIN)
