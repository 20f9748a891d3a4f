"""The own GPT and Llama against transformers' implementations and against their definitions."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.models import GPT, Llama, generate

torch.set_num_threads(1)
SIZES = {"vocabulary": 61, "width": 32, "layers": 2, "heads": 4, "context": 16}


def tokens(rows: int = 3, length: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def make(kind: str, **changes: object) -> torch.nn.Module:
    torch.manual_seed(0)
    model = (GPT if kind == "gpt" else Llama)(**{**SIZES, **changes})
    with torch.no_grad():  # so that no error hides behind a zero bias or a norm's weight of one
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_gpt_equals_transformers() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    ours = make("gpt").double()
    drop = {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    theirs = GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=16, activation_function="gelu", **drop)
    ).double()
    names = {
        "h.": "blocks.",
        "ln_f": "norm",
        "ln_1": "norm1",
        "ln_2": "norm2",
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.proj",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.proj",
        "transformer.": "",
    }
    state = ours.state_dict()
    for name, parameter in theirs.named_parameters():
        here = name
        for old, new in names.items():
            here = here.replace(old, new)
        value = state[here]
        parameter.data.copy_(value.T if ".c_" in name and value.dim() == 2 else value)
    ids = tokens()
    assert (ours(ids) - theirs(ids).logits).abs().max() < 1e-12


@pytest.mark.parametrize(("kv_heads", "tied"), [(4, False), (2, False), (1, True)])
def test_llama_equals_transformers(kv_heads: int, tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = make("llama", kv_heads=kv_heads, tied=tied, hidden=48).double()
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            max_position_embeddings=16,
            rms_norm_eps=1e-5,
            tie_word_embeddings=tied,
        )
    ).double()
    names = {
        "embed_tokens": "embedding",
        "layers": "blocks",
        "self_attn": "attention",
        "input_layernorm": "norm1",
        "post_attention_layernorm": "norm2",
        "model.": "",
    }
    copy_weights(theirs, ours, names)
    ids = tokens()
    # Their norm is in fp32 whatever the model's dtype.
    assert (ours(ids) - theirs(ids).logits).abs().max() < 2e-6


def copy_weights(theirs: nn.Module, ours: nn.Module, names: dict[str, str]) -> None:
    """Give a model the weights of ours, where parts of its names stand for parts of ours."""
    state = ours.state_dict()
    for name, parameter in theirs.named_parameters():
        here = name
        for old, new in names.items():
            here = here.replace(old, new)
        parameter.data.copy_(state[here])


def test_llama_with_experts_equals_mixtral() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    ours = make("llama", kv_heads=2, hidden=48, moe={"experts": 5, "top_k": 2}).double()
    config = MixtralConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, num_local_experts=5, num_experts_per_tok=2,
        sliding_window=None, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    )  # fmt: skip
    theirs = MixtralForCausalLM(config).double()
    theirs.set_experts_implementation("eager")
    names = {
        "embed_tokens": "embedding", "layers": "blocks", "self_attn": "attention", "input_layernorm": "norm1",
        "post_attention_layernorm": "norm2", "model.": "", "experts.gate_up_proj": "up", "experts.down_proj": "down",
    }  # fmt: skip
    copy_weights(theirs, ours, names)
    ids = tokens()
    assert (ours(ids) - theirs(ids).logits).abs().max() < 5e-6  # their norm and router are in fp32


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_experts_add_to_the_loss_in_training_alone(kind: str) -> None:
    model = make(kind, moe={"experts": 4, "z_weight": 0.1}).double()
    ids, labels = tokens(), tokens(seed=1)
    plain = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    assert model.training and model(ids, labels) > plain + 0.02
    assert abs(model.eval()(ids, labels) - plain) < 1e-12
    quiet = make(kind, moe={"experts": 4, "balance": None}).double()
    assert abs(quiet(ids, labels) - F.cross_entropy(quiet(ids).flatten(0, 1), labels.flatten())) < 1e-12


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_loss_is_the_mean_over_the_targets_that_count(kind: str) -> None:
    model, ids, labels = make(kind).double(), tokens(), tokens(seed=1)
    labels[0, 3:] = -100
    labels[2] = -100
    log_probabilities = model(ids).log_softmax(-1)
    counted = [(b, s) for b in range(3) for s in range(16) if labels[b, s] >= 0]
    mean = -sum(log_probabilities[b, s, labels[b, s]] for b, s in counted) / len(counted)
    assert len(counted) == 19
    assert abs(model(ids, labels) - mean) < 1e-12
    assert abs(model(ids, labels) - F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())) > 1e-3


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_token_sees_the_past_only(kind: str) -> None:
    model, ids = make(kind).double(), tokens()
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 61
    difference = (model(ids) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[:9].max() < 1e-14
    assert difference[9:].min() > 1e-6
    assert (model(ids[:, :5]) - model(ids)[:, :5]).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_positions_matter(kind: str) -> None:
    model = make(kind).double()
    ids = torch.tensor([[5, 9, 2, 7], [9, 5, 2, 7]])
    last = model(ids)[:, -1]
    assert (last[0] - last[1]).abs().max() > 1e-6


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize(("low", "expected"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_loss_is_in_fp32_at_least(kind: str, low: torch.dtype, expected: torch.dtype) -> None:
    model, ids = make(kind), tokens()
    truth = model(ids, ids).item()
    model.to(low)
    assert model(ids).dtype == low
    assert model(ids, ids).dtype == expected
    assert abs(model(ids, ids).item() - truth) < 0.03


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_no_rows(kind: str) -> None:
    assert make(kind)(tokens()[:0]).shape == (0, 16, 61)


def test_parameters_and_tying() -> None:
    gpt, llama, tied = make("gpt"), make("llama", kv_heads=2), make("llama", tied=True)
    block = 4 * 32 + 32 * 96 + 96 + 32 * 32 + 32 + 2 * 32 * 128 + 128 + 32
    assert sum(p.numel() for p in gpt.parameters()) == 61 * 32 + 16 * 32 + 2 * block + 2 * 32
    assert gpt.lm_head.weight is gpt.wte.weight
    block = 2 * 32 + 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 96
    assert sum(p.numel() for p in llama.parameters()) == 2 * 61 * 32 + 2 * block + 32
    assert llama.lm_head.weight is not llama.embedding.weight
    assert tied.lm_head.weight is tied.embedding.weight
    assert "rotary" not in llama.state_dict()
    assert dict(llama.named_buffers())["rotary"].shape == (2, 16, 8)


def test_initial_weights() -> None:
    torch.manual_seed(1)
    gpt = GPT(vocabulary=512, width=128, layers=8, heads=4, context=64)
    expected = {
        "wte.weight": 0.02,
        "blocks.3.attention.qkv.weight": 0.02,
        "blocks.3.mlp.proj.weight": 0.02 / 4,
    }
    for name, deviation in expected.items():
        assert gpt.get_parameter(name).std().item() == pytest.approx(deviation, rel=0.03)
    assert gpt.get_parameter("blocks.0.mlp.up.bias").abs().max() == 0
    assert gpt.get_parameter("norm.weight").eq(1).all()
    ids = torch.randint(0, 512, (4, 64))
    assert gpt(ids, ids.roll(1)).item() == pytest.approx(math.log(512), abs=0.2)


def test_dropout_only_in_training() -> None:
    model, ids = make("gpt", dropout=0.3), tokens()
    assert (model(ids) - model(ids)).abs().max() > 1e-3
    model.eval()
    assert torch.equal(model(ids), model(ids))
    assert torch.equal(model(ids), make("gpt").eval()(ids))


@pytest.mark.parametrize(
    ("model", "sizes"), [(GPT, {"width": 30}), (Llama, {"width": 36, "heads": 12}), (Llama, {"kv_heads": 3})]
)
def test_sizes_that_do_not_fit(model: type, sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="multiple"):
        model(**{**SIZES, **sizes})


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_export_with_any_number_of_rows(kind: str) -> None:
    model, ids = make(kind), tokens()
    rows = {0: torch.export.Dim.DYNAMIC}
    inputs = {"input_ids": ids, "labels": tokens(seed=2)}
    program = torch.export.export(
        model, (), inputs, dynamic_shapes={"input_ids": rows, "labels": rows}, strict=False
    ).module()
    for count in (1, 2, 7):
        batch = {"input_ids": tokens(count, seed=3), "labels": tokens(count, seed=4)}
        assert abs(program(**batch) - model(**batch)) < 1e-6


def test_generate() -> None:
    model, ids = make("gpt", dropout=0.5), tokens(2, 3)
    model.drop.eval()
    out = generate(model, ids, 20, temperature=0)
    assert out.shape == (2, 23)
    assert torch.equal(out[:, :3], ids)
    assert model.training and not model.drop.training
    model.eval()
    for place in range(3, 23):  # the window slides past the context of 16
        likeliest = model(out[:, max(0, place - 16) : place])[:, -1].argmax(-1)
        assert torch.equal(out[:, place], likeliest)


def test_generate_samples_from_the_distribution() -> None:
    model, ids = make("gpt"), torch.tensor([[7]]).expand(4000, 1)
    draws = [generate(model, ids, 1, 0.7, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    probabilities = torch.softmax(model(ids[:1])[0, -1] / 0.7, -1)
    observed = torch.bincount(draws[0][:, 1], minlength=61) / 4000
    assert (observed - probabilities).abs().sum() < 0.12


def test_generate_takes_outputs_with_logits() -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.context = make("llama"), 16

        def forward(self, input_ids: torch.Tensor) -> object:
            return type("Output", (), {"logits": self.inner(input_ids)})

    ids = tokens(1, 4)
    assert torch.equal(generate(Wrapped(), ids, 5, 0), generate(make("llama"), ids, 5, 0))


# --- documents ---


def packed(lengths: list[int], seed: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A row of documents, their labels (-100 at the ends), and which document each token is of."""
    ids = tokens(1, sum(lengths), seed)
    labels, documents = ids.roll(-1, 1), torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    labels[0, torch.tensor(lengths).cumsum(0) - 1] = -100
    return ids, labels, documents.unsqueeze(0)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("lengths", [[16], [5, 11], [1, 1, 9, 5], [2, 2, 2, 2, 8]])
