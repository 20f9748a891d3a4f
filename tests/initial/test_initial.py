"""Initial weights from a record: the same distributions as torch's, keyed by name, a parameter at a time."""

from __future__ import annotations

import copy
import math
import random
import threading
from collections.abc import Callable

import numpy
import psutil
import pytest
import torch
import transformers
from torch import Tensor, nn

from shardwise.core.errors import ShardwiseError
from shardwise.initial.initial import Recorded, named_tensors, record
from shardwise.initial.recording import Memory, RecordedOperand, RecordedOperation

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}


def llama(**changes: object) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED | changes))


def gpt2() -> nn.Module:
    sizes = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**GROUPED, num_local_experts=4))


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, head_dim=8))


def vit() -> nn.Module:
    sizes = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=3)
    )


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1])
    return transformers.ResNetForImageClassification(config)


class Zoo(nn.Module):
    """Every way to make a tensor that we could think of."""

    def __init__(self) -> None:
        super().__init__()
        self.orthogonal_wide = nn.Parameter(nn.init.orthogonal_(torch.empty(20, 30)))
        self.orthogonal_tall = nn.Parameter(nn.init.orthogonal_(torch.empty(30, 20)))
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(20, 30), std=0.5, a=-0.6, b=0.6))
        self.truncated_tail = nn.Parameter(nn.init.trunc_normal_(torch.empty(20, 30), a=1.5, b=2.0))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(20, 30), 0.1))
        self.dirac = nn.Parameter(nn.init.dirac_(torch.empty(8, 8, 3)))
        self.eye = nn.Parameter(nn.init.eye_(torch.empty(8, 8)))
        self.xavier = nn.Parameter(nn.init.xavier_normal_(torch.empty(20, 30)))
        self.scaled = nn.Parameter(torch.randn(20, 30) * 0.02)
        self.like = nn.Parameter(torch.rand_like(torch.zeros(20, 30)) - 0.5)
        self.listed = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.views = nn.Parameter(torch.empty(6, 4))
        self.views.data.normal_()
        self.views.data[1].fill_(2)
        with torch.no_grad():
            self.views[:, 2] = torch.arange(6.0)
            self.views.view(2, 12)[0, :4].zero_()
        self.numpy = nn.Parameter(torch.from_numpy(numpy.arange(6.0)))
        self.pointed = nn.Parameter(torch.empty(6, dtype=torch.float64))
        self.pointed.data = torch.from_numpy(numpy.arange(6.0) * 2)
        self.half = nn.Linear(20, 30).to(torch.bfloat16)
        self.embedding = nn.Embedding(40, 16, padding_idx=3)
        self.register_buffer("draws", torch.randint(0, 10, (300,)), persistent=False)
        above = torch.ones(5, 5).triu(1).bool()
        self.register_buffer("mask", torch.zeros(5, 5).masked_fill(above, float("-inf")))
        self.register_buffer("rotary", torch.polar(torch.ones(8), torch.linspace(0, 1, 8)))
        self.where = above.nonzero()
        self.shifted = torch.from_numpy(self.where.numpy() + 1)
        self.drop_rates = [rate.item() for rate in torch.linspace(0, 0.4, 5)]
        self.doubled = [x * 2 for x in torch.arange(3).tolist()]
        self.permutation = torch.randperm(250)
        self.cache = [torch.arange(4).float(), {"one": torch.ones(2)}]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(30, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 8)),
    "convolution": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 2)),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2),
    "lstm": lambda: nn.LSTM(16, 32, 2),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(20, 30)),
    "zoo": Zoo,
    "llama": llama,
    "llama_tied": lambda: llama(tie_word_embeddings=True),
    "gpt2": gpt2,
    "bert": bert,
    "mixtral": mixtral,
    "qwen3": qwen3,
    "vit": vit,
    "resnet": resnet,
}


def recorded(constructor: Callable[[], nn.Module]) -> Recorded:
    result = record(constructor)
    assert result.reason is None
    assert {tensor.device.type for tensor in result.tensors.values()} == {"meta"}
    return result


def same_distribution(ours: Tensor, torchs: Tensor) -> bool:
    """Mean and standard deviation within five standard errors of a difference."""
    a, b = ours.detach().double().flatten(), torchs.detach().double().flatten()
    error = float(b.std()) * math.sqrt(2 / b.numel())
    return float((a.mean() - b.mean()).abs()) < 5 * error and float((a.std() - b.std()).abs()) < 5 * error


