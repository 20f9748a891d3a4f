"""The oracle against hand-written loops: it must be right by itself, since everything else is measured against it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.errors import ShardwiseError
from shardwise.core.optim import OptimizerChoice
from shardwise.ops.keyed_random import keyed_mask, keyed_normal, keyed_uniform
from shardwise.verify.oracle import Oracle, plain_optimizer
from total_error import total_error

ADAMW = plain_optimizer(OptimizerChoice(name="adamw", lr=1e-2, weight_decay=0.1))
VOCAB, WIDTH, LENGTH = 11, 8, 5


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    assert torch.get_default_dtype() is torch.float32  # the oracle gives it back


class Tiny(nn.Module):
    """A language model with tied weights, an embedding, a norm, dropout and masked targets."""

    def __init__(self, p: float = 0.0, kind: Callable[..., nn.Module] = nn.Dropout) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = kind(p)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.drop(self.norm(self.hidden(self.embed(tokens)).tanh()))
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def language_batch(rows: int = 6) -> dict[str, Tensor]:
    """Rows with very unequal numbers of masked targets."""
    tokens = torch.randint(0, VOCAB, (rows, LENGTH))
    labels = torch.randint(0, VOCAB, (rows, LENGTH))
    for row in range(rows):
        labels[row, : (3 * row) % (LENGTH + 1)] = -100
    return {"tokens": tokens, "labels": labels}


def largest(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Return the largest difference in any tensor, in units of the tensor's largest value where that is above 1: the
    sums of three microbatches may round to a neighbour of one sum, which lies 4.4e-16 away for values above 2."""
    assert ours.keys() == truth.keys()
    return max(float((ours[k] - truth[k]).abs().max() / truth[k].abs().max().clamp(min=1)) for k in truth)


# ---- against plain loops -------------------------------------------------------------------------


def test_three_adamw_steps_equal_a_plain_loop() -> None:
    model = Tiny()
    oracle = Oracle(model, optimizer=ADAMW, clip_norm=0.05)
    plain = copy.deepcopy(model).double()
    named = [(n, p) for n, p in plain.named_parameters()]
    groups = [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for step in range(3):
        batch = language_batch()
        result = oracle.step(batch, 1e-2 / (step + 1))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        optimizer.zero_grad()
        loss = plain(**batch)["loss"]
        loss.backward()
        assert result.gradients.keys() == {n for n, p in named if not n.startswith("unused")}
        assert largest(result.gradients, {n: p.grad for n, p in named if p.grad is not None}) == 0
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        optimizer.step()
        assert result.step == step and result.loss == loss.item()
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-14) and result.grad_norm > 0.05
        assert largest(result.parameters, {n: p.detach() for n, p in named}) < 1e-15
    assert torch.equal(oracle.parameters()["unused.weight"], model.unused.weight.double())
    assert torch.equal(model.embed.weight, plain.embed.weight.float()) is False  # the user's module was not trained


@pytest.mark.parametrize("name", ["adamw", "sgd", "adam", "adagrad", "rmsprop", "nadam", "radam"])
def test_plain_optimizer_is_torch_optim(name: Any) -> None:
    options: dict[str, Any] = {"momentum": 0.9, "nesterov": True} if name == "sgd" else {}
    choice = OptimizerChoice(name=name, lr=0.03, weight_decay=0.2, **options)
    model = nn.Linear(3, 2)
    oracle = Oracle(model, lambda y, b: (y**2).mean(), plain_optimizer(choice))
    plain = copy.deepcopy(model).double()
    groups = [{"params": [plain.weight]}, {"params": [plain.bias], "weight_decay": 0}]
    optimizer: Any = {k.lower(): v for k, v in vars(torch.optim).items()}[name](
        groups, lr=0.03, weight_decay=0.2, **options
    )
    for _ in range(3):
        x = torch.randn(4, 3)
        result = oracle.step({"input": x})
        optimizer.zero_grad()
        (plain(x.double()) ** 2).mean().backward()
        optimizer.step()
    assert largest(result.parameters, {n: p.detach() for n, p in plain.named_parameters()}) < 1e-15


