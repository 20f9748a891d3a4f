"""Adapters of low rank: a step against plain peft, verify, and what peft makes of what a run writes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from harness import Subject, sharded_run
from shardwise.checkpoint.export import export
from shardwise.checkpoint.reader import Checkpoint, latest
from shardwise.config import Config, Hardware, build_model, load_config
from shardwise.config.lora import with_adapters
from shardwise.config.sections import ModelConfig
from shardwise.core.errors import ConfigError
from shardwise.core.optim import OptimizerChoice
from shardwise.initial.initial import record
from shardwise.launch.ready import Surroundings
from shardwise.launch.subject import compare_weights
from shardwise.launch.training import train
from shardwise.launch.verifying import verify_config
from shardwise.runtime.progress import Progress, record_path
from shardwise.verify.promote import Promote64

LORA = {"rank": 2, "alpha": 6.0, "dropout": 0.0, "targets": "all-linear"}


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(before[0])
    torch.set_float32_matmul_precision(before[1])


def llama() -> nn.Module:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    torch.manual_seed(2)
    sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def some_rows(rows: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(7)
    ids = torch.randint(0, 40, (rows, 12))
    labels = ids.clone()
    for row in range(rows):
        labels[row, : 3 + row] = -100
    return {"input_ids": ids, "labels": labels}


def plain_peft(base: nn.Module, batch: dict[str, Tensor], steps: int, lr: float) -> tuple[list[float], nn.Module]:
    """What peft's own model and torch's optimizer do on one device, in fp64."""
    settings = peft.LoraConfig(r=2, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base.double(), settings).double()
    _fill(model)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8)
    losses = []
    for _ in range(steps):
        with Promote64():
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


@torch.no_grad()
def _fill(module: nn.Module) -> None:
    """Give adapters values, for B begins with zeros, and then A would have no gradient."""
    for number, (name, one) in enumerate(module.named_parameters()):
        if ".lora_" in name:
            place = torch.arange(one.numel(), dtype=torch.float32).view(one.shape)
            one.copy_(0.1 * torch.sin(place + number))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "dp", "microbatches"), [(llama, 2, 2), (gpt2, 1, 1)])
def test_steps_are_those_of_plain_peft(make: Any, dp: int, microbatches: int) -> None:
    base = make()
    batch, lr = some_rows(), 1e-2
    ours = with_adapters(ModelConfig(transformers=type(base).__name__, lora=LORA), lambda: copy.deepcopy(base))()
    _fill(ours)
    names = [name for name, one in ours.named_parameters() if one.requires_grad]
    assert names and all(".lora_" in name for name in names)
    losses, theirs = plain_peft(copy.deepcopy(base), batch, 3, lr)
    choice = OptimizerChoice(
        "adamw", lr=lr, betas=(0.9, 0.95), weight_decay=0.1, schedule="constant", warmup_steps=0, total_steps=3
    )
    found = sharded_run(Subject(ours, batch), dp, microbatches, steps=3, optimizer=choice)
    for mine, other in zip(found.losses, losses, strict=True):
        assert abs(mine - other) <= 1e-10 * abs(other)
    assert losses[2] < losses[0]
    known = {name.removeprefix("base_model.model."): value for name, value in theirs.state_dict().items()}
    assert known.keys() == found.state.keys()
    for name, value in found.state.items():
        error = float((value.double() - known[name].double()).norm() / known[name].double().norm().clamp(min=1e-30))
        assert error <= 1e-10, (name, error)
    frozen = base.double().state_dict()
    kept = {name.replace(".base_layer.", "."): value for name, value in found.state.items() if ".lora_" not in name}
    assert all(torch.equal(kept[name], value) for name, value in frozen.items()), "frozen parameters have changed"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("folder") / "llama"
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}?", "response": f"{n}!"}) + "\n" for n in range(30)))
    return path


def configured(folder: Path, answers: Path, *overrides: str) -> Config:
    given = [
        f"model.pretrained={folder}", f"data.sft={answers}", "data.tokenizer=bytes", "data.sequence_length=48",
        "data.batch_size=4", "validation.share=0", *overrides,
    ]  # fmt: skip
    return load_config(None, given, hardware=Hardware(cores=1))


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "plan", [("parallel.dp=2", "parallel.zero=3"), ("parallel.tp=2", "parallel.dp=1", "parallel.microbatches=2")]
)
def test_verify(folder: Path, answers: Path, plan: tuple[str, ...]) -> None:
    report = verify_config(configured(folder, answers, "model.lora={rank=2, dropout=0.1}", *plan))
    assert report.passed and report.ranks_agree, (report.largest, report.worst[:3])
    assert any(".lora_A." in one.name for one in report.worst), "adapters are compared"


@pytest.mark.slow
def test_what_a_run_writes_is_for_peft_and_merges(folder: Path, answers: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = configured(
        folder, answers, "model.lora={rank=2, alpha=8}", "train.devices=1", "train.steps=4", f"train.run_dir={run}",
        "optimizer.lr=1e-2",
    )  # fmt: skip
    run.mkdir()
    train(config, Surroundings(Progress(record_path(run, 0))))
    assert not (run / "weights.safetensors").exists() and not (run / "model").exists()
    base = AutoModelForCausalLM.from_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), run / "adapter")
    last = latest(run / "checkpoints")
    assert last is not None
    checkpoint = Checkpoint.open(last)
    state = loaded.base_model.model.state_dict()
    for name, value in state.items():
        assert torch.equal(value, checkpoint.read(f"model.{name}")), name
    assert any(bool(value.any()) for name, value in state.items() if ".lora_B." in name), "it has learnt something"
    export(checkpoint, tmp_path / "adapter", adapter=True)
    ours, theirs = (load_file(one / "adapter_model.safetensors") for one in (tmp_path / "adapter", run / "adapter"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    export(checkpoint, tmp_path / "merged")
    merged, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    known = loaded.merge_and_unload().state_dict()
    for name, value in merged.state_dict().items():
        assert torch.allclose(value, known[name], rtol=1e-6, atol=1e-7), name
    ids = some_rows()["input_ids"]
    with torch.no_grad():
        assert not torch.allclose(merged(ids).logits, base(ids).logits, atol=1e-4)


WRONG = [
    ("model.lora=4", "a table such as {rank = 8"),
    ("model.lora.rank=0", "wrong rank; legal: an integer of at least 1"),
    ("model.lora.alpha=0", "wrong alpha; legal: a number above 0"),
    ("model.lora.dropout=1", "wrong dropout; legal: a number of at least 0 and below 1"),
    ("model.lora.targets=[]", "wrong targets; legal"),
    ("model.lora.ranks=4", "unknown key 'ranks'; its keys: rank, alpha, dropout, targets. Did you mean \"rank\""),
]


@pytest.mark.parametrize(("override", "words"), WRONG)
def test_wrong_settings(folder: Path, answers: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError) as found:
        configured(folder, answers, override)
    assert "model.lora" in str(found.value) and words in str(found.value)


def test_adapters_belong_to_models_of_transformers() -> None:
    with pytest.raises(ConfigError, match=r"model\.lora = .*left out, for it belongs to model\.transformers and model"):
        load_config(None, ["model.name=gpt", "model.lora.rank=4"], hardware=Hardware(cores=1))


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ('["nowhere"]', 'no layer has the name "nowhere"; legal: all-linear, q_proj, k_proj'),
        ('["q_proj", "v_prj"]', 'no layer has the name "v_prj"; legal: .* Did you mean "v_proj"'),
        ('"embed_tokens"', "embed_tokens is no linear layer; legal"),
    ],
)
def test_targets_that_are_no_linear_layers(folder: Path, answers: Path, targets: str, words: str) -> None:
    config = configured(folder, answers, f"model.lora.targets={targets}")
    with pytest.raises(ConfigError, match=rf"model\.lora = .*{words}"):
        record(build_model(config)[0])
    with pytest.raises(ConfigError, match=rf"model\.lora = .*{words}"):
        compare_weights(config)  # before any rank starts