@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_the_constructor(name: str) -> None:
    constructor = MODELS[name]
    result = recorded(constructor)
    module = result.materialise_all(3, "cpu")
    torch.manual_seed(0)
    ours, torchs = named_tensors(module), named_tensors(constructor())
    assert list(ours) == list(torchs) == list(result.tensors)
    drawn = 0
    for key, value in ours.items():
        alone, other = result.materialise(key, 3, "cpu"), result.materialise(key, 4, "cpu")
        assert torch.equal(alone, value.detach()), key
        assert (value.shape, value.dtype, value.stride()) == (alone.shape, alone.dtype, alone.stride()), key
        assert value.requires_grad == torchs[key].requires_grad == result.tensors[key].requires_grad
        if torch.equal(alone, other):
            assert torch.equal(value, torchs[key]), f"{key} is not random: it must be what torch makes"
        elif value.numel() >= 200 and key != "permutation":
            drawn += 1
            assert same_distribution(value, torchs[key]), key
    assert drawn >= 1
    for key in ours:
        for twin in ours:
            tied = torchs[key] is torchs[twin]
            assert (ours[key] is ours[twin]) == (result.tensors[key] is result.tensors[twin]) == tied


def test_the_comparison_of_distributions_can_fail() -> None:
    a = torch.randn(1000)
    assert same_distribution(a, torch.randn(1000))
    assert not same_distribution(a * 1.3, torch.randn(1000))
    assert not same_distribution(a + 0.3, torch.randn(1000))


def test_the_deterministic_parts_are_there() -> None:
    result = recorded(lambda: llama(pad_token_id=5))
    assert torch.equal(result.materialise("model.norm.weight", 0, "cpu"), torch.ones(32))
    inv_freq = result.materialise("model.rotary_emb.inv_freq", 0, "cpu")
    assert torch.equal(inv_freq, 10000.0 ** -(torch.arange(0, 8, 2).float() / 8))
    embedding = result.materialise("model.embed_tokens.weight", 0, "cpu")
    assert not embedding[5].any()
    assert embedding[4].any()
    projection = recorded(gpt2).materialise("transformer.h.1.mlp.c_proj.weight", 0, "cpu")
    assert float(projection.std()) == pytest.approx(0.02 / math.sqrt(2 * 2), rel=0.04)
    bound = recorded(Zoo).materialise("truncated", 1, "cpu").abs().max()
    assert 0.55 < float(bound) <= 0.6
    module = recorded(Zoo).materialise_all(0, "cpu")
    assert module.drop_rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4], abs=1e-7)
    assert module.doubled == [0, 2, 4]
    gram = module.orthogonal_wide @ module.orthogonal_wide.T
    assert torch.allclose(gram, torch.eye(20), atol=1e-6)


def test_numbers_depend_on_seed_and_name_only() -> None:
    class Pair(nn.Module):
        def __init__(self, first: str, second: str, size: int = 20) -> None:
            super().__init__()
            for name in (first, second):
                self.add_module(name, nn.Linear(size, 10))

    one, other, larger = (
        recorded(lambda: Pair("a", "b")),
        recorded(lambda: Pair("b", "c")),
        recorded(lambda: Pair("b", "a", 21)),
    )
    b = one.materialise("b.weight", 7, "cpu")
    assert torch.equal(b, other.materialise("b.weight", 7, "cpu"))
    assert torch.equal(b, one.materialise("b.weight", 7, "cpu"))
    assert not torch.equal(b, one.materialise("b.weight", 8, "cpu"))
    assert not torch.equal(b, one.materialise("a.weight", 7, "cpu"))
    assert larger.materialise("b.weight", 7, "cpu").shape == (10, 21)

    # What a later draw overwrites leaves no trace.
    class Again(Pair):
        def __init__(self) -> None:
            super().__init__("a", "b")
            nn.init.normal_(self.b.weight)
            self.b.reset_parameters()

    assert torch.equal(b, recorded(Again).materialise("b.weight", 7, "cpu"))


def test_draws_of_one_tensor_differ() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.cat([torch.randn(50), torch.randn(50)]))

    value = recorded(Twice).materialise("weight", 0, "cpu")
    assert not torch.equal(value[:50], value[50:])