@pytest.mark.parametrize("microbatches", [2, 3, 5])
def test_microbatches_with_unequal_masks_equal_one(microbatches: int) -> None:
    model, batch = Tiny(), language_batch(rows=7)
    batch["labels"][0] = -100  # with 5 microbatches the first has no target at all
    one = Oracle(model).step(batch)
    many = Oracle(model, microbatches=microbatches).step(batch)
    assert many.loss == pytest.approx(one.loss, rel=1e-14)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-13)
    assert largest(many.gradients, one.gradients) < 1e-15
    counts = (batch["labels"] != -100).sum(1)
    assert counts.unique().numel() > 2  # weighing by rows would show


def test_losses_that_are_no_mean_cross_entropy_weigh_by_rows() -> None:
    """Neither a sum nor a multiple of a cross-entropy is one; five rows in two microbatches weigh 2/5 and 3/5."""
    model = nn.Linear(4, 3)
    batch = {"input": torch.randn(5, 4), "labels": torch.tensor([0, 1, -100, -100, 2])}

    def entropy(y: Tensor, fields: Any, **kw: Any) -> Tensor:
        return F.cross_entropy(y, fields["labels"], **kw)

    losses: dict[str, Callable[[Tensor, Any], Tensor]] = {
        "mean square": lambda y, b: (y**2).mean(),
        "twice": lambda y, b: 2 * entropy(y, b),
        "plus": lambda y, b: entropy(y, b) + 0.1 * (y**2).mean(),
        "sum": lambda y, b: entropy(y, b, reduction="sum"),
    }
    wide = copy.deepcopy(model).double()
    for name, loss in losses.items():
        result = Oracle(model, loss, microbatches=2).step(batch)
        halves = [
            {k: (v[a:b].double() if k == "input" else v[a:b]) for k, v in batch.items()} for a, b in ((0, 2), (2, 5))
        ]
        expected = sum(w * loss(wide(h["input"]), h).item() for w, h in zip((2 / 5, 3 / 5), halves, strict=True))
        assert result.loss == pytest.approx(expected, rel=1e-14), name
    for same in (
        entropy,
        lambda y, b: entropy(y, b).float().clone().reshape(1),
        lambda y, b: F.nll_loss(y.log_softmax(-1), b["labels"]),
    ):
        result = Oracle(model, same, microbatches=2).step(batch)
        expected = F.cross_entropy(wide(batch["input"].double()), batch["labels"]).item()
        assert result.loss == pytest.approx(expected, rel=1e-14)


def test_class_probabilities_count_rows() -> None:
    model = nn.Linear(4, 3)
    batch = {"input": torch.randn(5, 4), "labels": torch.rand(5, 3).softmax(-1)}
    loss = lambda y, b: F.cross_entropy(y, b["labels"])  # noqa: E731
    one, many = (Oracle(model, loss, microbatches=m).step(batch) for m in (1, 3))
    assert many.loss == pytest.approx(one.loss, rel=1e-14) and largest(many.gradients, one.gradients) < 1e-15


def test_batch_norm_statistics_follow_the_microbatches() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 1))
    batch = {"input": torch.randn(6, 2, 4, 4)}
    result = Oracle(model, lambda y, b: (y**2).mean(), microbatches=2).step(batch)
    plain = copy.deepcopy(model).double()
    for part in batch["input"].double().split(3):
        ((plain(part) ** 2).mean() / 2).backward()
    assert largest(result.buffers, dict(plain.named_buffers())) < 1e-15  # the trial run left no trace
    assert largest(result.gradients, {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}) < 1e-15


def test_tied_weights_and_shared_buffers_stay_tied() -> None:
    model = Tiny()
    oracle = Oracle(model)
    result = oracle.step(language_batch())
    assert oracle.module.head.weight is oracle.module.embed.weight
    assert "embed.weight" in result.gradients and "head.weight" not in result.gradients
    norm = math.sqrt(sum(float((g**2).sum()) for g in result.gradients.values()))
    assert result.grad_norm == pytest.approx(norm, rel=1e-14)  # counted once


