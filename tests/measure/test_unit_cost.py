"""Costs of units against real runs on the CPU, with saved-tensor hooks and torch's own FLOP counter, and against closed
forms.
"""

from __future__ import annotations

import dataclasses
import functools
import resource
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from measured import Fields, real_costs
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.measure import meta_run as module_under_test
from shardwise.measure.unit_cost import UnitCost, cost
from shardwise.models import GPT, Llama
from shardwise.models.llama import rotary_table
from shardwise.runtime.threads import run_ranks
from shardwise.shard.assignment import TensorParallelSpec
from shardwise.units.trace import Trace
from shardwise.units.tracing import trace

VOCABULARY, LENGTH = 61, 12


# ---- subjects --------------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """With dropout, and biases on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y)


class ConvNet(nn.Module):
    """Convolutions and BatchNorm, whose running statistics forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.norm2 = nn.Conv2d(8, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm1(self.first(x)).relu(), 2)
        x = self.norm2(self.second(x)).relu()
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), y)


def text(rows: int = 6) -> Fields:
    g = torch.Generator().manual_seed(0)
    return {n: torch.randint(0, VOCABULARY, (rows, LENGTH), generator=g) for n in ("input_ids", "labels")}


def features(rows: int = 6) -> Fields:
    return {"x": torch.randn(rows, 6), "y": torch.arange(rows) % 3}


def images(rows: int = 6, x: str = "x", y: str = "y") -> Fields:
    return {x: torch.randn(rows, 3, 16, 16), y: torch.arange(rows) % 5}


def own_gpt(**sizes: Any) -> nn.Module:
    return GPT(**{"vocabulary": VOCABULARY, "width": 32, "layers": 2, "heads": 4, "context": 16, **sizes})


def own_llama() -> nn.Module:
    return Llama(vocabulary=VOCABULARY, width=32, layers=2, heads=4, kv_heads=2, context=16)


def hugging_face(name: str, **config: Any) -> nn.Module:
    import transformers

    family = name.removesuffix("ForCausalLM").removesuffix("ForMaskedLM").removesuffix("LMHeadModel")
    family = family.removesuffix("ForImageClassification")
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    if family == "GPT2":
        small = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    if family != "ViT":
        small["vocab_size"] = VOCABULARY
    return getattr(transformers, name)(getattr(transformers, f"{family}Config")(**small, **config))


GROUPED = {"num_key_value_heads": 2, "max_position_embeddings": 16}
DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
PICTURE = {"image_size": 16, "patch_size": 8, "num_labels": 5}
SUBJECTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Fields]]] = {
    "gpt": (own_gpt, text),
    "gpt with dropout": (lambda: own_gpt(dropout=0.1), text),
    "llama": (own_llama, text),
    "mlp": (MLP, features),
    "convolutions": (ConvNet, images),
    "transformers llama": (lambda: hugging_face("LlamaForCausalLM", **GROUPED), text),
    "transformers llama with a mask": (
        lambda: hugging_face("LlamaForCausalLM", **GROUPED),
        lambda: {**text(), "attention_mask": torch.ones(6, LENGTH, dtype=torch.int64)},
    ),
    "gpt2": (lambda: hugging_face("GPT2LMHeadModel", **DRY), text),
    "gpt2 with dropout": (lambda: hugging_face("GPT2LMHeadModel"), text),
    "bert with dropout": (lambda: hugging_face("BertForMaskedLM", max_position_embeddings=16), text),
    "qwen3": (lambda: hugging_face("Qwen3ForCausalLM", **GROUPED, head_dim=8), text),
    "vit": (lambda: hugging_face("ViTForImageClassification", **PICTURE), lambda: images(6, "pixel_values", "labels")),
}  # fmt: skip


@functools.cache
def subject(name: str) -> tuple[nn.Module, Fields]:
    torch.manual_seed(0)
    make, batch = SUBJECTS[name]
    return make(), batch()


@functools.cache
def traced(name: str, precision: str = "fp32") -> Trace:
    module, batch = subject(name)
    found = trace(module, batch, precision=precision)
    assert found.opaque is None, found.opaque
    return found


def comparable(costs: Sequence[UnitCost]) -> list[UnitCost]:
    """Without what a real run does not show."""
    assert all(c.forward_bytes > 0 for c in costs if c.forward_flops)
    return [dataclasses.replace(c, forward_bytes=0) for c in costs]


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_costs_are_those_of_a_real_run(name: str, precision: str) -> None:
    module, batch = subject(name)
    found = traced(name, precision)
    ours = cost(found, 5)  # not the number of rows that was captured
    assert comparable(ours) == real_costs(module, found, batch, 5)
    assert sum(c.saved_bytes for c in ours) > 0 and sum(c.weight_flops for c in ours) > 0
    assert not any(c.unknown for c in cost(found, 5, device="gpu"))


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["convolutions", "gpt with dropout", "transformers llama with a mask"])
def test_costs_of_a_rank_are_those_of_a_real_rank(name: str) -> None:
    """The last of three ranks, which has two rows, with its collectives and whatever they make it keep."""
    module, batch = subject(name)
    found, rows = traced(name), 5
    real = run_ranks(Mesh.of(dp=3), lambda comm: real_costs(module, found, batch, rows, comm), timeout=30)
    assert comparable(cost(found, rows, 3)) == real[-1]
    assert comparable(cost(found, rows)) != real[-1]


@pytest.mark.slow
def test_fast_dropout_keeps_what_the_native_kernels_keep() -> None:
    module, batch = subject("gpt with dropout")
    found = trace(module, batch, dropout="fast")
    ours = cost(found, 6)
    assert comparable(ours) == real_costs(module, found, batch, 6)
    here, there = ours[1].saved_bytes, cost(found, 6, device="gpu")[1].saved_bytes
    pairs, tokens = 4 * 6 * LENGTH**2, 6 * LENGTH * 32
    assert (
        here - there >= 3 * 2 * tokens + 3 * pairs
    )  # masks of a byte an element; and CUDA's attention keeps no probabilities


# ---- frozen and shared parameters ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_frozen_parameters_cost_no_weight_gradient() -> None:
    module, batch = own_gpt(), text()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("blocks.1.mlp" in name or "norm" in name)
    found = trace(module, batch)
    ours = cost(found, 6)
    assert comparable(ours) == real_costs(module, found, batch, 6)
    assert [c.weight_flops > 0 for c in ours] == [False, False, True, False]
    assert ours[1].saved_bytes < cost(traced("gpt"), 6)[1].saved_bytes


class Counting(nn.Module):
    """Buffers that nothing but their updates reads, one of which follows from a batch field, and one that passes
    through units.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        for name, value in (
            ("average", torch.zeros(6)),
            ("steps", torch.zeros((), dtype=torch.int64)),
            ("ones", torch.zeros(())),
        ):
            self.register_buffer(name, value)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        self.ones += (y == 1).sum()
        for layer in self.layers:
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.mean(0) * 0.1)
            x = layer(x) + self.average
        return x.square().mean()