def test_copies_stay_equal() -> None:
    outside = torch.randn(4, 4)

    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Linear(4, 4)
            self.teacher = copy.deepcopy(self.student)
            self.loaded = nn.Linear(4, 4)
            self.loaded.load_state_dict(self.student.state_dict())
            self.given = nn.Parameter(outside)
            self.row = nn.Parameter(outside[2])
            self.register_buffer("twofold", outside * 2)
            self.noise = torch.randn(4)
            self.same_noise = copy.deepcopy(self.noise)
            self.tied = self.student.weight

    before = outside.clone()
    result = recorded(Copies)
    module = result.materialise_all(1, "cpu")
    for name in ("teacher.weight", "loaded.weight", "tied"):
        assert torch.equal(result.materialise(name, 1, "cpu"), module.student.weight)
    assert module.tied is module.student.weight
    assert result.module.tied is result.module.student.weight
    assert torch.equal(result.materialise("row", 1, "cpu"), outside[2])
    assert torch.equal(result.materialise("twofold", 1, "cpu"), outside * 2)
    assert torch.equal(result.materialise("same_noise", 1, "cpu"), result.materialise("noise", 1, "cpu"))
    assert result.materialise("row", 1, "cpu").untyped_storage().nbytes() == 4 * 4
    # Shared draws are keyed by the first name that needs them.
    alone = recorded(lambda: nn.ModuleDict({"student": nn.Linear(4, 4)}))
    assert torch.equal(alone.materialise("student.bias", 1, "cpu"), module.student.bias)
    result.materialise("given", 1, "cpu").zero_()
    assert torch.equal(outside, before)
    assert torch.equal(result.materialise("given", 1, "cpu"), before)