def test_a_planted_error_shows() -> None:
    model, batch = Tiny(), language_batch()
    truth = Oracle(model, optimizer=ADAMW).step(batch)
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong.norm.bias[0] += 1e-6
    assert largest(Oracle(wrong, optimizer=ADAMW).step(batch).gradients, truth.gradients) > 1e-9
    batch["labels"][1, -1] = -100
    assert abs(Oracle(model, optimizer=ADAMW).step(batch).loss - truth.loss) > 1e-6


# ---- random functions ----------------------------------------------------------------------------


class Noisy(nn.Module):
    """Applies a function to its input and a weight; the loss is a mean over rows."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y = self.function(x * self.weight)
        return (y * torch.linspace(1, 2, y.shape[-1])).mean()


ROWS = 7
RANDOM: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "dropout": ((3, 4), lambda x: F.dropout(x, 0.4)),
    "dropout in place": ((3, 4), lambda x: F.dropout(x * 1, 0.4, inplace=True)),
    "torch.dropout": ((3, 4), lambda x: torch.dropout(x, 0.4, True)),
    "native_dropout": ((3, 4), lambda x: torch.native_dropout(x, 0.4, True)[0]),
    "batch second": ((3, 4), lambda x: F.dropout(x.transpose(0, 1), 0.4).transpose(0, 1)),
    "rows x minor": ((3, 4), lambda x: F.dropout(x.flatten(0, 1), 0.4)),
    "dropout1d": ((3, 4), lambda x: F.dropout1d(x, 0.4)),
    "dropout2d": ((3, 4, 4), lambda x: F.dropout2d(x, 0.4)),
    "dropout3d": ((3, 2, 4, 4), lambda x: F.dropout3d(x, 0.4)),
    "alpha": ((3, 4), lambda x: F.alpha_dropout(x, 0.4, training=True)),
    "feature alpha": ((3, 4), lambda x: F.feature_alpha_dropout(x, 0.4, training=True)),
    "attention": (
        (2, 5, 4),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4, is_causal=True),
    ),
    "bernoulli": ((3, 4), lambda x: x * torch.bernoulli(x.detach().sigmoid())),
    "bernoulli p": ((3, 4), lambda x: x * torch.bernoulli(x.detach(), 0.3)),
    "bernoulli_": ((3, 4), lambda x: x * torch.empty_like(x).bernoulli_(0.3)),
    "uniform_": ((3, 4), lambda x: x * torch.empty_like(x).uniform_(-1, 2)),
    "normal_": ((3, 4), lambda x: x * torch.empty_like(x).normal_(1, 2)),
    "exponential_": ((3, 4), lambda x: x * torch.empty_like(x).exponential_(2.5)),
    "geometric_": ((3, 4), lambda x: x * torch.empty_like(x).geometric_(0.3)),
    "log_normal_": ((3, 4), lambda x: x * torch.empty_like(x).log_normal_(0.2, 0.3)),
    "cauchy_": ((3, 4), lambda x: x * torch.empty_like(x).cauchy_(0.5, 2.0).atan()),
    "trunc_normal_": ((3, 4), lambda x: x * nn.init.trunc_normal_(torch.empty_like(x), 0.5, 2.0, -1.0, 4.0)),
    "trunc_normal_ of a tail": ((3, 4), lambda x: x * nn.init.trunc_normal_(torch.empty_like(x), a=1.5, b=3.0)),
    "rrelu": ((3, 4), lambda x: F.rrelu(x - 2, 0.1, 0.7, training=True)),
    "rrelu_": ((3, 4), lambda x: F.rrelu(x - 2, training=True, inplace=True)),
    "gumbel_softmax": ((3, 4), lambda x: x * F.gumbel_softmax(x, 0.5)),
    "rand": ((3, 4), lambda x: x * torch.rand(x.shape)),
    "rand sizes": ((3, 4), lambda x: x * torch.rand(x.shape[0], 3, 4, device=x.device)),
    "randn_like": ((3, 4), lambda x: x + torch.randn_like(x)),
    "rand_like": ((3, 4), lambda x: x + torch.rand_like(x, dtype=torch.float32)),
    "randint": ((3, 4), lambda x: x * torch.randint(-2, 5, x.shape)),
    "randint high": ((3, 4), lambda x: x * torch.randint(high=9, size=x.shape)),
    "randint_like": ((3, 4), lambda x: x * torch.randint_like(x, 9)),
    "normal": ((3, 4), lambda x: x * torch.normal(x.detach(), 2.0)),
    "normal size": ((3, 4), lambda x: x * torch.normal(1.0, 2.0, x.shape)),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_functions_do_not_depend_on_the_microbatches(name: str) -> None:
    shape, function = RANDOM[name]
    model, batch = Noisy(function), {"x": torch.randn(ROWS, *shape)}
    before = torch.get_rng_state()
    one, two, three = (Oracle(model, microbatches=m).step(batch) for m in (1, 2, 3))
    assert torch.equal(torch.get_rng_state(), before)
    for many in (two, three, Oracle(model, turns=2).step(batch)):
        assert many.loss == pytest.approx(one.loss, rel=1e-13)
        assert largest(many.gradients, one.gradients) < 1e-14
    other = Oracle(model, seed=1).step(batch)
    assert abs(other.loss - one.loss) > 1e-6  # something was drawn


@pytest.mark.parametrize("name", RANDOM)
def test_keyed_random_functions_have_the_moments_of_torchs(name: str) -> None:
    """Mean and deviation over many elements as torch draws them: the formula of each function is torch's."""
    shape, function = RANDOM[name]
    model = Noisy(function)
    batch = {"x": torch.ones(4000, *shape) + torch.arange(4)}
    seen: list[Tensor] = []
    model.function = lambda x: seen.append(function(x)) or seen[-1]  # type: ignore[func-returns-value]
    with torch.no_grad():
        model.weight.fill_(0.7)
        model(**batch)
    torchs = seen.pop().double()
    Oracle(model).step(batch)
    ours = seen.pop().detach()
    assert ours.shape == torchs.shape and ours.dtype is torch.float64
    scale = float(torchs.std())
    assert abs(float(ours.mean() - torchs.mean())) < 0.05 * scale
    assert abs(float(ours.std()) / scale - 1) < 0.05


