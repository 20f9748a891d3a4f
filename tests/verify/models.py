"""The models that verify must pass on, at tiny sizes, each with a batch of rows."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.models.gpt import GPT
from shardwise.models.llama import Llama

os.environ["HF_HUB_OFFLINE"] = "1"

VOCABULARY, SEQUENCE = 61, 12
Case = tuple[nn.Module, Callable[[int], dict[str, Tensor]], Any]
"""A module, a function from rows to a batch, and a loss function or None."""


def tokens(rows: int, mask: str = "") -> dict[str, Tensor]:
    """Ids and labels with unequal numbers of ignored targets; ``mask`` is "", "ones" or "padded"."""
    ids = torch.randint(0, VOCABULARY, (rows, SEQUENCE))
    labels = torch.randint(0, VOCABULARY, (rows, SEQUENCE))
    for row in range(rows):
        labels[row, : (5 * row) % (SEQUENCE - 3)] = -100
    batch = {"input_ids": ids, "labels": labels}
    if mask:
        batch["attention_mask"] = torch.ones(rows, SEQUENCE, dtype=torch.long)
        if mask == "padded":
            batch["attention_mask"][: rows // 2, :3] = 0
    return batch


class MLP(nn.Module):
    """Frozen, unused and tied parameters in one small regression."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.layers[2].weight = self.layers[0].weight
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.mse_loss(self.head(self.frozen(x)).squeeze(-1), y) + 1e-2 * self.head.weight.pow(2).sum()


class ConvNet(nn.Module):
    """Convolutions, BatchNorm, dropout and a classifier; without a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.block(a, b) for a, b in ((3, 6), (6, 8))))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 5)

    @staticmethod
    def block(width: int, out: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(width, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.drop(self.blocks(image).mean((2, 3))))


class Contrastive(nn.Module):
    """Two views, negatives from the whole batch: the loss mixes all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        u, v = (F.normalize(self.net(t), dim=-1) for t in (a, b))
        scores = u @ v.T / 0.2
        labels = torch.arange(scores.shape[0], device=scores.device)
        return F.cross_entropy(scores, labels)


class Static(nn.Module):
    """The number of rows becomes a Python number: one graph for each size of a microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = int(x.shape[0])
        scale = [1.0] * rows
        for layer in self.layers:
            x = F.gelu(layer(x)) * torch.tensor(scale)[:, None]
        return F.cross_entropy(self.head(x), (y > 0).long())


class DataDependent(nn.Module):
    """Control flow that depends on values cannot be captured; ``locals()`` keeps it from running as a part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.head = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        if h.abs().max().item() > 1e6 and locals():
            h = h * 0.5
        return F.mse_loss(self.head(self.drop(torch.tanh(self.norm(h)))).squeeze(-1), y)


def _regression(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 8), "y": torch.randn(rows)}


def _images(rows: int) -> dict[str, Tensor]:
    return {"image": torch.randn(rows, 3, 8, 8), "label": torch.randint(0, 5, (rows,))}


def image_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch["label"])


def _transformers(name: str, layers: int = 2, **changes: Any) -> nn.Module:
    import transformers as t

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    small = {"num_labels": 5, "image_size": 16, "patch_size": 4}
    model, config = {
        "llama": (t.LlamaForCausalLM, t.LlamaConfig(**sizes)),
        "qwen3": (t.Qwen3ForCausalLM, t.Qwen3Config(**sizes, head_dim=8)),
        "mixtral": (t.MixtralForCausalLM, t.MixtralConfig(**sizes, num_local_experts=4, **changes)),
        "bert": (t.BertForMaskedLM, t.BertConfig(**{k: v for k, v in sizes.items() if k != "num_key_value_heads"})),
        "gpt2": (t.GPT2LMHeadModel, t.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=layers, n_head=4, n_positions=32, bos_token_id=0,
            eos_token_id=0)),
        "vit": (t.ViTForImageClassification, t.ViTConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, hidden_dropout_prob=0.1,
            **small)),
    }[name]  # fmt: skip
    config.use_cache = False
    return model(config)


def _vit_batch(rows: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(rows, 3, 16, 16), "labels": torch.randint(0, 5, (rows,))}


CASES: dict[str, Callable[[], Case]] = {
    "gpt": lambda: (
        GPT(vocabulary=VOCABULARY, width=24, layers=2, heads=3, context=SEQUENCE, dropout=0.1),
        tokens,
        None,
    ),
    "own-llama": lambda: (
        Llama(vocabulary=VOCABULARY, width=24, layers=2, heads=4, kv_heads=2, context=SEQUENCE),
        tokens,
        None,
    ),
    "mlp": lambda: (MLP(), _regression, None),
    "conv": lambda: (ConvNet(), _images, image_loss),
    "contrastive": lambda: (Contrastive(), lambda rows: {"a": torch.randn(rows, 6), "b": torch.randn(rows, 6)}, None),
    "static": lambda: (Static(), _regression, None),
    "data-dependent": lambda: (DataDependent(), lambda rows: {"x": torch.randn(rows, 6), "y": torch.randn(rows)}, None),
    "llama": lambda: (_transformers("llama"), tokens, None),
    "llama-padded": lambda: (_transformers("llama"), lambda rows: tokens(rows, "padded"), None),
    "gpt2": lambda: (_transformers("gpt2"), tokens, None),
    "gpt2-padded": lambda: (_transformers("gpt2"), lambda rows: tokens(rows, "padded"), None),
    "bert": lambda: (_transformers("bert"), tokens, None),
    "bert-ones": lambda: (_transformers("bert"), lambda rows: tokens(rows, "ones"), None),
    "mixtral": lambda: (_transformers("mixtral"), tokens, None),
    "mixtral-aux": lambda: (
        _transformers("mixtral", output_router_logits=True),
        lambda rows: tokens(rows, "padded"),
        None,
    ),
    "qwen3": lambda: (_transformers("qwen3"), tokens, None),
    "qwen3-ones": lambda: (_transformers("qwen3"), lambda rows: tokens(rows, "ones"), None),
    "vit": lambda: (_transformers("vit"), _vit_batch, None),
}


@functools.cache
def captured(name: str) -> tuple[Compiled, Callable[[int], dict[str, Tensor]], Any]:
    """One of these in training mode, whose capture serves all plans, what makes its batches, and its loss."""
    torch.manual_seed(len(name))
    module, make, loss = CASES[name]()
    return Compiled(module.train(), Plan.of(precision="fp64"), make(13), loss), make, loss


def deep(name: str, layers: int) -> tuple[nn.Module, Callable[[int], dict[str, Tensor]]]:
    """A transformer of so many blocks, and what makes its batches: for pipelines."""
    if name == "gpt":
        return GPT(vocabulary=VOCABULARY, width=24, layers=layers, heads=3, context=SEQUENCE, dropout=0.1), tokens
    return _transformers(name, layers), tokens