def test_buffers_that_forward_writes() -> None:
    module = Counting()
    found = trace(module, features())
    assert sum(len(u.updates) for u in found.units) == 3
    assert comparable(cost(found, 6)) == real_costs(module, found, features(), 6)


def test_a_tied_parameter_counts_in_both_units() -> None:
    head, *blocks, tail = cost(traced("gpt"), 6)
    assert head.parameters == (VOCABULARY + 16) * 32 and tail.parameters == VOCABULARY * 32 + 2 * 32
    assert {b.parameters for b in blocks} == {12 * 32**2 + 13 * 32}


# ---- closed forms ----------------------------------------------------------------------------------------------------


def test_flops_of_a_gpt() -> None:
    """Forward and backward are 72 B L s h² (1 + s/6h + V/12hL), with attention spelled out (Korthikanti et al.,
    appendix A).
    """
    b, s, h, layers = 6, LENGTH, 32, 2
    ours = cost(traced("gpt with dropout"), b)
    total = sum(c.forward_flops + c.backward_flops for c in ours)
    assert total == 72 * b * layers * s * h * h + 12 * b * layers * s * s * h + 6 * b * s * h * VOCABULARY
    assert all(c.weight_flops == 24 * b * s * h * h for c in ours[1:-1])
    fused = cost(traced("gpt"), b)[1]  # backward computes the scores once more
    assert fused.input_flops == ours[1].input_flops + 2 * b * s * s * h


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("kind", ["1d", "1d-sp"])
def test_ranks_of_tensor_parallelism_share_the_flops(kind: str, tp: int) -> None:
    """Of all products and attention, even and uneven: four heads over three ranks.  They share weights, but for norms
    and late biases.
    """
    whole, h = cost(traced("gpt"), 6), 32
    module = GPT(vocabulary=VOCABULARY, width=h, layers=2, heads=4, context=LENGTH)
    found = trace(module, text(), tensor=TensorParallelSpec({"tp": tp}, kind))
    each = [cost(found, 6, tensor={"tp": (tp, i)}) for i in range(tp)]
    assert cost(found, 6) == each[-1]
    for index in range(1, len(whole)):
        own, units = whole[index], [costs[index] for costs in each]
        for field in ("forward_flops", "input_flops", "weight_flops"):
            assert sum(getattr(u, field) for u in units) == getattr(own, field), (index, field)
        alike = 6 * h if own.name.startswith("blocks") else 2 * h
        assert sum(u.parameters for u in units) == own.parameters + (tp - 1) * alike