@pytest.mark.parametrize("microbatches", [1, 3])
def test_rows_that_are_turned_keep_their_random_numbers(microbatches: int) -> None:
    batch = language_batch(7)
    module = Tiny(0.5)
    each = [Oracle(module, None, ADAMW, seed=3, microbatches=microbatches, turns=turns) for turns in (0, 1, 2)]
    for _ in range(2):
        one, *others = (oracle.step(batch) for oracle in each)
        for other in others:
            assert total_error(other.gradients, one.gradients) < 1e-13
            assert any(not torch.equal(g, one.gradients[n]) for n, g in other.gradients.items())
    rows = [6, 2, 3]
    every = keyed_uniform(3, 0, 5, (9, 4), (0, 1))
    assert torch.equal(keyed_uniform(3, 0, 5, (3, 4), (0, 1), rows), every[rows])
    with pytest.raises(ShardwiseError, match="3 rows have numbers, and a random tensor has 4"):
        keyed_uniform(3, 0, 5, (4, 4), (0, 1), rows)


def test_dropout_uses_the_keyed_mask_of_its_ordinal_step_and_row() -> None:
    """p = 0 counts, dropout outside training does not, and the second step draws anew."""
    seen: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        x = F.dropout(F.dropout(x, 0.5, training=False), 0.0)
        y = F.dropout(torch.ones_like(x), 0.5)
        seen.append(y.detach())
        return x * y

    oracle = Oracle(Noisy(function), seed=5, microbatches=2)
    oracle.step({"x": torch.randn(5, 4)})
    seen.clear()
    oracle.step({"x": torch.randn(5, 4)})
    mask = keyed_mask(0.5, 5, 1, 1, (5, 4), (0, 1))
    assert torch.equal(torch.cat(seen) != 0, mask)
    assert [len(y) for y in seen] == [2, 3]


