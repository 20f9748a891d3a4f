"""``shardwise convert``: every key of another library's config gets an answer, and the config that is made is legal."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.config import load_config
from shardwise.config.reference import reference
from shardwise.core.errors import ConfigError
from shardwise.integrations.configs import accelerate, deepspeed, fsdp
from shardwise.integrations.configs.answers import Context, answered
from shardwise.integrations.configs.read import convert

KEYS = {key.name for keys in reference().values() for key in keys}


def written(folder: Path, name: str, values: dict[str, Any]) -> Path:
    path = folder / name
    path.write_text(json.dumps(values))  # YAML, too
    return path


def made(folder: Path, name: str, values: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The settings that a file makes, by dotted names; each is a key of shardwise's config."""
    found = convert(written(folder, name, values), **more)
    assert not [line.key for line in found.lines if line.answer.kind == "unknown"]
    flat = {f"{section}.{key}": value for section, keys in found.sections.items() for key, value in keys.items()}
    assert flat.keys() <= KEYS
    return flat


def test_a_deepspeed_config(tmp_path: Path) -> None:
    values = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True},
                              "overlap_comm": True, "reduce_bucket_size": 5e8},
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": [0.8, 0.9], "eps": 1e-8, "weight_decay": 0.2}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5, "total_num_steps": 50}},
        "communication_data_type": "fp16", "tensorboard": {"enabled": True},
        "wandb": {"enabled": True, "project": "mine"}, "steps_per_print": 10,
    }  # fmt: skip
    assert made(tmp_path, "ds.json", values, ranks=2) == {
        "data.batch_size": 16, "parallel.microbatches": 2, "train.clip_norm": 0.5, "parallel.precision": "fp16",
        "train.loss_scale": "dynamic", "parallel.zero": 2, "parallel.offload": "optimizer", "optimizer.name": "adamw",
        "optimizer.betas": [0.8, 0.9], "optimizer.weight_decay": 0.2, "optimizer.schedule": "cosine",
        "optimizer.min_lr_ratio": 1e-4, "optimizer.warmup_steps": 5, "train.steps": 50, "parallel.reduce": "fp16",
        "train.loggers": ["tensorboard", "wandb"],
    }  # fmt: skip
    params = {"warmup_num_steps": 5, "total_num_steps": 50, "cos_min_ratio": 0.05}
    own = made(tmp_path, "own.json", {"train_batch_size": 8, "scheduler": {"type": "WarmupCosineLR", "params": params}})
    assert own["optimizer.min_lr_ratio"] == 0.05
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 50}}
    linear = made(tmp_path, "linear.json", {"train_batch_size": 8, "scheduler": scheduler})
    assert (linear["optimizer.schedule"], linear["optimizer.min_lr_ratio"]) == ("linear", 0.0)
    plain = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}
    assert made(tmp_path, "plain.json", plain)["optimizer.name"] == "adam"
    without = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    assert "data.batch_size" not in made(tmp_path, "without.json", without)


def test_an_accelerate_config_with_fsdp(tmp_path: Path) -> None:
    values = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16",
        "num_machines": 1, "num_processes": 2, "machine_rank": 0, "rdzv_backend": "static", "same_network": True,
        "main_training_function": "main", "use_cpu": False, "debug": False, "downcast_bf16": "no",
        "enable_cpu_affinity": False, "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False,
        "fsdp_config": {
            "fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": True,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "Block",
            "fsdp_activation_checkpointing": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_backward_prefetch": "NO_PREFETCH", "fsdp_cpu_ram_efficient_loading": True,
        },
    }  # fmt: skip
    assert made(tmp_path, "fsdp.yaml", values) == {
        "parallel.precision": "bf16", "train.devices": 2, "parallel.zero": 3, "parallel.offload": "optimizer",
        "parallel.recompute": "full", "parallel.prefetch": 0,
    }  # fmt: skip
    values["fsdp_config"] = {"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}
    values |= {"num_machines": 4}
    found = made(tmp_path, "hybrid.yaml", values)
    assert (found["parallel.gathered"], found["parallel.dp_replicate"]) == ("forward", 4)
    assert "train.devices" not in found
    values["fsdp_config"] = {"fsdp_version": 2}
    assert made(tmp_path, "default.yaml", values)["parallel.zero"] == 3


def test_an_accelerate_config_with_a_deepspeed_file(tmp_path: Path) -> None:
    written(tmp_path, "ds.json", {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 1}})
    values = {"distributed_type": "DEEPSPEED", "num_processes": 4, "num_machines": 1, "mixed_precision": "bf16",
              "deepspeed_config": {"deepspeed_config_file": "ds.json", "zero3_init_flag": False}}  # fmt: skip
    found = made(tmp_path, "accelerate.yaml", values)
    assert (found["data.batch_size"], found["parallel.zero"]) == (12, 1)
    values["deepspeed_config"] = {"deepspeed_config_file": "ds.json", "zero_stage": 3}
    with pytest.raises(ConfigError, match="it asks for parallel.zero = 1, but deepspeed_config.zero_stage asks for 3"):
        convert(written(tmp_path, "two.yaml", values))