def test_order_of_writes_and_reads() -> None:
    class Order(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source = nn.Parameter(torch.full((4,), 1.0))
            self.early = nn.Parameter(self.source.detach().clone())
            with torch.no_grad():
                self.source.mul_(3)
                self.late = nn.Parameter(self.source.clone())
                self.source.copy_(self.source.flip(0).cumsum(0))  # reads what it overwrites
                self.source[0] = 100
                self.filled = nn.Parameter(self.late * 2)
                self.filled[1] = 7
                self.filled.fill_(self.filled[1])  # so does this
            self.never = nn.Parameter(torch.empty(3))

    result = recorded(Order)
    for name, expected in (
        ("early", [1.0] * 4),
        ("late", [3.0] * 4),
        ("source", [100.0, 6.0, 9.0, 12.0]),
        ("filled", [7.0] * 4),
        ("never", [0.0] * 3),
    ):
        assert result.materialise(name, 0, "cpu").tolist() == expected
        assert result.materialise_all(0, "cpu").get_parameter(name).tolist() == expected


def test_a_kernel_may_lay_its_result_out_otherwise() -> None:
    ordered = RecordedOperand(0, torch.float32, (2, 3), (3, 1), 0)
    values = torch.arange(6.0).view(2, 3)
    transposed = RecordedOperation(lambda: values.T.contiguous().T, (), {}, ((0, ordered),), (), torch.float32)
    memory = Memory([24])
    memory.run(transposed, None)
    assert memory.tensor(ordered).tolist() == values.tolist()
    # Or return its argument, where the record has a copy.
    copied = RecordedOperand(1, torch.float32, (2, 3), (3, 1), 0)
    memory = Memory([24, 24])
    memory.tensor(ordered).copy_(values)
    memory.run(RecordedOperation(lambda x: x, (ordered,), {}, ((0, copied),), (), torch.float32), None)
    memory.tensor(ordered).zero_()
    assert memory.tensor(copied).tolist() == values.tolist()


def test_unknown_names() -> None:
    result = recorded(lambda: nn.Linear(30, 20))
    with pytest.raises(ShardwiseError, match=r'"wieght" is no tensor.*Did you mean "weight"'):
        result.materialise("wieght", 0, "cpu")


@pytest.mark.slow
def test_a_large_model_takes_no_memory() -> None:
    sizes = {"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    before = psutil.Process().memory_info().rss
    result = recorded(lambda: llama(**sizes, num_attention_heads=64, num_key_value_heads=8))
    assert sum(parameter.numel() for parameter in result.module.parameters()) == 70_553_706_496
    value = result.materialise("model.layers.79.self_attn.k_proj.weight", 0, "cpu")
    assert value.shape == (1024, 8192)
    assert float(value.std()) == pytest.approx(0.02, rel=1e-3)
    assert psutil.Process().memory_info().rss - before < 200 * 2**20


def in_thread(module: nn.Module) -> None:
    thread = threading.Thread(target=lambda: module.weight.data.copy_(torch.randn(20, 20)))
    thread.start()
    thread.join()


def swallowing(module: nn.Module) -> None:
    try:
        module.weight.data.normal_().sum().item()
    except Exception:
        module.weight.data.zero_()


IMPOSSIBLE: dict[str, tuple[str, Callable[[nn.Module], object]]] = {
    "item": ("reads the value of a random tensor", lambda m: m.weight.data.mul_(torch.rand(1).item())),
    "swallowed": ("reads the value of a random tensor", swallowing),
    "numpy": ("Python's or numpy's", lambda m: m.weight.data.fill_(numpy.random.rand())),
    "python": ("Python's or numpy's", lambda m: m.weight.data.fill_(random.random())),
    "seed": ("seeds torch's", lambda m: m.weight.data.normal_() if torch.manual_seed(1) else None),
    "generator": ("generator of its own", lambda m: m.weight.data.normal_(generator=torch.Generator())),
    "truncated": (
        "generator of its own",
        lambda m: nn.init.trunc_normal_(m.weight, generator=torch.Generator()),
    ),
    "write to numpy": ("read-only", lambda m: m.weight.data.zero_().numpy().fill(1)),
    "resize": ("resizes", lambda m: m.weight.data.resize_(30, 30).zero_()),
    "sparse": ("sparse", lambda m: setattr(m, "sparse", torch.eye(3).to_sparse())),
    "lazy": ("UninitializedParameter", lambda m: m.add_module("lazy", nn.LazyLinear(3))),
    "meta": ("meta device itself", lambda m: nn.Linear(3, 3, device="meta").to_empty(device="cpu")),
    "thread": ("seeds torch's", in_thread),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_cannot_be_recorded_is_constructed_plainly(case: str) -> None:
    reason, act = IMPOSSIBLE[case]

    def construct() -> nn.Module:
        module = nn.Linear(20, 20)
        act(module)
        return module

    states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    result = record(construct, seed=5)
    assert result.reason is not None
    assert reason in result.reason
    for seed in (5, 6):
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        expected = construct()
        assert torch.equal(result.materialise("bias", seed, "cpu"), expected.bias)
        if case != "thread":
            assert torch.equal(result.materialise("weight", seed, "cpu"), expected.weight)
            assert torch.equal(result.materialise_all(seed, "cpu").weight, expected.weight)
    random.setstate(states[0])
    torch.set_rng_state(states[2])
    record(construct)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_plain_is_torchs_own() -> None:
    result = record(gpt2, plain=True, seed=1)
    assert result.reason == "plain construction was asked for"
    torch.manual_seed(2)
    expected = gpt2().state_dict()
    built = result.materialise_all(2, "cpu").state_dict()
    assert all(torch.equal(built[name], expected[name]) for name in expected)
    assert torch.equal(result.materialise("lm_head.weight", 2, "cpu"), expected["lm_head.weight"])


def test_a_checkpoint_is_loaded_and_its_gaps_drawn(tmp_path) -> None:
    saved = llama()
    saved.save_pretrained(tmp_path)
    result = record(lambda: transformers.LlamaForSequenceClassification.from_pretrained(tmp_path, num_labels=8))
    for name, parameter in saved.model.named_parameters():
        assert torch.equal(result.materialise(f"model.{name}", 0, "cpu"), parameter)
    assert float(result.materialise("score.weight", 0, "cpu").std()) == pytest.approx(0.02, rel=0.3)


def test_a_ready_made_module_is_left_alone() -> None:
    module = nn.Linear(3, 3)
    weight = module.weight
    result = record(lambda: module)
    assert result.reason is not None
    assert "exist already" in result.reason
    assert module.weight is weight
    assert weight.device.type == "cpu"
    assert torch.equal(result.materialise("weight", 0, "cpu"), weight)


def test_the_constructors_own_error_is_the_users() -> None:
    def broken() -> nn.Module:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        record(broken)


def test_a_constructor_that_changes_its_mind_is_found() -> None:
    calls: list[int] = []

    def construct() -> nn.Module:
        calls.append(1)
        return nn.Linear(4, 4, bias=len(calls) > 1)

    result = recorded(construct)
    with pytest.raises(ShardwiseError, match="not the same each time"):
        result.materialise_all(0, "cpu")


def test_attributes_in_shared_containers_are_not_written_to() -> None:
    shared = [torch.ones(3), torch.zeros(3)]

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.first = shared
            self.second = shared

    result = recorded(Holder)
    assert shared[0].device.type == "cpu"
    assert result.module.first is result.module.second
    assert torch.equal(result.materialise("first.0", 0, "cpu"), torch.ones(3))


def test_the_dtype_of_the_time_is_kept() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.set_default_dtype(torch.float64)
            self.weight = nn.Parameter(torch.zeros(2))
            self.thirds = torch.arange(4) / 3
            torch.set_default_dtype(torch.float32)

    thirds = recorded(Wide).materialise("thirds", 0, "cpu")
    assert thirds.dtype == torch.float64
    assert thirds.tolist() == [0.0, 1 / 3, 2 / 3, 1.0]
    assert torch.get_default_dtype() == torch.float32