def test_randn_and_rand_are_the_keyed_values() -> None:
    seen: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        seen.extend((torch.randn(3, 4), torch.rand(x.shape, dtype=torch.float32)))
        return x * seen[-2][0] * seen[-1]

    Oracle(Noisy(function), seed=2).step({"x": torch.randn(5, 4)})
    assert torch.equal(seen[-2], keyed_normal(2, 0, 0, (3, 4), None, dtype=torch.float64))  # no batch dim
    assert torch.equal(seen[-1], keyed_uniform(2, 0, 1, (5, 4), (0, 1), dtype=torch.float64))


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_inside_multi_head_attention_is_seen(need_weights: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=need_weights)[0].pow(2).mean()

    model, batch = Model(), {"x": torch.randn(5, 4, 8)}
    one, many = (Oracle(model, microbatches=m).step(batch) for m in (1, 2))
    assert many.loss == pytest.approx(one.loss, rel=1e-13)
    assert largest(many.gradients, one.gradients) < 1e-14
    assert one.loss != Oracle(model, seed=1).step(batch).loss


def test_attention_spelled_out_equals_torchs() -> None:
    """With a vanishing dropout probability, for every mask, scale and grouping."""
    q, k, v = torch.randn(3, 4, 5, 8), torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5, 8)
    boolean = torch.ones(5, 5, dtype=torch.bool).tril(1)
    for options in (
        {},
        {"is_causal": True},
        {"attn_mask": boolean},
        {"attn_mask": torch.randn(5, 5)},
        {"scale": 0.3},
    ):
        results = []
        for p in (0.0, 1e-14):
            seen: list[Tensor] = []

            def function(x: Tensor) -> Tensor:
                wide = (t[: x.shape[0]].double() for t in (q, k, v))
                seen.append(F.scaled_dot_product_attention(*wide, dropout_p=p, enable_gqa=True, **options))  # noqa: B023
                return x + seen[-1].sum()  # noqa: B023

            Oracle(Noisy(function)).step({"x": torch.randn(3, 4)})
            results.append(seen[-1])
        assert (results[0] - results[1]).abs().max() < 1e-13, options


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("poisson", lambda x: x * torch.poisson(x.detach().sigmoid())),
        ("randperm", lambda x: x[torch.randperm(x.shape[0])]),
        ("binomial", lambda x: x * torch.binomial(torch.full_like(x, 5), x.detach().sigmoid())),
        ("gamma", lambda x: x * torch.distributions.Gamma(torch.full_like(x, 2), 1.0).sample()),
        ("dirichlet", lambda x: x * torch.distributions.Beta(torch.full_like(x, 2), 1.0).sample()),
        ("normal_", lambda x: x * nn.init.normal_(torch.empty_like(x))),
    ],
)
def test_what_cannot_be_keyed_is_refused_by_name(name: str, function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ShardwiseError, match=name):
        Oracle(Noisy(function)).step({"x": torch.randn(5, 4)})


def test_a_number_of_draws_that_depends_on_the_rows_is_refused() -> None:
    varying = Noisy(lambda x: F.dropout(x, 0.5) if x.shape[0] % 2 else x)
    with pytest.raises(ShardwiseError, match="depend"):
        Oracle(varying).step({"x": torch.randn(5, 4)})


def test_checkpointed_dropout_is_refused() -> None:
    """It would be drawn again in backward, outside the forward that numbers the draws."""
    from torch.utils.checkpoint import checkpoint

    model = Noisy(lambda x: checkpoint(lambda t: F.dropout(t, 0.5) ** 2, x, use_reentrant=False))
    with pytest.raises(ShardwiseError, match="checkpoint"):
        Oracle(model).step({"x": torch.randn(5, 4)})