def test_all_keys_that_the_libraries_have_are_answered() -> None:
    nested = ("fsdp_config", "deepspeed_config", "parallelism_config", "megatron_lm_config", "dynamo_config")
    names = [field.name for field in fields(ClusterConfig)]
    named = {name: None for name in names if name not in nested}
    named |= {f"parallelism_config.parallelism_config_{field.name}": 1 for field in fields(ParallelismConfig)}
    for name in named:
        assert name in accelerate.RULES or any(
            name.startswith(one[:-1]) or f"{name}." == one[:-1] for one in accelerate.RULES if one.endswith("*")
        ), name
    theirs = {field.name for field in fields(FullyShardedDataParallelPlugin)} - {"fsdp_version"}
    odd = {"state_dict_config", "optim_state_dict_config", "mixed_precision_policy"}  # objects, which no file has
    assert theirs - odd <= fsdp.RULES.keys()


def test_all_answers_are_keys_of_shardwise() -> None:
    tried = (True, False, 1, 2, 3, 0, "cpu", "nvme", "none", "bf16", "fp16", "fp32", "full_shard offload", "Adam",
             "WarmupLR", "WarmupCosineLR", [0.9, 0.9], "BACKWARD_POST", "HYBRID_SHARD", "SHARD_GRAD_OP")  # fmt: skip
    seen = set()
    for rules in (accelerate.RULES, deepspeed.RULES, fsdp.RULES):
        for name in rules:
            for value in tried:
                try:
                    (line,) = answered({name: value}, rules, Context({name: value}, ranks=6, hosts=2))
                except ConfigError:
                    continue
                assert line.answer.why or line.answer.settings
                seen |= line.answer.settings.keys()
    assert seen <= KEYS
    assert {"parallel.dp_replicate", "parallel.offload", "parallel.recompute", "parallel.tp", "parallel.pp"} <= seen


def test_the_command(tmp_path: Path) -> None:
    path = written(tmp_path, "ds.json", {"train_batch_size": 8, "zero_optimization": {"stage": 3, "stag": 1}})
    out = tmp_path / "mine.toml"
    run = CliRunner().invoke(app, ["convert", str(path), "--out", str(out)])
    assert run.exit_code == 0, run.output
    assert "Did you mean" in run.output and "parallel.zero = 3" in run.output
    assert tomllib.loads(out.read_text()) == {"data": {"batch_size": 8}, "parallel": {"zero": 3}}
    assert load_config(out, ["train.devices=2"]).parallel.zero == 3
    again = CliRunner().invoke(app, ["convert", str(path), "--out", str(out)])
    assert again.exit_code == 2 and "there is such a file" in again.stderr
    run = CliRunner().invoke(app, ["convert", str(path), "--json"])
    found = json.loads(run.stdout)
    assert found["config"] == {"data": {"batch_size": 8}, "parallel": {"zero": 3}}
    assert [line["kind"] for line in found["lines"]] == ["key", "key", "unknown"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", '{"zero_optimization": {"stage": 7}}', "zero_optimization.stage: 7 is not legal; legal: 0, 1, 2, 3"),
        ("a.json", "{", "JSON or YAML"),
        ("a.yaml", "a: [", "JSON or YAML"),
        ("a.yaml", "name: x", "its keys are none of a known config: name"),
        ("a.yaml", "mixed_precision: int8\nnum_machines: 1", "mixed_precision: 'int8' is not legal"),
        ("a.json", '{"fsdp": "full_shards"}', "fsdp: 'full_shards' is not legal"),
        ("a.json", "[]", "has no keys"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        convert(tmp_path / name)
    assert words in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        convert(tmp_path / "none.json")