@pytest.mark.slow
def test_activations_of_a_gpt() -> None:
    """bf16 with dropout: sbh (34 + 5as/h) bytes a layer (Korthikanti et al., table 2), norms' statistics and small
    masks.
    """
    b, s, h, a = 6, LENGTH, 32, 4
    for device, statistic in (("cpu", 2), ("gpu", 4)):
        block = cost(traced("gpt with dropout", "bf16"), b, device=device)[1]
        assert block.output_bytes == 2 * s * b * h  # as much as the input, which is kept too
        masks = block.output_bytes + block.saved_bytes - (s * b * h * 34 + 5 * a * b * s * s + 4 * statistic * b * s)
        assert s * s <= masks <= s * s + 2 * a * b * s  # causal, and of rows that see nothing
        fused = cost(traced("gpt", "bf16"), b, device=device)[1]
        random_state = 0 if device == "cpu" else 24
        rest = 4 * a * b * s + 4 * statistic * b * s + random_state
        assert fused.output_bytes + fused.saved_bytes == s * b * h * 32 + rest


def test_traffic_of_an_mlp() -> None:
    """Operands and results of every kernel once; views and empty tensors move nothing."""
    first, *_ = cost(traced("mlp"), 6)
    assert first.name == "layers.0"
    linear, gelu = 6 * 6 + 16 * 6 + 16 + 6 * 16, 2 * 6 * 16
    assert first.forward_bytes == 4 * (linear + gelu)
    head = cost(traced("gpt"), 6)[0]
    tokens, width = 6 * LENGTH, 32
    integers = tokens + 2 * LENGTH  # positions are made, then read
    lookups = (min(VOCABULARY, tokens) + tokens) + 2 * LENGTH
    assert head.forward_bytes == 8 * integers + 4 * width * (lookups + 2 * tokens + LENGTH)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [3, pytest.param(80, marks=pytest.mark.full)])
def test_a_llama_of_70b_allocates_nothing(layers: int) -> None:
    h, ffn, vocabulary, s, rows = 8192, 28672, 128256, 8192, 2
    with torch.device("meta"):
        module = Llama(vocabulary=vocabulary, width=h, layers=layers, heads=64, kv_heads=8, hidden=ffn, context=s)
    module.rotary = rotary_table(s, h // 64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = trace(
        module, {n: torch.zeros(rows, s, dtype=torch.int64) for n in ("input_ids", "labels")}, precision="bf16"
    )
    ours = cost(found, rows, device="gpu")
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20
    )  # KiB: a GiB, of which the units have none
    weights = 2 * h * h + 2 * h * h // 8 + 3 * h * ffn
    assert sum(c.parameters for c in ours) == layers * (weights + 2 * h) + 2 * vocabulary * h + h
    block = next(c for c in ours if c.name == "blocks.0")
    assert block.forward_flops == 2 * rows * s * weights + 4 * rows * s * s * h
    assert (
        block.weight_flops == 2 * rows * s * weights
        and block.input_flops == 2 * rows * s * weights + 10 * rows * s * s * h
    )
    assert len({dataclasses.replace(c, index=0, name="") for c in ours if c.name.startswith("blocks")}) == 1