# ---- precision -----------------------------------------------------------------------------------


class Narrow(nn.Module):
    """Insists on narrower floats everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("frequencies", torch.arange(6).float() / 7)
        self.plain = torch.full((6,), 1 / 3)  # no buffer: module.double() would not find it

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).float() * torch.arange(6, device=x.device).to(torch.bfloat16) * self.frequencies
        y = y + torch.full((6,), 1 / 3, dtype=torch.float32) * self.plain + torch.tensor(0.1) + torch.arange(1, 7) / 7
        y = (
            y.softmax(-1, dtype=torch.float32).type_as(x)
            + torch.ones(6).half() / 3
            + torch.zeros(6, dtype=torch.float16)
        )
        y = y.cumsum(-1, dtype=torch.float32).sum(-1, dtype=torch.float32) + y.to(torch.float32, copy=True).mean(-1)
        return (y.half() ** 2).mean()


def test_fp64_promotes_every_narrow_cast() -> None:
    model = Narrow()
    x = torch.randn(4, 6)
    oracle = Oracle(model)
    result = oracle.step({"x": x})

    with torch.no_grad():
        linear = copy.deepcopy(model.linear).double()
        frequencies, plain = model.frequencies.double(), model.plain.double()
        y = linear(x.double()) * torch.arange(6).double() * frequencies
        y = y + plain.new_tensor(1 / 3) * plain + 0.1 + torch.arange(1, 7, dtype=torch.float64) / 7
        y = y.softmax(-1) + torch.ones(6, dtype=torch.float64) / 3
        y = y.cumsum(-1).sum(-1) + y.mean(-1)
    assert result.loss == pytest.approx(float((y**2).mean()), rel=1e-14)
    assert all(
        t.dtype is torch.float64
        for t in (*result.gradients.values(), *result.parameters.values(), *result.buffers.values())
    )
    assert oracle.promotions >= 9
    assert model(x).dtype is torch.float16  # the user's module is as it was


def test_no_promotions_in_a_model_without_casts() -> None:
    oracle = Oracle(nn.Linear(3, 2), lambda y, b: (y**2).mean())
    oracle.step({"input": torch.randn(4, 3)})
    assert oracle.promotions == 0


def test_transformers_llama_in_fp64_and_tied_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 17,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attn_implementation="sdpa"))
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=17, n_embd=16, n_layer=2, n_head=2, n_positions=8)
    )
    tokens = torch.randint(0, 17, (5, 8))
    labels = tokens.masked_fill(torch.rand(5, 8) < 0.3, -100)
    for model, drops in ((llama, False), (gpt2.train(), True)):
        batch = {"input_ids": tokens, "labels": labels}
        one, many = (Oracle(model.train(), microbatches=m) for m in (1, 3))
        a, b = one.step(batch), many.step(batch)
        assert b.loss == pytest.approx(a.loss, rel=1e-12)
        assert largest(b.gradients, a.gradients) < 1e-13
        assert (len(one._random.draws) > 0) == drops
        if not drops:
            assert one.promotions > 0
            reference = copy.deepcopy(model)(**batch).loss.item()
            assert a.loss == pytest.approx(reference, rel=1e-5)


def test_grouped_matmul_of_doubles() -> None:
    """Mixture-of-experts models call it, and torch has no kernel for doubles."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8, 16))

        def forward(self, x: Tensor, stops: Tensor) -> Tensor:
            return torch._grouped_mm(x, self.weight, offs=stops[0].clamp(max=x.shape[0]).to(torch.int32)).pow(2).mean()

    model, x = Experts(), torch.randn(10, 8)
    result = Oracle(model).step({"x": x, "stops": torch.tensor([[2, 2, 10]] * 10)})
    weight = model.weight.detach().double().requires_grad_()
    loss = torch.cat([x[:2].double() @ weight[0], x[2:].double() @ weight[2]]).pow(2).mean()
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-14)
    assert largest(result.gradients, {"weight": weight.grad}) < 1e-15


