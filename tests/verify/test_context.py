"""Context parallelism equals one device: of every model, with every other parallelism, whatever the lengths."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from test_tensor import ALONE, PLAIN, check, model, oracle
from torch import Tensor, nn
from torch.nn import functional as F

import zoo
from communicating import communicated
from covering import covering
from shardwise.core.errors import ConfigError
from shardwise.core.plan import CHOICES, Plan
from shardwise.lower.compiled import Compiled
from shardwise.measure.unit_cost import cost
from shardwise.parallel.context import context_parallel
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel

KINDS = CHOICES["context"]
LEARNED = ("learned bias", "learned bias of keys", "some see nothing")


@pytest.mark.quick(1)
@pytest.mark.few(24)
@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("cp", [2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model(name: str, cp: int, kind: Any) -> None:
    """Its lengths divide by 2 and 3, and not by 5; with 5 ranks some have no heads."""
    one, batches, truth = model(name)
    check(one.under(context_parallel(ALONE, cp, kind)), batches, truth, PLAIN)


def composed(
    kind: Any, tensor: tuple[str, int], data: tuple[int, int], pp: tuple[int, str], recompute: Any, microbatches: int
) -> Plan:
    plan = ALONE.replace(microbatches=microbatches, recompute=recompute)
    plan = context_parallel(tensor_parallel(plan, tensor[1], tensor[0]), 2, kind)  # type: ignore[arg-type]
    return pipeline(data_parallel(plan, *data), *pp)  # type: ignore[arg-type]


CASES = list(
    itertools.product(
        ("own llama", "gpt2 padded", "own gpt"),
        KINDS,
        (("1d", 1), ("1d", 2), ("1d-sp", 2), ("2d", 4), ("2.5d", 8), ("3d", 8)),
        ((1, 0), (2, 1), (2, 2), (2, 3)),
        ((1, "1f1b"), (2, "1f1b"), (2, "zb-h1")),
        ("none", "full", "selective"),
        (1, 2),
    )
)


@pytest.mark.slow
@pytest.mark.few(10)
@pytest.mark.parametrize("case", list(covering(CASES)), ids=str)
def test_together(case: tuple[Any, ...]) -> None:
    name, *options, microbatches = case
    one, batches, _ = model(name)
    plan = composed(*options, microbatches)
    check(one.under(plan), batches, whole_batches(name, microbatches), PLAIN)


@functools.cache
def whole_batches(name: str, microbatches: int) -> Any:
    one, batches, truth = model(name)
    return truth if microbatches == 1 else oracle(one.module, one.loss, batches, PLAIN, microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own llama", "gpt2 padded"])
@pytest.mark.parametrize("plan", ["auto", "propagate"])
def test_with_a_tensor_plan(name: str, plan: Any) -> None:
    one, batches, truth = model(name)
    pins = {"*up*": "column", "*q_proj*": "column"} if plan == "propagate" else {}
    pins = {"*c_fc*": "column", "*c_attn*": "column"} if pins and name.startswith("gpt2") else pins
    tensor = tensor_parallel(ALONE, 2, "1d", plan, pins)
    check(one.under(context_parallel(tensor, 2)), batches, truth, PLAIN)


class Attention(nn.Module):
    """Attention over a sequence of any length, of groups of heads, with masks of all kinds."""

    def __init__(self, how: str, heads: int = 4, keys: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.heads, self.keys = how, heads, keys
        self.first, self.last = nn.Linear(8, (heads + 2 * keys) * 4), nn.Linear(heads * 4, 8)
        self.far = nn.Embedding(4, heads)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.first(x).split([self.heads * 4, self.keys * 4, self.keys * 4], -1)
        q, k, v = (one.view(b, s, -1, 4).transpose(1, 2) for one in (q, k, v))
        place = torch.arange(s, device=x.device)
        mask: Tensor | None = None
        if self.how == "window":
            mask = (place[:, None] >= place) & (place[:, None] - place < 3)
        elif self.how == "documents":
            first = (x[:, :, 0] > 1).cumsum(1)
            mask = (first[:, None, :, None] == first[:, None, None, :]) & (place[:, None] >= place)
        elif self.how == "bias of heads":
            mask = -torch.arange(1, self.heads + 1, device=x.device)[:, None, None] * (place[:, None] - place).abs() / 8
            mask = mask.to(x.dtype)
        elif self.how == "learned bias":
            mask = self.far((place[:, None] - place).abs() % 4).movedim(-1, 0)
        elif self.how == "learned bias of keys":
            mask = self.far(place % 4).mean(-1)[None, None, None]
        elif self.how == "some see nothing":
            mask = (place[:, None] >= place) & (place[:, None] % 3 > 0)
        found = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=self.how == "causal", enable_gqa=self.heads != self.keys, scale=0.3
        )
        return F.mse_loss(self.last(found.transpose(1, 2).reshape(b, s, -1)), target)


@pytest.mark.quick(2)
@pytest.mark.few(16)
@pytest.mark.parametrize("how", ["causal", "full", "window", "documents", "bias of heads", *LEARNED])
@pytest.mark.parametrize("length", [4, 7, 13])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize(("heads", "keys"), [(4, 4), (4, 2), (6, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_attention(how: str, length: int, cp: int, heads: int, keys: int, kind: Any) -> None:
    torch.manual_seed(1)
    batch = {"x": torch.randn(3, length, 8).double(), "target": torch.randn(3, length, 8).double()}
    module = Attention(how, heads, keys).double()
    truth = oracle(module, None, [batch], PLAIN, 1)
    compiled = Compiled(module, context_parallel(ALONE, cp, kind), batch)
    check(compiled, [batch], truth, PLAIN)


@pytest.mark.parametrize("kind", KINDS)
def test_only_attention_communicates(kind: Any) -> None:
    """The loss and all layers have their parts, without any gather."""
    compiled = model("own llama")[0].under(context_parallel(ALONE, 2, kind))
    found = communicated(compiled.general)
    sent = {(what, path.rpartition(".")[2]) for what, _, path in found if what != "slice"}
    assert sent == {("all_gather" if kind == "gathered" else "by itself", "attention")}, found
    assert not compiled.general.replicated


def test_activations_take_a_part_of_the_memory() -> None:
    """What a unit keeps for its backward falls as 1/cp, but for the keys and values that ``gathered`` has whole."""
    kept = {}
    for cp in (1, 2, 4):
        trace = model("own llama")[0].under(context_parallel(ALONE, cp, "heads")).general
        kept[cp] = cost(trace, 8, 1)[1].saved_bytes
    assert kept[2] <= 0.56 * kept[1] and kept[4] <= 0.33 * kept[1], kept


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ConfigError, match='context: \'rings\' is not legal; legal: "gathered", "ring", "heads"'):
        context_parallel(Plan.of(), 2, "rings")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cp: 0 is not legal"):
        context_parallel(Plan.of(), 0)