# ---- what is not known -----------------------------------------------------------------------------------------------


class Distances(nn.Module):
    """Uses a composite op that the table does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layer(x)
        return torch.cdist(h[:, None], h[:, None] * 2).mean() + (h.square() * y[:, None]).mean()


def test_ops_without_an_entry_are_named() -> None:
    ours = cost(trace(Distances(), features()), 6)
    assert [c.unknown for c in ours] == [("aten.cdist.default",)]
    assert ours[0].weight_flops == 2 * 6 * 6 * 4


class Chosen(nn.Module):
    """The number of rows that reach the second layer depends on data."""

    def __init__(self, select: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.select = nn.Linear(6, 4), nn.Linear(4, 4), select

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.second(self.select(self.first(x), y > 0).view(-1, 4)).square().sum() / 6


@pytest.mark.parametrize(
    ("name", "select", "whole"),
    [
        ("index.Tensor", lambda h, m: h[m], False),
        ("masked_select.default", lambda h, m: h.masked_select(m[:, None]), True),
    ],
)
def test_sizes_that_depend_on_data_count_at_their_most(
    name: str, select: Callable[[Tensor, Tensor], Tensor], whole: bool
) -> None:
    """A rank chooses of its own rows; all ranks make a choice of all rows where the mask is broadcast."""
    found = trace(Chosen(select), features())
    for rows, parts in ((6, 1), (9, 2)):
        (unit,) = cost(found, rows, parts)
        assert unit.unknown == (f"aten.{name}",)
        own = -(-rows // parts)
        assert unit.forward_flops == 2 * 6 * 4 * own + 2 * 4 * 4 * (rows if whole else own)


@pytest.mark.slow
def test_a_table_without_attention_is_wrong_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = traced("gpt", "bf16")
    before = cost(found, 6)
    for name in ("shardwise.measure.meta_run.COMPOSED", "shardwise.kernels.device_kernels.COMPOSED"):
        monkeypatch.setattr(name, {})
    after = cost(found, 6)
    assert [c.unknown for c in after] == [(), *[("aten.scaled_dot_product_attention.default",)] * 2, ()]
    assert before[1].saved_bytes != after[1].saved_bytes


def test_an_op_that_cannot_run_without_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands for its shape: what comes after it keeps its costs."""

    def fail(*_: Any, **__: Any) -> None:
        raise NotImplementedError

    found = traced("gpt")
    before = cost(found, 6)
    monkeypatch.setattr(module_under_test, "COMPOSED", {torch.ops.aten.scaled_dot_product_attention.default: fail})
    for parts in (1, 2):
        after = cost(found, 6, parts)
        assert after[1].unknown == ("aten.scaled_dot_product_attention.default",)
        assert after[1].weight_flops * parts == before[1].weight_flops
        assert after[1].saved_bytes * parts < before[1].saved_bytes


def test_a_model_that_was_not_captured_has_only_parameters() -> None:
    class Stubborn(MLP):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x * float(x.sum()), y)

    found = trace(Stubborn(), features())
    assert found.opaque is not None
    (unit,) = cost(found, 6)
    assert unit.parameters == 7 * 16 + 17 * 16 + 17 * 3 and unit.forward_flops == unit.saved_bytes == 0
    assert unit.unknown


def test_illegal_arguments_are_refused() -> None:
    found = traced("mlp")
    with pytest.raises(ConfigError, match="legal: cpu, gpu"):
        cost(found, 6, device="tpu")
    with pytest.raises(ConfigError, match="1 or more"):
        cost(found, 0)
    with pytest.raises(ConfigError, match="legal: at most 6"):
        cost(trace(MLP(), features(), rows=6), 7)
    assert cost(trace(MLP(), features(), rows=6), 6) == cost(found, 6)