def test_bf16_is_near_fp64_and_not_equal() -> None:
    model, batch = Tiny(p=0.2), language_batch()
    truth = Oracle(model).step(batch)
    for microbatches in (1, 3):
        low = Oracle(model, precision="bf16", optimizer=ADAMW, microbatches=microbatches).step(batch)
        for name, gradient in low.gradients.items():
            assert gradient.dtype is torch.float32
            error = float((gradient - truth.gradients[name]).norm() / truth.gradients[name].norm())
            assert 1e-4 < error < 0.1, name
        assert low.loss == pytest.approx(truth.loss, rel=0.02) and low.loss != truth.loss
    assert all(p.dtype is torch.float32 for p in low.parameters.values())


def test_small_gradients_in_fp16_need_a_loss_scale() -> None:
    """Those of a loss 2^-24 times as large; in fp64 the scale changes nothing."""

    def small(y: Any, fields: Any) -> Tensor:
        return y["loss"] * 2.0**-24

    model, batch = Tiny(), language_batch()
    truth = Oracle(model, small, microbatches=3).step(batch).gradients
    scaled, lost = (
        Oracle(model, small, microbatches=3, precision="fp16", loss_scale=scale).step(batch).gradients
        for scale in (2.0**30, 1.0)
    )
    assert total_error(scaled, truth) < 5e-3 < 0.5 < total_error(lost, truth)
    assert largest(Oracle(model, small, microbatches=3, loss_scale=2.0**30).step(batch).gradients, truth) < 1e-15


def test_bf16_masters_take_small_steps() -> None:
    """An update too small for bf16 is kept in the fp32 master."""
    model = nn.Linear(4, 4)
    oracle = Oracle(
        model,
        lambda y, b: y.float().mean(),
        plain_optimizer(OptimizerChoice(name="sgd", lr=1e-5)),
        precision="bf16",
    )
    result = oracle.step({"input": torch.ones(2, 4)})
    moved = result.parameters["weight"] - model.weight
    assert 0 < moved.abs().max() < 1e-5
    assert torch.equal(oracle.module.weight, oracle.masters["weight"].bfloat16())


def test_bf16_keeps_batch_norm_and_buffers_in_fp32() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
    batch = {"input": torch.randn(6, 2, 4, 4), "labels": torch.randint(0, 3, (6,))}
    seen = []

    def loss(y: Tensor, fields: Any) -> Tensor:
        seen.append((y.dtype, F.cross_entropy(y, fields["labels"]).dtype))
        return F.cross_entropy(y, fields["labels"])

    oracle = Oracle(model, loss, precision="bf16")
    result = oracle.step(batch)
    assert {n: p.dtype for n, p in oracle.module.named_parameters()}["1.weight"] is torch.float32
    assert oracle.module[0].weight.dtype is torch.bfloat16
    assert result.buffers["1.running_mean"].dtype is torch.float32
    assert seen[-1] == (torch.bfloat16, torch.float32)


def test_fp32_equals_a_plain_loop() -> None:
    model, batch = Tiny(), language_batch()
    result = Oracle(model, precision="fp32").step(batch)
    loss = model(**batch)["loss"]
    loss.backward()
    assert result.loss == loss.item()
    assert largest(result.gradients, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}) == 0


# ---- bad input -----------------------------------------------------------------------------------


def test_impossible_batches_and_losses_are_refused() -> None:
    batch = language_batch()
    with pytest.raises(ShardwiseError, match="rows"):
        Oracle(Tiny()).step({"tokens": batch["tokens"], "labels": batch["labels"][:3]})
    with pytest.raises(ShardwiseError, match="ignored"):
        Oracle(Tiny()).step({**batch, "labels": torch.full_like(batch["labels"], -100)})
    with pytest.raises(ShardwiseError, match="scalar loss"):
        Oracle(nn.Linear(3, 2)).step({"input": torch.randn(4, 3)})
