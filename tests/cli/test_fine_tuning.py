"""Fine-tuning as a newcomer does it: from a folder and a file of answers to a generated answer, in five commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CAPITALS = {"France": "Paris", "Italy": "Rome", "Peru": "Lima", "Egypt": "Cairo"}
ENVIRONMENT = {**os.environ, "COLUMNS": "200", "TRANSFORMERS_VERBOSITY": "error"}


def shardwise(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwise", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=ENVIRONMENT, check=False)


def output(*arguments: object) -> str:
    done = shardwise(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What others have published: here a tiny Llama of random weights, in bfloat16."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    made = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=0,
    ))  # fmt: skip
    model.generation_config = GenerationConfig(eos_token_id=0, repetition_penalty=1.01)
    model.to(torch.bfloat16).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    rows = [{"prompt": f"What is the capital of {land}?", "response": town} for land, town in CAPITALS.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    return path


@pytest.mark.slow
def test_from_a_folder_and_answers_to_a_generated_answer(folder: Path, answers: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    output(
        "tokenizer", "train", answers, "--text-field", "prompt", "--vocabulary", 300, "--out", folder / "tokenizer.json"
    )
    told = output(
        "train", f"model.pretrained={folder}", f"data.sft={answers}", f"train.run_dir={run}", "train.steps=120",
        "optimizer.lr=1e-2", "data.sequence_length=48", "data.batch_size=8", "validation.share=0", "train.devices=1",
    )  # fmt: skip
    assert "weights  model" in " ".join(told.split()) or "weights model" in " ".join(told.split()), told
    assert output("generate", run, "What is the capital of Peru?", "--chat") == "Lima\n"
    output("checkpoint", "export", run, out)
    found = json.loads(output("generate", out, "What is the capital of France?", "--chat", "--json"))
    assert (found["text"].strip(), found["ended"]) == ("Paris", True) and found["tokens"] <= 8

    before = json.loads((folder / "config.json").read_text())
    for written in (out, run / "model"):
        config = json.loads((written / "config.json").read_text())
        assert config == before, "use_cache, token ids and all else are as they were"
        for name in ("generation_config.json", "tokenizer.json"):
            assert (written / name).read_bytes() == (folder / name).read_bytes()
    from transformers import AutoModelForCausalLM

    ours, theirs = (AutoModelForCausalLM.from_pretrained(one) for one in (run / "model", out))
    assert ours.dtype == torch.bfloat16 and ours.generation_config.repetition_penalty == 1.01
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in ours.state_dict().items())

    cut = shardwise("generate", out, "x" * 200, "--chat")
    assert cut.returncode == 2 and "the model knows 64 positions" in cut.stderr and "a shorter prompt" in cut.stderr


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("lora", [(), ("model.lora.rank=4",)], ids=["all weights", "adapters"])
def test_the_trained_weights_are_evaluated(folder: Path, answers: Path, tmp_path: Path, lora: tuple[str, ...]) -> None:
    """Those of the run's checkpoint, with its adapters, and not those that training has begun with."""
    run, held_out = tmp_path / "run", tmp_path / "held_out.jsonl"
    held_out.write_text("".join(answers.read_text().splitlines(keepends=True)[:3]))
    config = tmp_path / "train.toml"
    config.write_text(f'[train]\nrun_dir = "{run}"\n')
    output(
        "tokenizer", "train", answers, "--text-field", "prompt", "--vocabulary", 300, "--out", folder / "tokenizer.json"
    )
    result = json.loads(output(
        "train", config, f"model.pretrained={folder}", *lora, f"data.sft={answers}", f"validation.source={held_out}",
        "train.steps=8", "optimizer.lr=1e-2", "optimizer.schedule=constant", "data.sequence_length=48",
        "data.batch_size=8", "validation.every=1", "train.devices=1", "--json",
    ))  # fmt: skip
    found = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert result["evaluation"] == found[-1]
    assert found[-1]["validation_loss"] < found[0]["validation_loss"] - 0.1
    again = json.loads(output("evaluate", run, "--json"))
    assert again["step"] == 8 and again["rows"] == found[-1]["rows"]
    assert abs(again["validation_loss"] - found[-1]["validation_loss"]) < 1e-5


@pytest.mark.slow
def test_wrong_weights_are_refused_before_ranks_start(folder: Path, answers: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    wrong = shardwise(
        "train", "model.transformers=LlamaForCausalLM", f"model.weights={folder}", f"data.sft={answers}",
        f"train.run_dir={run}", "train.devices=2",
    )  # fmt: skip
    assert wrong.returncode == 2 and "model.weights" in wrong.stderr and "other shapes" in wrong.stderr, wrong.stderr
    assert not run.exists(), "nothing has started"


def test_folders_that_cannot_write(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text('[data]\nfactory = "x.py:f"\n')
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.toml").write_text("[model]\nwidth = 12\n")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "/no/such"}')
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((folder / "config.json").read_bytes())
    wrong = {
        "nowhere": "no such folder; legal: the folder of a run, a Hugging Face folder",
        ".": "holds neither a run nor a model",
        "run": "its data comes from data.factory",
        "new": "it has neither a checkpoint nor weights yet",
        "adapter": "it is for /no/such, which is no folder here",
        "bare": "it has no tokenizer.json",
    }
    for name, words in wrong.items():
        done = shardwise("generate", tmp_path / name, "x")
        assert done.returncode == 2 and words in done.stderr, (name, done.stderr)


@pytest.mark.slow
def test_a_model_of_our_own_writes_too(answers: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    output(
        "train", "model.name=llama", "model.width=24", "model.layers=1", "model.heads=2", f"data.sft={answers}",
        f"train.run_dir={run}", "train.steps=3", "data.sequence_length=64", "data.batch_size=4", "train.devices=1",
        "validation.share=0",
    )  # fmt: skip
    assert (run / "sample.txt").read_text().startswith("User: What is the capital of France?\n\nAssistant:")
    first = output("generate", run, "What", "--tokens", 12, "--seed", 3, "--top-k", 20)
    assert first == output("generate", run, "What", "--tokens", 12, "--seed", 3, "--top-k", 20)
    assert first != output("generate", run, "What", "--tokens", 12, "--seed", 4, "--top-k", 20)
    found = json.loads(output("generate", run, "What", "--tokens", 5, "--temperature", 0, "--json"))
    assert found["tokens"] == 5 and found["prompt"] == "What"
    for option, value in (("--tokens", 0), ("--temperature", -1), ("--top-k", 0), ("--top-p", 2), ("--seed", -1)):
        assert shardwise("generate", run, "What", option, value).returncode == 2, option
