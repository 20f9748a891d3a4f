"""From a folder of Hugging Face, in one file or in many, under any plan, and back into one: what transformers loads
there is what an ordinary loop gives.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers as t
from torch import Tensor, nn

from settings import Setting, drawn
from shardwise.checkpoint import Checkpoint, latest
from shardwise.checkpoint.export import export
from shardwise.config import Hardware, build_model, load_config
from shardwise.config.transformer import described
from shardwise.core.layout import rank_rows
from shardwise.core.optim import OptimizerChoice
from shardwise.core.schedules import traits
from shardwise.data.loader import AXES
from shardwise.launch.subject import start_values
from shardwise.lower.compiled import Compiled
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.train.checkpoints import Checkpoints
from shardwise.train.trainer import Trainer
from shardwise.verify.oracle import Oracle, plain_optimizer

SIZES: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3 moe": ("Qwen3Moe", {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 4}),
}
ROWS, LENGTH, STEPS = 5, 12, 2
CHOICE = OptimizerChoice("adamw", lr=1e-2, eps=1e-4)
"""With a smaller eps the first steps would multiply the rounding of small gradients by lr / eps."""
CLIP = 0.5


def published(folder: Path, model: str, most: str) -> None:
    """What others have saved, in files of at most so many bytes."""
    kind, changes = MODELS[model]
    torch.manual_seed(4)
    module = getattr(t, f"{kind}ForCausalLM")(getattr(t, f"{kind}Config")(**{**SIZES, **changes}))
    module.save_pretrained(folder, max_shard_size=most)


def loaded(folder: Path) -> nn.Module:
    found, report = t.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float64)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return found.train()  # type: ignore[no-any-return]


def files_of(folder: Path) -> int:
    """How many files of weights there are; several have an index."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        assert (folder / "model.safetensors").exists()
        return 1
    named = set(json.loads(index.read_text())["weight_map"].values())
    assert named == {path.name for path in folder.glob("*.safetensors")}
    return len(named)


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(6)
    found = [torch.randint(0, 256, (ROWS, LENGTH), generator=generator) for _ in range(STEPS)]
    return [{"input_ids": ids, "labels": ids} for ids in found]


class Trained(NamedTuple):
    """The values before the first step, the loss of each, and a checkpoint after the last."""

    start: dict[str, Tensor]
    losses: list[float]
    checkpoint: Checkpoint


def trained(source: Path, folder: Path, setting: Setting) -> Trained:
    """What ``shardwise train model.pretrained=SOURCE`` does, with ranks that are threads."""
    words = [f"model.pretrained={source}", "data.tokenizer=bytes", f"data.sequence_length={LENGTH}"]
    config = load_config(None, words, hardware=Hardware(cores=1))
    values = start_values(config, build_model(config)[0])
    given = batches()
    compiled = Compiled(values.structure(), setting.plan, given[0], initial=values)
    facts = {"model": {"transformers": described(config.model, values.module)}}

    def rank(comm: ThreadCommunicator) -> tuple[dict[str, Tensor], list[float]]:
        trainer = Trainer(compiled, CHOICE, setting.plan, {}, clip_norm=CLIP, comm=comm)
        start = {name: value.clone() for name, value in trainer.state_dict().items()}
        place = comm.mesh.axis_size(AXES), comm.mesh.index(comm.rank, AXES)
        own = [i for a, b in rank_rows(ROWS, min(setting.microbatches, ROWS), *place) for i in range(a, b)]
        with Checkpoints(trainer, folder, meta=facts) as checkpoints:
            losses = [float(trainer.engine.step({k: v[own] for k, v in one.items()}, ROWS).loss) for one in given]
            checkpoints.save()
        return start, losses

    start, losses = run_ranks(setting.plan.mesh, rank, timeout=60)[0]
    return Trained(start, losses, Checkpoint.open(latest(folder)))  # type: ignore[arg-type]


def is_as_an_ordinary_loop(source: Path, ours: Trained, out: Path) -> None:
    """What ours has started from is what transformers reads; its losses, and what is read of ``out``, are those of an
    ordinary loop from there."""
    module = loaded(source)
    first = module.state_dict()
    assert all(torch.equal(value, first[name]) for name, value in ours.start.items())
    oracle = Oracle(module, None, plain_optimizer(CHOICE), seed=0, clip_norm=CLIP, group_of=CHOICE.group_of)
    truth = [oracle.step(batch, CHOICE.learning_rate(i)) for i, batch in enumerate(batches())]
    assert ours.losses == pytest.approx([step.loss for step in truth], rel=1e-12, abs=0)
    found = {name: value.detach() for name, value in loaded(out).named_parameters()}
    assert found.keys() == truth[-1].parameters.keys()
    for name, right in truth[-1].parameters.items():
        assert float((found[name] - right).norm()) <= 1e-12 * float(right.norm()), name


def synchronous(setting: Setting) -> bool:
    return not traits(setting.pp[1]).asynchronous and sum(size > 1 for size in setting.sizes) > 1


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("model", "most", "seed"),
    [(model, most, seed) for model in MODELS for seed, most in enumerate(("9KB", "1GB", "20KB", "9KB"))],
)
def test_into_a_folder_and_out_of_it(tmp_path: Path, model: str, most: str, seed: int) -> None:
    """Twice: the second plan starts from the folder that the first has left, in fp32 as the first was."""
    rng = random.Random(f"{model} {seed}")
    family = "own llama" if model == "llama" else "mixtral"  # which has as many units, and experts or not
    first, second = (drawn(rng, synchronous, precision="fp64", model=family) for _ in range(2))
    print(f"seed {seed}: under {first}, then under {second}")
    published(tmp_path / "theirs", model, most)
    assert (files_of(tmp_path / "theirs") > 1) == (most != "1GB")
    source = tmp_path / "theirs"
    for name, setting in (("first", first), ("second", second)):
        ours = trained(source, tmp_path / name, setting)
        out = tmp_path / f"out of {name}"
        export(ours.checkpoint, out, shard_bytes=9000 if most != "1GB" else 2**30, dtype=torch.float64)
        assert (files_of(out) > 1) == (most != "1GB")
        is_as_an_ordinary_loop(source, ours, out)
        source = tmp_path / f"{name} in the dtype of the source"
        export(ours.checkpoint, source, shard_bytes=9000)
