"""Whole models at tiny sizes: our own, the shapes that training takes elsewhere, and those of transformers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models import GPT, Llama

ROWS, LENGTH, WORDS = 7, 12, 31


class Chain(nn.Module):
    """Numbered linears without a bias, a relu after each; what comes in has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


class Blocks(nn.Module):
    """Three equal blocks of a linear and a tanh, and how far what comes out is from ``y``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


@dataclass
class Model:
    """A module in fp32, a batch for it, a loss function if the module has none, and its constructor."""

    module: nn.Module
    batch: dict[str, Tensor]
    loss: Callable[[Any, Any], Tensor] | None
    build: Callable[[], nn.Module]

    @staticmethod
    def of(
        build: Callable[[], nn.Module], batch: dict[str, Tensor], loss: Callable[[Any, Any], Tensor] | None = None
    ) -> Model:
        return Model(build(), batch, loss, build)


# ---- our own ---------------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Stage(nn.Module):
    """Two convolutions around a shortcut, BatchNorm after each (He et al. 2015)."""

    def __init__(self, wide: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(wide, out, 3, stride, 1, bias=False),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out, momentum=0.3)
        self.short = (
            nn.Sequential(nn.Conv2d(wide, out, 1, stride, bias=False), nn.BatchNorm2d(out, affine=False))
            if stride > 1
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += x if self.short is None else self.short(x)
        return F.relu_(y)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.stages = nn.ModuleList([Stage(4, 4, 1), Stage(4, 6, 2), Stage(6, 6, 1)])
        self.drop, self.head = nn.Dropout2d(0.2), nn.Linear(6, 3)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for stage in self.stages:
            x = stage(x)
        return self.head(self.drop(x).mean((2, 3)))


class Pairs(nn.Module):
    """Two encoders and in-batch negatives both ways (Radford et al. 2021), and a second view of one side (Chen et al.
    2020).
    """

    def __init__(self, words: int) -> None:
        super().__init__()
        self.text, self.words = (
            nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)),
            nn.Embedding(words, 6, padding_idx=0),
        )
        self.image = nn.Sequential(nn.Linear(5, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: Tensor, x: Tensor) -> dict[str, Tensor]:
        seen = (tokens != 0).unsqueeze(-1)
        pooled = (self.words(tokens) * seen).sum(1) / seen.sum(1).clamp(min=1)
        a, b = F.normalize(self.text(pooled), dim=-1), F.normalize(self.image(x), dim=-1)
        scores = self.scale.exp() * a @ b.T
        labels = torch.arange(scores.shape[0], device=scores.device)
        loss = (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2
        views = F.normalize(torch.cat([self.image(x), self.image(x * 1.1)]), dim=-1)
        n = views.shape[0]
        similar = (views @ views.T * 2).masked_fill(torch.eye(n, dtype=torch.bool, device=x.device), -1e9)
        twin = (torch.arange(n, device=x.device) + n // 2) % n
        return {"loss": loss + 0.3 * F.cross_entropy(similar, twin) + 0.01 * self.scale.square()}


class Tagger(nn.Module):
    """A recurrent tagger: LSTM, tied embedding, masked targets."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 6)
        self.lstm = nn.LSTM(6, 6, batch_first=True, bidirectional=False)
        self.out = nn.Linear(6, words, bias=False)
        self.out.weight = self.words.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        y, _ = self.lstm(self.words(tokens))
        return F.cross_entropy(self.out(y).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


class FusedBlock(nn.Module):
    """Attention with queries, keys and values in one weight, and two MLPs of unequal width in one, taken apart by
    split, slices or a view.
    """

    SIZE, WIDTH, LOW, UP = 4, 24, 30, 42  # of a head, of the model, of the MLPs

    def __init__(self, heads: int, shared: int, how: str) -> None:
        super().__init__()
        self.heads, self.shared, self.how = heads, shared, how
        self.norm1, self.norm2 = nn.LayerNorm(self.WIDTH), nn.LayerNorm(self.WIDTH)
        self.qkv = nn.Linear(self.WIDTH, (heads + 2 * shared) * self.SIZE)
        self.out = nn.Linear(heads * self.SIZE, self.WIDTH, bias=False)
        self.up = nn.Linear(self.WIDTH, self.LOW + self.UP)
        self.low, self.down = nn.Linear(self.LOW, self.WIDTH), nn.Linear(self.UP, self.WIDTH)

    def parts(self, x: Tensor) -> list[Tensor]:
        h, s = self.heads, self.shared
        b, n, _ = x.shape
        if self.how == "view":
            return [one.transpose(1, 2) for one in x.view(b, n, h + 2 * s, self.SIZE).split([h, s, s], 2)]
        if self.how == "slices":
            cut = [x[..., : h * self.SIZE], x[..., h * self.SIZE : (h + s) * self.SIZE], x[..., (h + s) * self.SIZE :]]
        else:
            cut = list(x.split([h * self.SIZE, s * self.SIZE, s * self.SIZE], -1))
        return [one.view(b, n, -1, self.SIZE).transpose(1, 2) for one in cut]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(self.qkv(self.norm1(x)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        low, up = self.up(self.norm2(x)).split([self.LOW, self.UP], -1)
        return x + self.down(F.gelu(up)) + self.low(F.silu(low))


class Fused(nn.Module):
    """A language model of two such blocks."""

    def __init__(self, heads: int, shared: int, how: str, words: int = WORDS) -> None:
        super().__init__()
        self.words = nn.Embedding(words, FusedBlock.WIDTH)
        self.blocks = nn.ModuleList(FusedBlock(heads, shared, how) for _ in range(2))
        self.head = nn.Linear(FusedBlock.WIDTH, words, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def accuracy_loss(output: Tensor, fields: Any) -> Tensor:
    return F.cross_entropy(output, fields["label"])


def squared_loss(output: Tensor, fields: Any) -> Tensor:
    return F.mse_loss(output, fields["y"])


def tokens(seed: int = 0, rows: int = ROWS, words: int = WORDS) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, words, (rows, LENGTH), generator=g)
    labels = torch.randint(1, words, (rows, LENGTH), generator=g)
    for row in range(rows):  # unequal over ranks and microbatches
        labels[row, : row * LENGTH // rows] = -100
    return {"input_ids": ids, "labels": labels}


def images(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def classes(rows: int = ROWS, count: int = 3) -> Tensor:
    return torch.randint(0, count, (rows,), generator=torch.Generator().manual_seed(4))


def padded(batch: dict[str, Tensor], ones: bool = False) -> dict[str, Tensor]:
    mask = torch.ones_like(batch["input_ids"])
    if not ones:
        mask[1, LENGTH // 2 :] = 0
        mask[4, 3:] = 0
    return {**batch, "attention_mask": mask}


def own(name: str, words: int) -> Model:
    torch.manual_seed(5)
    batch = tokens(words=words)
    x = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(6))
    sizes: dict[str, Any] = {"vocabulary": words, "width": 16, "layers": 2, "heads": 4, "context": LENGTH}
    if name == "gpt":
        return Model.of(lambda: GPT(**sizes, dropout=0.1), batch)
    if name == "llama":
        return Model.of(lambda: Llama(**sizes, kv_heads=2), batch)
    if name == "mlp":
        return Model.of(
            MLP, {"x": x, "y": torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(7))}, squared_loss
        )
    if name == "convnet":
        return Model.of(ConvNet, {"image": images(), "label": classes()}, accuracy_loss)
    if name == "pairs":
        return Model.of(lambda: Pairs(words), {"tokens": batch["input_ids"] * (batch["labels"] != -100), "x": x})
    if name == "fused":
        return Model.of(lambda: Fused(8, 4, "split", words), batch)
    assert name == "tagger"
    return Model.of(lambda: Tagger(words), {"tokens": batch["input_ids"], "labels": batch["labels"]})


# ---- transformers ----------------------------------------------------------------------------------------------------

LATENT = {
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def hugging(name: str, words: int) -> Model:
    import transformers as t

    torch.manual_seed(8)
    common: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text = {**common, "vocab_size": words, "max_position_embeddings": 32}
    grouped = {**text, "num_key_value_heads": 2}
    kind, _, variant = name.partition(" ")
    batch = tokens(words=words)
    build: Callable[[Any], nn.Module]
    config: Any
    if kind == "llama":
        build, config = (
            t.LlamaForCausalLM,
            t.LlamaConfig(**grouped, attention_dropout=0.1 if variant == "padded" else 0.0),
        )
    elif kind == "gpt2":
        build, config = (
            t.GPT2LMHeadModel,
            t.GPT2Config(vocab_size=words, n_embd=16, n_layer=2, n_head=4, n_positions=32),
        )
    elif kind == "opt":
        build, config = t.OPTForCausalLM, t.OPTConfig(**text, ffn_dim=24, word_embed_proj_dim=16)
    elif kind == "bloom":
        sizes = {"vocab_size": words, "hidden_size": 16, "n_layer": 2, "n_head": 4}
        build, config = t.BloomForCausalLM, t.BloomConfig(**sizes, hidden_dropout=0.1, attention_dropout=0.1)
    elif kind == "bert":
        build, config = t.BertForMaskedLM, t.BertConfig(**text)
    elif kind == "mixtral":
        build, config = (
            t.MixtralForCausalLM,
            t.MixtralConfig(**grouped, num_local_experts=4, output_router_logits=variant == "balanced"),
        )
    elif name == "qwen3 moe":
        sizes = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 4}
        build, config = t.Qwen3MoeForCausalLM, t.Qwen3MoeConfig(**grouped, **sizes)
    elif kind == "deepseek":
        build, config = t.DeepseekV3ForCausalLM, t.DeepseekV3Config(**text, **LATENT)
    elif kind == "qwen3":
        build, config = t.Qwen3ForCausalLM, t.Qwen3Config(**grouped, head_dim=8, tie_word_embeddings=True)
    elif kind == "vit":
        build, config = t.ViTForImageClassification, t.ViTConfig(**common, image_size=8, patch_size=4, num_labels=3)
        batch = {"pixel_values": images(), "labels": classes()}
    else:
        assert kind == "resnet"
        config = t.ResNetConfig(embedding_size=4, hidden_sizes=[4, 6], depths=[1, 2], layer_type="basic", num_labels=3)
        build = t.ResNetForImageClassification
        batch = {
            "pixel_values": torch.randn(ROWS, 3, 16, 16, generator=torch.Generator().manual_seed(3)),
            "labels": classes(),
        }
    if variant in ("padded", "ones"):
        batch = padded(batch, variant == "ones")
    return Model.of(lambda: build(config), batch)


OWN = ("gpt", "llama", "mlp", "convnet", "pairs", "tagger", "fused")
TRANSFORMERS = (
    "llama", "llama padded", "llama ones", "gpt2", "gpt2 padded", "opt", "bloom", "bert", "bert padded", "mixtral",
    "mixtral balanced", "mixtral padded",
    "qwen3", "qwen3 padded", "vit", "resnet",
)  # fmt: skip


def make(name: str, words: int = WORDS) -> Model:
    """A model by ``own gpt`` or by a name of TRANSFORMERS; those that have tables of words have one of so many rows."""
    return own(name.removeprefix("own "), words) if name.startswith("own ") else hugging(name, words)


NAMES = (*(f"own {n}" for n in OWN), *TRANSFORMERS)