def test_packed_documents_are_as_each_alone(kind: str, lengths: list[int]) -> None:
    model = make(kind).double()
    if kind == "llama":  # the table is rounded to fp32, and so are the differences of positions that it stands for
        frequencies = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.double) / 8)
        angles = torch.outer(torch.arange(16, dtype=torch.double), frequencies).repeat(1, 2)
        assert (model.rotary - torch.stack((angles.cos(), angles.sin()))).abs().max() < 1e-6
        model.rotary = torch.stack((angles.cos(), angles.sin()))
    ids, labels, documents = packed(lengths)
    names = [name for name, _ in model.named_parameters()]
    loss = model(ids, labels, documents)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    targets = int((labels >= 0).sum())
    alone, sums = torch.zeros((), dtype=torch.double), [torch.zeros_like(p) for p in model.parameters()]
    for start, length in zip([sum(lengths[:n]) for n in range(len(lengths))], lengths, strict=True):
        part = slice(start, start + length)
        assert (model(ids, None, documents)[:, part] - model(ids[:, part])).abs().max() < 1e-12
        if length > 1:
            one = model(ids[:, part], labels[:, part]) * (length - 1) / targets
            alone += one.detach()
            found = torch.autograd.grad(one, list(model.parameters()), allow_unused=True)
            sums = [a if b is None else a + b for a, b in zip(sums, found, strict=True)]
    assert abs(loss - alone) < 1e-10
    for name, ours, theirs in zip(names, gradients, sums, strict=True):
        assert (ours - theirs).abs().max() < 1e-10, name
    if len(lengths) > 1:
        assert (model(ids, labels) - loss).abs() > 1e-4


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_export_with_documents(kind: str) -> None:
    model = make(kind)
    rows = {0: torch.export.Dim.DYNAMIC}

    def batch(count: int) -> dict[str, torch.Tensor]:
        parts = [packed([n + 1, 15 - n], seed=n) for n in range(count)]
        return dict(zip(("input_ids", "labels", "documents"), map(torch.cat, zip(*parts, strict=True)), strict=True))

    example = batch(3)
    program = torch.export.export(
        model, (), example, dynamic_shapes=dict.fromkeys(example, rows), strict=False
    ).module()
    for count in (1, 2, 7):
        assert abs(program(**batch(count)) - model(**batch(count))) < 1e-6
