"""Tiny models and data for transformers' Trainer and ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)

TIMES = ("runtime", "per_second")
GIVEN: dict[str, Any] = {
    "max_steps": 8, "eval_strategy": "steps", "eval_steps": 4, "weight_decay": 0.1, "save_strategy": "steps",
    "save_steps": 4,
}  # fmt: skip


class Tokens(Dataset[dict[str, Tensor]]):
    """Rows of random tokens of one length; every third label is not counted, and other rows have other shares."""

    def __init__(self, rows: int, length: int = 12, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 48, (rows, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        hidden = torch.arange(len(tokens)) % 3 < index % 3
        return {"input_ids": tokens, "labels": tokens.masked_fill(hidden, -100)}


class Texts(Dataset[dict[str, Any]]):
    """Rows of random tokens of many lengths, with a class; :func:`pad` pads them."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 11, (rows,), generator=generator).tolist()
        self.rows = [torch.randint(1, 48, (length,), generator=generator).tolist() for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        return {"input_ids": row, "attention_mask": [1] * len(row), "labels": sum(row) % 3}


def pad(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad to the longest of a batch, as DataCollatorWithPadding does."""
    longest = max(len(one["input_ids"]) for one in samples)
    columns = {
        name: torch.tensor([one[name] + [0] * (longest - len(one[name])) for one in samples])
        for name in ("input_ids", "attention_mask")
    }
    return columns | {"labels": torch.tensor([one["labels"] for one in samples])}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
        pad_token_id=0,
    )  # fmt: skip
    return BertForSequenceClassification(config).double()


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    plain = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "num_train_epochs": 2, "learning_rate": 1e-2,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
        "log_level": "error",
    }  # fmt: skip
    return TrainingArguments(**plain | given)


def history(trainer: Any) -> list[dict[str, float]]:
    """What a trainer has logged, but for times."""
    return [{k: v for k, v in one.items() if not k.endswith(TIMES)} for one in trainer.state.log_history]


def mean_logit(found: Any) -> dict[str, float]:
    """A metric that depends on all predictions, and on their order."""
    weights = 1 + found.label_ids[:, None] + torch.arange(len(found.label_ids)).numpy()[:, None]
    return {"weighted": float((found.predictions * weights).mean())}
